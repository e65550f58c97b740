package main

import (
	"fmt"
	"path"
	"slices"
	"strings"
)

// Package is what go list says of one package.
type Package struct {
	ImportPath                                         string
	Dir                                                string
	Imports, TestImports, XTestImports                 []string
	GoFiles, IgnoredGoFiles, TestGoFiles, XTestGoFiles []string
}

func (p Package) files() []string {
	return slices.Concat(p.GoFiles, p.IgnoredGoFiles, p.TestGoFiles, p.XTestGoFiles)
}

// Breach is one import that a rule forbids.
type Breach struct {
	Rule         int
	From, To     string
	Why, Because string
}

func (b Breach) String() string {
	return fmt.Sprintf("rule %d: %s imports %s: %s, because %s", b.Rule, b.From, b.To, b.Why, b.Because)
}

// A rule looks at one import and says what is wrong with it; "" passes. inTest: only tests import it.
type rule struct {
	number  int
	because string
	breaks  func(from, to string, inTest bool) string
}

// rules are those of who may know whom. Rule 6, on tables, is sqlcheck's.
var rules = []rule{
	{1, "leaves are for others, and a word means one thing at a time", leaves},
	{2, "rules outlive transports and drivers", domain},
	{3, "versions run side by side, and a Go call has none", services},
	{4, "two subjects in a cycle are one", subjects},
	{5, "a technology ends where it can be replaced", technologies},
	{7, "testing stays out of the binary", testPackages},
}

// checkImports returns the breaches of one package in the order of the rules.
func checkImports(p Package) []Breach {
	var breaches []Breach
	for _, r := range rules {
		seen := map[string]bool{}
		look := func(imports []string, inTest bool) {
			for _, to := range imports {
				if seen[to] || to == p.ImportPath {
					continue
				}
				if why := r.breaks(p.ImportPath, to, inTest); why != "" {
					seen[to] = true
					breaches = append(breaches, Breach{r.number, p.ImportPath, to, why, r.because})
				}
			}
		}
		look(p.Imports, false)
		look(p.TestImports, true)
		look(p.XTestImports, true)
	}
	return breaches
}

// within reports whether importPath is root or below it.
func within(importPath, root string) bool {
	return importPath == root || strings.HasPrefix(importPath, root+"/")
}

func withinAny(importPath string, roots ...string) bool {
	return slices.ContainsFunc(roots, func(root string) bool { return within(importPath, root) })
}

func ours(importPath string) bool { return within(importPath, "berth") }

func standard(importPath string) bool {
	first, _, _ := strings.Cut(importPath, "/")
	return !strings.Contains(first, ".") && !ours(importPath)
}

// leaves is rule 1.
func leaves(from, to string, _ bool) string {
	if within(to, "berth/pkg/dispatch") && within(from, "berth/pkg") && !within(from, "berth/pkg/dispatch") {
		return "kits do not import the dispatcher's surface"
	}
	if withinAny(to, "berth/pkg/dispatch/node", "berth/pkg/dispatch/sandbox") &&
		!withinAny(from, "berth/pkg/dispatch", "berth/services/dispatcher", "berth/services/berth") {
		return "the dispatcher's node and sandbox are for the dispatcher and the binary"
	}
	switch {
	case within(from, "berth/rpc") && ours(to) && !within(to, "berth/rpc"),
		within(from, "berth/migrations") && ours(to) && !within(to, "berth/migrations"):
		return "contracts and migrations import nothing of ours"
	case within(from, "berth/pkg") && ours(to) && !within(to, "berth/pkg"):
		if from == "berth/pkg/dispatch/client" && to == "berth/rpc/dispatch/v1" {
			return ""
		}
		return "pkg imports nothing of ours but itself"
	}
	return ""
}

// domainOrder lists the domain packages from the lowest up; each may import those before it.
var domainOrder = []string{"sandbox", "node", "route", "session", "policy"}

// idLibrary draws ids; it is neither transport nor driver.
const idLibrary = "github.com/google/uuid"

// domain is rule 2. Tests may use what they need.
func domain(from, to string, inTest bool) string {
	const root = "berth/services/internal/"
	rank := slices.Index(domainOrder, strings.TrimPrefix(from, root))
	if !strings.HasPrefix(from, root) || rank < 0 || inTest || standard(to) ||
		to == "berth/pkg/dispatch/ngac" || to == idLibrary {
		return ""
	}
	if lower := slices.Index(domainOrder, strings.TrimPrefix(to, root)); strings.HasPrefix(to, root) && lower >= 0 && lower < rank {
		return ""
	}
	return "a domain package imports the standard library and the domain packages below it: " + strings.Join(domainOrder, " < ")
}

// service returns the service a package belongs to; shared code and the binary belong to none.
func service(importPath string) string {
	rest, found := strings.CutPrefix(importPath, "berth/services/")
	if !found {
		return ""
	}
	name, _, _ := strings.Cut(rest, "/")
	if slices.Contains([]string{"internal", "berth", "e2e"}, name) {
		return ""
	}
	return name
}

