package vrouter

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
)

// world is a cluster in one goroutine: a store, and hosts that are late in
// everything. A host learns of the store's changes, its kernel does what it is
// told, and what it publishes arrives, each only when the test says so.
type world struct {
	log     []store.Event // all that ever happened, in order
	now     map[store.Key]store.Event
	hosts   []*simHost
	faults  bool                       // something went wrong on purpose
	plain   bool                       // some pool was without a tunnel
	dark    bool                       // the routers between racks drop plain packets of pods, and hosts probe
	shut    map[pathOf]dataplane.Encap // paths that are kept closed, see [world.closed]
	deleted bool
}

// simHost is a host of a world.
type simHost struct {
	name   string
	i      int
	core   *Core
	l      *loop
	kernel *simKernel
	cursor int // of the log
	strict bool

	offers  <-chan store.NodeEncaps
	pending *store.NodeEncaps // taken from the core, not in the store yet
	acked   store.Revision    // in the store, and the core was not told yet
	last    store.NodeEncaps  // what the host published last, for who registers it again

	// What was measured since the daemon started; delivery is nil: nobody probes.
	reach    map[string]dataplane.Reach
	delivery map[string][]dataplane.Delivery
}

// simKernel is a kernel that does one thing at a time. It implements
// dataplane.Sink.
type simKernel struct {
	want, have map[dataplane.Key]dataplane.Object
	refuse     map[dataplane.Encap]struct{}
	writes     int
	rev        dataplane.Revision
}

func (k *simKernel) Replace(_ dataplane.Source, objs []dataplane.Object) dataplane.Revision {
	clear(k.want)
	return k.Update(0, objs, nil)
}

func (k *simKernel) Update(_ dataplane.Source, put []dataplane.Object, del []dataplane.Key) dataplane.Revision {
	for _, key := range del {
		delete(k.want, key)
	}
	for _, o := range put {
		k.want[o.Key()] = o
	}
	k.rev++
	return k.rev
}

func (k *simKernel) UpdateRoutes(src dataplane.Source, routes dataplane.RouteChanges, put []dataplane.Object, del []dataplane.Key) dataplane.Revision {
	put, del = withRoutes(routes, put, del)
	return k.Update(src, put, del)
}

// Cut takes the routes along.
func (k *simKernel) Flush(_ dataplane.Source, hops []dataplane.Key) dataplane.Revision {
	for _, key := range hops {
		delete(k.have, key)
		for other, o := range k.have {
			if r, ok := o.(dataplane.Route); ok && (key == dataplane.NextHopKey{ID: r.NextHop} || key == dataplane.NextHopGroupKey{ID: r.NextHop}) {
				delete(k.have, other)
			}
		}
	}
	return k.Update(0, nil, hops)
}

func (k *simKernel) Synced(dataplane.Source) {}

// Wait answers as if all calls were one: it is over when nothing is due.
func (k *simKernel) Wait(ctx context.Context, _ dataplane.Revision) error {
	if len(k.due()) > 0 {
		return fmt.Errorf("wait: %w", context.Cause(ctx))
	}
	return nil
}

func (k *simKernel) Status(key dataplane.Key) (dataplane.Status, bool) {
	w, ok := k.want[key]
	switch {
	case !ok:
		return dataplane.Status{}, false
	case k.have[key] == w:
		return dataplane.Status{Object: w, State: dataplane.Done}, true
	case k.refused(w):
		return dataplane.Status{Object: w, State: dataplane.Failed, Err: errRefused}, true
	}
	return dataplane.Status{Object: w, State: dataplane.Pending}, true
}

var errRefused = fmt.Errorf("the kernel says no")

func (k *simKernel) refused(o dataplane.Object) bool {
	l, ok := o.(dataplane.Link)
	if !ok {
		return false
	}
	_, no := k.refuse[encapOfLink(l)]
	return no && k.have[l.Key()] == nil
}

