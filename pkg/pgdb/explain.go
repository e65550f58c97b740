package pgdb

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/url"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// describe returns where a connection goes, for people: "host:port/database as user". A password is
// never part of it.
func describe(c *pgx.ConnConfig) string {
	hosts := []string{address(c.Host, c.Port)}
	for _, f := range c.Fallbacks {
		if at := address(f.Host, f.Port); !slices.Contains(hosts, at) {
			hosts = append(hosts, at)
		}
	}
	return fmt.Sprintf("%s/%s as %s", strings.Join(hosts, ","), c.Database, c.User)
}

// Describe returns where url leads, as "host:port/database as user", without the password; an
// unreadable url gives a fixed text.
func Describe(url string) string {
	c, err := pgx.ParseConfig(url)
	if err != nil {
		return "an unreadable database URL"
	}
	return describe(c)
}

// ParseURL returns how to connect to a database. The error says what is wrong with the URL, without the
// password.
func ParseURL(url string) (*pgx.ConnConfig, error) {
	c, err := pgx.ParseConfig(url)
	if err != nil || url == "" { // the driver would take an empty one for its defaults
		return nil, badURL(url, err)
	}
	return c, nil
}

func address(host string, port uint16) string {
	if filepath.IsAbs(host) {
		return filepath.Join(host, ".s.PGSQL."+strconv.Itoa(int(port)))
	}
	return net.JoinHostPort(host, strconv.Itoa(int(port)))
}

// explain wraps an error of connecting to target with what to do about it.
func explain(target string, err error) error {
	return fmt.Errorf("connect to PostgreSQL at %s: %s: %w", target, remedy(err), err)
}

// ExplainConnect returns err, an error of connecting to url, with where it led and what to do; nil
// stays nil.
func ExplainConnect(url string, err error) error {
	if err == nil {
		return nil
	}
	if parse, ok := errors.AsType[*pgconn.ParseConfigError](err); ok {
		return badURL(url, parse)
	}
	return explain(Describe(url), err)
}

func remedy(err error) string {
	if answered, ok := errors.AsType[*pgconn.PgError](err); ok {
		return remedyFor(answered.Code)
	}
	if _, ok := errors.AsType[*net.DNSError](err); ok {
		return "the host name is not known; correct the host in the database URL"
	}
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return "nothing listens there; start PostgreSQL, or correct host and port in the database URL"
	case errors.Is(err, fs.ErrNotExist):
		return "there is no such socket; start PostgreSQL, or correct the host in the database URL"
	case errors.Is(err, fs.ErrPermission):
		return "this user may not use the socket; run as another user, or connect by TCP"
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, syscall.ETIMEDOUT):
		return "no answer in time; check that host and port in the database URL can be reached from here"
	}
	return "check the database URL, and that the server runs and accepts connections"
}

// remedyFor tells what to do about a refusal by PostgreSQL, by SQLSTATE.
func remedyFor(code string) string {
	switch code {
	case "28P01":
		return "the password is wrong; correct user and password in the database URL"
	case "28000":
		return "the server refuses this login; correct the user in the database URL, or allow it in pg_hba.conf"
	case "3D000":
		return "the database does not exist; create it with createdb, or correct its name in the database URL"
	case "42501":
		return "the login has no right to connect; GRANT CONNECT ON DATABASE … TO it"
	case "53300":
		return "the server has no connection left; lower the pools or raise max_connections"
	case "57P03":
		return "the server is starting or stopping; try again in a moment"
	}
	return "the server refuses the connection; its log says more"
}

// badURL says that a database URL cannot be read. The driver's reason is left out where it could
// quote the password.
func badURL(text string, err error) error {
	const want = "want postgres://user:password@host:port/database?sslmode=…"
	if text == "" {
		return errors.New("the database URL is empty: set it (BERTH_DATABASE_URL, or --database-url), " + want)
	}
	reason := errors.Unwrap(err)
	parsed, parseErr := url.Parse(text)
	if reason == nil || parseErr != nil || parsed.User == nil {
		return errors.New("the database URL cannot be read: " + want)
	}
	if _, quotes := errors.AsType[*url.Error](reason); quotes || tells(reason, parsed) {
		return errors.New("the database URL cannot be read: " + want)
	}
	return fmt.Errorf("the database URL cannot be read: %w; %s", reason, want)
}

// tells tells whether a text quotes a secret of a database URL.
func tells(reason error, u *url.URL) bool {
	secrets := []string{u.Query().Get("password"), u.Query().Get("sslpassword")}
	if u.User != nil {
		password, _ := u.User.Password()
		secrets = append(secrets, password)
	}
	text := fmt.Sprint(reason)
	return slices.ContainsFunc(secrets, func(secret string) bool { return secret != "" && strings.Contains(text, secret) })
}

// hasSetting tells whether a database URL sets a parameter itself.
func hasSetting(text, name string) bool {
	if parsed, err := url.Parse(text); err == nil && parsed.Scheme != "" {
		return parsed.Query().Has(name)
	}
	return slices.ContainsFunc(strings.Fields(text), func(word string) bool {
		return strings.HasPrefix(word, name+"=")
	})
}
