package traffic

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/integration/lab/ns"
)

// Place is where packets come from or go to.
type Place struct {
	Name  string     // for reports
	Space string     // network namespace
	Addr  netip.Addr // that the namespace has
}

// LoadOptions says what a [Load] sends.
type LoadOptions struct {
	Rate int // packets a second of each flow, in each direction; 1 to 10000
	// Size is that of the IP packet in bytes; 0: as small as possible. What is
	// larger than the place's device takes is fragmented there, and may be on
	// the way: DF is not set.
	Size int
	// OneProcessor sends all packets on the first processor that the process may
	// use. What a host without queues of its own forwards stays on the processor
	// that sent it.
	OneProcessor bool
	// Established has both flows of a pair share their sockets, so that connection tracking
	// takes each for the answers of the other, and the connection for established. Otherwise
	// each is a connection of its own that nobody answers, which no flowtable takes.
	Established bool
	// Settle is how long a packet may be on its way before it counts as lost; 0:
	// three seconds, far longer than in any queue of a lab.
	Settle time.Duration
}

// Load is a stream of numbered UDP packets in both directions between each of
// several pairs of places, at a steady rate. It knows of every packet whether
// it arrived, when it was sent, and what arrived twice or out of order.
//
// One goroutine sends for all flows at each tick and collects what has
// arrived: that costs a tenth of what a goroutine for each socket costs, and
// leaves the machine to what is measured. Packets leave one by one, not in
// bursts, so that a fault as short as the time between two is seen.
type Load struct {
	start  time.Time
	rate   int
	settle time.Duration
	cancel context.CancelFunc
	done   chan struct{}

	mu    sync.Mutex
	flows []*flow
}

// flow is one direction of a pair. Packets below base were reported already.
type flow struct {
	from, to Place
	out, in  int // sockets
	secret   uint64
	dst      unix.Sockaddr
	packet   []byte

	base    uint64
	sentAt  []time.Time // of the packet base+i
	arrived []bool
	highest uint64     // the greatest number that arrived, plus one
	now     FlowReport // counts since the last report
}

// headerLen is what is at the beginning of each packet's payload: whose it is
// and its number.
const headerLen = 16

const udpHeaderLen = 8

// StartLoad starts the traffic. The caller stops it.
func StartLoad(o LoadOptions, pairs ...[2]Place) (*Load, error) {
	if o.Rate < 1 || o.Rate > 10_000 {
		return nil, fmt.Errorf("rate %d: want 1 to 10000 packets a second", o.Rate)
	}
	ctx, cancel := context.WithCancel(context.Background())
	l := &Load{start: time.Now(), rate: o.Rate, settle: cmp.Or(o.Settle, settleWithin), cancel: cancel, done: make(chan struct{})}
	for _, p := range pairs {
		flows, err := newPair(o, p)
		l.flows = append(l.flows, flows...)
		if err != nil {
			cancel()
			l.close()
			return nil, fmt.Errorf("flows between %s and %s: %w", p[0].Name, p[1].Name, err)
		}
	}
	placed := make(chan error, 1)
	go func() {
		defer close(l.done)
		var err error
		if o.OneProcessor {
			err = toOneProcessor()
		}
		placed <- err
		if err == nil {
			l.run(ctx)
		}
	}()
	if err := <-placed; err != nil { // one that sends nothing would lose nothing
		cancel()
		l.close()
		return nil, err
	}
	return l, nil
}

// newPair returns the flows of both directions, and with an error those that it made.
func newPair(o LoadOptions, p [2]Place) ([]*flow, error) {
	there, err := newFlow(o, p[0], p[1])
	if err != nil {
		return nil, err
	}
	var back *flow
	if o.Established {
		back, err = there.reverse()
	} else {
		back, err = newFlow(o, p[1], p[0])
	}
	if err != nil {
		return []*flow{there}, err
	}
	return []*flow{there, back}, nil
}

func newFlow(o LoadOptions, from, to Place) (*flow, error) {
	family, header := unix.AF_INET, ipv4HeaderLen
	if !to.Addr.Is4() {
		family, header = unix.AF_INET6, ipv6HeaderLen
	}
	size := o.Size
	if size == 0 {
		size = header + udpHeaderLen + headerLen
	}
	if size < header+udpHeaderLen+headerLen || size > MaxSize {
		return nil, fmt.Errorf("packet size %d: want %d to %d bytes", size, header+udpHeaderLen+headerLen, MaxSize)
	}
	f := emptyFlow(from, to, size-header-udpHeaderLen)
	var err error
	if f.in, err = udpSocket(to, family); err != nil {
		return nil, err
	}
	if f.out, err = udpSocket(from, family); err != nil {
		f.close()
		return nil, err
	}
	return f, f.aim()
}

func emptyFlow(from, to Place, payload int) *flow {
	f := &flow{from: from, to: to, out: -1, in: -1, secret: rand.Uint64(), packet: make([]byte, payload)}
	binary.BigEndian.PutUint64(f.packet, f.secret)
	return f
}

