package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/integration/await"
)

// stream sends a thousand numbered datagrams a second from one namespace to
// another until it is stopped.
type stream struct {
	from, to *net.UDPConn
	sent     atomic.Uint32
	refused  atomic.Uint32
	why      atomic.Pointer[error] // of the last refusal
	done     chan struct{}
	sender   sync.WaitGroup
	receiver sync.WaitGroup

	mu     sync.Mutex
	seen   map[uint32]bool
	last   time.Time
	gap    time.Duration // the longest between two arrivals
	closed bool
}

func newStream(t testing.TB, a, b *lab, from, to string) *stream {
	t.Helper()
	s := &stream{done: make(chan struct{}), seen: map[uint32]bool{}}
	var err1, err2 error
	b.do(func() { s.to, err1 = net.ListenUDP("udp", net.UDPAddrFromAddrPort(addrPort(to, 7000))) })
	a.do(func() {
		s.from, err2 = net.DialUDP("udp", net.UDPAddrFromAddrPort(addrPort(from, 0)), net.UDPAddrFromAddrPort(addrPort(to, 7000)))
	})
	if err := errors.Join(err1, err2); err != nil {
		t.Fatal(err)
	}
	s.receiver.Go(s.receive)
	s.sender.Go(s.send)
	t.Cleanup(func() { s.stop(t) })
	await.Until(t, "the stream flows", func() error {
		if s.received() < 20 {
			return fmt.Errorf("%d received", s.received())
		}
		return nil
	})
	return s
}

func (s *stream) send() {
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	var b [1000]byte
	for {
		select {
		case <-s.done:
			return
		case <-tick.C:
			binary.BigEndian.PutUint32(b[:], s.sent.Add(1))
			if _, err := s.from.Write(b[:]); err != nil {
				s.refused.Add(1)
				s.why.Store(&err)
			}
		}
	}
}

func (s *stream) receive() {
	var b [2000]byte
	for {
		n, err := s.to.Read(b[:])
		if err != nil {
			return
		}
		now := time.Now()
		s.mu.Lock()
		if !s.last.IsZero() {
			s.gap = max(s.gap, now.Sub(s.last))
		}
		if s.last = now; n >= 4 {
			s.seen[binary.BigEndian.Uint32(b[:])] = true
		}
		s.mu.Unlock()
	}
}

func (s *stream) received() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.seen)
}

// stop ends the stream and returns how many datagrams were lost, once as many
// have arrived as will.
func (s *stream) stop(t testing.TB) (undone int) {
	s.mu.Lock()
	closed := s.closed
	s.closed = true
	s.mu.Unlock()
	if closed {
		return 0
	}
	close(s.done)
	s.sender.Wait()
	// What was sent last crosses two devices of one machine.
	deadline := time.Now().Add(2 * time.Second)
	for s.received() < int(s.sent.Load()) && time.Now().Before(deadline) {
		tick := time.NewTimer(5 * time.Millisecond)
		<-tick.C
	}
	s.from.Close()
	s.to.Close()
	s.receiver.Wait()
	undone = int(s.sent.Load()) - s.received()
	if err := s.why.Load(); err != nil {
		t.Logf("last refusal: %v", *err)
	}
	t.Logf("%d sent, %d lost, %d refused, longest gap %v", s.sent.Load(), undone, s.refused.Load(), s.gap.Round(time.Millisecond))
	return undone
}

// twoHosts are a lab with a Kernel that has host's objects, and a peer that
// answers to them on both of two VXLAN networks.
func twoHosts(t testing.TB) (a, b *lab, k *running) {
	t.Helper()
	a, b = newLab(t), newLab(t)
	var tid int
	b.do(func() { tid = unix.Gettid() })
	a.run("ip link add up0 type veth peer name up1", fmt.Sprintf("ip link set up1 netns %d", tid), "ip link set up0 up",
		"ip addr add 10.0.0.1/24 dev up0", "ip addr add 10.0.0.3/24 dev up0")
	b.run("ip link set up1 up", "ip addr add 10.0.0.2/24 dev up1")
	for _, name := range []string{"all", "default", "lo", "up1"} {
		b.run("sysctl -qw net.ipv4.conf." + name + ".rp_filter=0")
	}
	for i, vni := range []string{"4096", "4097"} {
		dev := fmt.Sprint("vx", i)
		b.run("ip link add "+dev+" address 66:07:02:c1:cc:61 type vxlan id "+vni+" dstport 4789 local 10.0.0.2 dev up1 nolearning",
			"ip link set "+dev+" up", "sysctl -qw net.ipv4.conf."+dev+".rp_filter=0")
	}
	b.run("ip addr add 192.168.1.1/32 dev vx0")
	await.Until(t, "carrier", func() error {
		if out := a.run("ip -o link show up0"); !strings.Contains(out, "LOWER_UP") {
			return errors.New(out)
		}
		return nil
	})
	k = a.start()
	k.synced()
	k.put(host()...)
	return a, b, k
}

