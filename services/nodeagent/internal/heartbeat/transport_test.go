package heartbeat

import (
	"context"
	"net"
	"testing"
	"time"

	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace/noop"

	schedulerv1 "berth/rpc/scheduler/v1"
	"berth/services/internal/rpcerr"
)

func TestASchedulerThatIsNotThereIsToldApart(t *testing.T) {
	t.Parallel()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed := l.Addr().String()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	for name, connect := range map[string]func(Remote) (Scheduler, func(), error){
		"gRPC": func(r Remote) (Scheduler, func(), error) { r.Addresses = []string{closed}; return NewGRPC(r) },
		"Twirp": func(r Remote) (Scheduler, func(), error) {
			r.Addresses = []string{"http://" + closed}
			return NewTwirp(r)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			scheduler, disconnect, err := connect(Remote{Tracers: noop.NewTracerProvider(), Propagator: propagation.TraceContext{}})
			if err != nil {
				t.Fatal(err)
			}
			defer disconnect()
			ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
			defer cancel()
			_, err = scheduler.Heartbeat(ctx, &schedulerv1.HeartbeatRequest{})
			want := "no scheduler answers: check the addresses and that one runs"
			if got := advice(rpcerr.Decode(err)); got != want {
				t.Errorf("advice(%v) = %q, want %q", err, got, want)
			}
		})
	}
}
