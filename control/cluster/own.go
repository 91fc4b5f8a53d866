package cluster

import (
	"cmp"
	"maps"
	"slices"

	"github.com/routerd/routerd/store"
)

// own is what this host wrote, or is about to write, and the watch has not shown
// yet. What the watch shows late of what was before does not take the place of
// that. It is guarded by the Cluster's lock.
type own struct {
	writes   map[store.Key]*ownWrite // of WorkloadEndpoints
	profiles map[store.Key]bool      // the watch shows them
}

type ownWrite struct {
	now      *Change                 // what counts of the key
	endpoint *store.WorkloadEndpoint // as it was announced; of one that ended, as it was last known
	ended    bool
	written  store.Revision // at which the datastore has it; 0: not known, or not yet
	settled  bool           // it ended, and the datastore knows
	last     *Change        // what the watch showed of the key last
	at       store.Revision // of last
}

// maxOwn bounds how many are kept that the watch may never show: one that came
// and went between two of its batches.
const maxOwn = 4096

func newOwn() own {
	return own{writes: make(map[store.Key]*ownWrite), profiles: make(map[store.Key]bool)}
}

// Announce shows all followers a WorkloadEndpoint that this host is about to
// write, or its end, before the watch does; the event has no revision. From then on
// it hides what the watch shows of an older endpoint of the key, until
// [Cluster.Written] has said which revision is this one and the watch is as far.
// A Profile is shown unless the datastore has one. Announce does not wait.
func (c *Cluster) Announce(ev store.Event) {
	ev.Object.Key = ev.Key
	ch := &Change{Event: ev, Value: ev.Object.Value, Own: true}
	c.mu.Lock()
	defer c.mu.Unlock()
	if ev.Key.Kind == store.KindWorkloadEndpoint {
		c.own.announce(ch)
	} else if c.own.profiles[ev.Key] {
		return
	}
	c.hand([]*Change{ch}, false)
}

// Written says that the datastore has an endpoint that was announced, at a
// revision. It does not wait.
func (c *Cluster) Written(key store.Key, rev store.Revision) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if ch := c.own.written(key, rev); ch != nil {
		c.hand([]*Change{ch}, false)
	}
}

// Ended says that nothing more comes of an endpoint whose end was announced, and
// whether the datastore may know of it. It does not wait.
func (c *Cluster) Ended(key store.Key, known bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if w := c.own.writes[key]; w == nil || !w.ended {
		return // another has the name by now
	} else if w.settled = true; !known {
		delete(c.own.writes, key)
	}
}

func (o *own) announce(ch *Change) {
	if len(o.writes) >= maxOwn {
		maps.DeleteFunc(o.writes, func(_ store.Key, w *ownWrite) bool { return w.settled })
	}
	next := &ownWrite{now: ch, ended: ch.Deleted()}
	if ep, ok := ch.Value.(*store.WorkloadEndpoint); ok {
		next.endpoint = ep
	} else if old := o.writes[ch.Key]; old != nil {
		next.endpoint = old.endpoint
	}
	o.writes[ch.Key] = next
}

// written returns what was hidden and is newer.
func (o *own) written(key store.Key, rev store.Revision) *Change {
	w := o.writes[key]
	if w == nil || w.ended {
		return nil
	}
	if w.written = rev; w.last == nil || w.at < rev {
		return nil
	}
	delete(o.writes, key)
	if w.last == w.now {
		return nil // the followers have it
	}
	return w.last
}

// filter puts what this host knows in the place of what is older in a batch of the
// watch, which it changes.
func (o *own) filter(changes []*Change, at store.Revision, synced bool) {
	for i, ch := range changes {
		if ch.Key.Kind == store.KindProfile {
			if ch.Deleted() && ch.Err == nil {
				delete(o.profiles, ch.Key)
			} else {
				o.profiles[ch.Key] = true
			}
		}
		if w := o.writes[ch.Key]; w != nil {
			// Of several kinds a datastore may report a later change first: how far the watch is
			// says nothing of one object.
			changes[i] = o.resolve(w, ch, cmp.Or(ch.Object.Revision, at))
		}
	}
	if !synced {
		return
	}
	// The watch did not show their ends, and will not any more.
	maps.DeleteFunc(o.writes, func(_ store.Key, w *ownWrite) bool { return w.settled })
}

// resolve returns what counts after the watch showed something of an own write.
func (o *own) resolve(w *ownWrite, ch *Change, at store.Revision) *Change {
	passes, through := w.judge(ch, at)
	switch {
	case through:
		delete(o.writes, ch.Key)
		return ch
	case ch.Err == nil && !w.ended:
		w.last, w.at = ch, at
	}
	if passes {
		w.now = ch
		return ch
	}
	w.merge(ch)
	hides := *w.now
	hides.Own = true
	if ep, ok := ch.Value.(*store.WorkloadEndpoint); ok {
		hides.Hidden = ep
	}
	return &hides
}

// merge takes from what the watch shows of the pod that an announced endpoint is of
// what this host does not write, such as its labels: where the datastore is the API of
// Kubernetes a pod is there before it has its addresses, and rules are to follow it also
// while these cannot be written. The uid says that it is the same pod.
func (w *ownWrite) merge(ch *Change) {
	ep, ok := ch.Value.(*store.WorkloadEndpoint)
	if !ok || w.ended || w.endpoint == nil || ep.UID == "" || ep.UID != w.endpoint.UID {
		return
	}
	next, own := *ep, &w.endpoint.Spec
	next.Spec.ContainerID, next.Spec.InterfaceName, next.Spec.MAC = own.ContainerID, own.InterfaceName, own.MAC
	next.Spec.IPNetworks, next.Spec.IPNATs = own.IPNetworks, own.IPNATs
	w.endpoint = &next
	w.now = &Change{Event: store.Event{Key: ch.Key, Object: store.Object{Key: ch.Key, Value: &next}}, Value: &next, Own: true}
}

// judge reports whether what the watch shows counts, and whether nothing older than
// the own write can follow it. Until it is known which revision is this host's, a
// write of the same endpoint may be that of an earlier attachment of the container,
// and its end still be on the way.
func (w *ownWrite) judge(ch *Change, at store.Revision) (passes, through bool) {
	ep, there := ch.Value.(*store.WorkloadEndpoint)
	switch {
	case ch.Err != nil:
		return false, false // what was known holds
	case w.ended:
		through = !there || w.endpoint != nil && ep.Spec.ContainerID != w.endpoint.Spec.ContainerID
		return through, through
	case w.written != 0 && at >= w.written:
		return true, true
	}
	return there && ep.Spec.ContainerID == w.endpoint.Spec.ContainerID && slices.Equal(ep.Spec.IPNetworks, w.endpoint.Spec.IPNetworks), false
}
