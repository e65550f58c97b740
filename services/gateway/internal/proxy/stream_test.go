package proxy

import (
	"bufio"
	"crypto/sha256"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

func TestAHeaderAndEachChunkComeAtOnce(t *testing.T) {
	t.Parallel()
	for name, head := range map[string]string{
		"without a length":        "Transfer-Encoding: chunked\r\n\r\n",
		"with a length":           "Content-Length: 10\r\n\r\n",
		"ended by the connection": "\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newStack(t, nil)
			next := make(chan struct{})
			s.rawNode(func(c net.Conn) {
				if _, err := readHead(bufio.NewReader(c)); err != nil {
					return
				}
				_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\n"+head)
				for _, chunk := range []string{"first", "other"} {
					<-next
					if strings.HasPrefix(head, "Transfer") {
						chunk = "5\r\n" + chunk + "\r\n"
					}
					_, _ = io.WriteString(c, chunk)
				}
				if strings.HasPrefix(head, "Transfer") {
					_, _ = io.WriteString(c, "0\r\n\r\n")
				}
			})
			c := s.dial()
			c.send(plainGet)
			resp := c.answer("GET") // comes though there is no byte of the body yet
			for _, want := range []string{"first", "other"} {
				sent := time.Now()
				next <- struct{}{}
				got := make([]byte, 5)
				if _, err := io.ReadFull(resp.Body, got); err != nil || string(got) != want {
					t.Fatalf("got %q, %v", got, err)
				}
				if took := time.Since(sent); took > time.Second { // nothing else is coming that could push it
					t.Errorf("%q came after %s", want, took)
				}
			}
			if rest, err := io.ReadAll(resp.Body); len(rest) != 0 || err != nil {
				t.Errorf("the end came as %q, %v", rest, err)
			}
		})
	}
}

func TestLargeBodiesPassWholeInConstantMemory(t *testing.T) {
	t.Parallel()
	const size = 128 << 20
	s := newStack(t, nil)
	var peak atomic.Uint64
	watch := func() {
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		for old := peak.Load(); m.HeapAlloc > old && !peak.CompareAndSwap(old, m.HeapAlloc); old = peak.Load() {
		}
	}
	s.app(func(w http.ResponseWriter, r *http.Request) {
		hash := sha256.New()
		n, err := io.Copy(hash, r.Body)
		watch()
		w.Header().Set("X-In", fmt.Sprintf("%d %x %v", n, hash.Sum(nil), err))
		w.Header().Set("Content-Length", fmt.Sprint(size))
		_, _ = io.CopyN(w, zeros{}, size)
	})
	want := sha256.New()
	_, _ = io.CopyN(want, zeros{}, size)
	watch()
	before := peak.Load()

	c := s.dial()
	if err := c.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	c.send(fmt.Sprintf("POST /x HTTP/1.1\r\nHost: h\r\n%sContent-Length: %d\r\n\r\n", pairOfS1, size))
	if _, err := io.CopyN(c.Conn, zeros{}, size); err != nil {
		t.Fatal(err)
	}
	resp := c.answer("POST")
	n, err := io.Copy(io.Discard, resp.Body)
	watch()
	if in := resp.Header.Get("X-In"); in != fmt.Sprintf("%d %x <nil>", size, want.Sum(nil)) || n != size || err != nil {
		t.Errorf("in %s, out %d, %v", in, n, err)
	}
	if grown := int64(peak.Load()) - int64(before); grown > 64<<20 { // other tests run beside it
		t.Errorf("the heap grew by %d MiB", grown>>20)
	}
}

func TestC28ForwardingHeadersBehindATrustedFront(t *testing.T) {
	t.Parallel()
	front := "X-Forwarded-For: 203.0.113.9\r\nX-Forwarded-Proto: https\r\nX-Forwarded-Host: 3000-s1.sbx.test\r\nX-Real-IP: 203.0.113.9\r\n"
	for name, tt := range map[string]struct {
		trusted []netip.Prefix
		want    []string
		not     string
	}{
		"from a trusted one they stay": {
			[]netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")},
			[]string{"X-Forwarded-For: 203.0.113.9, 127.0.0.1\r\n", "X-Forwarded-Proto: https\r\n", "X-Forwarded-Host: 3000-s1.sbx.test\r\n"},
			"no-such-text",
		},
		"from any other they are replaced": {
			[]netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")},
			[]string{"X-Forwarded-For: 127.0.0.1\r\n", "X-Forwarded-Proto: http\r\n", "X-Forwarded-Host: other\r\n"},
			"203.0.113.9",
		},
	} {
		s := newStack(t, func(c *Config) { c.TrustedProxies = tt.trusted })
		s.app(dump)
		_, got := s.ask("GET / HTTP/1.1\r\nHost: other\r\n" + pairOfS1 + front + "\r\n")
		for _, want := range tt.want {
			if !strings.Contains(got, want) {
				t.Errorf("%s: the node did not see %q in:\n%s", name, want, got)
			}
		}
		if strings.Contains(got, tt.not) {
			t.Errorf("%s: the node saw %q in:\n%s", name, tt.not, got)
		}
	}
}

func TestDebugAnswersSayWhichWayTheyCame(t *testing.T) {
	t.Parallel()
	s := newStack(t, func(c *Config) { c.Debug = true })
	s.app(func(http.ResponseWriter, *http.Request) {})
	resp, _ := s.ask(plainGet)
	if resp.Header.Get("X-Agentenv-Node-Id") == "" || resp.Header.Get("Berth-Route") != "source=header; revision=7; fresh" {
		t.Errorf("%v", resp.Header)
	}
}
