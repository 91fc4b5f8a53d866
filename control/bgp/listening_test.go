package bgp

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/routerd/routerd/control/cluster/clustertest"
	"github.com/routerd/routerd/store"
)

// listener is a BGPPeer for whoever connects from a prefix.
func listener(t testing.TB, name, prefix, limit, spec string) store.Event {
	t.Helper()
	notes := fmt.Sprintf(`%q:%q`, store.AnnotationListenRange, prefix)
	if limit != "" {
		notes += fmt.Sprintf(`,%q:%q`, store.AnnotationListenLimit, limit)
	}
	return labelled(t, peer(t, name, spec), "", notes)
}

// at returns the session with an address, or of a range.
func (d *daemon) at(where fmt.Stringer) PeerStatus {
	d.t.Helper()
	for _, p := range d.Status(d.t.Context()).Peers {
		if p.Addr.IsValid() && p.Addr == where || !p.Addr.IsValid() && p.Range.IsValid() && p.Range == where {
			return p
		}
	}
	return PeerStatus{}
}

// waitAt waits for a session's state, or for what it says.
func (d *daemon) waitAt(where fmt.Stringer, says string) PeerStatus {
	d.t.Helper()
	var st PeerStatus
	poll(d.t, func() string { return fmt.Sprintf("%s saying %q: %+v", where, says, d.Status(d.t.Context()).Peers) }, func() bool {
		st = d.at(where)
		return st.State == says || strings.Contains(st.Info, says)
	})
	return st
}

// TestListens: BIRDs that no BGPPeer names connect from a prefix that one listens for, with its password, and have its settings,
// as many as it allows. One that goes makes room.
func TestListens(t *testing.T) {
	t.Parallel()
	for _, family := range []string{"IPv4", "IPv6"} {
		t.Run(family, func(t *testing.T) {
			t.Parallel()
			h, six := hosts6(t, 5)
			routes, node := []string{"203.0.113.0/24", "198.51.100.0/24"}, bgpNode(t, "node1", h[0].String()+"/32")
			if family == "IPv6" {
				routes, node = []string{"2001:db8:1::/48", "2001:db8:2::/48"}, object(t, store.ResourceKey(store.KindNode, "node1"), fmt.Sprintf(`{"bgp":{"ipv6Address":"%s/128"}}`, six[0]))
				h = six
			}
			inside := netip.PrefixFrom(h[0], h[0].BitLen()-8).Masked()
			dir := t.TempDir()
			writeSecret(t, dir, SecretRef{"lab", "key"}, "geheim")
			d := newDaemonOf(t, Options{Node: "node1", SecretDir: dir})
			d.send(store.Batch{Synced: true, Events: []store.Event{
				conf(t, "default", `{"bindMode":"NodeIP"}`), node,
				listener(t, "lab", inside.String(), "2", `{"asNumber":64999,"maxRestartTime":"1s","password":{"secretKeyRef":{"name":"lab","key":"key"}}}`),
			}})
			d.waitAt(inside, "0 of 2 neighbours")
			begin := func(i int, password string, routes ...string) *bird {
				return startBIRD(t, birdOther{remote: remote{self: h[i], asn: 64999, peer: h[0], peerASN: 64512, opens: true, password: password, routes: routes}}.text())
			}
			begin(4, "wrong")
			begin(1, "geheim", routes[0])
			second := begin(2, "geheim", routes[1])
			for _, a := range h[1:3] {
				if st := d.waitAt(a, StateUp); st.Name != "lab" || st.Range != inside || st.ASN != 64999 {
					t.Errorf("session %+v", st)
				}
			}
			waits := func() string { return fmt.Sprintf("%+v", d.Status(t.Context()).Peers) }
			poll(t, waits, func() bool { return d.has(routes[0]) && d.has(routes[1]) })
			begin(3, "geheim")
			d.waitAt(inside, fmt.Sprintf("2 of 2 neighbours; %s was refused last: there are 2 already, as many as annotation routerd.io/listenLimit allows", h[3]))
			second.kill()
			d.waitAt(h[3], StateUp)
			poll(t, waits, func() bool { return d.has(routes[0]) && !d.has(routes[1]) })
			for _, a := range []netip.Addr{h[2], h[4]} {
				if st := d.at(a); st.Name != "" {
					t.Errorf("%s is a peer: %+v", a, st)
				}
			}
			// The range goes, and its neighbours with it.
			d.send(store.Batch{Events: []store.Event{gone(store.ResourceKey(store.KindBGPPeer, "lab"))}})
			poll(t, waits, func() bool { return len(d.Status(t.Context()).Peers) == 0 && !d.has(routes[0]) })
		})
	}
}

