package gateway_test

import (
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"
)

// Case C-33 and the other bodies a gateway must refuse: nothing is reserved, nothing is sent.
func TestABadBodyCostsNothing(t *testing.T) {
	t.Parallel()
	n := berthNode(t, "n1")
	s := newStand(t, n)
	r := s.start(s.config())
	id := r.create()
	before, calls := len(n.Seen()), len(s.scheduler.Calls())

	const (
		create  = "/sandboxes"
		create2 = "/v2/sandboxes"
		cold    = "/sandboxes-cold"
	)
	connect, connect2 := "/sandboxes/"+id+"/connect", "/v2/sandboxes/"+id+"/connect"
	resume, timeout, refreshes := "/sandboxes/"+id+"/resume", "/sandboxes/"+id+"/timeout", "/sandboxes/"+id+"/refreshes"
	with := func(field, value string) string {
		return `{"templateID":"echo","` + field + `":` + value + `}`
	}
	big := strings.Repeat("a", 64<<10)
	type bad struct {
		path, body string
		status     int
		field      string // the message begins with it
	}
	cases := map[string]bad{}
	for _, path := range []string{create, create2, connect, connect2, resume, timeout} {
		for _, value := range []string{"-1", "-3600", "2147483648", "1e300", "1.5", `"60"`, "null", "true", "[]"} {
			cases[path+" timeout "+value] = bad{path, with("timeout", value), 400, "timeout: "}
		}
		if path != timeout {
			cases[path+" timeout 0"] = bad{path, with("timeout", "0"), 400, "timeout: "}
		}
	}
	for _, value := range []string{"0", "-1", "3601", "1.5", `"60"`, "null"} {
		cases["refreshes duration "+value] = bad{refreshes, with("duration", value), 400, "duration: "}
	}
	for _, path := range []string{create, create2, cold, connect, connect2, resume, timeout, refreshes} {
		cases[path+" not JSON"] = bad{path, `{"templateID"`, 400, "body: not valid JSON"}
		cases[path+" an array"] = bad{path, `[]`, 400, "body: must be a JSON object"}
		cases[path+" 200 levels"] = bad{path, strings.Repeat("[", 200), 400, "body: nested deeper than 64"}
		cases[path+" 2 MiB of brackets"] = bad{path, strings.Repeat("[", 2<<20), 413, "request body too large"}
		cases[path+" not UTF-8"] = bad{path, "{\"templateID\":\"\xff\"}", 400, "body: not UTF-8"}
		if path != connect2 {
			cases[path+" empty"] = bad{path, ``, 400, "body: a JSON object is required"}
		}
	}
	for _, path := range []string{create, create2} {
		cases[path+" no template"] = bad{path, `{}`, 400, "templateID: is required"}
		cases[path+" blank template"] = bad{path, `{"templateID":" "}`, 400, "templateID: "}
		cases[path+" template is a number"] = bad{path, `{"templateID":1}`, 400, "templateID: "}
		cases[path+" template twice"] = bad{path, `{"templateID":"a","templateID":"b"}`, 400, "templateID: given twice"}
		cases[path+" oversized template"] = bad{path, `{"templateID":"` + strings.Repeat("a", 513) + `"}`, 400, "templateID: 513 bytes"}
		cases[path+" metadata of numbers"] = bad{path, with("metadata", `{"a":1}`), 400, "metadata: "}
		cases[path+" metadata over 64 KiB"] = bad{path, with("metadata", `{"ab":"`+big+`"}`), 400, "metadata: "}
		cases[path+" metadata with NUL"] = bad{path, with("metadata", `{"a":"\u0000"}`), 400, "metadata: "}
		cases[path+" managed, too idle"] = bad{path, with("berth", `{"idleAfter":59}`), 400, "berth.idleAfter: "}
		cases[path+" managed, no object"] = bad{path, with("berth", `7`), 400, "berth: "}
	}
	cases["cold, half a core"] = bad{cold, `{"cpuCount":0.5}`, 400, "cpuCount: "}
	cases["cold, no memory"] = bad{cold, `{"memoryMB":0}`, 400, "memoryMB: "}
	cases["cold, drives of numbers"] = bad{cold, `{"attachedDrives":[1]}`, 400, "attachedDrives: "}
	cases["cold, blank image"] = bad{cold, `{"image":""}`, 400, "image: "}
	cases["timeout is required there"] = bad{timeout, `{}`, 400, "timeout: is required"}

	for name, tt := range cases {
		// SDKs send no length.
		a := r.do(ask{method: "POST", path: tt.path, body: tt.body, chunked: true})
		message, _ := a.field(t, "message").(string)
		if a.Status != tt.status || !strings.HasPrefix(message, tt.field) || a.field(t, "code") != float64(tt.status) {
			t.Errorf("%s: POST %s %.80s = %d %s, want %d %q", name, tt.path, tt.body, a.Status, a.Body, tt.status, tt.field)
		}
	}
	if got := len(n.Seen()); got != before {
		t.Errorf("the node saw %d requests", got-before)
	}
	if got := len(s.scheduler.Calls()); got != calls {
		t.Errorf("the scheduler got %d calls", got-calls)
	}
}

