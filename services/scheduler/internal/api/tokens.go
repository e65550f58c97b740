package api

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"net/netip"
	"strings"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"berth/services/internal/rpcerr"
)

// Role is what a caller may be.
type Role string

// The roles.
const (
	Node       Role = "node"
	Gateway    Role = "gateway"
	Dispatcher Role = "dispatcher"
	Operator   Role = "operator"
)

// firstBerthField is the lowest field number that is not AgentENV's.
const firstBerthField = 100

// access says who may call a method. A method that is open may be called without a token, as long as
// no Berth field is set.
type access struct {
	open  bool
	roles []Role
}

// rules has every method that is served, by its gRPC name.
var rules = map[string]access{ //nolint:gochecknoglobals // a constant table
	"scheduler.v1.Scheduler/Schedule":           {true, []Role{Gateway, Dispatcher}},
	"scheduler.v1.Scheduler/RecordAssignment":   {true, []Role{Gateway, Dispatcher}},
	"scheduler.v1.Scheduler/LookupNode":         {true, []Role{Gateway, Dispatcher, Node, Operator}},
	"scheduler.v1.Scheduler/ListNodes":          {true, []Role{Gateway, Dispatcher, Node, Operator}},
	"scheduler.v1.Scheduler/ListObservedNodes":  {true, []Role{Gateway, Dispatcher, Node, Operator}},
	"scheduler.v1.Scheduler/GetNode":            {true, []Role{Gateway, Dispatcher, Node, Operator}},
	"scheduler.v1.Scheduler/Heartbeat":          {true, []Role{Node}},
	"scheduler.v1.Scheduler/ReportSandboxEvent": {true, []Role{Node}},
	"scheduler.v1.Scheduler/UnregisterNode":     {true, []Role{Node}},
	"scheduler.v1.Scheduler/ListP2pPeers":       {true, []Role{Node}},
	"scheduler.v1.Scheduler/RecordP2pArtifact":  {true, []Role{Node}},
	"scheduler.v1.Scheduler/ForgetP2pArtifact":  {true, []Role{Node}},
	"scheduler.v1.Scheduler/LookupP2pArtifact":  {true, []Role{Node}},

	"scheduler.v1.Placements/ExtendPlacement":  {false, []Role{Gateway, Dispatcher}},
	"scheduler.v1.Placements/ReleasePlacement": {false, []Role{Gateway, Dispatcher}},
	"scheduler.v1.Placements/ReleaseSandbox":   {false, []Role{Gateway, Dispatcher}},

	"admin.v1.Placements/ExplainPlacement": {false, []Role{Operator}},
	"admin.v1.Placements/ListPlacements":   {false, []Role{Operator}},

	"admin.v1.Quotas/Get":  {false, []Role{Operator}},
	"admin.v1.Quotas/Set":  {false, []Role{Operator}},
	"admin.v1.Quotas/List": {false, []Role{Operator}},

	"admin.v1.Nodes/ListNodes":    {false, []Role{Operator}},
	"admin.v1.Nodes/GetNode":      {false, []Role{Operator}},
	"admin.v1.Nodes/RegisterNode": {false, []Role{Operator}},
	"admin.v1.Nodes/RemoveNode":   {false, []Role{Operator}},
	"admin.v1.Nodes/CordonNode":   {false, []Role{Operator}},
	"admin.v1.Nodes/UncordonNode": {false, []Role{Operator}},
	"admin.v1.Nodes/StartDrain":   {false, []Role{Operator}},
	"admin.v1.Nodes/GetDrain":     {false, []Role{Operator}},
	"admin.v1.Nodes/ListDrains":   {false, []Role{Operator}},
	"admin.v1.Nodes/CancelDrain":  {false, []Role{Operator}},
	"admin.v1.Nodes/ListOrphans":  {false, []Role{Operator}},
	"admin.v1.Nodes/ListEvents":   {false, []Role{Operator}},
}

