package kernel

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/portholder"
	"github.com/routerd/routerd/dataplane/reconcile"
)

// putLink makes a device be as wanted. Devices are few and each step depends
// on the one before, so they are not batched.
func (wr *writer) putLink(o op) {
	r := wr.tryLink(o)
	r.Op = o
	if r.Outcome == reconcile.Succeeded {
		wr.wrote(dataplane.KindLink, false, 1)
	}
	wr.report([]result{r})
	// What was made is looked at, not believed: the kernel may have rounded.
	wr.settleLink(o.Key.other.(dataplane.LinkKey).Name)
}

// settleLink applies what our own request did to a device.
func (wr *writer) settleLink(name string) {
	wr.drift.quiet = true
	defer func() { wr.drift.quiet = false }()
	if err := wr.drain(); err != nil {
		wr.listing.ask("notifications cannot be read")
	}
	wr.observe(name)
	if o, ok := wr.want.Have(dataplane.LinkKey{Name: name}); ok && !wr.want.Settled(o.Key()) {
		h, _ := o.(haveLink)
		wr.log.Debug("the device is not as it should be yet", "link", name, "is", o.String(),
			"up", h.up, "alias", h.marked, "learning", h.learning, "link_local", h.autoLinkLocal, "external", h.metadata, "more", h.shape)
	}
}

func (wr *writer) tryLink(o op) result {
	w := o.Want.other.(dataplane.Link)
	if err := validate(w); err != nil {
		return result{Outcome: reconcile.Refused, Err: err}
	}
	parent := 0
	if w.Parent != "" {
		l := wr.mirror.link(w.Parent)
		if l == nil {
			return *wr.waitForLink(o, w.Parent)
		}
		parent = l.index
	}
	l := wr.mirror.link(w.Name)
	switch {
	case l == nil:
		return wr.judgeLink(o, wr.createLink(w, parent))
	case l.kind != string(w.Type):
		kind := l.kind
		if kind == "" {
			kind = "physical or built-in"
		}
		return result{Outcome: reconcile.Refused, Err: fmt.Errorf(
			"there is a device %s of kind %s, which is not ours: rename or delete it, or have another name for ours", w.Name, kind)}
	case !o.Exists:
		// It was there before it was wanted. What is on it is ours now, so
		// everything is listed before anything is done.
		wr.listing.ask("device " + w.Name + " is taken over")
		return result{Outcome: reconcile.Postponed}
	}
	h := wr.haveLink(l)
	if needsNew(w, h) {
		wr.log.Info("making device anew", "link", w.Name, "from", h.Link.String(), "to", w.String())
		if err := wr.linkRequest(func(b *builder) { b.deleteLink(l.index) }); err != nil && !errors.Is(err, unix.ENODEV) {
			return wr.judgeLink(o, err)
		}
		wr.settleLink(w.Name)
		return wr.judgeLink(o, wr.createLink(w, parent))
	}
	return wr.judgeLink(o, wr.changeLink(w, h, l, parent))
}

// changeLink makes the differences good that can be without making the device
// anew: no packet is lost by it.
func (wr *writer) changeLink(w dataplane.Link, h haveLink, l *ifLink, parent int) error {
	if !sameEnds(w, h) {
		if err := wr.linkRequest(func(b *builder) { b.moveLink(w, l.index, parent) }); err != nil {
			return err
		}
		if w.Type == dataplane.LinkIP6TNL {
			wr.moveNextHops(w.Name)
		}
	}
	if sameSettings(w, h) {
		return nil
	}
	return wr.setUpLink(w, l)
}

// moveNextHops makes due the next hops on a tunnel over IPv6, each of which
// holds the address of this end.
func (ac *actual) moveNextHops(name string) {
	for _, key := range slices.Collect(maps.Keys(ac.onLink[name])) {
		if n, ok := key.(dataplane.NextHopKey); ok {
			ac.want.SetDependent(key, noncanonicalNextHop{NextHop: dataplane.NextHop{ID: n.ID, Link: name}})
		}
	}
}

// setUpLink gives a device what every kind has and sets it up.
func (wr *writer) setUpLink(w dataplane.Link, l *ifLink) error {
	if l.autoLinkLocal() {
		if err := wr.linkRequest(func(b *builder) { b.silenceLink(l.index) }); err != nil {
			return err
		}
	}
	if l.obstructed() != "" {
		if err := wr.linkRequest(func(b *builder) { b.freeLink(l) }); err != nil {
			return err
		}
	}
	if w.MAC == l.mac {
		w.MAC = dataplane.MAC{} // given again the kernel would throw away all neighbours (neigh_changeaddr)
	}
	return wr.linkRequest(func(b *builder) { b.changeLink(w, l.index) })
}

