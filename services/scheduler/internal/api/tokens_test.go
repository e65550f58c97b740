package api

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"net/netip"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	adminv1 "berth/rpc/admin/v1"
	schedulerv1 "berth/rpc/scheduler/v1"
	"berth/services/internal/rpcerr"
	"berth/services/scheduler/internal/placement"
)

func protoName(s string) protoreflect.Name { return protoreflect.Name(s) }

func newMessage(t *testing.T, name protoreflect.FullName) proto.Message {
	t.Helper()
	kind, err := protoregistry.GlobalTypes.FindMessageByName(name)
	if err != nil {
		t.Fatal(err)
	}
	return kind.New().Interface()
}

func TestAuthorize(t *testing.T) {
	t.Parallel()
	remote, loopback := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("::ffff:127.0.0.1")
	theirs, ours := &schedulerv1.ScheduleRequest{}, &schedulerv1.ScheduleRequest{RequestId: "r"}
	onlyNode := TokenConfig{Node: []string{nodeToken}}
	tests := map[string]struct {
		config        TokenConfig
		authorization string
		address       netip.Addr
		method        string
		request       proto.Message
		want          error
	}{
		"AgentENV's fields need no token":            {config: allTokens(), address: remote, method: "scheduler.v1.Scheduler/Schedule", request: theirs},
		"unless tokens are required":                 {config: TokenConfig{Require: true}, address: loopback, method: "scheduler.v1.Scheduler/Schedule", request: theirs, want: rpcerr.ErrUnauthenticated},
		"Berth's fields need one":                    {config: allTokens(), address: loopback, method: "scheduler.v1.Scheduler/Schedule", request: ours, want: rpcerr.ErrUnauthenticated},
		"a gateway has them":                         {config: allTokens(), authorization: "Bearer " + gatewayToken, address: remote, method: "scheduler.v1.Scheduler/Schedule", request: ours},
		"the scheme is of any case":                  {config: allTokens(), authorization: "bearer " + gatewayToken, address: remote, method: "scheduler.v1.Scheduler/Schedule", request: ours},
		"another scheme is none":                     {config: allTokens(), authorization: "Basic " + gatewayToken, address: remote, method: "scheduler.v1.Scheduler/Schedule", request: ours, want: rpcerr.ErrUnauthenticated},
		"a node may not place":                       {config: allTokens(), authorization: "Bearer " + nodeToken, address: remote, method: "scheduler.v1.Scheduler/Schedule", request: ours, want: rpcerr.ErrDenied},
		"a gateway may not beat":                     {config: allTokens(), authorization: "Bearer " + gatewayToken, method: "scheduler.v1.Scheduler/Heartbeat", request: &schedulerv1.HeartbeatRequest{Endpoint: "x"}, want: rpcerr.ErrDenied},
		"the older token of a list counts":           {config: allTokens(), authorization: "Bearer old", method: "scheduler.v1.Scheduler/Heartbeat", request: &schedulerv1.HeartbeatRequest{Endpoint: "x"}},
		"a wrong token is refused where none is due": {config: allTokens(), authorization: "Bearer wrong", address: loopback, method: "scheduler.v1.Scheduler/Schedule", request: theirs, want: rpcerr.ErrUnauthenticated},
		"an empty bearer is wrong":                   {config: allTokens(), authorization: "Bearer ", address: loopback, method: "scheduler.v1.Scheduler/Schedule", request: theirs, want: rpcerr.ErrUnauthenticated},
		"a role without tokens is loopback's":        {config: onlyNode, address: loopback, method: "scheduler.v1.Scheduler/Schedule", request: ours},
		"and nobody else's":                          {config: onlyNode, address: remote, method: "scheduler.v1.Scheduler/Schedule", request: ours, want: rpcerr.ErrUnauthenticated},
		"nor of an address that is not known":        {config: onlyNode, method: "scheduler.v1.Scheduler/Schedule", request: ours, want: rpcerr.ErrUnauthenticated},
		"a role with tokens is not loopback's":       {config: onlyNode, address: loopback, method: "scheduler.v1.Scheduler/Heartbeat", request: &schedulerv1.HeartbeatRequest{Endpoint: "x"}, want: rpcerr.ErrUnauthenticated},
		"required tokens leave loopback nothing":     {config: TokenConfig{Require: true}, address: loopback, method: "scheduler.v1.Scheduler/Schedule", request: ours, want: rpcerr.ErrUnauthenticated},
		"operators alone explain":                    {config: allTokens(), authorization: "Bearer " + operatorToken, method: "admin.v1.Placements/ExplainPlacement", request: theirs},
		"gateways do not":                            {config: allTokens(), authorization: "Bearer " + gatewayToken, method: "admin.v1.Placements/ExplainPlacement", request: theirs, want: rpcerr.ErrDenied},
		"what has no rule is denied":                 {config: allTokens(), authorization: "Bearer " + operatorToken, method: "admin.v1.Nodes/RebootNode", request: theirs, want: rpcerr.ErrDenied},
		"a field of ours deep inside counts": {
			config: allTokens(), address: remote, method: "scheduler.v1.Scheduler/ReportSandboxEvent",
			request: &schedulerv1.ReportSandboxEventRequest{Events: []*schedulerv1.SandboxEvent{{}, {Seq: 1}}}, want: rpcerr.ErrUnauthenticated,
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := caller{authorization: tt.authorization, address: tt.address}
			if got := NewTokens(tt.config).authorize(c, tt.method, tt.request); !errors.Is(got, tt.want) {
				t.Errorf("authorize(%+v, %s) = %v, want %v", c, tt.method, got, tt.want)
			}
		})
	}
}

