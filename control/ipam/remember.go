package ipam

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/store"
)

// Journal keeps values on disk; *journal.Journal does. Put must keep the order
// of its calls, also those of others who use the same journal: what is known
// of the reserve has to be on disk before a workload's record that follows from
// it.
type Journal interface {
	Put(key string, value any) error
	Delete(key string) error
	Entries() map[string]json.RawMessage
}

// rememberKey is the journal's key of what the Allocator must know when the
// datastore does not answer.
const rememberKey = "ipam/reserve"

// saved is what the journal holds: the addresses of the reserve. What workloads have
// of them the workloads' own records say ([Allocator.Claim]); that by which one is
// chosen the cluster's copy has on disk.
type saved struct {
	Addresses map[string][]int `json:"addresses"` // by block

	// That by which an address is chosen, as the version before kept it.
	Pools  map[string]json.RawMessage `json:"pools,omitempty"`  // as stored
	Labels map[string]string          `json:"labels,omitempty"` // of this node
	Config *store.IPAMConfig          `json:"config,omitempty"`
}

// remember writes to the journal what has changed of it. The caller holds the
// lock, so that what is on disk is never older than what callers were answered.
func (a *Allocator) remember() {
	s := a.state
	if a.cfg.Reserve.Journal == nil || !s.synced {
		return
	}
	m := saved{Addresses: map[string][]int{}}
	if s.registered && s.configErr == nil {
		for _, b := range s.own {
			if ready := s.unreserved(b); len(ready) > 0 {
				m.Addresses[b.CIDR.String()] = ready
			}
		}
	}
	form := fmt.Sprint(m.Addresses) // maps are printed in the order of their keys
	if form == s.reserve.saved {
		return
	}
	if err := a.cfg.Reserve.Journal.Put(rememberKey, m); err != nil {
		a.cfg.Log.Warn("the reserve is not written down: after a reboot without the datastore no addresses are given", "error", err)
		return
	}
	s.reserve.saved = form
}

// unreserved returns the reserve's ordinals of a block but for those that are, or
// may be, on their way back: what an IPReservation has is.
func (s *state) unreserved(b *blockInfo) []int {
	reserved := within(s.reserved, b.CIDR)
	if len(reserved)+len(s.reserve.leaving) == 0 && s.reserve.fenced && !s.piecewise {
		return b.ready
	}
	return slices.DeleteFunc(slices.Clone(b.ready), func(o int) bool {
		a := addrAt(b.CIDR, o)
		_, leaves := s.reserve.leaving[a]
		return leaves || containsAddr(reserved, a) || !s.trusts(b.CIDR, o)
	})
}

// load applies what the journal has, until the datastore answers.
func (s *state) load(entries map[string]json.RawMessage) error {
	b, ok := entries[rememberKey]
	if !ok {
		return nil
	}
	var m saved
	if err := json.Unmarshal(b, &m); err != nil {
		return fmt.Errorf("read what is remembered of the reserve: %w", err)
	}
	addrs := map[netip.Prefix][]int{}
	for c, ordinals := range m.Addresses {
		cidr, err := netip.ParsePrefix(c)
		if err != nil {
			return fmt.Errorf("read what is remembered of the reserve: %w", err)
		}
		addrs[cidr] = ordinals
	}
	for name, raw := range m.Pools {
		key := store.ResourceKey(store.KindIPPool, name)
		value, err := store.Decode(key, raw)
		if err != nil {
			return fmt.Errorf("read a remembered pool: %w", err)
		}
		s.pools[name] = poolFrom(name, cluster.NewPool(store.Object{Key: key, Value: value, Raw: raw}))
	}
	s.sortedPools = nil
	if s.registered, s.labels = len(m.Pools) > 0, m.Labels; m.Config != nil {
		s.config = *m.Config
	}
	s.reserve.remembered = addrs
	return nil
}

// loadCluster applies that by which an address is chosen as the disk has it, unless
// the version before, which ran last then, left it. Which addresses there are the
// journal says.
func (a *Allocator) loadCluster(st cluster.Step) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.state.registered || !st.Synced {
		return
	}
	for _, ch := range st.Changes {
		if ch.Key.Kind == store.KindIPAMBlock || ch.Key.Kind == store.KindIPAMAffinity {
			continue
		}
		if err := a.state.apply(ch, 0); err != nil {
			a.cfg.Log.Warn("ignored what cannot be read on disk", "key", ch.Key.String(), "error", err)
		}
	}
}

// Doubt says that what the journal knows of the reserve may be another's by now:
// this host's Node or name was given up since, or lines of the journal are lost that
// say who has an address. Nothing is taken from the reserve until the datastore's
// content is known. It is to be called before the watch begins, and does nothing
// after that.
func (a *Allocator) Doubt() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.state.synced || a.cfg.Reserve.Journal == nil {
		return nil
	}
	if a.state.reserve.remembered != nil {
		a.state.reserve.remembered = map[netip.Prefix][]int{}
	}
	a.state.reserve.saved = ""
	if err := a.cfg.Reserve.Journal.Delete(rememberKey); err != nil {
		return fmt.Errorf("forget the reserve of before: %w", err)
	}
	return nil
}

// invalidate drops what was loaded: the datastore has begun to answer.
func (s *state) invalidate() {
	if s.reserve.remembered == nil {
		return
	}
	s.reserve.trusted, s.reserve.remembered = s.reserve.remembered, nil
	clear(s.pools)
	s.sortedPools = nil
	s.registered, s.labels, s.config = false, nil, store.DefaultIPAMConfig()
}
