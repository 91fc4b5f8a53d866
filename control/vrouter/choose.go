package vrouter

import (
	"errors"
	"fmt"
	"slices"

	"github.com/routerd/routerd/dataplane"
)

// choice is all that decides in which form this host sends to a peer the
// packets of a pool. It holds no history: what the host moved to before is
// published in the store like everything else.
type choice struct {
	peer   string
	wanted dataplane.Form   // by the pool's mode
	moved  []dataplane.Form // by the mode that this host has moved to: what is under way, what is published

	// Others lists what else the peer takes in, best first.
	others func() []dataplane.Form

	accepts func(dataplane.Form) bool  // the peer takes it in
	can     func(dataplane.Form) error // this host can send it
	may     func(dataplane.Form) bool  // it is published that this host sends it

	// Probing says that a form is probed before a peer is moved to it; verdict
	// is what the probes found, and whether they were sent.
	probing bool
	verdict func(dataplane.Form) (d dataplane.Delivery, asked bool)

	refusal func(dataplane.Form) string // why the peer says that it does not take it in
}

// decision is what follows from a choice.
type decision struct {
	target dataplane.Form // what to send as things are
	form   dataplane.Form // what to send now; the zero form: nothing
	reason string         // why target is not what is wanted; empty: it is
}

// decide is the sender's rule: the wanted form if the peer takes it in and this
// host can send it, and where there is a form of before, also probes say
// nothing against the move; else the form of before; else any that the peer
// takes in, tunnels first; else the wanted one, which then is as good as any.
//
// What is sent now is the first of these that this host has published: who
// takes a form in must be able to tell who still needs it.
func (c choice) decide() decision {
	var d decision
	usable := c.usable(&d)
	d.target = c.wanted
	if len(usable) > 0 {
		d.target = usable[0]
	}
	for _, f := range usable {
		if c.may(f) {
			d.form = f
			return d
		}
	}
	// Nothing that is right is published yet: for a moment what was sent so
	// far goes on.
	for _, f := range c.ordered() {
		if c.may(f) && c.can(f) == nil {
			d.form = f
			break
		}
	}
	return d
}

// ordered lists the forms in the order of preference.
func (c choice) ordered() []dataplane.Form {
	out := []dataplane.Form{c.wanted}
	for _, f := range c.moved {
		if !slices.Contains(out, f) {
			out = append(out, f)
		}
	}
	return out
}

// usable lists the forms that would get there, best first, and notes why the
// wanted one is not among them.
func (c choice) usable(d *decision) []dataplane.Form {
	var out []dataplane.Form
	for _, f := range c.ordered() {
		if err := c.check(f); err == nil {
			out = append(out, f)
		} else if f == c.wanted {
			d.reason = err.Error()
		}
	}
	if !slices.ContainsFunc(out, c.may) {
		for _, f := range c.others() {
			if !slices.Contains(out, f) && c.check(f) == nil {
				out = append(out, f)
			}
		}
	}
	if len(out) > 1 && out[0] == c.wanted && slices.Contains(c.moved, out[1]) {
		if err := c.unproven(); err != nil {
			d.reason = err.Error()
			return out[1:]
		}
	}
	return out
}

// unproven says why a peer is not moved to the wanted form by what probes found.
// They decide about moves only: a form in use to which answers stop coming may
// have lost no more than the peer's daemon.
func (c choice) unproven() error {
	v, asked := c.verdict(c.wanted)
	switch {
	case v.Result == dataplane.No:
		return fmt.Errorf("probes in %s to node %s get lost: %s", c.wanted, c.peer, v.Reason)
	case c.probing && !asked && c.wanted.Driver != dataplane.DriverDirect:
		return fmt.Errorf("waits for the probe of %s to node %s", c.wanted, c.peer)
	}
	return nil
}

// check says what speaks against a form.
func (c choice) check(f dataplane.Form) error {
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
var errNotPublished = errors.New("this host's datastore entry does not yet say that it sends in this form")
