// Package backend is what the implementations of [store.Store] have in common:
// the reading and answering of transactions, and the feed of a watch.
package backend

import (
	"errors"
	"fmt"

	"github.com/routerd/routerd/store"
)

// CallError is an error of a call to the datastore in words for people; what it
// came from is still there for [errors.Is].
type CallError struct {
	Kind    error // a sentinel of package store
	Message string
	Cause   error
}

func (e *CallError) Error() string { return fmt.Sprintf("%v: %s", e.Kind, e.Message) }

// Unwrap returns the kind and the cause.
func (e *CallError) Unwrap() []error { return []error{e.Kind, e.Cause} }

// Step is an op made ready for a datastore of paths and bytes.
type Step struct {
	Op   store.Op
	Path string
	Raw  []byte // what a Put writes
}

// Prepare checks the ops of a transaction and encodes what they write. The
// error matches [store.ErrInvalid] or [store.ErrDecode].
func Prepare(ops []store.Op) ([]Step, error) {
	switch {
	case len(ops) == 0:
		return nil, fmt.Errorf("transaction: %w: no operations", store.ErrInvalid)
	case len(ops) > store.MaxOps:
		return nil, fmt.Errorf("transaction: %w: %d operations, at most %d are possible", store.ErrInvalid, len(ops), store.MaxOps)
	}
	steps := make([]Step, len(ops))
	seen := make(map[store.Key]bool, len(ops))
	for i, op := range ops {
		key := op.Object.Key
		path := key.Path()
		if path == "" {
			return nil, fmt.Errorf("transaction: %w: %s is no key", store.ErrInvalid, key)
		}
		if seen[key] {
			return nil, fmt.Errorf("transaction: %w: two operations on %s", store.ErrInvalid, key)
		}
		seen[key] = true
		if rev, ok := op.If.Revision(); ok && rev <= 0 {
			return nil, fmt.Errorf("transaction: %w: %s: condition on revision %d: want a revision that was read", store.ErrInvalid, key, rev)
		}
		steps[i] = Step{Op: op, Path: path}
		if op.Action != store.Put {
			continue
		}
		raw, err := store.Encode(key, op.Object.Value, op.Object.Raw)
		if err != nil {
			return nil, err
		}
		steps[i].Raw = raw
	}
	return steps, nil
}

// Written returns the answer of a transaction that took place at rev.
func Written(steps []Step, rev store.Revision) ([]store.Object, error) {
	objs := make([]store.Object, len(steps))
	for i, s := range steps {
		key := s.Op.Object.Key
		if s.Op.Action != store.Put {
			objs[i] = store.Object{Key: key}
			continue
		}
		obj, err := Object(key, rev, s.Raw)
		if err != nil {
			return nil, err
		}
		objs[i] = obj
	}
	return objs, nil
}

// Object decodes what is stored under key. With an error, which matches
// [store.ErrDecode], the object still has all but its Value.
func Object(key store.Key, rev store.Revision, raw []byte) (store.Object, error) {
	obj := store.Object{Key: key, Revision: rev, Raw: raw}
	v, err := store.Decode(key, raw)
	if err != nil {
		return obj, err
	}
	obj.Value = v
	return obj, nil
}

// Event returns the event that key was written.
func Event(key store.Key, rev store.Revision, raw []byte) store.Event {
	obj, err := Object(key, rev, raw)
	return store.Event{Key: key, Object: obj, Err: err}
}

// Deletion returns the event that key was deleted at rev.
func Deletion(key store.Key, rev store.Revision) store.Event {
	return store.Event{Key: key, Object: store.Object{Key: key, Revision: rev}}
}

// Stored is what a datastore holds under a path; it holds nothing when
// Revision is zero.
type Stored struct {
	Revision store.Revision
	Raw      []byte
}

// Conflict judges the conditions of steps against what is there. It returns
// nil when all hold.
func Conflict(steps []Step, present []Stored) error {
	var conflict *store.ConflictError
	for i, s := range steps {
		reason := failure(s.Op.If, present[i].Revision)
		if reason == nil {
			continue
		}
		conflict = &store.ConflictError{Key: s.Op.Object.Key, Reason: reason}
		break
	}
	if conflict == nil {
		return nil
	}
	for i, s := range steps {
		key, p := s.Op.Object.Key, present[i]
		if p.Revision == 0 {
			conflict.Current = append(conflict.Current, store.Object{Key: key})
			continue
		}
		// One that cannot be decoded goes without its Value: the conflict is
		// what the caller has to know first.
		obj, _ := Object(key, p.Revision, p.Raw)
		conflict.Current = append(conflict.Current, obj)
	}
	return conflict
}

func failure(c store.Cond, have store.Revision) error {
	rev, byRevision := c.Revision()
	switch {
	case c.Absent() && have != 0:
		return store.ErrExists
	case byRevision && have == 0:
		return store.ErrNotFound
	case byRevision && have != rev:
		return store.ErrConflict
	}
	return nil
}

// DecodeErrors gathers the errors of a list's objects. The result matches
// [store.ErrDecode], or is nil.
type DecodeErrors []error

// Err returns the gathered errors as one.
func (d DecodeErrors) Err() error { return errors.Join(d...) }
