package bgp

import (
	"net/netip"
	"slices"
	"time"
)

// Defaults of the protocol's settings.
const (
	// DefaultASN is the AS of a node when neither the Node nor the default
	// BGPConfiguration names one.
	DefaultASN = 64512

	// DefaultPort is BGP's port (RFC 4271 section 8.2.1).
	DefaultPort = 179

	// LocalPref is the LOCAL_PREF of what the node originates: Calico's
	// encoding of a route's metric, 2147483647 - 1024.
	LocalPref = 2147483647 - 1024

	defaultRestartTime = 120 * time.Second
	defaultHoldTime    = 90 * time.Second

	// maxRestartTime is what the 12 bits of RFC 4724 section 3 can say.
	maxRestartTime = 4095 * time.Second
)

// PeerType says where a session comes from, in the words of `node status`.
type PeerType string

// The types of a peer.
const (
	PeerMesh   PeerType = "node-to-node mesh"
	PeerNode   PeerType = "node specific" // a BGPPeer with node or nodeSelector
	PeerGlobal PeerType = "global"        // a BGPPeer for all nodes
)

// Peer is one session that the node should have. Peers are comparable.
type Peer struct {
	Name string // the node, or the BGPPeer resource
	Type PeerType
	Addr netip.Addr // invalid when Problem says that it cannot be told
	Port uint16
	ASN  uint32

	// Problem says why the session is not run: a setting that this version
	// does not have, or one that makes no sense. Such a peer is only shown.
	// A session is never run with half of its settings.
	Problem string

	Passive   bool       // wait for the peer to connect
	Source    netip.Addr // address to connect from; invalid: the kernel chooses
	PoolsOnly bool       // accept only prefixes inside pools: the peer is a node of the cluster

	AllowOwnASN uint8         // how often the own AS may be in a received path
	RestartTime time.Duration // graceful restart time that is announced to the peer
	HoldTime    time.Duration
	Keepalive   time.Duration // 0: a third of the hold time
}

// runs reports whether the session is one for the speaker, not just for show.
func (p Peer) runs() bool { return p.Problem == "" }

// sameSession reports whether a and b need the same settings in GoBGP, so that
// a change from one to the other must not touch the session.
func (p Peer) sameSession(q Peer) bool {
	p.Name, p.Type, p.PoolsOnly = q.Name, q.Type, q.PoolsOnly
	return p == q
}

// Config is all that a speaker should do. It is a value: build a new one
// instead of changing one that was handed to [Speaker.Apply].
type Config struct {
	Node        string
	ASN         uint32
	RouterID    netip.Addr
	ListenPort  uint16
	ListenAddrs []netip.Addr

	Peers []Peer // those that run and those that cannot, in the order of status

	Announce []netip.Prefix // what the node originates, sorted
	NextHop  netip.Addr     // of the IPv4 prefixes of Announce; invalid: there are none
	NextHop6 netip.Addr     // of the IPv6 prefixes

	// What import is judged by; all sorted.
	Pools []netip.Prefix // where nodes of the cluster may announce
	Own   []netip.Prefix // refused, with everything inside
	Lent  []netip.Prefix // single addresses inside Own that belong to other nodes

	// Ignored names settings that this version does not act upon and that
	// concern no single session.
	Ignored []string
}

// sameIdentity reports whether a speaker can go from one to the other without
// new sessions.
func (c *Config) sameIdentity(d *Config) bool {
	return c.ASN == d.ASN && c.RouterID == d.RouterID && c.NextHop == d.NextHop
}

func (c *Config) sameListener(d *Config) bool {
	return c.ListenPort == d.ListenPort && slices.Equal(c.ListenAddrs, d.ListenAddrs)
}

func (c *Config) sameImport(d *Config) bool {
	return slices.Equal(c.Pools, d.Pools) && slices.Equal(c.Own, d.Own) &&
		slices.Equal(c.Lent, d.Lent) && slices.Equal(c.cluster(), d.cluster())
}

// cluster returns the addresses of the peers that are nodes.
func (c *Config) cluster() []netip.Addr {
	var l []netip.Addr
	for _, p := range c.Peers {
		if p.runs() && p.PoolsOnly {
			l = append(l, p.Addr)
		}
	}
	slices.SortFunc(l, netip.Addr.Compare)
	return l
}

// nextHopOf returns the next hop of what the node originates.
func (c *Config) nextHopOf(p netip.Prefix) netip.Addr {
	if p.Addr().Is4() {
		return c.NextHop
	}
	return c.NextHop6
}

// advertised counts what a peer is told: a session carries the routes of its
// own family.
func (c *Config) advertised(peer netip.Addr) int {
	n := 0
	for _, p := range c.Announce {
		if p.Addr().Is4() == peer.Is4() {
			n++
		}
	}
	return n
}

// restartTime is the longest time that any peer has to come back.
func (c *Config) restartTime() time.Duration {
	longest := time.Duration(0)
	for _, p := range c.Peers {
		if p.runs() {
			longest = max(longest, p.RestartTime)
		}
	}
	return longest
}
