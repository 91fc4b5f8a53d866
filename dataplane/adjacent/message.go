package adjacent

import (
	"encoding/binary"

	"golang.org/x/net/ipv6"

	"github.com/routerd/routerd/dataplane"
)

// Lengths of the messages' fixed parts in bytes (RFC 4861 sections 4.1 and 4.2).
const (
	solicitationLen  = 8
	advertisementLen = 16
)

// advertisement says that a router is here and nothing else: with a lifetime
// and parameters of 0 no host takes it for a default router or learns any setting
// from it (RFC 4861 section 4.2). The kernel fills in checksums.
func advertisement(mac dataplane.MAC) []byte {
	b := make([]byte, advertisementLen, advertisementLen+8)
	b[0] = byte(ipv6.ICMPTypeRouterAdvertisement)
	return withMAC(b, mac)
}

// solicitation asks for the advertisements of others (RFC 4861 section 4.1).
func solicitation(mac dataplane.MAC) []byte {
	b := make([]byte, solicitationLen, solicitationLen+8)
	b[0] = byte(ipv6.ICMPTypeRouterSolicitation)
	return withMAC(b, mac)
}

// echoID is the identifier of our echo requests.
const echoID = 0x7264

// echo is an echo request (RFC 4443 section 4.1), which hosts that say nothing
// of themselves answer.
func echo(sequence uint16) []byte {
	b := make([]byte, 8)
	b[0] = byte(ipv6.ICMPTypeEchoRequest)
	binary.BigEndian.PutUint16(b[4:], echoID)
	binary.BigEndian.PutUint16(b[6:], sequence)
	return b
}

// withMAC appends the option of the source's link-layer address (RFC 4861
// section 4.6.1), if there is one.
func withMAC(b []byte, mac dataplane.MAC) []byte {
	if mac == (dataplane.MAC{}) {
		return b
	}
	return append(append(b, 1, 1), mac[:]...)
}

// kind is what a message means.
type kind uint8

const (
	nothing    kind = iota
	advertises      // a router is there
	solicits        // a neighbour asks for routers (RFC 4861, section 4.1)
	answers         // a neighbour answers our echo request
)

// meaning says what a message is, as far as it is one that a node must accept
// (RFC 4861 sections 6.1.1 and 6.1.2); what comes over a router is not.
func meaning(b []byte, hopLimit int, fromLinkLocal bool) kind {
	if len(b) < solicitationLen || b[1] != 0 {
		return nothing
	}
	switch b[0] {
	case byte(ipv6.ICMPTypeRouterAdvertisement):
		if hopLimit == 255 && len(b) >= advertisementLen && fromLinkLocal {
			return advertises
		}
	case byte(ipv6.ICMPTypeRouterSolicitation):
		if hopLimit == 255 {
			return solicits
		}
	case byte(ipv6.ICMPTypeEchoReply):
		if fromLinkLocal && binary.BigEndian.Uint16(b[4:]) == echoID {
			return answers
		}
	}
	return nothing
}
