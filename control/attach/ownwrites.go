package attach

import (
	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/store"
)

// OwnWrites shows the parts of this host what it writes to the datastore, before
// the datastore does; [cluster.Cluster] does so. Its methods must not block or call
// the [Attacher].
type OwnWrites interface {
	// Announce shows an endpoint of this host, or its end, and the profile of a
	// network that may be new. The event has no revision.
	Announce(ev store.Event)
	// Written says that the datastore has an endpoint that was announced, at a
	// revision.
	Written(key store.Key, rev store.Revision)
	// Ended says that nothing is left of an endpoint whose end was announced, and
	// whether the datastore may know of it.
	Ended(key store.Key, known bool)
}

// ownWrites announces endpoints. Everything that knows of [OwnWrites] is in this
// file.
type ownWrites struct {
	to        OwnWrites // nil: there is no follower
	endpoints *endpoints
	ledger    *ledger
}

var _ OwnWrites = (*cluster.Cluster)(nil)

// announce shows an endpoint. An attachment whose endpoint can have no name has
// none.
func (o *ownWrites) announce(r record) {
	if o.to == nil || r.AddressesOnly {
		return
	}
	w, key, err := o.endpoints.of(r)
	if err != nil {
		return
	}
	if len(w.Spec.Profiles) == 1 && w.Spec.Profiles[0] == r.Network {
		o.endpoints.unknownProfile(r.Network, o.to.Announce)
	}
	o.to.Announce(store.Event{Key: key, Object: store.Object{Key: key, Value: w}})
}

// announceEnd shows the end of an endpoint, unless another container of the pod
// has it by now.
func (o *ownWrites) announceEnd(r record) {
	if o.to == nil || o.ledger.taken(r) {
		return
	}
	if key, ok := o.endpoints.key(r); ok {
		o.to.Announce(store.Event{Key: key})
	}
}

func (o *ownWrites) written(r record, rev store.Revision) {
	if key, ok := o.endpoints.key(r); ok && o.to != nil {
		o.to.Written(key, rev)
	}
}

func (o *ownWrites) ended(r record) {
	if key, ok := o.endpoints.key(r); ok && o.to != nil {
		o.to.Ended(key, r.State != detachedLocal && r.State != releasingLocal)
	}
}
