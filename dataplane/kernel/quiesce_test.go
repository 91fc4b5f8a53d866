package kernel

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/integration/await"
)

// diary holds what a kernel does, in order.
type diary struct {
	mu  sync.Mutex
	did []string
}

func (d *diary) note(s string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.did = append(d.did, s)
}

func (d *diary) wrote(kind dataplane.Kind, removed bool, n int) {
	if removed {
		d.note(fmt.Sprintf("removed %d %s", n, kind))
	} else {
		d.note(fmt.Sprintf("%d %s", n, kind))
	}
}

// forget is for what went before a test.
func (d *diary) forget() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.did = nil
}

// expect compares what was done since it was asked last.
func (d *diary) expect(t *testing.T, name string, want ...string) {
	t.Helper()
	d.mu.Lock()
	defer d.mu.Unlock()
	if diff := cmp.Diff(want, d.did); diff != "" {
		t.Errorf("%s (-want +got):\n%s", name, diff)
	}
	d.did = nil
}

// tunnel is a device of newHost's.
func tunnel() dataplane.Link {
	return dataplane.Link{
		Name: nameVXLAN, Type: dataplane.LinkVXLAN, MTU: 1450, MAC: mac("66:07:02:c1:cc:60"), VNI: 4096, Port: 4789, Local: addr("10.0.0.1"), Parent: "up0",
	}
}

// behind is what leads through the tunnel to a peer: the neighbour, the FDB entry
// and the next hop.
func behind(id dataplane.NextHopID, gateway, peer string) (_, _, _ dataplane.Object) {
	vtep := dataplane.MAC{2, 0, 0, 0, 0, byte(id)}
	return dataplane.Neighbour{Link: nameVXLAN, Addr: addr(gateway), MAC: vtep},
		dataplane.FDBEntry{Link: nameVXLAN, MAC: vtep, Dst: addr(peer)}, via(id, gateway, nameVXLAN)
}

// What a packet looks up after its route is not taken away before packets that
// chose the route before its change are gone. Where no route has changed, and
// for what no packet looks up, nothing is waited for.
func TestPacketsAreOutBeforeRemoval(t *testing.T) {
	t.Parallel()
	var d diary
	_, k := newHost(t, func(cfg *Config, _ *int, _ *func(transport) transport) {
		cfg.quiesce = func() { d.note("packets are out") }
		cfg.Hooks.Written = d.wrote
	})
	device := tunnel()
	neighbour, fdb, hop := behind(8, "192.168.2.1", "10.0.0.2")
	other, _, _ := behind(9, "192.168.2.2", "10.0.0.2")
	k.put(device, neighbour, other, fdb, hop, route("192.168.2.0/26", 8))
	d.forget()

	for _, step := range []struct {
		name string
		put  []dataplane.Object
		del  []dataplane.Object
		want []string
	}{
		{"a next hop leaves the tunnel", []dataplane.Object{via(8, "10.0.0.2", "up0")}, []dataplane.Object{neighbour, fdb}, []string{
			"1 nexthop", "packets are out", "removed 1 neighbour", "removed 1 fdb",
		}},
		{"no route changed since", nil, []dataplane.Object{other}, []string{"removed 1 neighbour"}},
		{"a route goes, which says itself what becomes of packets", nil, []dataplane.Object{route("192.168.2.0/26", 8)}, []string{"removed 1 route"}},
		{"the device, after that", nil, []dataplane.Object{device}, []string{"packets are out", "removed 1 link"}},
	} {
		k.wait(k.Update(dataplane.SourceCore, step.put, keysOf(step.del...)))
		d.expect(t, step.name, step.want...)
	}
}

