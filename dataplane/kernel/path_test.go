package kernel

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/kernel/saboteur"
	"github.com/routerd/routerd/integration/await"
)

// pathState is a host of which everything may change.
type pathState struct {
	link  dataplane.Link
	addr  int
	peers map[int]int // to the variant of the peer
	on    bool        // the offload
}

// objects is the wish.
func (s *pathState) objects() []dataplane.Object {
	objs := []dataplane.Object{
		s.link,
		dataplane.Address{Link: nameVXLAN, Prefix: pfx(fmt.Sprintf("192.168.0.%d/32", s.addr))},
		dataplane.Feature{Link: nameVXLAN, Name: offload, On: s.on},
		dataplane.Sysctl{Name: "net/ipv4/ip_forward", Value: "1"},
	}
	for i, variant := range s.peers {
		m, id := dataplane.MAC{0x66, 7, 2, 0xc2, byte(variant), byte(i)}, dataplane.NextHopID(100+i)
		vtep := addr(fmt.Sprintf("192.168.100.%d", i+1))
		if variant%2 == 0 { // without encapsulation
			objs = append(objs, dataplane.NextHop{ID: id, Link: "up0", Gateway: addr(fmt.Sprintf("10.0.0.%d", 100+i)), OnLink: true})
		} else {
			objs = append(objs,
				dataplane.Neighbour{Link: nameVXLAN, Addr: vtep, MAC: m},
				dataplane.FDBEntry{Link: nameVXLAN, MAC: m, Dst: addr(fmt.Sprintf("10.0.0.%d", 100+i)), Port: uint16(variant / 4 * 5000)},
				dataplane.NextHop{ID: id, Link: nameVXLAN, Gateway: vtep, OnLink: true})
		}
		for j := range 3 {
			r := route(fmt.Sprintf("172.20.%d.%d/26", i, j*64), id)
			r.MTU = uint32(variant / 3 * 1300)
			objs = append(objs, r)
		}
	}
	for i := range s.peers {
		if _, both := s.peers[i+1]; both {
			g := dataplane.NextHopGroup{ID: dataplane.NextHopID(200 + i), Members: dataplane.GroupOf(
				dataplane.GroupMember{ID: dataplane.NextHopID(100 + i), Weight: 1 + s.addr}, dataplane.GroupMember{ID: dataplane.NextHopID(101 + i)})}
			objs = append(objs, g, route(fmt.Sprintf("172.21.%d.0/24", i), g.ID))
		}
	}
	return objs
}

// change changes something.
func (s *pathState) change(r *rand.Rand) {
	switch r.IntN(8) {
	case 0:
		s.link.VNI = 4096 + r.Uint32N(2)
	case 1:
		s.link.MTU = 1300 + r.IntN(3)*50
	case 2:
		s.link.Local = addr([]string{"10.0.0.1", "10.0.0.3"}[r.IntN(2)])
	case 3:
		s.link.MAC[5] = byte(r.IntN(3))
	case 4:
		s.addr = 1 + r.IntN(3)
	case 5:
		s.on = !s.on
	default:
		for range 1 + r.IntN(6) {
			if i := r.IntN(20); r.IntN(3) == 0 {
				delete(s.peers, i)
			} else {
				s.peers[i] = r.IntN(6)
			}
		}
	}
}

// TestPathIndependence goes through changes of the wish, strikes of somebody
// else, restarts and refusals in any order. After quiet the kernel is what a
// fresh start on the same wish makes it, and a fresh start there does nothing.
func TestPathIndependence(t *testing.T) {
	t.Parallel()
	for range 6 {
		seed := rand.Uint64()
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			walk(t, rand.New(rand.NewPCG(seed, 0)))
		})
	}
}

func walk(t *testing.T, r *rand.Rand) {
	var f *faulty
	wrap := through(func(inner transport) transport {
		f = &faulty{transport: inner}
		return f
	})
	l, k := dualHost(t, wrap)
	state := pathState{link: host()[0].(dataplane.Link), addr: 1, peers: map[int]int{1: 1, 2: 0, 3: 3}}
	sab := &saboteur.Saboteur{Exec: l.try, Rand: r, Devices: []string{nameVXLAN}, Sysctls: []string{"net/ipv4/ip_forward"}}
	k.Replace(dataplane.SourceCore, state.objects())
	for range 40 {
		switch n := r.IntN(20); {
		case n < 8: // some keys
			before := map[dataplane.Key]dataplane.Object{}
			for _, o := range state.objects() {
				before[o.Key()] = o
			}
			state.change(r)
			var put []dataplane.Object
			for _, o := range state.objects() {
				if before[o.Key()] != o {
					put = append(put, o)
				}
				delete(before, o.Key())
			}
			var del []dataplane.Key
			for key := range before {
				del = append(del, key)
			}
			k.Update(dataplane.SourceCore, put, del)
		case n < 10: // all of it
			state.change(r)
			k.Replace(dataplane.SourceCore, state.objects())
		case n < 15:
			st, err := sab.Strike()
			t.Logf("strike %q: %v", st.Command, err)
		case n < 17:
			errnos := []unix.Errno{unix.EINTR, unix.ENOBUFS, unix.ENODEV, unix.EPERM, unix.EBUSY, unix.EEXIST, unix.ENOENT, unix.EINVAL}
			f.refuse(1+r.IntN(6), errnos[r.IntN(len(errnos))])
		case n < 18:
			k.stop()
			k = l.start(wrap)
			k.Replace(dataplane.SourceCore, state.objects())
			k.synced()
		default: // let it come to rest, or not
			k.wait(k.Update(dataplane.SourceCore, nil, nil))
		}
	}
	f.refuse(0, 0)
	k.caughtUp()
	l.isAsAFreshStartMakesIt(k, state.objects())
}

// TestUnchangedWorldSeesNoMessage listens to all that the kernel tells while
// complete checks find nothing to do, over a restart.
func TestUnchangedWorldSeesNoMessage(t *testing.T) {
	t.Parallel()
	l, k := dualHost(t)
	objs := busyHost()
	k.put(objs...)
	k.settled()
	var ear *listener
	var err error
	l.do(func() { ear, err = listen(bufferBytes) })
	if err != nil {
		t.Fatal(err)
	}
	defer ear.Close()
	ports := map[uint32]bool{k.writer.conn.Port(): true}
	k.stop()
	k = l.start(everyCheck(time.Millisecond))
	ports[k.writer.conn.Port()] = true
	k.wait(k.Replace(dataplane.SourceCore, objs))
	k.synced()
	k.ready()
	await.Until(t, "twenty checks", func() error {
		if c := strings.Count(k.log.String(), "tables listed"); c < 20 {
			return fmt.Errorf("%d checks", c)
		}
		return nil
	})
	// A change that we make shows that the ear hears.
	k.put(route("172.31.0.0/16", 8))
	await.Until(t, "the ear hears", func() error {
		events, _, err := ear.take()
		for _, m := range events {
			if !ports[m.Port] {
				continue // IPv6 makes changes of its own
			}
			if r, ok := parseRoute(m.Body); ok && r.key.Prefix == pfx("172.31.0.0/16") {
				return nil
			}
			t.Errorf("message %d from us in an unchanged world", m.Type)
		}
		if err != nil {
			return err
		}
		return fmt.Errorf("%d messages, none about the new route", len(events))
	})
	if n := k.writer.writes.Load(); n != 1 {
		t.Errorf("%d writes, want the one", n)
	}
}
