package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/user"
	"slices"
	"strings"
	"time"

	"github.com/rogpeppe/go-internal/diff"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/history"
	"github.com/routerd/routerd/store/manifest"
)

// maxCommand bounds the command line in a record, in bytes.
const maxCommand = 500

// author says who runs this command.
func (a *app) author() (history.Author, error) {
	host, err := os.Hostname()
	if err != nil {
		return history.Author{}, fmt.Errorf("this host's name: %w", err)
	}
	name := cmp.Or(a.getenv("SUDO_USER"), a.getenv("USER"))
	if u, err := user.Current(); name == "" && err == nil {
		name = u.Username
	}
	command := strings.Join(a.args, " ")
	if len(command) > maxCommand {
		command = strings.ToValidUTF8(command[:maxCommand], "") + "…"
	}
	return history.Author{User: name, Host: host, Command: command, Confirm: a.confirm}, nil
}

func (a *app) confirmFlag(f *pflag.FlagSet) {
	f.Var((*confirmTime)(&a.confirm), "confirm", "revert unless \"routerctl confirm\" follows within this time, e.g. 60s")
}

// confirmTime is within how long a change is to be confirmed.
type confirmTime time.Duration

// Set implements [pflag.Value].
func (c *confirmTime) Set(s string) error {
	d, err := time.ParseDuration(s)
	if err != nil || d < time.Second || d > 24*time.Hour {
		return errors.New("must be from 1s to 24h")
	}
	*c = confirmTime(d)
	return nil
}

// String implements [pflag.Value].
func (c *confirmTime) String() string {
	if *c == 0 {
		return ""
	}
	return time.Duration(*c).String()
}

// Type implements [pflag.Value].
func (c *confirmTime) Type() string { return "duration" }

// recorded returns s with a record of what is changed of resources. Kubernetes' API writes one object at a time, and has
// an audit log of its own: there is no record there.
func (a *app) recorded(s store.Store) (store.Store, error) {
	if _, ok := s.(store.Piecewise); ok {
		if a.confirm > 0 {
			return nil, fmt.Errorf("--confirm: %w", errNoHistory)
		}
		return s, nil
	}
	by, err := a.author()
	if err != nil {
		return nil, err
	}
	return history.Record(s, by, time.Now, a.toConfirm), nil
}

var errNoHistory = errors.New("the Kubernetes datastore keeps no history, because its API writes one object at a time: nothing was written, and no change can be undone; " +
	"see the API server's audit log for who changed what, and apply what was there before")

// withHistory runs f with the store itself: what it does is recorded with the change that it is about.
func (a *app) withHistory(cmd *cobra.Command, f func(context.Context, store.Store, history.Author) error) error {
	return withOpen(a.daemon, cmd, a.openStore, func(ctx context.Context, s store.Store) error {
		if _, ok := s.(store.Piecewise); ok {
			return fmt.Errorf("%s: %w", cmd.Name(), errNoHistory)
		}
		by, err := a.author()
		if err != nil {
			return err
		}
		return f(ctx, s, by)
	})
}

// toConfirm says at once how a change that was made is confirmed, if it is to be.
func (a *app) toConfirm(name string) {
	if a.confirm > 0 {
		fmt.Fprintf(a.stdout, "Written; undone in %s unless you confirm it: routerctl confirm %s\n", a.confirm, name)
	}
}

func (a historyCommands) historyCommand() *cobra.Command {
	var format string
	c := &cobra.Command{
		Use:   "history [CHANGE]",
		Short: "Show the changes made with routerctl",
		Long: `Show the last changes that routerctl made to resources, newest first: when, by whom,
with which command, and whether changes made with --confirm were confirmed or undone.
With CHANGE, show what it changed. The datastore keeps 100 changes, and at most 4 MiB
of them. Writes of daemons, calicoctl and other programs are not recorded, nor are
records of IPAM.

The user comes from the environment of routerctl (SUDO_USER, USER): it is a note, not
proof. A command that writes in several steps makes several changes. The Kubernetes
datastore has no history.`,
		Example: "  routerctl history\n  routerctl history -o yaml",
		Args:    atMostOneChange,
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkOutput(format); err != nil {
				return err
			}
			return a.withHistory(cmd, func(ctx context.Context, s store.Store, _ history.Author) error {
				list, err := history.List(ctx, s)
				if err != nil {
					return err
				}
				slices.Reverse(list)
				if len(args) > 0 {
					if list, err = oneChange(list, args[0]); err != nil {
						return err
					}
				}
				switch {
				case format != "table":
					return printChanges(a.stdout, list, format)
				case len(args) > 0:
					return showChange(a.stdout, list[0])
				}
				return listChanges(a.stdout, list)
			})
		},
	}
	outputFlag(c, &format)
	return c
}