func encapOfLink(l dataplane.Link) dataplane.Encap {
	switch l.Type {
	case dataplane.LinkIPIP:
		return dataplane.Encap{Driver: dataplane.DriverIPIP, Outer: dataplane.IPv4}
	case dataplane.LinkIP6TNL:
		return dataplane.Encap{Driver: dataplane.DriverIPIP, Outer: dataplane.IPv6}
	case dataplane.LinkVXLAN:
	}
	return dataplane.Encap{Driver: dataplane.DriverVXLAN, Outer: dataplane.FamilyOf(l.Local), VNI: l.VNI, Port: l.Port}
}

// due lists what can be done now, first things first: creations and changes,
// and when there are none left, removals in reverse order.
func (k *simKernel) due() []dataplane.Key {
	var put, del []dataplane.Key
	for key, w := range k.want {
		if k.have[key] != w && !k.refused(w) && k.possible(w) {
			put = append(put, key)
		}
	}
	for key := range k.have {
		if k.want[key] == nil && key.Kind() != dataplane.KindSysctl {
			del = append(del, key)
		}
	}
	slices.SortFunc(put, dataplane.CompareKeys)
	slices.SortFunc(del, func(a, b dataplane.Key) int { return dataplane.CompareKeys(b, a) })
	if len(put) > 0 {
		return put
	}
	return del
}

func (k *simKernel) possible(o dataplane.Object) bool {
	on := func(link string) bool { return link == "eth0" || k.have[dataplane.LinkKey{Name: link}] != nil }
	switch o := o.(type) {
	case dataplane.Address:
		return on(o.Link)
	case dataplane.Neighbour:
		return on(o.Link)
	case dataplane.FDBEntry:
		return on(o.Link)
	case dataplane.NextHop:
		return on(o.Link)
	case dataplane.Route:
		return o.NextHop == 0 || k.have[dataplane.NextHopKey{ID: o.NextHop}] != nil
	}
	return true
}

// step does the first thing that is due, and reports whether there was one.
func (k *simKernel) step() bool {
	due := k.due()
	if len(due) == 0 {
		return false
	}
	k.writes++
	key := due[0]
	old, w := k.have[key], k.want[key]
	if l, ok := old.(dataplane.Link); ok {
		if n, ok := w.(dataplane.Link); !ok || l.VNI != n.VNI || l.Port != n.Port {
			k.dropOn(l.Name) // a device that goes, or is made anew, takes along what is on it
		}
	}
	if w == nil {
		delete(k.have, key)
	} else {
		k.have[key] = w
	}
	return true
}

func (k *simKernel) dropOn(link string) {
	for key, o := range k.have {
		switch o := o.(type) {
		case dataplane.Address:
			if o.Link == link {
				delete(k.have, key)
			}
		case dataplane.NextHop:
			if o.Link == link {
				delete(k.have, key)
				for rk, r := range k.have {
					if r, ok := r.(dataplane.Route); ok && r.NextHop == o.ID {
						delete(k.have, rk)
					}
				}
			}
		case dataplane.Neighbour:
			if o.Link == link {
				delete(k.have, key)
			}
		case dataplane.FDBEntry:
			if o.Link == link {
				delete(k.have, key)
			}
		case dataplane.Sysctl:
			if strings.Contains(o.Name, "/"+link+"/") {
				delete(k.have, key)
			}
		}
	}
}

// takesIn reports whether packets in a form get through to the workloads of a
// host. A device without an address drops them, by the kernel's source check,
// and so does one that does not forward, as a new one may.
func (h *simHost) accepts(f dataplane.Encap) bool {
	if f.Driver == dataplane.DriverDirect {
		return h.has(dataplane.Forwarding("eth0")) && (!h.strict || h.has(dataplane.LooseSource("eth0")))
	}
	for _, o := range h.kernel.have {
		if l, ok := o.(dataplane.Link); ok && encapOfLink(l) == f && h.has(dataplane.Forwarding(l.Name)) {
			for k := range h.kernel.have {
				if a, ok := k.(dataplane.AddressKey); ok && a.Link == l.Name {
					return true
				}
			}
		}
	}
	return false
}

func (h *simHost) has(o dataplane.Object) bool { return h.kernel.have[o.Key()] != nil }

