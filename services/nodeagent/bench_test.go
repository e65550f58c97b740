package nodeagent_test

import (
	"fmt"
	"io"
	"net/http"
	"testing"
)

// BenchmarkExchange is one GET through the node to an application and back, on a kept connection to the node.
func BenchmarkExchange(b *testing.B) {
	a := newAgent(b)
	a.run()
	a.create("s", "echo", "")
	a.ask("s", 3000, "/")
	transport := &http.Transport{}
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport}
	for b.Loop() {
		req, err := http.NewRequestWithContext(b.Context(), http.MethodGet, a.base+"/proxy/", http.NoBody)
		if err != nil {
			b.Fatal(err)
		}
		for name, value := range pair("s", 3000) {
			req.Header.Set(name, value)
		}
		resp, err := client.Do(req)
		if err != nil {
			b.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, resp.Body)
		_ = resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			b.Fatalf("status %d", resp.StatusCode)
		}
	}
}

// BenchmarkCreateDelete is the whole life of a sandbox, without traffic.
func BenchmarkCreateDelete(b *testing.B) {
	a := newAgent(b)
	a.run()
	n := 0
	for b.Loop() {
		n++
		id := fmt.Sprintf("s-%d", n)
		a.create(id, "shell", "")
		if r := a.call("DELETE", "/sandboxes/"+id, ""); r.status != http.StatusNoContent {
			b.Fatalf("delete: %d %s", r.status, r.body)
		}
	}
}
