package traffic

import (
	"context"
	"fmt"
	"net/netip"
	"sync"
	"time"
)

// Report is what a [Flow] saw.
type Report struct {
	Space      string
	Target     netip.Addr
	Sent       int           // requests handed to the kernel
	SendErrors int           // requests that the kernel refused
	Received   int           // requests answered at least once
	Duplicates int           // further answers to a request already answered
	Complaints int           // ICMP errors about our requests
	LongestGap time.Duration // between two answers that follow each other
	LastError  string        // the latest refusal or complaint
	FirstLost  time.Duration // after the start; 0: nothing was lost
	LastLost   time.Duration
}

// Lost is the number of requests that nobody answered, or that could not even
// be sent.
func (r Report) Lost() int { return r.Sent + r.SendErrors - r.Received }

func (r Report) String() string {
	s := fmt.Sprintf("%s → %s: %d sent, %d lost, %d duplicates, longest gap %v",
		r.Space, r.Target, r.Sent+r.SendErrors, r.Lost(), r.Duplicates, r.LongestGap.Round(time.Millisecond))
	if r.Lost() > 0 {
		s += fmt.Sprintf(", lost between %v and %v", r.FirstLost.Round(time.Millisecond), r.LastLost.Round(time.Millisecond))
	}
	if r.LastError != "" {
		s += ", last error: " + r.LastError
	}
	return s
}

// grace is how long Stop waits for answers on their way.
const grace = time.Second

// Flow is a stream of requests at a fixed rate. Its methods are safe for
// concurrent use.
type Flow struct {
	conn   *conn
	rate   int
	start  time.Time
	cancel context.CancelFunc
	sender sync.WaitGroup
	reader sync.WaitGroup

	mu       sync.Mutex
	report   Report
	sentAt   []time.Duration // by sequence number
	answered []bool
	last     time.Duration // of the latest answer
	arrived  chan struct{} // size one: an answer came
}

// StartFlow sends up to rate requests a second from the namespace to dst until
// [Flow.Stop]. The end of ctx stops the sending too; Stop must still be called.
func StartFlow(ctx context.Context, space string, dst netip.Addr, rate int, o Options) (*Flow, error) {
	if rate < 1 || rate > 100_000 {
		return nil, fmt.Errorf("rate %d: want 1 to 100000 requests a second", rate)
	}
	o.IPv6 = dst.Is6()
	c, err := open(space, o)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	f := &Flow{
		conn: c, rate: rate, start: time.Now(), cancel: cancel,
		report:  Report{Space: space, Target: dst},
		arrived: make(chan struct{}, 1),
	}
	f.sender.Go(func() { f.send(ctx, dst) })
	f.reader.Go(f.receive)
	return f, nil
}

// maxBurst is how many requests may leave at once: enough for the grain of the
// clock, too few to fill a queue, which would be a loss of the sender's making.
const maxBurst = 10

// send keeps to the rate. What a pause of the process kept from being sent in
// time is not sent later.
func (f *Flow) send(ctx context.Context, dst netip.Addr) {
	tick := time.NewTicker(max(time.Second/time.Duration(f.rate), time.Millisecond))
	defer tick.Stop()
	for sent, skipped := 0, 0; ; {
		due := int(time.Since(f.start).Seconds()*float64(f.rate)) + 1 - skipped
		if due > sent+maxBurst {
			skipped += due - sent - maxBurst
			due = sent + maxBurst
		}
		for ; sent < due; sent++ {
			f.sendOne(dst)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

func (f *Flow) sendOne(dst netip.Addr) {
	f.mu.Lock()
	seq := uint64(len(f.sentAt))
	f.sentAt = append(f.sentAt, time.Since(f.start))
	f.answered = append(f.answered, false)
	f.mu.Unlock()
	err := f.conn.send(dst, seq)
	f.mu.Lock()
	defer f.mu.Unlock()
	if err != nil {
		f.report.SendErrors++
		f.report.LastError = sendError(err)
		return
	}
	f.report.Sent++
}

func (f *Flow) receive() {
	buf := make([]byte, MaxSize)
	for {
		m, err := f.conn.receive(buf)
		if err != nil {
			return // closed by Stop
		}
		f.note(m)
		select {
		case f.arrived <- struct{}{}:
		default:
		}
	}
}

func (f *Flow) note(m message) {
	f.mu.Lock()
	defer f.mu.Unlock()
	now := time.Since(f.start)
	switch {
	case m.err != "":
		f.report.Complaints++
		f.report.LastError = m.err + " (from " + m.from.String() + ")"
	case m.seq >= uint64(len(f.answered)):
	case f.answered[m.seq]:
		f.report.Duplicates++
	default:
		f.answered[m.seq] = true
		f.report.Received++
		f.report.LongestGap = max(f.report.LongestGap, now-f.last)
		f.last = now
	}
}

// Report tells what the flow saw up to now. Requests on their way count as
// lost.
func (f *Flow) Report() Report {
	f.mu.Lock()
	defer f.mu.Unlock()
	r := f.report
	for i, ok := range f.answered {
		if ok {
			continue
		}
		if r.FirstLost == 0 {
			r.FirstLost = max(f.sentAt[i], 1)
		}
		r.LastLost = f.sentAt[i]
	}
	return r
}

// counts is Report without the search for what was lost.
func (f *Flow) counts() Report {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.report
}

// WaitReceived returns when the flow has seen n answers in all, or with ctx's
// error.
func (f *Flow) WaitReceived(ctx context.Context, n int) error {
	for {
		if f.counts().Received >= n {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for %d answers: %s: %w", n, f.Report(), ctx.Err())
		case <-f.arrived:
		}
	}
}

// Stop ends the sending, waits a moment for answers on their way, and returns
// the final report. It may be called once.
func (f *Flow) Stop() Report {
	f.cancel()
	f.sender.Wait()
	late := time.NewTimer(grace)
	defer late.Stop()
wait:
	for f.counts().Lost() > 0 {
		select {
		case <-late.C:
			break wait
		case <-f.arrived:
		}
	}
	_ = f.conn.close() // ends receive
	f.reader.Wait()
	return f.Report()
}
