package fsm

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"time"

	packet "github.com/osrg/gobgp/v4/pkg/packet/bgp"

	"github.com/routerd/routerd/control/bgp/engine/wire"
)

// Codes and subcodes of NOTIFICATION that the session itself leads to (RFC 4271
// section 6.2, RFC 4486, RFC 6608, RFC 8538, RFC 9384, RFC 9687).
const (
	CodeOpen      = 2
	CodeHoldTimer = 4
	CodeFSM       = 5
	CodeCease     = 6
	CodeSendHold  = 8

	OpenVersion    = 1
	OpenPeerAS     = 2
	OpenID         = 3
	OpenParameter  = 4
	OpenHoldTime   = 6
	OpenCapability = 7

	CeaseMaxPrefixes  = 1
	CeaseShutdown     = 2
	CeaseDeconfigured = 3
	CeaseReset        = 4
	CeaseRejected     = 5
	CeaseConfigChange = 6
	CeaseCollision    = 7
	CeaseHardReset    = 9
	CeaseBFDDown      = 10
)

const (
	version     = 4
	asTrans     = 23456 // RFC 6793
	extendedLen = 255   // the type and the length that say that lengths have two bytes (RFC 9072)
)

// FamilyCapabilities are what an OPEN says of one family.
type FamilyCapabilities struct {
	Enabled bool // RFC 4760

	// RFC 7911: what the sender is able to do.
	AddPathReceive, AddPathSend bool

	Restart    bool // in the capability of RFC 4724
	Forwarding bool // its routes were kept over the restart

	// StaleTime is how long its routes may be kept after that (RFC 9494), in seconds
	// of 24 bits; 0: it does not ask for it.
	StaleTime           time.Duration
	LongLivedForwarding bool
}

// Capabilities are those that an OPEN offers, as far as the engine has them.
type Capabilities struct {
	Family [wire.Families]FamilyCapabilities

	ExtendedNextHop  bool // IPv4 with IPv6 next hops (RFC 8950)
	ExtendedMessages bool // RFC 8654
	Refresh          bool // RFC 2918
	EnhancedRefresh  bool // RFC 7313
	AS4              bool // RFC 6793

	GracefulRestart bool          // RFC 4724
	Restarting      bool          // R: do not wait for my End-of-RIB
	Notification    bool          // N: a NOTIFICATION is no reason to drop routes (RFC 8538)
	RestartTime     time.Duration // in seconds, at most 4095 s
}

// Open is what an OPEN says.
type Open struct {
	AS       uint32
	ID       uint32        // BGP identifier
	HoldTime time.Duration // in seconds; 0: no hold timer
	Capabilities
}

// Append appends the message, whose header is there too. Capabilities are encoded by
// GoBGP's codec; they never exceed what an OPEN without RFC 9072 holds.
func (o *Open) Append(b []byte) ([]byte, error) {
	var list []byte
	for _, c := range o.capabilities() {
		v, err := c.Serialize()
		if err != nil {
			return nil, fmt.Errorf("encode capability %d: %w", c.Code(), err)
		}
		list = append(list, v...)
	}
	as := uint16(asTrans)
	if o.AS <= 0xffff {
		as = uint16(o.AS)
	}
	body := []byte{version}
	body = binary.BigEndian.AppendUint16(body, as)
	body = binary.BigEndian.AppendUint16(body, uint16(o.HoldTime/time.Second))
	body = binary.BigEndian.AppendUint32(body, o.ID)
	body = append(body, uint8(2+len(list)), packet.BGP_OPT_CAPABILITY, uint8(len(list)))
	return wire.AppendMessage(b, wire.Open, append(body, list...)), nil
}

func familyOf(f wire.Family) packet.Family {
	return packet.NewFamily(f.AFI(), packet.SAFI_UNICAST)
}

