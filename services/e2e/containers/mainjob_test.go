//go:build containers

package containers

import (
	"fmt"
	"net/http"
	"testing"
)

func TestTheComposeStack(t *testing.T) {
	s := bringUp(t)
	t.Run("gives its services no right they do not need", func(t *testing.T) { s.in(t).checkRights() })
	t.Run("does the main job while a scheduler and a gateway die", func(t *testing.T) { s.in(t).playMainJob() })
}

func (s *stack) playMainJob() {
	t := s.t
	one, two := s.gateway(1), s.gateway(2)

	first := one.create()
	one.use(first)
	two.use(first)
	bound := fmt.Sprintf("SELECT node_id || ' ' || state FROM bindings WHERE sandbox_id = '%s'", first)
	before := s.sql(bound)
	if before != "node-1 bound" && before != "node-2 bound" {
		t.Fatalf("the binding of %s is %q, want one of the two nodes and bound", first, before)
	}

	s.kill("scheduler-1", "gateway-1")
	if status, _ := one.api(http.MethodGet, "/sandboxes/"+first, nil); status != 0 {
		t.Fatalf("gateway 1 answers %d after it was killed", status)
	}

	second := two.create()
	two.use(second)
	two.use(first) // what was made before is still there
	two.remove(second)
	if after := s.sql(bound); after != before {
		t.Errorf("the binding of %s is %q after the kills, was %q", first, after, before)
	}

	// Whoever comes back knows what happened meanwhile.
	s.run(docker(), "start", s.container("scheduler-1"), s.container("gateway-1"))
	third := one.create()
	one.use(first)
	one.remove(first)
	one.remove(third)
	if left := s.sql("SELECT count(*) FROM bindings WHERE state = 'bound'"); left != "0" {
		t.Errorf("%s bindings are left after every sandbox was deleted", left)
	}
	if held := s.sql("SELECT count(*) FROM reservations WHERE sandbox_id IS NULL"); held != "0" {
		t.Errorf("%s holds are left", held)
	}
}

func (s *stack) checkRights() {
	t := s.t
	one := s.gateway(1)
	one.remove(one.create()) // all services are connected now
	for service, want := range map[string]string{
		"scheduler-1": "false 65532:65532 true",
		"gateway-1":   "false 65532:65532 true",
		"node-1":      "false  false",
	} {
		if got := s.run(docker(), "inspect", "-f", "{{.HostConfig.Privileged}} {{.Config.User}} {{.HostConfig.ReadonlyRootfs}}", s.container(service)); got != want {
			t.Errorf("%s: privileged, user, read-only = %q, want %q", service, got, want)
		}
	}
	for _, role := range []string{"scheduler", "gateway", "sessions"} {
		if got := s.sql(fmt.Sprintf("SELECT rolsuper OR rolcreatedb OR rolcreaterole FROM pg_roles WHERE rolname = '%s'", role)); got != "f" {
			t.Errorf("login %s may do more than its group: %q, want f", role, got)
		}
	}
	for _, role := range []string{"scheduler", "gateway"} {
		query := fmt.Sprintf("SELECT count(*) > 0 FROM pg_stat_activity WHERE usename = '%s'", role)
		if got := s.sql(query); got != "t" {
			t.Errorf("nobody is connected as %s", role)
		}
	}
}
