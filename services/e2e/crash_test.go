package e2e

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"berth/migrations"
	"berth/pkg/migrate"
	"berth/pkg/pgtest"
	adminv1 "berth/rpc/admin/v1"
	schedulerv1 "berth/rpc/scheduler/v1"
)

// A replica is stopped where it waits for a lock that the test holds, and killed there: no hook in the program
// is needed, and what dies is the program that is shipped.

const crashNode, crashEndpoint = "crash", "http://10.0.0.1:8000"

// crashCell is a database with one node that never beats, and schedulers of its own.
type crashCell struct {
	t    *testing.T
	db   *pgtest.Database
	keep *replica // lives as long as the test
}

// replica is one scheduler process.
type replica struct {
	cmd    *exec.Cmd
	out    *buffer
	ended  chan error
	client schedulerv1.SchedulerClient
	holds  schedulerv1.PlacementsClient
	admin  adminv1.Nodes
}

func newCrashCell(t *testing.T) *crashCell {
	t.Helper()
	c := &crashCell{t: t, db: pgtest.New(t, migrations.FS)}
	c.exec(`INSERT INTO nodes (node_id, endpoint, source, capabilities) VALUES ($1, $2, 'registered', '{create_key}')`, crashNode, crashEndpoint)
	c.exec(`INSERT INTO node_leases (node_id, service_instance_id, place, expires_at, last_seen_at, reported_at_unix_ms, facts_digest, roster_digest,
	        reported_status, has_snapshot, cpu_count, memory_total_bytes)
	        VALUES ($1, 'i', '', clock_timestamp() + interval '1 day', clock_timestamp(), 0, '', '', 1, true, 8, 1::bigint << 40)`, crashNode)
	// What commits a placement or a binding passes the test's lock last, whatever the role's lock_timeout.
	c.exec(`CREATE FUNCTION at_commit() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET lock_timeout = 0 AS
	        $$ BEGIN PERFORM pg_advisory_xact_lock_shared(4711); RETURN NULL; END $$`)
	for _, table := range []string{"placements", "bindings"} {
		c.exec(`CREATE CONSTRAINT TRIGGER at_commit AFTER INSERT ON ` + table + ` DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION at_commit()`)
	}
	c.keep = c.start("berth_scheduler_keep")
	return c
}

func (c *crashCell) exec(sql string, args ...any) {
	c.t.Helper()
	if _, err := c.db.Exec(c.t.Context(), sql, args...); err != nil {
		c.t.Fatalf("%s: %v", sql, err)
	}
}

// count returns the number that a query returns.
func (c *crashCell) count(sql string, args ...any) (n int64) {
	c.t.Helper()
	if err := c.db.QueryRow(c.t.Context(), sql, args...).Scan(&n); err != nil {
		c.t.Fatalf("%s: %v", sql, err)
	}
	return n
}

// victimLogin is that of the replicas which die, so that their sessions can be told from the other's.
const victimLogin = "berth_scheduler_victim"

// start runs one more scheduler until the test ends.
func (c *crashCell) start(login string) *replica {
	t := c.t
	t.Helper()
	if err := migrate.EnsureLogin(t.Context(), c.db.URL, login, "secret", "berth_scheduler"); err != nil {
		t.Fatalf("make a login: %v", err)
	}
	database := must[*url.URL](t)(url.Parse(c.db.URL))
	database.User = url.UserPassword(login, "secret")
	var addresses [4]string
	for i := range addresses {
		var config net.ListenConfig
		l := must[net.Listener](t)(config.Listen(t.Context(), "tcp", "127.0.0.1:0"))
		addresses[i] = l.Addr().String()
		_ = l.Close() // the scheduler's now
	}
	r := &replica{out: &buffer{}, ended: make(chan error, 1)}
	r.cmd = command("scheduler", "serve", "--register", "--pool", "6", "--log-level", "warn", "--drain-delay", "0s", "--binding-grace", "1h",
		"--grpc-listen", addresses[0], "--twirp-listen", addresses[1], "--ops-listen", addresses[2], "--admin-listen", addresses[3])
	r.cmd.Env = environment("BERTH_DATABASE_URL=" + database.String())
	r.cmd.Stdout, r.cmd.Stderr = r.out, r.out
	if err := r.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { r.ended <- r.cmd.Wait(); close(r.ended) }()
	t.Cleanup(func() {
		_ = r.cmd.Process.Kill() // it may have ended
		<-r.ended
		if t.Failed() {
			t.Logf("a scheduler wrote:\n%s", r.out)
		}
	})
	eventually(t, readyLimit, func() error {
		request := must[*http.Request](t)(http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+addresses[2]+"/readyz", nil))
		answer, err := http.DefaultClient.Do(request)
		if err != nil {
			return err
		}
		_ = answer.Body.Close()
		if answer.StatusCode != http.StatusOK {
			return fmt.Errorf("/readyz: %s", answer.Status)
		}
		return nil
	})
	conn := must[*grpc.ClientConn](t)(grpc.NewClient("passthrough:///"+addresses[0], grpc.WithTransportCredentials(insecure.NewCredentials())))
	t.Cleanup(func() { _ = conn.Close() })
	r.client, r.holds = schedulerv1.NewSchedulerClient(conn), schedulerv1.NewPlacementsClient(conn)
	r.admin = adminv1.NewNodesProtobufClient("http://"+addresses[1], http.DefaultClient)
	return r
}

