package launch

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"

	"berth/services/internal/sandbox"
)

// errTooLarge is an answer over Config.AnswerLimit; what it names is not known.
var errTooLarge = errors.New("upstream response too large")

// idHeaders name the sandbox of an answer whose body need not be read.
var idHeaders = []string{"X-Agentenv-Sandbox-Id", "E2b-Sandbox-Id"} //nolint:gochecknoglobals // a constant list

// headerIDs returns the ids that h names, each once: none or, from a sound node, one.
func headerIDs(h http.Header) []string {
	var found []string
	for _, name := range idHeaders {
		for _, value := range h[name] {
			if value = strings.TrimSpace(value); value != "" && !slices.Contains(found, value) {
				found = append(found, value)
			}
		}
	}
	return found
}

// readAll returns the whole body, errTooLarge over limit, or why it broke off.
func readAll(r io.Reader, limit int64) ([]byte, error) {
	text, err := io.ReadAll(io.LimitReader(r, limit+1))
	if int64(len(text)) > limit {
		return nil, errTooLarge
	}
	return text, err
}

// plain returns text as JSON readers see it: a client that takes gzip may have been answered in it.
func plain(text []byte, h http.Header, limit int64) ([]byte, error) {
	switch strings.ToLower(strings.TrimSpace(h.Get("Content-Encoding"))) {
	case "", "identity":
		return text, nil
	case "gzip", "x-gzip":
		reader, err := gzip.NewReader(bytes.NewReader(text))
		if err != nil {
			return nil, fmt.Errorf("unpack an answer: %w", err)
		}
		return readAll(reader, limit)
	}
	return nil, errors.New("an answer in an unknown encoding")
}

// bodyIDs returns the ids that a create's answer names, each once, in order: sandboxID, sandboxId or
// sandbox_id at the top, in data, in the items of sandboxes and of data.sandboxes, and in the items of
// a list, there also under sandbox. What is no JSON names none.
func bodyIDs(text []byte) []string {
	var (
		top   any
		found []string
	)
	if json.Unmarshal(text, &top) != nil {
		return nil
	}
	add := func(v any) {
		object, ok := v.(map[string]any)
		if !ok {
			return
		}
		for _, name := range []string{"sandboxID", "sandboxId", "sandbox_id"} {
			if id, ok := object[name].(string); ok && id != "" && !slices.Contains(found, id) {
				found = append(found, id)
			}
		}
	}
	addItems := func(v any) {
		items, _ := v.([]any)
		for _, item := range items {
			add(item)
		}
	}
	switch v := top.(type) {
	case map[string]any:
		add(v)
		add(v["data"])
		addItems(v["sandboxes"])
		if data, ok := v["data"].(map[string]any); ok {
			addItems(data["sandboxes"])
		}
	case []any:
		for _, item := range v {
			add(item)
			if object, ok := item.(map[string]any); ok {
				add(object["sandbox"])
			}
		}
	}
	return found
}

// named are the ids of a 2xx, as they came.
type named struct {
	ids      []string
	byHeader bool
}

// judge returns the ids a 2xx names as sandbox ids, or a BadAnswer that says what is wrong with them.
// given is the id the node was told to use, "" if it draws its own.
func judge(n named, given sandbox.ID) ([]sandbox.ID, error) {
	switch {
	case len(n.ids) == 0:
		return nil, &BadAnswer{Text: "node answered without a sandbox id"}
	case n.byHeader && len(n.ids) > 1:
		return nil, &BadAnswer{Text: "node answered with two sandbox ids"}
	}
	ids := make([]sandbox.ID, 0, len(n.ids))
	for _, text := range n.ids {
		id, err := sandbox.ParseID(text)
		if err != nil {
			return nil, &BadAnswer{Text: fmt.Sprintf(
				"node answered with a sandbox id that is none: 1 to %d of a-z, 0-9 and inner hyphens are wanted", sandbox.MaxIDBytes)}
		}
		ids = append(ids, id)
	}
	if given != "" && (len(ids) != 1 || ids[0] != given) {
		return nil, &BadAnswer{Text: "node answered with another sandbox id than it was given"}
	}
	return ids, nil
}
