// Package survey looks at what decides about packets on a host beside routerd's own
// objects: policy routing rules, chains of the packet filter, settings of devices,
// tables that fill up; and asks the kernel where it would send a packet. It changes
// nothing.
package survey

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/internal/nl"
	"github.com/routerd/routerd/dataplane/rule"
)

// Host is what one look finds.
type Host struct {
	Rules     []rule.Rule // but for those of routerd and the kernel
	Chains    []Chain
	Conntrack Fill // of the table of tracked connections
	// Fixed are neighbours that somebody entered by hand (NUD_PERMANENT).
	Fixed []Neighbour
	// Neighbours is how full the kernel's tables of them are, by family.
	Neighbours map[dataplane.Family]Fill
}

// Fill is how full a table of the kernel is.
type Fill struct{ Count, Max int }

// Of reports whether at least that share of the table, in percent, is in use.
func (f Fill) Of(percent int) bool { return f.Max > 0 && 100*f.Count >= percent*f.Max }

// Neighbour is an entry of the table of neighbours that does not age.
type Neighbour struct {
	Device string
	Addr   netip.Addr
	MAC    dataplane.MAC
}

// Look looks at the network namespace of the calling thread. The protocol (RTPROT_*)
// marks the rules that are routerd's own; sysctls is where the kernel's settings are,
// usually /proc/sys. With an error it returns what could be seen.
func Look(protocol uint8, sysctls string) (Host, error) {
	var h Host
	var errs []error
	note := func(err error) { errs = append(errs, err) }
	var err error
	h.Rules, err = rule.List()
	h.Rules = slices.DeleteFunc(h.Rules, func(r rule.Rule) bool { return r.Protocol == protocol })
	note(err)
	h.Chains, err = chains()
	note(err)
	h.Conntrack = Fill{number(sysctls, "net/netfilter/nf_conntrack_count"), number(sysctls, "net/netfilter/nf_conntrack_max")}
	h.Neighbours = map[dataplane.Family]Fill{}
	err = neighbours(&h, sysctls)
	note(err)
	return h, errors.Join(errs...)
}

// number reads a setting; 0: there is none, or none that is a number.
func number(sysctls, name string) int {
	b, err := os.ReadFile(filepath.Join(sysctls, name))
	if err != nil {
		return 0
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		return 0
	}
	return n
}

// Strict returns by whose rp_filter, its own or that of "all", a device drops IPv4 packets whose answer would leave by another one
// (RFC 3704, section 2.2); empty: it does not. The kernel goes by the larger of the device's own value and that of all devices.
func Strict(sysctls, device string) (by string) {
	const strict, all = 1, "all"
	of := func(name string) int { return number(sysctls, "net/ipv4/conf/"+name+"/rp_filter") }
	switch own := of(device); {
	case max(own, of(all)) != strict:
		return ""
	case own == strict:
		return device
	}
	return all
}

// tries is how often a listing begins anew that changes interrupt.
const tries = 5

// neighbours counts the neighbours and keeps those that do not age.
func neighbours(h *Host, sysctls string) error {
	var b nl.Batch
	b.Begin(unix.RTM_GETNEIGH, 0, make([]byte, unix.SizeofNdMsg)...)
	list, err := nl.List(unix.NETLINK_ROUTE, tries, &b)
	if err != nil {
		return fmt.Errorf("list the neighbours: %w", err)
	}
	names := map[uint32]string{}
	count := map[dataplane.Family]int{}
	for _, m := range list {
		if m.Type != unix.RTM_NEWNEIGH || len(m.Body) < unix.SizeofNdMsg {
			continue
		}
		addr := nl.Find(m.Body[unix.SizeofNdMsg:], unix.NDA_DST).Addr()
		state := nl.Value(m.Body[8:]).Uint16()
		if !addr.IsValid() || m.Body[0] != unix.AF_INET && m.Body[0] != unix.AF_INET6 || state&unix.NUD_NOARP != 0 {
			continue
		}
		if state&unix.NUD_PERMANENT == 0 {
			count[dataplane.FamilyOf(addr)]++ // those that are permanent do not count (neigh_alloc)
			continue
		}
		n := Neighbour{Addr: addr}
		if mac := nl.Find(m.Body[unix.SizeofNdMsg:], unix.NDA_LLADDR); len(mac) == len(n.MAC) {
			n.MAC = dataplane.MAC(mac)
		}
		index := nl.Value(m.Body[4:]).Uint32()
		if names[index] == "" {
			names[index] = linkName(index)
		}
		n.Device = names[index]
		h.Fixed = append(h.Fixed, n)
	}
	h.Neighbours[dataplane.IPv4] = Fill{count[dataplane.IPv4], number(sysctls, "net/ipv4/neigh/default/gc_thresh3")}
	h.Neighbours[dataplane.IPv6] = Fill{count[dataplane.IPv6], number(sysctls, "net/ipv6/neigh/default/gc_thresh3")}
	return nil
}
