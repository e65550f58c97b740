package nodes

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"

	"berth/pkg/pgdb"
	"berth/services/internal/advisory"
	"berth/services/internal/node"
	"berth/services/scheduler/internal/cputemplate"
)

// takeBackLimit is what a caller who left gets to have its template given to the next one.
const takeBackLimit = 2 * time.Second

// template returns what a beat that was accepted is told of its cluster's CPU template; "": nothing. It is
// marked as told in a statement of its own, after the heartbeat's commit: a cluster's template is computed
// under a lock that comes before the node's. That no template can be told fails nothing, for the lease is
// renewed; the next heartbeat takes the slow path again until it was.
func (n *Nodes) template(ctx context.Context, p *prepared, done *acceptance) (string, error) {
	offers := done.offers
	if done.inputs {
		changed, err := n.computeTemplate(ctx, p.Cluster)
		if err != nil {
			n.store.Failed("cpu template", err)
			n.log.WarnContext(ctx, "a cpu template was not computed", slog.String("cluster", p.Cluster), slog.Any("error", err))
		}
		offers = offers || changed
	}
	if !offers {
		return "", nil
	}
	text, err := n.tellTemplate(ctx, p)
	if err != nil {
		n.store.Failed("cpu template", err)
		n.log.WarnContext(ctx, "a cpu template was not told", slog.Any("node", p.Node), slog.Any("error", err))
	}
	if ctx.Err() != nil {
		return "", fmt.Errorf("heartbeat of %s: %w", p.Node, ctx.Err()) // nobody hears the answer
	}
	return text, nil
}

// The nodes that count for a template are the observed ones, but for those that are silent and no source lists
// any more. Their configurations are in the digest by their hashes.
const (
	templateInputs = `
        nodes AS n
        JOIN   node_leases AS l ON l.node_id = n.node_id AND l.ended_at IS NULL AND (n.present OR l.expires_at > clock_timestamp())`
	inputsDigest = `sha256(convert_to(COALESCE(string_agg(n.node_id || ' ' || COALESCE(n.cpu_config_hash::text, ''), E'\n' ORDER BY n.node_id), ''), 'UTF8'))`
)

// selectStaleTemplateSQL tells whether a cluster's template was computed of other inputs than there are.
const selectStaleTemplateSQL = `
SELECT  ` + inputsDigest + ` IS DISTINCT FROM (SELECT inputs_digest FROM cpu_templates WHERE cluster_id = @cluster)
FROM    ` + templateInputs + `
WHERE   n.cluster_id = @cluster`

// selectInputsSQL reads each configuration once, of the lowest node that has it; that one's place in the order
// of all is what counts.
const selectInputsSQL = `
WITH    inputs AS MATERIALIZED (
        SELECT n.node_id, n.cpu_config_hash
        FROM   ` + templateInputs + `
        WHERE  n.cluster_id = @cluster),
        firsts AS (
        SELECT min(node_id) AS node_id, count(*) AS nodes FROM inputs GROUP BY cpu_config_hash)
SELECT  firsts.node_id, firsts.nodes, n.cpu_config_hash, n.cpu_config_json,
        (SELECT ` + inputsDigest + ` FROM inputs AS n) AS inputs_digest
FROM    firsts
JOIN    nodes AS n ON n.node_id = firsts.node_id
ORDER   BY firsts.node_id`

// templateInput is a configuration and how many nodes have it.
type templateInput struct {
	NodeID        node.ID
	Nodes         int64
	CPUConfigHash *int64 `db:"cpu_config_hash"`
	CPUConfigJSON string `db:"cpu_config_json"`
	InputsDigest  []byte
}

const writeTemplateSQL = `
INSERT  INTO cpu_templates (cluster_id, inputs_digest, digest, template_json)
SELECT  @cluster, @inputs, @digest, @template
ON CONFLICT (cluster_id) DO UPDATE
SET     inputs_digest = EXCLUDED.inputs_digest, digest = EXCLUDED.digest, template_json = EXCLUDED.template_json`

const selectTemplateDigestSQL = `SELECT digest FROM cpu_templates WHERE cluster_id = @cluster`

// writeConfigErrorsSQL shows which configurations cannot be read, on all nodes of the cluster that have them,
// and on no other.
const writeConfigErrorsSQL = `
WITH    wrong AS MATERIALIZED (
        SELECT n.node_id, COALESCE(judged.error, '') AS error
        FROM   nodes AS n
        LEFT   JOIN unnest(@hashes::bigint[], @errors::text[]) AS judged (hash, error) ON judged.hash = n.cpu_config_hash
        WHERE  n.cluster_id = @cluster AND n.cpu_config_error IS DISTINCT FROM COALESCE(judged.error, '')
        ORDER  BY n.node_id
        FOR    NO KEY UPDATE OF n)
UPDATE  nodes AS n
SET     cpu_config_error = wrong.error
FROM    wrong
WHERE   n.node_id = wrong.node_id`

