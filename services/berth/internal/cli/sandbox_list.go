package cli

import (
	"encoding/json"
	"fmt"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
)

// maxListed bounds how many pages a list reads, should a gateway never stop handing out tokens.
const maxListed = 100_000

func sandboxListCommand() *cobra.Command {
	var (
		g        gatewayFlags
		out      output
		states   []string
		metadata []string
		limit    int
	)
	cmd := &cobra.Command{
		Use:     "list",
		Aliases: []string{"ls"},
		Short:   "List your sandboxes, newest first",
		Example: `  berth sandbox list
  berth sandbox list --state paused --metadata owner=ann
  berth sandbox list -o json | jq -r '.[].sandboxID'`,
		Args: exactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			query, err := listQuery(cmd, states, metadata)
			if err != nil {
				return err
			}
			if limit < 0 {
				return usagef(cmd, "--limit %d: 0 (all) or more is wanted", limit)
			}
			client, err := g.client(cmd)
			if err != nil {
				return err
			}
			items, missing, err := listAll(cmd, client, query, limit)
			if err != nil {
				return fmt.Errorf("list sandboxes: %w", err)
			}
			if missing != "" {
				fmt.Fprintf(cmd.ErrOrStderr(), "berth: the list lacks what these nodes have: %s\n", oneLine(missing))
			}
			if out.json() {
				return out.writeJSON(cmd.OutOrStdout(), items)
			}
			rows := make([][]string, 0, len(items))
			for _, item := range items {
				var s sandboxDetail
				if err := decode(item, &s); err != nil {
					return err
				}
				rows = append(rows, []string{
					s.SandboxID, s.TemplateID, s.State, age(s.StartedAt, time.Now()),
					s.EndAt.Local().Format(time.DateTime), joinPairs(s.Metadata),
				})
			}
			return writeTable(cmd.OutOrStdout(), []string{"SANDBOX", "TEMPLATE", "STATE", "AGE", "ENDS", "METADATA"}, rows)
		},
	}
	fs := cmd.Flags()
	g.flags(fs, clientTimeout)
	out.flags(fs)
	fs.StringSliceVar(&states, "state", nil, "only these: running, paused")
	fs.StringArrayVar(&metadata, "metadata", nil, "only those with `name=value`; may be repeated")
	fs.IntVar(&limit, "limit", 0, "at most so many; 0: all")
	variables(fs, gatewayVariables())
	return cmd
}

func listQuery(cmd *cobra.Command, states, metadata []string) (url.Values, error) {
	query := url.Values{}
	for _, state := range states {
		if state != "running" && state != "paused" {
			return nil, usagef(cmd, "--state %q: running or paused is wanted", state)
		}
	}
	if len(states) > 0 {
		query.Set("state", strings.Join(states, ","))
	}
	read, err := pairs(cmd, "metadata", metadata)
	if err != nil {
		return nil, err
	}
	// The contract encodes names and values before they become a query string inside the query's value.
	inner := url.Values{}
	for name, value := range read {
		inner.Set(url.PathEscape(name), url.PathEscape(value))
	}
	if len(inner) > 0 {
		query.Set("metadata", inner.Encode())
	}
	return query, nil
}

// listAll follows the pages until they end or limit items are there; 0 is all.
func listAll(cmd *cobra.Command, client *gatewayClient, query url.Values, limit int) ([]json.RawMessage, string, error) {
	const page = 100
	items := []json.RawMessage{}
	var missing string
	for len(items) < maxListed {
		size := page
		if limit > 0 {
			size = min(page, limit-len(items))
		}
		query.Set("limit", strconv.Itoa(size))
		text, header, err := client.call(cmd.Context(), "GET", "/v2/sandboxes?"+query.Encode(), nil)
		if err != nil {
			return nil, "", err
		}
		var got []json.RawMessage
		if err := decode(text, &got); err != nil {
			return nil, "", err
		}
		items = append(items, got...)
		if m := header.Get("Berth-Missing-Nodes"); m != "" {
			missing = m
		}
		token := header.Get("X-Next-Token")
		if token == "" || limit > 0 && len(items) >= limit {
			break
		}
		query.Set("nextToken", token)
	}
	if limit > 0 && len(items) > limit {
		items = items[:limit]
	}
	return items, missing, nil
}

func joinPairs(values map[string]string) string {
	if len(values) == 0 {
		return "-"
	}
	texts := make([]string, 0, len(values))
	for name, value := range values {
		texts = append(texts, name+"="+value)
	}
	slices.Sort(texts)
	return strings.Join(texts, ",")
}
