package convert

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	"github.com/projectcalico/api/pkg/lib/numorstring"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/network-policy-api/apis/v1alpha2"

	"github.com/routerd/routerd/store"
)

// ruleNameAnnotation is where a rule keeps the name that its user gave it.
const ruleNameAnnotation = "name"

// clusterPolicyOf returns the policy that a ClusterNetworkPolicy stands for. One
// without a tier or a subject, which the API does not take, stands for none.
//
// A rule that cannot be said fails closed, as the specification of its peers asks
// (network-policy-api v0.2.0, ClusterNetworkPolicyIngressPeer): an Accept matches
// nothing, a Deny or a Pass denies everything.
func clusterPolicyOf(cnp *v1alpha2.ClusterNetworkPolicy) (store.Key, any, error) {
	key := store.ResourceKey(store.KindGlobalNetworkPolicy, clusterPolicy+cnp.Name)
	p, _ := store.New(store.KindGlobalNetworkPolicy).(*v3.GlobalNetworkPolicy)
	p.ObjectMeta = inherited(&cnp.ObjectMeta, key.Name)
	order := float64(cnp.Spec.Priority)
	p.Spec.Order = &order
	switch cnp.Spec.Tier {
	case v1alpha2.AdminTier:
		p.Spec.Tier = store.TierKubeAdmin
	case v1alpha2.BaselineTier:
		p.Spec.Tier = store.TierKubeBaseline
	default:
		return key, nil, fmt.Errorf("%w: spec.tier %q: want Admin or Baseline", store.ErrDecode, cnp.Spec.Tier)
	}
	p.Labels = map[string]string{store.LabelTier: p.Spec.Tier}
	subject, err := podsOf(cnp.Spec.Subject.Namespaces, cnp.Spec.Subject.Pods)
	if err != nil {
		return key, nil, fmt.Errorf("%w: spec.subject: %w", store.ErrDecode, err)
	}
	p.Spec.Selector, p.Spec.NamespaceSelector = subject.Selector, subject.NamespaceSelector

	var problems []string
	for i, r := range cnp.Spec.Ingress {
		var peers []clusterPeer
		for _, peer := range r.From {
			peers = append(peers, clusterPeer{namespaces: peer.Namespaces, pods: peer.Pods})
		}
		rules, problem := clusterRules(r.Name, r.Action, peers, r.Protocols, func(rule *v3.Rule, peer v3.EntityRule, ports []numorstring.Port) {
			rule.Source, rule.Destination.Ports = peer, ports
		})
		p.Spec.Ingress = append(p.Spec.Ingress, rules...)
		if problem != "" {
			problems = append(problems, fmt.Sprintf("spec.ingress[%d]%s", i, problem))
		}
	}
	for i, r := range cnp.Spec.Egress {
		var peers []clusterPeer
		for _, peer := range r.To {
			peers = append(peers, clusterPeer{namespaces: peer.Namespaces, pods: peer.Pods, networks: peer.Networks, nodes: peer.Nodes, domains: len(peer.DomainNames) > 0})
		}
		rules, problem := clusterRules(r.Name, r.Action, peers, r.Protocols, func(rule *v3.Rule, peer v3.EntityRule, ports []numorstring.Port) {
			rule.Destination, rule.Destination.Ports = peer, ports
		})
		p.Spec.Egress = append(p.Spec.Egress, rules...)
		if problem != "" {
			problems = append(problems, fmt.Sprintf("spec.egress[%d]%s", i, problem))
		}
	}
	// The tiers pass on what no rule decides, so a direction without rules is none.
	if len(p.Spec.Ingress) > 0 {
		p.Spec.Types = append(p.Spec.Types, v3.PolicyTypeIngress)
	}
	if len(p.Spec.Egress) > 0 {
		p.Spec.Types = append(p.Spec.Types, v3.PolicyTypeEgress)
	}
	note(&p.ObjectMeta, problems)
	return key, p, nil
}

// note writes down what of an object cannot be carried out.
func note(m *metav1.ObjectMeta, problems []string) {
	if len(problems) > 0 {
		m.Annotations = with(m.Annotations, store.AnnotationProblems, strings.Join(problems, "; "))
	}
}

// clusterPeer is a peer of either direction.
type clusterPeer struct {
	namespaces *metav1.LabelSelector
	pods       *v1alpha2.NamespacedPod
	networks   []v1alpha2.CIDR
	nodes      *metav1.LabelSelector // these two are of the experimental channel
	domains    bool
}

