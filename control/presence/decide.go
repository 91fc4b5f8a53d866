package presence

import (
	"fmt"
	"time"

	"github.com/routerd/routerd/store"
)

// Verdict is what is to be done about a name.
type Verdict uint8

// The verdicts of [Decide].
const (
	Keep    Verdict = iota + 1 // it is held, and nothing changed
	Take                       // it is to be taken, or written anew
	Refuse                     // another machine is there
	GivenUp                    // another has it that was held here
)

// Decision is what [Decide] found.
type Decision struct {
	Verdict Verdict
	// As is what to claim the name as, for Take.
	As store.Incarnation
	// Why says, for Take, why this is another epoch than the last; empty: it is
	// the same.
	Why string
	// From is the other machine, for Refuse and GivenUp, and for a Take from
	// another that is not there any more.
	From *store.Incarnation
}

// Decide judges by values alone what is to be done about a name in a state:
// self is this process, with the epoch that it knows of, and held says that it has
// held the name in this process.
func Decide(self store.Incarnation, held bool, st store.NameState) Decision {
	holder, record := st.Holder, st.Record
	switch {
	case holder != nil && !holder.SameLife(&self) && held:
		return Decision{Verdict: GivenUp, From: holder}
	case holder != nil && !holder.SameLife(&self):
		return Decision{Verdict: Refuse, From: holder}
	case held && holder != nil && holder.Process != self.Process:
		return Decision{Verdict: GivenUp, From: holder}
	case held && record != nil && !record.SameLife(&self):
		return Decision{Verdict: GivenUp, From: record}
	}
	d := Decision{Verdict: Take, As: self}
	d.As.NodeCreated = st.NodeCreated
	switch {
	case record == nil && self.Epoch > 0:
		d.Why = "its record was deleted, as it is with the Node"
	case record == nil:
		d.Why = "this host is new"
	case record.Instance != self.Instance:
		d.Why, d.From = "another machine had it that is not there any more", record
	case otherMachine(record.MachineID, self.MachineID):
		d.Why, d.From = "a machine with a copy of the same state directory had it that is not there any more", record
	case record.BootID != self.BootID:
		d.Why = "the host has booted"
	case record.NodeCreated != 0 && record.NodeCreated != st.NodeCreated:
		d.Why = "its Node was deleted"
	}
	if record != nil {
		d.As.Epoch = max(d.As.Epoch, record.Epoch)
		if d.As.MachineID == "" && record.Instance == self.Instance {
			// It says more of a next copy than nothing would.
			d.As.MachineID = record.MachineID
		}
	}
	if d.Why != "" {
		d.As.Epoch++
		return d
	}
	d.As.Since = record.Since
	if held && holder != nil && record.NodeCreated == st.NodeCreated {
		d.Verdict = Keep
	}
	return d
}

// otherMachine reports whether two machine ids are of different machines. One
// that is not known says nothing: the host's /etc/machine-id is often not
// mounted into a container.
func otherMachine(a, b string) bool { return a != "" && b != "" && a != b }

// over reports whether a name is taken over from another machine, before which
// this one was refused for some time. What was there for longer than a lease can
// last by itself is no previous run of this machine, though it has its instance:
// this machine is a copy of it.
func (d Decision) over(refused time.Duration) bool {
	return d.Verdict == Take && (d.From != nil || refused > 2*TTL)
}

// undisputed reports whether the name is this very life's by what was written
// before, and nothing is to be verified: it could be held without being written
// again.
func (d Decision) undisputed(self store.Incarnation, st store.NameState) bool {
	return d.Verdict == Take && d.Why == "" && d.As.Epoch == self.Epoch && st.Record.NodeCreated == st.NodeCreated
}

// RefusedError says that another machine is there with this host's name.
type RefusedError struct {
	Node        string
	Self, Other store.Incarnation
}

func (e *RefusedError) Error() string {
	return fmt.Sprintf("node name %s is held by another machine that is there: %s; this one is %s; "+
		"set nodeName to another name on one of the two, or stop routerd on the other; a host that has just booted waits for its own earlier lease to end, %s at most",
		e.Node, e.Other.Describe(), e.Self.Describe(), TTL)
}

// GivenUpError says that another has taken a name that this process held.
type GivenUpError struct {
	Node        string
	Self, Other store.Incarnation
}

func (e *GivenUpError) Error() string {
	return fmt.Sprintf("node name %s, which this host held, was taken by %s while this one, %s, could not be seen in the datastore; "+
		"the daemon ends here and leaves the kernel as it is; set nodeName to another name on one of the two",
		e.Node, e.Other.Describe(), e.Self.Describe())
}
