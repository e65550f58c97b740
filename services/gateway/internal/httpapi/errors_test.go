package httpapi

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"berth/services/gateway/internal/auth"
	"berth/services/gateway/internal/body"
	"berth/services/gateway/internal/launch"
	"berth/services/gateway/internal/listing"
	"berth/services/gateway/internal/proxy"
	"berth/services/gateway/internal/routecache"
	"berth/services/internal/node"
	"berth/services/internal/rpcerr"
	"berth/services/internal/sandbox"
)

func TestEveryErrorHasItsAnswer(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		err     error
		status  int
		code    string
		message string
		retry   time.Duration
	}{
		"no key":                  {auth.ErrUnauthorized, 401, "unauthenticated", "unauthorized", 0},
		"keys cannot be read":     {auth.ErrUnavailable, 503, "routes_unavailable", "binding store unavailable", time.Second},
		"a field is wrong":        {body.Wrongf("timeout: no"), 400, "bad_request", "timeout: no", 0},
		"a body is too large":     {body.ErrTooLarge, 413, "too_large", "request body too large", 0},
		"a body breaks off":       {body.ErrUnreadable, 400, "bad_request", "failed to read request body", 0},
		"the scheduler's words":   {&rpcerr.Invalid{Text: "count: no"}, 400, "bad_request", "count: no", 0},
		"unknown sandbox":         {sandbox.ErrNotFound, 404, "unknown_sandbox", "sandbox assignment not found", 0},
		"unknown node":            {node.ErrNotObserved, 404, "unknown_node", "observed node not found", 0},
		"routes are away":         {routecache.ErrUnavailable, 503, "routes_unavailable", "binding store unavailable", time.Second},
		"the scheduler's store":   {rpcerr.ErrUnavailable, 503, "routes_unavailable", "binding store unavailable", time.Second},
		"schedulers are away":     {launch.ErrSchedulerAway, 503, "scheduler_unavailable", "scheduler unavailable", time.Second},
		"nobody is ready":         {&node.Refused{Cause: node.ErrNoneReady, RetryAfter: 400 * time.Millisecond}, 503, "sandbox_capacity_unavailable", "no nodes available", 400 * time.Millisecond},
		"nobody has room":         {&node.Refused{Cause: node.ErrNoRoom}, 503, "sandbox_capacity_unavailable", "no node has room", time.Second},
		"nobody fits":             {&node.Refused{Cause: node.ErrConstraints, Placement: 1}, 503, "sandbox_no_compatible_node", "no node satisfies the constraints", 0},
		"over the quota":          {&node.Refused{Cause: node.ErrQuota, RetryAfter: 2 * time.Second}, 429, "quota", "tenant quota exceeded", 2 * time.Second},
		"contended":               {&node.Refused{Cause: node.ErrContended}, 503, "sandbox_capacity_unavailable", "no nodes available", time.Second},
		"our token is refused":    {rpcerr.ErrUnauthenticated, 502, "scheduler_error", "scheduler error", 0},
		"our role is refused":     {rpcerr.ErrDenied, 502, "scheduler_error", "scheduler error", 0},
		"the scheduler is broken": {rpcerr.ErrInternal, 502, "scheduler_error", "scheduler error", 0},
		"our node key is refused": {launch.ErrNodeKey, 502, "scheduler_error", "scheduler error", 0},
		"unrecorded":              {fmt.Errorf("%w: %w", launch.ErrUnrecorded, node.ErrReservationOver), 503, "unrecorded", "sandbox could not be recorded", time.Second},
		"unrecorded, store away":  {fmt.Errorf("%w: %w", launch.ErrUnrecorded, rpcerr.ErrUnavailable), 503, "unrecorded", "sandbox could not be recorded", time.Second},
		"unknown outcome":         {fmt.Errorf("%w: cut", launch.ErrUnknown), 502, "create_unknown", "create outcome unknown", 0},
		"silent node":             {fmt.Errorf("%w: %w", launch.ErrUnknown, launch.ErrSilent), 504, "create_unknown", "create outcome unknown", 0},
		"an answer too large":     {fmt.Errorf("%w: %w", launch.ErrUnknown, &launch.BadAnswer{Text: "upstream response too large"}), 502, "bad_answer", "upstream response too large", 0},
		"a bad id":                {&launch.BadAnswer{Text: "node answered without a sandbox id"}, 502, "bad_answer", "node answered without a sandbox id", 0},
		"no list":                 {&listing.Unavailable{}, 502, "list_unavailable", "cluster list unavailable", 0},
		"PostgreSQL is away":      {&pgconn.PgError{Code: "57P01", Message: "secret"}, 503, "routes_unavailable", "binding store unavailable", time.Second},
		"what nobody foresaw":     {errors.New("secret at 10.0.0.1"), 500, "internal", "internal error", 0},
		"an answer already":       {&proxy.Error{Status: 418, Code: "x", Message: "y"}, 418, "x", "y", 0},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, ours := answerFor(fmt.Errorf("select secret from 10.0.0.1: %w", tt.err))
			if got.Status != tt.status || got.Code != tt.code || got.Message != tt.message || got.RetryAfter != tt.retry {
				t.Errorf("answerFor(%v) = %+v, want %d %s %q %s", tt.err, got, tt.status, tt.code, tt.message, tt.retry)
			}
			if strings.Contains(got.Message, "secret") {
				t.Errorf("the answer leaks: %s", got.Message)
			}
			if want := tt.status == 500 || tt.code == "scheduler_error"; ours != want {
				t.Errorf("someone should look: %t, want %t", ours, want)
			}
		})
	}
	if got, _ := answerFor(fmt.Errorf("call: %w", context.DeadlineExceeded)); got.Status != 503 {
		t.Errorf("a deadline of ours = %d, want 503", got.Status)
	}
}
