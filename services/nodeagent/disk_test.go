package nodeagent_test

import (
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"
)

// smallDisk mounts a disk at dir that is large enough for an agent and a few sandboxes.
func smallDisk(t testing.TB, dir string) {
	t.Helper()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mount("berth-test", dir, "tmpfs", syscall.MS_NODEV, "size=256m,mode=755"); err != nil {
		t.Skipf("this user cannot mount a small disk: %v", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, syscall.MNT_DETACH); err != nil {
			t.Errorf("unmount: %v", err)
		}
	})
}

// fill writes to the file until its disk is full.
func fill(t testing.TB, path string) {
	t.Helper()
	file, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	for size := 1 << 20; size >= 1; size /= 4 {
		for err = nil; err == nil; {
			_, err = file.Write(make([]byte, size))
		}
		if !errors.Is(err, syscall.ENOSPC) {
			t.Fatalf("fill the disk: %v", err)
		}
	}
}

func TestASandboxThatFilledTheDiskCanBeDeleted(t *testing.T) {
	t.Parallel()
	a := newAgent(t)
	smallDisk(t, a.cfg.Data)
	a.run()
	a.create("fat", "shell", "")
	a.create("naps", "shell", `,"timeout":1,"autoPause":true`)
	over := time.Now().Add(2 * time.Second)
	fill(t, filepath.Join(a.cfg.Data, "sandboxes", "fat", "workspace", "fill"))

	for time.Now().Before(over) { // meanwhile the other one's time is over, and its pause cannot be remembered
		if r := a.call("POST", "/sandboxes", `{"templateID":"shell"}`, headers{"Berth-Sandbox-Id": "new"}); r.status != http.StatusInternalServerError {
			t.Fatalf("create on a full disk: %d %s", r.status, r.body)
		}
	}
	if left, err := filepath.Glob(filepath.Join(a.cfg.Data, "journal", "*.new")); err != nil || len(left) > 0 {
		t.Errorf("writes that failed left %q, %v", left, err)
	}
	if r := a.call("DELETE", "/sandboxes/fat", ""); r.status != http.StatusNoContent {
		t.Fatalf("delete on a full disk: %d %s", r.status, r.body)
	}
	a.create("new", "shell", "")
	a.scheduler.wait(t, "the one whose time was over to be paused", func(f *fakeScheduler) bool {
		b := f.beats[len(f.beats)-1]
		return len(b.GetSandboxIds()) == 2 && b.GetSnapshot().GetPausedSandboxCount() == 1
	})
	if r := a.call("POST", "/sandboxes", `{"templateID":"shell"}`, headers{"Berth-Sandbox-Id": "fat"}); r.status != http.StatusConflict {
		t.Errorf("create of the deleted one again: %d %s", r.status, r.body)
	}
}