// services is rule 3.
func services(from, to string, _ bool) string {
	callee := service(to)
	if callee == "" || service(from) == callee || within(from, "berth/services/berth") {
		return ""
	}
	return "a service is used through rpc/; only services/berth imports it"
}

// transports are the packages of a service that turn requests into calls of subjects.
var transports = []string{"api", "httpapi", "adminapi"}

// schedulerOrder ranks the scheduler's subjects: a subject imports lower ones only.
var schedulerOrder = map[string]int{"discovery": 4, "phases": 3, "nodes": 2, "standby": 2, "bindings": 1, "placement": 0, "p2p": 0, "sandboxes": 0}

// subject returns service and folder of a package in a service's internal/.
func subject(importPath string) (string, string) {
	name := service(importPath)
	rest, found := strings.CutPrefix(importPath, "berth/services/"+name+"/internal/")
	if name == "" || !found {
		return "", ""
	}
	folder, _, _ := strings.Cut(rest, "/")
	return name, folder
}

// subjects is rule 4.
func subjects(from, to string, inTest bool) string {
	fromService, fromFolder := subject(from)
	toService, toFolder := subject(to)
	if fromService == "" || fromService != toService || fromFolder == toFolder || inTest {
		return ""
	}
	if slices.Contains(transports, toFolder) && !slices.Contains(transports, fromFolder) {
		return "transports import subjects, never the reverse"
	}
	if fromService != "scheduler" {
		return ""
	}
	fromRank, ranked := schedulerOrder[fromFolder]
	toRank, ranked2 := schedulerOrder[toFolder]
	if ranked && ranked2 && toRank >= fromRank {
		return "the scheduler's order is phases, nodes, bindings, then placement, p2p and sandboxes"
	}
	return ""
}

// technology is a library and the only packages that may import it. A pattern is a folder, or a
// path with * for one element; either covers what is below.
type technology struct {
	name    string
	library string
	allowed []string
}

var technologyHomes = []technology{
	{"echo", "github.com/labstack/echo", []string{"berth/services/*/internal/httpapi"}},
	{"Twirp", "github.com/twitchtv/twirp", []string{
		"berth/rpc", "berth/pkg/twirpkit", "berth/services/internal/rpcerr",
		"berth/services/*/internal/api", "berth/services/*/internal/adminapi",
	}},
	{"gRPC", "google.golang.org/grpc", []string{
		"berth/rpc", "berth/services/internal/rpcerr", "berth/services/scheduler/internal/api",
		"berth/services/nodeagent/internal/heartbeat", // the caller's half: nodes beat over gRPC
	}},
	{"client-go", "k8s.io/client-go", []string{"berth/services/scheduler/internal/discovery"}},
	{"pgx", "github.com/jackc/pgx", []string{
		"berth/tools", "berth/pkg/pgdb", "berth/pkg/pgtest", "berth/pkg/pglocal", "berth/pkg/migrate",
		"berth/services/scheduler/internal/placement", "berth/services/scheduler/internal/bindings",
		"berth/services/scheduler/internal/nodes", "berth/services/scheduler/internal/sandboxes",
		"berth/services/scheduler/internal/phases", "berth/services/scheduler/internal/rollout",
		"berth/services/scheduler/internal/p2p", "berth/services/scheduler/internal/standby",
		"berth/services/gateway/internal/auth", "berth/services/gateway/internal/limits",
		"berth/services/gateway/internal/routecache", "berth/services/gateway/internal/routefeed",
		"berth/services/gateway/internal/listing", "berth/services/gateway/internal/sessions",
		"berth/services/gateway/internal/history",
		"berth/services/dispatcher/internal/deployments", "berth/services/dispatcher/internal/queue",
		"berth/services/dispatcher/internal/consumers", "berth/services/dispatcher/internal/policies",
		"berth/services/dispatcher/internal/schedules", "berth/services/dispatcher/internal/hints",
	}},
}

// technologies is rule 5. A service's own package may import pgx, for the pool it hands on. Tests
// speak to what they test, so they are free.
func technologies(from, to string, inTest bool) string {
	if inTest || !ours(from) {
		return ""
	}
	for _, t := range technologyHomes {
		if !within(to, t.library) {
			continue
		}
		if slices.ContainsFunc(t.allowed, func(pattern string) bool { return matches(from, pattern) }) {
			return ""
		}
		if name := service(from); t.name == "pgx" && name != "" && from == "berth/services/"+name {
			return ""
		}
		return t.name + " is for " + strings.Join(t.allowed, ", ")
	}
	return ""
}

// matches reports whether importPath is at or below pattern, in which * stands for one element.
func matches(importPath, pattern string) bool {
	parts, want := strings.Split(importPath, "/"), strings.Split(pattern, "/")
	if len(parts) < len(want) {
		return false
	}
	for i, w := range want {
		if w != "*" && w != parts[i] {
			return false
		}
	}
	return true
}

// testPackages is rule 7.
func testPackages(from, to string, inTest bool) string {
	if inTest || !ours(to) || !strings.HasSuffix(path.Base(to), "test") || strings.HasSuffix(path.Base(from), "test") {
		return ""
	}
	return "packages named …test are imported by tests only"
}
