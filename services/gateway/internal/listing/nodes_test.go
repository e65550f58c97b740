package listing_test

import (
	"context"
	"testing"
	"time"

	"berth/migrations"
	"berth/pkg/pgdb"
	"berth/pkg/pgtest"
	"berth/services/gateway/internal/listing"
)

func TestNodesAreNotWaitedForWithoutEnd(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, migrations.FS)
	tx, err := db.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
	// This login has no limits of its own, so the read waits as it does for a server that is frozen.
	if _, err := tx.Exec(t.Context(), "LOCK TABLE nodes IN ACCESS EXCLUSIVE MODE"); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	nodes, err := listing.NewStore(db.DB).Nodes(ctx, "")
	if !pgdb.Unavailable(err) || ctx.Err() != nil {
		t.Errorf("Nodes = %v, %v, want that the database is unavailable, sooner than its caller's deadline", nodes, err)
	}
}
