package operator

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/attach"
	"github.com/routerd/routerd/control/enforce"
	"github.com/routerd/routerd/control/flows"
	"github.com/routerd/routerd/control/policy"
	"github.com/routerd/routerd/dataplane/conntrack"
	"github.com/routerd/routerd/dataplane/filter"
	"github.com/routerd/routerd/dataplane/nft"
	"github.com/routerd/routerd/store"
)

// errPolicyOff answers what is asked of a daemon that enforces nothing.
var errPolicyOff = status.Error(codes.FailedPrecondition, "network policy is disabled on this host (policy.enabled: false): routerd neither filters nor translates packets")

// PolicyConfig is what a [PolicyServer] is made of.
type PolicyConfig struct {
	Node              string
	AutoHostEndpoints bool            // see [policy.Config]
	Services          policy.Services // likewise
	Store             store.Store
	Workloads         func() []attach.Endpoint // attached on this host

	// Unable says why this kernel enforces nothing; what follows is nil then, but
	// for Flows.
	Unable      error
	Flows       *flows.Log
	Enforcer    *enforce.Enforcer
	Table       *nft.Table
	Connections *conntrack.Table
	State       func() error // why the policy in the datastore is not enforced
}

// PolicyServer answers what an operator asks about network policy on this host. A nil
// PolicyServer answers that it is switched off. It is safe for concurrent use.
type PolicyServer struct{ cfg PolicyConfig }

// NewPolicyServer returns a PolicyServer.
func NewPolicyServer(cfg PolicyConfig) *PolicyServer { return &PolicyServer{cfg: cfg} }

// able says why nothing can be answered.
func (p *PolicyServer) able() error {
	switch {
	case p == nil:
		return errPolicyOff
	case p.cfg.Unable != nil:
		return status.Error(codes.FailedPrecondition, p.cfg.Unable.Error())
	}
	return nil
}

// Policy answers [rpc.Operator].
func (p *PolicyServer) Policy(_ context.Context, endpoint string) (*apiv1.PolicyResponse, error) {
	if err := p.able(); err != nil {
		return nil, err
	}
	s := p.cfg.Enforcer.Status()
	out := &apiv1.PolicyResponse{
		Policies: uint32(s.Policies), Sets: uint32(s.Sets), Members: uint64(s.Members), Steps: s.Steps, CutConnections: s.Cut, //nolint:gosec // counts
	}
	if err := p.cfg.State(); err != nil {
		out.State = err.Error()
	}
	for _, o := range s.Problems {
		out.Problems = append(out.Problems, &apiv1.PolicyProblem{Object: showKey(o.Key), Reason: o.Reason})
	}
	counts, err := p.counters()
	if err != nil && out.State == "" {
		out.State = "counters cannot be read: " + err.Error()
	}
	attached := p.cfg.Workloads()
	p.cfg.Enforcer.View(func(r *filter.Ruleset) {
		for _, name := range slices.Sorted(maps.Keys(r.Endpoints)) {
			e := r.Endpoints[name]
			if endpoint == "" || names(e, attached, endpoint) {
				out.Endpoints = append(out.Endpoints, showEndpoint(r, e, counts, endpoint != ""))
			}
		}
	})
	if endpoint != "" && len(out.Endpoints) == 0 {
		return nil, status.Errorf(codes.NotFound, "this host has no endpoint %q: give its interface, address, resource, NAMESPACE/POD or container; routerctl policy show lists them", endpoint)
	}
	return out, nil
}

// names reports whether an endpoint is what a user means by a word.
func names(e filter.Endpoint, attached []attach.Endpoint, word string) bool {
	if word == e.Interface || word == e.Name || strings.HasSuffix(e.Name, "/"+word+")") || strings.HasSuffix(e.Name, "("+word+")") {
		return true
	}
	if a, err := netip.ParseAddr(word); err == nil {
		return slices.ContainsFunc(e.Sources, func(p netip.Prefix) bool { return p.IsSingleIP() && p.Addr() == a })
	}
	return slices.ContainsFunc(attached, func(at attach.Endpoint) bool {
		pod := at.Workload.Pod != "" && (word == at.Workload.Namespace+"/"+at.Workload.Pod || word == at.Workload.Pod)
		return at.Device == e.Interface && (pod || word == at.ID.ContainerID)
	})
}

// counts are the kernel's counters of rules.
type counts map[ruleID]nft.Counter

type ruleID struct {
	policy    filter.PolicyID
	direction filter.Direction
	hook      filter.Hook
	rule      int
	staged    bool
}

// hookOf is the hook under which the counters of a path are kept.
func hookOf(h filter.Hook) filter.Hook {
	if h == filter.Forward {
		return filter.Normal
	}
	return h
}

