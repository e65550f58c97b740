package placement

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"berth/pkg/pgdb"
	"berth/services/internal/node"
	"berth/services/internal/sandbox"
)

func TestAnExpiredHoldEndsOnceAndByAnyReplica(t *testing.T) {
	t.Parallel()
	db := newDB(t, 2, 50)
	p, other := startPlacer(t, db, DefaultConfig()), startPlacer(t, db, DefaultConfig())
	r := request()
	r.TTL = time.Millisecond
	r.Count = 2
	for range 10 {
		if _, err := p.Schedule(t.Context(), r); err != nil {
			t.Fatalf("Schedule = %v", err)
		}
	}
	kept, err := p.Schedule(t.Context(), request())
	if err != nil {
		t.Fatalf("Schedule = %v", err)
	}
	waitExpired(t, db.DB)
	if err := other.expire(t.Context()); err != nil {
		t.Fatalf("expire = %v", err)
	}
	if got := one[int](t, db.DB, "SELECT count(*) FROM placements WHERE outcome = 'expired'"); got != 10 {
		t.Errorf("%d placements expired, want 10", got)
	}
	if held := sumOf(heldOn(t, db.DB)); held != 1 {
		t.Errorf("%d holds are left, want the one whose time is not over", held)
	}
	if err := p.Extend(t.Context(), kept.ID, kept.Reservation, time.Hour); err != nil {
		t.Errorf("Extend = %v", err)
	}
	if left := one[float64](t, db.DB, "SELECT extract(epoch FROM expires_at - clock_timestamp())::float8 FROM reservations"); left < 3500 {
		t.Errorf("after Extend it holds for %.0f s, want an hour", left)
	}
	if err := p.Extend(t.Context(), kept.ID, uuid.NewString(), time.Hour); !errors.Is(err, node.ErrNotOpen) {
		t.Errorf("Extend of nothing = %v, want %v", err, node.ErrNotOpen)
	}
	if err := confirmOnce(t.Context(), db.DB, kept, newID(t)); err != nil {
		t.Fatalf("Confirm = %v", err)
	}
	if err := p.Extend(t.Context(), kept.ID, kept.Reservation, time.Hour); !errors.Is(err, node.ErrNotOpen) {
		t.Errorf("Extend of a confirmed one = %v, want %v", err, node.ErrNotOpen)
	}
}

// waitExpired returns once some hold's time is over.
func waitExpired(t *testing.T, db *pgdb.DB) {
	t.Helper()
	for one[int](t, db, "SELECT count(*) FROM reservations WHERE expires_at < clock_timestamp()") == 0 {
		if t.Context().Err() != nil {
			t.Fatal("nothing expires")
		}
	}
}

func TestAPlacementExplainsItself(t *testing.T) {
	t.Parallel()
	db := newDB(t, 0, 0)
	addNode(t, db.DB, testNode{id: "full", capacity: 1, running: 1})
	addNode(t, db.DB, testNode{id: "gone", dead: true})
	addNode(t, db.DB, testNode{id: "good", capacity: 9})
	p := startPlacer(t, db, DefaultConfig())
	placed, err := p.Schedule(t.Context(), keyed("r"))
	if err != nil {
		t.Fatalf("Schedule = %v", err)
	}
	got, err := p.Explain(t.Context(), Question{Tenant: "default", RequestID: "r"})
	if err != nil {
		t.Fatalf("Explain = %v", err)
	}
	want := Decision{
		PlacementID: placed.ID, TenantID: "default", RequestID: new("r"), Outcome: Reserved, Tries: 1, Count: 1, NodeID: new(node.ID("good")),
		ReservationID: &placed.Reservation, SandboxIDs: []sandbox.ID{}, CPUMillis: 1000, MemoryBytes: gib, Strategy: BestOfK,
		Reasons: map[Reason]int{DeclaredSandboxes: 1, Unhealthy: 1},
		Candidates: []Candidate{
			{Node: "full", Verdict: VerdictRefused, Reason: DeclaredSandboxes, Value: 2, Limit: 1},
			{Node: "gone", Verdict: VerdictRefused, Reason: Unhealthy},
			{Node: "good", Verdict: VerdictChosen},
		},
	}
	ignored := cmpopts.IgnoreFields(Decision{}, "CreatedAt", "ChangedAt")
	byNode := cmpopts.SortSlices(func(a, b Candidate) bool { return a.Node < b.Node })
	if diff := cmp.Diff(want, got, ignored, byNode, cmpopts.IgnoreFields(Candidate{}, "Score")); diff != "" {
		t.Errorf("Explain (-want +got):\n%s", diff)
	}

	box := newID(t)
	if err := confirmOnce(t.Context(), db.DB, placed, box); err != nil {
		t.Fatalf("Confirm = %v", err)
	}
	for name, q := range map[string]Question{"by id": {PlacementID: placed.ID}, "by its sandbox": {Sandbox: box}} {
		if got, err := p.Explain(t.Context(), q); err != nil || got.PlacementID != placed.ID || got.Outcome != Recorded {
			t.Errorf("%s: Explain = %+v, %v", name, got, err)
		}
	}
	for name, q := range map[string]Question{
		"an unknown id": {PlacementID: 1 << 40}, "another tenant's key": {Tenant: "another", RequestID: "r"}, "an unknown sandbox": {Sandbox: "x"},
	} {
		if _, err := p.Explain(t.Context(), q); !errors.Is(err, node.ErrNoPlacement) {
			t.Errorf("%s: Explain = %v, want %v", name, err, node.ErrNoPlacement)
		}
	}
}

