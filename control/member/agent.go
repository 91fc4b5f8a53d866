package member

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"time"

	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/store"
)

// Orders is the datastore, as far as it has orders to hosts.
type Orders interface {
	Read(ctx context.Context, node string) (record []byte, rev int64, err error)
	Change(ctx context.Context, node string, rev int64, record []byte) error
	Follow(ctx context.Context, yield func(revisions map[string]int64))
}

// Host is what an [Agent] works on.
type Host interface {
	// Facts says what is the case; wanted is what an order has the host become.
	Facts(ctx context.Context, wanted Role) Facts
	// Do takes a step. order is the one in force; nil: there is none.
	Do(ctx context.Context, a Action, order *Order) error
	// Settled is called while there is nothing to do.
	Settled(ctx context.Context)
}

// Fatal is an error of [Host.Do] after which the daemon is to start anew.
type Fatal struct{ Err error }

func (f *Fatal) Error() string { return f.Err.Error() }

// Unwrap returns the cause.
func (f *Fatal) Unwrap() error { return f.Err }

// Config says what an [Agent] works with.
type Config struct {
	Node   string
	Orders Orders
	Host   Host
	// Verify checks a member's signature.
	Verify func(digest, signature []byte) bool
	// Changed is set when something happened to the server.
	Changed async.Signal
	Log     *slog.Logger
}

// lookEvery is how often a host looks at itself without a reason.
const lookEvery = 10 * time.Second

// Agent has a host be what it is to be.
type Agent struct {
	c       Config
	ordered async.Signal

	order    *Order
	revision int64
	unread   bool   // the last try to read it failed
	refused  string // what was said of an order that does not hold
}

// New makes an agent.
func New(c Config) *Agent { return &Agent{c: c, ordered: async.NewSignal()} }

// Run works until ctx ends, or a step is [Fatal].
func (a *Agent) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	following := make(chan struct{})
	go func() {
		defer close(following)
		last := int64(0)
		a.c.Orders.Follow(ctx, func(revisions map[string]int64) {
			if rev := revisions[a.c.Node]; rev != last {
				last = rev
				a.ordered.Set()
			}
		})
	}()
	defer func() { cancel(); <-following }()
	pause := async.Backoff{Min: 100 * time.Millisecond, Max: 2 * time.Second}
	for ctx.Err() == nil {
		busy, err := a.step(ctx)
		var fatal *Fatal
		switch {
		case errors.As(err, &fatal):
			return err
		case err == nil && busy:
			pause.Reset()
			continue
		}
		wait := lookEvery
		if err != nil || busy || a.unread {
			wait = pause.Next()
		}
		a.wait(ctx, wait)
	}
	return ctx.Err()
}

// wait waits until it is time for the next step, or something has happened. That this
// host has written to its order is nothing.
func (a *Agent) wait(ctx context.Context, wait time.Duration) {
	timer := time.NewTimer(wait)
	defer timer.Stop()
	for {
		select {
		case <-a.ordered:
			before := a.revision
			if a.read(ctx); a.revision == before && !a.unread {
				continue
			}
		case <-a.c.Changed:
		case <-timer.C:
			a.read(ctx)
		case <-ctx.Done():
		}
		return
	}
}

// read looks for the order to this host.
func (a *Agent) read(ctx context.Context) {
	b, rev, err := a.c.Orders.Read(ctx, a.c.Node)
	if a.unread = err != nil; a.unread {
		return
	}
	a.order, a.revision = nil, rev
	if b == nil {
		return
	}
	var o Order
	if err = json.Unmarshal(b, &o); err == nil {
		err = o.Check(a.c.Node, time.Now(), a.c.Verify)
	}
	if err != nil {
		if a.refused != err.Error() {
			a.refused = err.Error()
			a.c.Log.Warn("an order about this host's membership of the datastore does not hold", "error", err)
		}
		return
	}
	a.order = &o
}

// step takes the next step, if there is one.
func (a *Agent) step(ctx context.Context) (busy bool, err error) {
	wanted := Role("")
	if a.order != nil && !a.order.Done {
		wanted = a.order.Wanted
	}
	f := a.c.Host.Facts(ctx, wanted)
	act := Next(f)
	switch {
	case act != Nothing:
	case wanted == "":
		a.c.Host.Settled(ctx)
		return false, nil
	case is(f, wanted):
		if err := a.say(ctx, "", nil, true); err != nil {
			return true, err
		}
		a.c.Log.Info("this host is what an order had it become", "role", wanted)
		return false, nil
	default:
		err := errors.New("the datastore does not answer")
		_ = a.say(ctx, "", err, false) // to the same datastore
		return true, err
	}
	if a.order == nil || a.order.Step != string(act) { // not the same again
		// The report is not the step itself, which goes on without it.
		_ = a.say(ctx, act, nil, false)
	}
	a.c.Log.Debug("membership of the datastore", "step", act)
	err = a.c.Host.Do(ctx, act, a.order)
	switch {
	case ctx.Err() != nil:
	case err == nil:
		a.c.Log.Info("membership of the datastore", "done", act)
	default:
		_ = a.say(ctx, act, err, false)
		a.c.Log.Debug("membership of the datastore; will try again", "step", act, "error", err)
	}
	return true, err
}

// is reports whether a host is what it was to become.
func is(f Facts, wanted Role) bool {
	if wanted == Client {
		return f.Role == Client || f.Role == ""
	}
	return f.Role == Voter && f.Running
}

// say reports to who gave the order.
func (a *Agent) say(ctx context.Context, act Action, problem error, done bool) error {
	if a.order == nil {
		return nil
	}
	o := *a.order
	o.Done, o.Problem = done, ""
	if act != Nothing {
		o.Step = string(act)
	}
	if problem != nil {
		o.Problem = problem.Error()
	}
	if o.Step == a.order.Step && o.Problem == a.order.Problem && o.Done == a.order.Done {
		return nil
	}
	b, err := json.Marshal(o)
	if err == nil {
		err = a.c.Orders.Change(ctx, a.c.Node, a.revision, b)
	}
	if err != nil && !errors.Is(err, store.ErrConflict) {
		return err
	}
	a.read(ctx) // writing has changed its revision, and others may have written too
	return nil
}
