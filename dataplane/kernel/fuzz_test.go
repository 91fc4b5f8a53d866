package kernel

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/internal/nl"
)

// seedMessages adds the bodies of what we write, and of what this kernel says,
// to a corpus. Where a listing is given, its answers are added.
func seedMessages(f *testing.F, listing uint16, family byte, encode ...func(*builder)) {
	f.Helper()
	var b builder
	for _, e := range encode {
		e(&b)
	}
	for i := range b.Len() {
		f.Add(b.Message(i)[nl.Header:])
	}
	if listing == 0 {
		return
	}
	c, err := dialConn()
	if err != nil {
		f.Fatal(err)
	}
	defer c.Close()
	b.Reset()
	b.Begin(listing, 0, append([]byte{family}, make([]byte, 15)...)...)
	n := 0
	// What is interrupted, or not known here, is only less to begin with.
	_ = c.Dump(&b.Batch, func(m nl.Message) {
		if n++; n < 20 {
			f.Add(append([]byte(nil), m.Body...))
		}
	})
}

func FuzzLink(f *testing.F) {
	seedMessages(f, unix.RTM_GETLINK, unix.AF_UNSPEC,
		func(b *builder) { b.createLink(host()[0].(dataplane.Link), 3) },
		func(b *builder) {
			b.createLink(dataplane.Link{Name: nameIP6TNL, Type: dataplane.LinkIP6TNL, Local: addr("fd00::1")}, 3)
		},
		func(b *builder) { b.silenceLink(4) })
	f.Fuzz(func(t *testing.T, b []byte) {
		l, ok := parseLink(b)
		if ok && (l.index <= 0 || l.name == "") {
			t.Errorf("a device without a number or a name: %+v", l)
		}
		if ok && l.kind == "" && (l.vni != 0 || l.local.IsValid() || l.metadata) {
			t.Errorf("a tunnel's settings on what is none: %+v", l)
		}
	})
}

func FuzzAddr(f *testing.F) {
	seedMessages(f, unix.RTM_GETADDR, unix.AF_UNSPEC,
		func(b *builder) { b.address(unix.RTM_NEWADDR, 0, pfx("10.0.0.1/8"), 1) },
		func(b *builder) { b.address(unix.RTM_NEWADDR, 0, pfx("fd00::1/128"), 1) })
	f.Fuzz(func(t *testing.T, b []byte) {
		if a, ok := parseAddr(b); ok && !a.prefix.IsValid() {
			t.Errorf("an address without a prefix: %+v", a)
		}
	})
}

func FuzzRoute(f *testing.F) {
	seedMessages(f, unix.RTM_GETROUTE, unix.AF_INET,
		func(b *builder) { b.putRoute(route("10.0.0.0/8", 3), create, 77, 0, false) },
		func(b *builder) {
			b.putRoute(dataplane.Route{Prefix: pfx("fd20::/122"), Table: 254, NextHop: 3, MTU: 1300}, create, 77, 0, false)
		})
	seedMessages(f, unix.RTM_GETROUTE, unix.AF_INET6)
	f.Fuzz(func(t *testing.T, b []byte) {
		r, ok := parseRoute(b)
		if !ok {
			return
		}
		if !r.key.Prefix.IsValid() {
			t.Errorf("a route without a prefix: %+v", r)
		}
		// Whatever the kernel says, ours is only what looks like ours.
		o := (&actual{mirror: newMirror()}).haveRoute(&r)
		w, ours := o.(dataplane.Route)
		if ours && r.tos == 0 && w.Type == dataplane.Unicast && (w.NextHop == 0) == (w.Link == "") {
			t.Errorf("taken for a route of ours: %+v as %v", r, w)
		}
	})
}

func FuzzNextHop(f *testing.F) {
	seedMessages(f, rtmGetNextHop, unix.AF_UNSPEC,
		func(b *builder) { b.putNextHop(via(1, "10.0.0.1", "x"), false, 77, &ifLink{index: 3}) },
		func(b *builder) {
			b.putNextHop(via(1, "fd00::2", "x"), false, 77, &ifLink{index: 3, kind: "ip6tnl", local: addr("fd00::1")})
		})
	f.Fuzz(func(t *testing.T, b []byte) {
		if n, ok := parseNextHop(b); ok && n.id == 0 {
			t.Errorf("a next hop without a number: %+v", n)
		}
	})
}

func FuzzNeighbour(f *testing.F) {
	seedMessages(f, unix.RTM_GETNEIGH, unix.AF_UNSPEC,
		func(b *builder) { b.putNeighbour(host()[3].(dataplane.Neighbour), 3) },
		func(b *builder) { b.putFDB(dual()[6].(dataplane.FDBEntry), 3) })
	f.Fuzz(func(t *testing.T, b []byte) {
		if n, ok := parseNeighbour(b); ok && !n.bridge && !n.addr.IsValid() {
			t.Errorf("a neighbour without an address: %+v", n)
		}
	})
}

func FuzzFeatures(f *testing.F) {
	e, err := dialEthtool()
	if err != nil || e == nil {
		f.Fatalf("ethtool: %v %v", e, err)
	}
	var b nl.Batch
	e.header(&b, unix.ETHTOOL_MSG_FEATURES_GET, 1)
	// Loopback is there in every namespace.
	err = e.Do(&b, func(_ int, m nl.Message) {
		if m.Type == e.family {
			f.Add(append([]byte(nil), m.Body...))
		}
	})
	e.Close()
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		parseFamily(b, unix.ETHTOOL_MCGRP_MONITOR_NAME)
		parseNetconf(b)
		for id := range inotifyEvents(b) {
			_ = id
		}
		x, ok := parseFeatures(b)
		if _, empty := x.on[""]; ok && (x.link <= 0 || empty) {
			t.Errorf("offloads of no device, or without a name: %+v", x)
		}
	})
}
