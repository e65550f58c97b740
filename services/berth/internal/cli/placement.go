package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"berth/pkg/twirpkit"
	adminv1 "berth/rpc/admin/v1"
	"berth/services/internal/node"
	"berth/services/internal/rpcerr"
)

const defaultSchedulerURL = "http://127.0.0.1:9091"

func placementCommand() *cobra.Command {
	return group("placement", "Understand why a sandbox went where it is",
		`Commands for placements. They speak to a scheduler (BERTH_SCHEDULER_URL) with an operator's token (BERTH_SCHEDULER_TOKEN).`,
		placementExplainCommand())
}

func placementExplainCommand() *cobra.Command {
	var (
		out             output
		s               schedulerFlags
		tenant, request string
		placement       int64
		errNeither      = "name a SANDBOX, or --placement, or --request with --tenant"
	)
	cmd := &cobra.Command{
		Use:   "explain [SANDBOX]",
		Short: "Show a placement: who was asked, who was refused and why",
		Example: `  berth placement explain 019a7c2e-3b5d-7f10-8a44-0c2d9e6f1b23
  berth placement explain --placement 42
  berth placement explain --tenant default --request 7f0c -o json`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) > 1 {
				return usagef(cmd, "unexpected argument %q", args[1])
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			ask := &adminv1.ExplainPlacementRequest{PlacementId: placement, TenantId: tenant, RequestId: request}
			if len(args) == 1 {
				if _, err := sandboxPath(args[0]); err != nil {
					return err
				}
				ask.SandboxId = args[0]
			}
			named := 0
			for _, is := range []bool{ask.SandboxId != "", placement != 0, request != ""} {
				if is {
					named++
				}
			}
			if named != 1 || placement < 0 || tenant != "" && request == "" {
				return usagef(cmd, "%s", errNeither)
			}
			client, err := s.client(cmd)
			if err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), s.timeout)
			defer cancel()
			answer, err := adminv1.NewPlacementsProtobufClient(client.Base(), client).ExplainPlacement(ctx, ask)
			if err != nil {
				return fmt.Errorf("explain placement: %w", explainSchedulerError(err, s.urls))
			}
			if out.json() {
				return writeProto(cmd, answer.GetPlacement())
			}
			return writePlacement(cmd, answer.GetPlacement())
		},
	}
	fs := cmd.Flags()
	out.flags(fs)
	s.flags(fs)
	fs.Int64Var(&placement, "placement", 0, "placement `id`")
	fs.StringVar(&request, "request", "", "request `id` of the create")
	fs.StringVar(&tenant, "tenant", "", "tenant of the request")
	return cmd
}

// schedulerFlags are those of commands that speak to a scheduler.
type schedulerFlags struct {
	urls    []string
	token   string
	timeout time.Duration
}

func (s *schedulerFlags) flags(fs *pflag.FlagSet) {
	s.addressFlags(fs)
	fs.DurationVar(&s.timeout, "request-timeout", clientTimeout, "how long to wait for the answer")
	variables(fs, schedulerVariables())
}

// addressFlags are those that say which schedulers, and who asks.
func (s *schedulerFlags) addressFlags(fs *pflag.FlagSet) {
	fs.StringSliceVar(&s.urls, "scheduler-url", []string{defaultSchedulerURL}, "Twirp `URL`s of schedulers, with commas")
	fs.StringVar(&s.token, "scheduler-token", "", "an operator's `token`; better given as a variable, for others see command lines")
}

// schedulerVariables are the variables of addressFlags.
func schedulerVariables() map[string][]string {
	return map[string][]string{"scheduler-url": {"BERTH_SCHEDULER_URL"}, "scheduler-token": {"BERTH_SCHEDULER_TOKEN"}}
}

// client returns a client that asks the next scheduler where one does not answer.
func (s *schedulerFlags) client(cmd *cobra.Command) (*twirpkit.Failover, error) {
	if err := applyVariables(cmd.Flags()); err != nil {
		return nil, err
	}
	client, err := twirpkit.NewFailover(s.urls, twirpkit.FailoverOptions{Token: s.token})
	if err != nil {
		return nil, fmt.Errorf("BERTH_SCHEDULER_URL (--scheduler-url): %w", err)
	}
	return client, nil
}