func TestPlacementsAreListedNewestFirst(t *testing.T) {
	t.Parallel()
	db := newDB(t, 1, 3)
	p := startPlacer(t, db, DefaultConfig())
	for i := range 5 { // three placed, two refused
		_, err := p.Schedule(t.Context(), keyed(fmt.Sprint(i)))
		if (err == nil) != (i < 3) {
			t.Fatalf("Schedule %d = %v", i, err)
		}
	}
	listed := func(page Page) (requests []string) {
		t.Helper()
		decisions, err := p.List(t.Context(), page)
		if err != nil {
			t.Fatalf("List = %v", err)
		}
		for _, d := range decisions {
			requests = append(requests, *d.RequestID)
		}
		return requests
	}
	for name, tt := range map[string]struct {
		page Page
		want []string
	}{
		"all":                   {Page{Limit: 10}, []string{"4", "3", "2", "1", "0"}},
		"a page":                {Page{Limit: 2}, []string{"4", "3"}},
		"refused ones":          {Page{Limit: 10, Outcome: Rejected}, []string{"4", "3"}},
		"of a node":             {Page{Limit: 10, Node: "node-0"}, []string{"2", "1", "0"}},
		"of a tenant without":   {Page{Limit: 10, Tenant: "another"}, nil},
		"older than the second": {Page{Limit: 10, Before: one[int64](t, db.DB, "SELECT placement_id FROM placements WHERE request_id = '1'")}, []string{"0"}},
	} {
		if diff := cmp.Diff(tt.want, listed(tt.page)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

func TestEndedPlacementsAreForgottenInTime(t *testing.T) {
	t.Parallel()
	db := newDB(t, 1, 0)
	cfg := DefaultConfig()
	cfg.KeyRetention = time.Hour
	p := startPlacer(t, db, cfg)
	var placed []Placement
	for i := range 3 {
		got, err := p.Schedule(t.Context(), keyed(fmt.Sprint(i)))
		if err != nil {
			t.Fatalf("Schedule = %v", err)
		}
		placed = append(placed, got)
	}
	for _, ended := range placed[:2] {
		if _, err := p.Release(t.Context(), ended.ID, ended.Reservation, Canceled); err != nil {
			t.Fatalf("Release = %v", err)
		}
	}
	if _, err := db.Exec(t.Context(), "UPDATE placements SET created_at = created_at - interval '2 hours', changed_at = changed_at - CASE request_id WHEN '1' THEN interval '0' ELSE interval '2 hours' END"); err != nil {
		t.Fatal(err)
	}
	if err := p.retain(t.Context()); err != nil {
		t.Fatalf("retain = %v", err)
	}
	rows, err := db.Query(t.Context(), "SELECT request_id FROM placements ORDER BY 1")
	if err != nil {
		t.Fatal(err)
	}
	left, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"1", "2"}, left); diff != "" {
		t.Errorf("left are the one that ended lately and the one that holds room (-want +got):\n%s", diff)
	}
}

func TestAStoppedPlacerAnswersThatItCannot(t *testing.T) {
	t.Parallel()
	db := newDB(t, 1, 1)
	p := New(db.DB, DefaultConfig(), nil, nil)
	ctx, stop := context.WithCancel(t.Context())
	stop()
	if err := p.Run(ctx); err != nil {
		t.Fatalf("Run = %v", err)
	}
	if _, err := p.Schedule(t.Context(), request()); !pgdb.Unavailable(err) {
		t.Errorf("Schedule = %v, want an error that is Unavailable", err)
	}
}

func TestALostDatabaseIsUnavailableAndComesBack(t *testing.T) {
	t.Parallel()
	db := newDB(t, 1, 0)
	p := startPlacer(t, db, DefaultConfig())
	if _, err := p.Schedule(t.Context(), request()); err != nil {
		t.Fatalf("Schedule = %v", err)
	}
	// The connections of the placer die under it; the pool dials new ones.
	var failed int
	for range 20 {
		if _, err := db.Exec(t.Context(), "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'pgtest as berth_scheduler' AND datname = current_database()"); err != nil {
			t.Fatal(err)
		}
		if _, err := p.Schedule(t.Context(), request()); err != nil {
			failed++
			if !pgdb.Unavailable(err) {
				t.Errorf("Schedule on a killed connection = %v, want an error that is Unavailable", err)
			}
		}
	}
	if _, err := p.Schedule(t.Context(), request()); err != nil {
		t.Errorf("afterwards Schedule = %v, want a placement", err)
	}
	t.Logf("%d of 20 calls saw a killed connection", failed)
}
