package dev

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"berth/pkg/twirpkit"
	schedulerv1 "berth/rpc/scheduler/v1"
)

const (
	pollPause = 50 * time.Millisecond
	probeTime = 3 * time.Second
)

// startServices starts schedulers, then nodes and gateways, which need one, and waits until a create
// would find a node.
func (s *Stack) startServices(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	// All ports are chosen before the first process runs, and remembered for the next start.
	var schedulers, others []*process
	for i := range s.o.Schedulers {
		p, err := s.scheduler(i + 1)
		if err != nil {
			return err
		}
		schedulers = append(schedulers, p)
	}
	for i := range s.o.Nodes {
		p, err := s.node(i+1, schedulers)
		if err != nil {
			return err
		}
		others = append(others, p)
	}
	for i := range s.o.Gateways {
		p, err := s.gateway(i+1, schedulers)
		if err != nil {
			return err
		}
		others = append(others, p)
	}
	if err := s.state.save(); err != nil {
		return err
	}
	if err := s.launchAll(ctx, schedulers); err != nil {
		return err
	}
	if err := s.launchAll(ctx, others); err != nil {
		return err
	}
	return s.waitNodes(ctx, schedulers)
}

// launchAll starts processes side by side and waits until each is ready.
func (s *Stack) launchAll(ctx context.Context, processes []*process) error {
	for _, p := range processes {
		if err := s.launch(p); err != nil {
			return err
		}
	}
	group, ctx := errgroup.WithContext(ctx)
	for _, p := range processes {
		group.Go(func() error { return s.waitReady(ctx, p) })
	}
	return group.Wait()
}

func (s *Stack) scheduler(n int) (*process, error) {
	p := &process{kind: scheduler, name: fmt.Sprintf("scheduler-%d", n)}
	listen, err := s.listen(p, "grpc", "twirp", "ops", "admin")
	if err != nil {
		return nil, err
	}
	p.grpc, p.twirp = listen["grpc"], listen["twirp"]
	p.args = append([]string{
		"scheduler", "serve", "--register",
		"--grpc-listen", listen["grpc"], "--twirp-listen", listen["twirp"],
		"--ops-listen", listen["ops"], "--admin-listen", listen["admin"], "--drain-delay", "0s",
	}, s.logFlags()...)
	p.env = []string{
		"BERTH_DATABASE_URL=" + s.urls.scheduler,
		"BERTH_SCHEDULER_NODE_TOKENS=" + s.state.NodeToken,
		"BERTH_SCHEDULER_GATEWAY_TOKENS=" + s.state.GatewayToken,
		"BERTH_SCHEDULER_OPERATOR_TOKENS=" + s.state.OperatorToken,
		// Nobody has it. A role without a token would be every local process's.
		"BERTH_SCHEDULER_DISPATCHER_TOKENS=" + s.state.DispatcherToken,
		"BERTH_ENDPOINT_LOOPBACK=true",
	}
	return p, nil
}

func (s *Stack) node(n int, schedulers []*process) (*process, error) {
	p := &process{kind: nodeagent, name: fmt.Sprintf("node-%d", n)}
	listen, err := s.listen(p, "public", "ops", "admin")
	if err != nil {
		return nil, err
	}
	p.public = listen["public"]
	p.args = append([]string{
		"nodeagent", "serve", "--node-id", p.name, "--listen", listen["public"], "--endpoint", "http://" + listen["public"],
		"--ops-listen", listen["ops"], "--admin-listen", listen["admin"],
		"--data", filepath.Join(s.dir, "nodes", p.name), "--domain", s.o.Domain,
		"--scheduler-grpc", addresses(from(schedulers, n), "", func(p *process) string { return p.grpc }),
	}, s.logFlags()...)
	if s.o.Templates != "" {
		p.args = append(p.args, "--templates", s.o.Templates)
	}
	if s.o.Isolation != "" {
		p.args = append(p.args, "--isolation", s.o.Isolation)
	}
	p.env = []string{"BERTH_SCHEDULER_TOKEN=" + s.state.NodeToken, "BERTH_NODE_KEY=" + s.state.NodeKey}
	return p, nil
}