func atMostOneChange(cmd *cobra.Command, args []string) error {
	if len(args) > 1 {
		return usagef("%s: name at most one change; see routerctl history", cmd.CommandPath())
	}
	return nil
}

func oneChange(list []store.Object, name string) ([]store.Object, error) {
	i := slices.IndexFunc(list, func(o store.Object) bool { return o.Key.Name == name })
	if i < 0 {
		return nil, fmt.Errorf("change %s: %w; see `routerctl history`", name, store.ErrNotFound)
	}
	return list[i : i+1], nil
}

// printChanges prints changes as they are stored, with their names.
func printChanges(w io.Writer, list []store.Object, format string) error {
	type named struct {
		Name string `json:"name"`
		*store.Change
	}
	out := make([]named, len(list))
	for i, o := range list {
		out[i] = named{o.Key.Name, o.Value.(*store.Change)}
	}
	raw, err := json.Marshal(out)
	if err != nil {
		return err
	}
	print := manifest.Indent
	if format == "yaml" {
		print = manifest.YAML
	}
	b, err := print(raw)
	if err != nil {
		return err
	}
	_, err = w.Write(b)
	return err
}

func listChanges(w io.Writer, list []store.Object) error {
	var rows [][]string
	for _, o := range list {
		c := o.Value.(*store.Change)
		what := make([]string, 0, len(c.Objects))
		for i := range c.Objects {
			what = append(what, c.Objects[i].Key().String())
		}
		if more := len(what) - 2; more > 0 {
			what = append(what[:2], fmt.Sprintf("and %d more", more))
		}
		rows = append(rows, []string{
			o.Key.Name, c.Time.Local().Format(time.DateTime), dash(history.Who(c.User, c.Host)), stateOf(c), strings.Join(what, ", "), dash(c.Command),
		})
	}
	return printTable(w, []string{"CHANGE", "TIME", "BY", "STATE", "RESOURCES", "COMMAND"}, rows)
}

func stateOf(c *store.Change) string {
	if c.State == store.ChangeMade {
		return "made"
	}
	return string(c.State)
}

// showChange prints what a change did, as a diff.
func showChange(w io.Writer, o store.Object) error {
	c := o.Value.(*store.Change)
	fmt.Fprintf(w, "Change %s, %s\n  by:      %s\n  at:      %s\n  command: %s\n", o.Key.Name, stateOf(c), dash(history.Who(c.User, c.Host)), c.Time.Local().Format(time.DateTime), dash(c.Command))
	if !c.At.IsZero() {
		fmt.Fprintf(w, "  %s by %s at %s\n", c.State, history.Who(c.ByUser, c.ByHost), c.At.Local().Format(time.DateTime))
	}
	if c.Reason != "" {
		fmt.Fprintf(w, "  %s\n", c.Reason)
	}
	fmt.Fprintln(w)
	for i := range c.Objects {
		of := &c.Objects[i]
		before, err := yamlOfRaw(of.Before)
		if err != nil {
			return err
		}
		after, err := yamlOfRaw(of.After)
		if err != nil {
			return err
		}
		d := diff.Diff(shortName(of.Key())+" before", before, shortName(of.Key())+" after", after)
		if d == nil {
			d = []byte(of.Key().String() + "\n")
		}
		if _, err := w.Write(d); err != nil {
			return err
		}
	}
	return nil
}

func yamlOfRaw(raw json.RawMessage) ([]byte, error) {
	if len(bytes.TrimSpace(raw)) == 0 {
		return nil, nil
	}
	return manifest.YAML(raw)
}

func (a historyCommands) confirmCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "confirm [CHANGE...]",
		Short: "Confirm a change made with --confirm",
		Long: `Confirm changes made with --confirm: the named ones, or the only pending one. The
daemons undo a change that is not confirmed in time. Any daemon that reaches the
datastore does so, even after it was killed and restarted, whatever became of the
shell in which the change was made.`,
		Example: "  routerctl apply -f pools.yaml --confirm 60s\n  routerctl confirm",
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.withHistory(cmd, func(ctx context.Context, s store.Store, by history.Author) error {
				names := args
				if len(names) == 0 {
					waiting, err := newest(ctx, s, func(c *store.Change) bool { return c.State == store.ChangeUnconfirmed })
					switch {
					case err != nil:
						return err
					case len(waiting) == 0:
						return errors.New("confirm: no change is waiting for confirmation; see `routerctl history`")
					case len(waiting) > 1:
						return fmt.Errorf("confirm: %d changes are waiting: name one: routerctl confirm %s", len(waiting), strings.Join(waiting, " "))
					}
					names = waiting
				}
				for _, n := range names {
					if err := history.Confirm(ctx, s, n, by, time.Now()); err != nil {
						return err
					}
					fmt.Fprintf(a.stdout, "Change %s stands.\n", n)
				}
				return nil
			})
		},
	}
}

