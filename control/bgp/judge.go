package bgp

import (
	"fmt"
	"net/netip"
	"path"
	"slices"
	"strings"

	"github.com/gaissmai/bart"

	"github.com/routerd/routerd/control/bgp/engine/attrs"
	"github.com/routerd/routerd/control/bgp/engine/wire"
	"github.com/routerd/routerd/store"
)

// judged is what the policies see of a route.
type judged struct {
	prefix     netip.Prefix
	nextHop    netip.Addr // with the device where it means something on one link only
	localPref  uint32     // 0: it has none
	own        bool       // originated here
	local      bool       // a program on this host announces it
	ibgp       bool       // learned from an iBGP peer
	leaving    bool       // it is about to go (GRACEFUL_SHUTDOWN, RFC 8326)
	originator netip.Addr // ORIGINATOR_ID; invalid: it has none
	attributes
}

// attributes are those of a route that are seldom looked at.
type attributes interface {
	CountAS(as uint32) int
	BeginsWith(path []uint32) bool
	HasCommunity(c uint32) bool
	HasLarge(c attrs.Large) bool
}

// verdict is what becomes of a route.
type verdict struct {
	accept bool
	edit   *attrs.Edit // of what is accepted; nil: it stays as it is
	why    why
	rule   *rule      // that decided; nil: none did
	hop    netip.Addr // that is the reason
	text   string     // likewise
}

// why is the reason of a verdict.
type why uint8

const (
	whyNothing why = iota // nothing is special
	whyRule
	whyMartian
	whyBorrowed
	whyOwn
	whyNoPool
	whyDefault
	whyNextHop
	whyHidden
	whyReflected
	whyLearned
	whyDrained
	whyInjected
)

// reason puts a verdict in the operator's words.
func (v verdict) reason() string {
	switch v.why {
	case whyRule:
		return v.rule.String()
	case whyInjected:
		return v.text
	case whyNextHop:
		return fmt.Sprintf("its next hop, %s, is no other host's address", v.hop)
	}
	return [...]string{
		whyNothing:   "",
		whyMartian:   "loopback, link-local, multicast or reserved",
		whyBorrowed:  "an address of this node's block that another node borrowed",
		whyOwn:       "inside this node's own subnet, blocks or borrowed addresses, or a range of services",
		whyNoPool:    "outside the pools, from a node of the cluster",
		whyDefault:   "the default route: only a filter that names exactly it accepts it",
		whyHidden:    "its pool has disableBGPExport",
		whyReflected: "reflected",
		whyLearned:   "learned routes are not passed on",
		whyDrained:   "this host is drained: it advertises no routes",
	}[v.why]
}

// policy is what a [Config] says of routes, made for many of them: which are let
// in, which are passed on, and what changes of them. It is never changed.
type policy struct {
	c                            *Config
	running                      map[netip.Addr]*Peer // of c, by what the engine knows them by
	pools, own, borrowed, hidden *bart.Lite
	martians                     *bart.Lite
	imports, exports             map[policyKey][wire.Families][]rule
}

// policyKey is what of a peer decides on its rules.
type policyKey struct {
	filters string
	ibgp    bool
}

func newPolicy(c *Config) *policy {
	p := &policy{
		c: c, pools: tableOf(c.Pools), own: tableOf(c.Own), borrowed: tableOf(c.Borrowed), hidden: tableOf(c.Hidden), martians: tableOf(martianRanges()),
		imports: map[policyKey][wire.Families][]rule{}, exports: map[policyKey][wire.Families][]rule{},
		running: make(map[netip.Addr]*Peer, len(c.Peers)),
	}
	for i := range c.Peers {
		q := &c.Peers[i]
		if !q.runs() {
			continue
		}
		p.running[q.id()] = q
		k := c.keyOf(*q)
		if _, ok := p.imports[k]; !ok {
			p.imports[k], p.exports[k] = c.rulesOf(*q, false), c.rulesOf(*q, true)
		}
	}
	return p
}

// peer returns a peer that runs; the zero value if none does.
func (p *policy) peer(id netip.Addr) Peer {
	if q := p.running[id]; q != nil {
		return *q
	}
	return Peer{}
}

func (c *Config) keyOf(p Peer) policyKey { return policyKey{p.Filters, p.ibgp(c.ASN)} }

func tableOf(list []netip.Prefix) *bart.Lite {
	t := &bart.Lite{}
	for _, p := range list {
		t.Insert(p)
	}
	return t
}

// martianRanges are never accepted from anybody: this host, loopback, link-local,
// multicast and reserved space (RFC 6890, RFC 5771), and IPv4 addresses in IPv6's
// clothes.
func martianRanges() []netip.Prefix {
	var out []netip.Prefix
	for _, s := range []string{
		"0.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "224.0.0.0/4", "240.0.0.0/4", "::/127", "::ffff:0:0/96", "fe80::/10", "ff00::/8",
	} {
		out = append(out, netip.MustParsePrefix(s))
	}
	return out
}