func (r *replica) signal(t *testing.T, s syscall.Signal) {
	t.Helper()
	if err := r.cmd.Process.Signal(s); err != nil {
		t.Fatalf("%v: %v", s, err)
	}
}

// freeze stops the process and returns once none of its threads runs: the signal waits until one of them takes it.
func (r *replica) freeze(t *testing.T) {
	t.Helper()
	r.signal(t, syscall.SIGSTOP)
	tasks := fmt.Sprintf("/proc/%d/task", r.cmd.Process.Pid)
	eventually(t, callLimit, func() error {
		for _, task := range must[[]os.DirEntry](t)(os.ReadDir(tasks)) {
			stat, err := os.ReadFile(filepath.Join(tasks, task.Name(), "stat"))
			if err != nil {
				return err
			}
			// The state follows the name, which is in brackets and may hold any byte.
			if after := stat[bytes.LastIndexByte(stat, ')')+1:]; !bytes.HasPrefix(after, []byte(" T")) {
				return fmt.Errorf("thread %s is not stopped:%.3s", task.Name(), after)
			}
		}
		return nil
	})
}

// step is where a replica dies.
type step struct {
	name  string
	block string // taken by the test; the replica's next such statement waits for it
	at    string // part of the statement that waits
	late  bool   // not there, but once what waits has gone through, before the replica hears of it
}

const atCommit = `SELECT pg_advisory_xact_lock(4711)`

// killAt starts a replica, lets call ask it for something, and kills it at the step. done reports whether what was
// asked for is in the database; it is waited for where the step is late.
func (c *crashCell) killAt(s step, args []any, call func(ctx context.Context, r *replica), done func() bool) {
	t := c.t
	t.Helper()
	victim := c.start(victimLogin)
	lock := must[*pgx.Conn](t)(pgx.Connect(t.Context(), c.db.URL))
	defer func() { _ = lock.Close(context.WithoutCancel(t.Context())) }() // its locks end with it
	for _, sql := range []string{"BEGIN", s.block} {
		var err error
		if sql == s.block {
			_, err = lock.Exec(t.Context(), sql, args...)
		} else {
			_, err = lock.Exec(t.Context(), sql)
		}
		if err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
	}
	called := make(chan struct{})
	ctx, cancel := context.WithTimeout(t.Context(), readyLimit)
	defer cancel()
	go func() {
		defer close(called)
		call(ctx, victim)
	}()
	const sessions = `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND usename = $1`
	eventually(t, callLimit, func() error {
		if c.count(sessions+` AND $2::int = ANY (pg_blocking_pids(pid)) AND query ILIKE '%' || $3 || '%'`, victimLogin, lock.PgConn().PID(), s.at) == 0 {
			return fmt.Errorf("nobody waits at %q", s.at)
		}
		return nil
	})
	if s.late {
		victim.freeze(t)
	} else {
		victim.signal(t, syscall.SIGKILL)
		<-victim.ended
	}
	if err := lock.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if s.late {
		eventually(t, callLimit, func() error {
			if !done() {
				return fmt.Errorf("what was asked for is not there")
			}
			return nil
		})
		victim.signal(t, syscall.SIGKILL)
		<-victim.ended
	}
	<-called
	eventually(t, callLimit, func() error {
		if n := c.count(sessions, victimLogin); n > 0 {
			return fmt.Errorf("%d sessions of the dead replica are left", n)
		}
		return nil
	})
}

// expire lets all holds expire, and waits until the sweep of the other replica has ended them.
func (c *crashCell) expire() {
	c.t.Helper()
	c.exec(`UPDATE reservations SET expires_at = clock_timestamp() - interval '1 second' WHERE sandbox_id IS NULL`)
	eventually(c.t, callLimit, func() error {
		if n := c.count(`SELECT count(*) FROM reservations WHERE sandbox_id IS NULL`); n > 0 {
			return fmt.Errorf("%d open holds are left past their expiry", n)
		}
		return nil
	})
}

