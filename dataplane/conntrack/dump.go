package conntrack

import (
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane/internal/nl"
)

// sourceOf returns the source address of a direction of a connection.
func sourceOf(connection []byte, direction uint16) netip.Addr {
	ip := nl.Find(nl.Find(connection, direction), attrTupleIP)
	if a := nl.Find(ip, attrIPv4Source).Addr(); a.IsValid() {
		return a
	}
	return nl.Find(ip, attrIPv6Source).Addr()
}

// fewAddresses is how many addresses of IPv4 are asked for one by one: the
// kernel walks its table twice for each, which takes a tenth to a twentieth of
// the time of handing all of it over.
const fewAddresses = 5

// listOf lists the connections that one of the addresses began or that really
// go to it.
func (t *Table) listOf(of []netip.Addr) ([]entry, error) {
	wanted := make(map[netip.Addr]bool, len(of))
	var four, six []netip.Addr
	for _, a := range of {
		switch a = a.Unmap(); {
		case wanted[a]:
			continue
		case a.Is4():
			four = append(four, a)
		default:
			six = append(six, a)
		}
		wanted[a] = true
	}
	party := func(b []byte) bool { return wanted[sourceOf(b, attrOrig)] || wanted[sourceOf(b, attrReply)] }
	var list []entry
	add := func(family byte, ask func(*nl.Batch), wanted func([]byte) bool) error {
		part, err := t.list(family, ask, wanted)
		list = append(list, part...)
		return err
	}
	if len(four) > fewAddresses {
		if err := add(unix.AF_INET, nil, party); err != nil {
			return nil, err
		}
		four = nil
	}
	for i, a := range four {
		// A connection is handed over for the first address that it is of.
		earlier := make(map[netip.Addr]bool, i)
		for _, e := range four[:i] {
			earlier[e] = true
		}
		first := func(b []byte) bool { return !earlier[sourceOf(b, attrOrig)] && !earlier[sourceOf(b, attrReply)] }
		if err := add(unix.AF_INET, sourceFilter(attrOrig, a), first); err != nil {
			return nil, err
		}
		if err := add(unix.AF_INET, sourceFilter(attrReply, a), func(b []byte) bool { return first(b) && sourceOf(b, attrOrig) != a }); err != nil {
			return nil, err
		}
	}
	// The kernel's filter takes IPv6 addresses the wrong way round: what is equal
	// is left out (ctnetlink_filter_match_tuple, seen with 6.18).
	if len(six) > 0 {
		return list, add(unix.AF_INET6, nil, party)
	}
	return list, nil
}

// sourceFilter asks for the connections with an address of IPv4 as source of a
// direction (CTA_FILTER, Linux 5.8).
func sourceFilter(direction uint16, a netip.Addr) func(*nl.Batch) {
	flags := uint16(filterOrig)
	if direction == attrReply {
		flags = filterReply
	}
	return func(b *nl.Batch) {
		b.Nest(attrFilter, func() { b.Uint32(flags, filterSource) })
		b.Nest(direction, func() {
			b.Nest(attrTupleIP, func() { b.Addr(attrIPv4Source, a) })
		})
	}
}

// interruptions is how often a listing is begun anew because the table changed
// while it was read. It always does on a busy host; what an incomplete one
// leaves out was made or moved in that moment, and is asked for again then.
const interruptions = 3

// list lists the connections of a family that ask asks the kernel for, nil: for
// all, and that are wanted; nil: all.
func (t *Table) list(family byte, ask func(*nl.Batch), wanted func([]byte) bool) ([]entry, error) {
	var b nl.Batch
	begin(&b, msgGet, family)
	if ask != nil {
		ask(&b)
	}
	var list []entry
	var bad error
	err := nl.Undisturbed(interruptions, func() error {
		list = list[:0]
		return t.c.Dump(&b, func(m nl.Message) {
			connection := m.Body[min(nfgenLen, len(m.Body)):]
			if bad != nil || wanted != nil && !wanted(connection) {
				return
			}
			var e entry
			if e, bad = decode(connection); bad == nil {
				e.family = family
				list = append(list, e)
			}
		})
	})
	if errors.Is(err, nl.ErrInterrupted) {
		err = nil
	}
	if err := errors.Join(err, bad); err != nil {
		return nil, fmt.Errorf("list connections: %w", err)
	}
	return list, nil
}