// rule is a rule of a filter, made for many routes.
type rule struct {
	FilterRule
	filter    string
	at        int // in the filter
	export    bool
	six       bool
	community uint32      // of two numbers
	large     attrs.Large // of three
	via       map[netip.Addr]bool
	edit      *attrs.Edit
}

func (r *rule) String() string {
	direction, family, verb := "import", "V4", "rejects"
	if r.export {
		direction = "export"
	}
	if r.six {
		family = "V6"
	}
	if r.Accept {
		verb = "accepts"
	}
	return fmt.Sprintf("BGPFilter %s: %s%s[%d] %s it", r.filter, direction, family, r.at, verb)
}

// rulesOf returns the rules of a peer's filters, those that are for its type.
func (c *Config) rulesOf(p Peer, export bool) (out [wire.Families][]rule) {
	names := strings.Split(p.Filters, ",")
	for i, f := range c.filtersOf(p) {
		for _, family := range families() {
			six := family == wire.IPv6
			for j, r := range f.rules(export, six) {
				if r.PeerType == "" || (r.PeerType == "iBGP") == p.ibgp(c.ASN) {
					out[family] = append(out[family], c.ruleOf(r, names[i], j, export, six))
				}
			}
		}
	}
	return out
}

func (c *Config) ruleOf(r FilterRule, filter string, at int, export, six bool) rule {
	out := rule{FilterRule: r, filter: filter, at: at, export: export, six: six, edit: editOf(r.Operations)}
	switch n, _ := parseCommunity(r.Community); len(n) { // parseFilter refuses what is none
	case 2:
		out.community = n[0]<<16 | n[1]
	case 3:
		out.large = attrs.Large(n)
	}
	if r.Interface != "" {
		out.via = c.nextHopsOn(r.Interface)
	}
	return out
}

// nextHopsOn returns the next hops that a device whose name matches a glob leads
// to: those of the peers on its subnets or its link.
func (c *Config) nextHopsOn(glob string) map[netip.Addr]bool {
	subnets := subnetsOf(c.Links, glob)
	out := map[netip.Addr]bool{}
	for _, p := range c.Peers {
		on := func(s netip.Prefix) bool { return s.Contains(p.Addr) }
		if p.runs() && (p.onDevice(glob) || slices.ContainsFunc(subnets, on)) {
			out[p.Addr] = true
		}
	}
	return out
}

// onDevice reports whether the session is over the link of a device that a glob
// matches.
func (p Peer) onDevice(glob string) bool {
	ok, err := path.Match(glob, p.Interface)
	return err == nil && ok && p.Interface != ""
}

// subnetsOf returns the subnets of the devices whose names match a glob.
func subnetsOf(links map[string][]netip.Prefix, glob string) []netip.Prefix {
	var out []netip.Prefix
	for name, prefixes := range links {
		if ok, err := path.Match(glob, name); err == nil && ok {
			for _, p := range prefixes {
				if p = p.Masked(); !slices.Contains(out, p) {
					out = append(out, p)
				}
			}
		}
	}
	slices.SortFunc(out, netip.Prefix.Compare)
	return out
}

// editOf is what a rule's operations change of a route; nil: nothing.
func editOf(operations []Operation) *attrs.Edit {
	if len(operations) == 0 {
		return nil
	}
	e := &attrs.Edit{}
	for _, op := range operations {
		switch n, _ := parseCommunity(op.AddCommunity); {
		case len(n) == 2:
			e.Communities = append(e.Communities, n[0]<<16|n[1])
		case len(n) == 3:
			e.Large = append(e.Large, attrs.Large(n))
		case op.SetPriority != 0:
			pref := localPref(op.SetPriority)
			e.LocalPref = &pref
		default:
			e.Prepend = slices.Concat(op.PrependAS, e.Prepend)
		}
	}
	return e
}

// decide returns the first rule that matches; nil: none does.
func decide(rules []rule, r *judged) *rule {
	for i := range rules {
		if rules[i].matches(r) {
			return &rules[i]
		}
	}
	return nil
}

// matches reports whether all conditions of a rule hold.
func (r *rule) matches(x *judged) bool {
	bits := x.prefix.Bits()
	switch {
	case bits == 0 && !r.export && r.Accept && (!r.CIDR.IsValid() || r.CIDR.Bits() != 0 || r.Max != 0 || r.Not):
		return false // only a rule that names exactly it lets the default route in
	case r.CIDR.IsValid() && r.Not == r.holds(x.prefix):
		return false
	case !r.CIDR.IsValid() && (bits < r.Min || bits > r.Max):
		return false
	case r.export && x.own && (r.RemotePeers || r.Interface != ""):
		return false
	case r.Community != "" && !r.tagged(x):
		return false
	case len(r.ASPath) > 0 && !x.BeginsWith(r.ASPath):
		return false
	case r.Priority != 0 && x.localPref != localPref(r.Priority):
		return false
	}
	return r.Interface == "" || r.via[x.nextHop]
}