// createLink makes a device and sets it up. That of the ipip module is there
// as soon as the module is loaded, which the request itself may cause: then it
// only has to be given its settings. The others get theirs in two steps too:
// the kernel ignores at creation what keeps them from making addresses by
// themselves. The mark is ignored at creation as well, so its message goes in
// the same call: killed in between it would not be known whose the device is.
func (wr *writer) createLink(w dataplane.Link, parent int) error {
	err := wr.linkRequest(func(b *builder) {
		b.createLink(w, parent)
		if w.Type != dataplane.LinkIPIP { // which may be there, and foreign
			b.markLink(w.Name)
		}
	})
	if err != nil && (w.Type != dataplane.LinkIPIP || !errors.Is(err, unix.EEXIST)) {
		return err
	}
	wr.settleLink(w.Name)
	l := wr.mirror.link(w.Name)
	if l == nil || l.kind != string(w.Type) {
		return errors.Join(err, unix.ENODEV)
	}
	return wr.setUpLink(w, l)
}

// module is the kernel module that brings a kind of device.
func module(t dataplane.LinkType) string {
	if t == dataplane.LinkIP6TNL {
		return "ip6_tunnel"
	}
	return string(t)
}

func (wr *writer) judgeLink(o op, err error) result {
	w := o.Want.other.(dataplane.Link)
	switch {
	case err == nil:
		return result{}
	case !o.Exists && errors.Is(err, unix.EOPNOTSUPP):
		err = &UnsupportedError{Requirement: dataplane.Requirement{Link: w.Type, Module: module(w.Type)}, Err: err}
	case errors.Is(err, unix.EEXIST) && w.Type == dataplane.LinkVXLAN:
		err = fmt.Errorf("another VXLAN device here has the VNI %d on UDP port %d: delete it or choose another VNI: %w", w.VNI, w.Port, err)
	case errors.Is(err, unix.EEXIST) && w.Type == dataplane.LinkIP6TNL:
		err = fmt.Errorf("another device here is an external ip6tnl tunnel, of which the kernel takes one: find it with \"ip -d link show type ip6tnl\" and delete it: %w", err)
	case errors.Is(err, unix.EADDRINUSE):
		err = fmt.Errorf("UDP port %d is in use by %s: stop it or choose another port: %w", w.Port, wr.portHolder(w), err)
	case errors.Is(err, unix.ENODEV):
		wr.listing.ask("a device went while it was changed")
		if wr.doubted.first(o.Key) {
			return result{Outcome: reconcile.Postponed}
		}
	}
	return result{Outcome: reconcile.Refused, Err: err}
}

// portHolder says who has the port that a VXLAN device needs at all addresses of the
// family that it travels over. Devices whose sockets are alike share one.
func (wr *writer) portHolder(w dataplane.Link) string {
	at := netip.AddrPortFrom(netip.IPv4Unspecified(), w.Port)
	if w.Local.Is6() {
		at = netip.AddrPortFrom(netip.IPv6Unspecified(), w.Port)
	}
	var h portholder.Holder
	err := wr.ns.do(func() error {
		h = portholder.Find("/proc", portholder.UDP.InThread(unix.Gettid()), at)
		return nil
	})
	if err == nil && h.Program != "" {
		return h.Program
	}
	var names []string
	for _, l := range wr.mirror.links {
		if l.kind == string(dataplane.LinkVXLAN) && l.port == w.Port && l.name != w.Name {
			names = append(names, l.name)
		}
	}
	if len(names) > 0 {
		slices.Sort(names)
		return "the VXLAN device " + strings.Join(names, ", ")
	}
	if h.Kernel {
		return "another tunnel"
	}
	return "another program or tunnel"
}

// removeLink deletes a device of ours, or lets go of one that cannot be
// deleted: the fallback device of the ipip module.
func (wr *writer) removeLink(o op) {
	name := o.Key.other.(dataplane.LinkKey).Name
	r := result{Op: o}
	if l := wr.mirror.link(name); l != nil && wr.removable(o, l) {
		err := wr.linkRequest(func(b *builder) {
			if l.kind == string(dataplane.LinkIPIP) {
				b.releaseLink(l.index)
			} else {
				b.deleteLink(l.index)
			}
		})
		r = judgeRemove(o, err)
		r.Op = o
		if r.Outcome == reconcile.Succeeded {
			wr.log.Info("device removed", "link", name)
			wr.wrote(dataplane.KindLink, true, 1)
		}
	}
	wr.report([]result{r})
	wr.settleLink(name)
}

// removable reports whether the device is one of those that we make. That
// a source wants the name of a foreign device never made that device ours.
func (wr *writer) removable(o op, l *ifLink) bool {
	switch dataplane.LinkType(l.kind) {
	case dataplane.LinkVXLAN, dataplane.LinkIP6TNL:
		h, ok := o.Have.other.(haveLink)
		return !ok || string(h.Type) == l.kind
	case dataplane.LinkIPIP:
		return l.alias == ours
	}
	return false
}

// linkRequest sends one request about a device, and what goes with it. Only
// the first message's failure counts.
func (wr *writer) linkRequest(encode func(*builder)) error {
	var b builder
	for try := 0; ; try++ {
		b.Reset()
		encode(&b)
		wr.writes.Add(1)
		errs, err := wr.conn.Batch(&b.Batch, nil)
		if err != nil {
			wr.conn.redial(err)
			return err
		}
		if try < maxRetries && transient(errs[0]) {
			continue
		}
		return errs[0]
	}
}
