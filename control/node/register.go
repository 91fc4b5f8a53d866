package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/routerd/routerd/control/cluster"
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
		"set address.%s on one of the two hosts, or delete the resource of a host that is gone (routerctl delete node %s)",
		e.Node, e.Address, e.Other, strings.ToLower(dataplane.FamilyOf(e.Address).String()), e.Other)
}

// registration is what a Node resource is to say.
type registration struct {
	addrs    []netip.Prefix     // of this host, at most one of a family
	gone     []dataplane.Family // which it shall have no address of
	complete func(*store.Node)  // adds to a resource that is made
}

// claim is what a host wrote of its addresses and has not compared yet with what
// others wrote before.
type claim struct {
	addrs   []netip.Prefix
	written store.Object
	before  *store.Node // nil: there was no resource
}

// open reports whether the claim is still to be compared or taken back.
func (c claim) open() bool { return len(c.addrs) > 0 }

// register makes the Node resource say what it is to. It leaves everything else in
// the resource alone. Of two hosts that register one address at once each sees the
// other's claim when its copy of the cluster has come as far as its own; the one
// that wrote last takes its claim back. The claim that is returned is open still:
// an error kept it from being compared or taken back. The next call goes on with it.
func register(ctx context.Context, s store.Store, others *peers, name string, want registration, open claim) (claim, error) {
	if !slices.Equal(open.addrs, want.addrs) {
		if err := checkTaken(others, name, want.addrs, 0); err != nil {
			return claim{}, err
		}
		var err error
		if open, err = write(ctx, s, name, want); err != nil {
			return claim{}, fmt.Errorf("register node %s: %w", name, err)
		}
	}
	if err := others.await(ctx, open.written.Revision); err != nil {
		return open, fmt.Errorf("look who else has the address of node %s: %w", name, err)
	}
	if err := checkTaken(others, name, want.addrs, open.written.Revision); err != nil {
		if failed := open.takeBack(ctx, s); failed != nil {
			return open, errors.Join(err, failed)
		}
		return claim{}, err
	}
	return claim{}, nil
}

// write writes a registration. What is there in the place of this host's resource and
// cannot be read is replaced: nobody else can go by it either, and without its
// resource the host would be none of the cluster's after a restart.
func write(ctx context.Context, s store.Store, name string, want registration) (claim, error) {
	c := claim{addrs: want.addrs}
	key := store.ResourceKey(store.KindNode, name)
	change := func(cur store.Object) (any, error) {
		n := &store.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
		if c.before, _ = cur.Value.(*store.Node); c.before != nil {
			n = store.Clone(cur.Value).(*store.Node)
		}
		for _, addr := range want.addrs {
			setAddress(n, addr)
		}
		for _, f := range want.gone {
			dropAddress(n, f)
		}
		if c.before == nil {
			want.complete(n)
		}
		return n, nil
	}
	var err error
	c.written, err = store.Modify(ctx, s, key, change)
	if !errors.Is(err, store.ErrDecode) {
		return c, err
	}
	garbage, err := s.Get(ctx, key)
	if !errors.Is(err, store.ErrDecode) {
		return c, cmp.Or(err, store.ErrConflict) // somebody mended it meanwhile
	}
	n, err := change(store.Object{Key: key})
	if err != nil {
		return c, err
	}
	c.written, err = store.Replace(ctx, s, garbage.Revision, n)
	return c, err
}

// checkTaken looks for another node with one of the addresses; with a revision, for
// one that had it before.
func checkTaken(others *peers, name string, addrs []netip.Prefix, before store.Revision) error {
	if other, addr := others.holder(addrs, before); other != "" {
		return &AddressTakenError{Address: addr, Node: name, Other: other}
	}
	return nil
}

