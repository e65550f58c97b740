package pgdb_test

import (
	"context"
	"math/rand/v2"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"berth/pkg/pgdb"
	"berth/pkg/pgtest"
)

func TestTryLockIsRefusedUntilTheHolderEnds(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, schema)
	key := pgdb.Key{Class: 4, ID: "node-a"}
	try := func(key pgdb.Key) (held bool) {
		t.Helper()
		err := db.Tx(t.Context(), func(tx pgx.Tx) (err error) {
			held, err = pgdb.TryLock(t.Context(), tx, key)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		return held
	}
	err := db.Tx(t.Context(), func(tx pgx.Tx) error {
		if err := pgdb.Lock(t.Context(), tx, key, key); err != nil { // twice the same is once
			return err
		}
		if try(key) {
			t.Error("TryLock took a lock that another transaction holds")
		}
		if !try(pgdb.Key{Class: 5, ID: "node-a"}) || !try(pgdb.Key{Class: 4, ID: "node-b"}) {
			t.Error("TryLock was refused a lock of another class or id")
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if !try(key) {
		t.Error("TryLock was refused a lock whose holder has ended")
	}
}

func TestOverlappingLocksNeverDeadlock(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, schema)
	var workers sync.WaitGroup
	for worker := range 4 {
		workers.Go(func() {
			random := rand.New(rand.NewPCG(uint64(worker), 1))
			for range 25 {
				var keys []pgdb.Key
				for _, id := range random.Perm(20)[:8] {
					keys = append(keys, pgdb.Key{Class: 1 + id%4, ID: strconv.Itoa(id)})
				}
				runs := 0
				err := db.Tx(t.Context(), func(tx pgx.Tx) error {
					runs++
					return pgdb.Lock(t.Context(), tx, keys...)
				})
				if err != nil || runs != 1 {
					t.Errorf("worker %d with keys %v: %v in %d runs, want none in one", worker, keys, err, runs)
				}
			}
		})
	}
	workers.Wait()
}

// The read stands in a later statement than the lock, so it sees what the former holder committed.
func TestALockThenAReadLetsInExactlyAsManyAsThereIsRoom(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t, schema)
	if _, err := db.Exec(t.Context(), `CREATE TABLE holds (id int GENERATED ALWAYS AS IDENTITY)`); err != nil {
		t.Fatal(err)
	}
	var clients sync.WaitGroup
	for range 60 {
		clients.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			var err error
			for err = pgdb.ErrPoolWait; pgdb.Unavailable(err) && ctx.Err() == nil; {
				err = db.Tx(ctx, func(tx pgx.Tx) error {
					if err := pgdb.Lock(ctx, tx, pgdb.Key{Class: 4, ID: "node-a"}); err != nil {
						return err
					}
					_, err := tx.Exec(ctx, `INSERT INTO holds SELECT FROM generate_series(1, 1) WHERE 10 > (SELECT count(*) FROM holds)`)
					return err
				})
			}
			if err != nil {
				t.Error(err)
			}
		})
	}
	clients.Wait()
	var held int
	if err := db.QueryRow(t.Context(), `SELECT count(*) FROM holds`).Scan(&held); err != nil {
		t.Fatal(err)
	}
	if held != 10 {
		t.Errorf("sixty clients hold %d, want the 10 there is room for", held)
	}
}
