package rpcerr

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/twitchtv/twirp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"berth/services/internal/node"
)

func TestEveryRowSurvivesBothTransports(t *testing.T) {
	t.Parallel()
	for _, r := range table {
		t.Run(r.reason+" "+r.cause.Error(), func(t *testing.T) {
			t.Parallel()
			wrapped := fmt.Errorf("select * from secrets at 10.0.0.1: %w", r.cause)

			overTwirp := Twirp(wrapped)
			if overTwirp.Code() != r.twirp || overTwirp.Msg() != r.cause.Error() {
				t.Errorf("Twirp(%v) = %s %q, want %s %q", r.cause, overTwirp.Code(), overTwirp.Msg(), r.twirp, r.cause)
			}
			overGRPC := status.Convert(GRPC(wrapped))
			if overGRPC.Code() != r.grpc || overGRPC.Message() != r.cause.Error() {
				t.Errorf("GRPC(%v) = %s %q, want %s %q", r.cause, overGRPC.Code(), overGRPC.Message(), r.grpc, r.cause)
			}
			for transport, err := range map[string]error{"twirp": overTwirp, "grpc": GRPC(wrapped)} {
				back := Decode(err)
				again, _, ok := find(back)
				if !ok || again.reason != r.reason {
					t.Errorf("%s: Decode gave %v with reason %q, want %q", transport, back, again.reason, r.reason)
				}
			}
		})
	}
}

func TestWhatHasNoRowLeavesWithoutItsText(t *testing.T) {
	t.Parallel()
	const secret = "relation bindings at 10.0.0.1"
	for name, err := range map[string]error{
		"a plain error":              errors.New(secret),
		"a violation nobody foresaw": &pgconn.PgError{Code: "23505", Message: secret, ConstraintName: "x"},
		"a status of another server": fmt.Errorf("call: %w", status.Error(codes.Aborted, secret)),
	} {
		for transport, out := range map[string]error{"twirp": Twirp(err), "grpc": GRPC(err)} {
			if strings.Contains(out.Error(), secret) {
				t.Errorf("%s over %s leaks: %v", name, transport, out)
			}
			if !errors.Is(Decode(out), ErrInternal) {
				t.Errorf("%s over %s: Decode(%v) = %v, want ErrInternal", name, transport, out, Decode(out))
			}
		}
	}
}

func TestALostDatabaseIsUnavailable(t *testing.T) {
	t.Parallel()
	dial := &net.OpError{Op: "dial", Err: errors.New("connection refused to 10.0.0.1")}
	for name, err := range map[string]error{
		"the server was shut down":   &pgconn.PgError{Code: "57P01", Message: "terminating"},
		"the connection was refused": fmt.Errorf("acquire: %w", dial),
	} {
		got := Twirp(fmt.Errorf("record: %w", err))
		if got.Code() != twirp.Unavailable || got.Msg() != "binding store unavailable" {
			t.Errorf("%s: Twirp = %s %q, want unavailable", name, got.Code(), got.Msg())
		}
	}
}

func TestARefusalKeepsItsHintAndItsPlacement(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]*node.Refused{
		"no room":    {Cause: node.ErrNoRoom, Placement: 7, RetryAfter: 400 * time.Millisecond, Reasons: map[string]int{"cordoned": 1, "declared_sandboxes": 12}},
		"over quota": {Cause: node.ErrQuota, RetryAfter: time.Second, Resource: "memory_bytes", Limit: 1 << 40, Used: 1<<40 - 1},
		"no hint":    {Cause: node.ErrConstraints, Reasons: map[string]int{"label": 3}},
		"only that":  {Cause: node.ErrContended, RetryAfter: time.Millisecond},
	} {
		for transport, err := range map[string]error{"twirp": Twirp(want), "grpc": GRPC(want)} {
			got, ok := errors.AsType[*node.Refused](Decode(err))
			if !ok {
				t.Errorf("%s over %s: Decode = %v, want a refusal", name, transport, Decode(err))
				continue
			}
			if diff := cmp.Diff(*want, *got, cmpopts.EquateErrors()); diff != "" {
				t.Errorf("%s over %s (-want +got):\n%s", name, transport, diff)
			}
		}
	}
}

func TestBadInputKeepsItsWords(t *testing.T) {
	t.Parallel()
	bad := fmt.Errorf("schedule: %w", &Invalid{Text: "count must be 1 to 100, not 101"})
	for transport, err := range map[string]error{"twirp": Twirp(bad), "grpc": GRPC(bad)} {
		if got, ok := errors.AsType[*Invalid](Decode(err)); !ok || got.Text != "count must be 1 to 100, not 101" {
			t.Errorf("%s: Decode = %v, want the field's words", transport, Decode(err))
		}
	}
}

func TestAnRPCNotBuiltSaysSo(t *testing.T) {
	t.Parallel()
	err := &NotImplemented{RPC: "ReportSandboxEvent"}
	if got := Twirp(err); got.Code() != twirp.Unimplemented || got.Msg() != "method ReportSandboxEvent not implemented" {
		t.Errorf("Twirp = %s %q", got.Code(), got.Msg())
	}
	if got := status.Convert(GRPC(err)); got.Code() != codes.Unimplemented || got.Message() != "method ReportSandboxEvent not implemented" {
		t.Errorf("GRPC = %s %q", got.Code(), got.Message())
	}
}

func TestAnEndedContextIsTheCallers(t *testing.T) {
	t.Parallel()
	if got := Twirp(fmt.Errorf("record: %w", context.DeadlineExceeded)).Code(); got != twirp.DeadlineExceeded {
		t.Errorf("Twirp(deadline) = %s", got)
	}
	if got := status.Code(GRPC(fmt.Errorf("record: %w", context.Canceled))); got != codes.Canceled {
		t.Errorf("GRPC(canceled) = %s", got)
	}
}

func TestARefusedDrainNamesTheOpenOne(t *testing.T) {
	t.Parallel()
	got, ok := errors.AsType[*node.DrainOpen](Decode(Twirp(fmt.Errorf("drain: %w", &node.DrainOpen{ID: 7}))))
	if !ok || got.ID != 7 || !errors.Is(got, node.ErrAlreadyDrained) {
		t.Errorf("Decode(Twirp(drain 7 is open)) = %v, want it with its id", got)
	}
}
