package demo

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"syscall"
	"time"
)

const (
	pollPause  = 100 * time.Millisecond
	settleTime = 30 * time.Second // a few heartbeats
	deadTime   = 5 * time.Second
)

func (s *story) showProcesses() {
	for i, g := range s.info.Gateways {
		s.result("gateway-%d    pid %-7d %s", i+1, s.info.PIDs[fmt.Sprintf("gateway-%d", i+1)], g)
	}
	for i, sc := range s.info.Schedulers {
		s.result("scheduler-%d  pid %-7d %s, gRPC %s", i+1, sc.PID, sc.Twirp, sc.GRPC)
	}
	for _, n := range s.info.Nodes {
		s.result("%-12s pid %-7d %s", n.ID, n.PID, n.Endpoint)
	}
	s.result("%-12s pid %-7d URL=%s", "postgres", s.info.PIDs["postgres"], s.info.DatabaseURL)
}

func (s *story) create(ctx context.Context, c *client) (string, error) {
	s.command("curl -X POST %s/sandboxes -H 'X-API-Key: %.8s…' -d '%s'", c.base, c.key, createBody)
	begun := time.Now()
	id, err := c.create(ctx)
	if err != nil {
		return "", err
	}
	s.result("201 sandbox %s, after %s", id, round(time.Since(begun)))
	return id, nil
}

func (s *story) talkByPair(ctx context.Context, c *client, sandbox string) error {
	const target = "/hello?from=demo"
	s.command("curl '%s%s' -H 'x-agentenv-sandbox-id: %s' -H 'x-agentenv-target-port: %s'", c.base, target, sandbox, appPort)
	got, err := c.ask(ctx, sandbox, target)
	if err != nil {
		return err
	}
	s.result("200 the application saw: %s %s", got.Method, got.Target)
	return nil
}

func (s *story) talkByHost(ctx context.Context, c *client, sandbox string) error {
	const text = "ahoy"
	host := c.host(sandbox, s.info.Domain)
	s.command("curl http://%s/echo -d %s", host, text)
	got, err := c.want(ctx, http.StatusOK, "POST", "http://"+host+"/echo", text, nil)
	if err != nil {
		return err
	}
	if got != text {
		return fmt.Errorf("POST /echo by host: %q came back, want %q", got, text)
	}
	s.result("200 %s", got)
	s.command("websocat ws://%s/chat", host)
	got, err = c.talk(ctx, "ws://"+host+"/chat", "over a WebSocket")
	if err != nil {
		return err
	}
	if got != "over a WebSocket" {
		return fmt.Errorf("WebSocket by host: %q came back", got)
	}
	s.result("> over a WebSocket\n< %s", got)
	return nil
}

// victims are killed: the gateway that made the first sandbox, and the scheduler that the other gateway
// has been asking.
var victims = []string{"scheduler-2", "gateway-1"}

// killAndGoOn kills while requests to the first sandbox go on, and none may fail.
func (s *story) killAndGoOn(ctx context.Context, c *client, first string) error {
	steady := s.keepAsking(ctx, c, first)
	defer func() { _, _ = steady() }() // on an early return nobody else ends it
	for _, victim := range victims {
		pid := s.info.PIDs[victim]
		s.command("kill -9 %d   # %s", pid, victim)
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			return fmt.Errorf("kill %s: %w", victim, err)
		}
	}
	second, err := s.create(ctx, c)
	if err != nil {
		return err
	}
	if err := s.talkByPair(ctx, c, second); err != nil {
		return err
	}
	if err := s.remove(ctx, c, second); err != nil {
		return err
	}
	for _, victim := range victims {
		if err := s.waitDead(ctx, s.info.PIDs[victim]); err != nil {
			return fmt.Errorf("%s: %w", victim, err)
		}
	}
	asked, err := steady()
	if err != nil {
		return fmt.Errorf("the first sandbox, asked while others were killed: %w", err)
	}
	s.result("%d requests to the first sandbox meanwhile, none failed", asked)
	return nil
}

// keepAsking sends one request after the other until the returned function is called, which says how
// many there were and the first failure.
func (s *story) keepAsking(ctx context.Context, c *client, sandbox string) func() (int, error) {
	ctx, cancel := context.WithCancel(ctx)
	var (
		group  sync.WaitGroup
		asked  int
		failed error
	)
	group.Go(func() {
		for ctx.Err() == nil {
			if _, err := c.ask(ctx, sandbox, "/steady"); err != nil && ctx.Err() == nil {
				failed = err
				return
			}
			asked++
			if wait(ctx, pollPause/10) != nil {
				return
			}
		}
	})
	return func() (int, error) {
		cancel()
		group.Wait()
		return asked, failed
	}
}

func (s *story) remove(ctx context.Context, c *client, sandbox string) error {
	s.command("curl -X DELETE %s/sandboxes/%s -H 'X-API-Key: %.8s…'", c.base, sandbox, c.key)
	url, key := c.base+"/sandboxes/"+sandbox, map[string]string{"X-API-Key": c.key}
	if _, err := c.want(ctx, http.StatusNoContent, "DELETE", url, "", key); err != nil {
		return err
	}
	if _, err := c.want(ctx, http.StatusNotFound, "GET", url, "", key); err != nil {
		return fmt.Errorf("after the delete: %w", err)
	}
	s.result("204, and asked again: 404")
	return nil
}

func (s *story) nothingLost(ctx context.Context, c *client, first string, before binding) error {
	if err := s.talkByPair(ctx, c, first); err != nil {
		return err
	}
	after, err := s.showBinding(ctx, first)
	if err != nil {
		return err
	}
	if before != after {
		return fmt.Errorf("the binding of %s changed from %+v to %+v", first, before, after)
	}
	return s.waitNoReservations(ctx)
}

func (s *story) waitDead(ctx context.Context, pid int) error {
	ctx, cancel := context.WithTimeout(ctx, deadTime)
	defer cancel()
	for alive(pid) {
		if err := wait(ctx, pollPause); err != nil {
			return fmt.Errorf("process %d still runs: %w", pid, err)
		}
	}
	return nil
}

// nothingLeft looks at every process that ever was part of the stack.
func (s *story) nothingLeft() error {
	var left []string
	for name, pid := range s.info.PIDs {
		if alive(pid) {
			left = append(left, fmt.Sprintf("%s (process %d)", name, pid))
		}
	}
	if len(left) > 0 {
		slices.Sort(left)
		return fmt.Errorf("still running: %v", left)
	}
	s.result("%d processes ended, the data folder is gone", len(s.info.PIDs))
	return nil
}

func alive(pid int) bool { return syscall.Kill(pid, 0) == nil }

func wait(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
