package ipam

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/selector"
)

// pool is what allocation goes by of a [cluster.Pool].
type pool struct {
	name       string
	cidr       netip.Prefix
	blockBits  int
	encap      store.Encapsulation
	uses       []v3.IPPoolAllowedUse
	manual     bool
	nodes      *selector.Selector
	namespaces *selector.Selector // nil: all

	// off says why nothing may be taken from the pool at all; empty: it may.
	off string
}

// poolFrom is what a pool says for allocation; nil: its record could not be decoded, and
// a refusal names it with that.
func poolFrom(name string, p *cluster.Pool) *pool {
	if p == nil {
		return &pool{name: name, nodes: selector.All(), off: "its record cannot be decoded"}
	}
	return &pool{
		name: name, cidr: p.CIDR, blockBits: p.BlockBits, encap: p.Encap, uses: p.Uses, manual: p.Manual, nodes: p.Nodes, namespaces: p.Namespaces, off: p.Off,
	}
}

func (p *pool) family() dataplane.Family { return dataplane.FamilyOf(p.cidr.Addr()) }

// allows reports whether the pool lists a use.
func (p *pool) allows(use Use) bool { return slices.Contains(p.uses, v3.IPPoolAllowedUse(use)) }

// refusal says why the pool cannot serve a request of this node that does not
// name it; empty: it can.
func (s *state) refusal(p *pool, r *Request) string {
	if reason := s.usable(p, r); reason != "" {
		return reason
	}
	switch {
	case r.tunnel != nil && !r.tunnel.carries(p.encap):
		return fmt.Sprintf("its encapsulation is %s", p.encap)
	// A tunnel needs its address also where users pick those of workloads.
	case p.manual && r.tunnel == nil:
		return "its assignmentMode is Manual, and the request does not name it"
	case !p.nodes.Matches(s.labels):
		return fmt.Sprintf("its nodeSelector %s does not match the node's labels", p.nodes)
	case p.namespaces != nil && !p.namespaces.Matches(r.NamespaceLabels):
		return fmt.Sprintf("its namespaceSelector %s does not match the namespace's labels", p.namespaces)
	}
	return ""
}

// usable is the part of refusal that also holds for a named pool.
func (s *state) usable(p *pool, r *Request) string {
	use := r.Use
	if use == "" {
		use = Workload
	}
	switch {
	case p.off != "":
		return p.off
	case p.family() != r.Family:
		return fmt.Sprintf("it is an %s pool", p.family())
	case !p.allows(use):
		return fmt.Sprintf("its allowedUses %v lack %s", p.uses, use)
	// A tunnel's address is in no workload's way, and giving it up would be.
	case s.unusable != nil && use == Workload:
		return s.unusable(p.name)
	}
	return ""
}

// selectPools returns the pools that may serve a request, in the order in which
// they are to be tried.
func (s *state) selectPools(r *Request) ([]*pool, error) {
	if len(r.Pools) > 0 {
		return s.namedPools(r)
	}
	var out []*pool
	var refused []PoolReason
	for _, p := range s.poolsByName() {
		if p.off == "" && p.family() != r.Family {
			continue // the other family's pools explain nothing
		}
		if reason := s.refusal(p, r); reason != "" {
			refused = append(refused, PoolReason{p.name, reason})
			continue
		}
		out = append(out, p)
	}
	if len(out) > 0 {
		return out, nil
	}
	e := &Error{Reason: ErrNoPool, Pools: refused}
	e.Message = fmt.Sprintf("none of the %d candidates serves node %s", len(refused), s.node)
	if len(refused) == 0 {
		e.Message = fmt.Sprintf("there is no %s pool; create one", r.Family)
	}
	return nil, e
}

func (s *state) namedPools(r *Request) ([]*pool, error) {
	var out []*pool
	for _, name := range r.Pools {
		p := s.findPool(name)
		if p == nil {
			return nil, &Error{Reason: ErrUnknownPool, Message: fmt.Sprintf("the request names %q; there are %s", name, s.poolNames())}
		}
		if p.off != "" {
			return nil, &Error{Reason: ErrUnknownPool, Message: fmt.Sprintf("the request names %q", name), Pools: []PoolReason{{p.name, p.off}}}
		}
		if reason := s.usable(p, r); reason != "" {
			return nil, &Error{Reason: ErrNoPool, Message: fmt.Sprintf("the request names %q", name), Pools: []PoolReason{{p.name, reason}}}
		}
		if !slices.Contains(out, p) {
			out = append(out, p)
		}
	}
	return out, nil
}

// findPool finds a pool by its name or its CIDR.
func (s *state) findPool(name string) *pool {
	if p := s.pools[name]; p != nil {
		return p
	}
	cidr, err := netip.ParsePrefix(name)
	if err != nil {
		return nil
	}
	for _, p := range s.poolsByName() {
		if p.cidr == cidr.Masked() {
			return p
		}
	}
	return nil
}

func (s *state) poolNames() string {
	if len(s.pools) == 0 {
		return "no pools"
	}
	var names []string
	for _, p := range s.poolsByName() {
		names = append(names, p.name)
	}
	return strings.Join(names, ", ")
}

// poolOf returns the pool that contains a block, nil if none does.
func (s *state) poolOf(block netip.Prefix) *pool {
	for _, p := range s.poolsByName() {
		if p.cidr.IsValid() && p.cidr.Bits() <= block.Bits() && p.cidr.Contains(block.Addr()) {
			return p
		}
	}
	return nil
}

func describe(pools []*pool) string {
	var b strings.Builder
	for i, p := range pools {
		if i > 0 {
			b.WriteString(", ")
		}
		fmt.Fprintf(&b, "%s (%s)", p.name, p.cidr)
	}
	return b.String()
}