func TestASchedulerKilledWhileItPlacesHoldsNothingTwiceAndNothingForEver(t *testing.T) {
	t.Parallel()
	c := newCrashCell(t)
	for i, s := range []step{
		{name: "reading nodes", block: `LOCK TABLE nodes IN ACCESS EXCLUSIVE MODE`, at: "FROM    nodes AS n"},
		{name: "waiting for its request", block: `SELECT pg_advisory_xact_lock(lock_key(1, 'crash' || chr(31) || $1))`, at: "lock_key(class, id) AS key"},
		{name: "writing the placement", block: `LOCK TABLE placements IN SHARE MODE`, at: "INSERT INTO placements"},
		{name: "writing the hold", block: `LOCK TABLE reservations IN SHARE MODE`, at: "INSERT INTO placements"}, // the same statement
		{name: "committing", block: atCommit, at: "COMMIT"},
		{name: "having committed", block: atCommit, at: "COMMIT", late: true},
	} {
		request := fmt.Sprintf("request-%d", i)
		schedule := func(ctx context.Context, r *replica, id string) (*schedulerv1.ScheduleResponse, error) {
			return r.client.Schedule(ctx, &schedulerv1.ScheduleRequest{
				RequestId: id, TenantId: "crash", ReservationTtlMs: 600_000, Resources: &schedulerv1.Resources{CpuMillis: 1, MemoryBytes: 1 << 20},
			})
		}
		const placed = `SELECT count(*) FROM placements WHERE tenant_id = 'crash' AND request_id = $1`
		const held = `SELECT count(*) FROM reservations AS r JOIN placements AS p USING (placement_id) WHERE p.request_id = $1`
		var args []any
		if s.name == "waiting for its request" {
			args = []any{request}
		}
		c.killAt(s, args, func(ctx context.Context, r *replica) {
			if answer, err := schedule(ctx, r, request); err == nil {
				t.Errorf("%s: the replica answered %v; the test killed it too late", s.name, answer)
			}
		}, func() bool { return c.count(placed, request) == 1 })

		if p, h := c.count(placed, request), c.count(held, request); p != h {
			t.Errorf("%s: %d placements and %d holds, want none or both", s.name, p, h)
		}
		before := c.count(`SELECT COALESCE(max(placement_id), 0) FROM placements WHERE request_id = $1`, request)
		first, err := schedule(t.Context(), c.keep, request)
		if err != nil {
			t.Fatalf("%s: asked again elsewhere: %v", s.name, err)
		}
		if before != 0 && first.GetPlacementId() != before {
			t.Errorf("%s: asked again it is placement %d, want the dead replica's %d", s.name, first.GetPlacementId(), before)
		}
		again, err := schedule(t.Context(), c.keep, request)
		if err != nil || again.GetPlacementId() != first.GetPlacementId() || again.GetReservationId() != first.GetReservationId() || again.GetSandboxId() != first.GetSandboxId() {
			t.Errorf("%s: asked once more = %v, %v, want %v", s.name, again, err, first)
		}
		if p, h := c.count(placed, request), c.count(held, request); p != 1 || h != 1 {
			t.Errorf("%s: %d placements and %d holds, want one each", s.name, p, h)
		}

		c.expire()
		if args != nil || i == 0 {
			continue // nothing is written yet
		}
		// And a request that nobody repeats.
		lost := request + "-lost"
		c.killAt(s, args, func(ctx context.Context, r *replica) { _, _ = schedule(ctx, r, lost) }, // judged by the first
			func() bool { return c.count(placed, lost) == 1 })
		c.expire()
		if n := c.count(`SELECT count(*) FROM reservations`); n != 0 {
			t.Errorf("%s: %d holds are left past their expiry", s.name, n)
		}
		if n := c.count(`SELECT count(*) FROM placements WHERE outcome = 'reserved'`); n != 0 {
			t.Errorf("%s: %d placements are reserved without a hold", s.name, n)
		}
	}
}

