package main

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
	"github.com/routerd/routerd/dataplane/filter"
	"github.com/routerd/routerd/dataplane/nft"
)

// errPolicyOff answers what is asked of a daemon that enforces nothing.
var errPolicyOff = status.Error(codes.FailedPrecondition, "network policy is switched off on this host (policy.enabled: false): nothing is filtered and nothing translated")

// Policy answers [rpc.Operator].
func (d *router) Policy(_ context.Context, endpoint string) (*apiv1.PolicyResponse, error) {
	if d.policy == nil {
		return nil, errPolicyOff
	}
	if d.noPolicy != nil {
		return nil, status.Error(codes.FailedPrecondition, d.noPolicy.Error())
	}
	s := d.policy.enforcer.Status()
	out := &apiv1.PolicyResponse{
		Policies: uint32(s.Policies), Sets: uint32(s.Sets), Members: uint64(s.Members), Steps: s.Steps, CutConnections: s.Cut, //nolint:gosec // counts
	}
	if err := d.policyError(); err != nil {
		out.State = err.Error()
	}
	for _, p := range s.Problems {
		out.Problems = append(out.Problems, &apiv1.PolicyProblem{Object: p.Key.String(), Reason: p.Reason})
	}
	counts, err := d.policy.counters()
	if err != nil && out.State == "" {
		out.State = "counters cannot be read: " + err.Error()
	}
	attached := d.attach.Endpoints()
	d.policy.enforcer.View(func(r *filter.Ruleset) {
		for _, name := range slices.Sorted(maps.Keys(r.Endpoints)) {
			e := r.Endpoints[name]
			if endpoint == "" || names(e, attached, endpoint) {
				out.Endpoints = append(out.Endpoints, showEndpoint(r, e, counts, endpoint != ""))
			}
		}
	})
	if endpoint != "" && len(out.Endpoints) == 0 {
		return nil, status.Errorf(codes.NotFound, "no endpoint of this host is called %q: give its interface, address, resource, NAMESPACE/POD or container; routerctl policy show lists them", endpoint)
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

func showEndpoint(r *filter.Ruleset, e filter.Endpoint, counted counts, rules bool) *apiv1.PolicyEndpoint {
	out := &apiv1.PolicyEndpoint{Interface: e.Interface, Name: e.Name, Host: e.Host}
	for _, p := range e.Sources {
		out.Sources = append(out.Sources, p.String())
	}
	if !rules {
		return out
	}
	hooks := []filter.Hook{filter.Normal}
	if e.Host {
		hooks = []filter.Hook{filter.Untracked, filter.PreDNAT, filter.Normal, filter.Forward}
	}
	for _, h := range hooks {
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
		out := &apiv1.PolicyRules{Policy: id.String(), Staged: staged}
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
			step.Policy = s.Policy.String()
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
