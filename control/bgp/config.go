package bgp

import (
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/routerd/routerd/control/bgp/engine"
	"github.com/routerd/routerd/control/service"
	"github.com/routerd/routerd/store"
)

// Defaults of the protocol's settings.
const (
	// DefaultASN is the AS of a node when neither the Node nor the default
	// BGPConfiguration names one.
	DefaultASN = 64512

	// DefaultPort is BGP's port (RFC 4271 section 8.2.1).
	DefaultPort = 179

	// LocalPref is the LOCAL_PREF of what the node originates unless the default
	// BGPConfiguration gives its routes another priority than 1024: Calico's
	// encoding of a route's metric, 2147483647 - 1024.
	LocalPref = 2147483647 - 1024

	// MeshMaxPrefixes is how many prefixes of a family a node of the mesh may announce
	// unless the default BGPConfiguration says otherwise: its blocks and the addresses that
	// it borrowed, of which a host full of workloads has some hundreds.
	MeshMaxPrefixes = 10_000

	defaultRestartTime = 120 * time.Second
	defaultHoldTime    = 90 * time.Second

	// maxRestartTime is what the 12 bits of RFC 4724 section 3 can say.
	maxRestartTime = 4095 * time.Second
)

// PeerType says where a session comes from, in the words of `node status`.
type PeerType string

// The types of a peer.
const (
	PeerMesh      PeerType = "node-to-node mesh"
	PeerReflected PeerType = "reflector"     // one of the two is a reflector that the nodes have chosen
	PeerNode      PeerType = "node specific" // a BGPPeer with node or nodeSelector
	PeerGlobal    PeerType = "global"        // a BGPPeer for all nodes
)

// Injected is what a program on the host has it announce a prefix with.
type Injected struct {
	Owner     string
	NextHop   netip.Addr // invalid: the node
	LocalPref uint32     // 0: that of the node's own routes
}

// Peer is one session that the node should have. Peers are comparable.
type Peer struct {
	Name string // the node, or the BGPPeer resource
	Type PeerType
	Addr netip.Addr // invalid when Problem says that it is not known
	Port uint16
	ASN  uint32

	// Beside says that another peer has the address, at another port: who it is, its port says.
	Beside bool

	// Interface is the device on whose link the peer is, for a session over
	// link-local addresses; empty: a session between configured addresses. Addr
	// is then what spec.peerIP says, or invalid until the neighbour is known.
	Interface string

	// Found says that Addr is whoever is on the link: no address is configured.
	Found bool

	// Range is where neighbours connect from that no BGPPeer names one by one; invalid: the peer is named. With no Addr
	// it is the range itself, of which up to Limit have a session at a time, and otherwise one of them.
	Range netip.Prefix
	Limit int

	// Waiting says what of the link is missing; empty: nothing is.
	Waiting string

	// ExtendedNextHop says that IPv4 goes over the IPv6 session too (RFC 8950).
	ExtendedNextHop bool

	// Problem says why the session is not run: a setting that this version
	// does not have, or one that makes no sense. Such a peer is only shown.
	// A session is never run with half of its settings.
	Problem string

	Passive   bool       // wait for the peer to connect
	Local     bool       // the peer is a program on this host: what it announces the node announces
	Source    netip.Addr // address to connect from; invalid: the kernel chooses
	PoolsOnly bool       // accept only prefixes inside pools: the peer is a node of the cluster

	LocalASN    uint32        // the own AS on this session, which decides between iBGP and eBGP; 0: the node's
	ClusterID   netip.Addr    // valid: the peer is this node's client for route reflection (RFC 4456)
	Reflect     bool          // routes of pools that iBGP peers sent are passed on: this node reflects
	TTLSecurity uint8         // hops to the peer for the check of RFC 5082; 0: no check
	MaxPrefixes uint32        // the session ends when the peer announces more of a family; 0: no limit
	ReachableBy netip.Addr    // gateway of a host route to the peer; invalid: none
	NextHopMode NextHopMode   // of what is announced
	Filters     string        // names of BGPFilters in order, joined by commas
	Secret      SecretRef     // names the password; zero: none
	Password    Password      // what Secret holds, filled in by the controller; without a Secret one of the cluster's keys, or none
	Others      Passwords     // that the peer may have instead for a while
	AO          AOKeys        // of TCP-AO, in the place of a password, with what the secrets hold filled in by the controller
	Unread      string        // which of AO are left out, or what is used though it cannot be read any more, and why; empty: nothing
	AllowOwnASN uint8         // how often the own AS may be in a received path
	StaleTime   time.Duration // for how long stale routes are kept after the restart time (RFC 9494); 0: not
	RestartTime time.Duration // graceful restart time that is announced to the peer
	HoldTime    time.Duration
	Keepalive   time.Duration // 0: a third of the hold time
	BFD         store.BFD     // that watches the peer; zero: none
}

