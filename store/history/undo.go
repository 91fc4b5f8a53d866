package history

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/store"
)

// tries is how often something is planned anew because somebody else wrote meanwhile.
const tries = 5

var (
	// ErrStuck says that a change cannot be undone, whoever tries.
	ErrStuck = errors.New("cannot be undone")
	// ErrSettled says that it is not open any more what becomes of a change.
	ErrSettled = errors.New("settled")
)

// Options say how a change is undone.
type Options struct {
	Force  bool // also what others changed since
	DryRun bool // only say what would be done

	// Check, if not nil, may refuse what is about to be written.
	Check func(context.Context, []store.Op) error
}

// Deed is what became of a resource that was undone.
type Deed string

// The deeds of undoing.
const (
	Restored         Deed = "as it was before"
	RestoredDisabled Deed = "as it was before, disabled" // a pool that was deleted, for which it is disabled first
	Removed          Deed = "removed"
	Disabled         Deed = "disabled" // a pool
)

// Result is what undoing did to a resource.
type Result struct {
	Key  store.Key
	Deed Deed
}

// Undo makes the resources of a change be as they were before, in one transaction, and leaves alone what was changed in
// them since otherwise. It refuses when what the change did was itself changed since, unless it is forced. A pool that
// the change made is disabled, not deleted, while there are blocks of it.
func Undo(ctx context.Context, s store.Store, name string, by Author, now time.Time, how Options) ([]Result, error) {
	return repeat(ctx, s, name, by, now, how, func(c *store.Change) bool { return c.State != store.ChangeUndone })
}

// Expire undoes a change that nobody confirmed in time, but not one that somebody did meanwhile. When it cannot be undone
// its record says why, and nobody tries again; other errors are those of the datastore, and trying again may help.
func Expire(ctx context.Context, s store.Store, name string, by Author, now time.Time) ([]Result, error) {
	open := func(c *store.Change) bool { return c.State == store.ChangeUnconfirmed }
	done, err := repeat(ctx, s, name, by, now, Options{}, open)
	if !errors.Is(err, ErrStuck) {
		return done, err
	}
	record, getErr := get(ctx, s, name)
	if getErr != nil {
		return nil, getErr
	}
	c := store.Clone(record.Value).(*store.Change)
	if !open(c) {
		return nil, fmt.Errorf("undo %s: %w: %s", name, ErrSettled, outcome(c))
	}
	settle(c, store.ChangeStuck, by, now)
	c.Reason = err.Error()
	if _, putErr := s.Txn(ctx, settled(record, c)...); putErr != nil {
		return nil, fmt.Errorf("note that change %s cannot be undone: %w", name, putErr)
	}
	return nil, err
}

// repeat undoes a change that is open, and plans that anew when somebody else wrote meanwhile.
func repeat(ctx context.Context, s store.Store, name string, by Author, now time.Time, how Options, open func(*store.Change) bool) ([]Result, error) {
	var err error
	for range tries {
		var done []Result
		if done, err = undo(ctx, s, name, by, now, how, open); err == nil {
			return done, nil
		}
		if !errors.Is(err, store.ErrConflict) {
			break
		}
	}
	return nil, fmt.Errorf("undo %s: %w", name, err)
}