// reverse returns the flow of the other direction, between the same sockets.
func (f *flow) reverse() (*flow, error) {
	back := emptyFlow(f.to, f.from, len(f.packet))
	var err error
	if back.in, err = unix.FcntlInt(uintptr(f.out), unix.F_DUPFD_CLOEXEC, 0); err != nil {
		return nil, fmt.Errorf("duplicate socket: %w", err)
	}
	if back.out, err = unix.FcntlInt(uintptr(f.in), unix.F_DUPFD_CLOEXEC, 0); err != nil {
		back.close()
		return nil, fmt.Errorf("duplicate socket: %w", err)
	}
	return back, back.aim()
}

// aim has the flow send to where it receives; on an error it is closed.
func (f *flow) aim() error {
	bound, err := unix.Getsockname(f.in)
	if err != nil {
		f.close()
		return fmt.Errorf("get socket name: %w", err)
	}
	f.dst = bound
	return nil
}

// udpSocket opens a socket bound to a port of its own at a place.
func udpSocket(p Place, family int) (int, error) {
	fd := -1
	err := ns.Do(p.Space, func() (err error) {
		fd, err = unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		return err
	})
	if err != nil {
		return -1, fmt.Errorf("open UDP socket in %s: %w", p.Space, err)
	}
	// Room for seconds of packets, should this process get no time.
	err = errors.Join(unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 16<<20), unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, 16<<20))
	if err == nil && family == unix.AF_INET6 {
		err = unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, unix.IPV6_PMTUDISC_DONT)
	} else if err == nil {
		err = unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_DONT)
	}
	if err == nil && family == unix.AF_INET6 {
		err = unix.Bind(fd, &unix.SockaddrInet6{Addr: p.Addr.As16()})
	} else if err == nil {
		err = unix.Bind(fd, &unix.SockaddrInet4{Addr: p.Addr.As4()})
	}
	if err != nil {
		_ = unix.Close(fd)
		return -1, fmt.Errorf("bind UDP socket to %s in %s: %w", p.Addr, p.Space, err)
	}
	return fd, nil
}

func (f *flow) close() {
	for _, fd := range []*int{&f.in, &f.out} {
		if *fd >= 0 {
			_ = unix.Close(*fd)
		}
		*fd = -1 // the number is another file's from now on
	}
}

func (l *Load) close() {
	for _, f := range l.flows {
		f.close()
	}
}

// collectEvery is how often what arrived is taken out of the sockets.
const collectEvery = 5 * time.Millisecond

