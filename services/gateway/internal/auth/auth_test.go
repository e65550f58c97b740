package auth_test

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"go.uber.org/goleak"

	"berth/migrations"
	"berth/pkg/pgdb"
	"berth/pkg/pgtest"
	"berth/services/gateway/internal/auth"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("github.com/jackc/pgx/v5/pgxpool.(*Pool).backgroundHealthCheck"))
}

const bootstrapKey = "berth_bootstrap-0123456789abcdefghijkl"

func bootstrap(t *testing.T) *auth.Bootstrap {
	t.Helper()
	b, err := auth.NewBootstrap("test", bootstrapKey)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// key is a key of ours: its public id, and the whole of it.
func key(n int) (public, whole string) {
	public = fmt.Sprintf("%012x", n)
	return public, "e2b_" + public + strings.Repeat("0a", 24)
}

const insertKeySQL = `
INSERT INTO principals (principal_id, tenant_id, key_sha256, public_id, scopes, role, expires_at)
VALUES (@public, @tenant, @digest, @public, @scopes, @role, clock_timestamp() + @life::interval)`

type newKey struct {
	n      int
	tenant any // nil: none
	scopes []string
	role   string
	life   any // nil: it does not expire
}

func insert(t *testing.T, db *pgdb.DB, k newKey) (public, whole string) {
	t.Helper()
	public, whole = key(k.n)
	digest := sha256.Sum256([]byte(whole))
	if k.role == "" {
		k.role = "client"
	}
	if k.scopes == nil {
		k.scopes = []string{}
	}
	_, err := db.Exec(t.Context(), insertKeySQL, pgx.StrictNamedArgs{
		"public": public, "tenant": k.tenant, "digest": digest[:], "scopes": k.scopes, "role": k.role, "life": k.life,
	})
	if err != nil {
		t.Fatal(err)
	}
	return public, whole
}

func TestAKeyGivesItsTenantAndScopes(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, migrations.FS)
	keys := auth.New(db.As(t, "berth_sessions"), bootstrap(t), auth.Config{})
	public, whole := insert(t, db.DB, newKey{n: 1, tenant: "a", scopes: []string{"sandboxes:write", "nodes:read"}})
	_, expired := insert(t, db.DB, newKey{n: 2, tenant: "a", life: "-1 s"})
	_, node := insert(t, db.DB, newKey{n: 3, tenant: "a", role: "node"})
	_, unknown := key(9)

	tests := map[string]struct {
		keys []string
		want auth.Caller
		err  error
	}{
		"a key of a tenant":               {[]string{whole}, auth.Caller{Tenant: "a", Key: public, Scopes: []string{"nodes:read", "sandboxes:write"}}, nil},
		"the bootstrap key":               {[]string{bootstrapKey}, auth.Caller{Tenant: "default", Key: "bootstrap", Scopes: []string{"cluster:admin"}}, nil},
		"no key":                          {nil, auth.Caller{}, auth.ErrUnauthorized},
		"an empty key":                    {[]string{""}, auth.Caller{}, auth.ErrUnauthorized},
		"two keys, each of them good":     {[]string{whole, bootstrapKey}, auth.Caller{}, auth.ErrUnauthorized},
		"one key twice":                   {[]string{whole, whole}, auth.Caller{}, auth.ErrUnauthorized},
		"a key with a blank behind it":    {[]string{whole + " "}, auth.Caller{}, auth.ErrUnauthorized},
		"an unknown key":                  {[]string{unknown}, auth.Caller{}, auth.ErrUnauthorized},
		"an expired key":                  {[]string{expired}, auth.Caller{}, auth.ErrUnauthorized},
		"a key that is a node's":          {[]string{node}, auth.Caller{}, auth.ErrUnauthorized},
		"a key of a mebibyte":             {[]string{strings.Repeat("a", 1<<20)}, auth.Caller{}, auth.ErrUnauthorized},
		"a prefix of the bootstrap key":   {[]string{bootstrapKey[:33]}, auth.Caller{}, auth.ErrUnauthorized},
		"the bootstrap key in other case": {[]string{strings.ToUpper(bootstrapKey)}, auth.Caller{}, auth.ErrUnauthorized},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, err := keys.Authenticate(t.Context(), http.Header{"X-Api-Key": tt.keys})
			if !errors.Is(err, tt.err) {
				t.Errorf("Authenticate = %v, want %v", err, tt.err)
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("caller (-want +got):\n%s", diff)
			}
		})
	}
}

