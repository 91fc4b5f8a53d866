// Package history keeps what operators change in a datastore, beside what they change: who, when, by which command, and
// each resource before and after. So a change can be looked at and undone later, also one that nobody confirmed in time.
package history

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/routerd/routerd/store"
)

const (
	// kept is how many changes are kept.
	kept = 100
	// keptSize is how many bytes of changes are kept, the newest change in any case.
	keptSize = 4 << 20
	// maxSize bounds a record in bytes: etcd takes requests of up to 1.5 MiB, and this one has the objects themselves too.
	maxSize = 512 << 10
	// promiseTime is how long a daemon may take to say that it will undo a change.
	promiseTime = 20 * time.Second
)

// MaxOps is how many operations a transaction through a [Recorder] may have: it adds up to two of its own.
const MaxOps = store.MaxOps - 2

// ErrNobody says that no daemon took it on to undo a change that nobody confirms.
var ErrNobody = errors.New("nothing is written, for no daemon took it on to undo the change if nobody confirms it")

// Author is who changes something.
type Author struct {
	User, Host, Command string
	Confirm             time.Duration // within which the change is to be confirmed; 0: it stands
}

// Recorder is a store that records what is written through it to resources. What a transaction does and its record are
// written in one step, so the store must be able to do that. It is safe for concurrent use if the store is.
type Recorder struct {
	store.Store

	by      Author
	now     func() time.Time
	names   func(string) // told the name of each change that was made
	patient time.Duration
}

// Record returns a Recorder. made, if not nil, is told the name of each change.
func Record(s store.Store, by Author, now func() time.Time, made func(name string)) *Recorder {
	return &Recorder{Store: s, by: by, now: now, names: made, patient: promiseTime}
}

// Pages implements [store.Pager].
func (r *Recorder) Pages(ctx context.Context, kind store.Kind, namespace string, page func([]store.Object) error) error {
	return store.Pages(ctx, r.Store, kind, namespace, page)
}

// recorded reports whether changes of a kind are an operator's to look at: of resources, not of what daemons keep, of
// which some is secret.
func recorded(k store.Kind) bool { return k.Plural() != "" && k != store.KindClusterInformation }

// Txn implements [store.Store].
func (r *Recorder) Txn(ctx context.Context, ops ...store.Op) ([]store.Object, error) {
	for try := range tries {
		change, bound, err := r.describe(ctx, ops)
		if err != nil {
			return nil, err
		}
		if len(change.Objects) == 0 {
			return r.Store.Txn(ctx, ops...)
		}
		out, err := r.write(ctx, change, bound, int64(try))
		c := new(store.ConflictError)
		if err == nil || !errors.As(err, &c) || len(c.Current) < len(ops) {
			return out, err
		}
		if mine := conflictOf(ops, c); mine != nil {
			return nil, mine
		}
		// Only the record was in the way: somebody else wrote one of this name, or one of the objects, which the caller
		// does not mind.
	}
	return nil, fmt.Errorf("record the change: %w: others write at the same time", store.ErrConflict)
}

// describe returns the record of what ops do, and ops bound to what they change, so that the record is true.
func (r *Recorder) describe(ctx context.Context, ops []store.Op) (*store.Change, []store.Op, error) {
	change := &store.Change{
		Time: r.now().UTC().Truncate(time.Millisecond), User: r.by.User, Host: r.by.Host, Command: r.by.Command, ConfirmSeconds: int(r.by.Confirm / time.Second),
	}
	ops = slices.Clone(ops)
	read := r.reader(ctx, ops)
	for i, op := range ops {
		switch {
		case op.Action == store.Check:
			continue
		case !recorded(op.Object.Key.Kind):
			change.Lacks = "it also writes what is no resource, such as records of IPAM"
			continue
		}
		o, unreadable, err := before(&ops[i], read)
		if err != nil {
			return nil, nil, err
		}
		if unreadable {
			change.Lacks = fmt.Sprintf("what %s was before cannot be read", op.Object.Key)
		}
		if o != nil {
			change.Objects = append(change.Objects, *o)
		}
	}
	return change, ops, limit(change)
}

// reader returns what reads the objects that ops are about: of a kind that many are of, all at once.
func (r *Recorder) reader(ctx context.Context, ops []store.Op) func(store.Key) (store.Object, error) {
	const many = 4
	count := map[store.Kind]int{}
	for _, op := range ops {
		count[op.Object.Key.Kind]++
	}
	listed := map[store.Kind]map[store.Key]store.Object{}
	return func(key store.Key) (store.Object, error) {
		if count[key.Kind] <= many {
			return r.Get(ctx, key)
		}
		all, ok := listed[key.Kind]
		if !ok {
			list, _, err := r.List(ctx, key.Kind, "")
			if err != nil && !errors.Is(err, store.ErrDecode) {
				return store.Object{}, err
			}
			all = make(map[store.Key]store.Object, len(list))
			for _, o := range list {
				all[o.Key] = o
			}
			listed[key.Kind] = all
		}
		if o, ok := all[key]; ok {
			return o, nil
		}
		return r.Get(ctx, key) // it is not there, or cannot be decoded
	}
}