// While what a change leaves behind is removed the next one comes, for another
// peer: what that leaves behind stays until its own next hop is written.
func TestChangeDuringRemoval(t *testing.T) {
	t.Parallel()
	var d diary
	var second func()
	_, k := newHost(t, func(cfg *Config, _ *int, _ *func(transport) transport) {
		cfg.quiesce = func() {
			d.note("packets are out")
			if do := second; do != nil {
				second = nil
				do()
			}
		}
		cfg.Hooks.Written = d.wrote
	})
	device := tunnel()
	neighbour1, fdb1, hop1 := behind(8, "192.168.1.1", "10.0.0.2")
	neighbour2, fdb2, hop2 := behind(9, "192.168.2.1", "10.0.0.3")
	k.put(device, neighbour1, neighbour2, fdb1, fdb2, hop1, hop2, route("192.168.1.0/26", 8), route("192.168.2.0/26", 9))
	d.forget()

	last := make(chan dataplane.Revision, 1)
	second = func() {
		last <- k.Update(dataplane.SourceCore, []dataplane.Object{via(9, "10.0.0.3", "up0")}, keysOf(neighbour2, fdb2, device))
	}
	k.wait(k.Update(dataplane.SourceCore, []dataplane.Object{via(8, "10.0.0.2", "up0")}, keysOf(neighbour1, fdb1)))
	k.wait(<-last)
	d.expect(t, "two changes",
		"1 nexthop", "packets are out", "removed 1 neighbour", // of the first
		"1 nexthop", "packets are out", // of the second, before anything else goes
		"removed 1 neighbour", "removed 2 fdb", "removed 1 link")
}

// While a change is written the next one comes, for another peer: its next hop
// is not written before its neighbour.
func TestChangeDuringChange(t *testing.T) {
	t.Parallel()
	var d diary
	var second func()
	_, k := newHost(t, func(cfg *Config, _ *int, _ *func(transport) transport) {
		cfg.Hooks.Written = func(kind dataplane.Kind, removed bool, n int) {
			d.wrote(kind, removed, n)
			if do := second; do != nil && kind == dataplane.KindNeighbour {
				second = nil
				do()
			}
		}
	})
	k.put(tunnel(), via(8, "10.0.0.2", "up0"), via(9, "10.0.0.3", "up0"), route("192.168.1.0/26", 8), route("192.168.2.0/26", 9))
	d.forget()

	enter := func(id dataplane.NextHopID, gateway, peer string) dataplane.Revision {
		neighbour, fdb, hop := behind(id, gateway, peer)
		return k.Update(dataplane.SourceCore, []dataplane.Object{neighbour, fdb, hop}, nil)
	}
	last := make(chan dataplane.Revision, 1)
	second = func() { last <- enter(9, "192.168.2.1", "10.0.0.3") }
	k.wait(enter(8, "192.168.1.1", "10.0.0.2"))
	k.wait(<-last)
	d.expect(t, "two changes", "1 fdb", "1 neighbour", "1 fdb", "1 neighbour", "2 nexthop")
}

// A next hop that cannot be moved yet, because the kernel refuses it or its new
// device is not there, keeps all that it leads through.
func TestStuckNextHopKeepsItsWay(t *testing.T) {
	t.Parallel()
	elsewhere := via(8, "172.31.0.2", "up2")
	nowhere := dataplane.NextHop{ID: 8, Gateway: addr("172.31.0.2"), Link: "up0"}
	for _, test := range []struct {
		name string
		hop  dataplane.NextHop
		cure func(*lab)
	}{
		{"it waits for its new device", elsewhere, func(l *lab) { l.wire("up2", "up3", "172.31.0.1/24") }},
		{"the kernel refuses it", nowhere, func(l *lab) { l.run("ip addr add 172.31.0.1/24 dev up0") }},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			var d diary
			l, k := newHost(t, func(cfg *Config, _ *int, _ *func(transport) transport) { cfg.Hooks.Written = d.wrote })
			device, local := tunnel(), dataplane.Address{Link: nameVXLAN, Prefix: netip.MustParsePrefix("192.168.1.1/32")}
			neighbour, fdb, hop := behind(8, "192.168.2.1", "10.0.0.2")
			other, otherFDB, otherHop := behind(9, "192.168.3.1", "10.0.0.3")
			k.put(device, local, neighbour, fdb, hop, other, otherFDB, otherHop, route("192.168.2.0/26", 8))
			d.forget()

			k.Update(dataplane.SourceCore, []dataplane.Object{test.hop}, keysOf(device, local, neighbour, fdb, other, otherFDB, otherHop))
			await.Until(t, "held", func() error {
				err := k.want.Failure(device.Key())
				if err == nil || !strings.Contains(err.Error(), "nexthop id 8 leads there") {
					return fmt.Errorf("the device's removal: %v", err)
				}
				return nil
			})
			d.expect(t, "what nothing leads through goes", "removed 1 nexthop", "removed 1 neighbour", "removed 1 fdb")
			test.cure(l)
			await.True(t, "the device is gone", func() bool { return k.want.Settled(device.Key()) })
			d.expect(t, "the rest, when the next hop has moved", "1 nexthop", "removed 1 neighbour", "removed 1 fdb", "removed 1 address", "removed 1 link")
		})
	}
}

