package e2e

import (
	"context"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"berth/pkg/waittest"
)

const settleLimit = 45 * time.Second // a lease and a few heartbeats

// noReservations waits until nothing holds room: with every create settled and every sandbox in its
// node's report, no row is left.
func (s *stack) noReservations() {
	s.t.Helper()
	eventually(s.t, settleLimit, func() error {
		if row := s.sql("SELECT count(*) FROM reservations"); row != "0" {
			return fmt.Errorf("%s reservations left", row)
		}
		return nil
	})
}

// creates runs n creates on the client, at most width at once, and returns the ids and every failure.
func creates(ctx context.Context, c *client, n, width int, done *atomic.Int64) (ids []string, failures []error) {
	var (
		mu    sync.Mutex
		group sync.WaitGroup
		slots = make(chan struct{}, width)
	)
	for range n {
		group.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			id, err := c.create(ctx, "shell")
			done.Add(1)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				failures = append(failures, err)
				return
			}
			ids = append(ids, id)
		})
	}
	group.Wait()
	return ids, failures
}

func TestKillingASchedulerBreaksNoCreate(t *testing.T) {
	t.Parallel()
	s := start(t, "--no-restart")
	gateway := s.client(0) // its first address is scheduler 1, so that is where its calls are
	const n, width = 24, 6
	var done atomic.Int64
	type outcome struct {
		ids      []string
		failures []error
	}
	result := make(chan outcome, 1)
	go func() {
		ids, failures := creates(t.Context(), gateway, n, width, &done)
		result <- outcome{ids, failures}
	}()
	// In the midst of it: some are done, some are under way, some have not begun.
	eventually(t, callLimit, func() error {
		if d := done.Load(); d < n/4 {
			return fmt.Errorf("%d creates done", d)
		}
		return nil
	})
	if d := done.Load(); d > n-width {
		t.Fatalf("%d of %d creates were done before the kill; the test shows nothing", d, n)
	}
	s.kill("scheduler-1")
	got := waittest.Receive(t, "the end of the creates", result)
	for _, err := range got.failures {
		t.Errorf("a client saw the kill: %v", err)
	}
	if row := s.sql("SELECT count(*) FROM bindings WHERE state = 'bound'"); row != fmt.Sprint(len(got.ids)) {
		t.Errorf("%s bound sandboxes for %d ids that clients got", row, len(got.ids))
	}
	other := s.client(1)
	for _, id := range got.ids {
		if err := other.remove(t.Context(), id); err != nil {
			t.Errorf("delete %s: %v", id, err)
		}
	}
	if err := other.life(t.Context()); err != nil {
		t.Errorf("with one scheduler: %v", err)
	}
	s.noReservations()
}

func TestAKilledGatewayCostsNothingButItsOpenExchanges(t *testing.T) {
	t.Parallel()
	s := start(t, "--no-restart")
	one, two := s.client(0), s.client(1)
	id := must[string](t)(one.create(t.Context(), "echo"))
	before := s.sql("SELECT node_id, revision, incarnation FROM bindings WHERE sandbox_id = '" + id + "'")
	s.kill("gateway-1")
	if err := two.life(t.Context()); err != nil {
		t.Errorf("create, use and delete with one gateway: %v", err)
	}
	if _, err := two.byHost(t.Context(), id, "/still"); err != nil {
		t.Errorf("the sandbox that the dead gateway made: %v", err)
	}
	if after := s.sql("SELECT node_id, revision, incarnation FROM bindings WHERE sandbox_id = '" + id + "'"); after != before {
		t.Errorf("its binding = %s, want %s", after, before)
	}
	if _, _, err := one.api(t.Context(), "GET", "/sandboxes/"+id, ""); err == nil {
		t.Error("the dead gateway answers")
	}
	if err := two.remove(t.Context(), id); err != nil {
		t.Error(err)
	}
	s.noReservations()
}

