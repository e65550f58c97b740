package pgdb_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"berth/pkg/pgdb"
)

func TestUnavailableMeansAskAgainLater(t *testing.T) {
	t.Parallel()
	code := func(code string) error { return fmt.Errorf("reserve: %w", &pgconn.PgError{Code: code}) }
	for name, tt := range map[string]struct {
		err  error
		want bool
	}{
		"nothing wrong":             {nil, false},
		"a statement timeout":       {code("57014"), true},
		"a server that shuts down":  {code("57P01"), true},
		"a server that starts":      {code("57P03"), true},
		"too many clients":          {code("53300"), true},
		"a full disk":               {code("53100"), true},
		"a standby":                 {code("25006"), true},
		"a lock after all tries":    {code("55P03"), true},
		"a protocol that broke":     {code("08006"), true},
		"a session that was ended":  {&pgconn.PgError{Code: "42P01", SeverityUnlocalized: "FATAL"}, true},
		"a unique violation":        {code("23505"), false},
		"a missing table":           {code("42P01"), false},
		"a missing right":           {code("42501"), false},
		"a refused dial":            {&net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}, true},
		"a connection that closed":  {io.ErrUnexpectedEOF, true},
		"a closed connection":       {fmt.Errorf("begin: %w", pgconn.ErrConnClosed), true},
		"a deadline":                {context.DeadlineExceeded, true},
		"a caller that left":        {context.Canceled, false},
		"a pool that is used up":    {pgdb.ErrPoolWait, true},
		"a commit in doubt":         {pgdb.ErrUnknown, true},
		"an error of somebody else": {errors.New("boom"), false},
	} {
		if got := pgdb.Unavailable(tt.err); got != tt.want {
			t.Errorf("Unavailable of %s (%v) = %v, want %v", name, tt.err, got, tt.want)
		}
	}
}