// takeBack makes the resource say what it said before the claim. Others that write
// to the resource, the publishers of encapsulations and of probes' results, may
// have done so since; what they wrote stays.
func (c claim) takeBack(ctx context.Context, s store.Store) error {
	var err error
	if c.before == nil {
		err = c.remove(ctx, s)
	} else {
		_, err = store.Modify(ctx, s, c.written.Key, func(cur store.Object) (any, error) {
			if !c.stands(cur) {
				return nil, nil //nolint:nilnil // nothing to write: somebody else changed the address or deleted the resource
			}
			n := store.Clone(cur.Value).(*store.Node)
			for _, f := range dataplane.Families() {
				setRegistered(n, f, registered(c.before, f))
			}
			n.Spec.Addresses = slices.Clone(c.before.Spec.Addresses)
			return n, nil
		})
	}
	if err != nil {
		return fmt.Errorf("take back the registration of %s: %w", c.written.Key.Name, err)
	}
	return nil
}

// remove deletes a resource that the claim made.
func (c claim) remove(ctx context.Context, s store.Store) error {
	for obj := c.written; ; {
		err := store.Delete(ctx, s, obj.Key, obj.Revision)
		if err == nil || errors.Is(err, store.ErrNotFound) {
			return nil
		}
		if !errors.Is(err, store.ErrConflict) {
			return err
		}
		if obj, err = s.Get(ctx, obj.Key); err != nil || !c.stands(obj) {
			if errors.Is(err, store.ErrNotFound) {
				return nil
			}
			return err
		}
	}
}

// stands reports whether the resource has the claimed addresses.
func (c claim) stands(cur store.Object) bool {
	n, ok := cur.Value.(*store.Node)
	return ok && !slices.ContainsFunc(c.addrs, func(p netip.Prefix) bool {
		return registered(n, dataplane.FamilyOf(p.Addr())) != p.String()
	})
}

func addressOf(s string) (netip.Addr, bool) {
	p, err := store.ParseAddress(s)
	return p.Addr(), err == nil
}

// registered returns the address of a family that a Node resource has; empty:
// none.
func registered(n *store.Node, f dataplane.Family) string {
	switch {
	case n == nil || n.Spec.BGP == nil:
		return ""
	case f == dataplane.IPv6:
		return n.Spec.BGP.IPv6Address
	}
	return n.Spec.BGP.IPv4Address
}

// setAddress writes an address where Calico's tools look for it: the BGP
// address, and the list of the node's addresses.
func setAddress(n *store.Node, addr netip.Prefix) {
	f := dataplane.FamilyOf(addr.Addr())
	forget(n, registered(n, f))
	forget(n, addr.String())
	setRegistered(n, f, addr.String())
	n.Spec.Addresses = append(n.Spec.Addresses,
		store.NodeAddress{Address: addr.String(), Type: "CalicoNodeIP"},
		store.NodeAddress{Address: addr.Addr().String(), Type: "InternalIP"})
}

// dropAddress takes the address of a family out of a Node resource.
func dropAddress(n *store.Node, f dataplane.Family) {
	forget(n, registered(n, f))
	setRegistered(n, f, "")
}

// setRegistered writes what [registered] reads.
func setRegistered(n *store.Node, f dataplane.Family, addr string) {
	switch {
	case n.Spec.BGP == nil && addr == "":
		return
	case n.Spec.BGP == nil:
		n.Spec.BGP = &store.NodeBGPSpec{}
	}
	if f == dataplane.IPv6 {
		n.Spec.BGP.IPv6Address = addr
	} else {
		n.Spec.BGP.IPv4Address = addr
	}
}

// forget takes an address out of the list of a node's addresses.
func forget(n *store.Node, addr string) {
	gone, ok := addressOf(addr)
	if !ok {
		return
	}
	n.Spec.Addresses = slices.DeleteFunc(n.Spec.Addresses, func(a store.NodeAddress) bool {
		x, ok := addressOf(a.Address)
		return ok && x == gone && (a.Type == "CalicoNodeIP" || a.Type == "InternalIP")
	})
}

// SetTunnels writes the addresses of this host's tunnel devices; those that are
// missing are removed.
func SetTunnels(ctx context.Context, s store.Store, name string, addrs map[Tunnel]netip.Addr) error {
	_, err := store.Modify(ctx, s, store.ResourceKey(store.KindNode, name), func(cur store.Object) (any, error) {
		if cur.Value == nil {
			return nil, fmt.Errorf("write the tunnel addresses of node %s: %w", name, store.ErrNotFound)
		}
		n := store.Clone(cur.Value).(*store.Node)
		setTunnels(n, addrs)
		return n, nil
	})
	return err
}