func TestAKilledNodeLeavesTheOtherAtWorkAndComesBackWithItsSandboxes(t *testing.T) {
	t.Parallel()
	s := start(t) // restarts
	c := s.client(0)
	id := must[string](t)(c.create(t.Context(), "echo"))
	const query = "SELECT node_id, incarnation FROM bindings WHERE sandbox_id = '%s' AND state = 'bound'"
	before := s.sql(fmt.Sprintf(query, id))
	name := s.sql("SELECT node_id FROM bindings WHERE sandbox_id = '" + id + "'")
	killed := s.kill(name)
	if err := c.life(t.Context()); err != nil {
		t.Errorf("create, use and delete beside a dead node: %v", err)
	}
	eventually(t, callLimit, func() error {
		_, err := c.byPair(t.Context(), id, "/again")
		return err
	})
	if after := s.sql(fmt.Sprintf(query, id)); after != before {
		t.Errorf("node and incarnation after the node came back = %q, want %q", after, before)
	}
	s.readInfo()
	if s.PIDs[name] == killed || s.PIDs[name] == 0 {
		t.Errorf("the ready file has process %d for %s, want the new one", s.PIDs[name], name)
	}
}

func TestNothingOutlivesAParentThatIsKilled(t *testing.T) {
	t.Parallel()
	data := dataFolder(t)
	s := start(t, "--data", data)
	must[string](t)(s.client(0).create(t.Context(), "echo"))
	if err := s.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	waittest.Receive(t, "the end of the killed parent", s.ended)
	s.cmd = nil
	s.nothingLeft()

	// And its data is as good as ever: the next stack on it has the sandbox.
	again := start(t, "--data", data)
	if got := again.sql("SELECT count(*) FROM bindings WHERE state = 'bound'"); got != "1" {
		t.Errorf("%s bound sandboxes after the kill, want 1", got)
	}
}

func TestARestartKeepsKeysPortsAndBindings(t *testing.T) {
	t.Parallel()
	data := dataFolder(t)
	first := start(t, "--data", data)
	id := must[string](t)(first.client(0).create(t.Context(), "echo"))
	node := first.sql("SELECT node_id FROM bindings WHERE sandbox_id = '" + id + "'")

	rival := run(t, nil, "dev", "--data", data)
	if want := "is in use by another berth dev (process "; rival.code != 1 || !contains(rival.stderr, want) {
		t.Errorf("a second berth dev on the same folder = %+v, want code 1 and %q", rival, want)
	}
	first.stop()
	if _, err := os.Stat(first.ready); !os.IsNotExist(err) {
		t.Errorf("the ready file after the stop: %v, want none", err)
	}

	second := start(t, "--data", data)
	if second.APIKey != first.APIKey || fmt.Sprint(second.Gateways) != fmt.Sprint(first.Gateways) {
		t.Errorf("key or gateways changed: %v, want %v", second.Gateways, first.Gateways)
	}
	eventually(t, callLimit, func() error {
		target, err := second.client(1).byHost(t.Context(), id, "/home")
		if err == nil && target != "/home" {
			err = fmt.Errorf("the application saw %q", target)
		}
		return err
	})
	if got := second.sql("SELECT node_id FROM bindings WHERE state = 'bound' AND sandbox_id = '" + id + "'"); got != node {
		t.Errorf("the sandbox's node after the restart = %q, want %q", got, node)
	}
	if err := second.client(0).remove(t.Context(), id); err != nil {
		t.Error(err)
	}
}

func TestCtrlCWhileItStartsLeavesNothing(t *testing.T) {
	t.Parallel()
	data := dataFolder(t)
	out := &buffer{}
	cmd := command("dev", "--data", data, "--ready-file", data+".ready")
	cmd.Stdout, cmd.Stderr = out, out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	eventually(t, callLimit, func() error {
		if !contains(out.String(), "PostgreSQL runs") {
			return fmt.Errorf("no PostgreSQL yet: %s", out)
		}
		return nil
	})
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err == nil || !contains(out.String(), "berth: interrupted") {
		t.Errorf("berth dev, interrupted = %v, want an error and the word:\n%s", err, out)
	}
	eventually(t, goneLimit, func() error {
		if left := processesNaming(t, data); len(left) > 0 {
			return fmt.Errorf("still running: %v", left)
		}
		return nil
	})
}
