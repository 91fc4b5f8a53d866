package node

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
)

// AddressTakenError says that another node is registered with this host's
// address. One of the two is wrong, and no host can tell which: both would get
// each other's packets.
type AddressTakenError struct {
	Address     netip.Addr
	Node, Other string
}

func (e *AddressTakenError) Error() string {
	return fmt.Sprintf("node %s cannot register with address %s: node %s is registered with it; "+
		"set address.ipv4 on one of the two hosts, or delete the resource of a host that is gone (routerctl delete node %s)",
		e.Node, e.Address, e.Other, e.Other)
}

// Register makes the Node resource say that this host has an address. It
// leaves everything else in the resource alone. Two hosts that register one
// address at once are both told; the one that wrote last takes its claim back.
func Register(ctx context.Context, s store.Store, name string, addr netip.Prefix) error {
	return register(ctx, s, name, addr, func(*store.Node) {})
}

// register is Register with more to write into a resource that it makes.
func register(ctx context.Context, s store.Store, name string, addr netip.Prefix, complete func(*store.Node)) error {
	if err := checkTaken(ctx, s, name, addr.Addr(), 0); err != nil {
		return err
	}
	var before *store.Node
	existed := false
	obj, err := store.Modify(ctx, s, store.ResourceKey(store.KindNode, name), func(cur store.Object) (any, error) {
		before, existed = nil, false
		n := &store.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
		if cur.Value != nil {
			before, existed = cur.Value.(*store.Node), true
			n = store.Clone(cur.Value).(*store.Node)
		}
		setAddress(n, addr)
		if !existed {
			complete(n)
		}
		return n, nil
	})
	if err != nil {
		return fmt.Errorf("register node %s: %w", name, err)
	}
	err = checkTaken(ctx, s, name, addr.Addr(), obj.Revision)
	var taken *AddressTakenError
	if !errors.As(err, &taken) {
		return err
	}
	return errors.Join(err, takeBack(ctx, s, obj, before, existed))
}

// checkTaken looks for another node with the address. With a revision, only
// those count that were written before it: of two that raced, the later one
// gives way.
func checkTaken(ctx context.Context, s store.Store, name string, addr netip.Addr, before store.Revision) error {
	nodes, _, err := s.List(ctx, store.KindNode, "")
	if err != nil && !errors.Is(err, store.ErrDecode) {
		return fmt.Errorf("list nodes: %w", err)
	}
	for _, o := range nodes {
		n := o.Value.(*store.Node)
		if n.Name == name || n.Spec.BGP == nil || before != 0 && o.Revision > before {
			continue
		}
		for _, s := range []string{n.Spec.BGP.IPv4Address, n.Spec.BGP.IPv6Address} {
			if a, ok := addressOf(s); ok && a == addr {
				return &AddressTakenError{Address: addr, Node: name, Other: n.Name}
			}
		}
	}
	return nil
}

func takeBack(ctx context.Context, s store.Store, written store.Object, before *store.Node, existed bool) error {
	if !existed {
		if err := store.Delete(ctx, s, written.Key, written.Revision); err != nil {
			return fmt.Errorf("take back the registration of %s: %w", written.Key.Name, err)
		}
		return nil
	}
	written.Value = before
	if _, err := store.Update(ctx, s, written); err != nil {
		return fmt.Errorf("take back the registration of %s: %w", written.Key.Name, err)
	}
	return nil
}

func addressOf(s string) (netip.Addr, bool) {
	p, err := store.ParseAddress(s)
	return p.Addr(), err == nil
}

// setAddress writes an address where Calico's tools look for it: the BGP
// address, and the list of the node's addresses.
func setAddress(n *store.Node, addr netip.Prefix) {
	if n.Spec.BGP == nil {
		n.Spec.BGP = &store.NodeBGPSpec{}
	}
	old := n.Spec.BGP.IPv4Address
	if dataplane.FamilyOf(addr.Addr()) == dataplane.IPv6 {
		old = n.Spec.BGP.IPv6Address
		n.Spec.BGP.IPv6Address = addr.String()
	} else {
		n.Spec.BGP.IPv4Address = addr.String()
	}
	oldAddr, _ := addressOf(old)
	n.Spec.Addresses = slices.DeleteFunc(n.Spec.Addresses, func(a store.NodeAddress) bool {
		x, ok := addressOf(a.Address)
		return ok && (x == oldAddr || x == addr.Addr()) && (a.Type == "CalicoNodeIP" || a.Type == "InternalIP")
	})
	n.Spec.Addresses = append(n.Spec.Addresses,
		store.NodeAddress{Address: addr.String(), Type: "CalicoNodeIP"},
		store.NodeAddress{Address: addr.Addr().String(), Type: "InternalIP"})
}