// before reads what an op changes, and binds the op to what was read. It returns nil for an op that changes nothing. Of
// what cannot be read as a resource nothing is kept: it may be anything.
func before(op *store.Op, read func(store.Key) (store.Object, error)) (o *store.ChangedObject, unreadable bool, err error) {
	key := op.Object.Key
	o = &store.ChangedObject{Kind: key.Kind, Namespace: key.Namespace, Name: key.Name}
	old, err := read(key)
	unreadable = errors.Is(err, store.ErrDecode) && old.Revision != 0
	switch {
	case err == nil || unreadable:
		if !unreadable {
			o.Before = old.Raw
		}
		if op.If == store.Always() {
			op.If = store.IfRevision(old.Revision)
		}
	case errors.Is(err, store.ErrNotFound):
		if op.Action == store.Remove {
			return nil, false, nil
		}
		if op.If == store.Always() {
			op.If = store.IfAbsent()
		}
	default:
		return nil, false, err
	}
	if op.Action == store.Put {
		if o.After, err = store.Encode(key, op.Object.Value, op.Object.Raw); err != nil {
			return nil, false, err
		}
	}
	return o, unreadable, nil
}

// limit leaves the objects' content out of a record that would be too large.
func limit(c *store.Change) error {
	raw, err := store.Encode(store.ChangeKey("x"), c, nil)
	if err != nil {
		return err
	}
	if len(raw) > maxSize {
		c.Lacks = fmt.Sprintf("it is too large to be kept: %d bytes with what was there before, of at most %d", len(raw), maxSize)
	}
	if c.Lacks != "" && c.ConfirmSeconds > 0 {
		return fmt.Errorf("--confirm: the change could not be undone: %s; make it in parts, or without --confirm", c.Lacks)
	}
	if len(raw) > maxSize {
		for i := range c.Objects {
			c.Objects[i].Before, c.Objects[i].After = nil, nil
		}
	}
	return nil
}

// write does ops and writes their record, in one step.
func (r *Recorder) write(ctx context.Context, c *store.Change, ops []store.Op, try int64) ([]store.Object, error) {
	old, err := List(ctx, r.Store)
	if err != nil {
		return nil, err
	}
	n, name := len(ops), newName(c.Time, old, try)
	if c.ConfirmSeconds > 0 {
		asked, err := r.ask(ctx, name, c.ConfirmSeconds)
		if err != nil {
			return nil, err
		}
		c.State = store.ChangeUnconfirmed
		promised := asked.Value.(*store.Unconfirmed)
		ops = append(ops, store.Op{If: store.IfRevision(asked.Revision), Action: store.Put, Object: store.Object{
			Key: asked.Key, Value: &store.Unconfirmed{Time: c.Time, Seconds: promised.Seconds, By: promised.By},
		}})
	}
	out, err := r.Store.Txn(ctx, append(ops, store.Op{If: store.IfAbsent(), Action: store.Put, Object: store.Object{Key: store.ChangeKey(name), Value: c}})...)
	if err != nil {
		if c.ConfirmSeconds > 0 {
			r.withdraw(ctx, ops[n])
		}
		return nil, err
	}
	if r.names != nil {
		r.names(name)
	}
	r.prune(ctx, old)
	return out[:n], nil
}

// ask has a daemon take it on to undo a change that is about to be made. Its answer is bound to the change: if the daemon
// thinks better of it, the change is not made.
func (r *Recorder) ask(ctx context.Context, name string, seconds int) (store.Object, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, r.patient, ErrNobody)
	defer cancel()
	key := store.UnconfirmedKey(name)
	answers := r.Watch(ctx, store.KindUnconfirmed)
	put := store.Op{If: store.IfAbsent(), Action: store.Put, Object: store.Object{Key: key, Value: &store.Unconfirmed{Seconds: seconds}}}
	if _, err := r.Store.Txn(ctx, put); err != nil {
		return store.Object{}, fmt.Errorf("ask daemons to undo the change if nobody confirms it: %w", err)
	}
	for b := range answers {
		for _, ev := range b.Events {
			if u, ok := ev.Object.Value.(*store.Unconfirmed); ok && ev.Key == key && u.By != "" {
				return ev.Object, nil
			}
		}
	}
	r.withdraw(ctx, put)
	return store.Object{}, context.Cause(ctx)
}

