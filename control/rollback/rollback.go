// Package rollback undoes what an operator changed with a time to confirm it in, and did not confirm: also when the
// operator's own way to the cluster is what the change cut off.
package rollback

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/history"
)

const (
	// promiseSpread and undoSpread are over how long the hosts of a cluster begin to do something: the first does it, and
	// the others see that in time.
	promiseSpread = 200 * time.Millisecond
	undoSpread    = 2 * time.Second
	// abandoned is after how long what was asked for and never made is forgotten.
	abandoned = time.Minute
	// again is after how long something is tried once more that the datastore did not let be done.
	again = 5 * time.Second
	// callTime bounds what the datastore is asked for at once.
	callTime = 10 * time.Second
)

// Keeper follows changes that are to be confirmed. Every host has one, and each tries, so that it does not matter which of
// them still reach the datastore.
type Keeper struct {
	Node  string
	Store store.Store // does a transaction in one step
	Log   *slog.Logger
	// Chance returns a number from 0 to 1; nil: a random one.
	Chance func() float64
}

// task is what is to be done about a change, and when.
type task struct {
	at  time.Time
	do  func(ctx context.Context, name string, o store.Object) error
	obj store.Object
}

// Run undoes changes until ctx ends. It follows the datastore by a watch of its own: hosts whose role does not let them
// read these keys must not lose sight of anything else.
func (k Keeper) Run(ctx context.Context) error {
	if k.Chance == nil {
		k.Chance = rand.Float64
	}
	tasks := map[string]task{}
	batches := k.Store.Watch(ctx, store.KindUnconfirmed)
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case b, ok := <-batches:
			if !ok {
				return ctx.Err()
			}
			for _, ev := range b.Events {
				if u, ok := ev.Object.Value.(*store.Unconfirmed); ok {
					tasks[ev.Key.Name] = k.taskFor(ev.Object, u, time.Now(), b.Synced)
				} else {
					delete(tasks, ev.Key.Name)
				}
			}
		case <-timer.C:
			k.work(ctx, tasks)
		}
		timer.Reset(wait(tasks, time.Now()))
	}
}

// taskFor says what is to be done about a change. earlier says that it may have been made long ago.
func (k Keeper) taskFor(o store.Object, u *store.Unconfirmed, now time.Time, earlier bool) task {
	soon := func(d time.Duration) time.Time { return now.Add(time.Duration(k.Chance() * float64(d))) }
	switch {
	case !u.Time.IsZero():
		return task{soon(undoSpread).Add(left(u, now, earlier)), k.undo, o}
	case u.By == "":
		return task{soon(promiseSpread), k.promise, o}
	}
	return task{now.Add(abandoned), k.forget, o}
}

// left returns how long a change may still be confirmed. Of one that was made before this daemon looked only the clocks of
// the two hosts say how old it is; of others it is as old as the notice of it.
func left(u *store.Unconfirmed, now time.Time, earlier bool) time.Duration {
	within := time.Duration(u.Seconds) * time.Second
	if !earlier {
		return within
	}
	return min(max(u.Time.Add(within).Sub(now), 0), within)
}

// wait returns how long nothing is to be done.
func wait(tasks map[string]task, now time.Time) time.Duration {
	d := time.Hour
	for _, t := range tasks {
		d = min(d, max(t.at.Sub(now), 0))
	}
	return d
}

// work does what is due: of several changes the newest first, for it may rest on the others.
func (k Keeper) work(ctx context.Context, tasks map[string]task) {
	now := time.Now()
	for _, name := range slices.SortedFunc(maps.Keys(tasks), func(a, b string) int { return cmp.Compare(b, a) }) {
		t := tasks[name]
		if t.at.After(now) {
			continue
		}
		call, cancel := context.WithTimeout(ctx, callTime)
		err := t.do(call, name, t.obj)
		cancel()
		delete(tasks, name)
		if err != nil && ctx.Err() == nil {
			t.at = time.Now().Add(again)
			tasks[name] = t
		}
	}
}

// promise says that this daemon undoes a change if nobody confirms it. Only then is it made.
func (k Keeper) promise(ctx context.Context, name string, o store.Object) error {
	u := store.Clone(o.Value).(*store.Unconfirmed)
	u.By = k.Node
	_, err := k.Store.Txn(ctx, store.Op{If: store.IfRevision(o.Revision), Action: store.Put, Object: store.Object{Key: o.Key, Value: u, Raw: o.Raw}})
	if errors.Is(err, store.ErrConflict) {
		return nil // another host was first, or nobody asks any more
	}
	if err != nil {
		k.Log.Info("this host does not take it on to undo a change that nobody confirms", "change", name, "error", err)
	}
	return err
}

// forget removes what was asked for before a change that was not made.
func (k Keeper) forget(ctx context.Context, name string, o store.Object) error {
	_, err := k.Store.Txn(ctx, store.RemoveOp(o))
	if errors.Is(err, store.ErrConflict) {
		return nil
	}
	if err == nil {
		k.Log.Info("there is no change any more that was to be confirmed", "change", name)
	}
	return err
}

func (k Keeper) undo(ctx context.Context, name string, o store.Object) error {
	done, err := history.Expire(ctx, k.Store, name, history.Author{User: "routerd", Host: k.Node}, time.Now())
	switch {
	case err == nil:
		k.Log.Warn("a change was not confirmed in time, and is undone", "change", name, "resources", describe(done))
		return nil
	case errors.Is(err, history.ErrSettled):
		return nil // another host was first, or the operator
	case errors.Is(err, store.ErrNotFound):
		return k.forget(ctx, name, o) // somebody deleted the record
	case errors.Is(err, history.ErrStuck):
		k.Log.Error("a change was not confirmed in time, and cannot be undone", "change", name, "error", err)
		return nil
	}
	k.Log.Warn("a change was not confirmed in time; undoing it is tried again", "change", name, "error", err)
	return err
}

func describe(done []history.Result) string {
	out := make([]string, len(done))
	for i, r := range done {
		out[i] = r.Key.String() + " " + string(r.Deed)
	}
	return strings.Join(out, ", ")
}
