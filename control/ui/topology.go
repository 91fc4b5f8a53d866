package ui

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/control/doctor"
	"github.com/routerd/routerd/store"
)

// State is how something is, as far as this host knows.
type State string

// The states.
const (
	Up      State = "up"
	Trouble State = "trouble" // it works, and something is wrong
	Down    State = "down"
	Unknown State = "unknown" // only others know
)

// Topology is the picture of the cluster: boxes with places, and links between them.
type Topology struct {
	Node    string   `json:"node"` // whose view it is
	Width   int      `json:"width"`
	Height  int      `json:"height"`
	Compact bool     `json:"compact"` // boxes have no room for text
	Racks   []Rack   `json:"racks"`
	Hosts   []Host   `json:"hosts"`
	Links   []Link   `json:"links"`
	Notes   []string `json:"notes"` // what is not shown, and why
}

// Rack is hosts that belong together.
type Rack struct {
	Name string `json:"name"`
	By   string `json:"by"` // what makes it one: a label, or a subnet
	Box
}

// Box is a place in the picture.
type Box struct {
	X int `json:"x"`
	Y int `json:"y"`
	W int `json:"w"`
	H int `json:"h"`
}

// Host is a node of the cluster, or a BGP peer outside.
type Host struct {
	ID      string   `json:"id"`
	Name    string   `json:"name"`
	Outside bool     `json:"outside"` // it is no node of the cluster
	Self    bool     `json:"self"`
	State   State    `json:"state"`
	Reasons []string `json:"reasons"` // why it is not up
	Addrs   []string `json:"addresses"`
	ASN     uint32   `json:"asn"`   // 0: the cluster's
	Roles   []string `json:"roles"` // route reflector, drained …
	Blocks  int      `json:"blocks"`
	Used    int      `json:"used"` // addresses of its blocks
	Rack    string   `json:"rack"`
	Box
}

// Link is what two hosts have with each other.
type Link struct {
	From    string   `json:"from"`
	To      string   `json:"to"`
	Session State    `json:"session"` // empty: they should have none
	Tunnel  State    `json:"tunnel"`  // empty: none is in use
	Says    []string `json:"says"`    // of both, for people
	Path    string   `json:"path"`    // of an SVG path
}

// Session is one that a node should have.
type Session struct {
	Node, Peer string // the peer is a node, or the name of a BGPPeer
	Addr       string
	Type       string
	ASN        uint32
	Problem    string // why it is not run
}

// Facts are what the picture is made of.
type Facts struct {
	Self    *apiv1.NodeResponse
	Nodes   []*cluster.Node
	Members map[string]doctor.Member // what nodes publish of themselves
	Present map[string]bool          // whose daemons are there; nil: it is not known
	Blocks  []*cluster.Block
	Wanted  []Session                  // of all nodes
	Loads   map[string]*apiv1.HostLoad // what other hosts say of their sessions; none: they were not asked, or not heard
	Paths   *apiv1.PathsResponse
	Tunnels *apiv1.TunnelsResponse
}

// draw makes the picture.
func draw(f Facts) Topology {
	t := Topology{Node: f.Self.GetName(), Racks: []Rack{}, Hosts: []Host{}, Links: []Link{}, Notes: []string{}}
	for _, n := range slices.SortedFunc(slices.Values(f.Nodes), func(a, b *cluster.Node) int { return cmp.Compare(a.Name, b.Name) }) {
		t.Hosts = append(t.Hosts, f.host(n))
	}
	t.Links = append(t.Links, f.links(&t)...)
	if f.Present == nil {
		t.Notes = append(t.Notes, "which hosts' daemons are there is not known: the datastore does not say")
	}
	racks := map[string]string{}
	for _, n := range f.Nodes {
		racks[n.Name], _ = rackOf(n)
	}
	by := map[string]string{}
	for _, n := range f.Nodes {
		name, what := rackOf(n)
		by[name] = what
	}
	layOut(&t, by)
	return t
}