// TestListensRefuses: what comes from the range and is no good is shown at the range when it is gone, and makes room; who is no
// part of it, the node itself and a peer that is configured, though not run, never come that far and take no place.
func TestListensRefuses(t *testing.T) {
	t.Parallel()
	h := hosts(t, 9)
	inside := netip.PrefixFrom(h[2], 29).Masked()
	d := newDaemonOf(t, Options{Node: "node1"})
	d.send(store.Batch{Synced: true, Events: []store.Event{
		conf(t, "default", `{"bindMode":"NodeIP"}`), bgpNode(t, "node1", h[0].String()+"/32"),
		listener(t, "lab", inside.String(), "1", `{"asNumber":64999}`),
		peer(t, "broken", fmt.Sprintf(`{"peerIP":%q,"asNumber":64999,"filters":["missing"]}`, h[3])),
	}})
	d.waitAt(inside, "0 of 1 neighbours")
	closed := func(from netip.Addr) {
		t.Helper()
		c := dialFrom(t, from, h[0])
		defer c.Close()
		if n, err := c.Read(make([]byte, 1)); n != 0 || err == nil {
			t.Errorf("%s was sent something", from)
		}
	}
	outside := h[8]
	for _, from := range []netip.Addr{outside, h[0], h[3]} {
		closed(from)
	}
	startBIRD(t, birdOther{remote: remote{self: h[2], asn: 64998, peer: h[0], peerASN: 64512, opens: true}}.text())
	d.waitAt(h[2], fmt.Sprintf("wrong AS: %s has AS 64998, but AS 64999 is configured for it", h[2]))
	for range 100 {
		closed(h[1]) // is in the range, which is full
	}
	d.waitAt(inside, fmt.Sprintf("0 of 1 neighbours; %s was refused last: there are 1 already", h[1]))
	if st := d.at(outside); st.Name != "" || strings.Contains(d.at(inside).Info, outside.String()) {
		t.Errorf("who is not in the range: %+v", st)
	}
	d.visitCallers(time.Now().Add(callPatience))
	st := d.waitAt(inside, fmt.Sprintf("%s was refused last: wrong AS", h[2]))
	if st.State != StateListening || st.Limit != 1 || st.FSMState > 1 {
		t.Errorf("the range is %+v", st)
	}
}

// dialFrom connects to BGP's port of a host from an address.
func dialFrom(t testing.TB, from, to netip.Addr) net.Conn {
	t.Helper()
	dialer := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(from, 0))}
	c, err := dialer.DialContext(t.Context(), "tcp", netip.AddrPortFrom(to, DefaultPort).String())
	if err != nil {
		t.Fatal(err)
	}
	if err := c.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Error(err)
	}
	return c
}

// TestListensAfterRestart: a neighbour that had connected before the daemon's restart is waited for, and its routes stay.
func TestListensAfterRestart(t *testing.T) {
	t.Parallel()
	h := hosts(t, 3)
	inside := netip.PrefixFrom(h[0], 24).Masked()
	file := filepath.Join(t.TempDir(), "bgp.callers")
	begin := func(restarting bool) *daemon {
		d := newDaemonOf(t, Options{Node: "node1", CallersFile: file, Restarting: restarting})
		d.send(store.Batch{Synced: true, Events: []store.Event{
			conf(t, "default", `{"bindMode":"NodeIP"}`), bgpNode(t, "node1", h[0].String()+"/32"),
			listener(t, "lab", inside.String(), "", `{"asNumber":64999}`),
		}})
		return d
	}
	first := begin(false)
	startBIRD(t, birdOther{remote: remote{self: h[1], asn: 64999, peer: h[0], peerASN: 64512, opens: true, routes: []string{"203.0.113.0/24"}}}.text())
	first.waitAt(h[1], StateUp)
	poll(t, func() string { return "the file of callers" }, func() bool {
		b, err := os.ReadFile(file)
		return err == nil && string(b) == fmt.Sprintf("[%q]", h[1])
	})
	first.stop()
	second := begin(true)
	// It is a peer before it connects: End-of-RIB is waited for.
	second.waitAt(inside, " of 100 neighbours")
	if st := second.at(h[1]); st.Name != "lab" {
		t.Errorf("the neighbour of before is not waited for: %+v", second.Status(t.Context()).Peers)
	}
	second.waitAt(h[1], StateUp)
	poll(t, func() string { return "the route" }, func() bool { return second.has("203.0.113.0/24") })
	second.stop()

	if err := os.WriteFile(file, []byte(`["10.77.0.1`), 0o600); err != nil {
		t.Fatal(err)
	}
	begin(false).waitAt(inside, "0 of 100 neighbours") // damaged: as if there were none
}

// TestCallersBeforeStart: who had connected before the daemon's restart is not forgotten while BGP waits for the datastore,
// for however long that is away: peers keep the routes of this host for longer.
func TestCallersBeforeStart(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "callers")
	const was = `["10.77.0.9"]`
	if err := os.WriteFile(file, []byte(was), 0o600); err != nil {
		t.Fatal(err)
	}
	c := New(Options{Log: testLog(t), Node: "node1", CallersFile: file})
	for i := range 3 {
		if n := c.visitCallers(time.Now().Add(time.Duration(i+1) * callPatience)); n != 1 {
			t.Errorf("%d neighbours are waited for", n)
		}
	}
	if b, err := os.ReadFile(file); string(b) != was {
		t.Errorf("the file has %q, %v", b, err)
	}
}

