package e2e

import (
	"encoding/json"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestTheMainJob walks the whole path once, through both gateways and by the command line.
func TestTheMainJob(t *testing.T) {
	t.Parallel()
	data := dataFolder(t)
	s := start(t, "--data", data)
	one, two := s.client(0), s.client(1)
	ctx := t.Context()

	id := must[string](t)(one.create(ctx, "echo"))
	if row := s.sql("SELECT state FROM bindings WHERE sandbox_id = '" + id + "'"); row != "bound" {
		t.Errorf("binding right after the 201 = %q, want bound", row)
	}
	for name, c := range map[string]*client{"gateway 1": one, "gateway 2": two} {
		const target = "/a%2Fb/../c?x=%20&y"
		if got, err := c.byPair(ctx, id, target); err != nil || got != target {
			t.Errorf("by header pair through %s = %q, %v, want %q", name, got, err, target)
		}
		if got, err := c.byHost(ctx, id, target); err != nil || got != target {
			t.Errorf("by host through %s = %q, %v, want %q", name, got, err, target)
		}
		if got, err := c.chat(ctx, id, "ahoy"); err != nil || got != "ahoy" {
			t.Errorf("WebSocket through %s = %q, %v, want ahoy", name, got, err)
		}
	}
	for _, step := range []struct {
		c          *client
		path, body string
		status     int
	}{
		{two, "/timeout", `{"timeout":900}`, http.StatusNoContent},
		{two, "/pause", `{}`, http.StatusNoContent},
		{one, "/pause", `{}`, http.StatusConflict},
		{one, "/resume", `{"timeout":600}`, http.StatusCreated},
		{two, "/connect", `{"timeout":700}`, http.StatusOK},
	} {
		if status, text, err := step.c.api(ctx, "POST", "/sandboxes/"+id+step.path, step.body); err != nil || status != step.status {
			t.Errorf("POST %s = %d %s, %v, want %d", step.path, status, text, err, step.status)
		}
	}
	if _, err := two.byPair(ctx, id, "/after"); err != nil {
		t.Errorf("after pause and resume: %v", err)
	}

	t.Run("the command line sees the same", func(t *testing.T) {
		for _, command := range [][]string{
			{"sandbox", "get", id}, {"sandbox", "url", id}, {"sandbox", "list"}, {"placement", "explain", id},
		} {
			if got := s.operator(command...); got.code != 0 || !strings.Contains(got.stdout, id) {
				t.Errorf("berth %q = %+v, want code 0 and the id", command, got)
			}
		}
		for _, n := range s.Nodes {
			if got := s.berth("node", "list"); got.code != 0 || !strings.Contains(got.stdout, n.ID) {
				t.Errorf("berth node list = %+v, want code 0 and %s", got, n.ID)
			}
			if got := s.berth("node", "get", n.ID, "-o", "json"); got.code != 0 || !json.Valid([]byte(got.stdout)) {
				t.Errorf("berth node get = %+v, want code 0 and JSON", got)
			}
		}
		made := s.berth("sandbox", "create", "files", "-o", "json")
		var answer map[string]any
		if err := json.Unmarshal([]byte(made.stdout), &answer); err != nil || made.code != 0 {
			t.Fatalf("berth sandbox create -o json = %+v: %v", made, err)
		}
		second, _ := answer["sandboxID"].(string)
		if got := s.berth("sandbox", "rm", second); got.code != 0 || got.stdout != second+"\n" {
			t.Errorf("berth sandbox rm = %+v, want code 0 and the id", got)
		}
		if got := s.berth("sandbox", "get", second); got.code != 1 || !strings.Contains(got.stderr, "unknown_sandbox") {
			t.Errorf("berth sandbox get after rm = %+v, want code 1 and unknown_sandbox", got)
		}
	})

	if err := two.remove(ctx, id); err != nil {
		t.Error(err)
	}
	for name, c := range map[string]*client{"gateway 1": one, "gateway 2": two} {
		if status, body, err := c.api(ctx, "GET", "/sandboxes/"+id, ""); err != nil || status != http.StatusNotFound {
			t.Errorf("GET after the delete through %s = %d %s, %v, want 404", name, status, body, err)
		}
		status, body, err := c.do(ctx, "GET", c.base+"/", "", "x-agentenv-sandbox-id", id, "x-agentenv-target-port", appPort)
		if err != nil || status != http.StatusBadGateway {
			t.Errorf("data plane after the delete through %s = %d %s, %v, want 502", name, status, body, err)
		}
	}
	s.noReservations()
}

// operator runs one command with an operator's token as well.
func (s *stack) operator(args ...string) result {
	s.t.Helper()
	text, err := os.ReadFile(filepath.Join(s.data, "state.json"))
	if err != nil {
		s.t.Fatal(err)
	}
	var state struct {
		OperatorToken string `json:"operator_token"`
	}
	if err := json.Unmarshal(text, &state); err != nil {
		s.t.Fatal(err)
	}
	return run(s.t, []string{
		"BERTH_GATEWAY_URL=" + s.Gateways[0], "BERTH_API_KEY=" + s.APIKey,
		"BERTH_SCHEDULER_URL=" + s.Schedulers[0].Twirp, "BERTH_SCHEDULER_TOKEN=" + state.OperatorToken,
	}, args...)
}

func TestTheDemoPlaysToItsEnd(t *testing.T) {
	t.Parallel()
	cmd := exec.CommandContext(t.Context(), binary, "demo")
	cmd.Env = environment("NO_COLOR=1")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("berth demo: %v\n%s", err, out)
	}
	for _, want := range []string{"kill -9", "All went as it must", "Nothing is left running"} {
		if !strings.Contains(string(out), want) {
			t.Errorf("berth demo does not say %q:\n%s", want, out)
		}
	}
}

