package bindings

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"berth/pkg/pgdb"
)

// partitions returns the log's partitions by day, the default one left out.
func (c *cell) partitions() []string {
	c.t.Helper()
	rows, err := c.owner.Query(c.t.Context(), `SELECT c.relname::text FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid
		WHERE i.inhparent = 'sandbox_events'::regclass AND c.relname <> 'sandbox_events_default' ORDER BY 1`)
	if err != nil {
		c.t.Fatal(err)
	}
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		c.t.Fatal(err)
	}
	return names
}

// today is the database's day.
func (c *cell) today() time.Time {
	return value[time.Time](c, `SELECT (clock_timestamp() AT TIME ZONE 'UTC')::date`)
}

func partitionOf(day time.Time) string { return "sandbox_events_" + day.Format("20060102") }

// makeDay makes the partition of a day, as it was made when the day was to come.
func (c *cell) makeDay(day time.Time) {
	c.t.Helper()
	name := partitionOf(day)
	c.exec(`CREATE TABLE ` + name + ` PARTITION OF sandbox_events
		FOR VALUES FROM ('` + day.Format(time.DateOnly) + `+00') TO ('` + day.AddDate(0, 0, 1).Format(time.DateOnly) + `+00')`)
	c.exec(`ALTER TABLE ` + name + ` OWNER TO berth_migrator`)
}

// note writes an event that is as old as that.
func (c *cell) note(age time.Duration) {
	c.t.Helper()
	c.exec(`INSERT INTO sandbox_events (at, source, kind, sandbox_id) VALUES (clock_timestamp() - $1::interval, 'node', 'create', 's')`, age)
}

func (c *cell) logged() int64 { return value[int64](c, `SELECT count(*) FROM sandbox_events`) }

func TestPartitionsAreMadeAWeekAheadAndOnce(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	replicas := []*Bindings{c.Bindings, c.replica()}
	done := make(chan error, 2*len(replicas))
	before := c.today()
	for range 2 {
		for _, r := range replicas {
			go func() { done <- r.makePartitions(c.t.Context()) }()
		}
	}
	for range cap(done) {
		if err := <-done; err != nil {
			t.Errorf("makePartitions = %v, want none, whoever is first", err)
		}
	}
	if err := c.makePartitions(t.Context()); err != nil { // what a lock made the others leave out
		t.Fatal(err)
	}
	got := c.partitions()
	var want []string
	for ahead := range partitionsAhead + 1 {
		want = append(want, partitionOf(before.AddDate(0, 0, ahead)))
	}
	if after := c.today(); !after.Equal(before) { // midnight came meanwhile
		want = append(want, partitionOf(after.AddDate(0, 0, partitionsAhead)))
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("partitions (-want +got):\n%s", diff)
	}
	c.note(0)
	if got := value[int64](c, `SELECT count(*) FROM sandbox_events_default`); got != 0 {
		t.Errorf("%d events of today are in the default partition, want none", got)
	}
	if got := value[int64](c, `SELECT count(*) FROM pg_index AS i JOIN pg_inherits AS h ON h.inhrelid = i.indexrelid WHERE i.indrelid = $1::text::regclass`, got[0]); got != 3 {
		t.Errorf("%d indexes of a partition belong to the log's, want its three", got)
	}
}

// Nobody has made a partition: the schedulers were away for a week, or a clock was wrong.
func TestAMissingPartitionFailsNothing(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	c.listNode("a", time.Hour)
	c.mustReconcile("a", "s") // a heartbeat that has something to note
	c.note(-30 * 24 * time.Hour)
	if got := value[int64](c, `SELECT count(*) FROM sandbox_events_default`); got != 2 {
		t.Fatalf("%d events in the default partition, want both", got)
	}
	if err := c.keepPartitions(t.Context()); err != nil {
		t.Fatal(err)
	}
	today := partitionOf(c.today())
	if got := c.partitions(); !slices.Contains(got, today) {
		t.Fatalf("partitions %v, want that of today among them", got)
	}
	if got := value[int64](c, `SELECT count(*) FROM sandbox_events_default`); got != 1 {
		t.Errorf("%d events are in the default partition, want that of next month alone: today's has moved", got)
	}
	if got := c.logged(); got != 2 {
		t.Errorf("%d events, want both", got)
	}
}

