package vrouter

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/routerd/routerd/control/encap"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
)

// poolsOf are the blocks' pools, in the order of simHost.blocks.
var poolNames = []string{"pool", "other"} //nolint:gochecknoglobals // a constant of the tests

// lost finds packets that do not get through: a host's kernel sends to a peer
// in a form that the peer's kernel does not take in.
func (w *world) lost() string {
	for _, s := range w.hosts {
		for _, r := range w.hosts {
			if r == s {
				continue
			}
			for i, p := range r.blocks() {
				f, ok := s.sends(p)
				if closed := w.closed(s, r, i, f); ok && !r.accepts(f) && !closed {
					return fmt.Sprintf("%s sends to %s for pool %s in %s, which its kernel does not take in\n%s%s", s.name, r.name, poolNames[i], f, s, r)
				}
			}
		}
	}
	return ""
}

// closed reports whether a host knows that the peer does not take in the tunnel in which it
// sends, rather than not at all: a neighbour that does not answer has no plain way any
// more, and what the peer accepts is not published yet. Without a route the packets would
// leave in plain by a less specific one. It lasts until the kernel has the next decision.
func (w *world) closed(s, r *simHost, pool int, f dataplane.Encap) bool {
	k := pathOf{s, r, pool}
	p := s.l.encap.PathTo(encap.Key{Pool: poolNames[pool], Node: r.name, Family: dataplane.IPv4})
	said := s.l.nodes.ByName[r.name].Encaps
	if _, accepts := said.Accept[p.Encap]; w.plain && p.Encap != (dataplane.Encap{}) && p.Encap.Driver != dataplane.DriverDirect && said.Published && !accepts {
		w.shut[k] = p.Encap
	} else if f != w.shut[k] {
		delete(w.shut, k)
	}
	return f == w.shut[k]
}

// pathOf is from one host to another's block of a pool.
type pathOf struct {
	from, to *simHost
	pool     int
}

func (h *simHost) String() string {
	s := fmt.Sprintf("%s: published %+v, pending %+v\n", h.name, h.l.nodes.ByName[h.name].Encaps.NodeEncaps, h.pending)
	for _, k := range slices.SortedFunc(maps.Keys(h.kernel.have), dataplane.CompareKeys) {
		s += fmt.Sprintf("\t%s\n", h.kernel.have[k])
	}
	for _, k := range h.kernel.due() {
		s += fmt.Sprintf("\tdue: %s: %v\n", k, h.kernel.want[k])
	}
	return s
}

// gaps finds prefixes that had a route and have none. Plain packets to another
// rack have none by themselves.
func (w *world) gaps() string {
	for _, s := range w.hosts {
		for _, r := range w.hosts {
			for _, p := range r.blocks() {
				if _, ok := s.sends(p); s != r && !ok {
					return fmt.Sprintf("%s has no route to %s of %s\n%s", s.name, p, r.name, s)
				}
			}
		}
	}
	return ""
}

// fresh is what a host would want if its daemon started now.
func (w *world) fresh(h *simHost) map[dataplane.Key]dataplane.Object {
	t := newTable(h.name)
	t.setUnderlay(h.underlay())
	for _, ev := range w.now {
		t.take(ev)
	}
	t.encap.SetReach(dataplane.IPv4, maps.Clone(h.reach))
	if h.delivery != nil {
		t.encap.SetDelivery(dataplane.IPv4, maps.Clone(h.delivery))
	}
	for range maxRounds {
		t.settle()
		states := map[dataplane.Encap]encap.State{}
		for f, d := range t.encap.Devices() {
			states[f] = h.core.encapState(d.Keys)
		}
		t.encap.SetKernel(states, false)
	}
	t.settle()
	out := map[dataplane.Key]dataplane.Object{}
	for _, o := range desiredOf(t) {
		out[o.Key()] = o
	}
	return out
}

// tail shows what was written last.
func (w *world) tail() string {
	s := ""
	for _, ev := range w.log[max(0, len(w.log)-12):] {
		s += "\n" + ev.Key.String()
		if n, ok := ev.Object.Value.(*store.Node); ok {
			s += fmt.Sprintf(": %+v", store.NodeEncapsOf(n))
		}
	}
	for _, h := range w.hosts {
		s += "\n" + h.String()
	}
	return s
}