func TestARevokedKeyEndsWithTheFeedsWord(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, migrations.FS)
	keys := auth.New(db.As(t, "berth_sessions"), nil, auth.Config{Recheck: time.Hour})
	public, whole := insert(t, db.DB, newKey{n: 1, tenant: "a"})
	otherPublic, other := insert(t, db.DB, newKey{n: 2, tenant: "a"})
	for _, k := range []string{whole, other} {
		if _, err := keys.Identify(t.Context(), k); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := db.Exec(t.Context(), `UPDATE principals SET disabled_at = clock_timestamp()`); err != nil {
		t.Fatal(err)
	}
	if _, err := keys.Identify(t.Context(), whole); err != nil {
		t.Errorf("before the feed said so: %v, want the remembered caller", err)
	}
	keys.Drop(public)
	if _, err := keys.Identify(t.Context(), whole); !errors.Is(err, auth.ErrUnauthorized) {
		t.Errorf("after the feed said so: %v, want ErrUnauthorized", err)
	}
	if _, err := keys.Identify(t.Context(), other); err != nil {
		t.Errorf("a key the feed did not name: %v", err)
	}
	keys.Drop(otherPublic)
	if _, err := keys.Identify(t.Context(), other); !errors.Is(err, auth.ErrUnauthorized) {
		t.Errorf("the other key, once named: %v, want ErrUnauthorized", err)
	}
}

func TestANewKeyWorksAlthoughItWasTriedBefore(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, migrations.FS)
	keys := auth.New(db.As(t, "berth_sessions"), nil, auth.Config{})
	public, whole := key(1)
	if _, err := keys.Identify(t.Context(), whole); !errors.Is(err, auth.ErrUnauthorized) {
		t.Fatalf("before it was made: %v", err)
	}
	insert(t, db.DB, newKey{n: 1, tenant: "a"})
	keys.Drop(public)
	if _, err := keys.Identify(t.Context(), whole); err != nil {
		t.Errorf("after it was made: %v", err)
	}
}

func TestAKeyEndsByTheDatabasesClockWithoutAWord(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, migrations.FS)
	keys := auth.New(db.As(t, "berth_sessions"), nil, auth.Config{Recheck: time.Hour})
	_, whole := insert(t, db.DB, newKey{n: 1, tenant: "a", life: "1 s"})
	if _, err := keys.Identify(t.Context(), whole); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	for {
		if _, err := keys.Identify(ctx, whole); errors.Is(err, auth.ErrUnauthorized) {
			return
		} else if err != nil {
			t.Fatalf("after its life: %v, want ErrUnauthorized", err)
		}
	}
}

func TestWithoutPostgreSQLKnownKeysWorkAndUnknownOnesAreNotRefused(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, migrations.FS)
	pool := db.As(t, "berth_sessions")
	keys := auth.New(pool, bootstrap(t), auth.Config{Recheck: time.Nanosecond})
	_, whole := insert(t, db.DB, newKey{n: 1, tenant: "a"})
	if _, err := keys.Identify(t.Context(), whole); err != nil {
		t.Fatal(err)
	}
	pool.Close()
	if caller, err := keys.Identify(t.Context(), whole); err != nil || caller.Tenant != "a" {
		t.Errorf("a known key = %+v, %v; want tenant a", caller, err)
	}
	if _, err := keys.Identify(t.Context(), bootstrapKey); err != nil {
		t.Errorf("the bootstrap key: %v", err)
	}
	_, unknown := key(2)
	if _, err := keys.Identify(t.Context(), unknown); !errors.Is(err, auth.ErrUnavailable) {
		t.Errorf("an unknown key: %v, want ErrUnavailable", err)
	}
}

func TestSomebodyMustBeAbleToCall(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, migrations.FS)
	pool := db.As(t, "berth_sessions")
	if err := auth.New(pool, bootstrap(t), auth.Config{}).Check(t.Context()); err != nil {
		t.Errorf("with a bootstrap key: %v", err)
	}
	none := auth.New(pool, nil, auth.Config{})
	if err := none.Check(t.Context()); !errors.Is(err, auth.ErrNoKey) || !strings.Contains(err.Error(), "BERTH_API_KEY") {
		t.Errorf("without any key: %v, want ErrNoKey naming BERTH_API_KEY", err)
	}
	insert(t, db.DB, newKey{n: 1, tenant: "a", life: "-1 s"})
	if err := none.Check(t.Context()); !errors.Is(err, auth.ErrNoKey) {
		t.Errorf("with an expired key alone: %v, want ErrNoKey", err)
	}
	insert(t, db.DB, newKey{n: 2, tenant: "a"})
	if err := none.Check(t.Context()); err != nil {
		t.Errorf("with a key in SQL: %v", err)
	}
}