// TokenConfig is the tokens of each role, several for rotation.
type TokenConfig struct {
	Node, Gateway, Dispatcher, Operator []string

	// Require refuses callers without a token everywhere. Without it they have what is open, and from
	// loopback every role that has no tokens.
	Require bool
}

// Tokens tells who a caller is.
type Tokens struct {
	known   []knownToken
	absent  []Role // roles without tokens
	require bool
}

type knownToken struct {
	digest [sha256.Size]byte
	role   Role
}

// NewTokens returns the tokens of c; blank ones are left out.
func NewTokens(c TokenConfig) *Tokens {
	t := &Tokens{require: c.Require}
	for _, of := range []struct {
		role   Role
		tokens []string
	}{{Node, c.Node}, {Gateway, c.Gateway}, {Dispatcher, c.Dispatcher}, {Operator, c.Operator}} {
		before := len(t.known)
		for _, token := range of.tokens {
			if token = strings.TrimSpace(token); token != "" {
				t.known = append(t.known, knownToken{sha256.Sum256([]byte(token)), of.role})
			}
		}
		if len(t.known) == before {
			t.absent = append(t.absent, of.role)
		}
	}
	return t
}

// caller is who calls, as far as the transport knows.
type caller struct {
	authorization string     // of the header or metadata, as sent
	address       netip.Addr // invalid where it is not known
}

type callerKey struct{}

func withCaller(ctx context.Context, c caller) context.Context {
	return context.WithValue(ctx, callerKey{}, c)
}

func callerOf(ctx context.Context) caller {
	c, _ := ctx.Value(callerKey{}).(caller)
	return c
}

// roles returns what c may be. A token that is sent must be known; every known one is compared, in
// constant time, so that the answer's time tells nothing.
func (t *Tokens) roles(c caller) (map[Role]bool, error) {
	granted := map[Role]bool{}
	scheme, token, _ := strings.Cut(c.authorization, " ")
	if c.authorization != "" {
		digest := sha256.Sum256([]byte(strings.TrimSpace(token)))
		for _, known := range t.known {
			if subtle.ConstantTimeCompare(digest[:], known.digest[:]) == 1 {
				granted[known.role] = true
			}
		}
		if !strings.EqualFold(scheme, "bearer") || len(granted) == 0 {
			return nil, rpcerr.ErrUnauthenticated
		}
		return granted, nil
	}
	if t.require {
		return nil, rpcerr.ErrUnauthenticated
	}
	if c.address.Unmap().IsLoopback() {
		for _, role := range t.absent {
			granted[role] = true
		}
	}
	return granted, nil
}

// authorize returns nil if c may call method with request. The error is rpcerr.ErrUnauthenticated or
// rpcerr.ErrDenied.
func (t *Tokens) authorize(c caller, method string, request any) error {
	rule, known := rules[method]
	if !known {
		return rpcerr.ErrDenied
	}
	granted, err := t.roles(c)
	if err != nil {
		return err
	}
	for _, role := range rule.roles {
		if granted[role] {
			return nil
		}
	}
	message, isMessage := request.(proto.Message)
	switch {
	case rule.open && !t.require && isMessage && !hasBerthField(message.ProtoReflect()):
		return nil
	case c.authorization == "":
		return rpcerr.ErrUnauthenticated
	}
	return rpcerr.ErrDenied
}

// may reports whether the caller of ctx has role.
func (t *Tokens) may(ctx context.Context, role Role) bool {
	granted, err := t.roles(callerOf(ctx))
	return err == nil && granted[role]
}

// hasBerthField reports whether m or a message in it has a field that AgentENV does not know.
func hasBerthField(m protoreflect.Message) bool {
	found := false
	m.Range(func(field protoreflect.FieldDescriptor, value protoreflect.Value) bool {
		switch {
		case field.Number() >= firstBerthField:
			found = true
		case field.IsMap() || field.Message() == nil:
		case field.IsList():
			for i := range value.List().Len() {
				found = found || hasBerthField(value.List().Get(i).Message())
			}
		default:
			found = hasBerthField(value.Message())
		}
		return !found
	})
	return found
}
