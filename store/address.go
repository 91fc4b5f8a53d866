package store

import (
	"fmt"
	"net/netip"
)

// ParseAddress reads an address as Node resources hold it: with its subnet's
// length, or without, and then it counts as a single address. The result is
// not masked.
func ParseAddress(s string) (netip.Prefix, error) {
	if p, err := netip.ParsePrefix(s); err == nil {
		return p, nil
	}
	a, err := netip.ParseAddr(s)
	if err != nil {
		return netip.Prefix{}, fmt.Errorf("parse address %q: %w", s, err)
	}
	return netip.PrefixFrom(a, a.BitLen()), nil
}