// sends says in which form a host's kernel sends to a prefix, if it does.
func (h *simHost) sends(p netip.Prefix) (dataplane.Encap, bool) {
	r, ok := h.kernel.have[dataplane.Route{Prefix: p, Table: dataplane.MainTable}.Key()].(dataplane.Route)
	if !ok || r.NextHop == 0 {
		return dataplane.Encap{}, false
	}
	nh, ok := h.kernel.have[dataplane.NextHopKey{ID: r.NextHop}].(dataplane.NextHop)
	if !ok {
		return dataplane.Encap{}, false
	}
	if nh.Link == "eth0" {
		return dataplane.Encap{Driver: dataplane.DriverDirect}, true
	}
	l, ok := h.kernel.have[dataplane.LinkKey{Name: nh.Link}].(dataplane.Link)
	return encapOfLink(l), ok
}

// newWorld makes a cluster of n hosts in two racks, with two pools.
func newWorld(n int, encap store.Encapsulation, strict bool) *world {
	w := &world{now: map[store.Key]store.Event{}, shut: map[pathOf]dataplane.Encap{}}
	w.put(poolEvent("pool", "192.168.0.0/16", encap))
	w.put(poolEvent("other", "10.50.0.0/16", store.VXLAN))
	for i := range n {
		h := &simHost{
			name: fmt.Sprintf("node%d", i+1), i: i, strict: strict,
			kernel: &simKernel{
				want: map[dataplane.Key]dataplane.Object{}, have: map[dataplane.Key]dataplane.Object{}, refuse: map[dataplane.Encap]struct{}{},
			},
		}
		w.hosts = append(w.hosts, h)
		w.put(w.nodeOf(h))
		for _, p := range h.blocks() {
			w.put(blockEvent(p.String(), h.name, nil))
		}
	}
	for _, h := range w.hosts {
		w.start(h)
	}
	return w
}

func (h *simHost) addr() netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(1 + h.i/2), 0, byte(11 + h.i)}), 24)
}

// rack is the subnet in which a host is.
func (h *simHost) rack() netip.Prefix { return h.addr().Masked() }

func (h *simHost) blocks() []netip.Prefix {
	return []netip.Prefix{
		netip.PrefixFrom(netip.AddrFrom4([4]byte{192, 168, byte(h.i + 1), 0}), 26),
		netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 50, byte(h.i + 1), 0}), 26),
	}
}

// nodeOf is a host's resource as registration writes it, with what the host
// published before.
func (w *world) nodeOf(h *simHost) store.Event {
	tunnel := func(last byte) string { return netip.AddrFrom4([4]byte{192, 168, byte(h.i + 1), last}).String() }
	ev := nodeEvent(h.name, h.addr().String(), tunnel(62), tunnel(63))
	store.SetNodeEncaps(ev.Object.Value.(*store.Node), h.last)
	return ev
}

// put writes to the store.
func (w *world) put(ev store.Event) store.Revision {
	rev := store.Revision(len(w.log) + 1)
	ev.Object.Revision = rev
	w.log = append(w.log, ev)
	if ev.Deleted() {
		delete(w.now, ev.Key)
	} else {
		w.now[ev.Key] = ev
	}
	return rev
}

// start starts a host's daemon: it sees the store as it is and knows nothing
// of an earlier life but what is there and in its kernel.
func (w *world) start(h *simHost) {
	h.core = New(Config{
		Node: h.name, Sink: h.kernel, Status: h.kernel.Status, Publish: true, WithoutBGP: true, Log: slog.New(slog.DiscardHandler),
	})
	h.offers = h.core.publications.subscribe(context.Background())
	h.pending, h.acked = nil, 0
	h.l = &loop{table: newTable(h.name), bgpSynced: true, storeSynced: true, unsure: map[dataplane.Key]struct{}{}, probes: time.NewTimer(gather)}
	h.reach, h.delivery = map[string]dataplane.Reach{}, nil
	h.l.encap.SetUnsupported(nil)
	if w.dark {
		h.l.encap.SetDelivery(dataplane.IPv4, nil) // it probes
	}
	h.l.setUnderlay(h.underlay())
	for _, k := range slices.SortedFunc(maps.Keys(w.now), func(a, b store.Key) int { return slices.Compare([]byte(a.String()), []byte(b.String())) }) {
		h.l.take(w.now[k])
	}
	h.cursor = len(w.log)
	h.turn()
}