// tagged reports whether a route has the rule's community.
func (r *rule) tagged(x *judged) bool {
	if isLarge(r.Community) {
		return x.HasLarge(r.large)
	}
	return x.HasCommunity(r.community)
}

// holds reports whether a prefix is what the rule's CIDR and lengths describe.
func (rule FilterRule) holds(p netip.Prefix) bool {
	return rule.CIDR.Contains(p.Addr()) && p.Bits() >= rule.CIDR.Bits() && p.Bits() >= rule.Min && p.Bits() <= rule.Max
}

// importsOf returns the judge of what a peer sends, as the package's comment says.
func (p *policy) importsOf(peer Peer) func(*judged) verdict {
	rules := p.imports[p.c.keyOf(peer)]
	last := derived{}
	decided := func(r *judged) verdict {
		switch {
		case p.martians.LookupPrefix(r.prefix):
			return verdict{why: whyMartian}
		case peer.Local:
			if why := p.c.refusesInjection(r.prefix); why != "" {
				return verdict{why: whyInjected, text: why + "; it may not be injected"}
			}
		case !p.c.usable(r.nextHop):
			return verdict{why: whyNextHop, hop: r.nextHop}
		case peer.PoolsOnly && p.borrowed.LookupPrefix(r.prefix):
			return verdict{accept: true, why: whyBorrowed}
		case p.own.LookupPrefix(r.prefix):
			return verdict{why: whyOwn}
		case peer.PoolsOnly && !p.pools.LookupPrefix(r.prefix):
			return verdict{why: whyNoPool}
		}
		if d := decide(rules[familyOf(r.prefix.Addr())], r); d != nil {
			return verdict{accept: d.Accept, edit: d.edit, why: whyRule, rule: d}
		}
		if r.prefix.Bits() == 0 && !peer.Local {
			return verdict{why: whyDefault}
		}
		return verdict{accept: true}
	}
	asOwn := derived{}
	return func(r *judged) verdict {
		v := decided(r)
		if v.accept && r.leaving && !r.ibgp {
			v.edit = last.edit(v.edit, func(e *attrs.Edit) { e.LocalPref = new(uint32) }) // RFC 8326 section 4.2
		}
		if v.accept && peer.Local {
			pref := p.c.localPrefOf(r.prefix)
			v.edit = asOwn.edit(v.edit, func(e *attrs.Edit) {
				if e.LocalPref == nil { // no filter has set it
					e.LocalPref = &pref
				}
			})
		}
		return v
	}
}

// derived are changes that another one is made of, of equal ones one.
type derived map[*attrs.Edit]*attrs.Edit

func (d derived) edit(e *attrs.Edit, change func(*attrs.Edit)) *attrs.Edit {
	out, ok := d[e]
	if !ok {
		out = &attrs.Edit{}
		if e != nil {
			*out = *e
		}
		change(out)
		d[e] = out
	}
	return out
}

// exportsOf returns the judge of what is advertised to a peer, apart from BGP's own rules.
func (p *policy) exportsOf(peer Peer) func(*judged) verdict {
	rules := p.exports[p.c.keyOf(peer)]
	ibgp := peer.ibgp(p.c.ASN)
	hops, passing := newNextHops(peer, rules), derived{}
	return func(r *judged) verdict {
		if p.c.Drain == store.DrainWithdrawn {
			return verdict{why: whyDrained}
		}
		v := verdict{why: whyLearned}
		if d := decide(rules[familyOf(r.prefix.Addr())], r); d != nil {
			v = verdict{accept: d.Accept, edit: d.edit, why: whyRule, rule: d}
		} else {
			switch {
			case p.hidden.LookupPrefix(r.prefix):
				v.why = whyHidden
			case r.own, r.local:
				v = verdict{accept: true}
			case peer.Reflect && ibgp && r.ibgp && p.pools.LookupPrefix(r.prefix):
				v = verdict{accept: true, why: whyReflected}
			}
		}
		if v.accept {
			v.edit = hops.edit(r, v.edit)
		}
		if v.accept && !r.own && p.c.Drain == store.DrainShift {
			v.edit = passing.edit(v.edit, leave)
		}
		return v
	}
}

// ownHop lists the families of which the node's own routes carry the session's
// address as their next hop, not the node's.
func (p Peer) ownHop() []wire.Family {
	switch {
	case p.Interface != "":
		return p.carries()
	case p.ExtendedNextHop:
		return []wire.Family{wire.IPv4}
	}
	return nil
}

