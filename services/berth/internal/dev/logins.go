package dev

import (
	"context"
	"fmt"
	"net/url"
	"strings"

	"berth/pkg/migrate"
)

// databaseURLs is how each service reaches the database, as a login of its own group.
type databaseURLs struct{ admin, scheduler, gateway, sessions string }

// makeLogins makes one login for each group role that a service runs as. What admin may not do is an
// error that names the grant.
func (s *Stack) makeLogins(ctx context.Context, admin string) (databaseURLs, error) {
	urls := databaseURLs{admin: admin}
	for group, to := range map[string]*string{
		"berth_scheduler": &urls.scheduler, "berth_gateway": &urls.gateway, "berth_sessions": &urls.sessions,
	} {
		login := strings.Replace(group, "berth_", "berth_dev_", 1)
		if s.server == nil {
			login += "_" + s.state.Suffix // other stacks may use the same server
		}
		password := s.state.password(group)
		if err := migrate.EnsureLogin(ctx, admin, login, password, group); err != nil {
			return databaseURLs{}, err
		}
		if s.server != nil {
			*to = s.server.URLAs(login, password, database)
			continue
		}
		as, err := withLogin(admin, login, password)
		if err != nil {
			return databaseURLs{}, err
		}
		*to = as
	}
	return urls, s.state.save()
}

// withLogin returns a database URL, or libpq's keyword form, for another login.
func withLogin(text, login, password string) (string, error) {
	if !strings.Contains(text, "://") {
		// The last value of a keyword counts. Both values are made here, of letters, digits and "_".
		return fmt.Sprintf("%s user=%s password=%s", text, login, password), nil
	}
	u, err := url.Parse(text)
	if err != nil {
		return "", fmt.Errorf("--database-url: a URL like postgres://user@host:5432/berth is wanted")
	}
	query := u.Query()
	query.Del("user")
	query.Del("password")
	u.RawQuery = query.Encode()
	u.User = url.UserPassword(login, password)
	return u.String(), nil
}
