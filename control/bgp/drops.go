package bgp

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/routerd/routerd/store"
)

// procNetstat is where the kernel counts the segments it dropped for their TCP
// MD5 signatures (RFC 2385), TCP-AO (RFC 5925) and their TTL (RFC 5082), in this network namespace.
const procNetstat = "/proc/net/netstat"

// drops counts dropped segments, by the kernel's names.
type drops struct {
	missing    uint64 // TCPMD5NotFound: a password is set, and the segment had no signature
	unexpected uint64 // TCPMD5Unexpected: no password is set, and the segment had one
	wrong      uint64 // TCPMD5Failure: the signature was made with another password
	aoMissing  uint64 // TCPAORequired: there are keys, and the segment had no signature
	aoUnknown  uint64 // TCPAOKeyNotFound: the signature's key is none that is here
	aoWrong    uint64 // TCPAOBad: the key's id is here, with another secret or algorithm
	far        uint64 // TCPMinTTLDrop: the TTL was less than TTL security wants
}

// readDrops reads the counters; those that cannot be read are zero.
func readDrops() drops {
	b, err := os.ReadFile(procNetstat)
	if err != nil {
		return drops{}
	}
	return parseDrops(string(b))
}

// parseDrops reads the pairs of lines of netstat's table: names, numbers.
func parseDrops(table string) drops {
	var d drops
	var names []string
	for line := range strings.Lines(table) {
		f := strings.Fields(line)
		if len(names) != len(f) || len(f) == 0 || names[0] != f[0] {
			names = f
			continue
		}
		for i, name := range names {
			n, err := strconv.ParseUint(f[i], 10, 64)
			if err != nil {
				continue
			}
			switch name {
			case "TCPMD5NotFound":
				d.missing = n
			case "TCPMD5Unexpected":
				d.unexpected = n
			case "TCPMD5Failure":
				d.wrong = n
			case "TCPAORequired":
				d.aoMissing = n
			case "TCPAOKeyNotFound":
				d.aoUnknown = n
			case "TCPAOBad":
				d.aoWrong = n
			case "TCPMinTTLDrop":
				d.far = n
			}
		}
		names = nil
	}
	return d
}

func (d drops) since(was drops) drops {
	return drops{
		d.missing - was.missing, d.unexpected - was.unexpected, d.wrong - was.wrong,
		d.aoMissing - was.aoMissing, d.aoUnknown - was.aoUnknown, d.aoWrong - was.aoWrong, d.far - was.far,
	}
}

// farther says that a peer may be further away than its TTL security says, or
// that it sends without; empty: nothing speaks for it.
func (d drops) farther(hops uint8) string {
	if hops == 0 || d.far == 0 {
		return ""
	}
	return fmt.Sprintf("TTL security suspected: %d segments came from further away than %d hops: does the peer have TTL security too?", d.far, hops)
}

// suspicion says what the drops mean for a session with or without a password or keys;
// empty: nothing speaks against it.
func (d drops) suspicion(p Peer) string {
	password, keys := p.Password != Password{}, p.AO.N > 0
	switch {
	case keys && d.aoWrong > 0:
		return fmt.Sprintf("TCP-AO suspected: %d segments came signed with another secret or algorithm for a key's id", d.aoWrong)
	case keys && d.aoUnknown > 0:
		return fmt.Sprintf("TCP-AO suspected: %d segments came signed with, or asked for, a key that is not among %s", d.aoUnknown, p.AO)
	case keys && d.aoMissing > 0:
		return fmt.Sprintf("TCP-AO suspected: %d segments came without a signature: does the peer have the keys?", d.aoMissing)
	case keys:
		return ""
	case !password && d.aoUnknown > 0:
		return fmt.Sprintf("TCP-AO suspected: %d segments came signed with keys: does the peer have some that annotation %s lacks here?", d.aoUnknown, store.AnnotationTCPAO)
	case password && d.wrong > 0:
		return fmt.Sprintf("MD5 suspected: %d segments came signed with another password", d.wrong)
	case password && d.missing > 0:
		return fmt.Sprintf("MD5 suspected: %d segments came without a signature: does the peer have the password?", d.missing)
	case !password && d.unexpected > 0:
		return fmt.Sprintf("MD5 suspected: %d segments came with a signature: does the peer have a password that is missing here?", d.unexpected)
	}
	return ""
}
