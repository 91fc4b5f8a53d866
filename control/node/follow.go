package node

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/routerd/routerd/dataplane"
)

// missingFor is how long the address that a host is registered with may be
// missing on it before another one takes its place. A DHCP client that starts
// anew, or a bond that is made again, puts it back sooner; and as long as it is
// missing the host is cut off in any case, so there is nothing to be gained by
// haste, while every move makes all peers follow.
const missingFor = 10 * time.Second

// choice is which address a host is to be registered with.
type choice struct {
	Detected
	// Wait is when to look again, where the answer depends on time; 0: when
	// something changes.
	Wait time.Duration
	// Missing says that the host does not have the address at present.
	Missing bool
}

// choose decides which address a host is to be registered with, the present
// one being cur (invalid: none yet), which has been missing on the host for
// this long.
//
// An address that is in use stays: that another one would be chosen today is
// no reason to make all peers follow. It is given up when the method does not
// allow it any more, when the operator deprecates it (preferred lifetime 0,
// which keeps it working while others take over: RFC 4192, section 2), when it
// turns out to be one that stands alone beside one with a subnet, or when it
// is gone for good. Where nothing can take its place it stays all the same,
// and the error says why it should not.
func choose(u dataplane.Underlay, method string, f dataplane.Family, cur netip.Prefix, missing time.Duration, peers ...netip.Addr) (choice, error) {
	found, err := Detect(u, method, f, peers...)
	if !cur.IsValid() {
		return choice{Detected: found}, err
	}
	i := slices.IndexFunc(u.Addresses, func(a dataplane.UnderlayAddress) bool { return a.Prefix.Addr() == cur.Addr() })
	if i < 0 {
		return chooseWithout(method, cur, missing, found, err)
	}
	here := u.Addresses[i]
	stay := choice{Detected: Detected{Prefix: here.Prefix, Link: here.Link, Method: method}}
	switch reason := objection(u, method, f, here); {
	case err != nil && reason == "":
		// A tie, say, which the one in use decides.
		return stay, nil
	case err != nil:
		return stay, fmt.Errorf("this host stays registered with %s, though %s: %w", cur, reason, err)
	case reason != "", here.Prefix.IsSingleIP() && !found.Prefix.IsSingleIP():
		return choice{Detected: found}, nil
	}
	return stay, nil
}

// chooseWithout is choose for a host that does not have the address now.
func chooseWithout(method string, cur netip.Prefix, missing time.Duration, found Detected, err error) (choice, error) {
	stay := choice{Detected: Detected{Prefix: cur, Method: method}, Missing: true}
	if err != nil {
		return stay, fmt.Errorf("this host stays registered with %s, which it does not have any more: %w", cur, err)
	}
	if _, named := literal(method); !named && missing < missingFor {
		stay.Wait = missingFor - missing
		return stay, fmt.Errorf("this host does not have the address %s that it is registered with; %s on %s takes its place if it does not come back within %s",
			cur, found.Prefix, found.Link, missingFor)
	}
	return choice{Detected: found}, nil
}

// objection says why an address that the host has should not stand for it any
// longer; empty: it may. A device that is down is no reason: it keeps its
// addresses.
func objection(u dataplane.Underlay, method string, f dataplane.Family, a dataplane.UnderlayAddress) string {
	if a.Deprecated {
		return "it is deprecated"
	}
	fits, err := parseMethod(u, method, f)
	if errors.Is(err, errNoRoute) {
		return "" // the route may come back
	}
	if err == nil {
		i := slices.IndexFunc(u.Links, func(l dataplane.UnderlayLink) bool { return l.Name == a.Link })
		if i >= 0 && fits(candidate{link: u.Links[i], addr: a}) >= 0 {
			return ""
		}
	}
	return fmt.Sprintf("the method %q does not allow it on %s", method, a.Link)
}

// literal returns the address that a method names, if it is one.
func literal(method string) (netip.Addr, bool) {
	if p, err := netip.ParsePrefix(method); err == nil {
		return p.Addr(), true
	}
	a, err := netip.ParseAddr(method)
	return a, err == nil
}