func TestWhatAClientGetsWrongIsToldInJSONAndStoresNothing(t *testing.T) {
	t.Parallel()
	s := start(t, "--schedulers", "1", "--gateways", "1", "--nodes", "1")
	c := s.client(0)
	ctx := t.Context()
	wrong := *c
	wrong.key = "e2b_" + strings.Repeat("0", 60)
	tests := map[string]struct {
		c                  *client
		method, path, body string
		status             int
		code               string
	}{
		"a wrong key":             {&wrong, "GET", "/sandboxes/x", "", 401, "unauthenticated"},
		"an unknown sandbox":      {c, "GET", "/sandboxes/nobody", "", 404, "unknown_sandbox"},
		"an unknown path":         {c, "GET", "/nowhere", "", 404, "unknown_route"},
		"bad JSON":                {c, "POST", "/sandboxes", `{"templateID":`, 400, "bad_request"},
		"no object":               {c, "POST", "/sandboxes", `[]`, 400, "bad_request"},
		"a timeout of no number":  {c, "POST", "/sandboxes", `{"templateID":"echo","timeout":"long"}`, 400, "bad_request"},
		"metadata that is a list": {c, "POST", "/sandboxes", `{"templateID":"echo","metadata":[]}`, 400, "bad_request"},
		"a blank template":        {c, "POST", "/sandboxes", `{"templateID":" "}`, 400, "bad_request"},
		"a variable of no name":   {c, "POST", "/sandboxes", `{"templateID":"echo","envVars":{"A B":"x"}}`, 400, "bad_request"},
		"a variable too long":     {c, "POST", "/sandboxes", `{"templateID":"echo","envVars":{"A":"` + strings.Repeat("x", 128<<10) + `"}}`, 400, "bad_request"},
		"an id too long":          {c, "DELETE", "/sandboxes/" + strings.Repeat("a", 58), "", 404, "unknown_route"},
		"a blank id":              {c, "GET", "/sandboxes/%20", "", 404, "unknown_route"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			status, body, err := tt.c.api(ctx, tt.method, tt.path, tt.body)
			var answer struct {
				Code      int    `json:"code"`
				Message   string `json:"message"`
				ErrorCode string `json:"error_code"`
			}
			if err == nil {
				err = json.Unmarshal([]byte(body), &answer)
			}
			if err != nil || status != tt.status || answer.Code != tt.status || answer.ErrorCode != tt.code || answer.Message == "" {
				t.Errorf("%s %s = %d %s, %v; want %d %s as JSON with a message", tt.method, tt.path, status, body, err, tt.status, tt.code)
			}
		})
	}
	t.Run("an unknown template", func(t *testing.T) {
		status, body, err := c.api(ctx, "POST", "/sandboxes", `{"templateID":"nonsense"}`)
		if err != nil || status != http.StatusNotFound || !json.Valid([]byte(body)) || !contains(body, "template not found") {
			t.Errorf("create = %d %s, %v; want 404 as JSON that says so", status, body, err)
		}
		if got := s.berth("sandbox", "create", "nonsense"); got.code != 1 || !contains(got.stderr, "nonsense") {
			t.Errorf("berth sandbox create nonsense = %+v, want code 1 and the name", got)
		}
	})
	t.Run("the command line says what to do about a wrong key", func(t *testing.T) {
		got := run(t, []string{"BERTH_GATEWAY_URL=" + s.Gateways[0], "BERTH_API_KEY=" + wrong.key}, "sandbox", "list")
		if got.code != 1 || !contains(got.stderr, "set BERTH_API_KEY") {
			t.Errorf("berth sandbox list = %+v, want code 1 and the variable", got)
		}
	})
	t.Run("an unknown node", func(t *testing.T) {
		if got := s.berth("node", "get", "nobody"); got.code != 1 || !contains(got.stderr, "observed node not found") {
			t.Errorf("berth node get = %+v, want code 1 and the reason", got)
		}
	})
	if got := s.sql("SELECT count(*) FROM bindings"); got != "0" {
		t.Errorf("%s bindings after bad input, want 0", got)
	}
	s.noReservations()
}
