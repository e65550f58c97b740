package demo

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"
)

// binding is what must not change while others die.
type binding struct{ state, node, revision, incarnation string }

// showBinding shows the row of a sandbox as psql does, and returns it.
func (s *story) showBinding(ctx context.Context, sandbox string) (binding, error) {
	// The id came from a gateway and is a DNS label; psql quotes it all the same.
	const query = `SELECT sandbox_id, state, node_id, revision, incarnation, bound_at FROM bindings WHERE sandbox_id = :'sandbox'`
	s.command("psql \"$URL\" -c \"%s\"", strings.ReplaceAll(query, ":'sandbox'", "'"+sandbox+"'"))
	shown, err := s.psql(ctx, query, sandbox)
	if err != nil {
		return binding{}, err
	}
	s.result("%s", shown)
	row, err := s.psql(ctx, query, sandbox, "-A", "-t")
	if err != nil {
		return binding{}, err
	}
	fields := strings.Split(strings.TrimSpace(row), "|")
	if len(fields) != 6 || fields[1] != "bound" {
		return binding{}, fmt.Errorf("the binding of %s is %q, want one bound row", sandbox, row)
	}
	return binding{state: fields[1], node: fields[2], revision: fields[3], incarnation: fields[4]}, nil
}

// waitNoReservations waits until no row holds room: open ones are gone with their creates, confirmed
// ones go when the node's next heartbeat shows the sandbox.
func (s *story) waitNoReservations(ctx context.Context) error {
	const query = `SELECT count(*) FILTER (WHERE sandbox_id IS NULL) AS open, count(*) AS reservations FROM reservations`
	s.command("psql \"$URL\" -c \"%s\"", query)
	ctx, cancel := context.WithTimeout(ctx, settleTime)
	defer cancel()
	for {
		row, err := s.psql(ctx, query, "", "-A", "-t")
		if err != nil {
			return err
		}
		row = strings.TrimSpace(row)
		if row == "0|0" {
			s.result("open 0, reservations 0")
			return nil
		}
		if err := wait(ctx, pollPause); err != nil {
			return fmt.Errorf("room is still held (open|all): %s: %w", row, err)
		}
	}
}

// psql runs a query as the reader would, and returns what psql prints.
func (s *story) psql(ctx context.Context, query, sandbox string, flags ...string) (string, error) {
	args := append([]string{"-X", "-q", "-P", "pager=off", "-v", "ON_ERROR_STOP=1", "-v", "sandbox=" + sandbox, "-d", s.info.DatabaseURL}, flags...)
	cmd := exec.CommandContext(ctx, "psql", args...)
	cmd.Stdin = strings.NewReader(query + ";\n") // variables are replaced in a script only, not in -c
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if errors.Is(err, exec.ErrNotFound) {
		return "", errors.New("psql is missing; install it (apt-get install postgresql-client)")
	}
	if err != nil {
		return "", fmt.Errorf("psql: %w: %s", err, strings.TrimSpace(stderr.String()))
	}
	return string(out), nil
}
