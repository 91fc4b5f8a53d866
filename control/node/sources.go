package node

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"time"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
)

// announceFor is how long an address is published as one that this host may send from
// before it takes the place of the one that the host is registered with: other hosts take
// tunnels' packets from addresses that they know alone.
const announceFor = 2 * time.Second

// sourcesOf returns the addresses from which the kernel may send tunnels' packets, in
// order: it chooses by its routes, where a device has no source of its own, and some
// hosts are registered with an address of their loopback. Of more than are published
// those count that stand for a subnet.
func sourcesOf(u dataplane.Underlay) []netip.Addr {
	skip, stays := virtualLinks(), regexp.MustCompile(`^(lo|dummy.*)$`)
	var found []dataplane.UnderlayAddress
	for _, a := range u.Addresses {
		addr := a.Prefix.Addr()
		if a.Tentative || a.LinkScope || !addr.IsGlobalUnicast() || skip.MatchString(a.Link) && !stays.MatchString(a.Link) {
			continue
		}
		found = append(found, a)
	}
	later := func(b bool) int {
		if b {
			return 1
		}
		return 0
	}
	slices.SortFunc(found, func(a, b dataplane.UnderlayAddress) int {
		return cmp.Or(later(a.Secondary)-later(b.Secondary), a.Prefix.Addr().Compare(b.Prefix.Addr()))
	})
	var list []netip.Addr
	for _, a := range found {
		if !slices.Contains(list, a.Prefix.Addr()) && len(list) < store.MaxTunnelSources {
			list = append(list, a.Prefix.Addr())
		}
	}
	slices.SortFunc(list, netip.Addr.Compare)
	return list
}

// announce publishes from where this host may send, if its resource says something else.
func (a *Agent) announce(ctx context.Context, u dataplane.Underlay, self *store.Node) error {
	if self == nil {
		return nil // it is made with them
	}
	have, want := store.TunnelSources(self), sourcesOf(u)
	if slices.Equal(have, want) {
		return nil
	}
	if err := a.rewrite(ctx, func(n *store.Node) { store.SetTunnelSources(n, want) }); err != nil {
		return fmt.Errorf("publish from which addresses node %s sends: %w", a.cfg.Name, err)
	}
	now := time.Now()
	for _, addr := range want {
		if _, ok := a.announced[addr]; !ok && !slices.Contains(have, addr) {
			a.announced[addr] = now
		}
	}
	for addr := range a.announced {
		if !slices.Contains(want, addr) {
			delete(a.announced, addr)
		}
	}
	return nil
}

// unheard returns how long to wait before this host may move from one address to
// another.
func (a *Agent) unheard(from string, to netip.Prefix) time.Duration {
	was, ok := addressOf(from)
	since, fresh := a.announced[to.Addr()]
	if !ok || was == to.Addr() || !fresh {
		return 0
	}
	return max(0, announceFor-time.Since(since))
}
