package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/user"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"berth/pkg/twirpkit"
	adminv1 "berth/rpc/admin/v1"
	"berth/services/internal/node"
	"berth/services/internal/rpcerr"
)

// The ends of a drain that somebody watches; done is 0.
const (
	exitExpired     = 3
	exitCanceled    = 4
	exitInterrupted = 130
)

// States of a drain, as admin.v1 spells them.
const (
	drainDone     = "done"
	drainExpired  = "expired"
	drainCanceled = "canceled"
)

// modePark takes routes away at the deadline.
const modePark = "park"

// maxDeadline is the longest time that admin.v1 takes, a year.
const maxDeadline = 365 * 24 * time.Hour

// drainFlags are what "berth node drain" is told.
type drainFlags struct {
	out      output
	mode     string
	reason   string
	deadline time.Duration
	every    time.Duration
	watch    bool
	cancel   bool
}

func nodeDrainCommand() *cobra.Command {
	var f drainFlags
	cmd := &cobra.Command{
		Use:   "drain NODE",
		Short: "Empty a node, and watch it become empty",
		Long: `Cordons a node and empties it. Once this has answered, no create is placed there; what was promised room before may
still come, and is waited for. What runs there is reached as before until it leaves.

--mode says how it leaves: wait, by ending as it would anyway; move, to another node, where that is possible; park, at
the deadline, by losing its route until another node lists it or this one is opened again. A drained node stays cordoned.

The drain goes on without this command. With --watch it is watched to its end: exit code 0 when the node is empty, 3 when
the deadline passed before, 4 when the drain was canceled, 130 after Ctrl-C, which leaves the drain as it is.`,
		Example: `  berth node drain node-1 --deadline 30m --reason 'new kernel' --watch
  berth node drain node-1 --mode park --deadline 5m
  berth node drain node-1 --watch     # look at the open drain again
  berth node drain node-1 --cancel`,
		Args: exactArgs("NODE"),
	}
	var s schedulerFlags
	s.flags(cmd.Flags())
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if err := checkNode(args[0]); err != nil {
			return err
		}
		if err := f.check(cmd); err != nil {
			return err
		}
		client, err := s.client(cmd)
		if err != nil {
			return err
		}
		d := &drainer{
			cmd: cmd, flags: &f, node: args[0], timeout: s.timeout,
			nodes: adminv1.NewNodesProtobufClient(client.Base(), client),
			explain: func(err error) error {
				return fmt.Errorf("drain %s: %w", args[0], explainSchedulerError(err, s.urls))
			},
		}
		return d.run(cmd.Context())
	}
	fs := cmd.Flags()
	f.out.flags(fs)
	fs.StringVar(&f.mode, "mode", "wait", "wait, move or park")
	fs.DurationVar(&f.deadline, "deadline", 0, "how long the drain may take, such as 30m; without it, as long as it takes")
	fs.StringVar(&f.reason, "reason", "", "why, for whoever looks at the node")
	fs.BoolVar(&f.watch, "watch", false, "stay until the drain ends; of an open drain, look at it again")
	fs.DurationVar(&f.every, "every", time.Second, "how often --watch looks")
	fs.BoolVar(&f.cancel, "cancel", false, "end the open drain; the node stays cordoned only if it was before")
	return cmd
}

func (f *drainFlags) check(cmd *cobra.Command) error {
	fs := cmd.Flags()
	switch {
	case f.mode != "wait" && f.mode != "move" && f.mode != modePark:
		return usagef(cmd, "--mode %q: wait, move or park is wanted", cut(f.mode, 80))
	case fs.Changed("deadline") && f.deadline < time.Millisecond:
		return usagef(cmd, "--deadline %v: a time above 0 is wanted", f.deadline)
	case f.deadline > maxDeadline:
		return usagef(cmd, "--deadline %v: at most %v, a year, is wanted", f.deadline, maxDeadline)
	case f.mode == modePark && f.deadline == 0 && !f.cancel:
		return usagef(cmd, "--mode park acts at the deadline; give one with --deadline")
	case f.every < 10*time.Millisecond:
		return usagef(cmd, "--every %v: 10ms or more is wanted", f.every)
	case f.cancel && (f.watch || f.told(cmd)):
		return usagef(cmd, "--cancel goes with no other order")
	}
	return nil
}

// told reports whether the command line says how to drain.
func (f *drainFlags) told(cmd *cobra.Command) bool {
	fs := cmd.Flags()
	return fs.Changed("mode") || fs.Changed("deadline") || fs.Changed("reason")
}

// drainer is one run of "berth node drain".
type drainer struct {
	cmd     *cobra.Command
	flags   *drainFlags
	node    string
	timeout time.Duration // of each call
	nodes   adminv1.Nodes
	explain func(error) error
}

func (d *drainer) run(ctx context.Context) error {
	if d.flags.cancel {
		return d.cancel(ctx)
	}
	drain, err := d.start(ctx)
	if err != nil {
		return err
	}
	if d.flags.watch {
		return d.watch(ctx, drain)
	}
	if d.flags.out.json() {
		return writeProto(d.cmd, drain)
	}
	if err := showDrain(d.cmd, drain); err != nil {
		return err
	}
	d.hint()
	return nil
}

