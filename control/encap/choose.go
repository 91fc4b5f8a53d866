package encap

import (
	"errors"
	"fmt"
	"slices"

	"github.com/routerd/routerd/dataplane"
)

// choice is all that decides in which encapsulation this host sends a pool's
// packets to a peer. It holds no history: what the host moved to before is
// published in the store like everything else.
type choice struct {
	peer   string
	wanted dataplane.Encap   // by the pool's mode
	moved  []dataplane.Encap // by the mode that this host has moved to: what is being published, what is

	// others lists what else the peer accepts, best first.
	others func() []dataplane.Encap

	accepts func(dataplane.Encap) bool  // the peer accepts it
	can     func(dataplane.Encap) error // this host can send it
	mayUse  func(dataplane.Encap) bool  // it is published that this host sends it

	// probing says that an encapsulation is probed before a peer is moved to it, plain
	// that plain packets are too, and forced that the peer is moved all the same;
	// verdict is what the probes found, and whether they were sent.
	probing bool
	plain   bool
	forced  bool
	verdict func(dataplane.Encap) (d dataplane.Delivery, asked bool)

	refusal func(dataplane.Encap) string // why the peer says that it does not accept it
}

// decision is what follows from a choice.
type decision struct {
	Target dataplane.Encap // what to send as things are
	Encap  dataplane.Encap // what to send now; zero: nothing
	Reason string          // why Target is not what is wanted; empty: it is
	Lost   bool            // that is because probes in what is wanted get lost
}

// decide is the sender's rule: the wanted encapsulation if the peer accepts it,
// this host can send it, and probes say nothing against the move from an earlier
// one; else the earlier one; else any that the peer accepts, tunnels first; else
// the wanted one, which then is as good as any.
//
// What is sent now is the first of these that this host has published: a
// receiver must be able to see who still needs what it accepts.
func (c choice) decide() decision {
	var d decision
	usable := c.usable(&d)
	d.Target = c.wanted
	if len(usable) > 0 {
		d.Target = usable[0]
	}
	for _, f := range usable {
		if c.mayUse(f) {
			d.Encap = f
			return d
		}
	}
	// Nothing that is right is published yet: for a moment what was sent so
	// far goes on, which a peer accepts before it says so. What is wanted it may
	// accept much later.
	for _, f := range append(slices.Clone(c.moved), c.wanted) {
		if c.mayUse(f) && c.can(f) == nil {
			d.Encap = f
			break
		}
	}
	return d
}

// ordered lists the encapsulations by preference.
func (c choice) ordered() []dataplane.Encap {
	out := []dataplane.Encap{c.wanted}
	for _, f := range c.moved {
		if !slices.Contains(out, f) {
			out = append(out, f)
		}
	}
	return out
}

// usable lists the encapsulations that would get there, best first, and notes
// why the wanted one is not among them.
func (c choice) usable(d *decision) []dataplane.Encap {
	var out []dataplane.Encap
	for _, f := range c.ordered() {
		if err := c.check(f); err == nil {
			out = append(out, f)
		} else if f == c.wanted {
			d.Reason = err.Error()
		}
	}
	// Plain packets that no probe has got through are no way at all: whatever else the
	// peer accepts is better, also what this host has not moved to.
	dropped := false
	if c.plain && c.wanted.Driver == dataplane.DriverDirect && len(out) > 0 && out[0] == c.wanted {
		if err := c.unproven(); err != nil {
			d.Reason, d.Lost = err.Error(), errors.Is(err, errLost)
			out, dropped = out[1:], true
		}
	}
	if !slices.ContainsFunc(out, c.mayUse) {
		for _, f := range c.others() {
			if !slices.Contains(out, f) && !(dropped && f == c.wanted) && c.check(f) == nil {
				out = append(out, f)
			}
		}
	}
	if len(out) > 1 && out[0] == c.wanted && slices.Contains(c.moved, out[1]) {
		if err := c.unproven(); err != nil {
			d.Reason, d.Lost = err.Error(), errors.Is(err, errLost)
			return out[1:]
		}
	}
	return out
}

// unproven says why probes keep a peer from being moved to the wanted
// encapsulation. They decide about moves only: where answers stop coming in one
// that is in use, no more than the peer's daemon may have gone.
func (c choice) unproven() error {
	if c.forced {
		return nil
	}
	v, asked := c.verdict(c.wanted)
	switch {
	case v.Result == dataplane.No:
		return fmt.Errorf("probes in %s to node %s %w: %s", c.wanted, c.peer, errLost, v.Reason)
	case c.probing && !asked && (c.plain || c.wanted.Driver != dataplane.DriverDirect):
		return fmt.Errorf("waits for the probe of %s to node %s", c.wanted, c.peer)
	}
	return nil
}

// errLost says what becomes of probes.
var errLost = errors.New("get lost")

// check says what speaks against an encapsulation.
func (c choice) check(f dataplane.Encap) error {
	if err := c.can(f); err != nil {
		return fmt.Errorf("this host cannot send %s: %w", f, err)
	}
	if !c.accepts(f) {
		if why := c.refusal(f); why != "" {
			return fmt.Errorf("node %s does not accept %s: %s", c.peer, f, why)
		}
		return fmt.Errorf("node %s does not accept %s yet", c.peer, f)
	}
	return nil
}

// errNotPublished says why nothing is sent to a peer for a moment.
var errNotPublished = errors.New("this host's datastore entry does not yet say that it sends in this encapsulation")
