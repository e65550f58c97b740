package dev

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// Info is how to use a stack: what the ready file holds.
type Info struct {
	Gateways    []string        `json:"gateways"`
	Schedulers  []SchedulerInfo `json:"schedulers"`
	Nodes       []NodeInfo      `json:"nodes"`
	DatabaseURL string          `json:"database_url"`
	APIKey      string          `json:"api_key"`
	Domain      string          `json:"domain"`
	PIDs        map[string]int  `json:"pids"` // by process, such as "gateway-1"; 0: it does not run
}

// SchedulerInfo is one scheduler.
type SchedulerInfo struct {
	Twirp string `json:"twirp"`
	GRPC  string `json:"grpc"`
	PID   int    `json:"pid"`
}

// NodeInfo is one node.
type NodeInfo struct {
	ID       string `json:"id"`
	Endpoint string `json:"endpoint"`
	PID      int    `json:"pid"`
}

// Info returns addresses, keys and processes as they are now.
func (s *Stack) Info() Info {
	info := Info{
		Gateways: []string{}, Schedulers: []SchedulerInfo{}, Nodes: []NodeInfo{},
		DatabaseURL: s.urls.admin, APIKey: s.state.APIKey, Domain: s.o.Domain, PIDs: map[string]int{},
	}
	if s.server != nil {
		info.PIDs["postgres"] = s.server.PID()
	}
	s.mu.Lock()
	processes := s.processes
	s.mu.Unlock()
	for _, p := range processes {
		pid, _ := p.present()
		info.PIDs[p.name] = pid
		switch p.kind {
		case gateway:
			info.Gateways = append(info.Gateways, "http://"+p.public)
		case scheduler:
			info.Schedulers = append(info.Schedulers, SchedulerInfo{Twirp: "http://" + p.twirp, GRPC: p.grpc, PID: pid})
		case nodeagent:
			info.Nodes = append(info.Nodes, NodeInfo{ID: p.name, Endpoint: "http://" + p.public, PID: pid})
		}
	}
	return info
}

// OperatorToken is what opens the schedulers' operator methods.
func (s *Stack) OperatorToken() string { return s.state.OperatorToken }

// Dir is the folder with the stack's data.
func (s *Stack) Dir() string { return s.dir }

// writeReadyFile replaces the ready file, if one is wanted, as a whole. It holds the API key, so only
// its owner may read it.
func (s *Stack) writeReadyFile() error {
	if s.o.ReadyFile == "" {
		return nil
	}
	s.readyMu.Lock()
	defer s.readyMu.Unlock()
	var text bytes.Buffer
	encoder := json.NewEncoder(&text)
	encoder.SetEscapeHTML(false) // the & of URLs is for grep and people too
	encoder.SetIndent("", "  ")
	if err := encoder.Encode(s.Info()); err != nil {
		return fmt.Errorf("write ready file: %w", err)
	}
	path, err := filepath.Abs(s.o.ReadyFile)
	if err != nil {
		return fmt.Errorf("write ready file: %w", err)
	}
	if err := writeFile(path, text.Bytes()); err != nil {
		return fmt.Errorf("write ready file (--ready-file): %w", err)
	}
	return nil
}

func (s *Stack) removeReadyFile() error {
	if s.o.ReadyFile == "" || s.lock == nil {
		return nil
	}
	s.readyMu.Lock()
	defer s.readyMu.Unlock()
	if err := os.Remove(s.o.ReadyFile); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove ready file (--ready-file): %w", err)
	}
	return nil
}