// withdraw takes back what asked daemons for their help with a change that is not made. What it leaves they remove.
func (r *Recorder) withdraw(ctx context.Context, asked store.Op) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
	defer cancel()
	o, err := r.Get(ctx, asked.Object.Key)
	if err == nil && o.Value.(*store.Unconfirmed).Time.IsZero() {
		_, _ = r.Store.Txn(ctx, store.RemoveOp(o))
	}
}

// prune removes the oldest changes beyond what is kept, but none that waits to be confirmed. What it leaves the next one
// removes.
func (r *Recorder) prune(ctx context.Context, old []store.Object) {
	size := 0
	var ops []store.Op
	for i, o := range slices.Backward(old) {
		size += len(o.Raw)
		if (len(old)-i >= kept || size > keptSize) && o.Value.(*store.Change).State != store.ChangeUnconfirmed {
			ops = append(ops, store.Op{Action: store.Remove, Object: store.Object{Key: o.Key}})
		}
	}
	for some := range slices.Chunk(ops, store.MaxOps) {
		_, _ = r.Store.Txn(ctx, some...)
	}
}

// newName returns a name that sorts after those of all changes that are there.
func newName(t time.Time, old []store.Object, try int64) string {
	n := t.UnixMilli()
	if len(old) > 0 {
		if last, err := strconv.ParseInt(old[len(old)-1].Key.Name, 36, 64); err == nil {
			n = max(n, last+1)
		}
	}
	return fmt.Sprintf("%09s", strconv.FormatInt(n+try, 36))
}

// conflictOf returns the conflict that the caller's own ops had; nil: they had none.
func conflictOf(ops []store.Op, c *store.ConflictError) error {
	for i, op := range ops {
		now := c.Current[i].Revision
		rev, bound := op.If.Revision()
		reason := store.ErrConflict
		switch {
		case op.If.Absent() && now != 0:
			reason = store.ErrExists
		case bound && now == 0:
			reason = store.ErrNotFound
		case !bound || now == rev:
			continue
		}
		return &store.ConflictError{Key: op.Object.Key, Reason: reason, Current: c.Current[:len(ops)]}
	}
	return nil
}

// List returns the changes that are kept, oldest first.
func List(ctx context.Context, s store.Store) ([]store.Object, error) {
	list, _, err := s.List(ctx, store.KindChange, "")
	if err != nil && !errors.Is(err, store.ErrDecode) {
		return nil, fmt.Errorf("read the history: %w", err)
	}
	slices.SortFunc(list, func(a, b store.Object) int { return cmp.Compare(a.Key.Name, b.Key.Name) })
	return list, nil
}

// Confirm lets a change stand.
func Confirm(ctx context.Context, s store.Store, name string, by Author, now time.Time) error {
	o, err := get(ctx, s, name)
	if err != nil {
		return err
	}
	c := store.Clone(o.Value).(*store.Change)
	if c.State != store.ChangeUnconfirmed {
		return fmt.Errorf("confirm %s: %w: %s", name, ErrSettled, outcome(c))
	}
	settle(c, store.ChangeConfirmed, by, now)
	if _, err = s.Txn(ctx, settled(o, c)...); err != nil {
		return fmt.Errorf("confirm %s: %w", name, err)
	}
	return nil
}

func get(ctx context.Context, s store.Store, name string) (store.Object, error) {
	o, err := s.Get(ctx, store.ChangeKey(name))
	if errors.Is(err, store.ErrNotFound) {
		return o, fmt.Errorf("change %s: %w; see `routerctl history`", name, store.ErrNotFound)
	}
	if err != nil {
		return o, fmt.Errorf("change %s: %w", name, err)
	}
	return o, nil
}

// settled writes a record of which it is settled what becomes of the change.
func settled(o store.Object, c *store.Change) []store.Op {
	return []store.Op{
		{If: store.IfRevision(o.Revision), Action: store.Put, Object: store.Object{Key: o.Key, Value: c, Raw: o.Raw}},
		{Action: store.Remove, Object: store.Object{Key: store.UnconfirmedKey(o.Key.Name)}},
	}
}

func settle(c *store.Change, to store.ChangeState, by Author, now time.Time) {
	c.State, c.ByUser, c.ByHost, c.At = to, by.User, by.Host, now.UTC().Truncate(time.Millisecond)
}

// outcome says what became of a change.
func outcome(c *store.Change) string {
	if c.State == store.ChangeMade {
		return "it was not to be confirmed: it stands"
	}
	text := "it is " + string(c.State)
	if who := Who(c.ByUser, c.ByHost); who != "" {
		text += ", by " + who + " at " + c.At.Format(time.RFC3339)
	}
	return text
}

// Who names an author for people.
func Who(user, host string) string {
	return strings.Trim(user+"@"+host, "@")
}
