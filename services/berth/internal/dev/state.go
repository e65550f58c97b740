package dev

import (
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strconv"
)

// state is what a restart keeps: secrets and ports. It is a file that only its owner reads.
type state struct {
	path string

	APIKey          string            `json:"api_key"`
	NodeKey         string            `json:"node_key"`
	ClusterSecret   string            `json:"cluster_secret"`
	NodeToken       string            `json:"node_token"`
	GatewayToken    string            `json:"gateway_token"`
	OperatorToken   string            `json:"operator_token"`
	DispatcherToken string            `json:"dispatcher_token"`
	Suffix          string            `json:"login_suffix"` // of login names, which a server has once for all databases
	Passwords       map[string]string `json:"passwords"`    // by group role
	Ports           map[string]int    `json:"ports"`        // by listener, such as "gateway-1 public"
}

// openState reads the file at path, or makes secrets where there is none yet.
func openState(path string) (*state, error) {
	s := &state{path: path}
	text, err := os.ReadFile(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return nil, fmt.Errorf("read state: %w", err)
	default:
		if err := json.Unmarshal(text, s); err != nil {
			return nil, fmt.Errorf("read state: %s is damaged: %w; delete it to have new keys made, or the whole folder to begin anew", path, err)
		}
	}
	for secret, bytes := range map[*string]int{
		&s.NodeKey: 32, &s.ClusterSecret: 32, &s.NodeToken: 32, &s.GatewayToken: 32, &s.OperatorToken: 32, &s.DispatcherToken: 32, &s.Suffix: 4,
	} {
		if *secret == "" {
			*secret = randomHex(bytes)
		}
	}
	if s.APIKey == "" {
		s.APIKey = "e2b_" + randomHex(30) // the form that SDKs insist on
	}
	if s.Passwords == nil {
		s.Passwords = map[string]string{}
	}
	if s.Ports == nil {
		s.Ports = map[string]int{}
	}
	return s, s.save()
}

func (s *state) password(group string) string {
	if s.Passwords[group] == "" {
		s.Passwords[group] = randomHex(24)
	}
	return s.Passwords[group]
}

// save replaces the file as a whole, so that a crash leaves the old one or the new one.
func (s *state) save() error {
	text, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return fmt.Errorf("write state: %w", err)
	}
	if err := writeFile(s.path, append(text, '\n')); err != nil {
		return fmt.Errorf("write state: %w", err)
	}
	return nil
}

// writeFile replaces path by text, readable by its owner only.
func writeFile(path string, text []byte) error {
	file, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".*")
	if err != nil {
		return err
	}
	_, writeErr := file.Write(text)
	if err := errors.Join(writeErr, file.Sync(), file.Close()); err != nil {
		return errors.Join(err, os.Remove(file.Name()))
	}
	return os.Rename(file.Name(), path)
}

func randomHex(bytes int) string {
	text := make([]byte, bytes)
	_, _ = rand.Read(text) // never fails
	return hex.EncodeToString(text)
}

// Ports are taken from below the range from which the system gives ports to outgoing connections, so
// that none of those sits on a port between its choice and its use.
const (
	firstPort = 20000
	portRange = 10000
	portTries = 200
)

// address returns the loopback address of a listener: the one it had, if that is free, else a free one.
func (s *state) address(listener string) (string, error) {
	if port, ok := s.Ports[listener]; ok && free(port) {
		return loopback(port), nil
	}
	taken := map[int]bool{}
	for _, port := range s.Ports {
		taken[port] = true
	}
	for range portTries {
		n, err := rand.Int(rand.Reader, big.NewInt(portRange))
		if err != nil {
			return "", fmt.Errorf("choose a port: %w", err)
		}
		port := firstPort + int(n.Int64())
		if !taken[port] && free(port) {
			s.Ports[listener] = port
			return loopback(port), nil
		}
	}
	return "", fmt.Errorf("find a port for %s: none of %d tried from %d on is free", listener, portTries, firstPort)
}

func loopback(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }

func free(port int) bool {
	l, err := net.Listen("tcp", loopback(port)) //nolint:noctx // a bind does not wait
	if err != nil {
		return false
	}
	return l.Close() == nil
}
