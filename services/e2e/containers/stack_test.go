//go:build containers

package containers

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

const (
	upLimit   = 5 * time.Minute
	downLimit = 2 * time.Minute
	runScript = "deployments/compose/run.sh"
)

// stack is the compose project of one test.
type stack struct {
	t       *testing.T
	root    string
	project string
	secrets string
	env     []string
	ports   [2]int // of the gateways on the host
}

// bringUp starts the stack with a project name, secrets and ports of its own, and takes it down with
// its volumes when t ends. The images are those that make image built.
func bringUp(t *testing.T) *stack {
	t.Helper()
	root, err := filepath.Abs("../../..")
	if err != nil {
		t.Fatal(err)
	}
	s := &stack{t: t, root: root, project: fmt.Sprintf("berthtest%d", os.Getpid()), secrets: filepath.Join(t.TempDir(), "env")}
	for i := range s.ports {
		s.ports[i] = freePort(t)
	}
	s.env = append(os.Environ(),
		"BERTH_LOCAL_IMAGES=1", "COMPOSE_PROJECT_NAME="+s.project, "BERTH_ENV_FILE="+s.secrets,
		fmt.Sprintf("BERTH_GATEWAY_1_PORT=%d", s.ports[0]), fmt.Sprintf("BERTH_GATEWAY_2_PORT=%d", s.ports[1]))

	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), downLimit)
		defer cancel()
		if t.Failed() {
			t.Logf("containers:\n%s", s.output(ctx, runScript, "ps"))
			for _, service := range []string{"migrate", "logins", "scheduler-1", "gateway-1", "gateway-2", "node-1", "node-2"} {
				t.Logf("%s:\n%s", service, s.output(ctx, docker(), "logs", "--tail", "40", s.container(service)))
			}
		}
		command := s.command(ctx, runScript, "down")
		command.Env = append(command.Env, "V=1")
		if out, err := command.CombinedOutput(); err != nil {
			t.Errorf("take the stack down: %v\n%s", err, out)
		}
	})
	ctx, cancel := context.WithTimeout(t.Context(), upLimit)
	defer cancel()
	if out, err := s.command(ctx, runScript, "up").CombinedOutput(); err != nil {
		t.Fatalf("bring the stack up: %v\n%s", err, out)
	}
	return s
}

// in returns the same stack for a test inside.
func (s *stack) in(t *testing.T) *stack {
	inner := *s
	inner.t = t
	return &inner
}

// docker is the client's name.
func docker() string {
	if name := os.Getenv("BERTH_DOCKER"); name != "" {
		return name
	}
	return "docker"
}

func (s *stack) command(ctx context.Context, name string, args ...string) *exec.Cmd {
	if strings.Contains(name, "/") && !filepath.IsAbs(name) {
		name = filepath.Join(s.root, name)
	}
	command := exec.CommandContext(ctx, name, args...)
	command.Dir, command.Env = s.root, s.env
	return command
}

// output runs a command for the log of a failed test.
func (s *stack) output(ctx context.Context, name string, args ...string) string {
	out, err := s.command(ctx, name, args...).CombinedOutput()
	if err != nil {
		return fmt.Sprintf("%s(%v)", out, err)
	}
	return string(out)
}

// run runs a command that has to work and returns what it printed.
func (s *stack) run(name string, args ...string) string {
	s.t.Helper()
	command := s.command(s.t.Context(), name, args...)
	var stderr bytes.Buffer
	command.Stderr = &stderr
	out, err := command.Output()
	if err != nil {
		s.t.Fatalf("%s %v: %v\n%s", name, args, err, stderr.Bytes())
	}
	return strings.TrimSpace(string(out))
}

// container is the container of a service: compose 1 joins the words by _, compose 2 by -.
func (s *stack) container(service string) string {
	out, err := s.command(context.WithoutCancel(s.t.Context()), docker(), "ps", "-aq",
		"--filter", "label=com.docker.compose.project="+s.project, "--filter", "label=com.docker.compose.service="+service).Output()
	if err != nil {
		return service
	}
	return strings.TrimSpace(string(out))
}

// kill ends a service's container with SIGKILL. The engine takes that for the operator's wish, so its restart
// policy leaves it dead.
func (s *stack) kill(services ...string) {
	s.t.Helper()
	for _, service := range services {
		s.run(docker(), "kill", s.container(service))
	}
}

// secret returns a value that make deploy-up drew.
func (s *stack) secret(name string) string {
	s.t.Helper()
	text, err := os.ReadFile(s.secrets)
	if err != nil {
		s.t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if value, found := strings.CutPrefix(strings.TrimSpace(line), name+"="); found {
			return value
		}
	}
	s.t.Fatalf("no %s in the secrets", name)
	return ""
}

// sql asks the stack's database one question with one answer, as make deploy-up's superuser.
func (s *stack) sql(query string) string {
	s.t.Helper()
	return s.run(docker(), "exec", s.container("postgres"), "psql", "-h", "127.0.0.1", "-U", "postgres", "-d",
		"postgres://postgres:"+s.secret("POSTGRES_PASSWORD")+"@127.0.0.1/berth", "-Atc", query)
}

func freePort(t *testing.T) int {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	return listener.Addr().(*net.TCPAddr).Port
}
