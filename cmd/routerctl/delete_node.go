package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/routerd/routerd/store"
)

// node deletes a Node and what belongs to it. Each step leaves a state from
// which the deletion can be taken up again, and the Node itself goes last.
func (d *deletion) node(ctx context.Context, name string) error {
	for try := 1; ; try++ {
		have, err := d.stateOf(ctx, name)
		if err != nil {
			return fmt.Errorf("delete Node(%s): %w", name, err)
		}
		err = commit(ctx, d.store, d.out, nodeDeletion(name, have, time.Now()))
		if err == nil {
			return nil
		}
		if !errors.Is(err, store.ErrConflict) || try == writeTries {
			return fmt.Errorf("delete Node(%s): %w", name, err)
		}
	}
}

func (d *deletion) stateOf(ctx context.Context, node string) ([]store.Object, error) {
	var have []store.Object
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
	} {
		objects, _, err := d.store.List(ctx, q.kind, q.namespace)
		if err != nil {
			return nil, err
		}
		have = append(have, objects...)
	}
	return have, nil
}

// nodeDeletion returns the operations that delete a node, as Calico's client
// does it: the addresses of its endpoints and tunnels are released and its
// claims on blocks given up, what refers to it by name goes, then the Node.
// Addresses that nothing explains stay, in blocks without an owner.
func nodeDeletion(name string, have []store.Object, now time.Time) []store.Op {
	var addrs []netip.Addr
	var ops []store.Op
	var last store.Op
	cooldown := false
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
		case *store.IPAMConfig:
			cooldown = v.IPCooldownSeconds != nil && *v.IPCooldownSeconds > 0
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

// releases returns the operations that release addrs and node's blocks.
func releases(node string, addrs []netip.Addr, have []store.Object, now time.Time, cooldown bool) []store.Op {
	var ops []store.Op
	left := map[string]map[string]int{} // handle → block → addresses it still holds
	for _, o := range have {
		b, ok := o.Value.(*store.Block)
		if !ok {
			continue
		}
		next := store.Clone(b).(*store.Block)
		changed := false
		var handles []string
		for _, a := range addrs {
			if handle, ok := release(next, a, now, cooldown); ok {
				changed = true
				handles = append(handles, handle)
			}
		}
		for _, h := range handles {
			if left[h] == nil {
				left[h] = map[string]int{}
			}
			left[h][b.CIDR] = heldBy(next, h)
		}
		if owner(next) == node {
			next.Affinity, next.AffinityClaimTime, changed = nil, nil, true
		}
		switch {
		case !changed:
		case next.Affinity == nil && allocated(next) == 0:
			ops = append(ops, removal(o))
		default:
			compact(next)
			next.SequenceNumber++
			ops = append(ops, store.Op{If: store.IfRevision(o.Revision), Action: store.Put, Object: store.Object{Key: o.Key, Value: next, Raw: o.Raw}})
		}
	}
	return append(ops, lowerHandles(left, have)...)
}

// heldBy counts the addresses of a block that a handle holds.
func heldBy(b *store.Block, handle string) int {
	n := 0
	for _, i := range b.Allocations {
		if i != nil && b.Attributes[*i].HandleID != nil && *b.Attributes[*i].HandleID == handle {
			n++
		}
	}
	return n
}

// lowerHandles sets handles' counts to what blocks say after a release, for
// counts alone are hints and often too high.
func lowerHandles(left map[string]map[string]int, have []store.Object) []store.Op {
	var ops []store.Op
	for _, o := range have {
		h, ok := o.Value.(*store.Handle)
		if !ok || left[o.Key.Name] == nil {
			continue
		}
		next := store.Clone(h).(*store.Handle)
		for cidr, n := range left[o.Key.Name] {
			if next.Block[cidr] = n; n == 0 {
				delete(next.Block, cidr)
			}
		}
		if len(next.Block) == 0 {
			ops = append(ops, removal(o))
			continue
		}
		ops = append(ops, store.Op{If: store.IfRevision(o.Revision), Action: store.Put, Object: store.Object{Key: o.Key, Value: next, Raw: o.Raw}})
	}
	return ops
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

// release frees an address, or with a cool-down marks it as released now, and
// returns the handle it was held by. It reports false for an address that is
// not in the block or not allocated.
func release(b *store.Block, a netip.Addr, now time.Time, cooldown bool) (handle string, ok bool) {
	i := ordinal(b, a)
	if i < 0 || i >= len(b.Allocations) || b.Allocations[i] == nil {
		return "", false
	}
	attr := b.Attributes[*b.Allocations[i]]
	if attr.ReleasedAt != nil {
		return "", false
	}
	if attr.HandleID != nil {
		handle = *attr.HandleID
	}
	if cooldown {
		at := metav1.NewTime(now.UTC())
		b.Attributes = append(b.Attributes, store.Attribute{ReleasedAt: &at})
		last := len(b.Attributes) - 1
		b.Allocations[i] = &last
		return handle, true
	}
	b.Allocations[i] = nil
	b.Unallocated = append(b.Unallocated, i)
	delete(b.SequenceNumberForAllocation, fmt.Sprint(i))
	return handle, true
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

// compact drops attributes that no address uses and renumbers the others.
func compact(b *store.Block) {
	used := map[int]bool{}
	for _, i := range b.Allocations {
		if i != nil {
			used[*i] = true
		}
	}
	renumber := map[int]int{}
	attributes := []store.Attribute{}
	for _, i := range slices.Sorted(maps.Keys(used)) {
		renumber[i] = len(attributes)
		attributes = append(attributes, b.Attributes[i])
	}
	for i, a := range b.Allocations {
		if a != nil {
			n := renumber[*a]
			b.Allocations[i] = &n
		}
	}
	b.Attributes = attributes
}
