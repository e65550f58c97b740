package scheduler

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"berth/migrations"
	"berth/pkg/pgtest"
	schedulerv1 "berth/rpc/scheduler/v1"
)

// selfSigned writes a certificate for 127.0.0.1 that is its own authority, and its key.
func selfSigned(t *testing.T) (certFile, keyFile string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "scheduler"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true,
		KeyUsage:    x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	certFile, keyFile = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	for path, block := range map[string]*pem.Block{certFile: {Type: "CERTIFICATE", Bytes: der}, keyFile: {Type: "EC PRIVATE KEY", Bytes: keyDER}} {
		if err := os.WriteFile(path, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return certFile, keyFile
}

func TestWithTLSBothListenersAskForACertificate(t *testing.T) {
	t.Parallel()
	cert, key := selfSigned(t)
	cfg := config(t, schedulerURL(t, pgtest.New(t, migrations.FS)))
	cfg.TLSCert, cfg.TLSKey, cfg.TLSClientCA = cert, key, cert
	start(t, cfg)

	authority := x509.NewCertPool()
	text, err := os.ReadFile(cert)
	if err != nil {
		t.Fatal(err)
	}
	authority.AppendCertsFromPEM(text)
	pair, err := tls.LoadX509KeyPair(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		certificates []tls.Certificate
		works        bool
	}{"with one": {[]tls.Certificate{pair}, true}, "without": {nil, false}} {
		secure := &tls.Config{RootCAs: authority, Certificates: tt.certificates, MinVersion: tls.VersionTLS12}
		transport := &http.Transport{TLSClientConfig: secure}
		overTwirp := schedulerv1.NewSchedulerProtobufClient("https://"+cfg.TwirpListen, &http.Client{Transport: transport})
		if _, err := overTwirp.ListNodes(t.Context(), &schedulerv1.ListNodesRequest{}); (err == nil) != tt.works {
			t.Errorf("%s over Twirp: %v, want success %t", name, err, tt.works)
		}
		transport.CloseIdleConnections()
		conn, err := grpc.NewClient(cfg.GRPCListen, grpc.WithTransportCredentials(credentials.NewTLS(secure)))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := schedulerv1.NewSchedulerClient(conn).ListNodes(t.Context(), &schedulerv1.ListNodesRequest{}); (err == nil) != tt.works {
			t.Errorf("%s over gRPC: %v, want success %t", name, err, tt.works)
		}
		_ = conn.Close()
	}
}
