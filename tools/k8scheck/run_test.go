package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"berth/pkg/pgtest"
)

const (
	startLimit = 5 * time.Minute
	askPause   = 50 * time.Millisecond
)

// cell runs what an overlay's containers would, as processes of this machine.
type cell struct {
	t       *testing.T
	objects []object
	secrets []object
	server  *pgtest.Server
	folder  string // for what a Pod has volumes for
	program string
}

// process is one container.
type process struct {
	container corev1.Container
	grace     time.Duration
	cmd       *exec.Cmd
	out       *lockedBuffer
	ended     chan error
	addresses map[string]string // of its ports, by name
}

type lockedBuffer struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

func (c *cell) workload(kind, name string) workload {
	c.t.Helper()
	for _, w := range workloads(c.objects) {
		if w.kind == kind && w.name == name {
			return w
		}
	}
	c.t.Fatalf("no %s %s", kind, name)
	return workload{}
}

// secret returns a value, with the test's server where the value is the URL of a database.
func (c *cell) secret(namespace, name, key string) string {
	c.t.Helper()
	for _, o := range c.secrets {
		s, ok := o.value.(*corev1.Secret)
		if !ok || o.namespace != namespace || o.name != name {
			continue
		}
		value := s.StringData[key]
		u, err := url.Parse(value)
		if err != nil || u.Scheme != "postgres" {
			return value
		}
		if key == "migrate-url" {
			return c.server.URL("postgres") // the superuser of that server has no password
		}
		here, err := url.Parse(c.server.URL("postgres"))
		if err != nil {
			c.t.Fatal(err)
		}
		here.User = u.User
		return here.String()
	}
	c.t.Fatalf("no secret %s/%s", namespace, name)
	return ""
}

// environment is what the kubelet would give a container.
func (c *cell) environment(w workload, container corev1.Container) map[string]string {
	c.t.Helper()
	env := map[string]string{}
	for _, e := range container.Env {
		switch from := e.ValueFrom; {
		case from == nil:
			env[e.Name] = e.Value
		case from.SecretKeyRef != nil:
			env[e.Name] = c.secret(w.namespace, from.SecretKeyRef.Name, from.SecretKeyRef.Key)
		case from.ConfigMapKeyRef != nil:
			found, _ := (&checker{objects: c.objects}).find("ConfigMap", w.namespace, from.ConfigMapKeyRef.Name)
			settings, ok := found.value.(*corev1.ConfigMap)
			if !ok {
				c.t.Fatalf("no ConfigMap %s", from.ConfigMapKeyRef.Name)
			}
			env[e.Name] = settings.Data[from.ConfigMapKeyRef.Key]
		case from.FieldRef != nil:
			env[e.Name] = map[string]string{"metadata.name": w.name + "-x7k2p", "status.podIP": "127.0.0.1"}[from.FieldRef.FieldPath]
		case from.ResourceFieldRef != nil:
			env[e.Name] = limit(container, *from.ResourceFieldRef)
		}
	}
	return env
}

func limit(container corev1.Container, from corev1.ResourceFieldSelector) string {
	q := container.Resources.Limits[corev1.ResourceName(strings.TrimPrefix(from.Resource, "limits."))]
	if from.Divisor == resource.MustParse("1m") {
		return fmt.Sprint(q.MilliValue())
	}
	return fmt.Sprint(q.Value() / from.Divisor.Value())
}

