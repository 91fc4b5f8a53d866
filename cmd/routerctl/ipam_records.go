package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/control/ipam"
	"github.com/routerd/routerd/store"
)

// finding is something that is wrong with IPAM's records.
type finding struct {
	Problem string `json:"problem"` // leaked, unallocated, …
	What    string `json:"what"`    // the address, block, handle or claim
	Why     string `json:"why"`
	Cure    string `json:"cure"`

	fix *fix // what --fix does; nil: it is not for this command to do
}

// fix names what is to be changed: the records are read again for it.
type fix struct {
	block  netip.Prefix // whose addresses of free, if any, are to be freed
	free   map[netip.Addr]uint64
	disown bool
	remove store.Object // a handle or a claim that goes
}

// owned is an allocated address and who has it.
type owned struct {
	ipam.Allocation
	owners []string // endpoints and nodes that use it; empty: none
	leaked bool
}

// records are IPAM's records and what they are compared with.
type records struct {
	blocks     map[netip.Prefix]*store.Block
	pools      []*v3.IPPool
	nodes      map[string]bool
	users      map[netip.Addr][]string
	handles    []store.Object
	affinities []store.Object
	cluster    *v3.ClusterInformation
	unreadable []store.Key

	tunnels, endpoints int
}

// readRecords reads everything that [audit] compares, page by page.
func readRecords(ctx context.Context, s store.Store) (*records, error) {
	r := &records{blocks: map[netip.Prefix]*store.Block{}, nodes: map[string]bool{}, users: map[netip.Addr][]string{}}
	for _, kind := range []store.Kind{
		store.KindClusterInformation, store.KindIPPool, store.KindNode, store.KindWorkloadEndpoint,
		store.KindIPAMBlock, store.KindIPAMHandle, store.KindIPAMAffinity,
	} {
		err := store.Pages(ctx, s, kind, "", func(objs []store.Object) error {
			for _, o := range objs {
				r.take(o)
			}
			return nil
		})
		if err != nil && !errors.Is(err, store.ErrDecode) {
			return nil, err
		}
	}
	return r, nil
}

func (r *records) take(o store.Object) {
	if o.Key.Kind == store.KindNode {
		r.nodes[o.Key.Name] = true // also one that cannot be read
	}
	switch v := o.Value.(type) {
	case *v3.ClusterInformation:
		r.cluster = v
	case *v3.IPPool:
		r.pools = append(r.pools, v)
	case *store.Node:
		for _, a := range tunnelAddrs(v) {
			r.tunnels++
			r.users[a] = append(r.users[a], "node "+v.Name)
		}
	case *store.WorkloadEndpoint:
		for _, a := range parseAddrs(v.Spec.IPNetworks) {
			r.endpoints++
			r.users[a] = append(r.users[a], "endpoint "+v.Namespace+"/"+v.Name)
		}
	case *store.Block:
		r.blocks[o.Key.CIDR()] = v
	case *store.Handle:
		r.handles = append(r.handles, o)
	case *store.Affinity:
		r.affinities = append(r.affinities, o)
	default:
		r.unreadable = append(r.unreadable, o.Key)
	}
}

// audit compares the records with each other. It decides only. It returns
// everything that is allocated, by address, and what is wrong.
func audit(r *records) ([]owned, []finding) {
	var found []finding
	for _, k := range r.unreadable {
		found = append(found, finding{Problem: "unreadable", What: k.String(), Why: "it cannot be decoded; what it holds is not known", Cure: "repair it, or delete its key in etcd"})
	}
	all, more := r.allocations()
	found = append(found, more...)
	held := map[string]map[netip.Prefix]int{}
	allocated := map[netip.Addr]bool{}
	for _, a := range all {
		allocated[a.Addr] = true
		if a.Handle != "" && a.ReleasedAt.IsZero() {
			if held[a.Handle] == nil {
				held[a.Handle] = map[netip.Prefix]int{}
			}
			held[a.Handle][a.Block]++
		}
	}
	found = append(found, r.unallocated(allocated)...)
	found = append(found, r.handleFindings(held)...)
	return all, append(found, r.ownerFindings()...)
}