func (o *Open) capabilities() (out []packet.ParameterCapabilityInterface) {
	var paths []*packet.CapAddPathTuple
	var restart []*packet.CapGracefulRestartTuple
	var stale []*packet.CapLongLivedGracefulRestartTuple
	for i, f := range o.Family {
		family := familyOf(wire.Family(i))
		if f.Enabled {
			out = append(out, packet.NewCapMultiProtocol(family))
		}
		mode := packet.BGP_ADD_PATH_NONE
		if f.AddPathReceive {
			mode |= packet.BGP_ADD_PATH_RECEIVE
		}
		if f.AddPathSend {
			mode |= packet.BGP_ADD_PATH_SEND
		}
		if mode != packet.BGP_ADD_PATH_NONE {
			paths = append(paths, packet.NewCapAddPathTuple(family, mode))
		}
		if f.Restart {
			restart = append(restart, packet.NewCapGracefulRestartTuple(family, f.Forwarding))
		}
		if f.StaleTime > 0 {
			stale = append(stale, packet.NewCapLongLivedGracefulRestartTuple(family, f.LongLivedForwarding, uint32(f.StaleTime/time.Second)))
		}
	}
	if o.Refresh {
		out = append(out, packet.NewCapRouteRefresh())
	}
	if o.ExtendedNextHop {
		out = append(out, packet.NewCapExtendedNexthop([]*packet.CapExtendedNexthopTuple{packet.NewCapExtendedNexthopTuple(packet.RF_IPv4_UC, packet.AFI_IP6)}))
	}
	if o.ExtendedMessages {
		out = append(out, packet.NewCapExtendedMessage())
	}
	if o.GracefulRestart {
		out = append(out, packet.NewCapGracefulRestart(o.Restarting, o.Notification, uint16(o.RestartTime/time.Second), restart))
	}
	if o.AS4 {
		out = append(out, packet.NewCapFourOctetASNumber(o.AS))
	}
	if len(paths) > 0 {
		out = append(out, packet.NewCapAddPath(paths))
	}
	if o.EnhancedRefresh {
		out = append(out, packet.NewCapEnhancedRouteRefresh())
	}
	if len(stale) > 0 {
		out = append(out, packet.NewCapLongLivedGracefulRestart(stale))
	}
	return out
}

// ParseOpen reads the body of an OPEN. Its error is a [*wire.Error].
func ParseOpen(body []byte) (*Open, error) {
	if len(body) < 10 {
		return nil, openFault(0, nil, "OPEN of %d bytes", len(body))
	}
	if body[0] != version {
		return nil, openFault(OpenVersion, []byte{0, version}, "version %d", body[0])
	}
	o := &Open{
		AS:       uint32(binary.BigEndian.Uint16(body[1:])),
		HoldTime: time.Duration(binary.BigEndian.Uint16(body[3:])) * time.Second,
		ID:       binary.BigEndian.Uint32(body[5:]),
	}
	length, rest, wide := int(body[9]), body[10:], false
	if length != 0 && len(rest) >= 3 && rest[0] == extendedLen { // RFC 9072 section 2
		length, rest, wide = int(binary.BigEndian.Uint16(rest[1:])), rest[3:], true
	}
	if length != len(rest) {
		return nil, openFault(0, nil, "optional parameters of %d bytes in %d", length, len(rest))
	}
	named := false
	for len(rest) > 0 {
		head := 2
		if wide {
			head = 3
		}
		if len(rest) < head {
			return nil, openFault(0, nil, "optional parameter of %d bytes", len(rest))
		}
		n := int(rest[1])
		if wide {
			n = int(binary.BigEndian.Uint16(rest[1:]))
		}
		if len(rest) < head+n {
			return nil, openFault(0, nil, "optional parameter of %d bytes in %d", n, len(rest)-head)
		}
		if rest[0] != packet.BGP_OPT_CAPABILITY {
			return nil, openFault(OpenParameter, nil, "optional parameter of type %d", rest[0])
		}
		families, err := o.read(rest[head : head+n])
		if err != nil {
			return nil, err
		}
		named = named || families
		rest = rest[head+n:]
	}
	if !named { // RFC 4760 section 8
		o.Family[wire.IPv4].Enabled = true
	}
	return o, nil
}