// clusterRules returns one rule for each protocol and peer, or what stands for a
// rule that cannot be said, and then why it cannot.
func clusterRules(
	name string, action v1alpha2.ClusterNetworkPolicyRuleAction, peers []clusterPeer, protocols []v1alpha2.ClusterNetworkPolicyProtocol,
	fill func(*v3.Rule, v3.EntityRule, []numorstring.Port),
) (rules []v3.Rule, problem string) {
	rule := v3.Rule{}
	if name != "" {
		rule.Metadata = &v3.RuleMetadata{Annotations: map[string]string{ruleNameAnnotation: name}}
	}
	switch action {
	case v1alpha2.ClusterNetworkPolicyRuleActionAccept:
		rule.Action = v3.Allow
	case v1alpha2.ClusterNetworkPolicyRuleActionDeny:
		rule.Action = v3.Deny
	case v1alpha2.ClusterNetworkPolicyRuleActionPass:
		rule.Action = v3.Pass
	default:
		rule.Action = v3.Deny
		return []v3.Rule{rule}, fmt.Sprintf(".action: %q is not known here; it denies everything", action)
	}
	entities, byProtocol, err := clusterMatch(rule.Action, peers, protocols)
	if err != nil {
		if rule.Action == v3.Allow {
			return nil, fmt.Sprintf("%v; it accepts nothing", err)
		}
		rule.Action = v3.Deny
		return []v3.Rule{rule}, fmt.Sprintf("%v; it denies everything", err)
	}
	for _, protocol := range slices.Sorted(maps.Keys(byProtocol)) {
		for i, e := range entities {
			r := rule
			if nodes := peers[i].nodes; nodes != nil {
				r = ofNodes(r, nodes)
			}
			if protocol != "" {
				p := numorstring.ProtocolFromString(protocol)
				r.Protocol = &p
			}
			fill(&r, e, mergePorts(byProtocol[protocol]))
			rules = append(rules, r)
		}
	}
	return rules, ""
}

// clusterMatch returns whom the peers of a rule mean, and the ports of each
// protocol. The error names the field, and begins with it.
func clusterMatch(action v3.Action, peers []clusterPeer, protocols []v1alpha2.ClusterNetworkPolicyProtocol) ([]v3.EntityRule, map[string][]numorstring.Port, error) {
	byProtocol, named, err := clusterPorts(protocols)
	if err != nil {
		return nil, nil, err
	}
	if len(peers) == 0 {
		return nil, nil, errors.New(": it names no peer that is known here")
	}
	var entities []v3.EntityRule
	for i, peer := range peers {
		e, err := peer.entity(action)
		if err != nil {
			return nil, nil, fmt.Errorf(": peer %d: %w", i, err)
		}
		if named && (len(e.Nets) > 0 || peer.nodes != nil) {
			return nil, nil, fmt.Errorf(": peer %d: networks and nodes have no named ports", i)
		}
		entities = append(entities, e)
	}
	return entities, byProtocol, nil
}

// ofNodes has a rule mean the Nodes that a selector matches ([store.RuleNodes]).
func ofNodes(r v3.Rule, nodes *metav1.LabelSelector) v3.Rule {
	var annotations map[string]string
	if r.Metadata != nil {
		annotations = r.Metadata.Annotations
	}
	annotations = with(maps.Clone(annotations), store.RuleNodes, cmp.Or(strings.Join(terms(nodes), " && "), "all()"))
	if r.Action == v3.Pass {
		r.Action = v3.Deny
		annotations[store.RuleAction] = string(v3.Pass)
	}
	r.Metadata = &v3.RuleMetadata{Annotations: annotations}
	return r
}

// entity returns whom a peer means. For nodes it is what a rule is to match where nobody knows
// them: nothing, or, if it denies, anything.
func (p *clusterPeer) entity(action v3.Action) (v3.EntityRule, error) {
	switch {
	case p.domains:
		return v3.EntityRule{}, errors.New("domainNames are not supported")
	case p.nodes != nil && (len(p.networks) > 0 || p.namespaces != nil || p.pods != nil),
		len(p.networks) > 0 && (p.namespaces != nil || p.pods != nil):
		return v3.EntityRule{}, errors.New("more than one field is set")
	case p.nodes != nil && action == v3.Allow:
		return v3.EntityRule{Selector: "!all()"}, nil
	case p.nodes != nil:
		return v3.EntityRule{}, nil
	case len(p.networks) == 0:
		return podsOf(p.namespaces, p.pods)
	}
	e := v3.EntityRule{}
	for _, n := range p.networks {
		nets, err := maskedAll(string(n))
		if err != nil {
			return e, fmt.Errorf("networks: %w", err)
		}
		e.Nets = append(e.Nets, nets...)
	}
	return e, nil
}