// checkQuiet holds that a cluster to which nothing happens any more is where
// its pools want it, as far as that can be, with nothing left over.
func (w *world) checkQuiet(t *rapid.T) {
	if !w.settle() {
		t.Fatalf("no end to it: the hosts keep changing: %s", w.tail())
	}
	equal := cmp.Comparer(func(a, b dataplane.Object) bool { return a == b })
	for _, h := range w.hosts {
		if fresh := w.fresh(h); !maps.Equal(fresh, h.kernel.want) {
			t.Fatalf("%s: a fresh start wants another thing (-fresh +this):\n%s", h.name, cmp.Diff(fresh, h.kernel.want, equal))
		}
		// An unchanged world changes nothing.
		writes, rev, n := h.kernel.writes, h.kernel.rev, len(w.log)
		h.look()
		if h.kernel.writes != writes || h.kernel.rev != rev || len(w.log) != n || h.pending != nil {
			t.Fatalf("%s: an unchanged world causes changes", h.name)
		}
		if !w.faults {
			w.checkWanted(t, h)
		}
	}
}

func (w *world) checkWanted(t *rapid.T, h *simHost) {
	for _, p := range h.l.pools.ByName {
		for name := range h.l.nodes.ByName {
			if path := h.l.encap.PathTo(encap.Key{Pool: p.Name, Node: name, Family: p.Family()}); path.Encap != path.Wanted || (path == encap.Path{}) != (name == h.name) {
				t.Fatalf("%s: packets of pool %s to %s go in %s, and %s is wanted: %s\n%s", h.name, p.Name, name, path.Encap, path.Wanted, path.Reason, h)
			}
		}
	}
	wanted := h.l.encap.WantedEncaps()
	for _, o := range h.kernel.have {
		if l, ok := o.(dataplane.Link); ok {
			if _, ok := wanted[encapOfLink(l)]; !ok {
				t.Fatalf("%s: device %s is left", h.name, l)
			}
		}
	}
	pub := h.l.nodes.ByName[h.name].Encaps
	if !maps.Equal(pub.Accept, wanted) || len(pub.Refuses) > 0 {
		t.Fatalf("%s: accepts %v and refuses %v; want %v accepted", h.name, pub.Accepts, pub.Refuses, slices.Collect(maps.Keys(wanted)))
	}
	for _, p := range h.l.pools.ByName {
		if got, want := pub.Send[p.Name], h.l.pools.Mode(p); got != want {
			t.Fatalf("%s: pool %s was moved to %s; want %s", h.name, p.Name, got, want)
		}
	}
}

// step lets something happen to the cluster: mostly, a host gets on with some
// of what it has to do. check is called after each part of it.
func (w *world) step(t *rapid.T, withFaults bool, check func()) {
	h := w.hosts[rapid.IntRange(0, len(w.hosts)-1).Draw(t, "host")]
	last := 20
	if withFaults {
		last = 25
	}
	switch n := rapid.IntRange(0, last).Draw(t, "event"); n {
	case 0:
		e := rapid.SampledFrom(store.Encapsulations()).Draw(t, "encap")
		w.plain = w.plain || e == store.Direct
		if rapid.IntRange(0, 3).Draw(t, "which") == 0 {
			w.put(poolEvent("other", "10.50.0.0/16", e))
		} else {
			w.put(poolEvent("pool", "192.168.0.0/16", e))
		}
	case 1:
		w.put(felixEvent(rapid.SampledFrom([]int{4096, 5000}).Draw(t, "vni"), rapid.SampledFrom([]int{4789, 4790}).Draw(t, "port")))
	case 2:
		w.start(h)
	case 3:
		if w.dark {
			break // what is a neighbour does not change there
		}
		peer := w.hosts[rapid.IntRange(0, len(w.hosts)-1).Draw(t, "peer")]
		h.setReach(peer.name, dataplane.Reach{
			Near: dataplane.Answer(rapid.IntRange(0, 2).Draw(t, "near")),
			Addr: rapid.SampledFrom([]netip.Addr{{}, netip.MustParseAddr("203.0.113.9")}).Draw(t, "public"),
			MTU:  rapid.SampledFrom([]int{0, 1400}).Draw(t, "mtu"),
		})
		w.plain = true // a neighbour that does not answer has no plain way
		h.turn()
	default:
		if n > 20 {
			w.fault(t, h, n)
			break
		}
		w.advance(t, h, check)
	}
	check()
}

// advance lets a host learn, its kernel work, and what it publishes arrive,
// each as far as it comes.
func (w *world) advance(t *rapid.T, h *simHost, check func()) {
	far := func(what string) int { return rapid.SampledFrom([]int{100, 100, 100, 0, 1, 2, 5}).Draw(t, what) }
	for range far("changes") {
		if !w.learn(h) {
			break
		}
		check()
	}
	for range far("objects") {
		if !h.kernel.step() {
			break
		}
		check()
	}
	if rapid.IntRange(0, 4).Draw(t, "look") > 0 {
		h.look()
		check()
	}
	if rapid.IntRange(0, 4).Draw(t, "write") > 0 {
		w.write(h)
	}
	if rapid.IntRange(0, 4).Draw(t, "tell") > 0 {
		h.tell()
	}
}

