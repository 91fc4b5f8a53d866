package dataplane

import (
	"context"
	"iter"
	"time"
)

// Source names a producer of objects. Where two sources want one key, the one
// with the lower number wins; what the other wants is kept and takes over when the
// winner withdraws.
type Source uint8

// The sources, best first.
const (
	SourceWorkload Source = iota + 1 // this host's workloads
	SourceCore                       // the vRouter core
	SourceProbe                      // what probes found of tunnels: offloads of their devices
)

func (s Source) String() string {
	switch s {
	case SourceWorkload:
		return "workload"
	case SourceCore:
		return "core"
	case SourceProbe:
		return "probe"
	}
	return "unknown"
}

// Revision numbers the desired states of a [Sink]. It grows with each change.
type Revision uint64

// Sink makes the kernel match what sources want. A source can replace its
// whole desired state (after a resync) or change some keys of it (after an event); the
// end state is the same. Calls do not block on the kernel and are safe for
// concurrent use.
type Sink interface {
	// Replace makes objs all that src wants.
	Replace(src Source, objs []Object) Revision
	// Update changes some keys of what src wants: put adds or replaces, del
	// withdraws. A key in both is put.
	Update(src Source, put []Object, del []Key) Revision
	// Synced says that src has said all that it wants, so that leftovers of the
	// previous run may be swept. Nothing is swept before every
	// source is synced.
	Synced(src Source)
	// Wait blocks until all that the call which returned rev named is in the
	// kernel, and all that its source named before was tried. It returns the
	// errors of those objects of rev that the kernel refused, or the context's
	// error and what is missing. Objects of earlier calls answer for
	// themselves: one bad object must not fail every later wait.
	Wait(ctx context.Context, rev Revision) error
}

// RouteChanges are changes of routes, ranged over while they are handed over: there may be
// hundreds of thousands, and none is an object by itself.
type RouteChanges struct {
	Put iter.Seq[Route]    // added or replaced
	Del iter.Seq[RouteKey] // withdrawn
}

// State says how far an object has come.
type State uint8

// The states of a wanted object.
const (
	Pending State = iota // not tried yet, or waiting for another object
	Done                 // in the kernel
	Failed               // tried; the kernel said no; will be tried again
)

func (s State) String() string {
	switch s {
	case Pending:
		return "pending"
	case Done:
		return "done"
	case Failed:
		return "failed"
	}
	return "unknown"
}

// Status is what became of one wanted object.
type Status struct {
	Object Object
	Source Source
	State  State
	Since  time.Time // of the present State
	Err    error     // why Failed, or what Pending waits for
}
