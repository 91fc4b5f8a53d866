package traffic

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"time"
)

// Reply is the answer to one request, or why there is none.
type Reply struct {
	OK   bool
	RTT  time.Duration // from the last request that was sent to the answer
	TTL  int           // that the answer arrived with
	Size int           // of the answer's IP packet, in bytes
	Err  string        // when not OK: what the network said, "no answer" if nothing
}

func (r Reply) String() string {
	if !r.OK {
		return r.Err
	}
	return fmt.Sprintf("%d bytes, ttl %d, %.2f ms", r.Size, r.TTL, r.RTT.Seconds()*1e3)
}

// NoAnswer is the Err of a [Reply] when nothing came back.
const NoAnswer = "no answer"

// retryEvery is how long a request may go unanswered before it is sent again:
// many times the round trip in a lab, even on a busy machine.
const retryEvery = 200 * time.Millisecond

// Ping asks one address once and waits for the answer until ctx ends. A
// complaint of the network ends the wait too; so does the end of ctx, which is
// not an error but a Reply that is not OK. The error says that the request
// could not be sent.
func Ping(ctx context.Context, space string, dst netip.Addr, o Options) (Reply, error) {
	o.IPv6 = dst.Is6()
	c, err := open(space, o)
	if err != nil {
		return Reply{}, err
	}
	defer c.close()
	stop := context.AfterFunc(ctx, func() { _ = c.ip.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()

	start := time.Now()
	if err := c.send(dst, 1); err != nil {
		return Reply{}, fmt.Errorf("ping %s from %s: %w", dst, space, err)
	}
	buf := make([]byte, MaxSize)
	for {
		m, err := c.receive(buf)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return Reply{Err: NoAnswer}, nil
		}
		if err != nil {
			return Reply{}, fmt.Errorf("ping %s from %s: %w", dst, space, err)
		}
		if m.dst != dst {
			continue
		}
		if m.err != "" {
			return Reply{Err: m.err + " (from " + m.from.String() + ")"}, nil
		}
		return Reply{OK: true, RTT: time.Since(start), TTL: m.ttl, Size: m.size}, nil
	}
}

// Probe asks several addresses, again and again, until each has answered or
// ctx has ended, and returns what is known of each. All are of the family that
// the options name. The error says that the namespace cannot be used; an
// address that cannot be sent to is a Reply.
func Probe(ctx context.Context, space string, targets []netip.Addr, o Options) (map[netip.Addr]Reply, error) {
	c, err := open(space, o)
	if err != nil {
		return nil, err
	}
	defer c.close()
	stop := context.AfterFunc(ctx, func() { _ = c.ip.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()

	p := prober{conn: c, replies: make(map[netip.Addr]Reply, len(targets)), sent: make(map[netip.Addr]time.Time)}
	for _, t := range targets {
		p.replies[t] = Reply{Err: NoAnswer}
	}
	buf := make([]byte, MaxSize)
	for ctx.Err() == nil && !p.done() {
		p.round(ctx, buf)
	}
	return p.replies, nil
}

type prober struct {
	conn    *conn
	seq     uint64
	replies map[netip.Addr]Reply
	sent    map[netip.Addr]time.Time
}

func (p *prober) done() bool {
	for _, r := range p.replies {
		if !r.OK {
			return false
		}
	}
	return true
}

// round asks everyone who has not answered and listens for a while.
func (p *prober) round(ctx context.Context, buf []byte) {
	for dst, r := range p.replies {
		if r.OK {
			continue
		}
		p.seq++
		p.sent[dst] = time.Now()
		if err := p.conn.send(dst, p.seq); err != nil {
			p.replies[dst] = Reply{Err: sendError(err)}
		}
	}
	if p.conn.ip.SetReadDeadline(time.Now().Add(retryEvery)) != nil || ctx.Err() != nil {
		return
	}
	for !p.done() {
		m, err := p.conn.receive(buf)
		if err != nil {
			return // the round is over
		}
		r, asked := p.replies[m.dst]
		switch {
		case !asked || r.OK:
		case m.err != "":
			p.replies[m.dst] = Reply{Err: m.err + " (from " + m.from.String() + ")"}
		default:
			p.replies[m.dst] = Reply{OK: true, RTT: time.Since(p.sent[m.dst]), TTL: m.ttl, Size: m.size}
		}
	}
}

// sendError strips the addresses of a socket error: the reader knows them.
func sendError(err error) string {
	var op *net.OpError
	if errors.As(err, &op) {
		err = op.Err
	}
	var sys *os.SyscallError
	if errors.As(err, &sys) {
		err = sys.Err
	}
	return "send: " + err.Error()
}
