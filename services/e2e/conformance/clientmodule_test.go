package conformance

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// clientProgram is what somebody else writes who only calls Berth, both ways.
const clientProgram = `package main

import (
	"context"
	"fmt"
	"net/http"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	adminv1 "berth/rpc/admin/v1"
	schedulerv1 "berth/rpc/scheduler/v1"
)

func main() {
	script := schedulerv1.NewSchedulerJSONClient("http://127.0.0.1:9091", http.DefaultClient)
	_, err := script.ListNodes(context.Background(), &schedulerv1.ListNodesRequest{})
	fmt.Println(err)
	conn, err := grpc.NewClient("127.0.0.1:9090", grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		panic(err)
	}
	_, err = schedulerv1.NewSchedulerClient(conn).ListP2PPeers(context.Background(), &schedulerv1.ListP2PPeersRequest{})
	fmt.Println(err)
	_ = adminv1.NewPlacementsProtobufClient("http://127.0.0.1:9091", http.DefaultClient)
}
`

// contractModules are all that the contract may bring along.
var contractModules = []string{
	"berth/rpc", "example.com/client", "github.com/pkg/errors", "github.com/twitchtv/twirp", "golang.org/x/net", "golang.org/x/sys",
	"golang.org/x/text", "google.golang.org/genproto/googleapis/rpc", "google.golang.org/grpc", "google.golang.org/protobuf",
}

// TestAClientModuleNeedsTheContractAlone builds a module that requires berth/rpc and nothing else of ours.
func TestAClientModuleNeedsTheContractAlone(t *testing.T) {
	t.Parallel()
	rpc, err := filepath.Abs("../../../rpc")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	contract, err := os.ReadFile(filepath.Join(rpc, "go.mod"))
	if err != nil {
		t.Fatal(err)
	}
	sums, err := os.ReadFile(filepath.Join(rpc, "go.sum"))
	if err != nil {
		t.Fatal(err)
	}
	// What go mod tidy would write, without asking a proxy: the contract's own requirements, and itself.
	requirements := strings.Replace(string(contract), "module berth/rpc", "module example.com/client", 1) +
		"\nrequire berth/rpc v0.0.0\n\nreplace berth/rpc => " + rpc + "\n"
	for name, text := range map[string]string{"go.mod": requirements, "go.sum": string(sums), "main.go": clientProgram} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	client := func(args ...string) string {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
		defer cancel()
		cmd := exec.CommandContext(ctx, "go", args...)
		cmd.Dir, cmd.Env = dir, append(os.Environ(), "GOWORK=off", "GOFLAGS=-mod=mod", "GOPROXY=off")
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("go %s: %v\n%s", strings.Join(args, " "), err, out)
		}
		return string(out)
	}
	client("build", "-o", os.DevNull, ".")
	used := strings.Fields(client("list", "-deps", "-f", "{{with .Module}}{{.Path}}{{end}}", "."))
	slices.Sort(used)
	for _, module := range slices.Compact(used) {
		if !slices.Contains(contractModules, module) {
			t.Errorf("a client of the contract is linked with %s", module)
		}
	}
	if !slices.Contains(used, "berth/rpc") {
		t.Errorf("the client uses %v, want berth/rpc among them: the test shows nothing", used)
	}
}