// podsOf returns which pods are meant by their namespaces, or by both selectors.
// Exactly one has to be set.
func podsOf(namespaces *metav1.LabelSelector, pods *v1alpha2.NamespacedPod) (v3.EntityRule, error) {
	switch {
	case namespaces != nil && pods != nil:
		return v3.EntityRule{}, errors.New("more than one field is set")
	case namespaces != nil:
		return v3.EntityRule{Selector: podSelector(nil), NamespaceSelector: namespaceSelector(namespaces)}, nil
	case pods != nil:
		return v3.EntityRule{Selector: podSelector(&pods.PodSelector), NamespaceSelector: namespaceSelector(&pods.NamespaceSelector)}, nil
	}
	return v3.EntityRule{}, errors.New("it has no field that is known here")
}

// namespaceSelector says which namespaces a label selector means.
func namespaceSelector(s *metav1.LabelSelector) string {
	return cmp.Or(strings.Join(terms(s), " && "), "all()")
}

// clusterPorts gathers the ports of each protocol; none means all of them. The key
// "" stands for any protocol. A port with a name can be of any protocol that has
// ports. named reports whether there is one.
func clusterPorts(protocols []v1alpha2.ClusterNetworkPolicyProtocol) (byProtocol map[string][]numorstring.Port, named bool, err error) {
	if len(protocols) == 0 {
		return map[string][]numorstring.Port{"": nil}, false, nil
	}
	byProtocol = make(map[string][]numorstring.Port)
	for i, p := range protocols {
		fields := map[string]*v1alpha2.Port{}
		if p.TCP != nil {
			fields[numorstring.ProtocolTCP] = p.TCP.DestinationPort
		}
		if p.UDP != nil {
			fields[numorstring.ProtocolUDP] = p.UDP.DestinationPort
		}
		if p.SCTP != nil {
			fields[numorstring.ProtocolSCTP] = p.SCTP.DestinationPort
		}
		switch name := p.DestinationNamedPort; {
		case name != "" && len(fields) == 0:
			named = true
			for _, protocol := range []string{numorstring.ProtocolTCP, numorstring.ProtocolUDP, numorstring.ProtocolSCTP} {
				byProtocol[protocol] = append(byProtocol[protocol], numorstring.NamedPort(name))
			}
			continue
		case name != "" || len(fields) > 1:
			return nil, false, fmt.Errorf(".protocols[%d]: more than one field is set", i)
		case len(fields) == 0:
			return nil, false, fmt.Errorf(".protocols[%d]: it has no field that is known here", i)
		}
		for protocol, port := range fields {
			number, err := clusterPort(port)
			if err != nil {
				return nil, false, fmt.Errorf(".protocols[%d]: %w", i, err)
			}
			byProtocol[protocol] = append(byProtocol[protocol], number)
		}
	}
	return byProtocol, named, nil
}

func clusterPort(p *v1alpha2.Port) (numorstring.Port, error) {
	valid := func(n int32) bool { return n >= 1 && n <= math.MaxUint16 }
	switch {
	case p == nil || p.Number == 0 && p.Range == nil:
		return numorstring.Port{}, errors.New("it has no field that is known here")
	case p.Number != 0 && p.Range != nil:
		return numorstring.Port{}, errors.New("destinationPort: both number and range are set")
	case p.Range == nil && valid(p.Number):
		return numorstring.SinglePort(uint16(p.Number)), nil //nolint:gosec // in range
	case p.Range != nil && valid(p.Range.Start) && valid(p.Range.End) && p.Range.Start <= p.Range.End:
		return numorstring.Port{MinPort: uint16(p.Range.Start), MaxPort: uint16(p.Range.End)}, nil //nolint:gosec // in range
	}
	text, err := json.Marshal(p)
	return numorstring.Port{}, errors.Join(fmt.Errorf("destinationPort: %s is no port", text), err)
}
