package probe

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/dataplane"
)

// Plain packets are an encapsulation like any other: whether they get to a peer is
// measured before workloads' packets go that way. A probe has the addresses that
// workloads' packets have, one of a block of this host and one of a block of the
// peer: those that the two hosts' tunnels have. It leaves by the device and the gateway
// by which plain packets would, and counts as arrived only if it came in by no tunnel.
// The answer travels as packets to this host do at present, so it says nothing but
// that the probe arrived; the other direction is for the peer to measure.

const (
	// plainFlows is the number of flows, of a source port each, that are all to get
	// there: routers on the way may spread flows over several next hops, of which one
	// may not know the way.
	plainFlows = 4
	// plainHolds is how long what the previous run found is believed: the change under
	// way goes on, and what was found for an earlier one says nothing.
	plainHolds = 10 * time.Minute
)

// plain reports whether the target is plain packets.
func (t Target) plain() bool { return t.Encap.Driver == dataplane.DriverDirect }

// plain measures whether plain packets get to the peer.
func (m Sockets) plain(ctx context.Context, t Target, key []byte) (Finding, error) {
	f := Finding{Full: t.Tunnel.MTU, Size: t.Tunnel.MTU, Flows: Count{Sent: plainFlows}}
	link, err := net.InterfaceByName(t.Tunnel.Link)
	if err != nil {
		return f, fmt.Errorf("find device %s: %w", t.Tunnel.Link, err)
	}
	var flows []*session
	defer func() {
		for _, s := range flows {
			s.close()
		}
	}()
	for range plainFlows {
		s, err := m.open(ctx, t, key)
		if err != nil {
			return f, fmt.Errorf("open a socket at %s: %w", t.Tunnel.Local, err)
		}
		s.control = leaveBy(link.Index, t.Tunnel.Local)
		flows = append(flows, s)
	}
	for _, wait := range firstAnswer() {
		start := time.Now()
		sent := map[*session][]uint32{}
		for _, s := range flows {
			idx, err := s.send(shape{size: s.overhead + messageLen})
			if err != nil && !tolerable(err) && !errors.Is(err, unix.ENETUNREACH) {
				return f, fmt.Errorf("send a packet: %w", err)
			}
			sent[s] = idx
		}
		flows = slices.DeleteFunc(flows, func(s *session) bool {
			if !s.await(ctx, start.Add(wait), sent[s]) {
				f.Refused = f.Refused || s.isRefused()
				return false
			}
			f.RTT = time.Since(start)
			f.Flows.Got++
			s.close()
			return true
		})
		if len(flows) == 0 || f.Refused {
			break
		}
	}
	f.Answered = f.Flows.Got > 0
	return f, ctx.Err()
}

// leaveBy is the control message with which a packet leaves by a device and from an
// address, whatever device the address is on.
func leaveBy(index int, from netip.Addr) []byte {
	if from.Is4() {
		return (&ipv4.ControlMessage{IfIndex: index, Src: from.AsSlice()}).Marshal()
	}
	return (&ipv6.ControlMessage{IfIndex: index, Src: from.AsSlice()}).Marshal()
}

// judgePlain is [judge] of plain packets. What could not be measured is no reason to
// go that way: where packets go at present they arrive.
func judgePlain(t Target, f Finding, err error) verdict {
	way := fmt.Sprintf("from %s to %s by %s", t.Tunnel.Local, t.Peer, t.Tunnel.Link)
	if t.Gateway.IsValid() {
		way += " and " + t.Gateway.String()
	}
	switch {
	case err != nil:
		return verdict{result: dataplane.No, reason: err.Error()}
	case f.Answered && f.Flows.Got == f.Flows.Sent:
		return verdict{result: dataplane.Yes}
	case f.Answered:
		return verdict{result: dataplane.No, reason: fmt.Sprintf("of %d flows %s only %d got there: does one of several routers on the way not know the route?", f.Flows.Sent, way, f.Flows.Got)}
	case f.Refused:
		return verdict{reason: "packets get there, and nobody answers probes: a node of Calico's, or one whose probes are off"}
	case t.Accepts:
		return verdict{result: dataplane.No, reason: fmt.Sprintf("no answer %s: do the routers between know the route to pods there, and let packets from pods here pass?", way)}
	}
	return verdict{reason: "no answer, and the node says of no prober"}
}