// formsOfFaults are the encapsulations that a world can come to want.
var formsOfFaults = []string{"ipip", "vxlan/4096/4789", "vxlan/4096/4790", "vxlan/5000/4789", "vxlan/5000/4790", "direct"} //nolint:gochecknoglobals // a constant of the tests

func encapOf(t interface{ Fatal(args ...any) }, s string) dataplane.Encap {
	f, err := dataplane.ParseEncap(s)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// fault lets something go wrong.
func (w *world) fault(t *rapid.T, h *simHost, n int) {
	w.faults = true
	f := encapOf(t, rapid.SampledFrom(formsOfFaults).Draw(t, "form"))
	switch n {
	case 21:
		h.kernel.refuse[f] = struct{}{}
	case 22:
		clear(h.kernel.refuse)
	case 23:
		for _, p := range w.hosts {
			h.setDelivery(p.name, dataplane.Delivery{Encap: f, Result: dataplane.Answer(rapid.IntRange(0, 2).Draw(t, "answer"))})
		}
		h.turn()
	case 24:
		w.put(gone(w.nodeOf(h)))
		w.deleted = true
	case 25:
		if _, ok := w.now[store.ResourceKey(store.KindNode, h.name)]; !ok {
			w.put(w.nodeOf(h))
		}
	}
}

// TestLiveChange: whatever happens to a cluster in whatever order, no host
// ever sends to a peer what that does not take in, as long as nothing goes
// wrong; and in the end it is where its pools want it.
func TestLiveChange(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		first := rapid.SampledFrom(store.Encapsulations()).Draw(rt, "first")
		w := newWorld(rapid.IntRange(2, 4).Draw(rt, "hosts"), first, rapid.Bool().Draw(rt, "strict"))
		w.plain = first == store.Direct
		w.checkQuiet(rt)
		for range rapid.IntRange(1, 150).Draw(rt, "steps") {
			w.step(rt, false, func() {
				if s := w.lost(); s != "" {
					rt.Fatal(s)
				}
				if w.plain {
					return // it has gaps
				}
				if s := w.gaps(); s != "" {
					rt.Fatal(s)
				}
			})
		}
		w.checkQuiet(rt)
	})
}

// TestWantedAgain: a host that is late in publishing that it does not accept an
// encapsulation any more, for it is wanted again and gone again meanwhile, accepts it
// while a peer sends in it that went by what was published before.
// So does its next daemon.
func TestWantedAgain(t *testing.T) {
	w := newWorld(2, store.VXLAN, false)
	if !w.settle() {
		t.Fatal("no end to it")
	}
	node1, node2 := w.hosts[0], w.hosts[1]
	ipip, vxlan := poolEvent("other", "10.50.0.0/16", store.IPIP), poolEvent("other", "10.50.0.0/16", store.VXLAN)
	advance := func(h *simHost) {
		for w.learn(h) || h.kernel.step() {
			h.look()
		}
	}
	w.put(ipip)
	for range 3 { // with the devices there is more to publish
		advance(node2)
		w.write(node2)
		node2.tell()
	}
	w.put(vxlan)
	for w.learn(node2) && node2.pending == nil {
	}
	if node2.pending == nil || slices.Contains(node2.pending.Accepts, "ipip") {
		t.Fatalf("it does not publish that it accepts ipip no more: %+v", node2.pending)
	}
	w.put(ipip)
	for range 3 {
		advance(node1)
		w.write(node1)
		node1.tell()
	}
	advance(node1)
	advance(node2)
	if f, _ := node1.sends(node2.blocks()[1]); f.Driver != dataplane.DriverIPIP {
		t.Fatalf("it sends in %s", f)
	}
	w.write(node2)
	advance(node2)
	w.put(vxlan)
	advance(node2)
	if s := w.lost(); s != "" {
		t.Fatal(s)
	}
	w.start(node2)
	advance(node2)
	if s := w.lost(); s != "" {
		t.Fatalf("after a restart %s", s)
	}
	if !w.settle() {
		t.Fatal("no end to it")
	}
	if s := w.lost(); s != "" || node2.has(dataplane.Forwarding("tunl0")) {
		t.Fatalf("in the end %s\n%s", s, node2)
	}
}

