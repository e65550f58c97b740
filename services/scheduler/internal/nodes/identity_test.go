package nodes

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"berth/services/internal/node"
)

func TestAdmit(t *testing.T) {
	t.Parallel()
	live := func() *lease {
		return &lease{Live: true, ServiceInstanceID: "i2", Place: endpointA, Epoch: 7, Retired: []string{"i1"}}
	}
	expired := func() *lease {
		l := live()
		l.Live = false
		return l
	}
	ended := func() *lease {
		l := expired()
		l.EndedAt = new(time.Now())
		return l
	}
	taken := succession{Epoch: 8, Retired: []string{"i1", "i2"}, Takeover: true, Fresh: true}
	tests := map[string]struct {
		held  *lease
		claim claim
		want  succession
		err   error
	}{
		"no lease: the first epoch":                           {nil, claim{"i1", endpointA, false}, succession{Epoch: 1, Fresh: true}, nil},
		"expired, the same: it goes on":                       {expired(), claim{"i2", endpointA, false}, succession{Epoch: 7, Retired: []string{"i1"}, Fresh: true}, nil},
		"expired, the same elsewhere: it may have moved":      {expired(), claim{"i2", endpointB, true}, succession{Epoch: 7, Retired: []string{"i1"}, Fresh: true}, nil},
		"expired, another elsewhere: taken over":              {expired(), claim{"i3", endpointB, true}, taken, nil},
		"expired, a retired one: taken over, and not retired": {expired(), claim{"i1", endpointA, false}, succession{Epoch: 8, Retired: []string{"i2"}, Takeover: true, Fresh: true}, nil},
		"ended, the same: it goes on":                         {ended(), claim{"i2", endpointA, false}, succession{Epoch: 7, Retired: []string{"i1"}, Fresh: true}, nil},
		"ended, another elsewhere: taken over":                {ended(), claim{"i3", endpointB, true}, taken, nil},
		"live, the same: it goes on":                          {live(), claim{"i2", endpointA, false}, succession{Epoch: 7, Retired: []string{"i1"}}, nil},
		"live, the same from another address: it goes on":     {live(), claim{"i2", "10.0.0.9", false}, succession{Epoch: 7, Retired: []string{"i1"}}, nil},
		"live, the same with another endpoint: in use":        {live(), claim{"i2", endpointB, true}, succession{}, node.ErrIDInUse},
		"live, a retired one: superseded":                     {live(), claim{"i1", endpointA, false}, succession{}, node.ErrSuperseded},
		"live, another in the same place: a restart":          {live(), claim{"i3", endpointA, false}, taken, nil},
		"live, another elsewhere: in use":                     {live(), claim{"i3", endpointB, true}, succession{}, node.ErrIDInUse},
		"live, another from nobody knows where: in use":       {live(), claim{"i3", "", false}, succession{}, node.ErrIDInUse},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, err := tt.held.admit(tt.claim)
			if !errors.Is(err, tt.err) {
				t.Fatalf("admit(%+v) = %v, want %v", tt.claim, err, tt.err)
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("admit(%+v) (-want +got):\n%s", tt.claim, diff)
			}
		})
	}
}

func TestTheLastEightInstancesAreRetired(t *testing.T) {
	t.Parallel()
	l := &lease{Live: true, ServiceInstanceID: "i0", Place: endpointA, Epoch: 1}
	for i := 1; i <= 20; i++ {
		next, err := l.admit(claim{Instance: fmt.Sprintf("i%d", i), Place: endpointA})
		if err != nil {
			t.Fatal(err)
		}
		l = &lease{Live: true, ServiceInstanceID: fmt.Sprintf("i%d", i), Place: endpointA, Epoch: next.Epoch, Retired: next.Retired}
	}
	if l.Epoch != 21 || len(l.Retired) != maxRetired || !slices.Contains(l.Retired, "i19") || !slices.Contains(l.Retired, "i12") {
		t.Errorf("after 20 restarts: epoch %d, retired %v, want 21 and i12 to i19", l.Epoch, l.Retired)
	}
}

func TestPlan(t *testing.T) {
	t.Parallel()
	registered := &row{Endpoint: endpointA, Source: sourceRegistered, Present: true}
	static := &row{Endpoint: endpointA, Source: sourceStatic, Trusted: true, Present: true}
	absent := &row{Endpoint: endpointA, Source: sourceStatic, Trusted: true, Cordoned: true}
	errUnjudged := errors.New("the guard was not asked")
	tests := map[string]struct {
		row      *row
		endpoint string
		may      bool
		allowed  string
		want     plan
		err      error
	}{
		"unknown, without an endpoint":                      {nil, "", true, "", plan{}, node.ErrNotListed},
		"unknown, without a token":                          {nil, endpointA, false, "", plan{}, node.ErrNotListed},
		"unknown, and the guard was not asked":              {nil, endpointA, true, "", plan{}, errUnjudged},
		"unknown, allowed: registered":                      {nil, endpointA, true, endpointA, plan{row: row{Endpoint: endpointA, Source: sourceRegistered, Present: true}, registers: true, moves: true, announces: true}, nil},
		"absent, without a token":                           {absent, "", false, "", plan{}, node.ErrNotListed},
		"absent, allowed: registered, not trusted any more": {absent, endpointA, true, endpointA, plan{row: row{Endpoint: endpointA, Source: sourceRegistered, Present: true, Cordoned: true}, registers: true, announces: true}, nil},
		"listed, no endpoint sent":                          {static, "", false, "", plan{row: *static}, nil},
		"listed, its endpoint":                              {static, endpointA, true, "", plan{row: *static}, nil},
		"listed, another endpoint":                          {static, endpointB, true, endpointB, plan{}, node.ErrBadEndpoint},
		"registered, its endpoint":                          {registered, endpointA, false, "", plan{row: *registered}, nil},
		"registered, another endpoint without a token":      {registered, endpointB, false, "", plan{}, node.ErrBadEndpoint},
		"registered, another endpoint, allowed":             {registered, endpointB, true, endpointB, plan{row: row{Endpoint: endpointB, Source: sourceRegistered, Present: true}, moves: true, announces: true}, nil},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, err := tt.row.plan(&prepared{Beat: Beat{Endpoint: tt.endpoint, MayRegister: tt.may}}, tt.allowed)
			switch {
			case errors.Is(tt.err, errUnjudged):
				if err == nil {
					t.Fatal("plan = nil, want it to begin anew")
				}
			case !errors.Is(err, tt.err):
				t.Fatalf("plan = %v, want %v", err, tt.err)
			}
			if diff := cmp.Diff(tt.want, got, cmp.AllowUnexported(plan{})); diff != "" {
				t.Errorf("plan (-want +got):\n%s", diff)
			}
		})
	}
}