func TestEveryMethodHasARule(t *testing.T) {
	t.Parallel()
	services := schedulerv1.File_scheduler_v1_scheduler_proto.Services()
	for i := range services.Len() {
		for j := range services.Get(i).Methods().Len() {
			method := string(services.Get(i).FullName()) + "/" + string(services.Get(i).Methods().Get(j).Name())
			if len(rules[method].roles) == 0 {
				t.Errorf("%s has no rule", method)
			}
		}
	}
}

// TestTokensCountOnBothTransports shows that headers and metadata reach the rules.
func TestTokensCountOnBothTransports(t *testing.T) {
	t.Parallel()
	h := newHarness(t, allTokens(), placement.Limits{})
	h.ready(t, "n1", 50)
	beat := func(id string) *schedulerv1.HeartbeatRequest {
		return &schedulerv1.HeartbeatRequest{NodeId: id, ServiceInstanceId: "i", Endpoint: "http://10.0.0.5:8000"}
	}
	for _, transport := range transports {
		for name, tt := range map[string]struct {
			method, token string
			request       proto.Message
			want          string
		}{
			"a gateway places":            {"Schedule", gatewayToken, &schedulerv1.ScheduleRequest{Count: 1}, "ok"},
			"a dispatcher places":         {"Schedule", dispatcherToken, &schedulerv1.ScheduleRequest{Count: 1}, "ok"},
			"nobody does without a token": {"Schedule", "", &schedulerv1.ScheduleRequest{Count: 1}, "unauthenticated"},
			"a wrong token is no token":   {"Schedule", "wrong", &schedulerv1.ScheduleRequest{Count: 1}, "unauthenticated"},
			"a node does not place":       {"Schedule", nodeToken, &schedulerv1.ScheduleRequest{Count: 1}, "permission_denied"},
			"a node registers itself":     {"Heartbeat", nodeToken, beat("by-" + transport), "ok"},
			"not without its token":       {"Heartbeat", "", beat("x"), "unauthenticated"},
			"not with another's":          {"Heartbeat", gatewayToken, beat("x"), "permission_denied"},
			"nor by AgentENV's fields":    {"Heartbeat", "", &schedulerv1.HeartbeatRequest{NodeId: "x", ServiceInstanceId: "i"}, "invalid_argument"},
			"a listed AgentENV node just beats": {"Heartbeat", "", &schedulerv1.HeartbeatRequest{
				NodeId: "n1", ServiceInstanceId: "i1", Snapshot: &schedulerv1.NodeSnapshot{Status: schedulerv1.NodeStatus_NODE_STATUS_READY},
			}, "ok"},
		} {
			got := h.call(t, transport, scheduler+tt.method, tt.token, tt.request, answerOf(t, scheduler+tt.method))
			if got.Code != tt.want {
				t.Errorf("%s over %s: %+v, want %s", name, transport, got, tt.want)
			}
		}
	}
	var known int
	if err := h.db.QueryRow(t.Context(), "SELECT count(*) FROM nodes WHERE source = 'registered'").Scan(&known); err != nil || known != 2 {
		t.Errorf("%d nodes registered (%v), want the two with a token", known, err)
	}
}

