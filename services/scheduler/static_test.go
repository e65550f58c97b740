package scheduler

import (
	"testing"

	"berth/migrations"
	"berth/pkg/pgtest"
)

func TestAStartWithoutAListTakesAnEarlierListAway(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, migrations.FS)
	databaseURL := schedulerURL(t, db)
	present := func() (nodes int) {
		t.Helper()
		if err := db.QueryRow(t.Context(), `SELECT count(*) FROM nodes WHERE present`).Scan(&nodes); err != nil {
			t.Fatal(err)
		}
		return nodes
	}
	listed := config(t, databaseURL)
	listed.Nodes = `[{"id": "old", "endpoint": "http://10.0.0.1:8000"}]`
	start(t, listed)
	if got := present(); got != 1 {
		t.Fatalf("%d nodes are present, want the listed one", got)
	}
	start(t, config(t, databaseURL))
	if got := present(); got != 0 {
		t.Errorf("%d nodes are present after a start that only registers, want none", got)
	}
}