func (s *Stack) gateway(n int, schedulers []*process) (*process, error) {
	p := &process{kind: gateway, name: fmt.Sprintf("gateway-%d", n)}
	listen, err := s.listen(p, "public", "ops", "admin")
	if err != nil {
		return nil, err
	}
	p.public = listen["public"]
	p.args = append([]string{
		"gateway", "serve", "--listen", listen["public"], "--ops-listen", listen["ops"], "--admin-listen", listen["admin"],
		"--domains", s.o.Domain,
		// No balancer looks at /readyz here, and whoever presses Ctrl-C does not wait a minute for streams.
		"--drain-delay", "100ms", "--stream-grace", "3s",
	}, s.logFlags()...)
	p.env = []string{
		"BERTH_DATABASE_URL=" + s.urls.gateway, "BERTH_DATABASE_DIRECT_URL=" + s.urls.gateway,
		"BERTH_GATEWAY_SESSIONS_DATABASE_URL=" + s.urls.sessions,
		"BERTH_SCHEDULER_URL=" + addresses(from(schedulers, n), "http://", func(p *process) string { return p.twirp }),
		"BERTH_SCHEDULER_TOKEN=" + s.state.GatewayToken,
		"BERTH_API_KEY=" + s.state.APIKey, "BERTH_NODE_KEY=" + s.state.NodeKey,
		"BERTH_CLUSTER_SECRET=" + s.state.ClusterSecret, "BERTH_ENDPOINT_LOOPBACK=true",
	}
	return p, nil
}

// listen chooses the addresses of p's listeners by name.
func (s *Stack) listen(p *process, names ...string) (map[string]string, error) {
	chosen := map[string]string{}
	for _, name := range names {
		address, err := s.state.address(p.name + " " + name)
		if err != nil {
			return nil, err
		}
		chosen[name] = address
	}
	p.ops = chosen["ops"]
	return chosen, nil
}

func (s *Stack) logFlags() []string {
	flags := []string{"--log-format", "console"}
	if s.o.LogLevel != "" {
		flags = append(flags, "--log-level", s.o.LogLevel)
	}
	return flags
}

// from returns the schedulers with the n-th first, so that all have work.
func from(schedulers []*process, n int) []*process {
	first := (n - 1) % len(schedulers)
	return slices.Concat(schedulers[first:], schedulers[:first])
}

func addresses(processes []*process, scheme string, of func(*process) string) string {
	texts := make([]string, len(processes))
	for i, p := range processes {
		texts[i] = scheme + of(p)
	}
	return strings.Join(texts, ",")
}

// waitReady asks p's /readyz until it says yes. A process that ends before is an error at once.
func (s *Stack) waitReady(ctx context.Context, p *process) error {
	_, ended := p.present()
	client := &http.Client{Timeout: probeTime, Transport: &http.Transport{DisableKeepAlives: true}}
	last := "it did not answer"
	for {
		status, err := probe(ctx, client, "http://"+p.ops+"/readyz")
		if status == http.StatusOK {
			return nil
		}
		if err == nil {
			last = "/readyz says " + strconv.Itoa(status)
		}
		timer := time.NewTimer(pollPause)
		select {
		case <-timer.C:
		case <-ended:
			timer.Stop()
			return fmt.Errorf("%s ended while it started:\n%s", p.name, s.logs.tailOf(p.name))
		case <-ctx.Done():
			timer.Stop()
			if errors.Is(ctx.Err(), context.Canceled) {
				return ctx.Err()
			}
			return fmt.Errorf("%s was not ready within %v: %s:\n%s", p.name, readyTimeout, last, s.logs.tailOf(p.name))
		}
	}
}

func probe(ctx context.Context, client *http.Client, url string) (int, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return 0, err
	}
	resp, err := client.Do(req)
	if err != nil {
		return 0, err
	}
	return resp.StatusCode, resp.Body.Close()
}

// waitNodes waits until each scheduler knows that all nodes are ready.
func (s *Stack) waitNodes(ctx context.Context, schedulers []*process) error {
	for _, p := range schedulers {
		caller, err := twirpkit.NewFailover([]string{"http://" + p.twirp}, twirpkit.FailoverOptions{Token: s.state.GatewayToken})
		if err != nil {
			return fmt.Errorf("ask %s for nodes: %w", p.name, err)
		}
		client := schedulerv1.NewSchedulerProtobufClient(caller.Base(), caller)
		err = s.waitNodesOf(ctx, client)
		caller.CloseIdleConnections()
		if err != nil {
			return fmt.Errorf("ask %s for nodes: %w", p.name, err)
		}
	}
	return nil
}

func (s *Stack) waitNodesOf(ctx context.Context, client schedulerv1.Scheduler) error {
	for {
		answer, err := client.ListObservedNodes(ctx, &schedulerv1.ListObservedNodesRequest{})
		if err != nil {
			return err
		}
		ready := 0
		for _, n := range answer.GetNodes() {
			if n.GetSnapshot().GetStatus() == schedulerv1.NodeStatus_NODE_STATUS_READY {
				ready++
			}
		}
		if ready >= s.o.Nodes {
			return nil
		}
		timer := time.NewTimer(pollPause)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return fmt.Errorf("%d of %d nodes became ready within %v", ready, s.o.Nodes, readyTimeout)
		}
	}
}
