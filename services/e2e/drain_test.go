package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
)

// operatorEnvironment is that of an operator who knows both schedulers.
func (s *stack) operatorEnvironment() []string {
	s.t.Helper()
	text, err := os.ReadFile(filepath.Join(s.data, "state.json"))
	if err != nil {
		s.t.Fatal(err)
	}
	var state struct {
		OperatorToken string `json:"operator_token"`
	}
	if err := json.Unmarshal(text, &state); err != nil || state.OperatorToken == "" {
		s.t.Fatalf("no operator token in %s: %v", text, err)
	}
	var urls []string
	for _, scheduler := range s.Schedulers {
		urls = append(urls, scheduler.Twirp)
	}
	return []string{"BERTH_SCHEDULER_URL=" + strings.Join(urls, ","), "BERTH_SCHEDULER_TOKEN=" + state.OperatorToken}
}

// watcher is a "berth node drain --watch" that runs.
type watcher struct {
	t      *testing.T
	cmd    *exec.Cmd
	stdout *buffer
	stderr *buffer
	ended  chan error
}

func (s *stack) watch(args ...string) *watcher {
	s.t.Helper()
	w := &watcher{t: s.t, stdout: &buffer{}, stderr: &buffer{}, ended: make(chan error, 1)}
	w.cmd = exec.Command(binary, args...)
	w.cmd.Env = environment(s.operatorEnvironment()...)
	w.cmd.Stdout, w.cmd.Stderr = w.stdout, w.stderr
	w.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := w.cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	go func() { w.ended <- w.cmd.Wait() }()
	return w
}

// saw waits until the watcher has written text.
func (w *watcher) saw(text string) {
	w.t.Helper()
	eventually(w.t, settleLimit, func() error {
		if !contains(w.stdout.String(), text) {
			return fmt.Errorf("no %q yet in:\n%s%s", text, w.stdout, w.stderr)
		}
		return nil
	})
}

// code waits for the watcher's end and returns its exit code.
func (w *watcher) code() int {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(w.t.Context()), callLimit)
	defer cancel()
	select {
	case err := <-w.ended:
		if _, ok := errors.AsType[*exec.ExitError](err); err != nil && !ok {
			w.t.Fatal(err)
		}
	case <-ctx.Done():
		_ = w.cmd.Process.Kill()
		w.t.Fatalf("the watcher did not end:\n%s%s", w.stdout, w.stderr)
	}
	return w.cmd.ProcessState.ExitCode()
}

// drainByTwo lets two operators order the same drain at once, each at another scheduler: one starts it, and
// the other is told which one is open.
func (s *stack) drainByTwo(node string) {
	s.t.Helper()
	env := s.operatorEnvironment()
	answers := make([]result, len(s.Schedulers))
	var operators sync.WaitGroup
	for i, scheduler := range s.Schedulers {
		operators.Go(func() {
			answers[i] = run(s.t, append(slices.Clone(env), "BERTH_SCHEDULER_URL="+scheduler.Twirp), "node", "drain", node, "--reason", "kernel")
		})
	}
	operators.Wait()
	slices.SortFunc(answers, func(a, b result) int { return a.code - b.code })
	if answers[0].code != 0 || !contains(answers[0].stdout, "kernel") {
		s.t.Fatalf("nobody could drain %s: %+v", node, answers)
	}
	if want := "drain 1 of it is open already"; answers[1].code != 1 || !contains(answers[1].stderr, want) {
		s.t.Errorf("the second of two = %+v, want code 1 and %q", answers[1], want)
	}
}

