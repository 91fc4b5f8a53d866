package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"time"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/control/ipam"
	"github.com/routerd/routerd/store"
)

// node deletes a Node and what belongs to it. Each step leaves a state from
// which the deletion can be taken up again, and the Node itself goes last.
func (d *deletion) node(ctx context.Context, name string) error {
	for try := 1; ; try++ {
		have, unreadable := d.stateOf(ctx, name)
		if unreadable != nil && !errors.Is(unreadable, store.ErrDecode) {
			return fmt.Errorf("delete Node(%s): %w", name, unreadable)
		}
		err := commit(ctx, d.store, d.out, nodeDeletion(name, have, time.Now()))
		if err == nil {
			if unreadable != nil {
				return fmt.Errorf("Node(%s) is deleted; left alone is what cannot be read, see `routerctl ipam check`: %w", name, unreadable) //nolint:revive,staticcheck // the name of a kind
			}
			return nil
		}
		if !errors.Is(err, store.ErrConflict) || try == writeTries {
			return fmt.Errorf("delete Node(%s): %w", name, err)
		}
	}
}

// stateOf reads what the deletion of a node depends on. With an error that
// matches [store.ErrDecode] it returns what can be read.
func (d *deletion) stateOf(ctx context.Context, node string) ([]store.Object, error) {
	var have []store.Object
	var unreadable error
	for _, q := range []struct {
		kind      store.Kind
		namespace string
	}{
		{store.KindNode, ""},
		{store.KindWorkloadEndpoint, ""},
		{store.KindBGPPeer, ""},
		{store.KindBGPConfiguration, ""},
		{store.KindFelixConfiguration, ""},
		{store.KindIPAMBlock, ""},
		{store.KindIPAMAffinity, node},
		{store.KindIPAMHandle, ""},
		{store.KindIPAMConfig, ""},
		{store.KindIncarnation, ""},
	} {
		objects, _, err := d.store.List(ctx, q.kind, q.namespace)
		if err != nil && (!errors.Is(err, store.ErrDecode) || !spared(q.kind)) {
			return nil, err
		}
		unreadable = errors.Join(unreadable, err)
		have = append(have, objects...)
	}
	return have, unreadable
}

// spared reports whether records of a kind that cannot be decoded are left
// alone when a node is deleted: they keep what they hold until they are
// repaired. Of others it must be known whether they refer to the node.
func spared(kind store.Kind) bool { return kind.IPAM() || kind == store.KindIncarnation }

// nodeDeletion returns the operations that delete a node, as Calico's client
// does it: the addresses of its endpoints and tunnels are released and its
// claims on blocks given up, what refers to it by name goes, then the Node.
// Addresses that nothing explains stay, in blocks without an owner.
func nodeDeletion(name string, have []store.Object, now time.Time) []store.Op {
	var addrs []netip.Addr
	var ops []store.Op
	var last store.Op
	cooldown := time.Duration(0)
	for _, o := range have {
		gone := false
		switch v := o.Value.(type) {
		case *store.Node:
			if v.Name == name {
				addrs = append(addrs, tunnelAddrs(v)...)
				last = removal(o)
			}
		case *store.WorkloadEndpoint:
			if gone = v.Spec.Node == name; gone {
				addrs = append(addrs, parseAddrs(v.Spec.IPNetworks)...)
			}
		case *v3.BGPPeer:
			gone = v.Spec.Node == name
		case *v3.BGPConfiguration, *v3.FelixConfiguration:
			gone = o.Key.Name == "node."+name
		case *store.Affinity:
			gone = o.Key.Namespace == name
		case *store.Incarnation:
			// The host, should it come back, learns by that what was done.
			gone = o.Key.Name == name
		case *store.IPAMConfig:
			if v.IPCooldownSeconds != nil {
				cooldown = time.Duration(*v.IPCooldownSeconds) * time.Second
			}
		}
		if gone {
			ops = append(ops, removal(o))
		}
	}
	ops = append(ops, releases(name, addrs, have, now, cooldown)...)
	if last.Action == store.Remove {
		ops = append(ops, last)
	}
	return ops
}

