package lab

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/vishvananda/netlink"
)

// SetMTU changes, in bytes, how large a packet the underlay takes at one place:
// for a host the wire between it and its rack, for a rack the spine's
// interface there. With the rack's smaller than its hosts', packets from
// other racks meet a narrow link on their way, and the spine answers those
// that may not be fragmented (RFC 1191).
func (l *Lab) SetMTU(where string, mtu int) error {
	if err := checkMTU("mtu", mtu); err != nil {
		return err
	}
	type end struct{ space, dev string }
	ends := []end{{l.Space(spineName), where}}
	if r, ok := l.topology.rack(where); !ok {
		n, ok := l.topology.node(where)
		if !ok {
			return fmt.Errorf("set MTU of %s: neither a rack nor a host of lab %s", where, l.name)
		}
		rack, _ := l.topology.rack(n.Rack)
		ends = []end{{rack.routerSpace(l.name), where}, {l.Space(where), uplink}}
	} else if r.translated() {
		ends = append(ends, end{r.routerSpace(l.name), transit})
	}
	var errs []error
	for _, e := range ends {
		errs = append(errs, setLinkMTU(e.space, e.dev, mtu))
	}
	return errors.Join(errs...)
}

func setLinkMTU(space, dev string, mtu int) error {
	s, err := openSpace(space)
	if err != nil {
		return err
	}
	defer s.close()
	link, err := s.h.LinkByName(dev)
	if err != nil {
		return fmt.Errorf("find %s in %s: %w", dev, space, err)
	}
	if err := s.h.LinkSetMTU(link, mtu); err != nil {
		return fmt.Errorf("set MTU of %s in %s to %d: %w", dev, space, mtu, err)
	}
	return nil
}

// PodMTU returns the MTU of a pod's device, given as HOST/POD, and that of the
// wire's other end on the host, as they are now, in bytes.
func (l *Lab) PodMTU(where string) (pod, host int, err error) {
	node, name := splitPod(where)
	if _, err := l.Pod(node, name); err != nil {
		return 0, 0, err
	}
	in, err := openSpace(l.Space(where))
	if err != nil {
		return 0, 0, err
	}
	defer in.close()
	link, err := in.h.LinkByName(podInterface)
	if err != nil {
		return 0, 0, fmt.Errorf("find %s in %s: %w", podInterface, in.name, err)
	}
	out, err := openSpace(l.Space(node))
	if err != nil {
		return 0, 0, err
	}
	defer out.close()
	id, err := out.h.GetNetNsIdByFd(int(in.fd))
	if err != nil {
		return 0, 0, fmt.Errorf("get the number of %s in %s: %w", in.name, out.name, err)
	}
	links, err := out.h.LinkList()
	if err != nil {
		return 0, 0, fmt.Errorf("list devices in %s: %w", out.name, err)
	}
	for _, o := range links {
		if a := o.Attrs(); o.Type() == (&netlink.Veth{}).Type() && a.NetNsID == id && a.ParentIndex == link.Attrs().Index {
			return link.Attrs().MTU, a.MTU, nil
		}
	}
	return 0, 0, fmt.Errorf("pod %s: its wire has no end on the host", where)
}

// icmpFilter drops what tells senders that a packet was too large, as
// firewalls do that drop all of ICMP: a black hole (RFC 2923, section 2.1).
const icmpFilter = `table inet lab_icmp {
	chain errors {
		icmp type destination-unreachable drop
		icmpv6 type packet-too-big drop
	}
	chain output { type filter hook output priority 0; jump errors; }
	chain forward { type filter hook forward priority 0; jump errors; }
}
`

// FilterICMP makes the spine drop, or let through again, all ICMP errors that
// path-MTU discovery lives on, its own and those that it forwards.
func (l *Lab) FilterICMP(ctx context.Context, on bool) error {
	rules := "table inet lab_icmp\ndelete table inet lab_icmp\n"
	if on {
		// The empty table first, so that a repetition does not add the rules twice.
		rules += icmpFilter
	}
	var out strings.Builder
	code, err := l.Run(ctx, spineName, Streams{In: strings.NewReader(rules), Out: &out, Err: &out}, "nft", "-f", "-")
	if err != nil {
		return err
	}
	if code != 0 {
		return fmt.Errorf("filter ICMP on the spine: nft: exit code %d: %s", code, strings.TrimSpace(out.String()))
	}
	return nil
}