// start runs a container. listen are the variables of its ports, by name: each gets a free port of this
// machine. more goes above what the manifest says.
func (c *cell) start(w workload, container corev1.Container, listen, more map[string]string) *process {
	c.t.Helper()
	p := &process{container: container, out: &lockedBuffer{}, ended: make(chan error, 1), addresses: map[string]string{}, grace: 30 * time.Second}
	if s := w.pod.Spec.TerminationGracePeriodSeconds; s != nil {
		p.grace = time.Duration(*s) * time.Second
	}
	env := c.environment(w, container)
	replace := map[string]string{"/var/lib/berth": c.folder}
	for _, port := range container.Ports {
		address := freeAddress(c.t)
		p.addresses[port.Name], env[listen[port.Name]] = address, address
		replace[fmt.Sprintf("127.0.0.1:%d", port.ContainerPort)] = address
	}
	maps.Copy(env, more)
	var args []string
	for _, arg := range container.Args {
		arg = reference.ReplaceAllStringFunc(arg, func(r string) string { return env[r[2:len(r)-1]] })
		for from, to := range replace {
			arg = strings.ReplaceAll(arg, from, to)
		}
		args = append(args, arg)
	}
	p.cmd = exec.Command(c.program, args...)
	p.cmd.Stdout, p.cmd.Stderr = p.out, p.out
	p.cmd.Env = []string{"PATH=" + os.Getenv("PATH")}
	for name, value := range env {
		p.cmd.Env = append(p.cmd.Env, name+"="+value)
	}
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := p.cmd.Start(); err != nil {
		c.t.Fatal(err)
	}
	go func() { p.ended <- p.cmd.Wait(); close(p.ended) }()
	c.t.Cleanup(func() {
		_ = p.cmd.Process.Kill() // it has ended, unless the test has failed
		<-p.ended
		if c.t.Failed() {
			c.t.Logf("%s wrote:\n%s", container.Name, p.out)
		}
	})
	return p
}

// finish waits for a container that runs once.
func (c *cell) finish(p *process) {
	c.t.Helper()
	select {
	case err := <-p.ended:
		if err != nil {
			c.t.Fatalf("%s: %v", p.container.Name, err)
		}
	case <-time.After(startLimit):
		c.t.Fatalf("%s does not end", p.container.Name)
	}
}

// ready asks a container's readiness probe until it says yes.
func (c *cell) ready(p *process) {
	c.t.Helper()
	probe := p.container.ReadinessProbe.HTTPGet
	c.eventually(p, func() error {
		status, body := ask(c.t, http.MethodGet, "http://"+p.addresses[probe.Port.StrVal]+probe.Path, "", "")
		if status != http.StatusOK {
			return fmt.Errorf("%s: %d %s", probe.Path, status, body)
		}
		return nil
	})
}

func (c *cell) eventually(p *process, f func() error) {
	c.t.Helper()
	deadline := time.NewTimer(startLimit)
	defer deadline.Stop()
	tick := time.NewTicker(askPause)
	defer tick.Stop()
	for {
		err := f()
		if err == nil {
			return
		}
		select {
		case ended := <-p.ended:
			c.t.Fatalf("%s ended: %v", p.container.Name, ended)
		case <-deadline.C:
			c.t.Fatalf("%s, not within %v: %v", p.container.Name, startLimit, err)
		case <-tick.C:
		}
	}
}

// stop ends a container as the kubelet does. It must be through in its grace.
func (c *cell) stop(p *process) {
	c.t.Helper()
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		c.t.Errorf("stop %s: %v", p.container.Name, err)
		return
	}
	select {
	case err := <-p.ended:
		if err != nil {
			c.t.Errorf("%s ended with %v, want a clean end", p.container.Name, err)
		}
	case <-time.After(p.grace):
		c.t.Errorf("%s would be killed after %v", p.container.Name, p.grace)
	}
}

func freeAddress(t *testing.T) string {
	t.Helper()
	var config net.ListenConfig
	l, err := config.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	return l.Addr().String()
}

func ask(t *testing.T, method, url, key, body string) (int, string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 10*time.Second)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, method, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	if key != "" {
		request.Header.Set("X-API-Key", key)
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return 0, err.Error()
	}
	defer func() { _ = response.Body.Close() }()
	text, err := io.ReadAll(io.LimitReader(response.Body, 1<<20))
	if err != nil && !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Fatal(err)
	}
	return response.StatusCode, string(text)
}

var sandboxID = regexp.MustCompile(`"sandboxID":\s*"([^"]+)"`)

