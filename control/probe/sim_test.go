package probe

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/routerd/routerd/dataplane"
)

// sim is a network of engines and translators in virtual time.
type sim struct {
	t       testing.TB
	now     time.Time
	hosts   []*simHost
	realms  map[string]*realm
	flight  []flying
	rng     *rand.Rand
	lose    func(from, to *simHost, size int) bool // optional
	sent    int
	latency time.Duration
}

// realm is a network behind one translator; the public network has none.
type realm struct {
	name     string
	pat      bool       // else 1:1
	public   netip.Addr // of a port translator
	preserve bool       // keep the port where it is free
	anyone   bool       // let everybody in at a mapping, not only the far end of it
	mappings []mapping  // of a port translator
	nextPort uint16
}

type mapping struct{ inside, remote, outside netip.AddrPort }

type simHost struct {
	name   string
	realm  *realm
	addr   netip.Addr
	public netip.Addr // 1:1
	down   bool
	silent bool // Calico's
	encap  dataplane.Encap
	closed bool // lets nobody in to whom it did not send first
	flows  map[[2]netip.AddrPort]bool
	eng    *engine
	next   time.Time
	// What the others find in the store.
	published netip.Addr
	auto      bool
}

type flying struct {
	at  time.Time
	to  *simHost
	src netip.AddrPort
	l   localEnd
	msg message
}

const simPort = 4789

// simEncap is VXLAN with a port, or IPIP with none.
func simEncap(port uint16) dataplane.Encap {
	if port == 0 {
		return dataplane.Encap{Driver: dataplane.DriverIPIP, Outer: dataplane.IPv4}
	}
	return dataplane.Encap{Driver: dataplane.DriverVXLAN, Outer: dataplane.IPv4, Port: port}
}

func newSim(t testing.TB) *sim {
	return &sim{
		t: t, now: time.Unix(1000, 0), realms: map[string]*realm{"": {}}, rng: rand.New(rand.NewPCG(1, 2)), latency: 5 * time.Millisecond,
	}
}

func (s *sim) host(name, in, addr, public string) *simHost {
	h := &simHost{name: name, realm: s.realms[in], addr: netip.MustParseAddr(addr), auto: true, encap: simEncap(simPort)}
	if public != "" {
		h.public = netip.MustParseAddr(public)
	}
	h.start(s)
	s.hosts = append(s.hosts, h)
	return h
}

// start makes the host's engine anew, as a restart of its daemon does.
func (h *simHost) start(s *sim) {
	h.eng = newEngine(h.name, 15*time.Second, s.now)
	h.eng.random = s.rng.Uint64
	h.eng.setUplink(s.now, "eth0", 1500)
	h.next = s.now
}

// simPath is the path to thousands of peers.
func simPath() *dataplane.ProbePath {
	return &dataplane.ProbePath{
		Family: dataplane.IPv4, Uplink: "eth0", Local: netip.MustParsePrefix("10.255.0.1/8"),
		Encap: dataplane.Encap{Driver: dataplane.DriverVXLAN, Outer: dataplane.IPv4, Port: simPort},
	}
}

// tell gives every engine its targets, as the store does.
func (s *sim) tell() {
	for _, h := range s.hosts {
		var ts []dataplane.ProbeTarget
		for _, o := range s.hosts {
			if o != h {
				ts = append(ts, dataplane.ProbeTarget{
					Node: o.name, Registered: o.addr, Public: o.published,
					ProbePath: &dataplane.ProbePath{Family: dataplane.IPv4, Uplink: "eth0", Local: netip.PrefixFrom(h.addr, 24), Encap: h.encap},
				})
			}
		}
		h.eng.setTargets(s.now, ts)
		h.next = s.now
	}
}

// run lets time pass. What engines find out about their own address is
// published at once.
func (s *sim) run(d time.Duration) {
	end := s.now.Add(d)
	for s.now.Before(end) {
		at := end
		for _, h := range s.hosts {
			if !h.next.IsZero() && h.next.Before(at) {
				at = h.next
			}
		}
		slices.SortStableFunc(s.flight, func(a, b flying) int { return a.at.Compare(b.at) })
		if len(s.flight) > 0 && s.flight[0].at.Before(at) {
			at = s.flight[0].at
		}
		if at.After(s.now) {
			s.now = at
		}
		for len(s.flight) > 0 && !s.flight[0].at.After(s.now) {
			f := s.flight[0]
			s.flight = s.flight[1:]
			if !f.to.down && !f.to.silent {
				f.to.eng.arrived(s.now, f.l, f.src, f.msg)
				f.to.next = s.now
			}
		}
		news := false
		for _, h := range s.hosts {
			if h.next.IsZero() || h.next.After(s.now) || h.silent {
				if h.silent {
					h.next = time.Time{}
				}
				continue
			}
			var out []packet
			out, h.next = h.eng.tick(s.now)
			for _, p := range out {
				s.send(h, p)
			}
			if h.auto && h.eng.observed[dataplane.IPv4] && h.eng.public[dataplane.IPv4] != h.published {
				h.published = h.eng.public[dataplane.IPv4]
				news = true
			}
		}
		if news {
			s.tell()
		}
	}
}