func TestTheFirstSourceThatIsPresentDecides(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("k", 256)
	tests := map[string]struct {
		env   map[string]string
		file  string // "-": none
		want  string // "": none at all
		wrong string // part of the error
	}{
		"ours before theirs and the file":     {map[string]string{"BERTH_API_KEY": bootstrapKey, "AENV_API_KEY": long}, long, bootstrapKey, ""},
		"theirs before the file":              {map[string]string{"AENV_API_KEY": long}, bootstrapKey, long, ""},
		"the file":                            {nil, bootstrapKey, bootstrapKey, ""},
		"its line ending is cut":              {nil, bootstrapKey + "\r\n", bootstrapKey, ""},
		"258 bytes of file hold 256":          {nil, long + "\r\n", long, ""},
		"one line feed, not two":              {nil, bootstrapKey + "\n\n", "", "is not one of"},
		"a file of 259 bytes is too long":     {nil, long + "xyz", "", "longer than"},
		"nothing anywhere":                    {nil, "-", "", ""},
		"ours is empty: that is no key":       {map[string]string{"BERTH_API_KEY": "", "AENV_API_KEY": long}, bootstrapKey, "", "BERTH_API_KEY: the key has 0 characters"},
		"theirs is too short":                 {map[string]string{"AENV_API_KEY": "short"}, "-", "", "AENV_API_KEY: the key has 5 characters"},
		"31 are too few":                      {map[string]string{"BERTH_API_KEY": long[:31]}, "-", "", "31 characters"},
		"32 are enough":                       {map[string]string{"BERTH_API_KEY": long[:32]}, "-", long[:32], ""},
		"257 are too many":                    {map[string]string{"BERTH_API_KEY": long + "k"}, "-", "", "257 characters"},
		"a blank is not of the alphabet":      {map[string]string{"BERTH_API_KEY": long[:40] + " "}, "-", "", "character 41"},
		"a letter beyond ASCII is not either": {map[string]string{"BERTH_API_KEY": long[:40] + "é"}, "-", "", "character 41"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			path := filepath.Join(t.TempDir(), "api-key")
			if tt.file != "-" {
				if err := os.WriteFile(path, []byte(tt.file), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			got, err := auth.FindBootstrap(func(name string) (string, bool) { v, ok := tt.env[name]; return v, ok }, path)
			switch {
			case tt.wrong != "":
				if err == nil || !strings.Contains(err.Error(), tt.wrong) {
					t.Errorf("FindBootstrap = %v, want an error with %q", err, tt.wrong)
				}
				if err != nil && strings.Contains(err.Error(), "kkkkk") {
					t.Errorf("the error shows the key: %v", err)
				}
			case err != nil:
				t.Errorf("FindBootstrap: %v", err)
			case tt.want == "" && got != nil, tt.want != "" && got.Key() != tt.want:
				t.Errorf("FindBootstrap gave another key than %.40q", tt.want)
			}
		})
	}
}

func TestASecretThatIsNoRegularFileIsRefused(t *testing.T) {
	t.Parallel()
	none := func(string) (string, bool) { return "", false }
	if _, err := auth.FindBootstrap(none, t.TempDir()); err == nil || !strings.Contains(err.Error(), "no regular file") {
		t.Errorf("a folder as secret: %v", err)
	}
	target := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(target, []byte(bootstrapKey), 0o600); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(target, link); err != nil {
		t.Fatal(err)
	}
	if got, err := auth.FindBootstrap(none, link); err != nil || got.Key() != bootstrapKey {
		t.Errorf("a link to a secret: %v", err)
	}
}

func TestScopes(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		scopes []string
		ask    string
		want   bool
	}{
		"by name":                        {[]string{"nodes:read"}, "nodes:read", true},
		"write includes read":            {[]string{"sandboxes:write"}, "sandboxes:read", true},
		"read does not include write":    {[]string{"sandboxes:read"}, "sandboxes:write", false},
		"one family is not another":      {[]string{"sandboxes:write"}, "nodes:read", false},
		"the administrator may anything": {[]string{"cluster:admin"}, "volumes:write", true},
		"a key without scopes: nothing":  {nil, "sandboxes:read", false},
	}
	for name, tt := range tests {
		if got := (auth.Caller{Scopes: tt.scopes}).Allows(tt.ask); got != tt.want {
			t.Errorf("%s: %v allows %s = %t, want %t", name, tt.scopes, tt.ask, got, tt.want)
		}
	}
}

func TestWhoSeesASandbox(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		caller auth.Caller
		tenant string
		want   bool
	}{
		"its tenant":                      {auth.Caller{Tenant: "a"}, "a", true},
		"another tenant does not":         {auth.Caller{Tenant: "b"}, "a", false},
		"without a tenant nobody's":       {auth.Caller{Tenant: "a"}, "", false},
		"not even those without a tenant": {auth.Caller{}, "", false},
		"the administrator sees all":      {auth.Caller{Tenant: "b", Scopes: []string{auth.Admin}}, "a", true},
		"and what has no tenant":          {auth.Caller{Scopes: []string{auth.Admin}}, "", true},
	}
	for name, tt := range tests {
		if got := tt.caller.Sees(tt.tenant); got != tt.want {
			t.Errorf("%s: Sees(%q) = %t, want %t", name, tt.tenant, got, tt.want)
		}
	}
}