// id is what the speaker and its engine know the peer by.
func (p Peer) id() netip.Addr {
	if p.Beside {
		return engine.Identity(p.Addr, p.Port)
	}
	return p.Addr
}

// awaited reports whether the session is one for the speaker once its neighbour is found.
func (p Peer) awaited() bool { return p.wanted() && p.Waiting != "" }

// runs reports whether the session is one for the speaker, not just for show.
func (p Peer) runs() bool { return p.wanted() && p.Waiting == "" && p.Addr.IsValid() }

// listens reports whether it is a range whose neighbours may connect.
func (p Peer) listens() bool { return p.wanted() && p.Range.IsValid() && !p.Addr.IsValid() }

// betweenNodes reports whether the session is one that nodes have with each other without a BGPPeer.
func (p Peer) betweenNodes() bool { return p.Type == PeerMesh || p.Type == PeerReflected }

// wanted reports whether the session is one for the speaker once what it waits
// for is there.
func (p Peer) wanted() bool { return p.Problem == "" }

// sameSession reports whether p, as a session is to be, needs the same settings as q, as
// it is, so that a change from q to p must not touch the session. It is not the same in
// the other direction: a session of the mesh stays when a BGPPeer takes it over.
func (p Peer) sameSession(q Peer) bool {
	p.Name, p.Type, p.PoolsOnly = q.Name, q.Type, q.PoolsOnly
	p.Reflect, p.ReachableBy, p.NextHopMode, p.Filters = q.Reflect, q.ReachableBy, q.NextHopMode, q.Filters
	p.BFD, p.ClusterID = q.BFD, q.ClusterID
	p.Range, p.Limit = q.Range, q.Limit
	if p.betweenNodes() {
		p.MaxPrefixes = q.MaxPrefixes // of a reflector it is another than of a node of the mesh
	}
	if p.Secret == (SecretRef{}) && q.Secret == (SecretRef{}) {
		p.Password, p.Others = q.Password, q.Others // of the cluster, which are replaced under sessions
	}
	if p.Secret != (SecretRef{}) && q.Secret != (SecretRef{}) && p.Password != (Password{}) && q.Password != (Password{}) {
		p.Password = q.Password // the session goes on if the peer has the new one before the hold time is over
	}
	p.Secret, p.Unread = q.Secret, q.Unread
	if p.AO.follow(q.AO) {
		p.AO = q.AO
	}
	return p == q
}

// ibgp reports whether the session stays inside the AS that it has on this
// side.
func (p Peer) ibgp(own uint32) bool { return p.ASN == p.localASN(own) }

// localASN returns the own AS on the session, given the node's.
func (p Peer) localASN(own uint32) uint32 {
	if p.LocalASN != 0 {
		return p.LocalASN
	}
	return own
}

// NextHopMode says what becomes of the next hop of an announced route
// (BGPPeer's nextHopMode).
type NextHopMode uint8

// The modes.
const (
	NextHopAuto NextHopMode = iota // BGP's own rule (RFC 4271 section 5.1.3)
	NextHopSelf                    // the own address on the session
	NextHopKeep                    // as it was received or originated
)