func TestTwirpTakesJSONOfAnyClient(t *testing.T) {
	t.Parallel()
	h := newHarness(t, allTokens(), placement.Limits{})
	post := func(path, body string) (int, string) {
		t.Helper()
		r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, h.twirpURL+path, bytes.NewReader([]byte(body)))
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Content-Type", "application/json")
		answer, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = answer.Body.Close() }()
		text, err := io.ReadAll(answer.Body)
		if err != nil {
			t.Fatal(err)
		}
		return answer.StatusCode, string(text)
	}
	for name, tt := range map[string]struct {
		path, body string
		status     int
		has        string
	}{
		"unknown fields are ignored":      {"/twirp/scheduler.v1.Scheduler/ListNodes", `{"not_there": 1}`, 200, `"nodes":[]`},
		"P2p is routed":                   {"/twirp/scheduler.v1.Scheduler/ListP2pPeers", `{}`, 200, `"peers":[]`},
		"P2P is too":                      {"/twirp/scheduler.v1.Scheduler/ListP2PPeers", `{}`, 200, `"peers":[]`},
		"what is no JSON is malformed":    {"/twirp/scheduler.v1.Scheduler/ListNodes", `{`, 400, "malformed"},
		"a wrong type is malformed":       {"/twirp/scheduler.v1.Scheduler/LookupNode", `{"sandbox_id": 7}`, 400, "malformed"},
		"a method that is none":           {"/twirp/scheduler.v1.Scheduler/Nothing", `{}`, 404, "bad_route"},
		"more than 4 MiB":                 {"/twirp/scheduler.v1.Scheduler/LookupNode", `{"sandbox_id": "` + strings.Repeat("a", 5<<20) + `"}`, 429, "resource_exhausted"},
		"control characters in no answer": {"/twirp/scheduler.v1.Scheduler/LookupNode", `{"sandbox_id": "\u0000"}`, 404, "sandbox assignment not found"},
	} {
		if status, text := post(tt.path, tt.body); status != tt.status || !strings.Contains(text, tt.has) {
			t.Errorf("%s: %d %.200s, want %d with %s", name, status, text, tt.status, tt.has)
		}
	}
}

func TestOperatorsAloneCallEveryMethodOfAdmin(t *testing.T) {
	t.Parallel()
	tokens := NewTokens(allTokens())
	methods := 0
	for _, file := range []protoreflect.FileDescriptor{
		adminv1.File_admin_v1_nodes_proto, adminv1.File_admin_v1_placements_proto, adminv1.File_admin_v1_quotas_proto,
	} {
		for i := range file.Services().Len() {
			service := file.Services().Get(i)
			for j := range service.Methods().Len() {
				methods++
				method := string(service.FullName()) + "/" + string(service.Methods().Get(j).Name())
				for token, want := range map[string]error{operatorToken: nil, gatewayToken: rpcerr.ErrDenied, nodeToken: rpcerr.ErrDenied} {
					if err := tokens.authorize(caller{authorization: "Bearer " + token}, method, nil); !errors.Is(err, want) {
						t.Errorf("%s: %s is answered %v, want %v", token, method, err, want)
					}
				}
				if err := tokens.authorize(caller{address: netip.MustParseAddr("10.0.0.9")}, method, nil); !errors.Is(err, rpcerr.ErrUnauthenticated) {
					t.Errorf("without a token %s is answered %v, want %v", method, err, rpcerr.ErrUnauthenticated)
				}
			}
		}
	}
	if methods < 14 {
		t.Errorf("only %d methods were found", methods)
	}
}
