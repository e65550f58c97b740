package twirpkit_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.uber.org/goleak"

	"berth/pkg/twirpkit"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// replica answers with its name and the body it got.
func replica(t *testing.T, name string) (*httptest.Server, *atomic.Int64) {
	t.Helper()
	calls := new(atomic.Int64)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		calls.Add(1)
		body, _ := io.ReadAll(r.Body)
		_, _ = fmt.Fprintf(w, "%s %s %s", name, r.URL.Path, body)
	}))
	t.Cleanup(server.Close)
	return server, calls
}

// refusing returns the base URL of an address at which nobody listens.
func refusing(t *testing.T) string {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	return "http://" + l.Addr().String()
}

func newFailover(t *testing.T, o twirpkit.FailoverOptions, urls ...string) *twirpkit.Failover {
	t.Helper()
	f, err := twirpkit.NewFailover(urls, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(f.CloseIdleConnections)
	return f
}

// post sends body as a reader that cannot be read twice, to prove that the kit keeps it.
func post(ctx context.Context, f *twirpkit.Failover, path, body string) (string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, f.Base()+path, io.NopCloser(strings.NewReader(body)))
	if err != nil {
		return "", err
	}
	resp, err := f.Do(req)
	if err != nil {
		return "", err
	}
	defer func() { _ = resp.Body.Close() }()
	text, err := io.ReadAll(resp.Body)
	return string(text), err
}

func TestARefusedDialGoesToTheNextAddressWithTheSameBody(t *testing.T) {
	t.Parallel()
	b, calls := replica(t, "b")
	f := newFailover(t, twirpkit.FailoverOptions{}, refusing(t), b.URL)
	got, err := post(t.Context(), f, "/twirp/x", "request one")
	if want := "b /twirp/x request one"; err != nil || got != want {
		t.Fatalf("Do = %q, %v, want %q", got, err, want)
	}
	if n := calls.Load(); n != 1 {
		t.Errorf("second replica was called %d times, want 1", n)
	}
}

func TestTheAddressThatWorkedIsAskedFirst(t *testing.T) {
	t.Parallel()
	a, aCalls := replica(t, "a")
	b, bCalls := replica(t, "b")
	f := newFailover(t, twirpkit.FailoverOptions{}, a.URL, b.URL)
	for _, want := range []string{"a / 1", "a / 2"} {
		if got, err := post(t.Context(), f, "/", want[4:]); err != nil || got != want {
			t.Fatalf("Do = %q, %v, want %q", got, err, want)
		}
	}
	a.Close()
	f.CloseIdleConnections() // what dies between two calls is noticed, if not always at once
	for _, want := range []string{"b / 3", "b / 4"} {
		if got, err := post(t.Context(), f, "/", want[4:]); err != nil || got != want {
			t.Fatalf("Do after the first died = %q, %v, want %q", got, err, want)
		}
	}
	if aCalls.Load() != 2 || bCalls.Load() != 2 {
		t.Errorf("calls = %d and %d, want 2 and 2", aCalls.Load(), bCalls.Load())
	}
}

func TestAfterASilentReplicaTheNextCallBeginsElsewhere(t *testing.T) {
	t.Parallel()
	thawed := make(chan struct{})
	frozen := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { <-thawed }))
	defer frozen.Close()
	defer close(thawed)
	b, _ := replica(t, "b")
	f := newFailover(t, twirpkit.FailoverOptions{}, frozen.URL, b.URL)
	limited, cancel := context.WithTimeout(twirpkit.Repeatable(t.Context()), 200*time.Millisecond)
	defer cancel()
	if got, err := post(limited, f, "/", "1"); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("Do = %q, %v, want the deadline", got, err)
	}
	if got, err := post(t.Context(), f, "/", "2"); err != nil || got != "b / 2" {
		t.Errorf("Do after it = %q, %v, want b's answer", got, err)
	}
}

func TestWhatMayHaveBeenSentIsNeverSentAgain(t *testing.T) {
	t.Parallel()
	tests := map[string]http.HandlerFunc{
		"the replica dies while it works": func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) },
		"the replica answers that it failed": func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusServiceUnavailable)
		},
	}
	for name, handler := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var aCalls atomic.Int64
			a := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				aCalls.Add(1)
				handler(w, r)
			}))
			defer a.Close()
			b, bCalls := replica(t, "b")
			f := newFailover(t, twirpkit.FailoverOptions{}, a.URL, b.URL)
			_, _ = post(t.Context(), f, "/", "body")
			if aCalls.Load() != 1 || bCalls.Load() != 0 {
				t.Errorf("calls = %d and %d, want 1 and 0", aCalls.Load(), bCalls.Load())
			}
		})
	}
}

