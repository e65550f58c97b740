package listing

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"berth/services/internal/node"
	"berth/services/internal/sandbox"
)

func TestWhatIsAppliedHereIsCutOutOfTheTextByteForByte(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		raw  string
		want Query
	}{
		"nothing": {"", Query{Limit: 100}},
		"metadata encoded twice stays so (sdk.md 4.4)": {
			"metadata=a%252520b%3Dc%25252Bd%25253De%2526f%26k2%3Dv2&state=running,paused&startedAfter=2001-09-09T01%3A46%3A40.000Z&template=base&order=asc&limit=7&nextToken=tok%3D%3D%2F%2B",
			Query{
				Limit: 7, Ascending: true, Template: "base", Token: "tok==/+", StartedAfter: time.Unix(1_000_000_000, 0).UTC(),
				ForNodes: "metadata=a%252520b%3Dc%25252Bd%25253De%2526f%26k2%3Dv2&state=running,paused",
			},
		},
		"states repeated or joined":       {"state=running&limit=1&state=paused%2Cx", Query{Limit: 1, ForNodes: "state=running&state=paused%2Cx"}},
		"a name in other letters is ours": {"%6Cimit=3&a=1", Query{Limit: 3, ForNodes: "a=1"}},
		"what nobody can read goes on":    {"%zz=1&&x", Query{Limit: 100, ForNodes: "%zz=1&&x"}},
		"given empty is not given":        {"limit=&nextToken=&order=", Query{Limit: 100}},
		"strict":                          {"strict=true", Query{Limit: 100, Strict: true}},
	}
	for name, tt := range tests {
		got, err := ParseQuery(tt.raw, true)
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	if q, err := ParseQuery("limit=7&nextToken=x", false); err != nil || q.Limit != 0 || q.Token != "" {
		t.Errorf("the old list has no pages: %+v, %v", q, err)
	}
}

func item(id string, started int64, on node.ID) Item {
	return Item{ID: sandbox.ID(id), Started: time.Unix(started, 0), Node: on}
}

func everyone(Item) (bool, node.ID) { return true, "" }

// Whatever comes and goes between pages, an item that stays is on exactly one of them.
func TestEachItemThatStaysIsOnOnePage(t *testing.T) {
	t.Parallel()
	for seed := range uint64(200) {
		rnd := rand.New(rand.NewPCG(seed, 1))
		q := Query{Limit: 1 + rnd.IntN(5), Ascending: seed%2 == 0}
		stays := map[sandbox.ID]bool{}
		var held []Item
		for i := range 1 + rnd.IntN(30) {
			it := item(fmt.Sprintf("s%02d", i), int64(rnd.IntN(4)), "n")
			stays[it.ID] = true
			held = append(held, it)
		}
		var after *Item
		seen := map[sandbox.ID]int{}
		for more := true; more; {
			// Others come and go.
			now := slices.Clone(held)
			for i := range rnd.IntN(5) {
				now = append(now, item(fmt.Sprintf("x%d-%d", rnd.IntN(100), i), int64(rnd.IntN(4)), "n"))
			}
			rnd.Shuffle(len(now), func(i, j int) { now[i], now[j] = now[j], now[i] })
			var page []Item
			page, more = q.merge(now, everyone, after)
			if len(page) > q.Limit {
				t.Fatalf("seed %d: a page of %d, limit %d", seed, len(page), q.Limit)
			}
			for _, it := range page {
				seen[it.ID]++
			}
			if len(page) > 0 {
				after = &page[len(page)-1]
			}
		}
		for id := range stays {
			if seen[id] != 1 {
				t.Fatalf("seed %d: %s is on %d pages", seed, id, seen[id])
			}
		}
	}
}

func TestOfTwoItemsWithOneIdTheBindingsNodesStays(t *testing.T) {
	t.Parallel()
	old, here := item("a", 1, "old"), item("a", 2, "here")
	bound := func(Item) (bool, node.ID) { return true, "here" }
	for _, items := range [][]Item{{old, here}, {here, old}} {
		page, _ := Query{}.merge(items, bound, nil)
		if len(page) != 1 || page[0].Node != "here" {
			t.Errorf("merge(%v) = %v, want the one on here", items, page)
		}
	}
}