// Config is all that a speaker should do. It is a value: build a new one
// instead of changing one that was handed to [Speaker.Apply].
type Config struct {
	Node        string
	ASN         uint32
	RouterID    netip.Addr
	ListenPort  uint16
	ListenAddrs []netip.Addr

	Peers []Peer // those that run and those that cannot, in the order of status

	// Callers are nodes that may connect from the range of one of Peers, with what they sign the session by.
	Callers map[netip.Addr]Password `json:"-"`

	Announce []netip.Prefix                      // what the node originates, sorted
	Tags     map[netip.Prefix]string             // communities of what is in Announce, separated by spaces
	Leaving  map[netip.Prefix]bool               // of Announce, what is about to go: others are to be preferred
	Services map[netip.Addr]service.Announcement // addresses of Announce that are announced by themselves, for a Service
	Injected map[netip.Prefix]Injected           // of Announce, what others on the host have it announce
	Hidden   []netip.Prefix                      // not announced, with everything inside, unless a filter accepts it
	NextHop  netip.Addr                          // of the IPv4 prefixes of Announce; invalid: there are none
	NextHop6 netip.Addr                          // of the IPv6 prefixes

	Drain store.Drain // how far the host is drained; empty: not at all

	LocalPref  uint32 // of the IPv4 prefixes of Announce; 0: the constant
	LocalPref6 uint32 // of the IPv6 prefixes

	// What import is judged by; all sorted.
	Pools    []netip.Prefix // where nodes of the cluster may announce
	Own      []netip.Prefix // refused, with everything inside
	Borrowed []netip.Prefix `json:"Lent"` // single addresses inside Own that other nodes borrowed

	// What others on the host may inject is judged by these beside Pools.
	InjectAllow []netip.Prefix
	NodesAt     map[netip.Addr][]string // names of the nodes that have an address

	Filters map[string]Filter         // those that Peers name
	Links   map[string][]netip.Prefix // subnets by device, for the filters that ask for an interface

	Collectors []store.BMP // to which is sent what is received and chosen

	// Ignored names settings that this version does not act upon and that
	// concern no single session.
	Ignored []string
}

// filtersOf returns the filters of a peer in order; one that is not known is
// left out, and the peer has a Problem then.
func (c *Config) filtersOf(p Peer) []Filter {
	if p.Filters == "" {
		return nil
	}
	var l []Filter
	for name := range strings.SplitSeq(p.Filters, ",") {
		l = append(l, c.Filters[name])
	}
	return l
}

// sameIdentity reports whether a speaker can go from one to the other without
// new sessions.
func (c *Config) sameIdentity(d *Config) bool {
	return c.ASN == d.ASN && c.RouterID == d.RouterID && c.NextHop == d.NextHop
}

func (c *Config) sameListener(d *Config) bool {
	return c.ListenPort == d.ListenPort && slices.Equal(c.ListenAddrs, d.ListenAddrs)
}

// sameExport reports whether a peer, as it is in both, gets the same advertised, but
// for what is hidden.
func (c *Config) sameExport(p Peer, d *Config, q Peer) bool {
	return c.Drain == d.Drain && p.NextHopMode == q.NextHopMode && p.Reflect == q.Reflect &&
		(!p.Reflect || slices.Equal(c.Pools, d.Pools)) && c.sameFilters(p, d, q, true)
}

// sameRules reports whether equal peers are judged by the same rules in both, but for what is hidden.
func (c *Config) sameRules(d *Config) bool {
	return c.Drain == d.Drain && slices.Equal(c.Pools, d.Pools) && reflect.DeepEqual(c.Filters, d.Filters) && reflect.DeepEqual(c.Links, d.Links)
}

// sameFilters reports whether a peer's filters of a direction are the same in
// both.
func (c *Config) sameFilters(p Peer, d *Config, q Peer, export bool) bool {
	a, b := c.filtersOf(p), d.filtersOf(q)
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		for _, six := range []bool{false, true} {
			if !reflect.DeepEqual(a[i].rules(export, six), b[i].rules(export, six)) {
				return false
			}
		}
		if a[i].asksLinks() && !reflect.DeepEqual(c.Links, d.Links) {
			return false
		}
	}
	return true
}

// nextHopOf returns the next hop of what the node originates. Where it has no
// address of the family, each session gives its own.
func (c *Config) nextHopOf(p netip.Prefix) netip.Addr {
	if i := c.Injected[p]; i.NextHop.IsValid() {
		return i.NextHop
	}
	hop, none := c.NextHop, netip.IPv4Unspecified()
	if p.Addr().Is6() {
		hop, none = c.NextHop6, netip.IPv6Unspecified()
	}
	if !hop.IsValid() {
		return none
	}
	return hop
}

// restartTime is the longest time that any peer has to come back.
func (c *Config) restartTime() time.Duration {
	longest := time.Duration(0)
	for _, p := range c.Peers {
		if p.wanted() {
			longest = max(longest, p.RestartTime)
		}
	}
	return longest
}
