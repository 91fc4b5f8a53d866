package ipam

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
)

// giver is a step that gives addresses. Finding them changes nothing, so that
// several can look before any takes.
type giver interface {
	step
	request() *Request
	// find returns what the handle holds already and what is to be taken. It
	// leaves the draft as it is.
	find(*draft) (held []Assignment, picks []pick, err error)
	give(held, given []Assignment)
	result() (held, given []Assignment)
}

// planTogether plans steps of different families: all of them, or none.
func planTogether(d *draft, steps ...giver) error {
	for _, st := range steps {
		st.give(nil, nil)
	}
	if err := d.ready(); err != nil {
		return err
	}
	held, picks := make([][]Assignment, len(steps)), make([][]pick, len(steps))
	var lacking error
	for i, st := range steps {
		var err error
		held[i], picks[i], err = st.find(d)
		if err == nil {
			err = d.preparePicks(st.request(), picks[i])
		}
		switch {
		case errors.Is(err, errNeed):
			lacking = cmp.Or(lacking, err) // so that all needs are read together
		case err != nil:
			return err
		}
	}
	if lacking != nil {
		return lacking
	}
	for i, st := range steps {
		given, err := d.take(st.request(), picks[i])
		if err != nil {
			return err
		}
		st.give(held[i], given)
	}
	return nil
}

// jointStep gives addresses of several families to one handle.
type jointStep struct{ parts []giver }

func (st *jointStep) plan(d *draft) error { return planTogether(d, st.parts...) }

// Part is one of the addresses that [Allocator.AssignTogether] gives.
type Part struct {
	Request
	Addr netip.Addr // this one, as [Allocator.AssignAddr] gives it; invalid: any
}

// AssignTogether gives addresses of different families to one handle, in one
// transaction: all that the parts ask for, or none and an error. On a datastore that writes
// one object at a time it is one for each part, and what the first gave is released if
// the next fails; with an error that matches [store.ErrUnavailable] some may be given. The result has
// the addresses of each part. Otherwise it is as [Allocator.Assign].
func (a *Allocator) AssignTogether(ctx context.Context, parts ...Part) ([][]Assignment, error) {
	st := &jointStep{}
	var families []dataplane.Family
	for _, p := range parts {
		r := p.Request
		var err error
		if p.Addr.IsValid() {
			err = checkAddr(&r, p.Addr)
		} else {
			err = r.check()
		}
		switch {
		case err != nil:
			return nil, err
		case slices.Contains(families, r.Family):
			return nil, fmt.Errorf("%w: two parts are %s", ErrInvalidRequest, r.Family)
		case r.Handle != parts[0].Handle:
			return nil, fmt.Errorf("%w: the handles %s and %s differ", ErrInvalidRequest, parts[0].Handle, r.Handle)
		}
		families = append(families, r.Family)
		r.Attributes = maps.Clone(r.Attributes)
		if p.Addr.IsValid() {
			st.parts = append(st.parts, &addrStep{req: r, addr: p.Addr})
		} else {
			st.parts = append(st.parts, &assignStep{req: r})
		}
	}
	if len(parts) == 0 {
		return nil, nil
	}
	err := a.doNamed(ctx, st, parts...)
	if errors.Is(err, store.ErrOneByOne) {
		err = a.assignInTurn(ctx, st.parts, parts)
	}
	if err != nil {
		return nil, fmt.Errorf("assign %v addresses to %s: %w", families, parts[0].Handle, err)
	}
	out := make([][]Assignment, len(st.parts))
	for i, p := range st.parts {
		held, given := p.result()
		out[i] = append(held, given...)
	}
	return out, nil
}

// assignInTurn gives what each step is for, one after the other.
func (a *Allocator) assignInTurn(ctx context.Context, steps []giver, parts []Part) error {
	var done []Claim
	for i, st := range steps {
		err := a.doNamed(ctx, st, parts[i])
		if err == nil {
			for _, g := range given(st) {
				done = append(done, Claim{Addr: g.Addr, Handle: parts[i].Handle})
			}
			continue
		}
		if len(done) > 0 && !errors.Is(err, store.ErrUnavailable) {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), a.cfg.Timeout)
			defer cancel()
			if _, back := a.Release(ctx, done...); back != nil {
				err = errors.Join(err, fmt.Errorf("give back what another family gave: %w", back))
			}
		}
		return err
	}
	return nil
}

// given returns what a step has given, if it is one that gives.
func given(st step) []Assignment {
	var parts []giver
	switch st := st.(type) {
	case giver:
		parts = []giver{st}
	case *jointStep:
		parts = st.parts
	}
	var out []Assignment
	for _, p := range parts {
		_, g := p.result()
		out = append(out, g...)
	}
	return out
}