// send takes a packet through the translators.
func (s *sim) send(h *simHost, p packet) {
	s.sent++
	if h.down {
		return
	}
	port := p.local.encap.Port
	if p.msg.kind == kindAnyPort {
		port = uint16(40000 + s.rng.IntN(20000))
	}
	src, dst := netip.AddrPortFrom(h.addr, port), p.to
	to := s.at(h.realm, dst.Addr())
	if h.flows == nil {
		h.flows = map[[2]netip.AddrPort]bool{}
	}
	h.flows[[2]netip.AddrPort{src, dst}] = true
	if to == nil {
		src = h.realm.outward(h, src, dst)
		to, dst = s.inward(src, dst)
	}
	encap := p.local.encap
	if to == nil || to.encap != encap || p.msg.kind != kindAnswer && dst.Port() != encap.Port {
		return // nobody listens there
	}
	if to.closed && !to.flows[[2]netip.AddrPort{dst, src}] || s.lose != nil && s.lose(h, to, p.size) {
		return
	}
	s.flight = append(s.flight, flying{at: s.now.Add(s.latency), to: to, src: src, l: localEnd{to.addr, encap}, msg: p.msg})
}

// at finds the host that has an address in a realm.
func (s *sim) at(r *realm, a netip.Addr) *simHost {
	for _, h := range s.hosts {
		if h.realm == r && h.addr == a {
			return h
		}
	}
	return nil
}

func (r *realm) outward(h *simHost, src, dst netip.AddrPort) netip.AddrPort {
	switch {
	case r.name == "":
		return src
	case !r.pat:
		return netip.AddrPortFrom(h.public, src.Port())
	}
	for _, m := range r.mappings {
		if m.inside == src && (r.anyone || m.remote == dst) {
			return m.outside
		}
	}
	out := netip.AddrPortFrom(r.public, src.Port())
	taken := func(a netip.AddrPort) bool {
		return slices.ContainsFunc(r.mappings, func(m mapping) bool { return m.outside == a && (r.anyone || m.remote == dst) })
	}
	for !r.preserve || taken(out) {
		r.nextPort++
		out = netip.AddrPortFrom(r.public, 20000+r.nextPort)
		if !taken(out) {
			break
		}
	}
	r.mappings = append(r.mappings, mapping{src, dst, out})
	return out
}

func (s *sim) inward(src, dst netip.AddrPort) (*simHost, netip.AddrPort) {
	if h := s.at(s.realms[""], dst.Addr()); h != nil {
		return h, dst
	}
	for _, h := range s.hosts {
		if h.public.IsValid() && h.public == dst.Addr() {
			return h, netip.AddrPortFrom(h.addr, dst.Port())
		}
	}
	for _, r := range s.realms {
		for _, m := range r.mappings {
			if m.outside == dst && (r.anyone || m.remote == src) {
				return s.at(r, m.inside.Addr()), m.inside
			}
		}
	}
	return nil, dst
}

// want checks what a host found out about another: "" for its own address, or
// the address, with the port where that is another, and ", pinned".
func (s *sim) want(from, to, want string) {
	s.t.Helper()
	if got := s.path(from, to); got != want {
		s.t.Errorf("%s → %s: %q, want %q", from, to, got, want)
	}
}

func (s *sim) path(from, to string) string {
	i := slices.IndexFunc(s.hosts, func(h *simHost) bool { return h.name == from })
	p := s.hosts[i].eng.peers[peerKey{to, dataplane.IPv4}]
	out := ""
	if r := p.reach; r.Addr.IsValid() {
		out = r.Addr.String()
		if r.Port != 0 {
			out += fmt.Sprintf(":%d", r.Port)
		}
	}
	if p.pin.IsValid() {
		out += ", pinned"
	}
	if p.reach.MTU != 0 {
		out += fmt.Sprintf(", mtu %d", p.reach.MTU)
	}
	return out
}

// table shows all paths, for comparing.
func (s *sim) table() []string {
	var out []string
	for _, a := range s.hosts {
		for _, b := range s.hosts {
			if a != b && !a.silent {
				out = append(out, fmt.Sprintf("%s → %s: %s", a.name, b.name, s.path(a.name, b.name)))
			}
		}
	}
	slices.SortFunc(out, cmp.Compare[string])
	return out
}
