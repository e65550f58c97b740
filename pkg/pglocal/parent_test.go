package pglocal

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"
)

const parentVariable = "PGLOCAL_TEST_PARENT"

// beParent starts a server, says which, and waits to be killed.
func beParent() {
	dir := os.Getenv(parentVariable + "_DIR") //nolint:forbidigo // how a test speaks to its own process
	s, err := Start(context.Background(), Options{Dir: dir, Ephemeral: true, DieWithParent: true})
	if err != nil {
		fmt.Fprintln(os.Stdout, "error", err)
		os.Exit(1)
	}
	fmt.Fprintln(os.Stdout, s.PID(), s.dir)
	select {}
}

func TestAKilledParentLeavesNothing(t *testing.T) {
	t.Parallel()
	pid, dir := killedParent(t, "")
	waitUntil(t, "the server to end", func() bool { return !alive(pid) })
	waitUntil(t, "its folder to go", func() bool {
		_, err := os.Stat(dir)
		return os.IsNotExist(err)
	})
}

func TestDataOfAKilledParentStaysAndStartsAgain(t *testing.T) {
	t.Parallel()
	dir := folder(t)
	killedParent(t, dir)
	s := start(t, Options{Dir: dir}) // waits for the former server to stop
	if got := query(t, s, "SELECT 'well'"); got != "well" {
		t.Errorf("the server on the data of a killed parent says %q", got)
	}
}

// killedParent starts this binary as the parent of a server, kills it, and returns the server's
// process and folder.
func killedParent(t *testing.T, dir string) (int, string) {
	t.Helper()
	parent := exec.CommandContext(t.Context(), os.Args[0])
	parent.Env = append(os.Environ(), parentVariable+"=1", parentVariable+"_DIR="+dir)
	out, err := parent.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := parent.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatalf("the parent says nothing: %v", err)
	}
	words := strings.Fields(line)
	pid, err := strconv.Atoi(words[0])
	if err != nil {
		t.Fatalf("the parent says %q", line)
	}
	if !alive(pid) {
		t.Fatalf("process %d does not run before its parent is killed", pid)
	}
	if err := parent.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = parent.Wait() // killed, as intended
	return pid, words[1]
}

// waitUntil polls what no event tells of: the end of a process that is not this one's child.
func waitUntil(t *testing.T, what string, done func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	for !done() {
		if err := wait(ctx, 20*time.Millisecond); err != nil {
			t.Fatalf("waited in vain for %s", what)
		}
	}
}
