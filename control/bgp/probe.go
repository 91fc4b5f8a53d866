package bgp

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"syscall"
	"time"

	packet "github.com/osrg/gobgp/v4/pkg/packet/bgp"
	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/control/bgp/engine/conn"
	"github.com/routerd/routerd/control/bgp/engine/fsm"
)

// answer is what a peer said in answer to an OPEN.
type answer struct {
	asn      uint32 // of the peer's OPEN; 0: none came
	refused  bool   // a NOTIFICATION came
	code     uint8
	subcode  uint8
	accepted bool // a KEEPALIVE came: the peer would take us
}

// probe opens a connection to a peer and looks at what it answers. It is used
// only after a session failed in a way that GoBGP does not explain: GoBGP
// tells neither the AS in a peer's OPEN nor the NOTIFICATION that answers
// ours. Our OPEN is sent only when the peer's AS is right.
func probe(ctx context.Context, c *Config, p Peer) (answer, error) {
	d := net.Dialer{Timeout: 3 * time.Second, Control: p.control}
	if p.Source.IsValid() {
		d.LocalAddr = net.TCPAddrFromAddrPort(netip.AddrPortFrom(p.Source, 0))
	}
	conn, err := d.DialContext(ctx, "tcp", netip.AddrPortFrom(p.Addr, p.Port).String())
	if err != nil {
		return answer{}, err
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	if err := conn.SetDeadline(time.Now().Add(5 * time.Second)); err != nil {
		return answer{}, err
	}
	return ask(conn, c, p)
}

// control gives a probe's socket what the session's has.
func (p Peer) control(_, _ string, raw syscall.RawConn) error {
	var err error
	ctlErr := raw.Control(func(fd uintptr) {
		if p.TTLSecurity != 0 {
			level, opt := unix.IPPROTO_IP, unix.IP_TTL
			if p.Addr.Is6() {
				level, opt = unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS
			}
			err = unix.SetsockoptInt(int(fd), level, opt, 255)
		}
		if text := p.Password.reveal(); text != "" && err == nil {
			err = conn.SetPassword(int(fd), p.Addr, text)
		}
	})
	return errors.Join(ctlErr, err)
}

func ask(conn io.ReadWriter, c *Config, p Peer) (answer, error) {
	var v answer
	for {
		m, err := readMessage(conn)
		if err != nil {
			if v.asn != 0 || v.refused {
				return v, nil
			}
			return v, err
		}
		switch body := m.Body.(type) {
		case *packet.BGPOpen:
			v.asn = openASN(body)
			if v.asn != p.ASN {
				return v, nil
			}
			if err := sendOpen(conn, c, p); err != nil {
				return v, nil
			}
		case *packet.BGPNotification:
			v.refused, v.code, v.subcode = true, body.ErrorCode, body.ErrorSubcode
			return v, nil
		case *packet.BGPKeepAlive:
			v.accepted = true
			return v, nil
		default:
			return v, errors.New("the peer answered with something else than an OPEN")
		}
	}
}

func readMessage(r io.Reader) (*packet.BGPMessage, error) {
	head := make([]byte, packet.BGP_HEADER_LENGTH)
	if _, err := io.ReadFull(r, head); err != nil {
		return nil, err
	}
	n := binary.BigEndian.Uint16(head[16:])
	if n < packet.BGP_HEADER_LENGTH || n > packet.BGP_MAX_MESSAGE_LENGTH {
		return nil, fmt.Errorf("message of %d bytes", n)
	}
	msg := append(head, make([]byte, int(n)-len(head))...)
	if _, err := io.ReadFull(r, msg[len(head):]); err != nil {
		return nil, err
	}
	return packet.ParseBGPMessage(msg)
}

// openASN returns the AS of an OPEN: the four-octet capability's (RFC 6793
// section 4.1), else the field's.
func openASN(o *packet.BGPOpen) uint32 {
	for _, p := range o.OptParams {
		caps, ok := p.(*packet.OptionParameterCapability)
		if !ok {
			continue
		}
		for _, c := range caps.Capability {
			if as, ok := c.(*packet.CapFourOctetASNumber); ok {
				return as.CapValue
			}
		}
	}
	return uint32(o.MyAS)
}

func sendOpen(w io.Writer, c *Config, p Peer) error {
	as := uint16(packet.AS_TRANS)
	own := p.localASN(c.ASN)
	if own <= 1<<16-1 {
		as = uint16(own)
	}
	caps := []packet.ParameterCapabilityInterface{packet.NewCapFourOctetASNumber(own)}
	for _, f := range p.carries() {
		caps = append(caps, packet.NewCapMultiProtocol(toPacket(f)))
	}
	m, err := packet.NewBGPOpenMessage(as, uint16(p.HoldTime/time.Second), c.RouterID, []packet.OptionParameterInterface{
		packet.NewOptionParameterCapability(caps),
	})
	if err != nil {
		return err
	}
	b, err := m.Serialize()
	if err != nil {
		return err
	}
	_, err = w.Write(b)
	return err
}

// collided reports whether the peer only had another connection with us already
// (RFC 4486, section 4).
func (v answer) collided() bool {
	return v.refused && v.code == packet.BGP_ERROR_CEASE &&
		(v.subcode == packet.BGP_ERROR_SUB_CONNECTION_REJECTED || v.subcode == packet.BGP_ERROR_SUB_CONNECTION_COLLISION_RESOLUTION)
}

// explain is what a answer means for the session; Cause 0: nothing wrong was
// found.
func (v answer) explain(p Peer) fsm.Reason {
	switch {
	case v.asn != 0 && v.asn != p.ASN:
		return fsm.Reason{Cause: fsm.Sent, PeerAS: v.asn, Notification: fsm.Notification{Code: fsm.CodeOpen, Subcode: fsm.OpenPeerAS}}
	case v.refused:
		return fsm.Reason{Cause: fsm.Received, Notification: fsm.Notification{Code: v.code, Subcode: v.subcode}}
	}
	return fsm.Reason{}
}

// again is how long a diagnosis holds before a new failure asks for another.
const again = time.Minute

// diagnose finds out in the background what a peer objects to, unless that is
// being done or was done lately.
func (e *gobgp) diagnose(p *gobgpPeer) {
	if p.up || p.diagnosing != nil || !p.diagnosed.IsZero() && time.Since(p.diagnosed) < again {
		return
	}
	peer := p.Peer
	c := Config{ASN: e.asn, RouterID: e.routerID}
	ctx, cancel := context.WithCancel(e.ctx)
	p.diagnosing = cancel
	e.wg.Go(func() {
		defer cancel()
		found := askFor(ctx, &c, peer, func() bool {
			e.mu.Lock()
			defer e.mu.Unlock()
			return p.state == packet.BGP_FSM_OPENSENT || p.state == packet.BGP_FSM_OPENCONFIRM
		})
		e.mu.Lock()
		defer e.mu.Unlock()
		if ctx.Err() != nil {
			return // up, gone, or changed meanwhile
		}
		p.diagnosing, p.diagnosed = nil, time.Now()
		if found.Cause != 0 {
			e.emit(event{kind: eventFail, peer: peer.Addr, reason: found, sure: true})
		}
	})
}

// askFor probes a peer until it answers. After a failed session many speakers
// take no connection for a while, and then the first: GoBGP tries once a second,
// so for some seconds the probes come closer to each other than that. None is
// sent while a session is coming up, with which it would collide.
func askFor(ctx context.Context, c *Config, p Peer, comingUp func() bool) fsm.Reason {
	const hurry, all = 10 * time.Second, 70
	start := time.Now()
	for try := range all {
		wait := min(time.Duration(try+1)*time.Second, 5*time.Second)
		if time.Since(start) < hurry {
			wait = 200*time.Millisecond + rand.N(100*time.Millisecond)
		}
		if async.Sleep(ctx, wait) != nil {
			return fsm.Reason{}
		}
		if comingUp() {
			continue
		}
		v, err := probe(ctx, c, p)
		if err != nil || v.asn == 0 && !v.refused {
			continue
		}
		// A peer that has another connection with us by chance has none later.
		if !v.collided() || time.Since(start) > hurry {
			return v.explain(p)
		}
	}
	return fsm.Reason{}
}
