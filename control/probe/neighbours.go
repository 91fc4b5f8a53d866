package probe

import (
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/neighbour"
)

// neighbours asks the kernel's neighbour table which peers are neighbours. One
// goroutine uses it.
type neighbours struct {
	asker    Neighbours
	interval time.Duration

	peers    map[entry]peerKey
	gateways map[entry]bool
	macs     map[entry]dataplane.MAC // of those two
	answers  map[entry]dataplane.Answer
	links    map[string]int
	hosts    map[peerKey]hostEntry
	// latest is what the kernel last said of every neighbour: it says nothing
	// more of one that answers, should it become a peer later.
	latest map[entry]neighbour.Event
	fixed  map[entry]bool // peers that somebody entered by hand

	next   time.Time
	rounds int
	failed bool
}

// entry is an address on a device, as the kernel names it.
type entry struct {
	link int
	addr netip.Addr
}

// hostEntry is what must not change for an answer to stay true.
type hostEntry struct {
	entry entry
	local netip.Prefix
}

// maxNeighbours is how many peers are asked. The kernel keeps 1,024 neighbours
// unless it is told otherwise (gc_thresh3), and the host needs some itself;
// peers beyond that are taken by their subnets.
const maxNeighbours = 512

// maxLatest bounds what is remembered; it is more than the kernel keeps unless
// it is told otherwise.
const maxLatest = 4096

func newNeighbours(n Neighbours, interval time.Duration) *neighbours {
	return &neighbours{
		asker: n, interval: interval, peers: map[entry]peerKey{}, gateways: map[entry]bool{}, macs: map[entry]dataplane.MAC{},
		answers: map[entry]dataplane.Answer{}, links: map[string]int{}, hosts: map[peerKey]hostEntry{},
		latest: map[entry]neighbour.Event{}, fixed: map[entry]bool{},
	}
}

// mayBeNear reports whether the peer's own address may be on this host's
// device: by the prefix of some address there, or by a route without a gateway.
// A recorded length of 32 says nothing.
func mayBeNear(t *dataplane.ProbeTarget, u dataplane.Underlay) bool {
	a := t.Registered
	if !a.IsValid() || t.Uplink == "" {
		return false
	}
	if !t.Local.IsSingleIP() && t.Local.Masked().Contains(a) {
		return true
	}
	if slices.ContainsFunc(u.Addresses, func(x dataplane.UnderlayAddress) bool {
		return x.Link == t.Uplink && !x.Prefix.IsSingleIP() && x.Prefix.Masked().Contains(a)
	}) {
		return true
	}
	best := -1
	for i, r := range u.Routes {
		if r.Prefix.Contains(a) && (best < 0 || r.Prefix.Bits() > u.Routes[best].Prefix.Bits()) {
			best = i
		}
	}
	return best >= 0 && u.Routes[best].Link == t.Uplink && !u.Routes[best].Gateway.IsValid()
}

// set sets the targets and the network. It reports whether the gateway is
// another, and returns what the kernel said of new peers before.
func (v *neighbours) set(ts []dataplane.ProbeTarget, u dataplane.Underlay) (moved bool, earlier []neighbour.Event) {
	v.links = map[string]int{}
	for _, l := range u.Links {
		v.links[l.Name] = l.Index
	}
	gateways := map[entry]bool{}
	for _, r := range u.Routes {
		if i, ok := v.links[r.Link]; ok && r.Gateway.IsValid() {
			gateways[entry{i, r.Gateway}] = true
		}
	}
	for g := range gateways {
		moved = moved || !v.gateways[g]
	}
	moved = moved && len(v.gateways) > 0
	v.gateways = gateways
	peers, hosts := map[entry]peerKey{}, map[peerKey]hostEntry{}
	for n := range ts {
		t := &ts[n]
		if t.Tunnel != (dataplane.ProbeTunnel{}) {
			continue
		}
		i, ok := v.links[t.Uplink]
		if !ok || len(peers) >= maxNeighbours || !mayBeNear(t, u) {
			continue
		}
		at, k := entry{i, t.Registered}, peerKey{t.Node, t.Family}
		peers[at], hosts[k] = k, hostEntry{at, t.Local}
		if e, ok := v.latest[at]; ok {
			v.fixed[at] = e.Fixed
		}
		if v.hosts[k] != hosts[k] {
			delete(v.answers, at)
			v.next = time.Time{} // ask now
			if e, ok := v.latest[at]; ok {
				earlier = append(earlier, e)
			}
		}
	}
	v.peers, v.hosts = peers, hosts
	for at := range v.macs {
		if _, ok := peers[at]; !ok && !gateways[at] {
			delete(v.macs, at)
			delete(v.answers, at)
		}
	}
	maps.DeleteFunc(v.fixed, func(at entry, _ bool) bool { _, ok := peers[at]; return !ok })
	return moved, earlier
}

// ask asks whom it is time to ask, and returns when to call again. Neighbours
// that answer are left to the kernel most of the time, which asks those that
// are in use by itself.
func (v *neighbours) ask(now time.Time, log *slog.Logger) time.Time {
	if v.asker == nil || len(v.peers) == 0 {
		return time.Time{}
	}
	if now.Before(v.next) {
		return v.next
	}
	v.next = now.Add(v.interval)
	v.rounds++
	failed := false
	for at := range v.peers {
		if v.fixed[at] || v.answers[at] == dataplane.Yes && v.rounds%slower != 0 {
			continue // who entered it by hand wants it so, and asking would undo that
		}
		if err := v.asker.Ask(at.link, at.addr); err != nil {
			if !v.failed && !failed {
				log.Warn("neighbours are not asked", "error", err)
			}
			failed = true
		}
	}
	v.failed = failed
	return v.next
}

// note notes what the kernel says and returns what that means for peers.
func (v *neighbours) note(e neighbour.Event) map[peerKey]dataplane.Answer {
	at := entry{e.LinkIndex, e.Addr}
	if len(v.latest) >= maxLatest {
		clear(v.latest)
	}
	v.latest[at] = e
	k, isPeer := v.peers[at]
	if !isPeer && !v.gateways[at] {
		return nil
	}
	if !e.MAC.IsZero() {
		v.macs[at] = e.MAC
	}
	if !isPeer {
		return nil
	}
	v.fixed[at] = e.Fixed
	a := e.Answer
	switch {
	case a == dataplane.Unknown:
		if v.answers[at] != dataplane.Yes && !e.MAC.IsZero() && v.asker != nil {
			// It spoke to us: it is there again, or for the first time. A
			// refusal means the entry is gone; it will be asked in its turn.
			_ = v.asker.Probe(at.link, at.addr, e.MAC)
		}
		return nil
	case a == dataplane.Yes && v.proxied(at):
		// A router that answers for others: packets for workloads would end
		// there.
		a = dataplane.No
	}
	v.answers[at] = a
	return map[peerKey]dataplane.Answer{k: a}
}

// proxied reports whether the gateway, or another peer, has the same MAC.
func (v *neighbours) proxied(at entry) bool {
	mac := v.macs[at]
	if mac.IsZero() {
		return false
	}
	for o, m := range v.macs {
		if o.link == at.link && o.addr != at.addr && m == mac && o.addr.Is4() == at.addr.Is4() {
			return true
		}
	}
	return false
}