func removal(o store.Object) store.Op {
	return store.Op{If: store.IfRevision(o.Revision), Action: store.Remove, Object: store.Object{Key: o.Key}}
}

func tunnelAddrs(n *store.Node) []netip.Addr {
	list := []string{n.Spec.IPv4VXLANTunnelAddr, n.Spec.IPv6VXLANTunnelAddr, n.Annotations[store.AnnotationIPv6IPIPTunnelAddr]}
	if b := n.Spec.BGP; b != nil {
		list = append(list, b.IPv4IPIPTunnelAddr)
	}
	if w := n.Spec.Wireguard; w != nil {
		list = append(list, w.InterfaceIPv4Address, w.InterfaceIPv6Address)
	}
	return parseAddrs(list)
}

// parseAddrs reads addresses with or without a length, and passes over what is
// neither.
func parseAddrs(list []string) []netip.Addr {
	var addrs []netip.Addr
	for _, s := range list {
		if p, err := netip.ParsePrefix(s); err == nil {
			addrs = append(addrs, p.Addr())
		} else if a, err := netip.ParseAddr(s); err == nil {
			addrs = append(addrs, a)
		}
	}
	return addrs
}

// releases returns the operations that release addrs and node's blocks. A block
// that cannot be read is left alone; [deletion.stateOf] has named it.
func releases(node string, addrs []netip.Addr, have []store.Object, now time.Time, cooldown time.Duration) []store.Op {
	mine := map[netip.Addr]bool{}
	for _, a := range addrs {
		mine[a] = true
	}
	var ops []store.Op
	left := map[string]map[string]int{} // handle → block → addresses it still holds
	for _, o := range have {
		b, ok := o.Value.(*store.Block)
		if !ok {
			continue
		}
		edit, ok, err := ipam.EditBlock(o, func(a ipam.Allocation) bool {
			return mine[a.Addr] || a.Node == node && ownHandle(a.Handle, node)
		}, owner(b) == node, now, cooldown)
		if err != nil || !ok || len(edit.Freed) == 0 && owner(b) != node {
			continue
		}
		ops = append(ops, edit.Op)
		for h, n := range edit.Left {
			if left[h] == nil {
				left[h] = map[string]int{}
			}
			left[h][b.CIDR] = n
		}
	}
	for _, o := range have {
		if o.Key.Kind != store.KindIPAMHandle || left[o.Key.Name] == nil {
			continue
		}
		if op, ok := ipam.EditHandle(o, left[o.Key.Name]); ok {
			ops = append(ops, op)
		}
	}
	return ops
}

// ownHandle reports whether a handle holds what a node itself uses.
func ownHandle(handle, node string) bool {
	return handle == ipam.ReserveHandle(node) || strings.HasPrefix(handle, "routerd-gateway-"+node+".")
}

// owner returns the node that a block belongs to, or "".
func owner(b *store.Block) string {
	const host = "host:"
	if b.Affinity == nil || len(*b.Affinity) <= len(host) || (*b.Affinity)[:len(host)] != host {
		return ""
	}
	return (*b.Affinity)[len(host):]
}

// allocated counts the addresses of a block that are not free.
func allocated(b *store.Block) int {
	n := 0
	for _, a := range b.Allocations {
		if a != nil {
			n++
		}
	}
	return n
}

// ordinal returns the place of an address in a block, or -1.
func ordinal(b *store.Block, a netip.Addr) int {
	p, err := netip.ParsePrefix(b.CIDR)
	if err != nil || !p.Contains(a) {
		return -1
	}
	base, addr := p.Addr().As16(), a.As16()
	n := 0
	for i := 12; i < 16; i++ { // a block is never larger than a /20 or a /116
		n = n<<8 | int(addr[i]) - int(base[i])
	}
	return n
}
