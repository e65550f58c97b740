package nodeagent_test

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"berth/services/nodeagent"
)

func TestCreatesAtOnceNeverPassTheLimit(t *testing.T) {
	t.Parallel()
	const room, callers = 3, 12
	for name, limit := range map[string]func(*nodeagent.Config){
		"of sandboxes": func(c *nodeagent.Config) { c.MaxSandboxes = room },
		"of cores":     func(c *nodeagent.Config) { c.CapacityCPUMillis = room*250 + 249 },
		"of memory":    func(c *nodeagent.Config) { c.CapacityMemoryMiB = room*128 + 127 },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := newAgent(t, limit)
			a.run()
			var made, full atomic.Int32
			var all sync.WaitGroup
			for i := range callers {
				all.Go(func() {
					r, err := a.try("POST", "/sandboxes", `{"templateID":"shell"}`, headers{"Berth-Sandbox-Id": fmt.Sprintf("s-%d", i)})
					switch {
					case err != nil:
						t.Error(err)
					case r.status == http.StatusCreated:
						made.Add(1)
					case r.status == http.StatusServiceUnavailable && r.header.Get("Berth-Node") == "full":
						full.Add(1)
					default:
						t.Errorf("create: %d %s", r.status, r.body)
					}
				})
			}
			all.Wait()
			if made.Load() != room || full.Load() != callers-room {
				t.Errorf("%d made and %d refused, want %d and %d", made.Load(), full.Load(), room, callers-room)
			}
		})
	}
}

// TestManyHandsOnOneSandbox lets callers create, pause, resume, connect and delete the same sandboxes at once: every answer is one of the contract's,
// and in the end nothing is left.
func TestManyHandsOnOneSandbox(t *testing.T) {
	t.Parallel()
	a := newAgent(t)
	a.run()
	calls := []struct {
		method, path, body string
		allowed            []int
	}{
		{"POST", "/sandboxes", `{"templateID":"echo"}`, []int{201}},
		{"POST", "/sandboxes/%s/pause", ``, []int{204, 409}},
		{"POST", "/sandboxes/%s/resume", `{"timeout":60}`, []int{201, 409}},
		{"POST", "/sandboxes/%s/connect", `{"timeout":60}`, []int{200, 201}},
		{"POST", "/sandboxes/%s/timeout", `{"timeout":60}`, []int{204, 409}},
		{"GET", "/sandboxes/%s", ``, []int{200}},
	}
	ids := []string{"x-1", "x-2", "x-3"}
	for _, id := range ids {
		a.create(id, "echo", "")
	}
	var all sync.WaitGroup
	for range 6 {
		all.Go(func() {
			for range 12 {
				id, c := ids[rand.IntN(len(ids))], calls[rand.IntN(len(calls))]
				path := strings.ReplaceAll(c.path, "%s", id)
				r, err := a.try(c.method, path, c.body, headers{"Berth-Sandbox-Id": id})
				if err != nil {
					t.Errorf("%s %s: %v", c.method, path, err)
					continue
				}
				if !slices.Contains(c.allowed, r.status) {
					t.Errorf("%s %s: %d %s, want one of %v", c.method, path, r.status, r.body, c.allowed)
				}
			}
		})
	}
	all.Wait()
	for _, id := range ids {
		var deleting sync.WaitGroup
		var gone atomic.Int32
		for range 4 {
			deleting.Go(func() {
				r, err := a.try("DELETE", "/sandboxes/"+id, "")
				if err != nil || r.status != 204 && r.status != 404 {
					t.Errorf("delete: %d %s %v", r.status, r.body, err)
				}
				if r.status == 204 {
					gone.Add(1)
				}
			})
		}
		deleting.Wait()
		if gone.Load() != 1 {
			t.Errorf("%d deletes of %s said that they did it, want 1", gone.Load(), id)
		}
	}
	a.scheduler.waitRoster(t)
	if left := initsOf(t, a); len(left) != 0 {
		t.Errorf("inits %v are left", left)
	}
}

func TestTimePassesWhileTheAgentIsAway(t *testing.T) {
	t.Parallel()
	a := newAgent(t)
	stop := a.run()
	a.create("ends", "shell", `,"timeout":1`)
	a.create("pauses", "echo", `,"timeout":1,"autoPause":true`)
	a.create("lives", "shell", `,"timeout":1000`)
	stop()
	over := time.NewTimer(1100 * time.Millisecond) // what is tested is that time passes
	<-over.C
	a.scheduler.set(func(f *fakeScheduler) { f.beats = nil })
	a.run()
	a.scheduler.waitRoster(t, "lives", "pauses")
	if got := a.call("GET", "/sandboxes/pauses", "").json(t)["state"]; got != "paused" {
		t.Errorf("the one that pauses is %v", got)
	}
}

func TestACallIsASpanOfItsCallersTrace(t *testing.T) {
	t.Parallel()
	spans := tracetest.NewSpanRecorder()
	a := newAgent(t)
	a.tracers = sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(spans))
	a.run()
	a.call("GET", "/sandboxes/none", "", headers{"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"})
	for _, s := range spans.Ended() {
		if s.Name() == "sandbox.get" && s.SpanContext().TraceID().String() == "0af7651916cd43dd8448eb211c80319c" && s.Parent().SpanID().String() == "b7ad6b7169203331" {
			return
		}
	}
	t.Errorf("no such span among %d", len(spans.Ended()))
}

func TestMetricsAreServed(t *testing.T) {
	t.Parallel()
	a := newAgent(t)
	a.run()
	a.create("s", "echo", "")
	a.ask("s", 3000, "/")
	resp, err := a.client.Get("http://" + a.cfg.OpsListen + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		`berth_nodeagent_sandboxes{state="running"} 1`, `berth_nodeagent_creates_total{outcome="created"} 1`,
		`berth_nodeagent_heartbeat_seconds_count{outcome="accepted"}`, `berth_nodeagent_call_seconds_count{call="create",status="201"} 1`,
		`berth_nodeagent_exchanges_open 0`,
	} {
		if !strings.Contains(string(text), want) {
			t.Errorf("metrics lack %s", want)
		}
	}
}