func TestWhatSDKsMayLeaveOutPasses(t *testing.T) {
	t.Parallel()
	n := berthNode(t, "n1")
	s := newStand(t, n)
	r := s.start(s.config())
	id := r.create()
	for name, tt := range map[string]struct {
		path, body string
		status     int
	}{
		"connect of the second generation without a body": {"/v2/sandboxes/" + id + "/connect", "", 200},
		"with an empty object":                            {"/v2/sandboxes/" + id + "/connect", "{}", 200},
		"with memory, for a cold start":                   {"/v2/sandboxes/" + id + "/connect", `{"timeout":90,"memory":false}`, 200},
		"connect of the first":                            {"/sandboxes/" + id + "/connect", `{"timeout":300}`, 200},
		"pause without a body":                            {"/sandboxes/" + id + "/pause", "", 204},
		"pause with memory":                               {"/sandboxes/" + id + "/pause", `{"memory":true}`, 204},
		"resume":                                          {"/sandboxes/" + id + "/resume", `{"timeout":1}`, 201},
		"end now":                                         {"/sandboxes/" + id + "/timeout", `{"timeout":0}`, 204},
		"30 days":                                         {"/sandboxes/" + id + "/timeout", `{"timeout":2592000}`, 204},
		"refreshes":                                       {"/sandboxes/" + id + "/refreshes", `{"duration":3600}`, 204},
		"the old generation's create":                     {"/sandboxes", `{"templateID":"base","timeout":300,"secure":true,"allow_internet_access":true,"metadata":{},"envVars":{}}`, 201},
		"a field of tomorrow":                             {"/v2/sandboxes", `{"templateID":"base","fromTomorrow":[{"a":1.5}]}`, 201},
	} {
		a := r.do(ask{method: "POST", path: tt.path, body: tt.body, chunked: true})
		if a.Status != tt.status {
			t.Errorf("%s: POST %s %s = %d %s, want %d", name, tt.path, tt.body, a.Status, a.Body, tt.status)
		}
		seen := n.Seen()
		if last := seen[len(seen)-1]; last.Body != tt.body || last.Target != tt.path {
			t.Errorf("%s: the node saw %s %q, want the client's bytes", name, last.Target, last.Body)
		}
	}
}

// Case C-10.
func TestAnEncodedSlashNeverSelectsAnotherSandbox(t *testing.T) {
	t.Parallel()
	n := berthNode(t, "n1")
	s := newStand(t, n)
	r := s.start(s.config())
	id := r.create()
	before := len(n.Seen())
	for _, a := range []ask{
		{method: "POST", path: "/sandboxes/" + id + "%2Fb/pause"},
		{method: "DELETE", path: "/sandboxes/" + id + "%2F"},
		{method: "GET", path: "/sandboxes/" + id + "%2f..%2fb"},
		{method: "GET", path: "/sandboxes/..%2f..%2fnodes"},
		{method: "GET", path: "/sandboxes/%61%00"},
		{method: "GET", path: "/sandboxes/"},
		{method: "GET", path: "/sandboxes/UPPER"},
		{method: "GET", path: "/sandboxes/" + strings.Repeat("a", 58)},
		{method: "GET", path: "/templates/team%2Fsnap"}, // a later step
		{method: "POST", path: "/twirp/scheduler.v1.Scheduler/Schedule"},
		{method: "POST", path: "/sandboxes/" + id + "/fork"}, // a later step
		{method: "GET", path: "/no/such/path"},
	} {
		got := r.do(a)
		if got.Status != http.StatusNotFound || got.field(t, "code") != float64(404) {
			t.Errorf("%s %s = %d %s, want 404", a.method, a.path, got.Status, got.Body)
		}
	}
	if got := len(n.Seen()); got != before || len(n.Sandboxes()) != 1 {
		t.Errorf("the node saw %d requests and has %v", got-before, n.Sandboxes())
	}
	if a := r.do(ask{method: "GET", path: "/sandboxes/" + strings.Replace(id, "-", "%2D", 1)}); a.Status != http.StatusOK {
		t.Errorf("an id with an escape that means the same = %d %s", a.Status, a.Body)
	}
}