// TestContainersRunAsTheManifestsSay starts every container of the overlay for development with its own
// arguments and variables, but for addresses, and creates a sandbox through it. There is no API server here,
// so nodes are known by their token instead of by discovery.
func TestContainersRunAsTheManifestsSay(t *testing.T) {
	t.Parallel()
	objects, wrong := decode([]byte(rendered(t, "development")))
	if len(wrong) > 0 {
		t.Fatal(wrong)
	}
	folder, err := os.MkdirTemp("", "k8s-run-") //nolint:usetesting // closed to the user that sandboxes run as
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(folder) })
	if err := os.Chmod(folder, 0o755); err != nil {
		t.Fatal(err)
	}
	c := &cell{t: t, objects: objects, secrets: printedSecrets(t), server: pgtest.NewServer(t, nil), program: berth(t), folder: filepath.Join(folder, "data")}

	migrate := c.workload("Job", "berth-migrate")
	schedulers := c.workload("Deployment", "berth-scheduler")
	schedulerPorts := map[string]string{"grpc": "BERTH_SCHEDULER_GRPC_LISTEN", "twirp": "BERTH_SCHEDULER_TWIRP_LISTEN", "ops": "BERTH_SCHEDULER_OPS_LISTEN"}
	// What starts before schema and logins are there ends by itself, for the kubelet to start it again.
	early := c.start(schedulers, schedulers.pod.Spec.Containers[0], schedulerPorts, map[string]string{"BERTH_SCHEDULER_ADMIN_LISTEN": freeAddress(t)})
	select {
	case err := <-early.ended:
		if err == nil {
			t.Error("a scheduler without a login ended as if all were well")
		}
	case <-time.After(startLimit):
		t.Fatal("a scheduler without a login goes on")
	}
	for _, container := range migrate.containers() { // the kubelet runs them one after the other
		c.finish(c.start(migrate, container, nil, nil))
	}

	scheduler := c.start(schedulers, schedulers.pod.Spec.Containers[0], schedulerPorts, map[string]string{
		"BERTH_SCHEDULER_ADMIN_LISTEN": freeAddress(t), "BERTH_ENDPOINT_LOOPBACK": "true", "BERTH_SCHEDULER_REGISTER": "true",
	})
	c.ready(scheduler)
	nodes := c.workload("DaemonSet", "berth-node")
	node := c.start(nodes, nodes.pod.Spec.Containers[0], map[string]string{"http": "BERTH_NODEAGENT_LISTEN", "ops": "BERTH_NODEAGENT_OPS_LISTEN"},
		map[string]string{"BERTH_NODEAGENT_ADMIN_LISTEN": freeAddress(t), "BERTH_NODEAGENT_SCHEDULER_GRPC": scheduler.addresses["grpc"]})
	c.ready(node)
	gateways := c.workload("Deployment", "berth-gateway")
	gateway := c.start(gateways, gateways.pod.Spec.Containers[0], map[string]string{"http": "BERTH_GATEWAY_LISTEN", "ops": "BERTH_GATEWAY_OPS_LISTEN"},
		map[string]string{"BERTH_GATEWAY_ADMIN_LISTEN": freeAddress(t), "BERTH_ENDPOINT_LOOPBACK": "true", "BERTH_SCHEDULER_URL": "http://" + scheduler.addresses["twirp"]})
	c.ready(gateway)

	key := c.secret("berth", "berth-gateway", "api-key")
	var id string
	c.eventually(gateway, func() error {
		status, body := ask(t, http.MethodPost, "http://"+gateway.addresses["http"]+"/sandboxes", key, `{"templateID": "echo", "timeout": 300}`)
		found := sandboxID.FindStringSubmatch(body)
		if status != http.StatusCreated || found == nil {
			return fmt.Errorf("create: %d %s", status, body)
		}
		id = found[1]
		return nil
	})
	if status, body := ask(t, http.MethodDelete, "http://"+gateway.addresses["http"]+"/sandboxes/"+id, key, ""); status != http.StatusNoContent {
		t.Errorf("delete: %d %s", status, body)
	}
	if status, _ := ask(t, http.MethodPost, "http://"+gateway.addresses["http"]+"/sandboxes", "wrong", `{"templateID": "echo"}`); status != http.StatusUnauthorized {
		t.Errorf("a create with a wrong key: %d, want 401", status)
	}
	for _, p := range []*process{gateway, node, scheduler} {
		c.stop(p)
	}
}
