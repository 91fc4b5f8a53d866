package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/internal/nl"
	"github.com/routerd/routerd/dataplane/reconcile"
	"github.com/routerd/routerd/integration/await"
)

// faulty is a transport that refuses what a test says, on the way to the real
// kernel.
type faulty struct {
	transport
	before func(*nl.Batch)

	mu sync.Mutex
	// refuse the nth message from now that changes something, counting from
	// 1, with errno. 0: none.
	nth   int
	errno unix.Errno
	// broken makes the next send fail as a whole; with done the kernel takes it
	// before that.
	broken error
	done   bool
	// interrupt that many listings.
	interrupt int
	used      int
}

func (f *faulty) replace(c *nl.Conn) {
	f.transport.Close()
	f.transport = c
}

func (f *faulty) Batch(b *nl.Batch, answer func(int, nl.Message)) (map[int]error, error) {
	if f.before != nil {
		f.before(b)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.broken != nil {
		err := f.broken
		f.broken = nil
		f.used++
		if f.done {
			if _, sent := f.transport.Batch(b, answer); sent != nil {
				return nil, sent
			}
		}
		return nil, err
	}
	if f.nth == 0 || f.nth > b.Len() {
		f.nth = max(0, f.nth-b.Len())
		return f.transport.Batch(b, answer)
	}
	// All but the chosen one go to the kernel.
	chosen := f.nth - 1
	f.nth = 0
	f.used++
	if isRemoval(b.Message(chosen)) && judgeRemove(op{}, f.errno).Outcome == reconcile.Succeeded {
		// The kernel says so only of what is not there: somebody else removed it
		// in the same moment.
		errs, err := f.transport.Batch(b, answer)
		if errs == nil {
			errs = map[int]error{}
		}
		errs[chosen] = &nl.Error{Errno: f.errno}
		return errs, err
	}
	var rest nl.Batch
	var places []int
	for i := range b.Len() {
		if i != chosen {
			m := b.Message(i)
			rest.Begin(nl.Value(m[4:]).Uint16(), nl.Value(m[6:]).Uint16(), m[nl.Header:]...)
			places = append(places, i)
		}
	}
	errs := map[int]error{chosen: &nl.Error{Errno: f.errno}}
	got, err := f.transport.Batch(&rest, answer)
	for i, e := range got {
		errs[places[i]] = e
	}
	return errs, err
}

// isRemoval reports whether a message is of a type RTM_DEL… (linux/rtnetlink.h:
// four types for each kind of object, of which that is the second).
func isRemoval(msg []byte) bool { return binary.NativeEndian.Uint16(msg[4:])%4 == 1 }

func (f *faulty) Dump(b *nl.Batch, fn func(nl.Message)) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.interrupt > 0 {
		f.interrupt--
		f.used++
		// What an interrupted listing shows must not count: show nothing of it.
		if err := f.transport.Dump(b, func(nl.Message) {}); err != nil {
			return err
		}
		return nl.ErrInterrupted
	}
	return f.transport.Dump(b, fn)
}

// refuse arms the fault and returns how often one was used before.
func (f *faulty) refuse(nth int, errno unix.Errno) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.nth, f.errno = nth, errno
	return f.used
}

func (f *faulty) uses() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.used
}

// scenarios change the wish in every way. Each begins after prepare, leaves
// the host as host says, and is gone through once for each number in nth, of
// the message to refuse: one of each kind.
var scenarios = map[string]struct {
	prepare, act func(k *running)
	nth          []int
}{
	"create": {
		prepare: func(*running) {},
		act:     func(k *running) { k.Update(dataplane.SourceCore, host(), nil) },
		nth:     []int{1, 2, 3, 4, 5, 6, 8},
	},
	"change": {
		prepare: func(k *running) { k.Update(dataplane.SourceCore, host(), nil) },
		act: func(k *running) {
			k.Update(dataplane.SourceCore, []dataplane.Object{
				via(7, "10.0.0.7", "up0"), via(8, "10.0.0.8", "up0"), route("192.168.1.0/26", 8),
				dataplane.Neighbour{Link: nameVXLAN, Addr: addr("192.168.1.1"), MAC: mac("66:00:00:00:00:01")},
			}, nil)
			k.settled()
			k.Update(dataplane.SourceCore, host(), nil)
		},
		nth: []int{1, 2, 4},
	},
	"remove and come again": {
		prepare: func(k *running) { k.Update(dataplane.SourceCore, host(), nil) },
		act: func(k *running) {
			k.Replace(dataplane.SourceCore, nil)
			k.settled()
			k.Replace(dataplane.SourceCore, host())
		},
		nth: []int{1, 2, 4, 6, 8, 10},
	},
}

// settled waits until everything is as wanted, whatever was refused.
func (r *running) settled() {
	r.t.Helper()
	await.Until(r.t, "all done", func() error {
		if r.want.HasDue(false) || r.want.HasDue(true) {
			return errors.New("work is due")
		}
		if _, ok := r.want.Next(); ok {
			return errors.New("work is delayed")
		}
		for _, s := range r.Statuses() {
			if s.State != dataplane.Done {
				return fmt.Errorf("%v is %v: %v", s.Object, s.State, s.Err)
			}
		}
		return nil
	})
}

