package node

import (
	"context"
	"errors"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
)

// register makes the Node resource say which addresses this host has, if it
// does not, and says when to look again. An address that is wanted and missing
// is an error. What keeps a host that is registered from another address is
// none: it is told in [Status.AddressErr].
func (a *Agent) register(ctx context.Context, u dataplane.Underlay, self *store.Node) (again time.Duration, err error) {
	st, encaps := a.Status(), a.publishedEncaps()
	chosen, trouble, failed := chooseAll(a.situation(u, self, st))
	again = a.noteMissing(chosen)
	absent := slices.ContainsFunc(slices.Collect(maps.Values(chosen)), func(c choice) bool { return c.Missing })
	if len(chosen) == 0 || !st.Registered && absent {
		// At a start there is nothing yet that could be kept running.
		return again, errors.Join(trouble, failed)
	}
	want := registration{gone: unwanted(a.cfg.Methods), complete: func(n *store.Node) {
		// A resource that somebody deleted comes back with its tunnel addresses
		// at once: without them the devices would lose theirs until the next
		// step. So does what it said of its packets, by which others go on to
		// take them in.
		setTunnels(n, st.Tunnels)
		store.SetNodeEncaps(n, encaps)
		store.SetTunnelSources(n, sourcesOf(u))
		store.SetBGPKeys(n, a.bgpKeys())
	}}
	differ := !st.Registered || a.claim.open()
	found := map[dataplane.Family]Detected{}
	for _, f := range dataplane.Families() {
		c, ok := chosen[f]
		if !ok {
			continue
		}
		found[f] = c.Detected
		want.addrs = append(want.addrs, c.Prefix)
		was := registered(self, f)
		if wait := a.unheard(was, c.Prefix); wait > 0 {
			return sooner(again, wait), failed
		}
		differ = differ || was != c.Prefix.String()
		if st.Registered && was != "" && was != c.Prefix.String() {
			a.cfg.Log.Info("this host moves to another address", "family", f, "from", was, "to", c.Prefix, "device", c.Link)
		}
	}
	if differ {
		a.claim, err = register(ctx, a.cfg.Store, a.peers, a.cfg.Name, want, a.claim)
		var taken *AddressTakenError
		if errors.As(err, &taken) && st.Registered {
			// It goes on with the address that it has.
			a.setAddresses(st.Addresses, errors.Join(trouble, err))
			again = sooner(again, retryMax)
			if a.claim.open() {
				return again, err
			}
			return again, failed
		}
	}
	if err != nil {
		return again, err
	}
	a.setAddresses(found, trouble)
	return again, failed
}

// setAddresses notes what is registered, and what is wrong with it.
func (a *Agent) setAddresses(found map[dataplane.Family]Detected, trouble error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if was := a.status.AddressErr; trouble != nil && (was == nil || was.Error() != trouble.Error()) {
		a.cfg.Log.Warn("the address of this host is not as it should be", "error", trouble)
	}
	a.status.Registered, a.status.Addresses, a.status.AddressErr = true, found, trouble
}

// situation gathers what [chooseAll] decides by. The address of the resource
// counts as the present one, also after a restart.
func (a *Agent) situation(u dataplane.Underlay, self *store.Node, st Status) situation {
	s := situation{
		underlay: u, methods: withInternal(a.cfg.Methods, a.kubeletSays(self)),
		now: map[dataplane.Family]netip.Prefix{}, missing: map[dataplane.Family]time.Duration{}, peers: a.peers.addrs(),
	}
	for _, f := range dataplane.Families() {
		s.now[f] = st.Addresses[f].Prefix
		if p, err := store.ParseAddress(registered(self, f)); err == nil {
			s.now[f] = p
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for f, since := range a.missing {
		s.missing[f] = time.Since(since)
	}
	return s
}

// noteMissing keeps since when the host lacks an address, and says when the
// next decision about one is due.
func (a *Agent) noteMissing(chosen map[dataplane.Family]choice) (again time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, f := range dataplane.Families() {
		c := chosen[f]
		if !c.Missing {
			delete(a.missing, f)
			continue
		}
		if _, ok := a.missing[f]; !ok {
			a.missing[f] = time.Now()
		}
		again = sooner(again, c.Wait)
	}
	return again
}