func TestANodesNonsenseIsTold(t *testing.T) {
	t.Parallel()
	for name, text := range map[string]string{
		"no list":      `{}`,
		"null":         `null`,
		"no JSON":      `[`,
		"no id":        `[{"startedAt":"2026-01-02T03:04:05Z"}]`,
		"an id is one": `[{"sandboxID":"A B","startedAt":"2026-01-02T03:04:05Z"}]`,
		"no time":      `[{"sandboxID":"a"}]`,
		"no such time": `[{"sandboxID":"a","startedAt":"yesterday"}]`,
	} {
		if items, err := parseItems([]byte(text), "n"); err == nil {
			t.Errorf("%s: parseItems(%s) = %v", name, text, items)
		}
	}
	items, err := parseItems([]byte(`[{"sandboxID":"a","startedAt":"2026-01-02T03:04:05.5+01:00","fromTomorrow":[1.50]}]`), "n")
	if err != nil || len(items) != 1 || string(items[0].Raw) != `{"sandboxID":"a","startedAt":"2026-01-02T03:04:05.5+01:00","fromTomorrow":[1.50]}` {
		t.Errorf("an item with a field of tomorrow = %+v, %v", items, err)
	}
}

func TestATokenOpensForItsListOnly(t *testing.T) {
	t.Parallel()
	secret, next := strings.Repeat("a", 32), strings.Repeat("b", 32)
	one, err := NewCursor([]string{secret})
	if err != nil {
		t.Fatal(err)
	}
	q := Query{ForNodes: "state=running"}
	last := item("s1", 1_700_000_000, "n")
	last.Started = last.Started.Add(123 * time.Nanosecond)
	digest := q.digest("tenant", "/v2/sandboxes")
	q.Token = one.seal(q, digest, last)
	got, err := one.open(q, digest)
	if err != nil || got.ID != last.ID || !got.Started.Equal(last.Started) {
		t.Fatalf("open(seal(%v)) = %v, %v", last, got, err)
	}
	rotated, err := NewCursor([]string{next, secret})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := rotated.open(q, digest); err != nil {
		t.Errorf("after the secret was rotated: %v", err)
	}
	stranger, err := NewCursor([]string{next})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stranger.open(q, digest); err == nil {
		t.Error("another cluster's token opened")
	}
	for _, other := range [][]byte{
		q.digest("other", "/v2/sandboxes"), q.digest("tenant", "/sandboxes"), Query{ForNodes: "state=paused"}.digest("tenant", "/v2/sandboxes"),
	} {
		if _, err := one.open(q, other); err == nil {
			t.Error("a token opened for another list")
		}
	}
	for i := range len(q.Token) {
		altered := []byte(q.Token)
		altered[i] ^= 1
		if _, err := one.open(Query{Token: string(altered), ForNodes: q.ForNodes}, digest); err == nil && i < len(altered)-1 {
			t.Errorf("altered at %d it opened", i)
		}
	}
	if first, err := one.open(Query{}, digest); err != nil || first != nil {
		t.Errorf("without a token = %v, %v; want the first page", first, err)
	}
}

func FuzzParseQuery(f *testing.F) {
	f.Add("state=running&limit=3")
	f.Add("%6c=&&=%zz")
	f.Fuzz(func(t *testing.T, raw string) {
		q, err := ParseQuery(raw, true)
		if err != nil {
			return
		}
		again, err := ParseQuery(q.ForNodes, true)
		if err != nil || again.ForNodes != q.ForNodes || again.Token != "" || again.Limit != 100 {
			t.Errorf("ParseQuery(%q) leaves %q for nodes, which reads as %+v, %v", raw, q.ForNodes, again, err)
		}
	})
}

func TestManyMissingNodesAreCounted(t *testing.T) {
	t.Parallel()
	var missing []Missing
	for i := range 20 {
		missing = append(missing, Missing{node.ID(fmt.Sprintf("n%02d", i)), reasonDial})
	}
	if got := MissingHeader(missing[:2]); got != "n00;reason=dial, n01;reason=dial" {
		t.Errorf("two missing: %q", got)
	}
	if got := MissingHeader(missing); !strings.HasSuffix(got, "n15;reason=dial, +4") {
		t.Errorf("twenty missing: %q", got)
	}
}
