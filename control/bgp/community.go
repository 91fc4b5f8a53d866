package bgp

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/routerd/routerd/control/bgp/engine/attrs"
)

// parseCommunity reads a standard (RFC 1997) community `aa:nn` or a large one
// (RFC 8092) `aa:nn:mm`.
func parseCommunity(s string) ([]uint32, error) {
	parts := strings.Split(s, ":")
	bits := map[int]int{2: 16, 3: 32}[len(parts)]
	var out []uint32
	for _, p := range parts {
		n, err := strconv.ParseUint(p, 10, max(bits, 1))
		if err != nil || bits == 0 {
			return nil, fmt.Errorf("community %q: want aa:nn with numbers up to 65535, or aa:nn:mm with numbers up to 4294967295", s)
		}
		out = append(out, uint32(n))
	}
	return out, nil
}

// readCommunity reads a community of either sort.
func readCommunity(s string) (small []uint32, large []attrs.Large, err error) {
	switch n, err := parseCommunity(s); {
	case err != nil:
		return nil, nil, err
	case len(n) == 2:
		return []uint32{n[0]<<16 | n[1]}, nil, nil
	default:
		return nil, []attrs.Large{attrs.Large(n)}, nil
	}
}

// isLarge reports whether a valid community is one of RFC 8092.
func isLarge(s string) bool { return strings.Count(s, ":") == 2 }

// textOf is what people write for a community.
func textOf(numbers ...uint32) string {
	var b strings.Builder
	for i, n := range numbers {
		if i > 0 {
			b.WriteByte(':')
		}
		b.WriteString(strconv.FormatUint(uint64(n), 10))
	}
	return b.String()
}