// nextHops says what becomes of the next hop of what is advertised to a peer.
type nextHops struct {
	mode  attrs.NextHopMode
	own   [wire.Families]bool // the node's own routes carry the session's address
	edits map[editKey]*attrs.Edit
}

type editKey struct {
	edit *attrs.Edit
	mode attrs.NextHopMode
}

// newNextHops makes all changes there can be, so that equal ones are one.
func newNextHops(p Peer, rules [wire.Families][]rule) *nextHops {
	n := &nextHops{edits: map[editKey]*attrs.Edit{}}
	n.mode = map[NextHopMode]attrs.NextHopMode{NextHopAuto: attrs.NextHopAuto, NextHopSelf: attrs.NextHopSelf, NextHopKeep: attrs.NextHopKeep}[p.NextHopMode]
	for _, f := range p.ownHop() {
		n.own[f] = true
	}
	edits := []*attrs.Edit{nil}
	for _, r := range slices.Concat(rules[:]...) {
		edits = append(edits, r.edit)
	}
	for _, e := range edits {
		for _, mode := range []attrs.NextHopMode{n.mode, attrs.NextHopSelf} {
			if mode == attrs.NextHopAuto {
				continue
			}
			with := attrs.Edit{NextHop: mode}
			if e != nil {
				with = *e
				with.NextHop = mode
			}
			n.edits[editKey{e, mode}] = &with
		}
	}
	return n
}

func (n *nextHops) edit(r *judged, e *attrs.Edit) *attrs.Edit {
	mode := n.mode
	if r.local || r.own && n.own[familyOf(r.prefix.Addr())] {
		mode = attrs.NextHopSelf
	}
	if mode == attrs.NextHopAuto {
		return e
	}
	return n.edits[editKey{e, mode}]
}

// usable reports whether a next hop can be another host (RFC 4271 section 6.3):
// who says something else announces a prefix that leads nowhere.
func (c *Config) usable(a netip.Addr) bool {
	return a.IsValid() && !a.IsUnspecified() && !a.IsMulticast() && !a.IsLoopback() &&
		a != netip.AddrFrom4([4]byte{255, 255, 255, 255}) && a != c.NextHop && a != c.NextHop6
}

// looped says why a route of a peer is not looked at: it has been here before
// (RFC 4271 section 9.1.2, RFC 4456 section 8). Empty: it has not.
func (c *Config) looped(p Peer, r *judged) string {
	own := p.localASN(c.ASN)
	switch n := r.CountAS(own); {
	case n > int(p.AllowOwnASN):
		return fmt.Sprintf("AS loop: AS %d, this node's own on the session, is in the AS path %d times, but numAllowedLocalASNumbers is %d", own, n, p.AllowOwnASN)
	case p.ibgp(c.ASN) && r.originator == c.RouterID && r.originator.IsValid():
		return fmt.Sprintf("ORIGINATOR_ID %s is this node's: the route originated here", r.originator)
	}
	return ""
}

// judgeImport says why a route of a peer is let in or not.
func (p *policy) judgeImport(peer Peer, r *judged) (accepted bool, reason string) {
	if loop := p.c.looped(peer, r); loop != "" {
		return false, loop
	}
	v := p.importsOf(peer)(r)
	return v.accept, v.reason()
}

// judgeExport says why a route is advertised to a peer or not, apart from BGP's own
// rules.
func (p *policy) judgeExport(peer Peer, r *judged) (accepted bool, reason string) {
	v := p.exportsOf(peer)(r)
	return v.accept, v.reason()
}

// named is [Hop.Named] of a path that a peer sent and that was let in.
func (p *policy) named(peer Peer, r *judged) int {
	for _, d := range p.imports[p.c.keyOf(peer)][familyOf(r.prefix.Addr())] {
		if !d.names() || !d.FilterRule.holds(r.prefix) {
			continue
		}
		d.afterwards()
		if d.matches(r) {
			return d.CIDR.Bits()
		}
	}
	return 0
}

// names reports whether a rule accepts what it names by a CIDR.
func (rule FilterRule) names() bool { return rule.Accept && rule.CIDR.IsValid() && !rule.Not }

// afterwards takes the conditions away that the rule's own operations change the
// answers to.
func (r *rule) afterwards() {
	for _, op := range r.Operations {
		if len(op.PrependAS) > 0 {
			r.ASPath = nil
		}
		if op.SetPriority != 0 {
			r.Priority = 0
		}
	}
}

// inAny reports whether a prefix is one of a list or lies inside one.
func inAny(list []netip.Prefix, p netip.Prefix) bool {
	return slices.ContainsFunc(list, func(q netip.Prefix) bool {
		return q.Bits() <= p.Bits() && q.Contains(p.Addr())
	})
}
