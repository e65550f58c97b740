package pgdb_test

import (
	"context"
	"strings"
	"testing"

	"berth/pkg/pgdb"
)

// FuzzNoErrorTellsThePassword breaks a URL in every place around its password.
func FuzzNoErrorTellsThePassword(f *testing.F) {
	for _, seed := range [][2]string{
		{"postgres://u:", "@h:1/d"},
		{"postgres://u:", "@h:x/d"},
		{"postgres://u:", "/@h/d"},
		{"host=h password=", " port=x"},
		{"postgres://u:%zz", "@h/d"},
		{"postgres://u:", "@h/d?sslmode=no"},
		{"password=", "\x7f"},
	} {
		f.Add(seed[0], seed[1])
	}
	f.Fuzz(func(t *testing.T, before, after string) {
		const secret = "pa55-w0rd-of-mine"
		user, isURL := strings.CutPrefix(before, "postgres://")
		inURL := isURL && strings.HasSuffix(user, ":") && strings.Count(user, ":") == 1 && !strings.ContainsAny(user, "/?#@")
		inWords := strings.HasSuffix(" "+before, " password=") && !strings.ContainsAny(before, `:'"\\`)
		if !inURL && !inWords {
			return // then it is no password
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel() // nobody is to be dialled
		_, err := pgdb.Open(ctx, pgdb.Config{URL: before + secret + after, MinConns: -1})
		if err != nil && strings.Contains(err.Error(), secret) {
			t.Errorf("Open(%q…%q) says %v", before, after, err)
		}
	})
}
