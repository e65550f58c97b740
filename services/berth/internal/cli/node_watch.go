package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"berth/pkg/telemetry"
	adminv1 "berth/rpc/admin/v1"
	"berth/services/internal/node"
	"berth/services/internal/rpcerr"
)

// exitError ends the process with a code of its own.
type exitError struct {
	code  int
	cause error
}

func (e *exitError) Error() string { return e.cause.Error() }
func (e *exitError) Unwrap() error { return e.cause }

// watch shows a drain until it ends: on a terminal as a bar that is drawn anew, else as a line for each
// change, as JSON with -o json. A scheduler that does not answer is asked again.
func (d *drainer) watch(ctx context.Context, drain *adminv1.Drain) error {
	show := d.screen()
	tick := time.NewTicker(d.flags.every)
	defer tick.Stop()
	silent := false
	for {
		if err := show.draw(drain); err != nil {
			return err
		}
		if drain.GetEndedUnixMs() != 0 {
			return d.ended(show, drain)
		}
		select {
		case <-ctx.Done():
		case <-tick.C:
			next, err := d.ask(ctx, drain.GetDrainId())
			switch {
			case ctx.Err() != nil:
			case err == nil:
				drain, silent = next, false
			case lasting(err):
				show.end()
				return d.explain(err)
			case !silent:
				silent = true
				show.end()
				fmt.Fprintf(d.cmd.ErrOrStderr(), "%v; trying again\n", d.explain(err))
			}
		}
		if ctx.Err() != nil {
			show.end()
			d.hint()
			return &exitError{exitInterrupted, fmt.Errorf("interrupted; drain %d of %s is %s, with %s left",
				drain.GetDrainId(), d.node, drain.GetState(), leftOf(drain))}
		}
	}
}

// lasting reports whether asking again would give the same error.
func lasting(err error) bool {
	decoded := rpcerr.Decode(err)
	for _, final := range []error{rpcerr.ErrUnauthenticated, rpcerr.ErrDenied, node.ErrNoDrain} {
		if errors.Is(decoded, final) {
			return true
		}
	}
	return false
}

// ended says how a drain ended and what to do now. Only done is no error.
func (d *drainer) ended(show *screen, drain *adminv1.Drain) error {
	show.end()
	if !d.flags.out.json() {
		if drain.GetState() == drainDone {
			is := "is empty"
			if drain.GetMode() == modePark { // what was parked still runs
				is = "has no routes left"
			}
			_, err := fmt.Fprintf(d.cmd.OutOrStdout(), "%[1]s %[3]s after %[2]s and stays cordoned. Take it down, or open it: berth node uncordon %[1]s\n",
				d.node, span(time.Duration(drain.GetTookMs())*time.Millisecond), is)
			return err
		}
		if err := writeBlockers(d.cmd, drain); err != nil {
			return err
		}
	}
	switch drain.GetState() {
	case drainDone:
		return nil
	case drainExpired:
		return &exitError{exitExpired, fmt.Errorf("the deadline of drain %[1]d passed with %[3]s left; %[2]s stays cordoned. "+
			"Wait longer: berth node drain %[2]s --watch · take the routes of what is left: berth node drain %[2]s --mode park --deadline 1m · open it: berth node uncordon %[2]s",
			drain.GetDrainId(), d.node, leftOf(drain))}
	case drainCanceled:
		return &exitError{exitCanceled, fmt.Errorf("drain %d of %s was canceled with %s left; %s. Start another: berth node drain %s",
			drain.GetDrainId(), d.node, leftOf(drain), afterCancel(drain), d.node)}
	}
	return fmt.Errorf("drain %d of %s ended as %q, which this build does not know", drain.GetDrainId(), d.node, oneLine(cut(drain.GetState(), 80)))
}

// screen shows one drain after another.
type screen struct {
	d      *drainer
	bar    bool
	drawn  bool   // a bar is on the terminal's last line
	before string // the last line that was written
}

func (d *drainer) screen() *screen {
	file, ok := d.cmd.OutOrStdout().(*os.File)
	return &screen{d: d, bar: ok && !d.flags.out.json() && telemetry.IsTerminal(file)}
}

const eraseLine = "\r\x1b[K"

func (s *screen) draw(drain *adminv1.Drain) error {
	w := s.d.cmd.OutOrStdout()
	switch {
	case s.d.flags.out.json():
		changed := changeOf(drain)
		if changed == s.before {
			return nil
		}
		s.before = changed
		text, err := jsonOf(drain)
		if err != nil {
			return err
		}
		_, err = fmt.Fprintln(w, string(text))
		return err
	case s.bar:
		s.drawn = true
		_, err := fmt.Fprint(w, eraseLine+barOf(drain))
		return err
	}
	if changed := changeOf(drain); changed != s.before {
		s.before = changed
		_, err := fmt.Fprintf(w, "%s  drain %d of %s: %s\n", time.Now().Local().Format(time.TimeOnly), drain.GetDrainId(), s.d.node, changed)
		return err
	}
	return nil
}

// end leaves the bar where it is, so that what comes next has a line of its own.
func (s *screen) end() {
	if s.drawn {
		s.drawn = false
		_, _ = fmt.Fprintln(s.d.cmd.OutOrStdout())
	}
}

// changeOf is what a line is written for when it differs.
func changeOf(d *adminv1.Drain) string {
	count, promised, _ := strings.Cut(leftOf(d), ",")
	if promised != "" {
		promised = "," + promised
	}
	return oneLine(d.GetState()) + ", " + count + " left" + promised
}

const barWidth = 24

// barOf returns a drain as a line of a terminal: how much is gone, how fast, and until when.
func barOf(d *adminv1.Drain) string {
	left := int(d.GetLeft() + d.GetHoldsLeft())
	total := max(int(d.GetTotal()), left)
	filled := barWidth
	if total > 0 {
		filled = barWidth * (total - left) / total
	}
	text := fmt.Sprintf("%s  %-8s [%s%s] %d/%d gone", oneLine(d.GetNodeId()), oneLine(d.GetState()),
		strings.Repeat("█", filled), strings.Repeat("░", barWidth-filled), total-left, total)
	if d.GetHoldsLeft() > 0 {
		text += fmt.Sprintf(", %d promised", d.GetHoldsLeft())
	}
	if rate, eta, known := pace(total-left, left, time.Duration(d.GetTookMs())*time.Millisecond); known {
		text += fmt.Sprintf("  %s  ETA %s", rate, span(eta))
	}
	if d.GetDeadlineUnixMs() != 0 && d.GetEndedUnixMs() == 0 {
		text += "  deadline in " + span(time.Duration(d.GetDeadlineLeftMs())*time.Millisecond)
	}
	return text
}

// pace says how fast a drain went so far and when it is over at that pace. It is not known before anything
// has left.
func pace(gone, left int, took time.Duration) (rate string, eta time.Duration, known bool) {
	if gone <= 0 || left <= 0 || took <= 0 {
		return "", 0, false
	}
	each := took / time.Duration(gone)
	eta = each * time.Duration(left)
	if eta/time.Duration(left) != each {
		return "", 0, false // longer than a Duration can say
	}
	if perSecond := float64(gone) / took.Seconds(); perSecond >= 0.1 {
		return fmt.Sprintf("%.1f/s", perSecond), eta, true
	}
	return fmt.Sprintf("%.1f/min", float64(gone)/took.Minutes()), eta, true
}
