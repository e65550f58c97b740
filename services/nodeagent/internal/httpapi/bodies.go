package httpapi

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"berth/services/nodeagent/internal/sandboxes"
	"berth/services/nodeagent/internal/templates"
)

// Limits of bodies.
const (
	maxBodyBytes     = 1 << 20
	maxMetadataBytes = 64 << 10
	maxTimeout       = 30 * 24 * time.Hour
	maxRefresh       = 3600 * time.Second
)

// createBody is what the SDKs send. Other fields (network rules, volumes, …) are accepted and have no effect here.
type createBody struct {
	TemplateID string            `json:"templateID"`
	Timeout    *number           `json:"timeout"`
	Metadata   map[string]string `json:"metadata"`
	EnvVars    map[string]string `json:"envVars"`
	AutoPause  bool              `json:"autoPause"`
	AutoResume *struct {
		Enabled bool `json:"enabled"`
	} `json:"autoResume"`
	Network *struct {
		AllowPublicTraffic *bool `json:"allowPublicTraffic"`
	} `json:"network"`
	CPUCount int64 `json:"cpuCount"`
	MemoryMB int64 `json:"memoryMB"`
}

// readBody reads the whole body into v without trusting a length. optional: nothing at all is fine.
func readBody(r *http.Request, optional bool, v any) error {
	text, err := io.ReadAll(io.LimitReader(r.Body, maxBodyBytes+1))
	if err != nil {
		return badf("failed to read request body")
	}
	if len(text) > maxBodyBytes {
		return errTooLarge
	}
	text = bytes.TrimSpace(text)
	if len(text) == 0 && optional {
		return nil
	}
	if len(text) == 0 || text[0] != '{' {
		return badf("request body must be one JSON object")
	}
	decoder := json.NewDecoder(bytes.NewReader(text))
	if err := decoder.Decode(v); err != nil {
		if wrong, ok := errors.AsType[*json.UnmarshalTypeError](err); ok && wrong.Field != "" {
			return badf("%s must not be a %s", wrong.Field, wrong.Value)
		}
		return badf("request body is not valid JSON")
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return badf("request body must be one JSON object")
	}
	return nil
}

// number is a number as it stands in a body, for seconds to judge: encoding/json would refuse the whole body without naming the field.
type number string

// UnmarshalJSON takes anything.
func (n *number) UnmarshalJSON(text []byte) error {
	*n = number(bytes.Trim(text, `"`)) // some clients send numbers as text
	return nil
}

// seconds reads a whole number of seconds from least to most; absent is 0.
func seconds(field string, n *number, least, most time.Duration) (time.Duration, error) {
	if n == nil {
		return 0, nil
	}
	value, err := strconv.ParseInt(string(*n), 10, 64)
	if err != nil || value < int64(least/time.Second) || value > int64(most/time.Second) {
		return 0, badf("%s must be a whole number of seconds from %d to %d", field, least/time.Second, most/time.Second)
	}
	return time.Duration(value) * time.Second, nil
}

// Limits of sizes a cold create may ask for.
const (
	maxCPUCount = 1024
	maxMemoryMB = 16 << 20
)

func (b createBody) create() (sandboxes.Create, error) {
	c := sandboxes.Create{
		TemplateID: b.TemplateID, Metadata: b.Metadata, Env: b.EnvVars, AutoPause: b.AutoPause,
		AutoResume: b.AutoResume != nil && b.AutoResume.Enabled,
		Private:    b.Network != nil && b.Network.AllowPublicTraffic != nil && !*b.Network.AllowPublicTraffic,
	}
	var err error
	if c.Timeout, err = seconds("timeout", b.Timeout, time.Second, maxTimeout); err != nil {
		return c, err
	}
	size := 0
	for key, value := range b.Metadata {
		size += len(key) + len(value)
		if strings.ContainsRune(key+value, 0) {
			return c, badf("metadata must not contain \\u0000")
		}
	}
	if size > maxMetadataBytes {
		return c, badf("metadata must not be longer than %d bytes in all", maxMetadataBytes)
	}
	for name, value := range b.EnvVars {
		if !templates.ValidEnv(name, value) {
			return c, badf("envVars: %.64q is not a variable a process can get: want %s", name, templates.WantEnv)
		}
	}
	if b.CPUCount < 0 || b.CPUCount > maxCPUCount {
		return c, badf("cpuCount must be from 1 to %d", maxCPUCount)
	}
	if b.MemoryMB < 0 || b.MemoryMB > maxMemoryMB {
		return c, badf("memoryMB must be from 1 to %d", maxMemoryMB)
	}
	c.CPUMillis, c.MemoryBytes = b.CPUCount*1000, b.MemoryMB<<20
	return c, nil
}

