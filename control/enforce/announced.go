package enforce

import (
	"maps"
	"slices"

	"github.com/routerd/routerd/store"
)

// announced are endpoints of this host of which it knows more than the watch has
// told: those that it made, or ended, since. What the watch tells late of what was
// before is not to take the place of that. It is not safe for concurrent use.
type announced map[store.Key]*announcement

type announcement struct {
	endpoint *store.WorkloadEndpoint // as it was announced; of one that ended, as it was last known
	ended    bool
	written  store.Revision // at which the datastore has it; 0: not known, or not yet
	settled  bool           // it ended, and the datastore knows
	held     *store.Event   // what the watch told of the key last
	at       store.Revision // of held
}

// Announce takes in that this host made an endpoint, or that one ended, before
// the datastore tells of it; the event has no revision. What the watch tells of an
// older endpoint of the key is held back from then on, until the watch tells of
// this one or [Enforcer.Written] says that it must have. Other objects than
// endpoints count unless the datastore told of them before. It does not wait.
func (e *Enforcer) Announce(ev store.Event) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if ev.Key.Kind == store.KindWorkloadEndpoint {
		e.announced.announce(ev)
	} else if e.recalled[ev.Key] {
		return
	}
	e.queue = append(e.queue, store.Batch{Events: []store.Event{ev}})
	signal(e.poke)
}

// Written takes in that the datastore has an endpoint that was announced, at a
// revision. It does not wait.
func (e *Enforcer) Written(key store.Key, rev store.Revision) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if ev := e.announced.written(key, rev); ev != nil {
		e.queue = append(e.queue, store.Batch{Events: []store.Event{*ev}})
		signal(e.poke)
	}
}

// Ended takes in that nothing is to be told any more of an endpoint whose end was
// announced; told says whether the datastore ever heard of it. It does not wait.
func (e *Enforcer) Ended(key store.Key, told bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if n := e.announced[key]; n == nil || !n.ended {
		return // another has the name by now
	} else if n.settled = true; !told {
		delete(e.announced, key)
	}
}

// maxAnnounced bounds how many are kept that the watch may never tell of: one
// that came and went between two of its steps.
const maxAnnounced = 4096

func (a announced) announce(ev store.Event) {
	if len(a) >= maxAnnounced {
		maps.DeleteFunc(a, func(_ store.Key, n *announcement) bool { return n.settled })
	}
	next := &announcement{ended: ev.Deleted()}
	if w, ok := ev.Object.Value.(*store.WorkloadEndpoint); ok {
		next.endpoint = w
	} else if old := a[ev.Key]; old != nil {
		next.endpoint = old.endpoint
	}
	a[ev.Key] = next
}

// written returns what was held back and is newer.
func (a announced) written(key store.Key, rev store.Revision) *store.Event {
	n := a[key]
	if n == nil || n.ended {
		return nil
	}
	if n.written = rev; n.held == nil || n.at < rev {
		return nil
	}
	delete(a, key)
	return n.held
}

// filter leaves out of a batch of the watch what is older than what is known here.
func (a announced) filter(b store.Batch) store.Batch {
	if len(a) > 0 && slices.ContainsFunc(b.Events, func(ev store.Event) bool { return a[ev.Key] != nil }) {
		events := make([]store.Event, 0, len(b.Events))
		for _, ev := range b.Events {
			if n := a[ev.Key]; n == nil || n.passes(ev, b.Revision) {
				events = append(events, ev)
				if n != nil && ev.Err == nil {
					delete(a, ev.Key)
				}
			} else if !n.ended {
				n.held, n.at = &ev, b.Revision
			}
		}
		b.Events = events
	}
	if b.Synced {
		for key, n := range a {
			if n.settled {
				delete(a, key) // the watch never told of it, and does not any more
			}
		}
	}
	return b
}

// passes reports whether an event of the watch is at least as new as what was
// announced.
func (n *announcement) passes(ev store.Event, at store.Revision) bool {
	w, there := ev.Object.Value.(*store.WorkloadEndpoint)
	switch {
	case ev.Err != nil:
		return true // what was known holds
	case n.ended:
		return !there || n.endpoint != nil && w.Spec.ContainerID != n.endpoint.Spec.ContainerID
	case n.written != 0 && at >= n.written:
		return true
	}
	return there && w.Spec.ContainerID == n.endpoint.Spec.ContainerID && slices.Equal(w.Spec.IPNetworks, n.endpoint.Spec.IPNetworks)
}
