package proxy

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"berth/services/gateway/internal/routecache"
	"berth/services/internal/route"
	"berth/services/internal/sandbox"
)

// benchRole names what a copy of the test binary plays: the backend, the bare proxy, the gateway.
// Each is a process of its own, so that what it costs can be told apart.
const (
	benchRole    = "BERTH_BENCH_ROLE"
	benchBackend = "BERTH_BENCH_BACKEND"
	benchRoutes  = 100_000
)

// playBenchRole serves one role until its standard input ends. Its address is the first line it
// prints.
func playBenchRole(role string) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	server := &http.Server{}
	backend := os.Getenv(benchBackend) //nolint:forbidigo // a child of the benchmark has no flags of its own
	switch role {
	case "backend":
		answer := []byte(strings.Repeat("x", 512))
		server.Handler = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/plain")
			_, _ = w.Write(answer)
		})
	case "bare":
		server.Handler = bareProxy(backend)
	case "berth":
		server.Handler = benchGateway(backend)
	}
	Configure(server, 128<<10)
	go func() { _ = server.Serve(listener) }()
	_, _ = fmt.Fprintln(os.Stdout, listener.Addr())
	_, _ = io.Copy(io.Discard, os.Stdin)
}

// bareProxy is httputil.ReverseProxy as one would use it for speed: a fixed target, a pool of
// connections as large as ours, a pool of buffers.
func bareProxy(backend string) http.Handler {
	target := &url.URL{Scheme: "http", Host: backend}
	return &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(target) },
		Transport: &http.Transport{
			MaxIdleConnsPerHost: idlePerNode, IdleConnTimeout: idleNode, DisableCompression: true,
		},
		BufferPool: benchBuffers{},
	}
}

type benchBuffers struct{}

func (benchBuffers) Get() []byte  { return buffers.Get().(*[bufferBytes]byte)[:] }
func (benchBuffers) Put(b []byte) { buffers.Put((*[bufferBytes]byte)(b)) }

// benchGateway is the data plane with the real cache, warm and fresh.
func benchGateway(backend string) http.Handler {
	log := slog.New(slog.DiscardHandler)
	cache := routecache.New(nil, routecache.DefaultConfig(), log, nil)
	n, err := routecache.NewNode("n1", "http://"+backend, []string{route.CapabilityRouteRevision}, false, 1)
	if err != nil {
		panic(err)
	}
	cache.ApplyNodes([]*routecache.Node{n})
	routes := make([]route.Route, benchRoutes)
	for i := range routes {
		routes[i] = route.Route{Sandbox: sandbox.ID(fmt.Sprint("s", i)), Node: "n1", Revision: 1, Incarnation: 1, State: sandbox.Bound}
	}
	cache.Apply(routes)
	go func() { // what the feed does
		for cache.Confirm(time.Now()); ; cache.Confirm(time.Now()) {
			<-time.After(100 * time.Millisecond)
		}
	}()
	guard, err := route.NewGuard(route.GuardConfig{Schemes: route.DefaultSchemes, Loopback: true})
	if err != nil {
		panic(err)
	}
	forward := New(Deps{
		Routes: cache, Guard: guard, NodeKeys: []string{nodeKey}, Log: log, IsKey: func(context.Context, string) bool { return false },
	}, DefaultConfig())
	go func() { _ = forward.Run(context.Background()) }()
	domains := Domains{domain}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		target, err := ParseTarget(r, domains)
		if err != nil || target.Kind != KindData {
			http.Error(w, "not the data plane", http.StatusBadRequest)
			return
		}
		forward.ServeData(w, r, target)
	})
}

// competitor is one process that is measured.
type competitor struct {
	name, address string
	pid           int
	rates         []float64
	p50, p99      []time.Duration
	cpu           []float64 // microseconds a request
}

func startCompetitor(b *testing.B, role, backend string) *competitor {
	b.Helper()
	cmd := exec.CommandContext(b.Context(), os.Args[0])                                      //nolint:gosec // this very binary
	cmd.Env = append(os.Environ(), benchRole+"="+role, benchBackend+"="+backend, "GOGC=400") // the same for all
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		b.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		b.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		_ = stdin.Close()
		_ = cmd.Wait()
	})
	line, err := bufio.NewReader(stdout).ReadString('\n')
	if err != nil {
		b.Fatal(err)
	}
	return &competitor{name: role, address: strings.TrimSpace(line), pid: cmd.Process.Pid}
}

// cpuTime is the processor time a process has used, in microseconds.
func (c *competitor) cpuTime(b *testing.B) float64 {
	b.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", c.pid))
	if err != nil {
		b.Skip("needs /proc: ", err)
	}
	fields := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))
	ticks := 0.0
	for _, i := range []int{11, 12} { // utime, stime, in hundredths of a second
		n, err := strconv.ParseFloat(fields[i], 64)
		if err != nil {
			b.Fatal(err)
		}
		ticks += n
	}
	return ticks * 10_000
}