// A change of a device in place is one message: what is on it stays.
func TestNeighboursOutliveMTU(t *testing.T) {
	t.Parallel()
	var d diary
	_, k := newHost(t, func(cfg *Config, _ *int, _ *func(transport) transport) { cfg.Hooks.Written = d.wrote })
	neighbour, fdb, hop := behind(8, "192.168.2.1", "10.0.0.2")
	device := tunnel()
	k.put(device, neighbour, fdb, hop, route("192.168.2.0/26", 8))
	d.forget()
	device.MTU = 1300
	k.put(device)
	d.expect(t, "another MTU", "1 link")
	device.MAC = mac("66:07:02:c1:cc:99") // the kernel throws all neighbours away
	k.put(device)
	// The wish is met before the kernel's word of the neighbour has been read.
	await.Until(t, "another address", func() error {
		d.mu.Lock()
		defer d.mu.Unlock()
		if diff := cmp.Diff([]string{"1 link", "1 neighbour"}, d.did); diff != "" {
			return errors.New(diff)
		}
		return nil
	})
}

// A kernel that can be asked is asked, and nothing is waited for by the clock;
// with nohz_full it cannot.
func TestMembarrier(t *testing.T) {
	t.Parallel()
	const query = 0 // MEMBARRIER_CMD_QUERY: which commands there are
	commands, _, errno := unix.Syscall(unix.SYS_MEMBARRIER, query, 0, 0)
	if errno != 0 {
		t.Fatalf("membarrier: %v", errno)
	}
	canAsk := commands&membarrierGlobal != 0
	if err := membarrier(); (err == nil) != canAsk {
		t.Errorf("membarrier: %v, and the kernel says that it has it: %t", err, canAsk)
	}
	start := time.Now()
	quiesce()
	took := time.Since(start)
	if !canAsk && took < quiesceAfter {
		t.Errorf("waited for %v only", took)
	}
	t.Logf("packets were out after %v; the kernel was asked: %t", took, canAsk)
}

// A packet that waits for the neighbour inside the tunnel leaves the moment the
// neighbour is there, to the host that the FDB entry names: that is there before.
func TestWaitingPacketIsKept(t *testing.T) {
	t.Parallel()
	l, k := newHost(t)
	device, local := tunnel(), dataplane.Address{Link: nameVXLAN, Prefix: pfx("192.168.1.1/32")}
	neighbour, fdb, hop := behind(8, "192.168.2.1", "10.0.0.2")
	k.put(device, local, hop, route("192.168.2.0/26", 8))
	var err error
	l.do(func() {
		var c net.Conn
		if c, err = net.Dial("udp4", "192.168.2.9:9"); err == nil {
			_, err = c.Write([]byte("waits"))
			err = errors.Join(err, c.Close())
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	const show = "ip neigh show dev " + nameVXLAN
	l.shows(show, "192.168.2.1 INCOMPLETE")
	k.put(neighbour, fdb)
	l.shows(show, "192.168.2.1 lladdr 02:00:00:00:00:08 PERMANENT")
	// Requests for the neighbour had nowhere to go and do not count.
	const want = `"tx":{"bytes":33,"packets":1,`
	if got := l.run("ip -s -j link show dev " + nameVXLAN); !strings.Contains(got, want) {
		t.Errorf("the packet that waited has not left: want %s in\n%s", want, got)
	}
}