// counters reads the kernel's counters.
func (p *PolicyServer) counters() (counts, error) {
	list, err := p.cfg.Table.Counters()
	if err != nil {
		return nil, err
	}
	out := make(counts, len(list))
	for _, c := range list {
		if c.Reason == filter.ByRule {
			out[ruleID{c.Policy, c.Direction, c.Hook, c.Rule, c.Staged}] = c
		}
	}
	return out, nil
}

func showEndpoint(r *filter.Ruleset, e filter.Endpoint, counted counts, rules bool) *apiv1.PolicyEndpoint {
	out := &apiv1.PolicyEndpoint{Interface: e.Interface, Name: e.Name, Host: e.Host}
	for _, p := range e.Sources {
		out.Sources = append(out.Sources, p.String())
	}
	if !rules {
		return out
	}
	for _, h := range e.Hooks() {
		for _, dir := range []filter.Direction{filter.Ingress, filter.Egress} {
			path := e.Path(h, dir)
			if h == filter.PreDNAT && dir == filter.Egress || e.Host && h != filter.Normal && len(path.Tiers) == 0 {
				continue
			}
			out.Paths = append(out.Paths, showPath(r, path, h, dir, counted))
		}
	}
	return out
}

func showPath(r *filter.Ruleset, path filter.Path, h filter.Hook, dir filter.Direction, counted counts) *apiv1.PolicyPath {
	rules := func(id filter.PolicyID, staged bool) *apiv1.PolicyRules {
		out := &apiv1.PolicyRules{Policy: showPolicy(id), Staged: staged}
		for i, rule := range r.Policies[id].Rules(dir) {
			c, ok := counted[ruleID{id, dir, hookOf(h), i, staged}]
			out.Rules = append(out.Rules, &apiv1.PolicyRule{
				Index: int32(i), Action: rule.Action.String(), Match: r.Describe(rule), Packets: c.Packets, Bytes: c.Bytes, Counted: ok, //nolint:gosec // at most 1024
			})
		}
		return out
	}
	out := &apiv1.PolicyPath{Hook: h.String(), Direction: dir.String(), Default: path.Default.String()}
	for _, t := range path.Tiers {
		tier := &apiv1.PolicyTier{Name: t.Name, End: t.End.String()}
		if !t.Enforced() {
			tier.End = filter.Pass.String()
		}
		for _, p := range t.Policies {
			tier.Policies = append(tier.Policies, rules(p.ID, p.Staged))
		}
		out.Tiers = append(out.Tiers, tier)
	}
	for _, id := range path.Profiles {
		out.Profiles = append(out.Profiles, rules(id, false))
	}
	return out
}

// showPolicy names a policy or a profile as its user does: one that stands for an
// object of Kubernetes by that.
func showPolicy(id filter.PolicyID) string {
	return showKey(store.Key{Kind: store.Kind(id.Kind), Namespace: id.Namespace, Name: id.Name})
}

func showKey(k store.Key) string {
	if name, ok := k.KubernetesName(); ok {
		return name
	}
	return k.String()
}

// showSteps says for people how a verdict came about.
func showSteps(r *filter.Ruleset, v filter.Verdict) []*apiv1.PolicyStep {
	var out []*apiv1.PolicyStep
	for _, s := range v.Steps {
		step := &apiv1.PolicyStep{
			Hook: s.Hook.String(), Direction: s.Direction.String(), Tier: s.Tier, Rule: int32(s.Rule), //nolint:gosec // at most 1024
			Action: s.Action.String(), Reason: string(s.Reason), Endpoint: s.Interface,
		}
		if e, ok := r.Endpoints[s.Interface]; ok {
			step.Endpoint = cmp.Or(e.Name, s.Interface)
		}
		if s.Rule != filter.NoRule {
			step.Policy = showPolicy(s.Policy)
			step.Match = r.Describe(r.Policies[s.Policy].Rules(s.Direction)[s.Rule])
		}
		out = append(out, step)
	}
	return out
}

// showPacket says for people what a packet is.
func showPacket(p filter.Packet) string {
	s := filter.ProtocolName(p.Protocol)
	switch {
	case p.Protocol == 1 || p.Protocol == 58:
		return fmt.Sprintf("%s type %d code %d %s → %s", s, p.ICMPType, p.ICMPCode, p.Src, p.Dst)
	case p.DstPort != 0 || p.SrcPort != 0:
		return fmt.Sprintf("%s %s → %s", s, netip.AddrPortFrom(p.Src, p.SrcPort), netip.AddrPortFrom(p.Dst, p.DstPort))
	}
	return fmt.Sprintf("%s %s → %s", s, p.Src, p.Dst)
}
