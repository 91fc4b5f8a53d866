// Package audit compares IPAM's records with endpoints, nodes and each other, says
// of each thing that is wrong what cures it, and mends what no host would.
//
// [Records.Check] decides only. The daemons' own search for leaks, which waits for
// a grace period and holds little in memory, is control/collect; both free with
// what package ipam has for it.
package audit

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

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/control/ipam"
	"github.com/routerd/routerd/store"
)

// Finding is something that is wrong with IPAM's records.
type Finding struct {
	Problem string // leaked, unallocated, …
	What    string // the address, block, handle or claim
	Why     string
	Cure    string

	fix *fix // what [Mender.Mend] does; nil: that is for a host or the user
}

// fix names what is to be changed: the records are read again for it.
type fix struct {
	block  netip.Prefix // whose addresses of free, if any, are to be freed
	free   map[netip.Addr]uint64
	disown bool
	remove store.Object // a handle or a claim that goes
}

// Allocation is an address that is not free, and who has it.
type Allocation struct {
	ipam.Allocation
	Owners []string // endpoints and nodes that use it; empty: none
	Leaked bool
}

// Records are IPAM's records and what they are compared with.
type Records struct {
	Blocks  map[netip.Prefix]*store.Block
	Pools   []*cluster.Pool
	Nodes   map[string]bool // by name, also those that cannot be decoded
	Handles []store.Object
	Cluster *v3.ClusterInformation // nil: none

	// How many addresses nodes' tunnels and workloads have.
	Tunnels, Endpoints int

	users      map[netip.Addr][]string
	affinities []store.Object
	unreadable []store.Key
}

// Read reads everything that [Records.Check] compares, page by page. A record that
// cannot be decoded is one of the findings.
func Read(ctx context.Context, s store.Store) (*Records, error) {
	return read(ctx, s, store.KindClusterInformation, store.KindIPPool, store.KindNode, store.KindWorkloadEndpoint,
		store.KindIPAMBlock, store.KindIPAMHandle, store.KindIPAMAffinity)
}

func read(ctx context.Context, s store.Store, kinds ...store.Kind) (*Records, error) {
	r := &Records{Blocks: map[netip.Prefix]*store.Block{}, Nodes: map[string]bool{}, users: map[netip.Addr][]string{}}
	for _, kind := range kinds {
		err := store.Pages(ctx, s, kind, "", func(objs []store.Object) error {
			for _, o := range objs {
				r.add(o)
			}
			return nil
		})
		if err != nil && !errors.Is(err, store.ErrDecode) {
			return nil, err
		}
	}
	return r, nil
}

func (r *Records) add(o store.Object) {
	if o.Key.Kind == store.KindNode {
		r.Nodes[o.Key.Name] = true // also one that cannot be read
	}
	switch v := o.Value.(type) {
	case *v3.ClusterInformation:
		r.Cluster = v
	case *v3.IPPool:
		r.Pools = append(r.Pools, cluster.NewPool(o))
	case *store.Node:
		for _, a := range v.DeviceAddresses() {
			r.Tunnels++
			r.users[a] = append(r.users[a], "node "+v.Name)
		}
	case *store.WorkloadEndpoint:
		for _, a := range v.Addresses() {
			r.Endpoints++
			r.users[a] = append(r.users[a], "endpoint "+v.Namespace+"/"+v.Name)
		}
	case *store.Block:
		r.Blocks[o.Key.CIDR()] = v
	case *store.Handle:
		r.Handles = append(r.Handles, o)
	case *store.Affinity:
		r.affinities = append(r.affinities, o)
	default:
		r.unreadable = append(r.unreadable, o.Key)
	}
}

// Check compares the records with each other. It returns everything that is
// allocated, by address, and what is wrong.
func (r *Records) Check() ([]Allocation, []Finding) {
	var found []Finding
	for _, k := range r.unreadable {
		found = append(found, Finding{Problem: "unreadable", What: k.String(), Why: "it cannot be decoded; what it holds is not known", Cure: "repair it, or delete its key in etcd"})
	}
	all, more := r.allocations()
	held := map[string]bool{} // handles
	allocated := map[netip.Addr]bool{}
	for _, a := range all {
		allocated[a.Addr] = true
		if a.Handle != "" && a.ReleasedAt.IsZero() {
			held[a.Handle] = true
		}
	}
	return all, slices.Concat(found, more, r.unallocated(allocated), r.handleFindings(held), r.claimFindings(), r.blockFindings())
}