func TestARepeatableCallThatBreaksGoesToTheNextAddress(t *testing.T) {
	t.Parallel()
	var aCalls atomic.Int64
	a := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		aCalls.Add(1)
		panic(http.ErrAbortHandler)
	}))
	defer a.Close()
	b, _ := replica(t, "b")
	f := newFailover(t, twirpkit.FailoverOptions{}, a.URL, b.URL)
	got, err := post(twirpkit.Repeatable(t.Context()), f, "/", "body")
	if want := "b / body"; err != nil || got != want || aCalls.Load() != 1 {
		t.Errorf("Do = %q, %v after %d calls of the first, want %q after 1", got, err, aCalls.Load(), want)
	}
}

func TestWithNobodyThereTheErrorSaysSo(t *testing.T) {
	t.Parallel()
	f := newFailover(t, twirpkit.FailoverOptions{}, refusing(t), refusing(t))
	_, err := post(t.Context(), f, "/", "body")
	if err == nil || !strings.Contains(err.Error(), "none of 2 addresses answers") || !twirpkit.Unsent(err) {
		t.Errorf("Do = %v, want one that says so and is Unsent", err)
	}
}

func TestARedirectIsNotFollowed(t *testing.T) {
	t.Parallel()
	b, bCalls := replica(t, "b")
	a := httptest.NewServer(http.RedirectHandler(b.URL, http.StatusTemporaryRedirect))
	defer a.Close()
	f := newFailover(t, twirpkit.FailoverOptions{}, a.URL)
	if _, err := post(t.Context(), f, "/", "body"); err != nil {
		t.Fatal(err)
	}
	if bCalls.Load() != 0 {
		t.Errorf("the target of the redirect was called %d times, want 0", bCalls.Load())
	}
}

func TestRepeatableCallsSurviveTheDeathOfTheirReplica(t *testing.T) {
	t.Parallel()
	a, _ := replica(t, "a")
	b, _ := replica(t, "b")
	f := newFailover(t, twirpkit.FailoverOptions{}, a.URL, b.URL)
	call := func(round int) {
		var group sync.WaitGroup
		for i := range 20 {
			group.Go(func() {
				body := fmt.Sprintf("%d.%d", round, i)
				if got, err := post(twirpkit.Repeatable(t.Context()), f, "/", body); err != nil || !strings.HasSuffix(got, body) {
					t.Errorf("Do(%s) = %q, %v", body, got, err)
				}
			})
		}
		group.Wait()
	}
	call(1)
	a.Close()
	call(2)
}

func TestMalformedAddressesAreToldAllAtOnceAndWithoutPasswords(t *testing.T) {
	t.Parallel()
	_, err := twirpkit.NewFailover([]string{"127.0.0.1:9091", "http://u:secret@h", "http://ok:1"}, twirpkit.FailoverOptions{})
	if err == nil {
		t.Fatal("NewFailover = nil, want an error")
	}
	if n := len(strings.Split(err.Error(), "\n")); n != 2 || strings.Contains(err.Error(), "secret") {
		t.Errorf("NewFailover = %q, want two lines and no password", err)
	}
	if _, err := twirpkit.NewFailover(nil, twirpkit.FailoverOptions{}); err == nil {
		t.Error("NewFailover without an address = nil, want an error")
	}
}

func TestTheTokenAndTheTimeLeftTravelWithACall(t *testing.T) {
	t.Parallel()
	var got http.Header
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { got = r.Header.Clone() }))
	defer server.Close()
	f := newFailover(t, twirpkit.FailoverOptions{Token: "t0ken"}, server.URL)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if _, err := post(ctx, f, "/", ""); err != nil {
		t.Fatal(err)
	}
	if auth := got.Get("Authorization"); auth != "Bearer t0ken" {
		t.Errorf("Authorization = %q, want the bearer token", auth)
	}
	ms, err := strconv.Atoi(got.Get(twirpkit.TimeoutHeader))
	if err != nil || ms <= 0 || ms > 9_950 {
		t.Errorf("%s = %q, want a little less than 10 s", twirpkit.TimeoutHeader, got.Get(twirpkit.TimeoutHeader))
	}
}