// start starts the drain, or with --watch alone returns the one that is open.
func (d *drainer) start(ctx context.Context) (*adminv1.Drain, error) {
	limited, stop := context.WithTimeout(ctx, d.timeout)
	defer stop()
	answer, err := d.nodes.StartDrain(limited, &adminv1.StartDrainRequest{
		NodeId: d.node, Mode: d.flags.mode, DeadlineMs: uint64(d.flags.deadline.Milliseconds()), Reason: d.flags.reason, RequestedBy: requester(),
	})
	if err == nil {
		return answer.GetDrain(), nil
	}
	open, ok := errors.AsType[*node.DrainOpen](rpcerr.Decode(err))
	switch {
	case !ok:
		return nil, d.explain(err)
	case d.flags.watch && !d.flags.told(d.cmd):
		return d.get(ctx, open.ID)
	}
	return nil, fmt.Errorf("drain %s: drain %d of it is open already; watch it with \"berth node drain %s --watch\", or end it with --cancel",
		d.node, open.ID, d.node)
}

func (d *drainer) get(ctx context.Context, id int64) (*adminv1.Drain, error) {
	drain, err := d.ask(ctx, id)
	if err != nil {
		return nil, d.explain(err)
	}
	return drain, nil
}

// ask asks any scheduler that answers.
func (d *drainer) ask(ctx context.Context, id int64) (*adminv1.Drain, error) {
	limited, stop := context.WithTimeout(twirpkit.Repeatable(ctx), d.timeout)
	defer stop()
	answer, err := d.nodes.GetDrain(limited, &adminv1.GetDrainRequest{DrainId: id})
	return answer.GetDrain(), err
}

func (d *drainer) cancel(ctx context.Context) error {
	limited, stop := context.WithTimeout(twirpkit.Repeatable(ctx), d.timeout)
	defer stop()
	answer, err := d.nodes.CancelDrain(limited, &adminv1.CancelDrainRequest{NodeId: d.node})
	switch decoded := rpcerr.Decode(err); {
	case errors.Is(decoded, node.ErrNoDrain):
		return fmt.Errorf("cancel: %s has no drain; \"berth node drains\" shows those there are", d.node)
	case errors.Is(decoded, node.ErrDrainEnded):
		return fmt.Errorf("cancel: the drain of %s has ended; \"berth node uncordon %s\" opens the node", d.node, d.node)
	case err != nil:
		return d.explain(err)
	}
	drain := answer.GetDrain()
	if d.flags.out.json() {
		return writeProto(d.cmd, drain)
	}
	_, err = fmt.Fprintf(d.cmd.OutOrStdout(), "Drain %d of %s is canceled, with %d of %d left; %s.\n",
		drain.GetDrainId(), d.node, drain.GetLeft(), drain.GetTotal(), afterCancel(drain))
	return err
}

func afterCancel(d *adminv1.Drain) string {
	if d.GetWasCordoned() {
		return "the node stays cordoned, as it was before"
	}
	return "the node takes creates again"
}

// hint says how to go on with a drain that goes on by itself.
func (d *drainer) hint() {
	fmt.Fprintf(d.cmd.ErrOrStderr(), "The drain goes on. Look at it: berth node drains %[1]s · watch it: berth node drain %[1]s --watch · end it: berth node drain %[1]s --cancel\n", d.node)
}

// hintDrain says what to do about an order that a drain stands in the way of.
func hintDrain(err error, id string) error {
	if errors.Is(rpcerr.Decode(err), node.ErrDraining) {
		return fmt.Errorf("a drain of it is open; end it with \"berth node drain %s --cancel\"", id)
	}
	return err
}

// requester names who drains, for people; nobody trusts it.
func requester() string {
	name := "operator"
	if u, err := user.Current(); err == nil && u.Username != "" {
		name = u.Username
	}
	if host, err := os.Hostname(); err == nil {
		name += "@" + host
	}
	return cut(strings.ToValidUTF8(oneLine(name), ""), 200)
}

func showDrain(cmd *cobra.Command, d *adminv1.Drain) error {
	deadline := ""
	if d.GetDeadlineUnixMs() != 0 {
		deadline = timeOf(d.GetDeadlineUnixMs())
		if d.GetEndedUnixMs() == 0 {
			deadline += ", in " + span(time.Duration(d.GetDeadlineLeftMs())*time.Millisecond)
		}
	}
	err := writeFields(cmd.OutOrStdout(), [][2]string{
		{"Drain", strconv.FormatInt(d.GetDrainId(), 10)},
		{"Node", d.GetNodeId()},
		{"State", d.GetState()},
		{"Mode", d.GetMode()},
		{"Left", leftOf(d)},
		{"Deadline", deadline},
		{"Reason", d.GetReason()},
		{"By", d.GetRequestedBy()},
		{"Created", timeOf(d.GetCreatedUnixMs())},
		{"Ended", timeOf(d.GetEndedUnixMs())},
	})
	if err != nil {
		return err
	}
	return writeBlockers(cmd, d)
}