// allocations lists what blocks give, and what of it is leaked.
func (r *Records) allocations() (all []Allocation, found []Finding) {
	for _, cidr := range slices.SortedFunc(maps.Keys(r.Blocks), netip.Prefix.Compare) {
		list, err := ipam.Allocations(cidr, r.Blocks[cidr])
		if err != nil {
			found = append(found, Finding{Problem: "inconsistent", What: "block " + cidr.String(), Why: err.Error(), Cure: "repair it, or delete its key in etcd when nothing uses its addresses"})
			continue
		}
		leaks := map[netip.Addr]uint64{}
		for _, a := range list {
			o := Allocation{Allocation: a, Owners: r.users[a.Addr]}
			if len(o.Owners) == 0 {
				o.Owners = r.otherOwners(a)
			}
			if o.Leaked = len(o.Owners) == 0 && a.ReleasedAt.IsZero(); o.Leaked {
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
func (r *Records) otherOwners(a ipam.Allocation) []string {
	kind := a.Attributes[ipam.AttrType]
	switch {
	case a.Reserved():
		return []string{"reserved by " + a.Handle}
	case !r.Nodes[a.Node]:
		return nil
	case kind == ipam.AttrTypeReserve && r.Blocks[a.Block].Holder() == a.Node:
		return []string{"held ready by node " + a.Node}
	case kind == "gateway":
		return []string{"gateway on node " + a.Node}
	case kind == "ipamPlugin":
		return []string{"container " + a.Handle + " on node " + a.Node + " (another plugin's interface)"}
	}
	return nil
}

func (r *Records) leak(a ipam.Allocation) Finding {
	f := Finding{Problem: "leaked", What: a.Addr.String()}
	who := "held by " + cmp.Or(a.Handle, "no handle")
	switch {
	case a.Node == "":
		f.Why, f.Cure = who+", on no node", "--fix frees it"
		f.fix = &fix{block: a.Block}
	case !r.Nodes[a.Node]:
		f.Why, f.Cure = fmt.Sprintf("%s on node %s, which does not exist", who, a.Node), "--fix frees it; the daemons do after ipam.leakGracePeriod"
		f.fix = &fix{block: a.Block}
	case a.Attributes[ipam.AttrType] == ipam.AttrTypeReserve:
		f.Why = fmt.Sprintf("held ready by node %s, which gives none of a block that is %s's", a.Node, cmp.Or(r.Blocks[a.Block].Holder(), "nobody"))
		f.Cure = fmt.Sprintf("node %s frees it after a few times ipam.leakGracePeriod; where no routerd runs there: routerctl ipam release --ip=%s", a.Node, a.Addr)
	default:
		f.Why = fmt.Sprintf("%s on node %s; no endpoint and no tunnel has it", who, a.Node)
		f.Cure = fmt.Sprintf("node %s knows whether it is in use, and frees it after ipam.leakGracePeriod; where no routerd runs there: routerctl ipam release --ip=%s", a.Node, a.Addr)
	}
	return f
}

// unallocated finds addresses that are in use and that IPAM might give again.
func (r *Records) unallocated(allocated map[netip.Addr]bool) []Finding {
	var found []Finding
	for _, a := range slices.SortedFunc(maps.Keys(r.users), netip.Addr.Compare) {
		pool := r.poolOf(a)
		if allocated[a] || pool == "" {
			continue
		}
		found = append(found, Finding{
			Problem: "unallocated", What: a.String(), Why: fmt.Sprintf("%s uses it, and IPAM may give it to another: it lies in pool %s and is not allocated", strings.Join(r.users[a], ", "), pool),
			Cure: "make that container anew; or delete the endpoint or the node if it does not exist any more",
		})
	}
	for _, a := range slices.SortedFunc(maps.Keys(r.users), netip.Addr.Compare) {
		if who := r.users[a]; len(who) > 1 {
			found = append(found, Finding{Problem: "used twice", What: a.String(), Why: strings.Join(who, ", ") + " use it", Cure: "delete those that do not exist; make the others anew"})
		}
	}
	return found
}

func (r *Records) poolOf(a netip.Addr) string {
	for _, p := range r.Pools {
		if p.CIDR.IsValid() && p.CIDR.Contains(a) {
			return p.Name
		}
	}
	return ""
}

// handleFindings compares handles with what blocks hold for them.
func (r *Records) handleFindings(held map[string]bool) []Finding {
	var found []Finding
	known := map[string]bool{}
	for _, k := range r.unreadable {
		if k.Kind == store.KindIPAMHandle {
			known[k.Name] = true
		}
	}
	for _, o := range r.Handles {
		known[o.Key.Name] = true
		if !held[o.Key.Name] && !r.hides(o.Value.(*store.Handle)) {
			found = append(found, Finding{
				Problem: "empty handle", What: "handle " + o.Key.Name, Why: "no block has an address of it",
				Cure: "--fix deletes it; the daemons do after ipam.leakGracePeriod", fix: &fix{remove: o},
			})
		}
	}
	for _, h := range slices.Sorted(maps.Keys(held)) {
		if !known[h] {
			found = append(found, Finding{
				Problem: "missing handle", What: "handle " + h, Why: "blocks have addresses of it, and it does not exist",
				Cure: "release its addresses one by one: routerctl ipam release --ip=ADDRESS",
			})
		}
	}
	return found
}

// hides reports whether a handle names a block that cannot be read.
func (r *Records) hides(h *store.Handle) bool {
	for _, k := range r.unreadable {
		if _, ok := h.Block[k.Name]; ok && k.Kind == store.KindIPAMBlock {
			return true
		}
	}
	return false
}

// claimFindings compares the claims on blocks with nodes and blocks.
func (r *Records) claimFindings() []Finding {
	var found []Finding
	for _, o := range r.affinities {
		node := o.Key.Namespace
		f := Finding{What: "claim of " + node + " on " + o.Key.Name}
		if b := r.Blocks[o.Key.CIDR()]; !r.Nodes[node] {
			f.Problem, f.Why = "claim of no node", "node "+node+" does not exist"
			f.Cure, f.fix = "--fix deletes it; the daemons do after ipam.leakGracePeriod", &fix{remove: o}
		} else if b != nil && b.Holder() != node {
			f.Problem, f.Why = "claim without block", "the block is "+cmp.Or(b.Holder(), "nobody")+"'s"
			f.Cure = "node " + node + " gives it up when its daemon starts"
		} else {
			continue
		}
		found = append(found, f)
	}
	return found
}

// blockFindings compares blocks with the claims on them, with nodes and pools.
func (r *Records) blockFindings() []Finding {
	claims := map[store.Key]bool{}
	for _, o := range r.affinities {
		claims[o.Key] = true
	}
	var found []Finding
	for _, cidr := range slices.SortedFunc(maps.Keys(r.Blocks), netip.Prefix.Compare) {
		add := func(problem, why, cure string, f *fix) {
			found = append(found, Finding{problem, "block " + cidr.String(), why, cure, f})
		}
		node := r.Blocks[cidr].Holder()
		switch {
		case node == "":
		case !r.Nodes[node]:
			add("block of no node", "node "+node+" does not exist",
				"--fix takes it away; the daemons do after ipam.leakGracePeriod", &fix{block: cidr, disown: true})
		case !claims[store.AffinityKey(node, cidr)]:
			add("block without claim", "node "+node+" holds it without a claim, so Calico's BGP does not announce it",
				"node "+node+" writes the claim when its daemon starts", nil)
		}
		if r.poolOf(cidr.Addr()) == "" {
			add("block outside pools", "no pool contains it", "it goes with its last address; or create the pool again", nil)
		}
	}
	return found
}
