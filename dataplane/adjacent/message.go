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
// and parameters of 0 nobody takes it for a default router or learns any setting
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

// echo is an echo request (RFC 4443 section 4.1): to answer it, a host has to
// ask for our MAC address, and so the kernel learns that it is there.
func echo(sequence uint16) []byte {
	b := make([]byte, 8)
	b[0] = byte(ipv6.ICMPTypeEchoRequest)
	copy(b[4:], "rd")
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

// meaning says what a message is, as far as it is one that a node must accept
// (RFC 4861 sections 6.1.1 and 6.1.2); what comes over a router is not.
func meaning(b []byte, hopLimit int, fromLinkLocal bool) (advertises, solicits bool) {
	if hopLimit != 255 || len(b) < solicitationLen || b[1] != 0 {
		return false, false
	}
	switch b[0] {
	case byte(ipv6.ICMPTypeRouterAdvertisement):
		return len(b) >= advertisementLen && fromLinkLocal, false
	case byte(ipv6.ICMPTypeRouterSolicitation):
		return false, true
	}
	return false, false
}
