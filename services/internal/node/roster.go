package node

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"slices"
	"strings"

	"berth/services/internal/sandbox"
)

// MaxRoster bounds the sandboxes of one roster.
const MaxRoster = 50_000

// Entry is one sandbox a node says it runs.
type Entry struct {
	Sandbox     sandbox.ID
	Incarnation sandbox.Incarnation // 0: not told
	Reservation string              // "": not told
	Size        sandbox.Size        // zero: not told
}

// Roster is all the sandboxes a node says it runs, sorted by id, each once.
type Roster []Entry

// NewRoster returns the roster of what a node sent: ids trimmed, blanks and repetitions dropped,
// sorted; what details say is added to the ids they name, and an id only details name is listed
// too. skipped has the ids that are no sandbox ids.
func NewRoster(ids []string, details []Entry) (roster Roster, skipped []string) {
	if len(details) == 0 {
		return rosterOf(ids)
	}
	listed := make(map[sandbox.ID]Entry, max(len(ids), len(details)))
	for _, text := range ids {
		text = strings.TrimSpace(text)
		if text == "" {
			continue
		}
		id, err := sandbox.ParseID(text)
		if err != nil {
			skipped = append(skipped, text)
			continue
		}
		listed[id] = Entry{Sandbox: id}
	}
	for _, detail := range details {
		text := strings.TrimSpace(string(detail.Sandbox))
		id, err := sandbox.ParseID(text)
		if err != nil {
			if text != "" {
				skipped = append(skipped, text)
			}
			continue
		}
		detail.Sandbox = id
		listed[id] = detail
	}
	roster = make(Roster, 0, len(listed))
	for _, entry := range listed {
		roster = append(roster, entry)
	}
	slices.SortFunc(roster, func(a, b Entry) int { return cmp.Compare(a.Sandbox, b.Sandbox) })
	return roster, skipped
}

// rosterOf is NewRoster without details, for it is done for every heartbeat: sorting what comes in order
// already costs a look at each.
func rosterOf(ids []string) (roster Roster, skipped []string) {
	roster = make(Roster, 0, len(ids))
	for _, text := range ids {
		text = strings.TrimSpace(text)
		if text == "" {
			continue
		}
		id, err := sandbox.ParseID(text)
		if err != nil {
			skipped = append(skipped, text)
			continue
		}
		roster = append(roster, Entry{Sandbox: id})
	}
	slices.SortFunc(roster, func(a, b Entry) int { return cmp.Compare(a.Sandbox, b.Sandbox) })
	return slices.Compact(roster), skipped // what an id stands for twice is the same
}

// DigestBytes is the length of a digest.
const DigestBytes = 16

// Digest returns the first 16 bytes of SHA-256 over the sorted ids, and the incarnations where
// told. Rosters with the same sandboxes have the same digest, whatever order they came in.
func (r Roster) Digest() []byte {
	h := sha256.New()
	var number [8]byte
	for _, entry := range r {
		h.Write([]byte(entry.Sandbox))
		h.Write([]byte{0})
		if entry.Incarnation != 0 {
			binary.BigEndian.PutUint64(number[:], uint64(entry.Incarnation))
			h.Write(number[:])
			h.Write([]byte{1})
		}
	}
	return h.Sum(nil)[:DigestBytes]
}

// IDs returns the sandboxes in order.
func (r Roster) IDs() []sandbox.ID {
	ids := make([]sandbox.ID, len(r))
	for i, entry := range r {
		ids[i] = entry.Sandbox
	}
	return ids
}