// setTunnels writes tunnel addresses into a Node resource. Calico has no field
// for that of the IPv6 IPIP tunnel, which it does not have.
func setTunnels(n *store.Node, addrs map[Tunnel]netip.Addr) {
	text := func(t Tunnel) string {
		if a := addrs[t]; a.IsValid() {
			return a.String()
		}
		return ""
	}
	if n.Spec.BGP == nil {
		n.Spec.BGP = &store.NodeBGPSpec{}
	}
	n.Spec.BGP.IPv4IPIPTunnelAddr = text(TunnelIPIP)
	n.Spec.IPv4VXLANTunnelAddr, n.Spec.IPv6VXLANTunnelAddr = text(TunnelVXLAN), text(TunnelVXLANv6)
	if v6 := text(TunnelIPIPv6); v6 == "" {
		delete(n.Annotations, store.AnnotationIPv6IPIPTunnelAddr)
	} else {
		if n.Annotations == nil {
			n.Annotations = map[string]string{}
		}
		n.Annotations[store.AnnotationIPv6IPIPTunnelAddr] = v6
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

// DefaultPool describes a pool that is made when the store has none of its
// family.
type DefaultPool struct {
	CIDR          netip.Prefix
	Encapsulation store.Encapsulation
	BlockSize     int
}

// resource returns the IPPool, with the name and the outgoing NAT of the one
// that Calico makes.
func (d DefaultPool) resource() *v3.IPPool {
	p := &v3.IPPool{ObjectMeta: metav1.ObjectMeta{Name: "default-ipv4-ippool"}}
	p.Spec.CIDR, p.Spec.BlockSize, p.Spec.NATOutgoing = d.CIDR.String(), d.BlockSize, true
	if dataplane.FamilyOf(d.CIDR.Addr()) == dataplane.IPv6 {
		p.Name, p.Spec.NATOutgoing = "default-ipv6-ippool", false
	}
	store.SetEncapsulation(p, d.Encapsulation)
	store.SetDefaults(p)
	return p
}

// EnsureDefaultPool makes a pool when the store holds none of its family. It
// reports whether it did. An operator who deleted all pools on purpose turns
// this off in the configuration. A range that the host uses otherwise is
// refused: overlaps is what [Overlaps] found.
func EnsureDefaultPool(ctx context.Context, s store.Store, d DefaultPool, overlaps ...Overlap) (bool, error) {
	pools, _, err := s.List(ctx, store.KindIPPool, "")
	if err != nil && !errors.Is(err, store.ErrDecode) {
		return false, fmt.Errorf("list pools: %w", err)
	}
	// One that cannot be read, or whose CIDR cannot, may be of this family.
	if err != nil || slices.ContainsFunc(pools, func(o store.Object) bool {
		p := cluster.NewPool(o)
		return p == nil || !p.CIDR.IsValid() || p.CIDR.Addr().Is4() == d.CIDR.Addr().Is4()
	}) {
		return false, nil
	}
	p := d.resource()
	if len(overlaps) > 0 {
		return false, fmt.Errorf("the default pool %s with %s is not made: it overlaps %s of this host; set %s to a range apart from the hosts' networks, or to none",
			p.Name, d.CIDR, overlaps[0].With, d.key())
	}
	if err := store.Validate(p); err != nil {
		return false, fmt.Errorf("make the default pool %s: %w", p.Name, err)
	}
	if _, err := store.Create(ctx, s, p); err != nil && !errors.Is(err, store.ErrExists) {
		return false, fmt.Errorf("make the default pool %s: %w", p.Name, err)
	}
	return true, nil
}

// key is the configuration's key of the range.
func (d DefaultPool) key() string {
	if dataplane.FamilyOf(d.CIDR.Addr()) == dataplane.IPv6 {
		return "defaultPool.cidr6"
	}
	return "defaultPool.cidr"
}