func TestACallHasTheDeadlineOfItsCallerOrTheDefault(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		header   string
		min, max time.Duration
	}{
		"no header: the default": {max: 3 * time.Second, min: 2 * time.Second},
		"the caller's":           {header: "60000", max: time.Minute, min: 59 * time.Second},
		"cut to five minutes":    {header: "999999999999", max: 5 * time.Minute, min: 299 * time.Second},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var left time.Duration
			h := twirpkit.Server(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
				deadline, ok := r.Context().Deadline()
				if !ok {
					t.Error("a call has no deadline")
				}
				left = time.Until(deadline)
			}), twirpkit.ServerOptions{DefaultTimeout: 3 * time.Second})
			r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/twirp/x", nil)
			if tt.header != "" {
				r.Header.Set(twirpkit.TimeoutHeader, tt.header)
			}
			h.ServeHTTP(httptest.NewRecorder(), r)
			if left < tt.min || left > tt.max {
				t.Errorf("deadline in %v, want %v to %v", left, tt.min, tt.max)
			}
		})
	}
}

func TestBadCallsAreRefusedInTwirpsForm(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		body, timeout string
		status        int
		want          map[string]string
	}{
		"a body over the limit": {
			body: strings.Repeat("x", 4<<20+1), status: 429,
			want: map[string]string{"code": "resource_exhausted", "msg": "request body is larger than 4194304 bytes"},
		},
		"a timeout of zero": {
			timeout: "0", status: 400,
			want: map[string]string{"code": "malformed", "msg": "X-Twirp-Timeout-Ms: a whole number of milliseconds from 1 is wanted"},
		},
		"a timeout that is no number": {
			timeout: "5s", status: 400,
			want: map[string]string{"code": "malformed", "msg": "X-Twirp-Timeout-Ms: a whole number of milliseconds from 1 is wanted"},
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := twirpkit.Server(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
				t.Error("a refused call reached the service")
			}), twirpkit.ServerOptions{})
			r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/twirp/x", strings.NewReader(tt.body))
			if tt.timeout != "" {
				r.Header.Set(twirpkit.TimeoutHeader, tt.timeout)
			}
			w := httptest.NewRecorder()
			h.ServeHTTP(w, r)
			var got map[string]string
			if err := json.Unmarshal(w.Body.Bytes(), &got); err != nil {
				t.Fatalf("body %q: %v", w.Body.String(), err)
			}
			if diff := cmp.Diff(tt.want, got); w.Code != tt.status || diff != "" {
				t.Errorf("status %d, want %d; body (-want +got):\n%s", w.Code, tt.status, diff)
			}
		})
	}
}

func TestABodyAtTheLimitReachesTheService(t *testing.T) {
	t.Parallel()
	body := strings.Repeat("x", 4<<20)
	var got int
	h := twirpkit.Server(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		text, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		got = len(text)
	}), twirpkit.ServerOptions{})
	h.ServeHTTP(httptest.NewRecorder(), httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/twirp/x", strings.NewReader(body)))
	if got != len(body) {
		t.Errorf("service read %d bytes, want %d", got, len(body))
	}
}

func TestOneTraceGoesThroughClientAndServer(t *testing.T) {
	t.Parallel()
	spans := tracetest.NewSpanRecorder()
	tracers := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(spans))
	var out bytes.Buffer
	server := httptest.NewServer(twirpkit.Server(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusTeapot)
	}), twirpkit.ServerOptions{Tracers: tracers, Log: slog.New(slog.NewJSONHandler(&out, &slog.HandlerOptions{Level: slog.LevelDebug}))}))
	f := newFailover(t, twirpkit.FailoverOptions{Tracers: tracers}, server.URL)
	if _, err := post(t.Context(), f, "/twirp/scheduler.v1.Scheduler/Schedule", "x"); err != nil {
		t.Fatal(err)
	}
	server.Close() // waits for the handler, and with it for its span and line
	ended := spans.Ended()
	if len(ended) != 2 {
		t.Fatalf("%d spans ended, want 2", len(ended))
	}
	if a, b := ended[0].SpanContext().TraceID(), ended[1].SpanContext().TraceID(); a != b {
		t.Errorf("trace ids %s and %s differ", a, b)
	}
	for _, span := range ended {
		if span.Name() != "scheduler.v1.Scheduler/Schedule" {
			t.Errorf("span name = %q, want the method's", span.Name())
		}
	}
	for _, want := range []string{`"rpc":"scheduler.v1.Scheduler/Schedule"`, `"status":418`} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("log = %s, want one line with %s", out.String(), want)
		}
	}
}

func TestACancelledCallDoesNotGoOn(t *testing.T) {
	t.Parallel()
	b, calls := replica(t, "b")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	f := newFailover(t, twirpkit.FailoverOptions{}, refusing(t), b.URL)
	if _, err := post(ctx, f, "/", "x"); !errors.Is(err, context.Canceled) {
		t.Errorf("Do = %v, want context.Canceled", err)
	}
	if calls.Load() != 0 {
		t.Errorf("second replica was called %d times, want 0", calls.Load())
	}
}
