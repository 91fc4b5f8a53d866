package kube

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/internal/backend"
	"github.com/routerd/routerd/store/kube/convert"
)

// writeTries bounds an unconditional write, which is a read and a conditional
// one.
const writeTries = 100

// condError says that the condition of an op does not hold.
type condError struct{ reason error }

func (e *condError) Error() string { return e.reason.Error() }

// step is an op of a transaction, and where its object is.
type step struct {
	backend.Step
	place place
	none  bool // the datastore has no place for it
	dry   bool // nothing is to be written
}

// decoded returns what a step is to write.
func decoded[T any](st step) (out T, err error) {
	v, err := store.Decode(st.place.key, st.Raw)
	if err != nil {
		return out, err
	}
	out, ok := v.(T)
	if !ok {
		return out, fmt.Errorf("%w: a %T, where %s wants a %T", store.ErrInvalid, v, st.place.key, out)
	}
	return out, nil
}

// Try implements [store.Piecewise]: the server judges, with all that admits objects
// there.
func (s *Store) Try(ctx context.Context, ops ...store.Op) error {
	prepared, err := backend.Prepare(ops)
	if err != nil {
		return err
	}
	for i := range prepared {
		steps, err := s.plan(ctx, prepared[i:i+1])
		if err != nil {
			return err
		}
		if steps[0].none {
			continue
		}
		steps[0].dry = true
		if steps[0].Op.Action == store.Check {
			err = s.check(ctx, steps[0])
		} else {
			_, err = s.do(ctx, steps[0])
		}
		if err != nil {
			return s.failed(ctx, steps, 0, err)
		}
	}
	return nil
}

// Txn implements [store.Store], in parts.
func (s *Store) Txn(ctx context.Context, ops ...store.Op) ([]store.Object, error) {
	prepared, err := backend.Prepare(ops)
	if err != nil {
		return nil, err
	}
	steps, err := s.plan(ctx, prepared)
	if err != nil {
		return nil, err
	}
	out := make([]store.Object, len(prepared))
	for i, st := range prepared {
		out[i].Key = st.Op.Object.Key
	}
	for i, st := range steps {
		if st.Op.Action != store.Check {
			continue
		}
		if err := s.check(ctx, st); err != nil {
			return nil, s.failed(ctx, steps, i, err)
		}
	}
	for _, role := range []store.Role{store.Prepares, store.Decides, store.Follows} {
		for i, st := range steps {
			if st.none || st.Op.Role != role || st.Op.Action == store.Check {
				continue
			}
			obj, err := s.do(ctx, st)
			if role == store.Follows && err != nil {
				// The decision is taken; whoever meets the object next makes this good.
				s.log.Debug("an object was left behind a transaction", "object", st.Op.Object.Key.String(), "error", err)
				continue
			}
			if err != nil {
				return nil, s.failed(ctx, steps, i, err)
			}
			obj.Key = st.Op.Object.Key
			out[i] = obj
		}
	}
	return out, nil
}

// plan says where the objects of a transaction are, and refuses one that would
// have to be written in one step. Endpoints stand for themselves: a pod says no more
// than that it is there. What only prepares or follows and has no place here is left
// out.
func (s *Store) plan(ctx context.Context, prepared []backend.Step) ([]step, error) {
	steps := make([]step, len(prepared))
	decides := store.Key{}
	for i, st := range prepared {
		key := st.Op.Object.Key
		p, err := s.placeOf(ctx, key)
		if errors.Is(err, errNoPlace) && st.Op.Action != store.Check && st.Op.Role != store.Decides {
			steps[i] = step{Step: st, none: true}
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("write %s: %w", key, err)
		}
		if st.Op.Action != store.Check && st.Op.Role == store.Decides && !p.Pod() {
			if decides.Kind != "" {
				return nil, fmt.Errorf("transaction: %w: %s and %s are to be written in one step, and %w", store.ErrInvalid, decides, key, store.ErrOneByOne)
			}
			decides = key
		}
		steps[i] = step{Step: st, place: p}
	}
	return steps, nil
}