// plainResponder answers probes of plain packets at one address of this host's
// tunnels. It hears what comes in by devices that lead to other hosts and are no tunnel.
type plainResponder struct {
	at      netip.AddrPort
	log     *slog.Logger
	allow   *asking
	outside *outside

	rates rates
}

// outside is the devices, by index, that lead to other hosts and are no tunnel. Its
// methods may be called from any goroutine.
type outside struct {
	mu    sync.RWMutex
	links map[int]bool
}

func (o *outside) set(links map[int]bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.links = links
}

func (o *outside) has(index int) bool {
	o.mu.RLock()
	defer o.mu.RUnlock()
	return o.links[index]
}

// keep runs the responder until ctx ends. The address may not be there yet.
func (r *plainResponder) keep(ctx context.Context) {
	for ctx.Err() == nil {
		if err := r.run(ctx); ctx.Err() == nil {
			r.log.Debug("cannot answer probes of plain packets yet", "address", r.at, "error", err)
			_ = async.Sleep(ctx, reopen)
		}
	}
}

// run answers until ctx ends. It returns at once when the socket cannot be opened.
func (r *plainResponder) run(ctx context.Context) error {
	c, err := listenUDP(ctx, "", r.at)
	if err != nil {
		return fmt.Errorf("answer probes of plain packets: %w", err)
	}
	defer c.Close()
	arrivedBy, err := arrivals(c, dataplane.FamilyOf(r.at.Addr()))
	if err != nil {
		return fmt.Errorf("answer probes of plain packets: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { c.Close() })
	defer stop()
	r.rates = rates{allow: r.allow}
	b, control := make([]byte, 2048), make([]byte, 256)
	for {
		n, k, _, from, err := c.ReadMsgUDPAddrPort(b, control)
		if errors.Is(err, net.ErrClosed) {
			return ctx.Err()
		}
		peer := from.Addr().Unmap()
		if err != nil || !r.outside.has(arrivedBy(control[:k])) {
			continue
		}
		key, ok := r.allow.may(peer)
		if !ok || !r.rates.take(peer) {
			continue
		}
		m, err := decode(b[:n], key)
		if err != nil || m.kind != kindPlain {
			continue
		}
		out := appendMessage(nil, message{kind: kindPlainReply, nonce: m.nonce, index: m.index}, key, 0)
		if _, err := c.WriteToUDPAddrPort(out, from); err != nil {
			r.log.Debug("answer to a probe of plain packets", "peer", peer, "error", err)
		}
	}
}

// arrivals has the kernel say with each packet by which device it came in, and returns
// what reads that.
func arrivals(c *net.UDPConn, f dataplane.Family) (func(control []byte) int, error) {
	if f == dataplane.IPv4 {
		return func(b []byte) int {
			var cm ipv4.ControlMessage
			if cm.Parse(b) != nil {
				return 0
			}
			return cm.IfIndex
		}, ipv4.NewPacketConn(c).SetControlMessage(ipv4.FlagInterface, true)
	}
	return func(b []byte) int {
		var cm ipv6.ControlMessage
		if cm.Parse(b) != nil {
			return 0
		}
		return cm.IfIndex
	}, ipv6.NewPacketConn(c).SetControlMessage(ipv6.FlagInterface, true)
}

// rates bounds what one asker is answered. It is for one goroutine.
type rates struct {
	allow *asking
	of    map[netip.Addr]*bucket
}

// take reports whether the asker may ask once more.
func (r *rates) take(peer netip.Addr) bool {
	b := r.of[peer]
	if b == nil {
		if r.of == nil {
			r.of = map[netip.Addr]*bucket{}
		}
		// Buckets of askers that are gone must not pile up.
		maps.DeleteFunc(r.of, func(a netip.Addr, _ *bucket) bool { _, ok := r.allow.may(a); return !ok })
		b = newBucket(echoRate, echoBurst, time.Now())
		r.of[peer] = b
	}
	return b.take(time.Now(), 1)
}
