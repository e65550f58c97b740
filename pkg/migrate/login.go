package migrate

import (
	"context"
	"crypto/hmac"
	"crypto/pbkdf2"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"

	"berth/pkg/pgdb"
)

// EnsureLogin makes login a role that may log in with password, is a member of group, and has the
// group's timeouts, for settings of a group are not inherited. An existing role gets the password
// and what it lacks. An empty password leaves it without one, for servers that ask for none. The
// password is ASCII; the server gets its verifier only, so that no log can hold it. group is one of Groups.
func EnsureLogin(ctx context.Context, url, login, password, group string) error {
	at := slices.Index(Groups(), group)
	if at < 0 {
		return fmt.Errorf("make login %s: %s is none of the group roles %v", login, group, Groups())
	}
	verifier, err := scramVerifier(password)
	if err != nil {
		return fmt.Errorf("make login %s: %w", login, err)
	}
	conn, err := connect(ctx, url)
	if err != nil {
		return err
	}
	defer closeConn(ctx, conn)

	create := fmt.Sprintf("CREATE ROLE %s LOGIN PASSWORD %s", quote(login), verifier)
	err = execRaced(ctx, conn, create)
	if pgdb.Code(err) == duplicateObject {
		err = execRaced(ctx, conn, fmt.Sprintf("ALTER ROLE %s LOGIN PASSWORD %s", quote(login), verifier))
	}
	if pgdb.Code(err) == insufficientPrivilege {
		return missing(conn, "create the login "+login, err, "ALTER ROLE %s CREATEROLE")
	}
	if err != nil {
		return fmt.Errorf("make login %s: %w", login, err)
	}
	grant := fmt.Sprintf("GRANT %s TO %s", quote(group), quote(login))
	err = execRaced(ctx, conn, grant)
	if pgdb.Code(err) == insufficientPrivilege {
		return missing(conn, "give "+group+" to "+login, err, "GRANT "+quote(group)+" TO %s WITH ADMIN OPTION")
	}
	if err != nil {
		return fmt.Errorf("make %s a member of %s: %w", login, group, err)
	}
	var settings []string
	var canLogin bool
	if err := conn.QueryRow(ctx, roleSettingsSQL, pgx.StrictNamedArgs{"role": login}).Scan(&settings, &canLogin); err != nil {
		return fmt.Errorf("read login %s: %w", login, err)
	}
	return setTimeouts(ctx, conn, login, groups[at].limits, settings)
}

// scramVerifier returns the quoted SCRAM-SHA-256 verifier of a password (RFC 5803), or NULL.
func scramVerifier(password string) (string, error) {
	if password == "" {
		return "NULL", nil
	}
	const iterations = 4096
	salt := make([]byte, 16)
	_, _ = rand.Read(salt) // never fails
	salted, err := pbkdf2.Key(sha256.New, password, salt, iterations, sha256.Size)
	if err != nil {
		return "", fmt.Errorf("derive a password verifier: %w", err)
	}
	stored := sha256.Sum256(sign(salted, "Client Key"))
	text := base64.StdEncoding.EncodeToString
	return fmt.Sprintf("'SCRAM-SHA-256$%d:%s$%s:%s'", iterations, text(salt), text(stored[:]), text(sign(salted, "Server Key"))), nil
}

func sign(key []byte, message string) []byte {
	mac := hmac.New(sha256.New, key)
	mac.Write([]byte(message))
	return mac.Sum(nil)
}