func TestRefusedMessagesConverge(t *testing.T) {
	t.Parallel()
	for name, scenario := range scenarios {
		for _, errno := range []unix.Errno{unix.EINTR, unix.ENOBUFS, unix.ENODEV, unix.EPERM, unix.EBUSY, unix.EEXIST, unix.ENOENT} {
			t.Run(fmt.Sprintf("%s/%s", name, unix.ErrnoName(errno)), func(t *testing.T) {
				t.Parallel()
				l := newLab(t)
				l.wire("up0", "up1", "10.0.0.1/24")
				var f *faulty
				k := l.start(through(func(t transport) transport {
					f = &faulty{transport: t}
					return f
				}))
				k.synced()
				for _, n := range scenario.nth {
					scenario.prepare(k)
					k.settled()
					used := f.refuse(n, errno)
					scenario.act(k)
					k.settled()
					if f.uses() != used+1 {
						t.Errorf("message %d was not refused", n)
					}
					l.shows("ip -d route", hostRoutes)
					l.shows("ip nexthop", hostNextHops)
					k.Replace(dataplane.SourceCore, nil)
					k.settled()
				}
			})
		}
	}
}

func TestBrokenConnectionIsReplaced(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.wire("up0", "up1", "10.0.0.1/24")
	var f *faulty
	k := l.start(through(func(t transport) transport {
		f = &faulty{transport: t}
		return f
	}))
	k.synced()
	k.ready()
	f.mu.Lock()
	f.broken = errors.New("socket died")
	old := f.transport
	f.mu.Unlock()
	k.Update(dataplane.SourceCore, host(), nil)
	k.settled()
	l.shows("ip -d route", hostRoutes)
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.used != 1 || f.transport == old {
		t.Errorf("the fault was used %d times; replaced: %v", f.used, f.transport != old)
	}
}

func TestInterruptedListingsAreRepeated(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.wire("up0", "up1", "10.0.0.1/24")
	first := l.start()
	first.put(host()...)
	first.stop()
	f := &faulty{interrupt: maxInterrupted + 10}
	k := l.start(through(func(t transport) transport { f.transport = t; return f }))
	k.wait(k.Replace(dataplane.SourceCore, host()))
	k.synced()
	k.ready()
	if f.interrupt != 0 || f.used != maxInterrupted+10 {
		t.Errorf("%d interruptions left, %d used", f.interrupt, f.used)
	}
	if n := k.writer.writes.Load(); n != 0 {
		t.Errorf("%d writes after interrupted listings of a kernel that was as wanted", n)
	}
}

func TestInvalidObjectsSayWhatIsWrong(t *testing.T) {
	t.Parallel()
	tests := []struct {
		object dataplane.Object
		want   string
	}{
		{dataplane.Link{Name: "tunnel-with-a-long-name", Type: dataplane.LinkVXLAN, Port: 1}, "name: a device's name has 1 to 15 bytes"},
		{dataplane.Link{Name: "x", Type: "gre"}, `type: a device of type "gre" cannot be made here; use ipip, vxlan or ip6tnl`},
		{dataplane.Link{Name: "x", Type: dataplane.LinkVXLAN, VNI: 1 << 24, Port: 1}, "vni: a VXLAN network identifier has 24 bits"},
		{dataplane.Link{Name: "x", Type: dataplane.LinkVXLAN}, "port: give the UDP port, 4789 by default"},
		{dataplane.Address{Link: "x"}, "prefix: give an address with its length"},
		{dataplane.Sysctl{Name: "../../etc/passwd"}, "name: give a path below /proc/sys such as net/ipv4/ip_forward"},
		{dataplane.Neighbour{Link: "x"}, "addr: give the neighbour's address"},
		{dataplane.Neighbour{Link: "x", Addr: addr("10.0.0.1")}, "mac: give the neighbour's MAC address"},
		{dataplane.FDBEntry{Link: "x"}, "dst: give the address of the other tunnel end"},
		{dataplane.NextHop{Link: "x", Gateway: addr("10.0.0.1")}, "id: numbers begin with 1"},
		{dataplane.NextHop{ID: 1, Link: "x"}, "gateway: give the address of the gateway"},
		{dataplane.NextHop{ID: 1, Gateway: addr("10.0.0.1")}, "link: name the device towards the gateway"},
		{dataplane.Route{Table: 254, Link: "x"}, "prefix: give the destination"},
		{dataplane.Route{Prefix: pfx("10.0.0.0/8"), Link: "x"}, "table: give the number of the routing table; the main one is 254"},
		{dataplane.Route{Prefix: pfx("10.0.0.0/8"), Table: 254}, "next hop: a route has exactly one of a next hop, a link, and the type blackhole"},
		{dataplane.Route{Prefix: pfx("10.0.0.0/8"), Table: 254, Link: "x", NextHop: 1}, "next hop: a route has exactly one of a next hop, a link, and the type blackhole"},
	}
	for _, tt := range tests {
		if err := validate(tt.object); err == nil || err.Error() != tt.want {
			t.Errorf("%v: %v; want %s", tt.object, err, tt.want)
		}
	}
	for _, o := range host() {
		if err := validate(o); err != nil {
			t.Errorf("%v: %v", o, err)
		}
	}
	// One that can never be does not stop the others.
	l := newLab(t)
	l.wire("up0", "up1", "10.0.0.1/24")
	k := l.start()
	bad := dataplane.Route{Prefix: pfx("10.9.0.0/16"), Table: 254}
	k.Update(dataplane.SourceCore, slices.Concat([]dataplane.Object{bad}, host()), nil)
	if err := k.failed(bad); err.Error() != tests[14].want {
		t.Errorf("error %v", err)
	}
	l.shows("ip -d route", hostRoutes)
}