func (l *Load) run(ctx context.Context) {
	tick := time.NewTicker(max(time.Second/time.Duration(l.rate), 500*time.Microsecond))
	defer tick.Stop()
	buf := make([]byte, MaxSize)
	var collected time.Time
	for sent, skipped := 0, 0; ; {
		now := time.Now()
		due := int(now.Sub(l.start).Seconds()*float64(l.rate)) + 1 - skipped
		if due > sent+maxBurst {
			skipped += due - sent - maxBurst
			due = sent + maxBurst
		}
		l.mu.Lock()
		for ; sent < due; sent++ {
			for _, f := range l.flows {
				f.send(now)
			}
		}
		if now.Sub(collected) >= collectEvery {
			l.collect(buf)
			collected = now
		}
		l.mu.Unlock()
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

func (f *flow) send(now time.Time) {
	binary.BigEndian.PutUint64(f.packet[8:], f.base+uint64(len(f.sentAt)))
	err := unix.Sendto(f.out, f.packet, 0, f.dst)
	if errors.Is(err, unix.EAGAIN) {
		// Nothing was sent: what went before still waits for a processor.
		return
	}
	f.sentAt = append(f.sentAt, now)
	f.arrived = append(f.arrived, false)
	f.now.Sent++
	if err != nil {
		f.now.LastError = sendError(err)
	}
}

func (l *Load) collect(buf []byte) {
	for _, f := range l.flows {
		for {
			n, _, err := unix.Recvfrom(f.in, buf, unix.MSG_DONTWAIT)
			if errors.Is(err, unix.EINTR) {
				continue
			}
			if err != nil {
				break
			}
			f.note(buf[:n])
		}
	}
}

func (f *flow) note(b []byte) {
	if len(b) < headerLen || binary.BigEndian.Uint64(b) != f.secret {
		return
	}
	seq := binary.BigEndian.Uint64(b[8:])
	i := seq - f.base
	switch {
	case seq < f.base: // reported as lost, or a duplicate of one that was not
		f.now.Late++
		return
	case i >= uint64(len(f.arrived)):
		return
	case f.arrived[i]:
		f.now.Duplicates++
		return
	}
	if seq < f.highest {
		f.now.Reordered++
	}
	f.highest = max(f.highest, seq+1)
	f.arrived[i] = true
}

const settleWithin = 3 * time.Second // unless [LoadOptions] says otherwise

// Interval reports on what was sent since the last call of Interval, or since
// the start, up to now. It waits for packets that are on their way, and for the
// first one of each flow: two calls in a quick row leave no time for any.
func (l *Load) Interval() LoadReport {
	deadline := time.Now().Add(l.settle)
	tick := time.NewTicker(collectEvery)
	defer tick.Stop()
	for sending := true; sending && !l.begun() && time.Now().Before(deadline); {
		select {
		case <-tick.C:
		case <-l.done:
			sending = false
		}
	}
	l.mu.Lock()
	until := make([]uint64, len(l.flows))
	for i, f := range l.flows {
		until[i] = f.base + uint64(len(f.sentAt))
	}
	l.mu.Unlock()
	deadline = time.Now().Add(l.settle)
	for !l.settled(until) && time.Now().Before(deadline) {
		select {
		case <-tick.C:
		case <-l.done: // nobody collects any more
			l.mu.Lock()
			l.collect(make([]byte, MaxSize))
			l.mu.Unlock()
			<-tick.C
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	var r LoadReport
	for i, f := range l.flows {
		r = append(r, f.report(until[i]))
	}
	return r
}

// begun reports whether each flow has sent something that was not reported.
func (l *Load) begun() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return !slices.ContainsFunc(l.flows, func(f *flow) bool { return len(f.sentAt) == 0 })
}

func (l *Load) settled(until []uint64) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i, f := range l.flows {
		if slices.Contains(f.arrived[:until[i]-f.base], false) {
			return false
		}
	}
	return true
}

// report tells of the packets below until and forgets them.
func (f *flow) report(until uint64) FlowReport {
	r := f.now
	n := until - f.base
	r.From, r.To, r.Sent, r.Received = f.from.Name, f.to.Name, int(n), 0
	for i, ok := range f.arrived[:n] {
		if ok {
			r.Received++
			continue
		}
		at := f.sentAt[i]
		if last := len(r.Losses) - 1; last >= 0 && r.Losses[last].last+1 == f.base+uint64(i) {
			r.Losses[last].Until, r.Losses[last].last = at, f.base+uint64(i)
			r.Losses[last].Packets++
		} else {
			r.Losses = append(r.Losses, Loss{From: at, Until: at, Packets: 1, last: f.base + uint64(i)})
		}
	}
	f.base = until
	f.sentAt, f.arrived = slices.Clone(f.sentAt[n:]), slices.Clone(f.arrived[n:])
	f.now = FlowReport{}
	return r
}

// Stop ends the traffic and reports on what [Load.Interval] has not: nothing,
// when it is called again.
func (l *Load) Stop() LoadReport {
	l.cancel()
	<-l.done
	r := l.Interval()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.close()
	return r
}

// Loss is a run of packets of one flow that did not arrive.
type Loss struct {
	From, Until time.Time // when the first and the last of them was sent
	Packets     int
	last        uint64 // number of the last one
}

// FlowReport is what became of the packets from one place to another.
type FlowReport struct {
	From, To   string
	Sent       int
	Received   int
	Duplicates int    // arrived once more
	Reordered  int    // arrived after one that was sent later; not lost
	Late       int    // arrived after they were reported as lost
	Losses     []Loss // in order
	LastError  string // why the kernel refused to send
}

// Lost is the number of packets that did not arrive.
func (r FlowReport) Lost() int { return r.Sent - r.Received }

func (r FlowReport) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s → %s: %d sent, %d lost, %d duplicates, %d reordered, %d late", r.From, r.To, r.Sent, r.Lost(), r.Duplicates, r.Reordered, r.Late)
	for _, l := range r.Losses {
		fmt.Fprintf(&b, "; %d lost from %s to %s", l.Packets, l.From.Format(logTime), l.Until.Format(logTime))
	}
	if r.LastError != "" {
		fmt.Fprintf(&b, "; refused: %s", r.LastError)
	}
	return b.String()
}

// logTime is how daemons write the time into their logs, to the microsecond.
const logTime = "15:04:05.000000"

// LoadReport is what became of all flows.
type LoadReport []FlowReport

// Sum adds up all flows; it has no places and no losses.
func (r LoadReport) Sum() FlowReport {
	var sum FlowReport
	for _, f := range r {
		sum.Sent += f.Sent
		sum.Received += f.Received
		sum.Duplicates += f.Duplicates
		sum.Reordered += f.Reordered
		sum.Late += f.Late
	}
	sum.From, sum.To = fmt.Sprintf("%d flows", len(r)), "in all"
	return sum
}

// Bad lists the flows that lost packets or got some twice.
func (r LoadReport) Bad() []FlowReport {
	return slices.DeleteFunc(slices.Clone(r), func(f FlowReport) bool { return f.Lost() == 0 && f.Duplicates == 0 })
}

// Silent lists the flows that sent nothing: of them nothing is known, not even
// that they lost nothing.
func (r LoadReport) Silent() []FlowReport {
	return slices.DeleteFunc(slices.Clone(r), func(f FlowReport) bool { return f.Sent > 0 })
}