// rackOf says with which others a node is drawn: by its label, else by its subnet.
func rackOf(n *cluster.Node) (name, by string) {
	for _, l := range []string{store.LabelRack, store.LabelZone} {
		if v := n.Labels[l]; v != "" {
			return v, "label " + l
		}
	}
	for _, p := range []netip.Prefix{n.Addr.IPv4, n.Addr.IPv6} {
		if p.IsValid() {
			return p.Masked().String(), "subnet"
		}
	}
	return "no address", "its Node has none"
}

func (f Facts) host(n *cluster.Node) Host {
	h := Host{ID: n.Name, Name: n.Name, Self: n.Name == f.Self.GetName(), ASN: n.ASN, Addrs: []string{}, Roles: []string{}, Reasons: []string{}}
	for _, a := range n.Addrs() {
		h.Addrs = append(h.Addrs, a.String())
	}
	if n.ClusterID != "" || n.Reflection.Reflects {
		h.Roles = append(h.Roles, "route reflector")
	}
	if n.Drain != "" {
		h.Roles = append(h.Roles, "drained: "+string(n.Drain))
	}
	for _, b := range f.Blocks {
		if b.Holder == n.Name {
			h.Blocks++
			h.Used += b.Used
		}
	}
	h.Rack, _ = rackOf(n)
	h.State, h.Reasons = f.state(n.Name)
	return h
}

// state is how a node is: this host knows of itself, others publish it.
func (f Facts) state(node string) (State, []string) {
	conditions := f.Members[node].Conditions
	if node == f.Self.GetName() {
		conditions = append([]*apiv1.Check{f.Self.GetHealth().GetLive(), f.Self.GetHealth().GetReady()}, f.Self.GetHealth().GetConditions()...)
	} else {
		switch {
		case len(conditions) == 0:
			return Unknown, []string{"it has published nothing: routerd has not run there"}
		case f.Present != nil && !f.Present[node]:
			return Down, []string{"its daemon is absent: it has stopped, the host is down, or it cannot reach the datastore"}
		}
	}
	state, reasons := Up, []string{}
	if node != f.Self.GetName() && f.Present == nil {
		state = Unknown
	}
	for _, c := range conditions {
		if c.GetOk() {
			continue
		}
		if state != Down {
			state = Trouble
		}
		if name := strings.ToLower(c.GetName()); name == "ready" || name == "live" {
			state = Down
		}
		reasons = append(reasons, c.GetName()+": "+c.GetReason())
	}
	if node == f.Self.GetName() {
		for _, p := range f.Self.GetPeers() {
			if p.GetState() != sessionUp {
				if state == Up {
					state = Trouble
				}
				reasons = append(reasons, fmt.Sprintf("session with %s %s: %s", p.GetName(), p.GetAddress(), p.GetInfo()))
			}
		}
	}
	return state, reasons
}

// sessionUp is the state of a session that is established, as the operator's API has it.
const sessionUp = "up"

// pair is the two ends of a link, in order.
type pair struct{ a, b string }

func pairOf(x, y string) pair {
	if y < x {
		x, y = y, x
	}
	return pair{x, y}
}

