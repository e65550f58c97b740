package cli

import (
	"encoding/json"
	"fmt"
	"net/url"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"berth/services/internal/sandbox"
)

const clientTimeout = 30 * time.Second

func sandboxCommand() *cobra.Command {
	return group("sandbox", "Create, find and delete sandboxes",
		`Commands for sandboxes. They speak to a gateway (BERTH_GATEWAY_URL) with a client's key (BERTH_API_KEY).`,
		sandboxCreateCommand(), sandboxListCommand(), sandboxGetCommand(), sandboxRmCommand(), sandboxURLCommand())
}

// sandboxDetail is what commands show of a sandbox; the gateway's answer has more.
type sandboxDetail struct {
	SandboxID  string            `json:"sandboxID"`
	TemplateID string            `json:"templateID"`
	Alias      string            `json:"alias"`
	State      string            `json:"state"`
	StartedAt  time.Time         `json:"startedAt"`
	EndAt      time.Time         `json:"endAt"`
	CPUCount   int64             `json:"cpuCount"`
	MemoryMB   int64             `json:"memoryMB"`
	Metadata   map[string]string `json:"metadata"`
	Domain     string            `json:"domain"`
}

// sandboxPath is the path of one sandbox. An id that cannot be one is refused here, with the rule.
func sandboxPath(id string) (string, error) {
	if _, err := sandbox.ParseID(id); err != nil {
		return "", fmt.Errorf("sandbox %q: %w; an id is 1 to 57 of a-z, 0-9 and inner hyphens", cut(id, 80), err)
	}
	return "/sandboxes/" + url.PathEscape(id), nil
}

// pairs reads name=value flags.
func pairs(cmd *cobra.Command, flag string, texts []string) (map[string]string, error) {
	if len(texts) == 0 {
		return nil, nil
	}
	read := make(map[string]string, len(texts))
	for _, text := range texts {
		name, value, ok := strings.Cut(text, "=")
		if !ok || name == "" {
			return nil, usagef(cmd, "--%s %q: name=value is wanted", flag, text)
		}
		if _, twice := read[name]; twice {
			return nil, usagef(cmd, "--%s: %q is given twice", flag, name)
		}
		read[name] = value
	}
	return read, nil
}

// show writes one answer: as it came with -o json, else as fields.
func (o *output) show(cmd *cobra.Command, text json.RawMessage, fields func() ([][2]string, error)) error {
	if o.json() {
		return o.writeJSON(cmd.OutOrStdout(), text)
	}
	rows, err := fields()
	if err != nil {
		return err
	}
	return writeFields(cmd.OutOrStdout(), rows)
}