// allocations lists what blocks give, and what of it is nobody's.
func (r *records) allocations() (all []owned, found []finding) {
	for _, cidr := range sorted(slices.Collect(maps.Keys(r.blocks))) {
		list, err := ipam.Allocations(cidr, r.blocks[cidr])
		if err != nil {
			found = append(found, finding{Problem: "inconsistent", What: "block " + cidr.String(), Why: err.Error(), Cure: "repair it, or delete its key in etcd when nothing uses its addresses"})
			continue
		}
		leaks := map[netip.Addr]uint64{}
		for _, a := range list {
			o := owned{Allocation: a, owners: r.users[a.Addr]}
			if len(o.owners) == 0 {
				o.owners = r.otherOwners(a)
			}
			if o.leaked = len(o.owners) == 0 && a.ReleasedAt.IsZero(); o.leaked {
				f := r.leak(a)
				if f.fix != nil {
					leaks[a.Addr] = a.Sequence
					f.fix.free = leaks
				}
				found = append(found, f)
			}
			all = append(all, o)
		}
	}
	return all, found
}

// otherOwners names who has an address that neither an endpoint nor a node's
// resource lists.
func (r *records) otherOwners(a ipam.Allocation) []string {
	kind := a.Attributes[ipam.AttrType]
	switch {
	case strings.HasPrefix(a.Handle, "lb-") || a.Handle == "windows-reserved-ipam-handle":
		return []string{"reserved by " + a.Handle}
	case !r.nodes[a.Node]:
		return nil
	case kind == ipam.AttrTypeReserve:
		return []string{"held ready by node " + a.Node}
	case kind == "gateway":
		return []string{"gateway on node " + a.Node}
	case kind == "ipamPlugin":
		return []string{"container " + a.Handle + " on node " + a.Node + " (another plugin's interface)"}
	}
	return nil
}

func (r *records) leak(a ipam.Allocation) finding {
	f := finding{Problem: "leaked", What: a.Addr.String()}
	who := "held by " + cmp.Or(a.Handle, "no handle")
	switch {
	case a.Node == "":
		f.Why, f.Cure = who+", on no node", "--fix frees it"
		f.fix = &fix{block: a.Block}
	case !r.nodes[a.Node]:
		f.Why, f.Cure = fmt.Sprintf("%s on node %s, which does not exist", who, a.Node), "--fix frees it; the daemons do after ipam.leakGracePeriod"
		f.fix = &fix{block: a.Block}
	default:
		f.Why = fmt.Sprintf("%s on node %s; no endpoint and no tunnel has it", who, a.Node)
		f.Cure = fmt.Sprintf("node %s knows whether it is in use, and frees it after ipam.leakGracePeriod; where no routerd runs there: routerctl ipam release --ip=%s", a.Node, a.Addr)
	}
	return f
}

// unallocated finds addresses that are in use and that IPAM might give again.
func (r *records) unallocated(allocated map[netip.Addr]bool) []finding {
	var found []finding
	for _, a := range slices.SortedFunc(maps.Keys(r.users), netip.Addr.Compare) {
		pool := r.poolOf(a)
		if allocated[a] || pool == "" {
			continue
		}
		found = append(found, finding{
			Problem: "unallocated", What: a.String(), Why: fmt.Sprintf("%s uses it, and IPAM may give it to another: it lies in pool %s and is not allocated", strings.Join(r.users[a], ", "), pool),
			Cure: "make that container anew; or delete the endpoint or the node if it does not exist any more",
		})
	}
	for _, a := range slices.SortedFunc(maps.Keys(r.users), netip.Addr.Compare) {
		if who := r.users[a]; len(who) > 1 {
			found = append(found, finding{Problem: "used twice", What: a.String(), Why: strings.Join(who, ", ") + " use it", Cure: "delete those that do not exist; make the others anew"})
		}
	}
	return found
}