// underlay is what the host's kernel tells of the network.
func (h *simHost) underlay() dataplane.Underlay {
	u := dataplane.Underlay{
		Links:     []dataplane.UnderlayLink{{Index: 1, Name: "eth0", MTU: 1500, Up: true}},
		Addresses: []dataplane.UnderlayAddress{{Link: "eth0", Prefix: h.addr()}},
		Routes:    []dataplane.UnderlayRoute{{Prefix: h.addr().Masked(), Link: "eth0", Protocol: 2}},
	}
	if h.strict {
		u.Links[0].RPFilter = 1
		if h.has(dataplane.LooseSource("eth0")) {
			u.Links[0].RPFilter = 2
		}
	}
	for _, k := range slices.SortedFunc(maps.Keys(h.kernel.have), dataplane.CompareKeys) {
		if l, ok := h.kernel.have[k].(dataplane.Link); ok {
			u.Links = append(u.Links, dataplane.UnderlayLink{
				Index: len(u.Links) + 1, Name: l.Name, Type: string(l.Type), MTU: l.MTU, Up: true, VNI: l.VNI, Port: l.Port,
			})
		}
	}
	return u
}

// turn is a turn of the core's loop.
func (h *simHost) turn() {
	h.core.flush(h.l)
	select {
	case f := <-h.offers:
		h.pending = &f
	default:
	}
}

// setReach measures the underlay to a peer.
func (h *simHost) setReach(peer string, r dataplane.Reach) {
	h.reach[peer] = r
	h.l.encap.SetReach(dataplane.IPv4, map[string]dataplane.Reach{peer: r})
}

// setDelivery is what probes find of the tunnels to a peer.
func (h *simHost) setDelivery(peer string, list ...dataplane.Delivery) {
	if h.delivery == nil {
		h.delivery = map[string][]dataplane.Delivery{}
	}
	h.delivery[peer] = list
	h.l.encap.SetDelivery(dataplane.IPv4, map[string][]dataplane.Delivery{peer: list})
}

// learn takes in the next change of the store.
func (w *world) learn(h *simHost) bool {
	if h.cursor == len(w.log) {
		return false
	}
	h.l.take(w.log[h.cursor])
	h.cursor++
	h.turn()
	return true
}

// look lets a host see what its kernel did.
func (h *simHost) look() {
	h.l.setUnderlay(h.underlay())
	h.turn()
}

// write brings what a host publishes to the store, if its resource is there.
func (w *world) write(h *simHost) bool {
	ev, ok := w.now[store.ResourceKey(store.KindNode, h.name)]
	if h.pending == nil || !ok {
		return false
	}
	n := store.Clone(ev.Object.Value).(*store.Node)
	store.SetNodeEncaps(n, *h.pending)
	h.last, h.pending = *h.pending, nil
	ev.Object.Value = n
	h.acked = w.put(ev)
	return true
}

// tell says to a host's core that its publication is in the store.
func (h *simHost) tell() bool {
	if h.acked == 0 {
		return false
	}
	h.l.encap.Written(h.acked)
	h.acked = 0
	h.turn()
	return true
}

// felixEvent asks for a VNI and a port.
func felixEvent(vni, port int) store.Event {
	f := &v3.FelixConfiguration{ObjectMeta: metav1.ObjectMeta{Name: "default"}}
	f.Spec.VXLANVNI, f.Spec.VXLANPort = &vni, &port
	key := store.ResourceKey(store.KindFelixConfiguration, "default")
	return store.Event{Key: key, Object: store.Object{Key: key, Value: f}}
}

// settle lets everything happen that is to. It reports false if there is no
// end to it.
func (w *world) settle() bool {
	for range 2000 {
		busy := false
		for _, h := range w.hosts {
			for w.learn(h) {
				busy = true
			}
			for h.kernel.step() {
				busy = true
			}
			before := h.kernel.rev
			h.look()
			busy = w.write(h) || h.tell() || busy || h.pending != nil || h.kernel.rev != before
		}
		if !busy {
			return true
		}
	}
	return false
}
