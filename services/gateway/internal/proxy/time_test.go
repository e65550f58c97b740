package proxy

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"
)

// chunkEvery sends a chunk now and after each pause, n in all, and the last one.
func chunkEvery(w io.Writer, n int, pause time.Duration, chunk string) {
	tick := time.NewTicker(pause)
	defer tick.Stop()
	for i := range n {
		if i > 0 {
			<-tick.C
		}
		if _, err := fmt.Fprintf(w, "%x\r\n%s\r\n", len(chunk), chunk); err != nil {
			return
		}
	}
	_, _ = io.WriteString(w, "0\r\n\r\n")
}

func TestC25TheAnswerDecidesWhatIsAStream(t *testing.T) {
	t.Parallel()
	const events, pause = 4, 600 * time.Millisecond
	for name, lines := range map[string]string{
		"asked for in a list":  "GET /sse HTTP/1.1\r\nAccept: application/json, text/event-stream\r\n",
		"asked for anything":   "GET /sse HTTP/1.1\r\nAccept: */*\r\n",
		"asked for nothing":    "GET /sse HTTP/1.1\r\n",
		"as an answer to POST": "POST /sse HTTP/1.1\r\nContent-Length: 0\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			// The limit on silence is far below the pauses between events.
			s := newStack(t, func(c *Config) { c.Idle = pause / 2 })
			read := make(chan struct{}, events)
			s.rawNode(func(c net.Conn) {
				if _, err := readHead(bufio.NewReader(c)); err != nil {
					return
				}
				_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
				chunkEvery(writerFunc(func(p []byte) (int, error) {
					n, err := c.Write(p)
					if p[0] != '0' && err == nil {
						// No event waits for the next one: there is none until this one was read.
						select {
						case <-read:
						case <-t.Context().Done():
							return n, t.Context().Err()
						}
					}
					return n, err
				}), events, pause, "data: 1\n\n")
			})
			c := s.dial()
			c.send(lines + "Host: 3000-s1.sbx.test\r\n\r\n")
			resp := c.answer("GET")
			got := make([]byte, len("data: 1\n\n"))
			for i := range events {
				if _, err := io.ReadFull(resp.Body, got); err != nil {
					t.Fatalf("event %d: %v", i, err)
				}
				read <- struct{}{}
			}
			if rest, err := io.ReadAll(resp.Body); len(rest) > 0 || err != nil {
				t.Errorf("the end came as %q, %v", rest, err)
			}
		})
	}
}

