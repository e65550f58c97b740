package bench

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"sync"
	"testing"
	"time"
)

const callLimit = 30 * time.Second

// BenchmarkPath plays create, first use and delete of a sandbox through two gateways, one caller after
// another and eight at once. An operation is the whole path; the steps are shown in milliseconds.
func BenchmarkPath(b *testing.B) {
	s := start(b)
	for _, callers := range []int{1, 8} {
		b.Run(fmt.Sprintf("callers=%d", callers), func(b *testing.B) {
			var mu sync.Mutex
			steps := map[string][]time.Duration{}
			work := make(chan struct{})
			var group sync.WaitGroup
			for range callers {
				group.Go(func() {
					c := &http.Client{Timeout: callLimit, Transport: &http.Transport{MaxIdleConnsPerHost: 1}}
					defer c.CloseIdleConnections()
					for range work {
						took, err := s.path(c)
						mu.Lock()
						for step, d := range took {
							steps[step] = append(steps[step], d)
						}
						mu.Unlock()
						if err != nil {
							b.Error(err)
						}
					}
				})
			}
			b.ResetTimer()
			for range b.N {
				work <- struct{}{}
			}
			close(work)
			group.Wait()
			b.StopTimer()
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "paths/s")
			for _, step := range []string{"create", "use", "delete"} {
				b.ReportMetric(milliseconds(quantile(steps[step], 0.5)), step+"-p50-ms")
				b.ReportMetric(milliseconds(quantile(steps[step], 0.99)), step+"-p99-ms")
			}
		})
	}
}

// path is one life of a sandbox; it returns how long each step took.
func (s *stack) path(c *http.Client) (map[string]time.Duration, error) {
	took := map[string]time.Duration{}
	first, last := s.Gateways[0], s.Gateways[len(s.Gateways)-1]

	begun := time.Now()
	body, err := s.call(c, http.MethodPost, first+"/sandboxes", `{"templateID":"echo","timeout":300}`, nil, http.StatusCreated)
	if err != nil {
		return took, err
	}
	took["create"] = time.Since(begun)
	var made struct{ SandboxID string }
	if err := json.Unmarshal(body, &made); err != nil {
		return took, fmt.Errorf("create answers %s: %w", body, err)
	}

	begun = time.Now()
	pair := map[string]string{"x-agentenv-sandbox-id": made.SandboxID, "x-agentenv-target-port": "3000"}
	_, useErr := s.call(c, http.MethodGet, last+"/", "", pair, http.StatusOK)
	took["use"] = time.Since(begun)

	begun = time.Now()
	if _, err := s.call(c, http.MethodDelete, first+"/sandboxes/"+made.SandboxID, "", nil, http.StatusNoContent); err != nil {
		return took, err
	}
	took["delete"] = time.Since(begun)
	return took, useErr
}

func (s *stack) call(c *http.Client, method, url, body string, header map[string]string, want int) ([]byte, error) {
	request, err := http.NewRequest(method, url, bytes.NewReader([]byte(body)))
	if err != nil {
		return nil, err
	}
	request.Header.Set("X-API-Key", s.APIKey)
	if body != "" {
		request.Header.Set("Content-Type", "application/json")
	}
	for name, value := range header {
		request.Header.Set(name, value)
	}
	answer, err := c.Do(request)
	if err != nil {
		return nil, err
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err != nil {
		return nil, err
	}
	if answer.StatusCode != want {
		return nil, fmt.Errorf("%s %s: %s %s, want %d", method, url, answer.Status, text, want)
	}
	return text, nil
}