// TestCalled: whoever calls, and whatever ranges there are, a neighbour has the settings of the narrowest range that it is in,
// no range has more than its limit, and who is configured stays what he is.
func TestCalled(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		events := []store.Event{
			bgpNode(t, "node1", "10.9.0.1/24"), bgpNode(t, "node2", "10.9.0.2/24"), conf(t, "default", `{"nodeToNodeMeshEnabled":false}`),
			peer(t, "fixed", `{"peerIP":"10.9.0.3","asNumber":64999}`),
		}
		limits := map[string]int{}
		for i, bits := range rapid.SliceOfN(rapid.IntRange(24, 32), 1, 4).Draw(rt, "ranges") {
			name, limit := fmt.Sprintf("range%d", i), rapid.IntRange(1, 4).Draw(rt, "limit")
			limits[name] = limit
			in := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 9, 0, rapid.Byte().Draw(rt, "in") % 16}), bits).Masked()
			events = append(events, listener(t, name, in.String(), fmt.Sprint(limit), `{"asNumber":64999}`))
		}
		v := &View{}
		if _, err := v.Apply(clustertest.Step("", store.Batch{Events: events, Synced: true})); err != nil {
			rt.Fatal(err)
		}
		for _, b := range rapid.SliceOfDistinct(rapid.ByteMax(20), rapid.ID).Draw(rt, "callers") {
			v.callers = append(v.callers, netip.AddrFrom4([4]byte{10, 9, 0, b}))
		}
		c, err := Desired(v, "node1")
		if err != nil {
			rt.Fatal(err)
		}
		var ranges []Peer
		for _, p := range c.Peers {
			if p.listens() {
				ranges = append(ranges, p)
			}
		}
		members, seen := map[string]int{}, map[netip.Addr]bool{}
		for _, p := range c.Peers {
			if !p.Addr.IsValid() {
				continue
			}
			if seen[p.Addr] {
				rt.Fatalf("%s is two peers", p.Addr)
			}
			seen[p.Addr] = true
			if !p.Range.IsValid() {
				continue
			}
			in, ok := rangeOf(ranges, p.Addr)
			switch members[p.Name]++; {
			case !ok || in.Name != p.Name || in.Range != p.Range || !p.Passive || !slices.Contains(v.callers, p.Addr):
				rt.Fatalf("%+v, of the range %+v", p, in)
			case members[p.Name] > limits[p.Name]:
				rt.Fatalf("%s has %d neighbours, and its limit is %d", p.Name, members[p.Name], limits[p.Name])
			case p.PoolsOnly != (p.Addr == netip.MustParseAddr("10.9.0.2")):
				rt.Fatalf("%+v: only a node is judged as one", p)
			}
		}
		for _, a := range v.callers {
			if in, ok := rangeOf(ranges, a); ok && !seen[a] && a != c.NextHop && members[in.Name] < in.Limit {
				rt.Fatalf("%s is no peer, and %s has room", a, in.Name)
			}
		}
		if !seen[netip.MustParseAddr("10.9.0.3")] {
			rt.Fatal("the peer that is configured is gone")
		}
	})
}

// TestListensToNodes: a node signs what it opens with the cluster's key, which the listener of a range without a password has
// to know before the node has called. One of Calico's has no key.
func TestListensToNodes(t *testing.T) {
	t.Parallel()
	h := hosts(t, 3)
	inside := netip.PrefixFrom(h[0], 24).Masked()
	keys := NewKeyring(keysOf("a"))
	ours := fmt.Sprintf(`%q:"direct",%q:%q`, store.AnnotationAccepts, store.AnnotationBGPKeys, published("a"))
	d := newDaemonOf(t, Options{Node: "node1"})
	d.SetKeys(keys)
	d.send(store.Batch{Synced: true, Events: []store.Event{
		conf(t, "default", `{"bindMode":"NodeIP","nodeToNodeMeshEnabled":false}`),
		labelled(t, bgpNode(t, "node1", h[0].String()+"/32"), "", ours), labelled(t, bgpNode(t, "node2", h[1].String()+"/32"), "", ours),
		bgpNode(t, "node3", h[2].String()+"/32"), listener(t, "clients", inside.String(), "", `{"asNumber":64512}`),
	}})
	d.waitAt(inside, "0 of 100 neighbours")
	for i, password := range []string{keys.keys[0].text.reveal(), ""} {
		startBIRD(t, birdOther{remote: remote{self: h[i+1], asn: 64512, peer: h[0], peerASN: 64512, opens: true, password: password}}.text())
	}
	d.waitAt(h[1], StateUp)
	d.waitAt(h[2], StateUp)
}