func undo(ctx context.Context, s store.Store, name string, by Author, now time.Time, how Options, open func(*store.Change) bool) ([]Result, error) {
	record, err := get(ctx, s, name)
	if err != nil {
		return nil, err
	}
	c := store.Clone(record.Value).(*store.Change)
	switch {
	case !open(c):
		return nil, fmt.Errorf("%w: %s", ErrSettled, outcome(c))
	case c.Lacks != "":
		return nil, fmt.Errorf("%w: %s", ErrStuck, c.Lacks)
	}
	var ops []store.Op
	var done []Result
	var errs []error
	for i := len(c.Objects) - 1; i >= 0; i-- { // what was made last may need what was made first
		o := &c.Objects[i]
		op, deed, err := undoOne(ctx, s, o, how.Force)
		switch {
		case err != nil:
			errs = append(errs, fmt.Errorf("%s: %w", o.Key(), err))
		case deed != "":
			done = append(done, Result{o.Key(), deed})
		}
		if op != nil {
			ops = append(ops, *op)
		}
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	if err := checkBeside(ctx, s, ops); err != nil {
		return nil, err
	}
	if how.Check != nil {
		if err := how.Check(ctx, ops); err != nil {
			return nil, err
		}
	}
	if how.DryRun {
		return done, nil
	}
	settle(c, store.ChangeUndone, by, now)
	for _, r := range done {
		if r.Deed == Disabled {
			c.Reason = fmt.Sprintf("%s is disabled: nodes have blocks of it; `routerctl delete ippool %s` deletes it", r.Key, r.Key.Name)
		}
	}
	_, err = s.Txn(ctx, append(ops, settled(record, c)...)...)
	return done, err
}

// changedSince says that somebody else wrote an object, and what a force would do.
func changedSince(now store.Object, what string) error {
	return fmt.Errorf("%w: %s, at revision %d; with --force it is undone all the same", ErrStuck, what, now.Revision)
}

// undoOne plans what undoes the change of one resource. No op and no deed: somebody has undone it.
func undoOne(ctx context.Context, s store.Store, o *store.ChangedObject, force bool) (*store.Op, Deed, error) {
	key := o.Key()
	now, err := s.Get(ctx, key)
	exists := !errors.Is(err, store.ErrNotFound)
	if errors.Is(err, store.ErrDecode) && now.Revision != 0 {
		return nil, "", fmt.Errorf("%w: what is there now, at revision %d, cannot be read: delete it first", ErrStuck, now.Revision)
	}
	if err != nil && exists {
		return nil, "", err
	}
	when := store.IfAbsent()
	if exists {
		when = store.IfRevision(now.Revision)
	}
	switch {
	case o.After == nil && (key.Kind == store.KindNode || key.Kind == store.KindWorkloadEndpoint):
		return nil, "", fmt.Errorf("%w: a deleted %s does not come back by its record: its daemon makes it", ErrStuck, key.Kind)
	case o.After == nil && exists && !force:
		return nil, "", changedSince(now, "it was deleted by the change, and made anew since")
	case o.After == nil:
		op, deed, err := restore(key, when, o.Before)
		if op != nil {
			if pool, ok := op.Object.Value.(*v3.IPPool); ok && pool.Spec.Disabled {
				deed = RestoredDisabled
			}
		}
		return op, deed, err
	case !exists && o.Before == nil:
		return nil, "", nil
	case !exists && !force:
		return nil, "", fmt.Errorf("%w: it was deleted since; with --force it is made again", ErrStuck)
	case !exists:
		return restore(key, when, o.Before)
	}
	raw, changed := revert(o.Before, o.After, now.Raw, force)
	switch {
	case len(changed) > 0 && o.Before == nil:
		return nil, "", changedSince(now, "the change made it, and "+strings.Join(changed, ", ")+" was changed since")
	case len(changed) > 0:
		return nil, "", changedSince(now, strings.Join(changed, ", ")+" was changed since")
	case o.Before == nil:
		return remove(ctx, s, now)
	}
	return restore(key, when, raw)
}

func restore(key store.Key, when store.Cond, raw []byte) (*store.Op, Deed, error) {
	value, err := store.Decode(key, raw)
	if err == nil {
		err = store.Validate(value)
	}
	if err != nil {
		return nil, "", fmt.Errorf("%w: what was there before, with what was changed since: %w", ErrStuck, err)
	}
	return &store.Op{If: when, Action: store.Put, Object: store.Object{Key: key, Value: value, Raw: raw}}, Restored, nil
}

// remove plans the removal of a resource that the change made. A block that a node takes at this very moment stays behind,
// as with calicoctl.
func remove(ctx context.Context, s store.Store, now store.Object) (*store.Op, Deed, error) {
	op := store.RemoveOp(now)
	pool, ok := now.Value.(*v3.IPPool)
	if !ok {
		return &op, Removed, nil
	}
	used, err := inUse(ctx, s, pool)
	if err != nil {
		return nil, "", err
	}
	if !used {
		return &op, Removed, nil
	}
	if pool.Spec.Disabled {
		return nil, Disabled, nil
	}
	pool = store.Clone(pool).(*v3.IPPool)
	pool.Spec.Disabled = true
	return &store.Op{If: store.IfRevision(now.Revision), Action: store.Put, Object: store.Object{Key: now.Key, Value: pool, Raw: now.Raw}}, Disabled, nil
}

// inUse reports whether there are blocks of a pool.
func inUse(ctx context.Context, s store.Store, pool *v3.IPPool) (bool, error) {
	blocks, _, err := s.List(ctx, store.KindIPAMBlock, "")
	if err != nil && !errors.Is(err, store.ErrDecode) {
		return false, err
	}
	cidr, err := netip.ParsePrefix(pool.Spec.CIDR)
	if err != nil {
		return false, fmt.Errorf("spec.cidr: %w", err)
	}
	return slices.ContainsFunc(blocks, func(o store.Object) bool { return cidr.Overlaps(o.Key.CIDR()) }), nil
}

// dependents returns the kinds that may need an object of a kind to be there.
func dependents(k store.Kind) []store.Kind {
	switch k {
	case store.KindTier:
		return []store.Kind{store.KindNetworkPolicy, store.KindGlobalNetworkPolicy, store.KindStagedNetworkPolicy, store.KindStagedGlobalNetworkPolicy}
	case store.KindBGPFilter:
		return []store.Kind{store.KindBGPPeer}
	}
	return nil
}

// checkBeside checks what ops write beside what else is there, and what is there that needs what they remove.
func checkBeside(ctx context.Context, s store.Store, ops []store.Op) error {
	kinds, needing := map[store.Kind]bool{}, map[store.Kind]bool{}
	touched := map[store.Key]bool{}
	for _, op := range ops {
		k := op.Object.Key.Kind
		touched[op.Object.Key] = true
		if op.Action == store.Remove {
			for _, d := range dependents(k) {
				kinds[d], needing[d] = true, true
			}
		}
		kinds[k] = true
		for _, r := range store.RelatedKinds(k) {
			kinds[r] = true
		}
	}
	var then []store.Object // what will be there
	for _, k := range slices.Sorted(maps.Keys(kinds)) {
		list, _, err := s.List(ctx, k, "")
		if err != nil && !errors.Is(err, store.ErrDecode) {
			return err
		}
		then = append(then, slices.DeleteFunc(list, func(o store.Object) bool { return touched[o.Key] })...)
	}
	others := len(then)
	for _, op := range ops {
		if op.Action == store.Put {
			then = append(then, op.Object)
		}
	}
	var errs []error
	for i, o := range then {
		if i < others && !needing[o.Key.Kind] {
			continue
		}
		beside := slices.Delete(slices.Clone(then), i, i+1)
		if err := store.ValidateAgainst(o.Value, beside); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w: beside what would be there then: %w", o.Key, ErrStuck, err))
		}
	}
	return errors.Join(errs...)
}