func (r *records) poolOf(a netip.Addr) string {
	for _, p := range r.pools {
		if cidr, err := netip.ParsePrefix(p.Spec.CIDR); err == nil && cidr.Contains(a) {
			return p.Name
		}
	}
	return ""
}

// handleFindings compares handles with what blocks hold for them.
func (r *records) handleFindings(held map[string]map[netip.Prefix]int) []finding {
	var found []finding
	known := map[string]bool{}
	for _, k := range r.unreadable {
		if k.Kind == store.KindIPAMHandle {
			known[k.Name] = true
		}
	}
	for _, o := range r.handles {
		known[o.Key.Name] = true
		if len(held[o.Key.Name]) == 0 && !r.hides(o.Value.(*store.Handle)) {
			found = append(found, finding{
				Problem: "empty handle", What: "handle " + o.Key.Name, Why: "no block has an address of it",
				Cure: "--fix deletes it; the daemons do after ipam.leakGracePeriod", fix: &fix{remove: o},
			})
		}
	}
	for _, h := range slices.Sorted(maps.Keys(held)) {
		if !known[h] {
			found = append(found, finding{
				Problem: "missing handle", What: "handle " + h, Why: "blocks have addresses of it, and it does not exist",
				Cure: "release its addresses one by one: routerctl ipam release --ip=ADDRESS",
			})
		}
	}
	return found
}

// hides reports whether a handle names a block that cannot be read.
func (r *records) hides(h *store.Handle) bool {
	for _, k := range r.unreadable {
		if _, ok := h.Block[k.Name]; ok && k.Kind == store.KindIPAMBlock {
			return true
		}
	}
	return false
}

// ownerFindings compares blocks with the claims on them, and with nodes.
func (r *records) ownerFindings() []finding {
	var found []finding
	claims := map[store.Key]bool{}
	for _, o := range r.affinities {
		claims[o.Key] = true
		if node := o.Key.Namespace; !r.nodes[node] {
			found = append(found, finding{
				Problem: "claim of no node", What: "claim of " + node + " on " + o.Key.Name, Why: "node " + node + " does not exist",
				Cure: "--fix deletes it; the daemons do after ipam.leakGracePeriod", fix: &fix{remove: o},
			})
		} else if b := r.blocks[o.Key.CIDR()]; b != nil && owner(b) != node {
			found = append(found, finding{
				Problem: "claim without block", What: "claim of " + node + " on " + o.Key.Name, Why: "the block is " + cmp.Or(owner(b), "nobody") + "'s",
				Cure: "node " + node + " gives it up when its daemon starts",
			})
		}
	}
	for _, cidr := range sorted(slices.Collect(maps.Keys(r.blocks))) {
		node := owner(r.blocks[cidr])
		switch {
		case node == "":
		case !r.nodes[node]:
			found = append(found, finding{
				Problem: "block of no node", What: "block " + cidr.String(), Why: "node " + node + " does not exist",
				Cure: "--fix takes it away; the daemons do after ipam.leakGracePeriod", fix: &fix{block: cidr, disown: true},
			})
		case !claims[store.AffinityKey(node, cidr)]:
			found = append(found, finding{
				Problem: "block without claim", What: "block " + cidr.String(), Why: "node " + node + " holds it without a claim, so Calico's BGP does not announce it",
				Cure: "node " + node + " writes the claim when its daemon starts",
			})
		}
		if r.poolOf(cidr.Addr()) == "" {
			found = append(found, finding{Problem: "block outside pools", What: "block " + cidr.String(), Why: "no pool contains it", Cure: "it goes with its last address; or create the pool again"})
		}
	}
	return found
}