// TestLiveChangeWithFaults: also where kernels refuse devices, probes get lost
// and Node resources are deleted, the end depends only on what there is.
func TestLiveChangeWithFaults(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		w := newWorld(rapid.IntRange(2, 3).Draw(rt, "hosts"), rapid.SampledFrom(store.Encapsulations()).Draw(rt, "first"), rapid.Bool().Draw(rt, "strict"))
		w.checkQuiet(rt)
		for range rapid.IntRange(1, 120).Draw(rt, "steps") {
			w.step(rt, true, func() {})
		}
		for _, h := range w.hosts {
			if _, ok := w.now[store.ResourceKey(store.KindNode, h.name)]; !ok {
				w.put(w.nodeOf(h))
			}
		}
		w.checkQuiet(rt)
		// Once everybody can, everything is as wanted.
		for _, h := range w.hosts {
			clear(h.kernel.refuse)
			var all []dataplane.Delivery
			for _, s := range formsOfFaults {
				all = append(all, dataplane.Delivery{Encap: encapOf(rt, s), Result: dataplane.Yes})
			}
			for _, p := range w.hosts {
				h.setDelivery(p.name, all...)
			}
		}
		w.faults = false
		w.checkQuiet(rt)
	})
}

// probe has a host find what the underlay between the racks carries: tunnels, and plain
// packets unless it is dark for them.
func (w *world) probe(t interface{ Fatal(args ...any) }, h *simHost) {
	for _, p := range w.hosts {
		var found []dataplane.Delivery
		for _, s := range formsOfFaults {
			d := dataplane.Delivery{Encap: encapOf(t, s), Result: dataplane.Yes}
			if w.dark && s == "direct" && h.rack() != p.rack() {
				d.Result, d.Reason = dataplane.No, "dark"
			}
			found = append(found, d)
		}
		h.setDelivery(p.name, found...)
	}
	h.turn()
}

// exposed finds packets that go plainly between racks.
func (w *world) exposed() string {
	for _, s := range w.hosts {
		for _, r := range w.hosts {
			for _, p := range r.blocks() {
				if f, ok := s.sends(p); ok && f.Driver == dataplane.DriverDirect && s.rack() != r.rack() {
					return fmt.Sprintf("%s sends to %s of %s plainly, which the routers between do not carry\n%s", s.name, p, r.name, s)
				}
			}
		}
	}
	return ""
}

// TestLiveChangeDark: where the routers between racks know no routes to pods, no change
// of a pool, whatever comes between, has packets go plainly there, or nowhere. Each host
// publishes whom it cannot move; with force it does, and once the routers know the way
// everything is as wanted.
func TestLiveChangeDark(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		first := rapid.SampledFrom([]store.Encapsulation{store.IPIP, store.VXLAN, store.IPIPCrossSubnet, store.VXLANCrossSubnet}).Draw(rt, "first")
		w := newWorld(rapid.IntRange(3, 4).Draw(rt, "hosts"), first, rapid.Bool().Draw(rt, "strict"))
		w.checkQuiet(rt)
		w.dark = true
		for _, h := range w.hosts {
			w.start(h)
		}
		check := func() {
			for _, wrong := range []func() string{w.lost, w.gaps, w.exposed} {
				if s := wrong(); s != "" {
					rt.Fatal(s)
				}
			}
		}
		check()
		for range rapid.IntRange(1, 120).Draw(rt, "steps") {
			if h := rapid.IntRange(0, 3*len(w.hosts)).Draw(rt, "probe"); h < len(w.hosts) {
				w.probe(rt, w.hosts[h])
				check()
			}
			w.step(rt, false, check)
		}
		settle := func() {
			if !w.settle() {
				rt.Fatal("no end to it: the hosts keep changing", w.tail())
			}
		}
		settle()
		for _, h := range w.hosts {
			w.probe(rt, h)
		}
		settle()
		check()
		force := rapid.Bool().Draw(rt, "force")
		for _, p := range w.hosts[0].l.pools.ByName {
			for _, h := range w.hosts {
				why := h.l.nodes.ByName[h.name].Encaps.Stays[p.Name]
				if (why != "") != (p.Encap == store.Direct) {
					rt.Fatalf("%s: pool %s is to be %s, and %q is published of who stays\n%s", h.name, p.Name, p.Encap, why, h)
				}
			}
			if force {
				ev := poolEvent(p.Name, p.CIDR.String(), p.Encap)
				store.Meta(ev.Object.Value).Annotations = map[string]string{store.AnnotationForce: string(p.Encap)}
				w.put(ev)
			}
		}
		if !force {
			w.dark = false
			settle()
			for _, h := range w.hosts {
				w.probe(rt, h)
			}
		}
		w.checkQuiet(rt)
	})
}
