package builtin_test

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/coder/websocket"

	"berth/services/nodeagent/internal/builtin"
)

func TestADumpShowsTheRequest(t *testing.T) {
	t.Parallel()
	server := httptest.NewServer(builtin.EchoHandler())
	defer server.Close()
	resp, err := http.Post(server.URL+"/a%20b?c=%2f", "text/plain", strings.NewReader("body"))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var got builtin.Dump
	if err := json.NewDecoder(resp.Body).Decode(&got); err != nil {
		t.Fatal(err)
	}
	if got.Method != "POST" || got.Target != "/a%20b?c=%2f" || got.Path != "/a b" || got.RawQuery != "c=%2f" || got.Body != "body" || got.BodyBytes != 4 || got.Headers.Get("Content-Type") != "text/plain" {
		t.Errorf("dump is %+v", got)
	}
}

func TestALongBodyIsCountedAndCut(t *testing.T) {
	t.Parallel()
	server := httptest.NewServer(builtin.EchoHandler())
	defer server.Close()
	resp, err := http.Post(server.URL, "text/plain", strings.NewReader(strings.Repeat("x", 3<<20)))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var got builtin.Dump
	if err := json.NewDecoder(resp.Body).Decode(&got); err != nil {
		t.Fatal(err)
	}
	if got.BodyBytes != 3<<20 || len(got.Body) != 1<<20 || !got.Truncated {
		t.Errorf("%d bytes, %d shown, cut %v", got.BodyBytes, len(got.Body), got.Truncated)
	}
}

func TestBytesAndMessagesComeBack(t *testing.T) {
	t.Parallel()
	server := httptest.NewServer(builtin.EchoHandler())
	defer server.Close()
	resp, err := http.Post(server.URL+"/echo", "application/x", strings.NewReader("\x00\xff"))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if text, err := io.ReadAll(resp.Body); err != nil || string(text) != "\x00\xff" || resp.Header.Get("Content-Type") != "application/x" {
		t.Errorf("/echo answered %q, %v", text, err)
	}
	conn, _, err := websocket.Dial(t.Context(), server.URL+"/any", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.CloseNow()
	if err := conn.Write(t.Context(), websocket.MessageBinary, []byte{0, 255}); err != nil {
		t.Fatal(err)
	}
	kind, got, err := conn.Read(t.Context())
	if err != nil || kind != websocket.MessageBinary || string(got) != "\x00\xff" {
		t.Errorf("WebSocket answered %v %q, %v", kind, got, err)
	}
}

func TestAnUnknownProgramIsNamed(t *testing.T) {
	t.Parallel()
	if err := builtin.Run("ehco"); err == nil || !strings.Contains(err.Error(), `"ehco"`) || builtin.Known("ehco") {
		t.Errorf("Run(ehco) = %v", err)
	}
}
