package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/timestamppb"

	apiv1 "github.com/routerd/routerd/control/api/v1"
)

func (a eventsCommands) eventsCommand() *cobra.Command {
	req := &apiv1.EventsRequest{}
	var since time.Duration
	c := &cobra.Command{
		Use:   "events [PART...]",
		Short: "Show recent events of this host and their causes",
		Long: `Show the newest records of the daemon's log, oldest first: sessions, conditions,
workloads, repairs, each with its cause. The daemon keeps 2048 records, including
those below logLevel; records of level debug are kept only if they are written (see
routerctl log-level). PART is a part of the daemon, such as bgp.`,
		Example: "  routerctl events\n  routerctl events bgp --since 10m\n  routerctl events --level warn --watch",
		Args: func(_ *cobra.Command, args []string) error {
			req.Parts = args
			return nil
		},
	}
	f := c.Flags()
	f.StringVar(&req.Level, "level", "info", "lowest level to show: debug, info, warn or error")
	f.DurationVar(&since, "since", 0, "show only events newer than this, e.g. 10m")
	f.Uint32Var(&req.Limit, "limit", 100, "number of newest events to show; 0: all that are kept")
	f.BoolVarP(&req.Follow, "watch", "w", false, "follow new events until interrupted")
	var output string
	outputFlag(c, &output)
	c.RunE = func(cmd *cobra.Command, _ []string) error {
		if err := checkOutput(output); err != nil {
			return err
		}
		if since != 0 {
			req.Since = timestamppb.New(time.Now().Add(-since))
		}
		ctx, cancel := a.withDeadline(cmd)
		if req.GetFollow() {
			cancel()
			ctx, cancel = context.WithCancel(cmd.Context())
		}
		defer cancel()
		err := explain(ctx, ask(ctx, a.daemon, apiv1.NewEventsClient, func(from apiv1.EventsClient) error {
			return a.showEvents(ctx, from, req, output)
		}))
		if req.GetFollow() && cmd.Context().Err() != nil {
			return nil // being interrupted is how it ends
		}
		return err
	}
	return c
}

func (a eventsCommands) showEvents(ctx context.Context, from apiv1.EventsClient, req *apiv1.EventsRequest, output string) error {
	stream, err := from.List(ctx, req)
	if err != nil {
		return err
	}
	n := 0
	for {
		r, err := stream.Recv()
		switch {
		case errors.Is(err, io.EOF):
			if n == 0 && output == "table" {
				fmt.Fprintln(a.stderr, "No events.")
			}
			return nil
		case err != nil:
			return err
		}
		n += len(r.GetEvents())
		if output != "table" {
			err = printProto(a.stdout, r, output)
		} else {
			err = printEvents(a.stdout, r.GetEvents())
		}
		if err != nil {
			return err
		}
	}
}

// printEvents prints a line for each event. It has no columns that depend on all of them, for more may come.
func printEvents(w io.Writer, list []*apiv1.LogEvent) error {
	for _, e := range list {
		var b strings.Builder
		fmt.Fprintf(&b, "%s  %-5s  %-10s  %s", e.GetTime().AsTime().Local().Format("2006-01-02 15:04:05.000"), e.GetLevel(), dash(e.GetPart()), e.GetMessage())
		for i, at := range e.GetAttrs() {
			sep := "  "
			if i == 0 {
				sep = ": "
			}
			v := at.GetValue()
			if v == "" || strings.ContainsAny(v, " =\"") {
				v = strconv.Quote(v)
			}
			fmt.Fprintf(&b, "%s%s=%s", sep, at.GetKey(), v)
		}
		if _, err := fmt.Fprintln(w, b.String()); err != nil {
			return err
		}
	}
	return nil
}

func (a eventsCommands) logLevelCommand() *cobra.Command {
	req := &apiv1.LevelsRequest{}
	c := &cobra.Command{
		Use:   "log-level [[PART=]LEVEL...]",
		Short: "Show or set the log levels of the daemon",
		Long: `Set log levels, if any are given, and show the level of each part of the daemon. LEVEL
(debug, info, warn, error) sets all parts, PART=LEVEL one part. A setting lasts until
the daemon ends; the daemon starts with logLevel of its configuration.`,
		Example: "  routerctl log-level\n  routerctl log-level bgp=debug\n  routerctl log-level info",
		Args: func(_ *cobra.Command, args []string) error {
			for _, arg := range args {
				part, level, found := strings.Cut(arg, "=")
				if !found {
					part, level = "", arg
				}
				if found && part == "" || level == "" {
					return usagef("%q: want LEVEL or PART=LEVEL, such as bgp=debug", arg)
				}
				req.Set = append(req.Set, &apiv1.PartLevel{Part: part, Level: level})
			}
			return nil
		},
	}
	return showing(a.app, c, apiv1.NewEventsClient, func(ctx context.Context, from apiv1.EventsClient) (*apiv1.LevelsResponse, error) {
		return from.Levels(ctx, req)
	}, printLevels)
}

func printLevels(w io.Writer, r *apiv1.LevelsResponse) error {
	rows := [][]string{{"(others)", r.GetLevel()}}
	for _, p := range r.GetParts() {
		rows = append(rows, []string{p.GetPart(), p.GetLevel()})
	}
	return printTable(w, []string{"PART", "LEVEL"}, rows)
}
