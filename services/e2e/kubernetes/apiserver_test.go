//go:build kubernetes

package kubernetes

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

const (
	adminToken  = "the-tests-own"
	askLimit    = 20 * time.Second
	answerBytes = 1 << 20
)

// apiServer is a real kube-apiserver over a real etcd, on loopback. There are no controllers: tests write
// what these would.
type apiServer struct {
	t       *testing.T
	dir     string
	etcd    string // host:port
	addr    string // host:port
	process *process
	client  *http.Client
}

func startAPIServer(t *testing.T) *apiServer {
	t.Helper()
	s := &apiServer{t: t, dir: t.TempDir(), etcd: freeAddr(t), addr: freeAddr(t)}
	peer := "http://" + freeAddr(t)
	run(t, filepath.Join(servers, "etcd"), "--name=one", "--data-dir="+filepath.Join(s.dir, "etcd"), "--unsafe-no-fsync",
		"--listen-client-urls=http://"+s.etcd, "--advertise-client-urls=http://"+s.etcd,
		"--listen-peer-urls="+peer, "--initial-advertise-peer-urls="+peer, "--initial-cluster=one="+peer, "--log-level=warn")
	s.write("tokens.csv", adminToken+`,tester,tester,"system:masters"`+"\n")
	s.writeKey("service-accounts.pem")
	s.start()
	return s
}

func (s *apiServer) path(name string) string { return filepath.Join(s.dir, name) }

func (s *apiServer) write(name, text string) {
	s.t.Helper()
	if err := os.WriteFile(s.path(name), []byte(text), 0o600); err != nil {
		s.t.Fatal(err)
	}
}

func (s *apiServer) writeKey(name string) {
	s.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		s.t.Fatal(err)
	}
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		s.t.Fatal(err)
	}
	s.write(name, string(pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der})))
}

// start runs the API server and returns once it is ready. It may be called again after kill.
func (s *apiServer) start() {
	s.t.Helper()
	host, port, err := net.SplitHostPort(s.addr)
	if err != nil {
		s.t.Fatal(err)
	}
	s.process = run(s.t, filepath.Join(servers, "kube-apiserver"),
		"--etcd-servers=http://"+s.etcd, "--bind-address="+host, "--advertise-address="+host, "--secure-port="+port,
		"--cert-dir="+s.path("certificates"), "--token-auth-file="+s.path("tokens.csv"), "--authorization-mode=RBAC",
		"--service-account-issuer=https://kubernetes.default.svc", "--api-audiences=https://kubernetes.default.svc",
		"--service-account-key-file="+s.path("service-accounts.pem"), "--service-account-signing-key-file="+s.path("service-accounts.pem"),
		"--service-cluster-ip-range=10.96.0.0/24", "--disable-admission-plugins=ServiceAccount",
		"--etcd-compaction-interval=0", "--endpoint-reconciler-type=none")
	s.process.abrupt = true // it would first wait a minute for watches
	await(s.t, "the API server's certificate", func() bool {
		authorities := x509.NewCertPool()
		text, err := os.ReadFile(s.certificate())
		if err != nil || !authorities.AppendCertsFromPEM(text) {
			return s.alive()
		}
		s.client = &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: authorities, MinVersion: tls.VersionTLS12}}}
		return true
	})
	s.t.Cleanup(s.client.CloseIdleConnections)
	await(s.t, "the API server", func() bool {
		status, _ := s.ask(http.MethodGet, "/readyz", adminToken, nil)
		return status == http.StatusOK || s.alive()
	})
}

// alive fails the test when the API server has ended, and is false.
func (s *apiServer) alive() bool {
	select {
	case <-s.process.ended:
		s.t.Fatalf("the API server ended:\n%s", s.process.last())
	default:
	}
	return false
}

func (s *apiServer) certificate() string {
	return filepath.Join(s.path("certificates"), "apiserver.crt")
}

// ask sends a request; status 0: it was not answered.
func (s *apiServer) ask(method, path, token string, body []byte) (status int, answer []byte) {
	ctx, cancel := context.WithTimeout(s.t.Context(), askLimit)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, method, "https://"+s.addr+path, bytes.NewReader(body))
	if err != nil {
		s.t.Fatal(err)
	}
	request.Header.Set("Authorization", "Bearer "+token)
	request.Header.Set("Content-Type", "application/json")
	switch {
	case method == http.MethodPatch:
		request.Header.Set("Content-Type", "application/merge-patch+json")
	case bytes.HasPrefix(body, []byte("apiVersion:")):
		request.Header.Set("Content-Type", "application/yaml")
	}
	response, err := s.client.Do(request)
	if err != nil {
		return 0, []byte(fmt.Sprint(err))
	}
	defer func() { _ = response.Body.Close() }()
	answer, err = io.ReadAll(io.LimitReader(response.Body, answerBytes))
	if err != nil {
		return 0, []byte(fmt.Sprint(err))
	}
	return response.StatusCode, answer
}

// must asks as an administrator and wants success.
func (s *apiServer) must(method, path string, body any) []byte {
	s.t.Helper()
	text, isText := body.([]byte)
	if !isText && body != nil {
		var err error
		if text, err = json.Marshal(body); err != nil {
			s.t.Fatal(err)
		}
	}
	status, answer := s.ask(method, path, adminToken, text)
	if status < 200 || status > 299 {
		s.t.Fatalf("%s %s = %d %s", method, path, status, answer)
	}
	return answer
}

// apply creates the objects of a YAML file of the deployment; kinds maps their kinds to paths.
func (s *apiServer) apply(file string, kinds map[string]string) {
	s.t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		s.t.Fatal(err)
	}
	for document := range strings.SplitSeq(string(text), "\n---\n") {
		var lines []string
		path := ""
		for line := range strings.Lines(document) {
			if kind, found := strings.CutPrefix(line, "kind: "); found {
				path = kinds[strings.TrimSpace(kind)]
			}
			if !strings.HasPrefix(line, "#") {
				lines = append(lines, line)
			}
		}
		if path == "" {
			s.t.Fatalf("%s has an object of a kind that is not expected:\n%s", file, document)
		}
		s.must(http.MethodPost, path, []byte(strings.Join(lines, "")))
	}
}

// compact makes etcd forget everything before now.
func (s *apiServer) compact() {
	s.t.Helper()
	etcd := func(path, body string, into any) {
		s.t.Helper()
		request, err := http.NewRequestWithContext(s.t.Context(), http.MethodPost, "http://"+s.etcd+path, strings.NewReader(body))
		if err != nil {
			s.t.Fatal(err)
		}
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			s.t.Fatal(err)
		}
		defer func() { _ = response.Body.Close() }()
		answer, err := io.ReadAll(response.Body)
		if err != nil || response.StatusCode != http.StatusOK {
			s.t.Fatalf("etcd %s = %d %s, %v", path, response.StatusCode, answer, err)
		}
		if err := json.Unmarshal(answer, into); err != nil {
			s.t.Fatal(err)
		}
	}
	defer http.DefaultClient.CloseIdleConnections()
	var now struct {
		Header struct {
			Revision string `json:"revision"`
		} `json:"header"`
	}
	etcd("/v3/kv/range", `{"key": "AA=="}`, &now)
	etcd("/v3/kv/compaction", `{"revision": "`+now.Header.Revision+`", "physical": true}`, &struct{}{})
}