// writeProto writes an answer of a scheduler as JSON, with the names of its proto.
func writeProto(cmd *cobra.Command, m proto.Message) error {
	text, err := jsonOf(m)
	if err != nil {
		return err
	}
	var indented bytes.Buffer
	if err := json.Indent(&indented, text, "", "  "); err != nil {
		return fmt.Errorf("write JSON: %w", err)
	}
	_, err = fmt.Fprintln(cmd.OutOrStdout(), indented.String())
	return err
}

// jsonOf returns m as JSON on one line. protojson varies its spaces from build to build, which a script that
// compares texts would notice.
func jsonOf(m proto.Message) ([]byte, error) {
	text, err := protojson.MarshalOptions{UseProtoNames: true, EmitUnpopulated: true}.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("write JSON: %w", err)
	}
	var compact bytes.Buffer
	if err := json.Compact(&compact, text); err != nil {
		return nil, fmt.Errorf("write JSON: %w", err)
	}
	return compact.Bytes(), nil
}

// explainSchedulerError says what to do about a scheduler that refuses or does not answer.
func explainSchedulerError(err error, urls []string) error {
	decoded := rpcerr.Decode(err)
	switch {
	case errors.Is(decoded, rpcerr.ErrUnauthenticated):
		return errors.New("the scheduler refuses the token; set BERTH_SCHEDULER_TOKEN (or --scheduler-token) to an operator's token")
	case errors.Is(decoded, rpcerr.ErrDenied):
		return errors.New("the token's role may not do this; set BERTH_SCHEDULER_TOKEN (or --scheduler-token) to an operator's token")
	case errors.Is(decoded, node.ErrUnknown):
		return fmt.Errorf("%w; \"berth node list\" shows those there are", decoded)
	case errors.Is(decoded, context.DeadlineExceeded):
		return errors.New("the scheduler did not answer in time; try again, or with a longer --request-timeout")
	}
	if opErr, ok := errors.AsType[*net.OpError](err); ok && opErr.Op == "dial" {
		return fmt.Errorf("no scheduler of %s can be reached: %w; start one (berth dev), or set BERTH_SCHEDULER_URL (--scheduler-url)",
			strings.Join(urls, ", "), opErr.Err)
	}
	return decoded
}

func writePlacement(cmd *cobra.Command, p *adminv1.Placement) error {
	w := cmd.OutOrStdout()
	err := writeFields(w, [][2]string{
		{"Placement", strconv.FormatInt(p.GetPlacementId(), 10)},
		{"Outcome", p.GetOutcome()},
		{"Refusal", p.GetRefusal()},
		{"Node", p.GetNodeId()},
		{"Sandboxes", strings.Join(p.GetSandboxIds(), ", ")},
		{"Tenant", p.GetTenantId()},
		{"Request", p.GetRequestId()},
		{"Strategy", p.GetStrategy()},
		{"Asked for", fmt.Sprintf("%d × %d millicores, %s", p.GetCount(), p.GetCpuMillis(), size(p.GetMemoryBytes()))},
		{"Tries", strconv.FormatUint(uint64(p.GetTries()), 10)},
		{"Created", timeOf(p.GetCreatedUnixMs())},
		{"Changed", timeOf(p.GetChangedUnixMs())},
		{"Refused", joinReasons(p.GetReasons())},
	})
	if err != nil || len(p.GetCandidates()) == 0 {
		return err
	}
	rows := make([][]string, 0, len(p.GetCandidates()))
	for _, c := range p.GetCandidates() {
		because := ""
		if c.GetReason() != "" {
			because = c.GetReason()
			if c.GetValue() != 0 || c.GetLimit() != 0 {
				because = fmt.Sprintf("%s: %g of %g", c.GetReason(), c.GetValue(), c.GetLimit())
			}
		}
		score := "-"
		if c.GetVerdict() != "refused" {
			score = strconv.FormatFloat(c.GetScore(), 'f', 3, 64)
		}
		who := c.GetNodeId()
		if who == "" {
			who = "tenant " + p.GetTenantId() // over its quota, wherever it goes
		}
		rows = append(rows, []string{who, c.GetVerdict(), score, because})
	}
	if _, err := fmt.Fprintln(w); err != nil {
		return err
	}
	return writeTable(w, []string{"CANDIDATE", "VERDICT", "SCORE", "BECAUSE"}, rows)
}

func joinReasons(reasons map[string]uint32) string {
	texts := make([]string, 0, len(reasons))
	for _, reason := range slices.Sorted(maps.Keys(reasons)) {
		texts = append(texts, fmt.Sprintf("%d %s", reasons[reason], reason))
	}
	return strings.Join(texts, ", ")
}