type writerFunc func(p []byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

func TestC26LimitsAreOnSilenceNotOnLength(t *testing.T) {
	t.Parallel()
	limits := func(c *Config) { c.FirstByte, c.Idle = 1500*time.Millisecond, 800*time.Millisecond }
	answerAfter := func(d time.Duration) func(net.Conn) {
		return func(c net.Conn) {
			req, err := http.ReadRequest(bufio.NewReader(c))
			if err != nil {
				return
			}
			b, err := io.ReadAll(req.Body)
			if err != nil {
				return
			}
			timer := time.NewTimer(d)
			defer timer.Stop()
			<-timer.C
			fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", len(b), b)
		}
	}
	t.Run("an answer that takes its time is not silence yet", func(t *testing.T) {
		t.Parallel()
		s := newStack(t, limits)
		s.rawNode(answerAfter(time.Second))
		if resp, _ := s.ask(plainGet); resp.StatusCode != 200 {
			t.Errorf("%d, want 200", resp.StatusCode)
		}
	})
	t.Run("an answer that never comes is 504", func(t *testing.T) {
		t.Parallel()
		s := newStack(t, limits)
		s.rawNode(func(c net.Conn) { _, _ = io.Copy(io.Discard, c) })
		began := time.Now()
		resp, text := s.ask(plainGet)
		if e := errorOf(t, resp, text); e.Code != 504 || e.Message != "upstream timeout" {
			t.Errorf("%+v", e)
		}
		if took := time.Since(began); took < 1400*time.Millisecond || took > 3*time.Second {
			t.Errorf("after %s", took)
		}
	})
	t.Run("a slow upload is longer than every limit", func(t *testing.T) {
		t.Parallel()
		s := newStack(t, limits)
		s.rawNode(answerAfter(0))
		c := s.dial()
		c.send("POST /x HTTP/1.1\r\nHost: h\r\n" + pairOfS1 + "Transfer-Encoding: chunked\r\n\r\n")
		chunkEvery(c, 6, 400*time.Millisecond, "12345")
		if got := body(t, c.answer("POST")); got != strings.Repeat("12345", 6) {
			t.Errorf("the app got %q", got)
		}
	})
	t.Run("a slow download is longer than every limit", func(t *testing.T) {
		t.Parallel()
		s := newStack(t, limits)
		s.rawNode(func(c net.Conn) {
			if _, err := readHead(bufio.NewReader(c)); err == nil {
				_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
				chunkEvery(c, 6, 400*time.Millisecond, "12345")
			}
		})
		if _, got := s.ask(plainGet); got != strings.Repeat("12345", 6) {
			t.Errorf("the client got %q", got)
		}
	})
	t.Run("an answer that falls silent is cut", func(t *testing.T) {
		t.Parallel()
		s := newStack(t, limits)
		s.rawNode(func(c net.Conn) {
			if _, err := readHead(bufio.NewReader(c)); err == nil {
				_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n")
				_, _ = io.Copy(io.Discard, c)
			}
		})
		c := s.dial()
		c.send(plainGet)
		if got, err := io.ReadAll(c.answer("GET").Body); string(got) != "a" || !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("the client read %q, %v", got, err)
		}
	})
	t.Run("an upload that falls silent is 408", func(t *testing.T) {
		t.Parallel()
		s := newStack(t, limits)
		s.rawNode(answerAfter(0))
		c := s.dial()
		c.send("POST /x HTTP/1.1\r\nHost: h\r\n" + pairOfS1 + "Content-Length: 10\r\n\r\nfive!")
		resp := c.answer("POST")
		if e := errorOf(t, resp, body(t, resp)); e.Code != 408 || e.ErrorCode != "client_timeout" {
			t.Errorf("%+v", e)
		}
	})
	t.Run("a client that does not read is not silence", func(t *testing.T) {
		t.Parallel()
		s := newStack(t, limits)
		const size = 32 << 20
		s.app(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", fmt.Sprint(size))
			_, _ = io.CopyN(w, zeros{}, size)
		})
		c := s.dial()
		c.send(plainGet)
		resp := c.answer("GET")
		stop := time.NewTimer(2 * time.Second) // far over the limit on silence
		defer stop.Stop()
		<-stop.C
		if n, err := io.Copy(io.Discard, resp.Body); n != size || err != nil {
			t.Errorf("the client read %d bytes, %v", n, err)
		}
	})
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

func TestOverdue(t *testing.T) {
	t.Parallel()
	l := Limits{FirstByte: 10 * time.Second, Idle: 3 * time.Second}
	for name, tt := range map[string]struct {
		state  uint32
		silent time.Duration
		want   error
	}{
		"the node has time for its first byte":       {bodySent, 9 * time.Second, nil},
		"but not for ever":                           {bodySent, 11 * time.Second, errNodeSilent},
		"a client's body may pause":                  {readingClient, 2 * time.Second, nil},
		"but not for ever, and it is the client's":   {readingClient, 4 * time.Second, errClientSilent},
		"a node that takes no more of it is the one": {0, 4 * time.Second, errNodeSilent},
		"an answer may pause":                        {answering | bodySent, 2 * time.Second, nil},
		"an answer's silence is the node's":          {answering | bodySent, 4 * time.Second, errNodeSilent},
		"a client that does not read may do so":      {answering | bodySent | writingClient, time.Hour, nil},
		"a stream may be silent":                     {answering | streaming, time.Hour, nil},
	} {
		if got := l.overdue(tt.state, tt.silent); !errors.Is(got, tt.want) || (got == nil) != (tt.want == nil) {
			t.Errorf("%s: overdue(%b, %s) = %v, want %v", name, tt.state, tt.silent, got, tt.want)
		}
	}
	l.StreamIdle = time.Minute
	if got := l.overdue(answering|streaming, time.Hour); !errors.Is(got, errNodeSilent) {
		t.Errorf("a stream's own limit gave %v", got)
	}
	if got := (Limits{}).overdue(bodySent, 1000*time.Hour); got != nil {
		t.Errorf("no limit gave %v", got)
	}
}