func TestUnknownPathsAndMethodsAreNamed(t *testing.T) {
	t.Parallel()
	s := newStand(t, berthNode(t, "n1"))
	r := s.start(s.config())
	a := r.do(ask{method: "GET", path: "/no/such?x=1"})
	if a.Status != 404 || a.field(t, "message") != "route not found: GET /no/such" || a.field(t, "error_code") != "unknown_route" {
		t.Errorf("GET /no/such = %d %s", a.Status, a.Body)
	}
	a = r.do(ask{method: "PUT", path: "/sandboxes/abc"})
	if a.Status != 405 || a.field(t, "message") != "method not allowed" || a.Header.Get("Allow") != "GET, DELETE" {
		t.Errorf("PUT /sandboxes/abc = %d Allow %q %s", a.Status, a.Header.Get("Allow"), a.Body)
	}
	for _, method := range []string{"CONNECT", "TRACE"} {
		if a := r.do(ask{method: method, path: "/x"}); a.Status != 405 {
			t.Errorf("%s = %d, want 405", method, a.Status)
		}
	}
	for name, tt := range map[string]struct {
		header http.Header
		host   string
		text   string
	}{
		"half a pair":    {http.Header{"E2b-Sandbox-Id": {"a"}}, "", "target port header required"},
		"a bad port":     {http.Header{"E2b-Sandbox-Id": {"a"}, "E2b-Sandbox-Port": {"70000"}}, "", "target port header invalid"},
		"two ids":        {http.Header{"E2b-Sandbox-Id": {"a", "b"}, "E2b-Sandbox-Port": {"1"}}, "", "conflicting sandbox id headers"},
		"a bad host":     {http.Header{}, "70000-a." + domain, "invalid sandbox data-plane host: port out of range"},
		"an unknown one": {http.Header{}, "3000-a." + domain, "sandbox assignment not found"},
	} {
		a := r.do(ask{method: "GET", path: "/x", header: tt.header, host: tt.host})
		want := 400
		if name == "an unknown one" {
			want = 502
		}
		if a.Status != want || a.field(t, "message") != tt.text {
			t.Errorf("%s = %d %s, want %d %s", name, a.Status, a.Body, want, tt.text)
		}
	}
}

// Case C-26, on the control plane: the limit is on silence.
func TestAClientThatStopsSendingItsBodyIsTold(t *testing.T) {
	t.Parallel()
	n := berthNode(t, "n1")
	s := newStand(t, n)
	cfg := s.config()
	cfg.IdleTimeout = time.Second
	r := s.start(cfg)
	conn, err := net.Dial("tcp", strings.TrimPrefix(r.URL, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	if _, err := io.WriteString(conn, "POST /sandboxes HTTP/1.1\r\nHost: gw\r\nX-API-Key: "+apiKey+"\r\nContent-Length: 100\r\n\r\n{\"templateID\""); err != nil {
		t.Fatal(err)
	}
	got, err := io.ReadAll(conn) // until the gateway closes
	if err != nil {
		t.Fatal(err)
	}
	if text := string(got); !strings.HasPrefix(text, "HTTP/1.1 408 ") || !strings.Contains(text, `"error_code":"client_timeout"`) {
		t.Errorf("half a body and silence = %s, want 408 client_timeout", text)
	}
	if len(n.Seen()) != 0 || len(s.scheduler.Calls()) != 0 {
		t.Error("something was sent")
	}
	a := r.do(ask{method: "POST", path: "/sandboxes", body: `{"templateID":"echo"}`})
	if a.Status != 201 {
		t.Errorf("a create after that = %d %s", a.Status, a.Body)
	}
}