// Many creates run while a node is drained, every scheduler is killed in the midst of the drain, and it
// comes to its end: the row says where it was.
func TestADrainDuringCreatesSurvivesTheDeathOfEveryScheduler(t *testing.T) {
	t.Parallel()
	s := start(t, "--data", dataFolder(t)) // what is killed is started again
	const n, width = 40, 6
	var done atomic.Int64
	type outcome struct {
		ids      []string
		failures []error
	}
	result := make(chan outcome, 1)
	go func() {
		ids, failures := creates(t.Context(), s.client(0), n, width, &done)
		result <- outcome{ids, failures}
	}()
	const onNode = "SELECT count(*) FROM bindings WHERE node_id = 'node-1' AND state = 'bound'"
	eventually(t, callLimit, func() error {
		if d := done.Load(); d < n/4 || s.sql(onNode) == "0" {
			return fmt.Errorf("%d creates done", d)
		}
		return nil
	})
	s.drainByTwo("node-1")
	answered := s.sql("SELECT max(placement_id) FROM placements WHERE node_id = 'node-1'")
	if d := done.Load(); d > n-width {
		t.Fatalf("%d of %d creates were done before the drain; the test shows nothing", d, n)
	}
	eventually(t, settleLimit, func() error {
		if state := s.sql("SELECT state FROM drains"); state != "draining" {
			return fmt.Errorf("the drain is %s", state)
		}
		return nil
	})
	landed := s.sql(onNode)
	made := <-result
	for _, err := range made.failures {
		t.Errorf("a client saw the drain: %v", err)
	}
	if later := s.sql("SELECT count(*) FROM placements WHERE node_id = 'node-1' AND placement_id > " + answered); later != "0" {
		t.Errorf("%s creates were placed on the node after the answer", later)
	}
	if now := s.sql(onNode); now != landed || now == "0" {
		t.Errorf("%s sandboxes on the node when it said draining, %s after all creates", landed, now)
	}

	w := s.watch("node", "drain", "node-1", "--watch", "--every", "200ms")
	w.saw("draining, " + landed)
	s.kill("scheduler-1")
	s.kill("scheduler-2")

	// What runs there is reached as before, and leaves when its client ends it.
	here := strings.Fields(s.sql("SELECT sandbox_id FROM bindings WHERE node_id = 'node-1' AND state = 'bound'"))
	c := s.client(1)
	for _, id := range here {
		if status, body, err := c.api(t.Context(), "GET", "/sandboxes/"+id, ""); err != nil || status != 200 {
			t.Errorf("a sandbox of the node that is drained, without any scheduler: status %d, %v: %s", status, err, body)
		}
		// With every scheduler dead the node may end the sandbox while nobody records that: then it is not
		// there when it is deleted again, and the node's roster says so.
		eventually(t, callLimit, func() error {
			status, body, err := c.api(t.Context(), "DELETE", "/sandboxes/"+id, "")
			if err == nil && status != 204 && status != 404 {
				err = fmt.Errorf("delete: status %d: %s", status, body)
			}
			return err
		})
	}
	if code := w.code(); code != 0 || !contains(w.stdout.String(), "node-1 is empty after ") {
		t.Errorf("the watcher ended with %d:\n%s%s", code, w.stdout, w.stderr)
	}
	if row := s.sql("SELECT d.state, n.cordoned, n.drain_id IS NULL FROM drains AS d JOIN nodes AS n USING (node_id)"); row != "done|t|t" {
		t.Errorf("the drain at the end = %s, want done|t|t", row)
	}

	// A drained node stays closed when its process is started again, until an operator opens it.
	s.kill("node-1")
	eventually(t, settleLimit, func() error {
		if row := s.sql("SELECT count(*) FROM node_leases WHERE node_id = 'node-1' AND epoch > 1"); row != "1" {
			return errors.New("node-1 has not come back")
		}
		return nil
	})
	for range 4 {
		if _, err := c.create(t.Context(), "shell"); err != nil {
			t.Errorf("create beside a drained node: %v", err)
		}
	}
	if now := s.sql(onNode); now != "0" {
		t.Errorf("%s sandboxes on a drained node that came back", now)
	}
	if answer := run(t, s.operatorEnvironment(), "node", "uncordon", "node-1"); answer.code != 0 {
		t.Errorf("node uncordon = %+v", answer)
	}
	s.noReservations()
}

func TestADrainsDeadlineAndItsCancel(t *testing.T) {
	t.Parallel()
	s := start(t, "--data", dataFolder(t))
	c := s.client(0)
	var ids []string
	for range 4 {
		ids = append(ids, must[string](t)(c.create(t.Context(), "echo")))
	}
	node := s.sql("SELECT node_id FROM bindings WHERE sandbox_id = '" + ids[0] + "'")

	expired := s.watch("node", "drain", node, "--deadline", "2s", "--watch", "--every", "200ms")
	if code := expired.code(); code != 3 || !contains(expired.stdout.String(), ids[0]) || !contains(expired.stderr.String(), "the deadline of drain 1 passed") {
		t.Errorf("past its deadline = %d, want 3 and the blockers:\n%s%s", code, expired.stdout, expired.stderr)
	}
	if _, err := c.byPair(t.Context(), ids[0], "/left"); err != nil {
		t.Errorf("a sandbox that was left alone: %v", err)
	}

	watched := s.watch("node", "drain", node, "--watch", "--every", "200ms")
	watched.saw("draining")
	if err := watched.cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	if code := watched.code(); code != 130 || !contains(watched.stderr.String(), "berth node drain "+node+" --cancel") {
		t.Errorf("after Ctrl-C = %d, want 130 and how to cancel:\n%s%s", code, watched.stdout, watched.stderr)
	}
	if state := s.sql("SELECT state FROM drains ORDER BY drain_id DESC LIMIT 1"); state != "draining" {
		t.Errorf("after Ctrl-C the drain is %s, want it to go on", state)
	}
	again := s.watch("node", "drain", node, "--watch", "--every", "200ms", "-o", "json")
	again.saw(`"state":"draining"`)
	if answer := run(t, s.operatorEnvironment(), "node", "drain", node, "--cancel"); answer.code != 0 || !contains(answer.stdout, "stays cordoned") {
		t.Errorf("cancel = %+v, want the node to stay as it was", answer)
	}
	if code := again.code(); code != 4 || !contains(again.stdout.String(), `"state":"canceled"`) {
		t.Errorf("a canceled drain = %d, want 4:\n%s%s", code, again.stdout, again.stderr)
	}

	parked := s.watch("node", "drain", node, "--mode", "park", "--deadline", "1s", "--watch", "--every", "200ms")
	if code := parked.code(); code != 0 {
		t.Errorf("parking = %d, want 0:\n%s%s", code, parked.stdout, parked.stderr)
	}
	if row := s.sql("SELECT DISTINCT state, ended_by FROM bindings WHERE node_id = '" + node + "'"); row != "parked|drain" {
		t.Errorf("bindings after parking = %q, want parked|drain", row)
	}
	eventually(t, callLimit, func() error {
		if _, err := c.byPair(t.Context(), ids[0], "/parked"); err == nil {
			return errors.New("a parked sandbox is reached still")
		}
		return nil
	})
	if answer := run(t, s.operatorEnvironment(), "node", "uncordon", node); answer.code != 0 {
		t.Errorf("node uncordon = %+v", answer)
	}
	eventually(t, settleLimit, func() error {
		_, err := c.byPair(t.Context(), ids[0], "/back")
		return err
	})
}
