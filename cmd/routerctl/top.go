package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/routerd/routerd/cmd/routerctl/top"
	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/async"
)

// topFlags is what a run of top is asked for.
type topFlags struct {
	screen   top.Screen
	interval time.Duration
	once     bool
	output   string
}

func (a topCommands) topCommand() *cobra.Command {
	f := &topFlags{}
	c := &cobra.Command{
		Use:   "top",
		Short: "Watch all hosts: state, sessions, rates, drops",
		Long: `Show every host of the cluster with its state, BGP sessions and workloads, and its
traffic and drops per second, and refresh continuously. Each host is asked over the
datastore, as trace does, and counts for itself; a rate is the difference of two of
its answers by its own clock. The lines below the table show why hosts are not ready.

RX and TX are bits per second of the devices named in the first line: the uplinks, the
tunnels or the workloads' interfaces (d switches to the next). DROPS are packets per
second dropped by any of these, DENIED those denied by rules. CPU and MEM are the
daemon's. An unknown value is "-": rates need two answers.

The hosts are asked at most once per second, and at most 100 of them per second: 1,000
hosts refresh every 10 s, however many users watch. Hosts with the Kubernetes
datastore answer only for themselves.

The command needs a terminal. Without one, or in a script, use --once, which prints
the table once, after two answers. Set NO_COLOR to disable colours.

Keys: ` + top.Help + `.`,
		Example: "  routerctl top\n  routerctl top --sort drops\n  routerctl top --once\n  routerctl top --once -o json",
		Args:    noArgs,
	}
	outputFlag(c, &f.output)
	fl := c.Flags()
	fl.BoolVar(&f.once, "once", false, "print the table once and exit")
	fl.DurationVar(&f.interval, "interval", 2*time.Second, "interval between queries of the hosts")
	fl.StringVar(&f.screen.Order, "sort", "host", "column to sort by: "+strings.Join(top.Orders(), ", "))
	fl.BoolVar(&f.screen.Reverse, "reverse", false, "reverse the sort order")
	fl.StringVar(&f.screen.Devices, "devices", top.Uplink, "devices whose traffic is shown: "+strings.Join(top.Devices(), ", "))
	c.RunE = func(cmd *cobra.Command, _ []string) error {
		if err := f.check(); err != nil {
			return err
		}
		if f.once {
			return a.topOnce(cmd, f)
		}
		return a.topScreen(cmd.Context(), f)
	}
	return c
}

func (f *topFlags) check() error {
	if err := checkOutput(f.output); err != nil {
		return err
	}
	switch {
	case !f.once && f.output != "table":
		return usagef("top: --output %s goes with --once", f.output)
	case f.interval < 100*time.Millisecond:
		return usagef("top: --interval %s: want 100ms or more", f.interval)
	case !slices.Contains(top.Orders(), f.screen.Order):
		return usagef("top: --sort %q: must be one of %s", f.screen.Order, strings.Join(top.Orders(), ", "))
	case !slices.Contains(top.Devices(), f.screen.Devices):
		return usagef("top: --devices %q: must be one of %s", f.screen.Devices, strings.Join(top.Devices(), ", "))
	}
	return nil
}

// topOnce prints a view once.
func (a topCommands) topOnce(cmd *cobra.Command, f *topFlags) error {
	var v top.View
	err := a.withOperator(cmd, func(ctx context.Context, op apiv1.OperatorClient) error {
		was, err := op.Hosts(ctx, &apiv1.HostsRequest{})
		if err != nil {
			return err
		}
		if err := async.Sleep(ctx, top.Pause(f.interval, was)); err != nil {
			return err
		}
		is, err := op.Hosts(ctx, &apiv1.HostsRequest{})
		v = top.Compare(was, is)
		return err
	})
	if err != nil {
		return err
	}
	f.screen.Now = time.Now()
	lines := f.screen.Draw(v) // sorted, for JSON too
	if f.output == "table" {
		for _, l := range lines {
			fmt.Fprintln(a.stdout, l.Text)
		}
		return nil
	}
	return a.printValue(v, f.output)
}

// answered is what asking the hosts gave.
type answered struct {
	is  *apiv1.HostsResponse
	err error
}

// topScreen shows views until the user quits.
func (a topCommands) topScreen(ctx context.Context, f *topFlags) (err error) {
	if _, err := a.reachSocket(ctx); err != nil { // said before the screen is cleared
		return explain(ctx, err)
	}
	t, ok, err := openTerminal(a.stdin, a.rawOut, a.getenv("TERM"))
	if err != nil {
		return err
	}
	if !ok {
		return usagef("top needs a terminal to show itself on, and TERM to say which: see --once")
	}
	ctx, stop := context.WithCancel(ctx)
	var running sync.WaitGroup
	typed, answers, ask := make(chan string), make(chan answered), make(chan struct{}, 1)
	running.Go(func() { t.keys(ctx, typed) })
	running.Go(func() { a.topAsk(ctx, f.interval, ask, answers) })
	defer func() {
		stop()
		running.Wait()
		if cerr := t.close(); err == nil {
			err = cerr
		}
	}()
	resized := make(chan os.Signal, 1)
	signal.Notify(resized, syscall.SIGWINCH)
	defer signal.Stop(resized)
	var was, is *apiv1.HostsResponse
	for {
		if err := t.draw(a.topLines(t, f, top.Compare(was, is))); err != nil {
			return fmt.Errorf("draw on the terminal: %w", err)
		}
		select {
		case <-ctx.Done():
			return nil // ^C ends it as q does
		case <-resized:
		case got := <-answers:
			f.screen.Note = ""
			switch {
			case got.err != nil:
				f.screen.Note = got.err.Error()
			case !top.Same(is, got.is):
				was, is = is, got.is
			}
		case keys, more := <-typed:
			quit, now := f.screen.Keys(keys)
			if quit || !more {
				return nil
			}
			if now {
				select {
				case ask <- struct{}{}:
				default: // it is being asked
				}
			}
		}
	}
}

// topAsk asks the hosts at intervals, and when it is told to.
func (a topCommands) topAsk(ctx context.Context, interval time.Duration, now <-chan struct{}, answers chan<- answered) {
	for ctx.Err() == nil {
		var got answered
		call, cancel := context.WithTimeoutCause(ctx, a.timeout, fmt.Errorf("no answer within %s", a.timeout))
		got.err = explain(call, a.askOperator(call, func(op apiv1.OperatorClient) (err error) {
			got.is, err = op.Hosts(call, &apiv1.HostsRequest{})
			return err
		}))
		cancel()
		select {
		case answers <- got:
		case <-ctx.Done():
			return
		}
		pause := time.NewTimer(top.Pause(interval, got.is))
		select {
		case <-pause.C:
		case <-now:
		case <-ctx.Done():
		}
		pause.Stop()
	}
}

// topLines is a view as the terminal shows it.
func (a topCommands) topLines(t *terminal, f *topFlags, v top.View) []styled {
	f.screen.Width, f.screen.Height = t.size()
	f.screen.Now = time.Now()
	lines := []top.Line{{Text: "asking the hosts …"}}
	if v.Node != "" || f.screen.Note != "" {
		lines = f.screen.Draw(v)
	}
	colours := map[top.Style]string{top.Title: "1", top.Heading: "7", top.Bad: "31", top.Warn: "33"}
	out := make([]styled, 0, len(lines))
	for _, l := range lines {
		s := styled{text: l.Text}
		if a.getenv("NO_COLOR") == "" {
			s.sgr = colours[l.Style]
		}
		out = append(out, s)
	}
	return out
}