// read reads a list of capabilities, and reports whether one of them names families.
func (o *Open) read(list []byte) (families bool, err error) {
	for len(list) > 0 {
		if len(list) < 2 || len(list) < 2+int(list[1]) {
			return false, openFault(0, nil, "capability cut short at %d bytes", len(list))
		}
		one := list[:2+int(list[1])]
		list = list[len(one):]
		code := packet.BGPCapabilityCode(one[0])
		if !used(code) {
			continue
		}
		c, err := decode(one)
		if err != nil {
			return false, openFault(0, nil, "capability %d: %v", code, err)
		}
		o.apply(c)
		families = families || code == packet.BGP_CAP_MULTIPROTOCOL
	}
	return families, nil
}

// used reports whether a capability matters here; what is in others does not.
func used(c packet.BGPCapabilityCode) bool {
	switch c {
	case packet.BGP_CAP_MULTIPROTOCOL, packet.BGP_CAP_ROUTE_REFRESH, packet.BGP_CAP_EXTENDED_NEXTHOP, packet.BGP_CAP_EXTENDED_MESSAGE,
		packet.BGP_CAP_GRACEFUL_RESTART, packet.BGP_CAP_FOUR_OCTET_AS_NUMBER, packet.BGP_CAP_ADD_PATH, packet.BGP_CAP_ENHANCED_ROUTE_REFRESH,
		packet.BGP_CAP_LONG_LIVED_GRACEFUL_RESTART:
		return true
	}
	return false
}

// decode has GoBGP's codec decode one capability. What makes it panic is malformed.
func decode(b []byte) (c packet.ParameterCapabilityInterface, err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("decode: %v", r)
		}
	}()
	return packet.DecodeCapability(b)
}

func (o *Open) apply(c packet.ParameterCapabilityInterface) {
	switch c := c.(type) {
	case *packet.CapMultiProtocol:
		if f := o.family(c.CapValue); f != nil {
			f.Enabled = true
		}
	case *packet.CapRouteRefresh:
		o.Refresh = true
	case *packet.CapExtendedNexthop:
		for _, t := range c.Tuples {
			o.ExtendedNextHop = o.ExtendedNextHop || t.NLRIAFI == packet.AFI_IP && t.NLRISAFI == packet.SAFI_UNICAST && t.NexthopAFI == packet.AFI_IP6
		}
	case *packet.CapExtendedMessage:
		o.ExtendedMessages = true
	case *packet.CapGracefulRestart: // the last one counts (RFC 4724 section 3)
		o.GracefulRestart = true
		o.Restarting, o.Notification = c.Flags&8 != 0, c.Flags&4 != 0
		o.RestartTime = time.Duration(c.Time) * time.Second
		for i := range o.Family {
			o.Family[i].Restart, o.Family[i].Forwarding = false, false
		}
		for _, t := range c.Tuples {
			if f := o.of(t.AFI, t.SAFI); f != nil {
				f.Restart, f.Forwarding = true, t.Flags&0x80 != 0
			}
		}
	case *packet.CapFourOctetASNumber:
		o.AS4, o.AS = true, c.CapValue
	case *packet.CapAddPath:
		for _, t := range c.Tuples {
			if f := o.of(t.Family.Afi(), t.Family.Safi()); f != nil && t.Mode <= packet.BGP_ADD_PATH_BOTH { // RFC 7911 section 4
				f.AddPathReceive, f.AddPathSend = t.Mode&packet.BGP_ADD_PATH_RECEIVE != 0, t.Mode&packet.BGP_ADD_PATH_SEND != 0
			}
		}
	case *packet.CapEnhancedRouteRefresh:
		o.EnhancedRefresh = true
	case *packet.CapLongLivedGracefulRestart:
		for _, t := range c.Tuples {
			if f := o.of(t.AFI, t.SAFI); f != nil {
				f.StaleTime, f.LongLivedForwarding = time.Duration(t.RestartTime)*time.Second, t.Flags&0x80 != 0
			}
		}
	}
}

