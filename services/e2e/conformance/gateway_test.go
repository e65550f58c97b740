package conformance

import (
	"fmt"
	"net/http"
	"testing"

	"google.golang.org/grpc/codes"
)

// agentGateway is one process of AgentENV's gateway, with its own connection to the scheduler.
type agentGateway struct {
	t    *testing.T
	wire wire
}

// httpStatus is what AgentENV's gateway answers its client for an error of the scheduler.
func httpStatus(err error) int {
	switch code, _ := refused(err); code {
	case codes.OK:
		return http.StatusOK
	case codes.InvalidArgument:
		return http.StatusBadRequest
	case codes.NotFound:
		return http.StatusNotFound
	case codes.Unavailable:
		return http.StatusServiceUnavailable
	default:
		return http.StatusBadGateway
	}
}

// place is a node as the scheduler names it.
type place struct{ id, endpoint string }

func (p place) fields() fields { return fields{"node_id": p.id, "endpoint": p.endpoint} }

// The hints that the gateway sends.
var (
	cold    = fields{"new_cold_sandbox": fields{"cpu_count": boxCPU, "memory_mb": boxMemory >> 20, "images": []any{"ubuntu:24.04"}, "metadata": fields{"team": "a"}}}
	sandbox = fields{"new_sandbox": fields{"metadata": fields{"team": "a"}}}
)

// schedule asks for a node; hint nil asks for any.
func (g *agentGateway) schedule(hint fields) (place, error) {
	set := fields{}
	if hint != nil {
		set["hint"] = hint
	}
	answer, err := ask(g.t.Context(), g.wire, "Schedule", set)
	return placeOf(answer), err
}

func placeOf(answer fields) place {
	id, _ := at(answer, "node", "node_id").(string)        // none is ""
	endpoint, _ := at(answer, "node", "endpoint").(string) // none is ""
	return place{id, endpoint}
}

func (g *agentGateway) record(id string, p place) error {
	_, err := ask(g.t.Context(), g.wire, "RecordAssignment", fields{"sandbox_id": id, "node": p.fields()})
	return err
}

func (g *agentGateway) lookup(id string) (place, error) {
	answer, err := ask(g.t.Context(), g.wire, "LookupNode", fields{"sandbox_id": id})
	return placeOf(answer), err
}

// create is POST /sandboxes: a node is asked for, asked to create, and recorded.
func (g *agentGateway) create(hint fields, nodes map[string]*agentNode) (string, place, error) {
	p, err := g.schedule(hint)
	if err != nil {
		return "", p, fmt.Errorf("Schedule = %w", err)
	}
	n := nodes[p.id]
	if n == nil || p.endpoint != endpoint(p.id) {
		return "", p, fmt.Errorf("Schedule = %v, want one of the fleet's nodes with its endpoint", p)
	}
	id := n.create()
	if err := g.record(id, p); err != nil {
		return "", p, fmt.Errorf("RecordAssignment(%s, %v) = %w", id, p, err)
	}
	return id, p, nil
}

// finds reports an error unless the sandbox is where it should be.
func (g *agentGateway) finds(id, on string) error {
	p, err := g.lookup(id)
	if err != nil {
		return fmt.Errorf("LookupNode(%s) = %w", id, err)
	}
	if want := (place{on, endpoint(on)}); p != want {
		return fmt.Errorf("LookupNode(%s) = %v, want %v", id, p, want)
	}
	return nil
}

// loses reports an error unless the sandbox is not found, with the text that AgentENV looks for.
func (g *agentGateway) loses(id string) error {
	p, err := g.lookup(id)
	code, text := refused(err)
	if code != codes.NotFound || text != "sandbox assignment not found" || httpStatus(err) != http.StatusNotFound {
		return fmt.Errorf("LookupNode(%s) = %v, %w, want not found", id, p, err)
	}
	return nil
}
