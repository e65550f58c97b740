package api

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"

	"berth/pkg/waittest"
	schedulerv1 "berth/rpc/scheduler/v1"
)

// eventLimit bounds what must happen.
const eventLimit = waittest.Limit

// bareServer has nothing behind it: its methods fail, its connections and its health do not.
func bareServer() *Server {
	return New(Deps{Tokens: NewTokens(TokenConfig{}), Log: slog.New(slog.DiscardHandler)})
}

// served serves g on a loopback address until the test ends.
func served(t *testing.T, g *GRPC) string {
	t.Helper()
	var config net.ListenConfig
	l, err := config.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- g.Serve(l) }()
	t.Cleanup(func() {
		g.Stop()
		if err := waittest.Receive(t, "the end of the server", ended); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
			t.Errorf("Serve = %v", err)
		}
	})
	return l.Addr().String()
}

func dialed(t *testing.T, address string, options ...grpc.DialOption) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient(address, append(options, grpc.WithTransportCredentials(insecure.NewCredentials()))...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// idle is a client that pings and calls nothing, as a gateway at night.
type idle struct {
	conn  net.Conn
	frame *http2.Framer
}

func newIdle(t *testing.T, address string) *idle {
	t.Helper()
	var dialer net.Dialer
	conn, err := dialer.DialContext(t.Context(), "tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	if err := conn.SetDeadline(time.Now().Add(5 * eventLimit)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(conn, http2.ClientPreface); err != nil {
		t.Fatal(err)
	}
	i := &idle{conn, http2.NewFramer(conn, conn)}
	if err := i.frame.WriteSettings(); err != nil {
		t.Fatal(err)
	}
	return i
}

// ping sends a ping and returns GOAWAY's code and text, or "" when the ping is answered.
func (i *idle) ping(t *testing.T) (http2.ErrCode, string) {
	t.Helper()
	if err := i.frame.WritePing(false, [8]byte{1}); err != nil {
		t.Fatalf("ping: %v", err)
	}
	for {
		frame, err := i.frame.ReadFrame()
		if err != nil {
			t.Fatalf("after a ping: %v", err)
		}
		switch f := frame.(type) {
		case *http2.PingFrame:
			if f.IsAck() {
				return 0, ""
			}
		case *http2.GoAwayFrame:
			return f.ErrCode, string(f.DebugData())
		case *http2.SettingsFrame:
			if !f.IsAck() {
				if err := i.frame.WriteSettingsAck(); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
}

// TestAnIdleClientMayPingEveryTenSeconds pings a little early, as a ping seems that follows a late one.
func TestAnIdleClientMayPingEveryTenSeconds(t *testing.T) {
	t.Parallel()
	i := newIdle(t, served(t, bareServer().GRPC(nil)))
	const early = 300 * time.Millisecond
	tick := time.NewTicker(10*time.Second - early)
	defer tick.Stop()
	for n := range 5 {
		if code, text := i.ping(t); text != "" {
			t.Fatalf("ping %d is answered with GOAWAY %v %q", n+1, code, text)
		}
		waittest.Receive(t, "a tick", tick.C)
	}
	if code, text := i.ping(t); text != "" {
		t.Errorf("the last ping is answered with GOAWAY %v %q", code, text)
	}
}

func TestAClientThatPingsAllTheTimeIsSentAway(t *testing.T) {
	t.Parallel()
	i := newIdle(t, served(t, bareServer().GRPC(nil)))
	for range 100 {
		if code, text := i.ping(t); text != "" {
			if code != http2.ErrCodeEnhanceYourCalm || text != "too_many_pings" {
				t.Errorf("GOAWAY %v %q, want to be told to calm down", code, text)
			}
			return
		}
	}
	t.Error("a hundred pings in a moment are all answered")
}

// dials counts connections.
type dials struct{ n atomic.Int64 }

func (d *dials) option() grpc.DialOption {
	return grpc.WithContextDialer(func(ctx context.Context, address string) (net.Conn, error) {
		d.n.Add(1)
		var dialer net.Dialer
		return dialer.DialContext(ctx, "tcp", address)
	})
}

// TestAConnectionEndsAtItsAgeAndNoCallNotices lets connections grow old in moments.
func TestAConnectionEndsAtItsAgeAndNoCallNotices(t *testing.T) {
	t.Parallel()
	g := bareServer().connections(nil, pingsFrom, keepalive.ServerParameters{MaxConnectionAge: 20 * time.Millisecond, MaxConnectionAgeGrace: eventLimit})
	var connections dials
	client := healthv1.NewHealthClient(dialed(t, served(t, g), connections.option()))
	ctx, cancel := context.WithTimeout(t.Context(), eventLimit)
	defer cancel()
	for connections.n.Load() < 4 {
		if _, err := client.Check(ctx, &healthv1.HealthCheckRequest{}); err != nil {
			t.Fatalf("Check over %d connections = %v", connections.n.Load(), err)
		}
	}
}

// healthOf watches one name of the health service.
func healthOf(t *testing.T, client healthv1.HealthClient, service string) func(want healthv1.HealthCheckResponse_ServingStatus) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	watch, err := client.Watch(ctx, &healthv1.HealthCheckRequest{Service: service})
	if err != nil {
		t.Fatal(err)
	}
	heard := make(chan healthv1.HealthCheckResponse_ServingStatus, 100)
	go func() {
		for {
			got, err := watch.Recv()
			if err != nil {
				return
			}
			heard <- got.GetStatus()
		}
	}()
	return func(want healthv1.HealthCheckResponse_ServingStatus) {
		t.Helper()
		for waittest.Receive(t, service+" to be "+want.String(), heard) != want {
			continue
		}
	}
}

// TestHealthServesFromTheStartAndReadinessFollowsTheDatabase has all three names.
func TestHealthServesFromTheStartAndReadinessFollowsTheDatabase(t *testing.T) {
	t.Parallel()
	const (
		serving = healthv1.HealthCheckResponse_SERVING
		not     = healthv1.HealthCheckResponse_NOT_SERVING
	)
	g := bareServer().GRPC(nil)
	conn := dialed(t, served(t, g))
	client := healthv1.NewHealthClient(conn)
	whole, scheduler, ready := healthOf(t, client, ""), healthOf(t, client, "scheduler.v1.Scheduler"), healthOf(t, client, "berth.ready")
	whole(serving)
	scheduler(serving)
	ready(not) // nobody has asked the database yet

	var away atomic.Bool
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- g.Watch(ctx, func(context.Context) error {
			if away.Load() {
				return errors.New("away")
			}
			return nil
		})
	}()
	ready(serving)
	away.Store(true)
	ready(not)
	away.Store(false)
	ready(serving)
	if got, err := client.Check(t.Context(), &healthv1.HealthCheckRequest{Service: "nothing"}); status.Code(err) != codes.NotFound {
		t.Errorf("health of an unknown name = %v, %v, want not found", got, err)
	}

	g.Drain()
	whole(not)
	scheduler(not)
	ready(not)
	// Calls are taken until the listener closes, and readiness does not come back.
	if _, err := schedulerv1.NewSchedulerClient(conn).LookupNode(t.Context(), &schedulerv1.LookupNodeRequest{}); status.Code(err) != codes.InvalidArgument {
		t.Errorf("a call while draining = %v, want its answer", err)
	}
	g.health.SetServingStatus(ReadyService, serving)
	if got, err := client.Check(t.Context(), &healthv1.HealthCheckRequest{Service: ReadyService}); err != nil || got.GetStatus() != not {
		t.Errorf("readiness while draining = %v, %v, want not serving", got, err)
	}
	stop()
	if err := waittest.Receive(t, "the end of Watch", ended); err != nil {
		t.Errorf("Watch = %v", err)
	}
}

// TestAStopLetsOpenCallsFinishAndCutsTheRest shuts a server while a call is open.
func TestAStopLetsOpenCallsFinishAndCutsTheRest(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		inTime bool
		want   codes.Code
	}{"in time": {true, codes.OK}, "not in time": {false, codes.Unavailable}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			entered, answer := make(chan struct{}), make(chan struct{})
			g := bareServer().GRPC(nil)
			g.RegisterService(&grpc.ServiceDesc{ServiceName: "test.Slow", HandlerType: (*any)(nil), Methods: []grpc.MethodDesc{{
				MethodName: "Wait",
				Handler: func(_ any, ctx context.Context, _ func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
					close(entered)
					select {
					case <-answer:
					case <-ctx.Done():
					}
					return &schedulerv1.ListNodesResponse{}, nil
				},
			}}}, struct{}{})
			conn := dialed(t, served(t, g))
			called := make(chan error, 1)
			go func() {
				called <- conn.Invoke(t.Context(), "/test.Slow/Wait", &schedulerv1.ListNodesRequest{}, &schedulerv1.ListNodesResponse{})
			}()
			waittest.Receive(t, "the call to be open", entered)
			ctx, cancel := context.WithTimeout(t.Context(), eventLimit)
			defer cancel()
			if !tt.inTime {
				cancel()
			}
			ended := make(chan error, 1)
			go func() { ended <- g.Shut(ctx) }()
			if tt.inTime {
				close(answer)
			}
			if err := waittest.Receive(t, "the open call's end", called); status.Code(err) != tt.want {
				t.Errorf("the open call ends with %v, want %v", err, tt.want)
			}
			if err := waittest.Receive(t, "the end of Shut", ended); err != nil {
				t.Errorf("Shut = %v", err)
			}
		})
	}
}