// failed returns the error of a transaction whose op i failed: for a condition
// with what is there now.
func (s *Store) failed(ctx context.Context, steps []step, i int, err error) error {
	key := steps[i].Op.Object.Key
	var cond *condError
	if !errors.As(err, &cond) {
		return fmt.Errorf("write %s: %w", key, s.explain(ctx, err))
	}
	conflict := &store.ConflictError{Key: key, Reason: cond.reason}
	for _, st := range steps {
		key := st.Op.Object.Key
		if st.none {
			conflict.Current = append(conflict.Current, store.Object{Key: key})
			continue
		}
		obj, err := s.get(ctx, key)
		if err != nil && !errors.Is(err, store.ErrNotFound) && !errors.Is(err, store.ErrDecode) {
			return fmt.Errorf("write %s: %w", key, err)
		}
		obj.Key = key
		conflict.Current = append(conflict.Current, obj)
	}
	return conflict
}

// check looks whether the condition of an op holds.
func (s *Store) check(ctx context.Context, st step) error {
	_, err := s.present(ctx, &st.place, st.Op.If)
	return err
}

// present reads the object at a place, of Revision 0 if it is not there, and
// looks whether a condition holds.
func (s *Store) present(ctx context.Context, p *place, cond store.Cond) (convert.Object, error) {
	o, err := s.read(ctx, p)
	switch {
	case isCode(err, http.StatusNotFound), errors.Is(err, convert.ErrNotOurs):
		o = convert.Object{}
	case err != nil && !errors.Is(err, store.ErrDecode):
		return o, err
	case o.Marked:
		if err := s.destroy(ctx, *p, o.Revision, string(o.UID)); err != nil && !isCode(err, http.StatusNotFound) && !isCode(err, http.StatusConflict) {
			return o, err
		}
		o = convert.Object{}
	}
	rev, byRevision := cond.Revision()
	switch {
	case cond.Absent() && o.Revision != 0:
		return o, &condError{store.ErrExists}
	case byRevision && o.Revision == 0:
		return o, &condError{store.ErrNotFound}
	case byRevision && o.Revision != rev:
		return o, &condError{store.ErrConflict}
	}
	return o, nil
}

// do carries out one op. The error is a [condError], or the API's.
func (s *Store) do(ctx context.Context, st step) (store.Object, error) {
	if st.place.Pod() {
		return s.doPod(ctx, st)
	}
	rev, byRevision := st.Op.If.Revision()
	for try := 1; ; try++ {
		if !byRevision && (st.Op.Action == store.Put || !st.place.Custom() || st.place.Record()) {
			o, err := s.present(ctx, &st.place, st.Op.If)
			if err != nil {
				return store.Object{}, err
			}
			rev = o.Revision
		}
		obj, err := s.doAt(ctx, st, rev)
		var cond *condError
		if !errors.As(err, &cond) || byRevision || st.Op.If.Absent() && errors.Is(cond.reason, store.ErrExists) || try == writeTries {
			return obj, err
		}
		// Somebody wrote it between the read and the write, which asks for no
		// revision: what is there now counts.
	}
}

// doAt carries out an op on an object that is at a revision, 0: not there.
func (s *Store) doAt(ctx context.Context, st step, rev store.Revision) (store.Object, error) {
	if st.Op.Action == store.Remove {
		if st.dry {
			return store.Object{}, s.tryRemove(st.place)
		}
		return store.Object{}, s.remove(ctx, &st.place, rev, st.Op.If == store.Always())
	}
	if st.place.Kind == store.KindNode {
		return s.patchNode(ctx, st, rev)
	}
	if st.place.Kind == store.KindIPAMHandle && rev == 0 && s.node != "" {
		made, err := convert.MadeBy(st.Raw, s.node)
		if err != nil {
			return store.Object{}, fmt.Errorf("%w: %w", store.ErrInvalid, err)
		}
		st.Raw = made
	}
	body, err := st.place.Write(st.place.key, st.place.name, rev, st.Raw)
	if err != nil {
		return store.Object{}, err
	}
	r := request{method: http.MethodPut, path: st.place.path(), contentType: jsonType, body: body}
	if rev == 0 {
		r.method, r.path = http.MethodPost, st.place.collection()
	}
	apart := st.Op.Status && rev != 0 && st.place.Resource.Status
	if apart {
		r.path += "/status"
	}
	raw, err := s.write(ctx, st.dry, r)
	if apart && isCode(err, http.StatusNotFound) {
		// A definition of before Calico kept the status apart has no place for it.
		r.path = st.place.path()
		raw, err = s.write(ctx, st.dry, r)
	}
	if older, ok := st.place.OlderName(st.place.key); ok && rev != 0 && isCode(err, http.StatusNotFound) && older != st.place.name {
		st.place.name = older
		return s.doAt(ctx, st, rev)
	}
	if err != nil {
		return store.Object{}, condition(err, rev)
	}
	return s.answer(st, raw)
}

