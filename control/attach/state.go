package attach

import (
	"slices"
	"strings"
)

// state says how far an attachment is, and what the datastore may know of it.
type state uint8

const (
	// unrecorded is derived from the names alone: anything of it may exist.
	unrecorded state = iota

	// ADD began: anything of it may exist. Local, here and below: the datastore
	// has heard nothing of it, for all of its addresses are out of the reserve.
	adding
	addingLocal

	attachedLocal   // complete; the datastore is to be written
	attachedPatched // likewise, and the datastore may know the endpoint, and nothing of the addresses
	attachedPending // likewise, and the datastore may know part of it
	attachedStored  // complete, and the datastore has it
	attachedFenced  // the datastore gives its address to another: it has no route

	// To go: anything of it may still exist.
	releasing
	releasingLocal
	releasingPatched  // the datastore may know the endpoint, and nothing of the addresses
	releasingDisowned // what the datastore shows of it is another machine's

	// To go, and the wire and the host's routes are gone.
	detached
	detachedLocal
	detachedPatched
	detachedDisowned

	states // how many there are
)

// event is what moves an attachment from one state to another.
type event uint8

const (
	none      event = iota
	begun           // ADD begins
	asked           // IPAM is asked for an address
	reserved        // all addresses came out of the reserve, and nothing was recorded under these names before
	completed       // ADD is done; the datastore is written after the answer
	stored          // the datastore has it
	adopted         // Calico's plugin attached it, and the datastore has it
	patching        // the datastore is about to be written the endpoint, and its addresses later
	flushing        // the datastore is about to be written
	fenced          // another has an address
	regained        // its addresses are its own again
	released        // DEL, GC, the end of a failed ADD, or a takeover of the device
	wireGone        // the wire is gone
	disowned        // another machine has this host's name
	restarted       // the daemon starts, and knows what the disk says

	events // how many there are
)

// transition moves an attachment from some states to one.
type transition struct {
	on   event
	to   state
	from []state
}

// transitions is every transition that there is.
func transitions() []transition {
	return []transition{
		// A complete attachment that ADD makes whole stays complete meanwhile.
		{begun, adding, []state{
			unrecorded, addingLocal, releasing, releasingLocal, releasingPatched, releasingDisowned, detached, detachedLocal, detachedPatched, detachedDisowned,
		}},
		{asked, adding, []state{addingLocal}},
		{asked, attachedPending, []state{attachedLocal, attachedPatched}},
		{reserved, addingLocal, []state{adding}},
		{completed, attachedLocal, []state{addingLocal}},
		{completed, attachedPending, []state{adding, attachedStored, attachedFenced}},
		{stored, attachedStored, []state{adding, addingLocal, attachedLocal, attachedPatched, attachedPending, attachedFenced}},
		{adopted, attachedStored, []state{unrecorded}},
		{patching, attachedPatched, []state{attachedLocal}},
		{flushing, attachedPending, []state{attachedLocal, attachedPatched}},
		{fenced, attachedFenced, []state{attachedLocal, attachedPatched, attachedPending, attachedStored}},
		{regained, attachedPending, []state{attachedFenced}},
		{released, releasing, []state{unrecorded, adding, attachedPending, attachedStored, attachedFenced}},
		{released, releasingLocal, []state{addingLocal, attachedLocal}},
		{released, releasingPatched, []state{attachedPatched}},
		// An ADD whose record the disk refused to mark as released is detached, too.
		{wireGone, detached, []state{adding, releasing}},
		{wireGone, detachedLocal, []state{addingLocal, releasingLocal}},
		{wireGone, detachedPatched, []state{releasingPatched}},
		{wireGone, detachedDisowned, []state{releasingDisowned}},
		{disowned, releasingDisowned, []state{releasing, releasingLocal, releasingPatched}},
		{disowned, detachedDisowned, []state{detached, detachedLocal, detachedPatched}},
		{restarted, releasing, []state{adding}},
	}
}

// after returns the state that an event leads to. An event that has no bearing on
// a state leaves it: what a flush reports of an attachment that is released
// meanwhile, for one.
func (s state) after(e event) state {
	for _, t := range transitions() {
		if t.on == e && slices.Contains(t.from, s) {
			return t.to
		}
	}
	return s
}

// attached says that the workload runs.
func (s state) attached() bool {
	return s == attachedLocal || s == attachedPatched || s == attachedPending || s == attachedStored || s == attachedFenced
}

// pending says that the datastore is to be written.
func (s state) pending() bool {
	return s == attachedLocal || s == attachedPatched || s == attachedPending
}

// leaving says that the attachment is to go.
func (s state) leaving() bool { return s >= releasing && s <= detachedDisowned }

// detached says that the wire is gone.
func (s state) detached() bool { return s >= detached && s <= detachedDisowned }

// unassigned says that the datastore has heard nothing of the addresses, which are the
// reserve's there, though it may have of the endpoint.
func (s state) unassigned() bool {
	return s == attachedPatched || s == releasingPatched || s == detachedPatched
}

// withoutStore says that the attachment goes without the datastore, which has
// heard nothing of it or shows another machine's.
func (s state) withoutStore() bool {
	switch s {
	case addingLocal, attachedLocal, releasingLocal, detachedLocal, releasingDisowned, detachedDisowned:
		return true
	}
	return false
}

// The three states that reports and the disk know.
const (
	phaseAdding    = "adding"    // ADD began; anything of it may exist
	phaseAttached  = "attached"  // complete
	phaseReleasing = "releasing" // to go; anything of it may still exist
)

// String names a state: what reports and the disk have, and the rest.
func (s state) String() string {
	return [states]string{
		unrecorded: "unrecorded", adding: "adding", addingLocal: "adding/local",
		attachedLocal: "attached/local", attachedPatched: "attached/patched", attachedPending: "attached/pending", attachedStored: "attached", attachedFenced: "attached/fenced",
		releasing: "releasing", releasingLocal: "releasing/local", releasingPatched: "releasing/patched", releasingDisowned: "releasing/disowned",
		detached: "releasing/detached", detachedLocal: "releasing/detached/local", detachedPatched: "releasing/detached/patched", detachedDisowned: "releasing/detached/disowned",
	}[s]
}

// phase returns the state as reports and the disk have it.
func (s state) phase() string {
	p, _, _ := strings.Cut(s.String(), "/")
	return p
}

// diskState is a state on disk: what the first version of records has. That the
// datastore has heard nothing, and that the wire is gone, a start of the daemon
// does not know.
type diskState struct {
	Phase    string `json:"state"`
	Queued   bool   `json:"queued,omitempty"`   // the datastore is to be written
	Disowned bool   `json:"disowned,omitempty"` // what the datastore shows is another machine's
}

func (s state) disk() diskState {
	return diskState{
		Phase: s.phase(), Queued: s.pending(),
		Disowned: s == releasingDisowned || s == detachedDisowned,
	}
}

// state reads a state; fenced says that the record names who has the address.
func (d diskState) state(fenced bool) (s state, ok bool) {
	switch {
	case d.Phase == phaseAdding:
		return adding, true
	case d.Phase == phaseReleasing && d.Disowned:
		return releasingDisowned, true
	case d.Phase == phaseReleasing:
		return releasing, true
	case d.Phase != phaseAttached:
		return unrecorded, false
	case fenced:
		return attachedFenced, true
	case d.Queued:
		return attachedPending, true
	}
	return attachedStored, true
}