func (o *Open) family(f packet.Family) *FamilyCapabilities { return o.of(f.Afi(), f.Safi()) }

func (o *Open) of(afi uint16, safi uint8) *FamilyCapabilities {
	if safi != packet.SAFI_UNICAST || afi != packet.AFI_IP && afi != packet.AFI_IP6 {
		return nil
	}
	return &o.Family[afi-1]
}

func openFault(subcode uint8, data []byte, format string, args ...any) *wire.Error {
	return &wire.Error{Code: CodeOpen, Subcode: subcode, Data: data, Reason: fmt.Sprintf(format, args...)}
}

// Session is what both sides agreed on.
type Session struct {
	Peer Open // what the peer said
	Wire wire.Session

	// AddPathSend says for which families path identifiers are sent (RFC 7911).
	AddPathSend [wire.Families]bool

	HoldTime  time.Duration // 0: no hold timer, and no KEEPALIVEs
	Keepalive time.Duration

	LongestSent, LongestReceived int // messages, in bytes

	AS4, Refresh, EnhancedRefresh bool

	GracefulRestart bool // the peer's routes outlive a lost connection
	Notification    bool // and a NOTIFICATION (RFC 8538)

	// SentOpen and ReceivedOpen are the messages that led to it.
	SentOpen, ReceivedOpen []byte
}

// negotiate returns what the two OPENs amount to, or why there is no session.
func negotiate(local, peer *Open, peerAS uint32, keepalive time.Duration) (*Session, error) {
	switch {
	case peer.AS != peerAS || peer.AS == 0: // RFC 7607
		return nil, openFault(OpenPeerAS, nil, "peer of AS %d, where AS %d is configured", peer.AS, peerAS)
	case peer.ID == 0 || peer.ID == local.ID && peer.AS == local.AS: // RFC 6286
		return nil, openFault(OpenID, nil, "BGP identifier %s", idText(peer.ID))
	case peer.HoldTime == time.Second || peer.HoldTime == 2*time.Second:
		return nil, openFault(OpenHoldTime, nil, "hold time of %v", peer.HoldTime)
	}
	s := &Session{
		Peer: *peer, HoldTime: min(local.HoldTime, peer.HoldTime),
		LongestSent: wire.MaxLen, LongestReceived: wire.MaxLen,
		AS4: local.AS4 && peer.AS4, Refresh: local.Refresh && peer.Refresh, EnhancedRefresh: local.EnhancedRefresh && peer.EnhancedRefresh,
		GracefulRestart: local.GracefulRestart && peer.GracefulRestart,
	}
	s.Notification = s.GracefulRestart && local.Notification && peer.Notification
	if s.Keepalive = s.HoldTime / 3; keepalive > 0 {
		s.Keepalive = min(s.Keepalive, keepalive)
	}
	if local.ExtendedMessages {
		s.LongestReceived = wire.MaxExtended
		if peer.ExtendedMessages {
			s.LongestSent = wire.MaxExtended
		}
	}
	s.Wire.ExtendedNextHop = local.ExtendedNextHop && peer.ExtendedNextHop
	some := false
	var unsupported []byte // the capabilities that the peer lacks (RFC 5492 section 5)
	for i := range s.Wire.Family {
		l, p := &local.Family[i], &peer.Family[i]
		enabled := l.Enabled && p.Enabled
		some = some || enabled
		s.Wire.Family[i].Enabled = enabled
		s.Wire.Family[i].AddPath = enabled && l.AddPathReceive && p.AddPathSend
		s.AddPathSend[i] = enabled && l.AddPathSend && p.AddPathReceive
		if l.Enabled {
			unsupported = append(unsupported, byte(packet.BGP_CAP_MULTIPROTOCOL), 4, 0, byte(i+1), 0, packet.SAFI_UNICAST)
		}
	}
	if !some {
		return nil, openFault(OpenCapability, unsupported, "no address family in common")
	}
	return s, nil
}

func idText(id uint32) string {
	var a [4]byte
	binary.BigEndian.PutUint32(a[:], id)
	return netip.AddrFrom4(a).String()
}
