package bgp

import (
	"fmt"
	"os"
	"strconv"
	"strings"
)

// procNetstat is where the kernel counts the segments it dropped for their TCP
// MD5 signatures (RFC 2385), in this network namespace.
const procNetstat = "/proc/net/netstat"

// md5Drops counts dropped segments, by the kernel's names.
type md5Drops struct {
	missing    uint64 // TCPMD5NotFound: a password is set, and the segment had no signature
	unexpected uint64 // TCPMD5Unexpected: no password is set, and the segment had one
	wrong      uint64 // TCPMD5Failure: the signature was made with another password
}

// readMD5Drops reads the counters; none can be told from zero.
func readMD5Drops(file string) md5Drops {
	b, err := os.ReadFile(file)
	if err != nil {
		return md5Drops{}
	}
	return parseMD5Drops(string(b))
}

// parseMD5Drops reads the pairs of lines of netstat's table: names, numbers.
func parseMD5Drops(table string) md5Drops {
	var d md5Drops
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
			}
		}
		names = nil
	}
	return d
}

func (d md5Drops) since(was md5Drops) md5Drops {
	return md5Drops{d.missing - was.missing, d.unexpected - was.unexpected, d.wrong - was.wrong}
}

// suspicion says what the drops mean for a session with or without a password;
// empty: nothing speaks against it.
func (d md5Drops) suspicion(password bool) string {
	switch {
	case password && d.wrong > 0:
		return fmt.Sprintf("MD5 suspected: %d segments came signed with another password", d.wrong)
	case password && d.missing > 0:
		return fmt.Sprintf("MD5 suspected: %d segments came without a signature: does the peer have the password?", d.missing)
	case !password && d.unexpected > 0:
		return fmt.Sprintf("MD5 suspected: %d segments came with a signature: does the peer have a password that is missing here?", d.unexpected)
	}
	return ""
}