// SetTunnels writes the addresses of this host's tunnel devices; an invalid
// address removes one.
func SetTunnels(ctx context.Context, s store.Store, name string, ipip, vxlan netip.Addr) error {
	_, err := store.Modify(ctx, s, store.ResourceKey(store.KindNode, name), func(cur store.Object) (any, error) {
		if cur.Value == nil {
			return nil, fmt.Errorf("write the tunnel addresses of node %s: %w", name, store.ErrNotFound)
		}
		n := store.Clone(cur.Value).(*store.Node)
		setTunnels(n, ipip, vxlan)
		return n, nil
	})
	return err
}

func setTunnels(n *store.Node, ipip, vxlan netip.Addr) {
	if n.Spec.BGP == nil {
		n.Spec.BGP = &store.NodeBGPSpec{}
	}
	n.Spec.BGP.IPv4IPIPTunnelAddr, n.Spec.IPv4VXLANTunnelAddr = "", ""
	if ipip.IsValid() {
		n.Spec.BGP.IPv4IPIPTunnelAddr = ipip.String()
	}
	if vxlan.IsValid() {
		n.Spec.IPv4VXLANTunnelAddr = vxlan.String()
	}
}

// SetConditions writes the node's conditions. The time of a condition's last
// transition stays while its status does.
func SetConditions(ctx context.Context, s store.Store, name string, conds []metav1.Condition) error {
	_, err := store.Modify(ctx, s, store.ResourceKey(store.KindNode, name), func(cur store.Object) (any, error) {
		if cur.Value == nil {
			return nil, nil //nolint:nilnil // nothing to write: the node is not registered
		}
		n := store.Clone(cur.Value).(*store.Node)
		old := n.Status.Conditions
		n.Status.Conditions = slices.DeleteFunc(slices.Clone(old), func(c metav1.Condition) bool { return ownCondition(c.Type) })
		for _, c := range conds {
			i := slices.IndexFunc(old, func(o metav1.Condition) bool { return o.Type == c.Type })
			if i >= 0 && old[i].Status == c.Status {
				c.LastTransitionTime = old[i].LastTransitionTime
			}
			n.Status.Conditions = append(n.Status.Conditions, c)
		}
		return n, nil
	})
	if err != nil {
		return fmt.Errorf("write the conditions of node %s: %w", name, err)
	}
	return nil
}

// EnsureDefaultPool makes a pool when the store holds none at all. It reports
// whether it did. An operator who deleted all pools on purpose turns this off
// in the configuration.
func EnsureDefaultPool(ctx context.Context, s store.Store, cidr netip.Prefix, e store.Encapsulation, blockSize int) (bool, error) {
	pools, _, err := s.List(ctx, store.KindIPPool, "")
	if err != nil && !errors.Is(err, store.ErrDecode) {
		return false, fmt.Errorf("list pools: %w", err)
	}
	if err != nil || len(pools) > 0 {
		return false, nil
	}
	p := &v3.IPPool{ObjectMeta: metav1.ObjectMeta{Name: "default-ipv4-ippool"}}
	p.Spec.CIDR, p.Spec.BlockSize, p.Spec.NATOutgoing = cidr.String(), blockSize, true
	store.SetEncapsulation(p, e)
	store.SetDefaults(p)
	if err := store.Validate(p); err != nil {
		return false, fmt.Errorf("make the default pool: %w", err)
	}
	if _, err := store.Create(ctx, s, p); err != nil && !errors.Is(err, store.ErrExists) {
		return false, fmt.Errorf("make the default pool: %w", err)
	}
	return true, nil
}