// answer returns the object that the API says it has now; where nothing was to be written,
// none: one that would have been made has no revision.
func (s *Store) answer(st step, raw []byte) (store.Object, error) {
	if st.dry {
		return store.Object{}, nil
	}
	o, err := st.place.Read(raw)
	if err != nil {
		return store.Object{}, err
	}
	return backend.Object(o.Key, o.Revision, o.Raw)
}

// condition turns the API's answer to a conditional write into a [condError].
func condition(err error, rev store.Revision) error {
	var st *statusError
	if !errors.As(err, &st) {
		return err
	}
	switch {
	case st.code == http.StatusConflict && rev == 0:
		return &condError{store.ErrExists}
	case st.code == http.StatusConflict:
		return &condError{store.ErrConflict}
	case st.code == http.StatusNotFound && rev == 0:
		// Not the object is missing, but what it would be in.
		return &backend.CallError{Kind: store.ErrInvalid, Message: st.message, Cause: err}
	case st.code == http.StatusNotFound:
		return &condError{store.ErrNotFound}
	}
	return err
}

// patchNode writes a resource to the annotations of the Node that it stands for.
func (s *Store) patchNode(ctx context.Context, st step, rev store.Revision) (store.Object, error) {
	if rev == 0 {
		return store.Object{}, fmt.Errorf("%w: there is no Node %s: its kubelet makes it", store.ErrInvalid, st.place.name)
	}
	n, err := decoded[*store.Node](st)
	if err != nil {
		return store.Object{}, err
	}
	patch, err := convert.NodePatch(n, rev)
	if err != nil {
		return store.Object{}, err
	}
	raw, err := s.patchStatus(ctx, st.dry, st.place.path(), patchType, patch)
	if err != nil {
		return store.Object{}, condition(err, rev)
	}
	return s.answer(st, raw)
}

// tryRemove says whether an object can be deleted here at all.
func (s *Store) tryRemove(p place) error {
	if !p.Custom() {
		return fmt.Errorf("%w: %s", store.ErrInvalid, p.ReadOnly(p.key))
	}
	return nil
}

// remove deletes the object at a place that is at a revision, in two steps where
// Calico's programs follow it. With rev 0 there is nothing to be deleted, or, with
// always, whatever is there.
func (s *Store) remove(ctx context.Context, p *place, rev store.Revision, always bool) error {
	if !p.Custom() {
		if rev == 0 {
			return nil
		}
		return fmt.Errorf("%w: %s", store.ErrInvalid, p.ReadOnly(p.key))
	}
	spec, two := p.Mark()
	if rev == 0 && (p.Record() || !always) {
		return nil
	}
	uid := ""
	if two {
		patch := fmt.Appendf(nil, `{"metadata":{"resourceVersion":"%d"},"spec":%s}`, rev, spec)
		raw, err := s.call(ctx, request{method: http.MethodPatch, path: p.path(), contentType: patchType, body: patch})
		if err != nil {
			return condition(err, rev)
		}
		o, err := p.Read(raw)
		if err != nil && !errors.Is(err, store.ErrDecode) {
			return err
		}
		rev, uid = o.Revision, string(o.UID)
	}
	err := s.destroy(ctx, *p, rev, uid)
	if older, ok := p.OlderName(p.key); ok && isCode(err, http.StatusNotFound) && older != p.name {
		p.name = older
		err = s.destroy(ctx, *p, rev, uid)
	}
	switch {
	case err == nil || (two || always) && isCode(err, http.StatusNotFound):
		return nil // whoever met the mark may have finished
	case two && isCode(err, http.StatusConflict):
		return nil // likewise, and the name is used again
	}
	return condition(err, rev)
}