// newest returns the names of the changes that f is true of, newest first.
func newest(ctx context.Context, s store.Store, f func(*store.Change) bool) ([]string, error) {
	list, err := history.List(ctx, s)
	if err != nil {
		return nil, err
	}
	var names []string
	for _, o := range slices.Backward(list) {
		if f(o.Value.(*store.Change)) {
			names = append(names, o.Key.Name)
		}
	}
	return names, nil
}

func (a historyCommands) undoCommand() *cobra.Command {
	var how history.Options
	c := &cobra.Command{
		Use:   "undo [CHANGE]",
		Short: "Undo a change made with routerctl",
		Long: `Undo a change: delete the resources that it created, recreate those that it deleted,
and restore those that it changed. Without CHANGE, undo your newest change that is not
undone. If somebody else has made a change since, name the change.

What others changed in the same resources meanwhile stays. If they changed the same
fields, or created or deleted the resource, nothing is undone, and the resource,
revision and fields are named; --force undoes the change anyway, and their changes are
lost. An undo that would leave a node without any configured BGP session, or policies
without their tier, is also refused.

A pool that the change created is disabled while nodes have blocks of it; delete it
with "routerctl delete ippool". Deleted Nodes are not restored: their daemons recreate
them.`,
		Example: "  routerctl apply -f pools.yaml\n  routerctl undo --dry-run\n  routerctl undo",
		Args:    atMostOneChange,
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.withHistory(cmd, func(ctx context.Context, s store.Store, by history.Author) error {
				if len(args) == 0 {
					name, err := mine(ctx, s, by)
					if err != nil {
						return err
					}
					args = []string{name}
				}
				if !how.Force {
					how.Check = func(ctx context.Context, ops []store.Op) error { return a.checkOps(ctx, ops) }
				}
				done, err := history.Undo(ctx, s, args[0], by, time.Now(), how)
				if err != nil {
					return err
				}
				a.reportUndone(args[0], done, how.DryRun)
				return nil
			})
		},
	}
	f := c.Flags()
	f.BoolVar(&how.Force, "force", false, "undo even what others changed since; allow nodes without any BGP session and the end of this SSH session")
	f.BoolVar(&how.DryRun, "dry-run", false, "check everything and print what would be done, but write nothing")
	return c
}

// mine returns the newest change that is not undone, if it is of the author's.
func mine(ctx context.Context, s store.Store, by history.Author) (string, error) {
	list, err := history.List(ctx, s)
	if err != nil {
		return "", err
	}
	for _, o := range slices.Backward(list) {
		c := o.Value.(*store.Change)
		switch {
		case c.State == store.ChangeUndone:
		case c.User != by.User || c.Host != by.Host:
			return "", fmt.Errorf("undo: the newest change was made by %s (%s, %s): see `routerctl history %s`, and name it to undo it: routerctl undo %s",
				history.Who(c.User, c.Host), c.Time.Local().Format(time.DateTime), c.Command, o.Key.Name, o.Key.Name)
		default:
			return o.Key.Name, nil
		}
	}
	return "", errors.New("undo: every change in the history is undone already; see `routerctl history`")
}

// checkOps refuses what would cut somebody off.
func (a historyCommands) checkOps(ctx context.Context, ops []store.Op) error {
	var changes []*apiv1.BGPChange
	for _, op := range ops {
		o := op.Object
		c := &apiv1.BGPChange{Key: o.Key.Path()}
		if op.Action == store.Put {
			raw, err := store.Encode(o.Key, o.Value, o.Raw)
			if err != nil {
				return err
			}
			c.Value = raw
		}
		changes = append(changes, c)
	}
	return a.checkChanges(ctx, changes)
}

func (a historyCommands) reportUndone(name string, done []history.Result, dryRun bool) {
	is := "is"
	if dryRun {
		is = "would be"
	}
	for _, r := range done {
		fmt.Fprintf(a.stdout, "%s %s %s\n", r.Key, is, r.Deed)
		switch r.Deed {
		case history.Disabled:
			fmt.Fprintf(a.stdout, "  nodes have blocks of it: to delete it, routerctl delete ippool %s\n", r.Key.Name)
		case history.RestoredDisabled:
			fmt.Fprintf(a.stdout, "  it was disabled before its deletion: to assign addresses from it again, routerctl pool enable %s\n", r.Key.Name)
		}
	}
	if dryRun {
		fmt.Fprintln(a.stdout, "Nothing was written (--dry-run)")
		return
	}
	fmt.Fprintf(a.stdout, "Change %s is undone.\n", name)
}