// load sends GETs on so many connections for a while, and adds what it saw to c.
func (c *competitor) load(b *testing.B, connections int, during time.Duration) {
	b.Helper()
	request := []byte("GET /some/path?q=1 HTTP/1.1\r\nHost: gateway.internal\r\ne2b-sandbox-id: s4711\r\ne2b-sandbox-port: 3000\r\n" +
		"Accept: */*\r\nUser-Agent: bench/1\r\n\r\n")
	var all sync.WaitGroup
	var failed atomic.Pointer[error]
	latencies := make([][]time.Duration, connections)
	before, began := c.cpuTime(b), time.Now()
	end := began.Add(during)
	for i := range connections {
		all.Go(func() {
			conn, err := net.Dial("tcp", c.address)
			if err != nil {
				failed.Store(&err)
				return
			}
			defer conn.Close()
			r := bufio.NewReader(conn)
			for time.Now().Before(end) {
				sent := time.Now()
				if _, err := conn.Write(request); err != nil {
					failed.Store(&err)
					return
				}
				if err := readAnswer(r); err != nil {
					failed.Store(&err)
					return
				}
				latencies[i] = append(latencies[i], time.Since(sent))
			}
		})
	}
	all.Wait()
	if err := failed.Load(); err != nil {
		b.Fatalf("%s: %v", c.name, *err)
	}
	took, used := time.Since(began), c.cpuTime(b)-before
	merged := slices.Concat(latencies...)
	slices.Sort(merged)
	c.rates = append(c.rates, float64(len(merged))/took.Seconds())
	c.p50 = append(c.p50, merged[len(merged)/2])
	c.p99 = append(c.p99, merged[len(merged)*99/100])
	c.cpu = append(c.cpu, used/float64(len(merged)))
}

// readAnswer reads a 200 with a Content-Length as cheaply as it can be.
func readAnswer(r *bufio.Reader) error {
	length := -1
	for first := true; ; first = false {
		line, err := r.ReadSlice('\n')
		if err != nil {
			return err
		}
		switch {
		case first && !bytes.HasPrefix(line, []byte("HTTP/1.1 200")):
			return fmt.Errorf("answer %q", line)
		case bytes.HasPrefix(line, []byte("Content-Length: ")):
			if length, err = strconv.Atoi(string(bytes.TrimSpace(line[len("Content-Length: "):]))); err != nil {
				return err
			}
		case len(line) == 2:
			if length < 0 {
				return fmt.Errorf("an answer without a length")
			}
			_, err = r.Discard(length)
			return err
		}
	}
}

func median[T interface{ ~int64 | ~float64 }](values []T) T {
	sorted := slices.Sorted(slices.Values(values))
	return sorted[len(sorted)/2]
}

// BenchmarkGateway compares a warm GET through the forwarder with the same through a bare
// httputil.ReverseProxy and with the backend itself. An iteration is one round of a second for each;
// they alternate, for only ratios within one run mean anything. Medians are reported.
func BenchmarkGateway(b *testing.B) {
	backend := startCompetitor(b, "backend", "")
	bare := startCompetitor(b, "bare", backend.address)
	berth := startCompetitor(b, "berth", backend.address)
	for _, connections := range []int{16, 64} {
		b.Run(fmt.Sprint("connections=", connections), func(b *testing.B) {
			competitors := []*competitor{backend, bare, berth}
			for _, c := range competitors {
				c.rates, c.p50, c.p99, c.cpu = nil, nil, nil, nil
				c.load(b, connections, 300*time.Millisecond) // warm
				c.rates, c.p50, c.p99, c.cpu = nil, nil, nil, nil
			}
			b.ResetTimer()
			for round := range b.N {
				for i := range competitors { // each is first, second and third in turn
					competitors[(round+i)%len(competitors)].load(b, connections, time.Second)
				}
			}
			b.StopTimer()
			b.ReportMetric(0, "ns/op")
			for _, c := range competitors {
				b.ReportMetric(median(c.rates), c.name+"-req/s")
				b.ReportMetric(median(c.cpu), c.name+"-cpu-µs")
				b.ReportMetric(float64(median(c.p50).Microseconds()), c.name+"-p50-µs")
				b.ReportMetric(float64(median(c.p99).Microseconds()), c.name+"-p99-µs")
			}
			b.ReportMetric(median(berth.rates)/median(bare.rates), "berth/bare-rate")
			b.ReportMetric(median(berth.cpu)/median(bare.cpu), "berth/bare-cpu")
			b.ReportMetric(float64(median(berth.p99))/float64(median(bare.p99)), "berth/bare-p99")
			b.ReportMetric(median(berth.rates)/median(backend.rates), "berth/backend-rate")
		})
	}
}
