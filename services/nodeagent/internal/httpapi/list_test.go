package httpapi

import (
	"fmt"
	"net/url"
	"testing"
	"time"

	"pgregory.net/rapid"

	"berth/services/internal/sandbox"
	"berth/services/nodeagent/internal/sandboxes"
)

// TestPagesNeitherSkipNorRepeat: whatever there is, and however many share a start time, the pages together are the list.
func TestPagesNeitherSkipNorRepeat(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		count := rapid.IntRange(0, 30).Draw(t, "sandboxes")
		all := make([]sandboxes.View, count)
		for i := range all {
			all[i] = sandboxes.View{ID: sandbox.ID(fmt.Sprintf("s%02d", i)), State: sandboxes.State{
				StartedAt: time.Unix(int64(rapid.IntRange(0, 3).Draw(t, "start")), 0),
			}}
		}
		f := filter{limit: rapid.IntRange(1, 7).Draw(t, "limit"), ascending: rapid.Bool().Draw(t, "ascending")}
		whole, _ := filter{ascending: f.ascending}.page(all)
		var got []sandboxes.View
		for {
			page, next := f.page(all)
			got = append(got, page...)
			if next == "" {
				break
			}
			after, err := parseToken(next)
			if err != nil {
				t.Fatalf("own token: %v", err)
			}
			f.after = after
		}
		if len(got) != len(whole) {
			t.Fatalf("%d in pages of %d, %d in all", len(got), f.limit, len(whole))
		}
		for i := range got {
			if got[i].ID != whole[i].ID {
				t.Fatalf("item %d is %s in pages, %s in the whole", i, got[i].ID, whole[i].ID)
			}
		}
	})
}

func FuzzParseFilter(f *testing.F) {
	f.Add("state=running,paused&limit=7&metadata=a%252520b%3Dc&nextToken=x&startedAfter=2001-09-09T01%3A46%3A40.000Z")
	f.Fuzz(func(t *testing.T, query string) {
		got, err := parseFilter(query, true)
		if err == nil && (got.limit < 1 || got.limit > maxPage) {
			t.Errorf("parseFilter(%q) lets limit %d through", query, got.limit)
		}
	})
}

func TestMetadataSurvivesBothEncodings(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		key, value := rapid.String().Draw(t, "key"), rapid.String().Draw(t, "value")
		if key == "" {
			t.Skip("no key")
		}
		inner := url.Values{url.QueryEscape(key): {url.QueryEscape(value)}}.Encode()
		got, err := parseMetadata(inner)
		if err != nil {
			t.Fatalf("parseMetadata(%q): %v", inner, err)
		}
		if got[key] != value || len(got) != 1 {
			t.Fatalf("parseMetadata(%q) = %q, want %q: %q", inner, got, key, value)
		}
	})
}