func TestADayWithTooManyEarlyEventsStaysInTheDefaultPartition(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	const most = 10_000
	c.exec(`INSERT INTO sandbox_events (source, kind) SELECT 'node', 'create' FROM generate_series(0, $1::int)`, most)
	if err := c.keepPartitions(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := c.partitions(); slices.Contains(got, partitionOf(c.today())) || len(got) < partitionsAhead {
		t.Errorf("partitions %v, want those of the days to come", got)
	}
	c.note(0)
	if got := c.logged(); got != most+2 {
		t.Errorf("%d events, want %d", got, most+2)
	}
}

func TestWhatIsOlderThanTheRetentionGoesWithItsDay(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	day := c.today()
	for age := range 12 {
		old := day.AddDate(0, 0, -age)
		name := partitionOf(old)
		c.makeDay(old)
		c.exec(`INSERT INTO `+name+` (event_id, at, source, kind) VALUES ($1, $2, 'node', 'create')`, 1000+age, old)
	}
	c.note(30 * 24 * time.Hour) // in the default one
	c.note(-30 * 24 * time.Hour)
	if err := c.dropPartitions(t.Context()); err != nil {
		t.Fatal(err)
	}
	got := c.partitions()
	if want := partitionOf(day.AddDate(0, 0, -8)); slices.Contains(got, want) {
		t.Errorf("%s is still there, whose last event is older than 7 days: %v", want, got)
	}
	if want := partitionOf(day.AddDate(0, 0, -6)); !slices.Contains(got, want) {
		t.Errorf("%s is dropped, whose events are not older than 7 days: %v", want, got)
	}
	if got := value[int64](c, `SELECT count(*) FROM sandbox_events_default`); got != 1 {
		t.Errorf("%d events are in the default partition, want the old one deleted and the other kept", got)
	}
}

// Rows may be inserted and read. All else is denied to every role, on the log and on each partition.
func TestTheLogCannotBeChanged(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	if err := c.keepPartitions(t.Context()); err != nil {
		t.Fatal(err)
	}
	c.note(0)
	const denied = "42501"
	part := partitionOf(c.today())
	for _, role := range []string{"berth_scheduler", "berth_gateway", "berth_sessions", "berth_console"} {
		as := c.owner.As(t, role)
		for _, sql := range []string{
			`UPDATE sandbox_events SET kind = 'other'`, `DELETE FROM sandbox_events`, `TRUNCATE sandbox_events`, `DROP TABLE sandbox_events`,
			`UPDATE sandbox_events_default SET kind = 'other'`, `DELETE FROM sandbox_events_default`, `DELETE FROM ` + part, `DROP TABLE ` + part,
			`INSERT INTO ` + part + ` (event_id, at, source, kind) VALUES (1, clock_timestamp(), 'node', 'create')`,
			`ALTER TABLE sandbox_events DETACH PARTITION ` + part, `INSERT INTO sandbox_events (source, kind) VALUES ('node', 'create') ON CONFLICT DO NOTHING; UPDATE sandbox_events SET effect = 'bound'`,
		} {
			if _, err := as.Exec(t.Context(), sql, pgx.QueryExecModeSimpleProtocol); pgdb.Code(err) != denied {
				t.Errorf("%s: %s: %v, want SQLSTATE %s", role, sql, err, denied)
			}
		}
		for _, sql := range []string{`SELECT sandbox_events_make(current_date)`, `SELECT sandbox_events_drop('7 days')`} {
			if _, err := as.Exec(t.Context(), sql); (err == nil) != (role == "berth_scheduler") {
				t.Errorf("%s: %s: %v, want it for the scheduler alone", role, sql, err)
			}
		}
	}
	for _, sql := range []string{
		`SELECT sandbox_events_drop('23 hours')`, `SELECT sandbox_events_drop('-1 day')`, `SELECT sandbox_events_drop(NULL)`,
		`SELECT sandbox_events_make('2020-01-01')`, `SELECT sandbox_events_make(current_date + 100)`,
	} {
		if _, err := c.db.Exec(t.Context(), sql); pgdb.Code(err) != "22023" {
			t.Errorf("%s: %v, want it refused: nobody may empty the log, or fill the catalog", sql, err)
		}
	}
	if got := c.logged(); got != 1 {
		t.Errorf("%d events, want the one there was", got)
	}
}

// A long reader stops neither an insert nor, for long, the loop; and the loop does not stop inserts.
func TestPartitionsAreKeptBesideALongReader(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	if err := c.makePartitions(t.Context()); err != nil {
		t.Fatal(err)
	}
	old := c.today().AddDate(0, 0, -20)
	c.makeDay(old)
	reader, err := c.owner.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = reader.Rollback(context.WithoutCancel(t.Context())) }()
	if _, err := reader.Exec(t.Context(), `SELECT count(*) FROM sandbox_events`); err != nil {
		t.Fatal(err)
	}
	if err := c.dropPartitions(t.Context()); pgdb.Code(err) != "55P03" {
		t.Errorf("dropPartitions beside a reader = %v, want it to give up soon", err)
	}
	if err := c.db.Tx(t.Context(), func(tx pgx.Tx) error { return Note(t.Context(), tx, Event{Kind: KindAdopted, Sandbox: "s"}) }); err != nil {
		t.Errorf("Note beside a reader = %v", err)
	}
	if err := reader.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := c.dropPartitions(t.Context()); err != nil {
		t.Errorf("dropPartitions after the reader = %v", err)
	}
	if got := c.partitions(); slices.Contains(got, partitionOf(old)) {
		t.Errorf("%v: the old partition is still there", got)
	}
}

func TestEventLoopBeginsAtOnceAndEndsWithItsContext(t *testing.T) {
	t.Parallel()
	c := newCell(t)
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- c.EventLoop(ctx) }()
	limited, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for len(c.partitions()) <= partitionsAhead {
		if limited.Err() != nil {
			t.Fatal("no partitions after a minute: the loop waits for its first period")
		}
	}
	stop()
	if err := <-done; err != nil && !errors.Is(err, context.Canceled) {
		t.Errorf("EventLoop = %v, want none", err)
	}
	if got := strings.Join(c.partitions(), " "); !strings.Contains(got, partitionOf(c.today())) {
		t.Errorf("partitions %s, want that of today", got)
	}
}