// computeTemplate makes a cluster's template that of the nodes there are, if it is not, and tells whether it
// is another one now. All replicas may do it at once.
func (n *Nodes) computeTemplate(ctx context.Context, cluster string) (changed bool, err error) {
	args := pgx.StrictNamedArgs{"cluster": cluster}
	var stale bool
	if err := n.db.QueryRow(ctx, selectStaleTemplateSQL, args).Scan(&stale); err != nil {
		return false, fmt.Errorf("look at the nodes of cluster %q: %w", cluster, err)
	}
	if !stale {
		return false, nil
	}
	var made clusterTemplate
	err = n.db.Tx(ctx, func(tx pgx.Tx) error {
		changed = false
		err := n.store.Lock("template", func() error { return pgdb.Lock(ctx, tx, advisory.Template(cluster)) })
		if err != nil {
			return err
		}
		var before []byte
		err = tx.QueryRow(ctx, selectTemplateDigestSQL, args).Scan(&before)
		if err != nil && !errors.Is(err, pgx.ErrNoRows) {
			return fmt.Errorf("read the template: %w", err)
		}
		rows, err := tx.Query(ctx, selectInputsSQL, args)
		if err != nil {
			return fmt.Errorf("read the configurations: %w", err)
		}
		inputs, err := pgx.CollectRows(rows, pgx.RowToStructByName[templateInput])
		if err != nil {
			return fmt.Errorf("read the configurations: %w", err)
		}
		if len(inputs) == 0 {
			return nil // the last node left: who comes next is compared again
		}
		made = makeTemplate(inputs)
		_, err = tx.Exec(ctx, writeTemplateSQL, pgx.StrictNamedArgs{
			"cluster": cluster, "inputs": inputs[0].InputsDigest, "digest": made.digest, "template": made.text,
		})
		if err != nil {
			return fmt.Errorf("write the template: %w", err)
		}
		_, err = tx.Exec(ctx, writeConfigErrorsSQL, pgx.StrictNamedArgs{"cluster": cluster, "hashes": made.badHashes, "errors": made.errors})
		if err != nil {
			return fmt.Errorf("write what is wrong with configurations: %w", err)
		}
		changed = !bytes.Equal(before, made.digest)
		return nil
	})
	if err != nil {
		return false, fmt.Errorf("template of cluster %q: %w", cluster, err)
	}
	if changed {
		n.log.InfoContext(ctx, "cpu template changed", slog.String("cluster", cluster), slog.Bool("withheld", made.text == ""),
			slog.Int("configurations", made.configs), slog.Int("unreadable", len(made.errors)))
	}
	return changed, nil
}

// clusterTemplate is what came of a cluster's configurations. digest and text are empty where there is none.
type clusterTemplate struct {
	digest    []byte
	text      string
	configs   int
	badHashes []int64
	errors    []string // why each of badHashes cannot be read
}

// makeTemplate returns the template of inputs, at least one. There is none unless all have a configuration
// that can be read.
func makeTemplate(inputs []templateInput) clusterTemplate {
	made := clusterTemplate{digest: []byte{}, badHashes: []int64{}, errors: []string{}}
	var known []cputemplate.Input
	for _, in := range inputs {
		if in.CPUConfigHash == nil {
			continue
		}
		config, err := cputemplate.Parse(in.CPUConfigJSON)
		if err != nil {
			made.badHashes, made.errors = append(made.badHashes, *in.CPUConfigHash), append(made.errors, storable(err.Error()))
			continue
		}
		known = append(known, cputemplate.Input{Node: string(in.NodeID), Config: config})
	}
	made.configs = len(known)
	if len(known) < len(inputs) {
		return made
	}
	if len(known) == 1 && inputs[0].Nodes > 1 {
		known = append(known, known[0]) // one is itself, two are what both have, though they are equal
	}
	made.text = cputemplate.Intersect(known)
	made.digest = cputemplate.Digest(made.text)
	return made
}

// markTemplateSQL marks the template as told to the instance that has the lease, unless it was: once for each
// instance and template. A node that echoes is told until it does.
const markTemplateSQL = `
WITH    held AS MATERIALIZED (
        SELECT l.node_id, l.template_sent
        FROM   node_leases AS l
        WHERE  l.node_id = @node AND l.service_instance_id = @instance AND l.ended_at IS NULL
        FOR    UPDATE)
UPDATE  node_leases AS l
SET     template_sent = t.digest
FROM    held, cpu_templates AS t
WHERE   l.node_id = held.node_id AND t.cluster_id = @cluster AND t.digest <> ''
AND     CASE WHEN @echoes::boolean THEN @echo::bytea ELSE held.template_sent END <> t.digest
RETURNING t.template_json, t.digest, held.template_sent`

const takeBackTemplateSQL = `
UPDATE  node_leases
SET     template_sent = @before
WHERE   node_id = @node AND service_instance_id = @instance AND template_sent = @digest`

// tellTemplate returns the template of p's cluster if p's instance is to be told. If the call ends before the
// answer can leave, it is told to the next one.
func (n *Nodes) tellTemplate(ctx context.Context, p *prepared) (string, error) {
	var (
		text           string
		digest, before []byte
	)
	err := n.db.Tx(ctx, func(tx pgx.Tx) error {
		text, digest, before = "", nil, nil
		err := tx.QueryRow(ctx, markTemplateSQL, pgx.StrictNamedArgs{
			"node": p.Node, "instance": p.Instance, "cluster": p.Cluster, "echoes": p.echoes(), "echo": p.TemplateDigest,
		}).Scan(&text, &digest, &before)
		if errors.Is(err, pgx.ErrNoRows) {
			return nil
		}
		return err
	})
	if err == nil {
		err = ctx.Err()
	}
	if err == nil {
		return text, nil
	}
	err = fmt.Errorf("tell %s the template: %w", p.Node, err)
	if digest == nil {
		return "", err
	}
	cleanup, cancel := context.WithTimeout(context.WithoutCancel(ctx), takeBackLimit)
	defer cancel()
	_, backErr := n.db.Exec(cleanup, takeBackTemplateSQL, pgx.StrictNamedArgs{
		"node": p.Node, "instance": p.Instance, "digest": digest, "before": before,
	})
	return "", errors.Join(err, backErr)
}
