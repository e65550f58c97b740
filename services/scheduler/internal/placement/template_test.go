package placement

import (
	"errors"
	"fmt"
	"testing"

	"berth/services/internal/node"
)

func TestACreateForATemplateGoesToTheClustersThatHaveIt(t *testing.T) {
	t.Parallel()
	db := newDB(t, 0, 0)
	for _, cluster := range []string{"same", "other", "none"} {
		for i := range 3 {
			addNode(t, db.DB, testNode{id: fmt.Sprintf("%s-%d", cluster, i), cluster: cluster})
		}
	}
	if _, err := db.Exec(t.Context(), `INSERT INTO cpu_templates (cluster_id, inputs_digest, digest, template_json)
	        VALUES ('same', '', '\x01', '{}'), ('other', '', '\x02', '{}'), ('none', '', '', '')`); err != nil {
		t.Fatal(err)
	}
	p := startPlacer(t, db, DefaultConfig())
	for i := range 20 {
		r := keyed(fmt.Sprintf("r%d", i))
		r.Constraints.CPUTemplate = []byte{1}
		placed, err := p.Schedule(t.Context(), r)
		if err != nil {
			t.Fatalf("Schedule = %v", err)
		}
		if got := placed.Node; got != "same-0" && got != "same-1" && got != "same-2" {
			t.Errorf("Schedule for a template = %s, want a node of its cluster", got)
		}
	}
	r := keyed("nobody's")
	r.Constraints.CPUTemplate = []byte{3}
	_, err := p.Schedule(t.Context(), r)
	told, ok := errors.AsType[*node.Refused](err)
	if !ok || !errors.Is(err, node.ErrConstraints) || told.Reasons[string(CPUTemplate)] != 9 {
		t.Errorf("Schedule for a template that no cluster has = %v (%+v), want %v for nine nodes", err, told, node.ErrConstraints)
	}
}