// TestChangesInPlaceLoseNothing sends over a tunnel while it is changed.
func TestChangesInPlaceLoseNothing(t *testing.T) {
	t.Parallel()
	base := host()[0].(dataplane.Link)
	moved, smaller, renewed, at9 := base, base, base, host()[1].(dataplane.Address)
	moved.Local = addr("10.0.0.3")
	smaller.MTU = 1300
	renewed.MAC = mac("66:00:00:00:00:09")
	at9.Prefix = pfx("192.168.0.9/32")
	for _, tt := range []struct {
		name    string
		objects []dataplane.Object // put one after the other, and then as it was
	}{
		{"mtu", []dataplane.Object{smaller}},
		{"local address", []dataplane.Object{moved}},
		{"mac", []dataplane.Object{renewed}},
		{"another address", []dataplane.Object{at9}},
		{"offload", []dataplane.Object{dataplane.Feature{Link: nameVXLAN, Name: offload}, dataplane.Feature{Link: nameVXLAN, Name: offload, On: true}}},
		{"path mtu", []dataplane.Object{dataplane.Route{Prefix: pfx("192.168.1.0/26"), Table: dataplane.MainTable, NextHop: 7, MTU: 1200}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			a, b, k := twoHosts(t)
			index := strings.Fields(a.run("ip -o link show vxlan.calico"))[0]
			s := newStream(t, a, b, "192.168.0.1", "192.168.1.1")
			for range 5 {
				for _, o := range append(tt.objects, host()...) {
					k.put(o)
				}
				n := s.received()
				await.Until(t, "more arrives", func() error {
					if s.received() < n+50 {
						return fmt.Errorf("%d received", s.received())
					}
					return nil
				})
			}
			if undone := s.stop(t); undone != 0 || s.refused.Load() != 0 {
				t.Errorf("%d lost, %d refused\n%s", undone, s.refused.Load(), k.log)
			}
			if now := strings.Fields(a.run("ip -o link show vxlan.calico"))[0]; now != index {
				t.Errorf("made anew: %s, was %s", now, index)
			}
		})
	}
}

// TestMarkIsPutBackInPlace: a device whose mark somebody takes gets it again by
// one request, while it carries packets.
func TestMarkIsPutBackInPlace(t *testing.T) {
	t.Parallel()
	a, b, k := twoHosts(t)
	k.settled()
	index := strings.Fields(a.run("ip -o link show vxlan.calico"))[0]
	s := newStream(t, a, b, "192.168.0.1", "192.168.1.1")
	before, drift := k.writer.writes.Load(), k.drifted(dataplane.KindLink)
	a.run("ip link set vxlan.calico alias theirs")
	await.Until(t, "the mark", func() error {
		if out := a.run("ip link show vxlan.calico"); !strings.Contains(out, "alias routerd") {
			return errors.New(out)
		}
		return nil
	})
	k.settled()
	n := s.received()
	await.Until(t, "more arrives", func() error {
		if s.received() < n+50 {
			return fmt.Errorf("%d received", s.received())
		}
		return nil
	})
	if writes, drifted := k.writer.writes.Load()-before, k.drifted(dataplane.KindLink)-drift; writes != 1 || drifted != 1 {
		t.Errorf("%d requests for %d changes", writes, drifted)
	}
	if undone := s.stop(t); undone != 0 || s.refused.Load() != 0 {
		t.Errorf("%d lost, %d refused\n%s", undone, s.refused.Load(), k.log)
	}
	if now := strings.Fields(a.run("ip -o link show vxlan.calico"))[0]; now != index {
		t.Errorf("made anew: %s, was %s", now, index)
	}
}

// TestDeviceMadeAnewIsWholeInOnePass changes what the kernel cannot change in
// place.
func TestDeviceMadeAnewIsWholeInOnePass(t *testing.T) {
	t.Parallel()
	a, b, k := twoHosts(t)
	s := newStream(t, a, b, "192.168.0.1", "192.168.1.1")
	l := host()[0].(dataplane.Link)
	for i := range uint32(6) {
		l.VNI = 4097 - i%2
		k.wait(k.Update(dataplane.SourceCore, append([]dataplane.Object{l}, host()[1:]...), nil))
		for _, o := range host()[1:] {
			if st, _ := k.Status(o.Key()); st.State != dataplane.Done {
				t.Errorf("after the wait %v is %v: %v", o, st.State, st.Err)
			}
		}
		n := s.received()
		await.Until(t, "more arrives", func() error {
			if s.received() < n+50 {
				return fmt.Errorf("%d received", s.received())
			}
			return nil
		})
	}
	undone := s.stop(t)
	if s.gap > time.Second {
		t.Errorf("a gap of %v: something waited for the next turn of an idle loop", s.gap)
	}
	if got := strings.Count(k.log.String(), "making device anew"); got != 6 {
		t.Errorf("made anew %d times", got)
	}
	t.Logf("%.1f datagrams lost for each time", float64(undone)/6)
}