func TestASchedulerKilledWhileItRecordsBindsNothingTwice(t *testing.T) {
	t.Parallel()
	c := newCrashCell(t)
	for i, s := range []step{
		{name: "reading nodes", block: `LOCK TABLE nodes IN ACCESS EXCLUSIVE MODE`, at: "n.endpoint = asked.endpoint"},
		{name: "locking the hold", block: `SELECT FROM reservations FOR UPDATE`, at: "JOIN    reservations AS r ON r.reservation_id = wanted.reservation_id"},
		{name: "confirming the hold", block: `LOCK TABLE reservations IN SHARE MODE`, at: "UPDATE  reservations AS r"},
		{name: "settling the placement", block: `LOCK TABLE placements IN SHARE MODE`, at: "UPDATE placements AS p"},
		{name: "binding", block: `LOCK TABLE bindings IN SHARE MODE`, at: "INSERT INTO bindings"},
		{name: "writing the feed", block: `LOCK TABLE route_feed IN SHARE MODE`, at: "INSERT INTO bindings"}, // the same statement
		{name: "committing", block: atCommit, at: "commit"},
		{name: "having committed", block: atCommit, at: "commit", late: true},
	} {
		ctx := t.Context()
		place := func(name string) *schedulerv1.RecordAssignmentRequest {
			placed, err := c.keep.client.Schedule(ctx, &schedulerv1.ScheduleRequest{
				RequestId: fmt.Sprintf("%s-%d", name, i), TenantId: "crash", ReservationTtlMs: 600_000,
			})
			if err != nil {
				t.Fatalf("%s: place: %v", s.name, err)
			}
			return &schedulerv1.RecordAssignmentRequest{
				SandboxId: placed.GetSandboxId(), Node: placed.GetNode(), TenantId: "crash",
				ReservationId: placed.GetReservationId(), PlacementId: placed.GetPlacementId(), SealedAnswer: []byte("sealed"),
			}
		}
		for _, repeated := range []bool{true, false} {
			if !repeated && i < 2 {
				continue // nothing is written yet
			}
			record := place(fmt.Sprintf("repeated-%t", repeated))
			const bound = `SELECT count(*) FROM bindings WHERE sandbox_id = $1 AND state = 'bound'`
			const confirmed = `SELECT count(*) FROM reservations WHERE sandbox_id = $1`
			c.killAt(s, nil, func(ctx context.Context, r *replica) {
				if answer, err := r.client.RecordAssignment(ctx, record); err == nil {
					t.Errorf("%s: the replica answered %v; the test killed it too late", s.name, answer)
				}
			}, func() bool { return c.count(bound, record.SandboxId) == 1 })

			b, h := c.count(bound, record.SandboxId), c.count(confirmed, record.SandboxId)
			if b != h || s.late && b != 1 {
				t.Errorf("%s: %d bindings and %d confirmed holds after the kill, want none or both", s.name, b, h)
			}
			revision := c.count(`SELECT COALESCE(max(revision), 0) FROM bindings WHERE sandbox_id = $1`, record.SandboxId)
			if repeated {
				first, err := c.keep.client.RecordAssignment(ctx, record)
				if err != nil || len(first.GetAssigned()) != 1 {
					t.Fatalf("%s: recorded again elsewhere = %v, %v", s.name, first, err)
				}
				if got := first.GetAssigned()[0].GetRevision(); revision != 0 && got != revision {
					t.Errorf("%s: recorded again it has revision %d, want the dead replica's %d", s.name, got, revision)
				}
				again, err := c.keep.client.RecordAssignment(ctx, record)
				if err != nil || fmt.Sprint(again.GetAssigned()) != fmt.Sprint(first.GetAssigned()) {
					t.Errorf("%s: recorded once more = %v, %v, want %v", s.name, again, err, first)
				}
				for _, want := range []struct {
					what, sql string
					n         int64
				}{
					{"bindings", bound, 1},
					{"confirmed holds", confirmed, 1},
					{"feed rows", `SELECT count(*) FROM route_feed WHERE key = $1`, 1},
					{"confirmed placements", `SELECT count(*) FROM placements WHERE sandbox_ids = ARRAY[$1] AND outcome = 'confirmed' AND sealed_answer = 'sealed'`, 1},
				} {
					if got := c.count(want.sql, record.SandboxId); got != want.n {
						t.Errorf("%s: %d %s, want %d", s.name, got, want.what, want.n)
					}
				}
				revision = first.GetAssigned()[0].GetRevision()
			}
			if revision != 0 {
				if _, err := c.keep.holds.ReleaseSandbox(ctx, &schedulerv1.ReleaseSandboxRequest{SandboxId: record.SandboxId, Revision: revision}); err != nil {
					t.Errorf("%s: end the sandbox: %v", s.name, err)
				}
			}
			c.expire()
			if n := c.count(`SELECT count(*) FROM reservations`); n != 0 {
				t.Errorf("%s: %d holds are left once all has ended", s.name, n)
			}
		}
	}
}