func leftOf(d *adminv1.Drain) string {
	text := fmt.Sprintf("%d of %d", d.GetLeft()+d.GetHoldsLeft(), d.GetTotal())
	if d.GetHoldsLeft() > 0 {
		text += fmt.Sprintf(", %d of them promised", d.GetHoldsLeft())
	}
	return text
}

// blockerWords are the reasons in a person's words.
var blockerWords = map[string]string{ //nolint:gochecknoglobals // a constant table
	"hold":     "promised room; may still come",
	"bound":    "runs there",
	"observed": "runs there; its node alone decides about it, so it cannot be moved",
}

func writeBlockers(cmd *cobra.Command, d *adminv1.Drain) error {
	if len(d.GetBlockers()) == 0 {
		return nil
	}
	rows := make([][]string, 0, len(d.GetBlockers()))
	for _, b := range d.GetBlockers() {
		words, known := blockerWords[b.GetReason()]
		if !known {
			words = b.GetReason()
		}
		id := b.GetSandboxId()
		if id == "" {
			id = "-"
		}
		rows = append(rows, []string{id, b.GetTenantId(), timeOf(b.GetSinceUnixMs()), words})
	}
	w := cmd.OutOrStdout()
	if _, err := fmt.Fprintln(w); err != nil {
		return err
	}
	if err := writeTable(w, []string{"IN THE WAY", "TENANT", "SINCE", "WHY"}, rows); err != nil {
		return err
	}
	if d.GetMoreBlockers() > 0 {
		_, err := fmt.Fprintf(w, "… and %d more\n", d.GetMoreBlockers())
		return err
	}
	return nil
}

func nodeDrainsCommand() *cobra.Command {
	var (
		out   output
		open  bool
		limit uint32
	)
	cmd := &cobra.Command{
		Use:   "drains [NODE]",
		Short: "Show drains, and what is in the way of a node's",
		Long: `Shows the drains of all nodes, the newest first; of one NODE its newest, with what is in its way. With -o json it is
always the list.`,
		Example: "  berth node drains\n  berth node drains --open -o json | jq -r '.drains[].node_id'\n  berth node drains node-1",
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) > 1 {
				return usagef(cmd, "unexpected argument %q", args[1])
			}
			return nil
		},
	}
	call := nodesCommand(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		ask := &adminv1.ListDrainsRequest{Open: open, Limit: limit}
		if len(args) == 1 {
			if err := checkNode(args[0]); err != nil {
				return err
			}
			ask.NodeId = args[0]
		}
		return call("list drains", func(ctx context.Context, nodes adminv1.Nodes) error {
			ctx = twirpkit.Repeatable(ctx)
			if len(args) == 1 && !open && !out.json() {
				newest, err := nodes.GetDrain(ctx, &adminv1.GetDrainRequest{NodeId: args[0]})
				if errors.Is(rpcerr.Decode(err), node.ErrNoDrain) {
					return fmt.Errorf("%s has no drain; \"berth node drains\" shows those there are", args[0])
				}
				if err != nil {
					return err
				}
				return showDrain(cmd, newest.GetDrain())
			}
			answer, err := nodes.ListDrains(ctx, ask)
			if err != nil {
				return err
			}
			if out.json() {
				return writeProto(cmd, answer)
			}
			return writeDrains(cmd, answer.GetDrains())
		})
	}
	out.flags(cmd.Flags())
	cmd.Flags().BoolVar(&open, "open", false, "only those that have not ended")
	cmd.Flags().Uint32Var(&limit, "limit", 20, "how many, at most 1000")
	return cmd
}

func writeDrains(cmd *cobra.Command, drains []*adminv1.Drain) error {
	rows := make([][]string, 0, len(drains))
	for _, d := range drains {
		rows = append(rows, []string{
			strconv.FormatInt(d.GetDrainId(), 10), d.GetNodeId(), d.GetState(), d.GetMode(), leftOf(d), timeOf(d.GetCreatedUnixMs()),
			span(time.Duration(d.GetTookMs()) * time.Millisecond), d.GetRequestedBy(), d.GetReason(),
		})
	}
	return writeTable(cmd.OutOrStdout(), []string{"DRAIN", "NODE", "STATE", "MODE", "LEFT", "CREATED", "TOOK", "BY", "REASON"}, rows)
}

// span says a time in at most two units.
func span(d time.Duration) string {
	d = d.Round(time.Second)
	switch {
	case d < 0:
		return "no time"
	case d < time.Minute:
		return fmt.Sprintf("%ds", d/time.Second)
	case d < time.Hour:
		return fmt.Sprintf("%dm%02ds", d/time.Minute, d%time.Minute/time.Second)
	}
	return fmt.Sprintf("%dh%02dm", d/time.Hour, d%time.Hour/time.Minute)
}
