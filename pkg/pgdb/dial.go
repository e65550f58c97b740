package pgdb

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
)

const (
	// A new connection costs a server some forty milliseconds of CPU, so a pool that lost all of
	// its connections must not ask for all of them at once.
	dialsAtOnce = 2

	keepaliveIdle  = 5 * time.Second
	keepaliveCount = 3
	userTimeout    = 10 * time.Second

	firstRedial = 50 * time.Millisecond
	maxRedial   = time.Second
)

// dialer opens the connections of one pool: at most dialsAtOnce at a time, and after a failure with
// a pause of full jitter that grows from firstRedial to maxRedial.
type dialer struct {
	net      net.Dialer
	slots    chan struct{}
	failures atomic.Int32
}

func newDialer() *dialer {
	return &dialer{
		net: net.Dialer{
			KeepAliveConfig: net.KeepAliveConfig{
				Enable: true, Idle: keepaliveIdle, Interval: keepaliveIdle, Count: keepaliveCount,
			},
			Control: limitUnacknowledged,
		},
		slots: make(chan struct{}, dialsAtOnce),
	}
}

func (d *dialer) dial(ctx context.Context, network, address string) (net.Conn, error) {
	select {
	case d.slots <- struct{}{}:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	release := sync.OnceFunc(func() { <-d.slots })
	if err := pause(ctx, redialPause(d.failures.Load())); err != nil {
		release()
		return nil, err
	}
	conn, err := d.net.DialContext(ctx, network, address)
	if err != nil {
		d.failures.Add(1)
		release()
		return nil, err
	}
	d.failures.Store(0)
	return &dialedConn{Conn: conn, release: release}, nil
}

// redialPause is how long to wait before the next dial after so many failures in a row.
func redialPause(failures int32) time.Duration {
	if failures <= 0 {
		return 0
	}
	limit := min(maxRedial, firstRedial<<min(failures-1, 10))
	return rand.N(limit)
}

// dialedConn keeps its dialer's slot until the session is established or the connection is closed:
// it is the session, not the dial, that costs the server.
type dialedConn struct {
	net.Conn
	release func()
}

func (c *dialedConn) Close() error {
	c.release()
	return c.Conn.Close()
}

// afterConnect ends the dial of a connection whose session is established, and sets its role.
func afterConnect(role string) func(context.Context, *pgx.Conn) error {
	return func(ctx context.Context, conn *pgx.Conn) error {
		under := conn.PgConn().Conn()
		if tls, ok := under.(interface{ NetConn() net.Conn }); ok {
			under = tls.NetConn()
		}
		if dialed, ok := under.(*dialedConn); ok {
			dialed.release()
		}
		if role == "" {
			return nil
		}
		if _, err := conn.Exec(ctx, "SET ROLE "+pgx.Identifier{role}.Sanitize()); err != nil {
			return fmt.Errorf("set role %s: %w", role, err)
		}
		return nil
	}
}

// pause waits for d, or returns the context's error when that ends first.
func pause(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return ctx.Err()
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
