package main

import (
	"slices"
	"testing"
)

func TestEveryRuleRefusesWhatItForbidsAndPassesWhatItAllows(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		from, to string
		inTest   bool
		want     []int // the rules broken, in order
	}{
		"a contract uses protobuf":                        {"berth/rpc/scheduler/v1", "google.golang.org/protobuf/proto", false, nil},
		"a contract imports a kit":                        {"berth/rpc/scheduler/v1", "berth/pkg/pgdb", false, []int{1}},
		"migrations import a kit":                         {"berth/migrations", "berth/pkg/migrate", false, []int{1}},
		"a kit imports another kit":                       {"berth/pkg/pgtest", "berth/pkg/pglocal", false, nil},
		"a kit imports a contract":                        {"berth/pkg/twirpkit", "berth/rpc/scheduler/v1", false, []int{1}},
		"a kit imports the product":                       {"berth/pkg/pgdb", "berth/services/internal/node", false, []int{1}},
		"even a kit's test stays outside the product":     {"berth/pkg/pgdb", "berth/migrations", true, []int{1}},
		"the dispatcher's client imports its contract":    {"berth/pkg/dispatch/client", "berth/rpc/dispatch/v1", false, nil},
		"the dispatcher's client imports another one":     {"berth/pkg/dispatch/client", "berth/rpc/scheduler/v1", false, []int{1}},
		"a kit imports the dispatcher's surface":          {"berth/pkg/lifecycle", "berth/pkg/dispatch/task", false, []int{1}},
		"the gateway takes the dispatcher's word node":    {"berth/services/gateway/internal/proxy", "berth/pkg/dispatch/node", false, []int{1}},
		"the dispatcher takes the dispatcher's word node": {"berth/services/dispatcher/internal/queue", "berth/pkg/dispatch/node", false, nil},

		"a domain package uses one below":            {"berth/services/internal/route", "berth/services/internal/sandbox", false, nil},
		"a domain package uses one above":            {"berth/services/internal/sandbox", "berth/services/internal/route", false, []int{2}},
		"a domain package draws ids":                 {"berth/services/internal/sandbox", "github.com/google/uuid", false, nil},
		"a domain package knows a kit":               {"berth/services/internal/node", "berth/pkg/pgdb", false, []int{2}},
		"a domain package knows a driver":            {"berth/services/internal/node", "github.com/jackc/pgx/v5", false, []int{2, 5}},
		"a domain package uses net/netip":            {"berth/services/internal/route", "net/netip", false, nil},
		"a test of a domain package compares values": {"berth/services/internal/route", "github.com/google/go-cmp/cmp", true, nil},
		"shared code that is no domain uses a kit":   {"berth/services/internal/advisory", "berth/pkg/pgdb", false, nil},

		"the binary imports a service":                     {"berth/services/berth/internal/cli", "berth/services/scheduler", false, nil},
		"a service imports another":                        {"berth/services/gateway", "berth/services/scheduler", false, []int{3}},
		"a service imports its own subject":                {"berth/services/gateway", "berth/services/gateway/internal/proxy", false, nil},
		"an end-to-end test imports a service":             {"berth/services/e2e", "berth/services/scheduler", true, []int{3}},
		"the gateway asks the scheduler through contracts": {"berth/services/gateway/internal/launch", "berth/rpc/scheduler/v1", false, nil},

		"a transport imports a subject":           {"berth/services/scheduler/internal/api", "berth/services/scheduler/internal/placement", false, nil},
		"a subject imports a transport":           {"berth/services/scheduler/internal/placement", "berth/services/scheduler/internal/api", false, []int{4}},
		"the scheduler's bindings use placement":  {"berth/services/scheduler/internal/bindings", "berth/services/scheduler/internal/placement", false, nil},
		"the scheduler's placement uses bindings": {"berth/services/scheduler/internal/placement", "berth/services/scheduler/internal/bindings", false, []int{4}},
		"the scheduler's bindings use nodes":      {"berth/services/scheduler/internal/bindings", "berth/services/scheduler/internal/nodes", false, []int{4}},
		"the scheduler's nodes use p2p":           {"berth/services/scheduler/internal/nodes", "berth/services/scheduler/internal/p2p", false, nil},
		"the scheduler's p2p uses nodes":          {"berth/services/scheduler/internal/p2p", "berth/services/scheduler/internal/nodes", false, []int{4}},
		"equals of the scheduler's order":         {"berth/services/scheduler/internal/placement", "berth/services/scheduler/internal/sandboxes", false, []int{4}},

		"echo in httpapi":                   {"berth/services/gateway/internal/httpapi", "github.com/labstack/echo/v4", false, nil},
		"echo below httpapi":                {"berth/services/gateway/internal/httpapi/v2", "github.com/labstack/echo/v4/middleware", false, nil},
		"echo elsewhere":                    {"berth/services/gateway/internal/proxy", "github.com/labstack/echo/v4", false, []int{5}},
		"Twirp in an api":                   {"berth/services/scheduler/internal/api", "github.com/twitchtv/twirp", false, nil},
		"Twirp in a subject":                {"berth/services/scheduler/internal/nodes", "github.com/twitchtv/twirp", false, []int{5}},
		"gRPC codes in the error table":     {"berth/services/internal/rpcerr", "google.golang.org/grpc/codes", false, nil},
		"gRPC in the gateway":               {"berth/services/gateway/internal/launch", "google.golang.org/grpc", false, []int{5}},
		"gRPC in a test":                    {"berth/services/gateway/internal/launch", "google.golang.org/grpc", true, nil},
		"another name with the same prefix": {"berth/services/gateway/internal/launch", "google.golang.org/grpcweb", false, nil},
		"pgx in a subject with SQL":         {"berth/services/scheduler/internal/placement", "github.com/jackc/pgx/v5", false, nil},
		"pgx in a service, for the pool":    {"berth/services/scheduler", "github.com/jackc/pgx/v5/pgxpool", false, nil},
		"pgx in a transport":                {"berth/services/scheduler/internal/api", "github.com/jackc/pgx/v5", false, []int{5}},

		"a test uses a test package":         {"berth/services/scheduler/internal/nodes", "berth/pkg/pgtest", true, nil},
		"the product uses a test package":    {"berth/services/scheduler/internal/nodes", "berth/pkg/pgtest", false, []int{7}},
		"a test package uses a test package": {"berth/pkg/dispatch/controlplanetest", "berth/pkg/pgtest", false, nil},
		"the standard library's httptest":    {"berth/services/gateway", "net/http/httptest", false, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := Package{ImportPath: tt.from, Imports: []string{tt.to}}
			if tt.inTest {
				p = Package{ImportPath: tt.from, XTestImports: []string{tt.to}}
			}
			var got []int
			for _, b := range checkImports(p) {
				got = append(got, b.Rule)
			}
			if !slices.Equal(got, tt.want) {
				t.Errorf("%s imports %s (test: %t): breaks rules %v, want %v", tt.from, tt.to, tt.inTest, got, tt.want)
			}
		})
	}
}

func TestAnImportOfProductAndTestIsReportedOnce(t *testing.T) {
	t.Parallel()
	p := Package{ImportPath: "berth/rpc/scheduler/v1", Imports: []string{"berth/pkg/pgdb"}, TestImports: []string{"berth/pkg/pgdb"}}
	if got := checkImports(p); len(got) != 1 {
		t.Errorf("%v: %d breaches, want 1", got, len(got))
	}
}
