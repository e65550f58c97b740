// Package demo plays Berth's main job in front of a reader, on real processes, and fails at the first
// surprise. Each step shows the line that would do the same by hand, and what came back.
package demo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"berth/services/berth/internal/dev"
)

const (
	playLimit = 100 * time.Second
	stopLimit = time.Minute
)

// Options says on which stack to play and where to.
type Options struct {
	Stack dev.Options
	Out   io.Writer
	Color bool
}

// Play starts the stack, plays all steps, and stops it, whatever happened. It returns nil if every step
// had the result it must have and nothing is left running.
func Play(ctx context.Context, o Options) (err error) {
	s := &story{out: o.Out, color: o.Color, begun: time.Now()}
	playCtx, cancel := context.WithTimeout(ctx, playLimit)
	defer cancel()

	s.step("Start PostgreSQL, 2 schedulers, 2 gateways and 2 node agents, each a process of its own")
	s.stack, err = dev.Start(playCtx, o.Stack)
	if errors.Is(err, context.Canceled) {
		return errors.New("interrupted; nothing is left running")
	}
	if err != nil {
		return err
	}
	s.info = s.stack.Info()
	s.showProcesses()
	s.took("start")

	playErr := s.play(playCtx)
	if playErr != nil {
		fmt.Fprintf(o.Out, "\n%s\n%s", "The last lines of the services' logs:", s.stack.LogTail())
	}
	s.step("Stop everything")
	stopCtx, cancelStop := context.WithTimeout(context.WithoutCancel(ctx), stopLimit)
	defer cancelStop()
	stopErr := s.stack.Stop(stopCtx)
	if stopErr == nil {
		stopErr = s.nothingLeft()
	}
	s.took("stop")
	if err := errors.Join(playErr, stopErr); err != nil {
		return fmt.Errorf("the demo failed in step %d: %w", s.steps, err)
	}
	s.summary()
	return nil
}

// story is one play.
type story struct {
	out   io.Writer
	color bool
	stack *dev.Stack
	info  dev.Info

	begun   time.Time
	stepAt  time.Time
	steps   int
	timings []timing
}

type timing struct {
	what string
	took time.Duration
}

// play is the story between start and stop.
func (s *story) play(ctx context.Context) error {
	one, two := s.newClient(0), s.newClient(1)
	defer one.close()
	defer two.close()

	s.step("Create a sandbox from the template echo, through gateway 1")
	first, err := s.create(ctx, one)
	if err != nil {
		return err
	}
	s.took("create")

	s.step("Talk to the server inside it through gateway 2, found by a pair of headers")
	if err := s.talkByPair(ctx, two, first); err != nil {
		return err
	}
	s.took("use by header pair")

	s.step("The same by host name, {port}-{sandbox}.{domain}, over HTTP and over a WebSocket")
	if err := s.talkByHost(ctx, two, first); err != nil {
		return err
	}
	s.took("use by host, WebSocket")

	s.step("Where it lives is a row in PostgreSQL")
	before, err := s.showBinding(ctx, first)
	if err != nil {
		return err
	}

	s.step("kill -9 a scheduler and a gateway; create, use and delete another sandbox meanwhile")
	if err := s.killAndGoOn(ctx, two, first); err != nil {
		return err
	}
	s.took("kill, create, use, delete")

	s.step("Nothing was lost: the first sandbox answers, its row is the same, no room is held for nobody")
	if err := s.nothingLost(ctx, two, first, before); err != nil {
		return err
	}
	s.took("check")

	s.step("Delete the first sandbox")
	if err := s.remove(ctx, two, first); err != nil {
		return err
	}
	s.took("delete")
	return nil
}

func (s *story) step(title string) {
	s.steps++
	s.stepAt = time.Now()
	bold, plain := "", ""
	if s.color {
		bold, plain = "\x1b[1m", "\x1b[0m"
	}
	fmt.Fprintf(s.out, "\n%s%d. %s%s\n", bold, s.steps, title, plain)
}

// command shows what the reader could type.
func (s *story) command(format string, args ...any) {
	faint, plain := "", ""
	if s.color {
		faint, plain = "\x1b[2m", "\x1b[0m"
	}
	fmt.Fprintf(s.out, "   %s$ %s%s\n", faint, fmt.Sprintf(format, args...), plain)
}

func (s *story) result(format string, args ...any) {
	for line := range strings.SplitSeq(strings.TrimRight(fmt.Sprintf(format, args...), "\n"), "\n") {
		fmt.Fprintf(s.out, "     %s\n", line)
	}
}

func (s *story) took(what string) {
	s.timings = append(s.timings, timing{what, time.Since(s.stepAt)})
}

func (s *story) summary() {
	fmt.Fprintf(s.out, "\nAll went as it must, in %s:\n", round(time.Since(s.begun)))
	for _, t := range s.timings {
		fmt.Fprintf(s.out, "   %-28s %s\n", t.what, round(t.took))
	}
	fmt.Fprintf(s.out, "\nNothing is left running. Next: berth dev keeps the same stack for you.\n")
}

func round(d time.Duration) time.Duration {
	if d > time.Second {
		return d.Round(10 * time.Millisecond)
	}
	return d.Round(100 * time.Microsecond)
}