// links lists what hosts have with each other, and adds the peers outside the cluster to the picture.
func (f Facts) links(t *Topology) []Link {
	self := f.Self.GetName()
	node := map[string]bool{}
	for _, n := range f.Nodes {
		node[n.Name] = true
	}
	outside := map[string]int{} // by id: where in t.Hosts
	peer := func(name, addr string, asn uint32) string {
		if node[name] {
			return name
		}
		id := "peer " + cmp.Or(addr, name)
		if _, ok := outside[id]; !ok {
			outside[id] = len(t.Hosts)
			h := Host{ID: id, Name: cmp.Or(addr, name), Outside: true, State: Unknown, ASN: asn, Addrs: []string{}, Roles: []string{}, Reasons: []string{}}
			if name != addr {
				h.Roles = append(h.Roles, "BGPPeer "+name)
			}
			t.Hosts = append(t.Hosts, h)
		}
		return id
	}
	links := map[pair]*Link{}
	link := func(x, y string) *Link {
		k := pairOf(x, y)
		if links[k] == nil {
			links[k] = &Link{From: k.a, To: k.b, Says: []string{}}
		}
		return links[k]
	}
	for _, p := range f.Self.GetPeers() {
		id := peer(p.GetName(), p.GetAddress(), p.GetAsNumber())
		l := link(self, id)
		l.Session = worse(l.Session, sessionState(p))
		l.Says = append(l.Says, describeSession(p))
		if i, ok := outside[id]; ok {
			t.Hosts[i].State = l.Session // all that is known of it
		}
	}
	for _, s := range f.Wanted {
		if s.Node == self || s.Peer == self {
			continue // this host knows better
		}
		l := link(s.Node, peer(s.Peer, s.Addr, s.ASN))
		l.addOther(f.other(s, node))
	}
	for _, u := range f.Tunnels.GetTunnels() {
		if !u.GetInUse() || !node[u.GetNode()] {
			continue
		}
		l := link(self, u.GetNode())
		l.Tunnel = worse(l.Tunnel, tunnelState(u))
		l.Says = append(l.Says, describeTunnel(u))
	}
	for _, p := range f.Paths.GetPaths() {
		if l := links[pairOf(self, p.GetNode())]; l != nil {
			l.Says = append(l.Says, describePath(p))
		}
	}
	out := make([]Link, 0, len(links))
	for _, k := range slices.SortedFunc(maps.Keys(links), func(x, y pair) int { return cmp.Or(cmp.Compare(x.a, y.a), cmp.Compare(x.b, y.b)) }) {
		out = append(out, *links[k])
	}
	return out
}

func sessionState(p *apiv1.BGPPeer) State {
	if p.GetState() == sessionUp {
		return Up
	}
	return Down
}

func tunnelState(u *apiv1.Tunnel) State {
	switch u.GetDelivers() {
	case "yes":
		return Up
	case "no":
		return Down
	}
	return Unknown
}

// worse returns the worse of two states; empty is none.
func worse(a, b State) State {
	order := []State{"", Up, Unknown, Trouble, Down}
	if slices.Index(order, a) > slices.Index(order, b) {
		return a
	}
	return b
}

func describeSession(p *apiv1.BGPPeer) string {
	s := fmt.Sprintf("session with %s (%s): %s, %s", p.GetAddress(), p.GetType(), p.GetState(), p.GetInfo())
	if p.GetCounted() {
		s += fmt.Sprintf("; %d prefixes received, %d accepted, %d advertised", p.GetReceived(), p.GetAccepted(), p.GetAdvertised())
	}
	return s
}

func describeTunnel(u *apiv1.Tunnel) string {
	s := fmt.Sprintf("tunnel %s on %s for %s: delivers %s", u.GetForm(), u.GetDevice(), u.GetInner(), cmp.Or(u.GetDelivers(), "not measured yet"))
	if u.GetMtu() > 0 {
		s += fmt.Sprintf("; %d bytes get through", u.GetMtu())
	}
	if u.GetReason() != "" {
		s += "; " + u.GetReason()
	}
	return s
}

func describePath(p *apiv1.Path) string {
	s := fmt.Sprintf("underlay to %s:", p.GetAddress())
	if !p.GetAnswers() {
		return s + " no answer"
	}
	s += " answers"
	if p.GetRtt() != nil {
		s += fmt.Sprintf(" in %s", p.GetRtt().AsDuration())
	}
	if p.GetMtu() > 0 {
		s += fmt.Sprintf("; %d bytes get through", p.GetMtu())
	}
	return s
}
