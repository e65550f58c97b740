package pgdb_test

import (
	"errors"
	"testing"

	"berth/pkg/pgdb"
	"berth/pkg/pgtest"
)

func TestTheGateNamesWhatIsMissing(t *testing.T) {
	t.Parallel()
	migrated, empty := pgtest.New(t, schema), pgtest.Empty(t)
	for name, tt := range map[string]struct {
		db     *pgdb.DB
		latest []int64
		says   string
	}{
		"an equal schema":         {migrated.DB, []int64{1, 101}, ""},
		"a newer schema":          {migrated.DB, []int64{1}, ""},
		"an older schema":         {migrated.DB, []int64{2, 101}, "schema is older than this build: run berth migrate up (missing 00002)"},
		"an empty database":       {empty.DB, []int64{1, 101}, "schema is older than this build: run berth migrate up (missing 00001, 00101)"},
		"a service's role":        {migrated.As(t, "berth_gateway"), []int64{1, 101}, ""},
		"a service on an old one": {migrated.As(t, "berth_gateway"), []int64{102}, "schema is older than this build: run berth migrate up (missing 00102)"},
	} {
		err := pgdb.Gate(t.Context(), tt.db, tt.latest)
		if (tt.says == "") != (err == nil) || err != nil && (err.Error() != tt.says || !errors.Is(err, pgdb.ErrOldSchema)) {
			t.Errorf("Gate of %s = %v, want %q", name, err, tt.says)
		}
	}
}

func TestTheGateTellsALoginWithoutAGroupWhatItLacks(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, schema)
	err := pgdb.Gate(t.Context(), db.As(t, "pg_monitor"), []int64{1})
	if err == nil || errors.Is(err, pgdb.ErrOldSchema) || pgdb.Code(err) != "42501" {
		t.Errorf("Gate without a right = %v, want the missing right", err)
	}
}