// createAnswer is the body of a create, connect or resume.
type createAnswer struct {
	TemplateID         string  `json:"templateID"`
	SandboxID          string  `json:"sandboxID"`
	ClientID           string  `json:"clientID"`
	EnvdVersion        string  `json:"envdVersion"`
	Alias              string  `json:"alias,omitempty"`
	TrafficAccessToken *string `json:"trafficAccessToken"`
	Domain             *string `json:"domain"`
}

// envdVersion is the oldest version the SDKs work with at all: this node brings no envd of its own, so it promises nothing
// later. A template may run one on port 49983.
const envdVersion = "0.1.0"

// CreateAnswer returns the function that draws up the answer to a create, for the journal.
func CreateAnswer(nodeID, domain string) func(sandboxes.View) (json.RawMessage, error) {
	return func(v sandboxes.View) (json.RawMessage, error) {
		return json.Marshal(newCreateAnswer(nodeID, domain, v))
	}
}

func newCreateAnswer(nodeID, domain string, v sandboxes.View) createAnswer {
	answer := createAnswer{TemplateID: v.Template.Name, SandboxID: string(v.ID), ClientID: nodeID, EnvdVersion: envdVersion, Alias: v.TemplateID}
	if v.TrafficToken != "" {
		answer.TrafficAccessToken = &v.TrafficToken
	}
	if domain != "" {
		answer.Domain = &domain
	}
	return answer
}

// detail is a sandbox in a list, and by itself.
type detail struct {
	TemplateID  string            `json:"templateID"`
	Alias       string            `json:"alias,omitempty"`
	SandboxID   string            `json:"sandboxID"`
	ClientID    string            `json:"clientID"`
	StartedAt   time.Time         `json:"startedAt"`
	EndAt       time.Time         `json:"endAt"`
	CPUCount    int64             `json:"cpuCount"`
	MemoryMB    int64             `json:"memoryMB"`
	DiskSizeMB  int64             `json:"diskSizeMB"`
	State       string            `json:"state"`
	EnvdVersion string            `json:"envdVersion"`
	Metadata    map[string]string `json:"metadata,omitempty"`
	Domain      string            `json:"domain,omitempty"`
	Lifecycle   *lifecycle        `json:"lifecycle,omitempty"` // by itself only
}

type lifecycle struct {
	AutoResume bool   `json:"autoResume"`
	OnTimeout  string `json:"onTimeout"`
}

func (a *API) detail(v sandboxes.View) detail {
	state := sandboxes.Running // also while it is being created: SDKs know no third state
	if v.Status == sandboxes.Paused {
		state = sandboxes.Paused
	}
	return detail{
		TemplateID: v.Template.Name, Alias: v.TemplateID, SandboxID: string(v.ID), ClientID: a.NodeID,
		StartedAt: v.StartedAt.UTC(), EndAt: v.EndAt.UTC(),
		CPUCount: (v.CPUMillis + 999) / 1000, MemoryMB: v.MemoryBytes >> 20, DiskSizeMB: diskSizeMB,
		State: string(state), EnvdVersion: envdVersion, Metadata: v.Metadata, Domain: a.Domain,
	}
}

// diskSizeMB is told where the SDKs ask for a size: workspaces share the node's disk and have no limit of their own.
const diskSizeMB = 0
