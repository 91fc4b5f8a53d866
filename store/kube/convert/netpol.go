package convert

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	"github.com/projectcalico/api/pkg/lib/numorstring"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/routerd/routerd/store"
)

// policyOrder is the order of every policy of Kubernetes among those of the
// default tier.
const policyOrder = 1000

// networkPolicyOf returns the policy that a NetworkPolicy stands for.
func networkPolicyOf(np *networkingv1.NetworkPolicy) (store.Key, any, error) {
	p, _ := store.New(store.KindNetworkPolicy).(*v3.NetworkPolicy)
	p.ObjectMeta = inherited(&np.ObjectMeta, networkPolicy+np.Name)
	p.Namespace = np.Namespace
	p.Labels = map[string]string{store.LabelTier: store.DefaultName}
	var problems []string
	p.Spec, problems = policySpec(&np.Spec)
	note(&p.ObjectMeta, problems)
	key := store.Key{Kind: store.KindNetworkPolicy, Namespace: np.Namespace, Name: p.Name}
	return key, p, nil
}

// PolicySpec says a NetworkPolicy as one of Calico's, as Calico's converter does:
// one rule for each protocol and peer. A rule that cannot be said is left out: its
// like only allow, so less is allowed.
func PolicySpec(np *networkingv1.NetworkPolicySpec) v3.NetworkPolicySpec {
	spec, _ := policySpec(np)
	return spec
}

// policySpec is [PolicySpec], and says what was left out.
func policySpec(np *networkingv1.NetworkPolicySpec) (v3.NetworkPolicySpec, []string) {
	var problems []string
	order := float64(policyOrder)
	spec := v3.NetworkPolicySpec{
		Tier:     store.DefaultName,
		Order:    &order,
		Selector: podSelector(&np.PodSelector),
		Types:    policyTypes(np),
	}
	for i, r := range np.Ingress {
		rules, left := rulesOf(r.From, r.Ports)
		for _, field := range left {
			problems = append(problems, fmt.Sprintf("spec.ingress[%d]%s", i, field))
		}
		for _, rule := range rules {
			spec.Ingress = append(spec.Ingress, v3.Rule{
				Action: v3.Allow, Protocol: rule.protocol, Source: rule.peer, Destination: v3.EntityRule{Ports: rule.ports},
			})
		}
	}
	for i, r := range np.Egress {
		rules, left := rulesOf(r.To, r.Ports)
		for _, field := range left {
			problems = append(problems, fmt.Sprintf("spec.egress[%d]%s", i, field))
		}
		for _, rule := range rules {
			rule.peer.Ports = rule.ports
			spec.Egress = append(spec.Egress, v3.Rule{Action: v3.Allow, Protocol: rule.protocol, Destination: rule.peer})
		}
	}
	return spec, problems
}

// policyTypes returns the directions that a policy is about. Where it states none,
// Kubernetes infers Ingress always, and Egress from its rules.
func policyTypes(np *networkingv1.NetworkPolicySpec) []v3.PolicyType {
	if len(np.PolicyTypes) == 0 && len(np.Egress) > 0 {
		return []v3.PolicyType{v3.PolicyTypeIngress, v3.PolicyTypeEgress}
	}
	var out []v3.PolicyType
	if len(np.PolicyTypes) == 0 || slices.Contains(np.PolicyTypes, networkingv1.PolicyTypeIngress) {
		out = append(out, v3.PolicyTypeIngress)
	}
	if slices.Contains(np.PolicyTypes, networkingv1.PolicyTypeEgress) {
		out = append(out, v3.PolicyTypeEgress)
	}
	return out
}

// rule is what one rule of a NetworkPolicy says of one peer and one protocol.
type rule struct {
	protocol *numorstring.Protocol
	ports    []numorstring.Port
	peer     v3.EntityRule
}

// rulesOf returns one rule for each protocol and peer, none if a port makes no
// sense, and what was left out.
func rulesOf(peers []networkingv1.NetworkPolicyPeer, ports []networkingv1.NetworkPolicyPort) (out []rule, left []string) {
	byProtocol, err := portsByProtocol(ports)
	if err != nil {
		return nil, []string{fmt.Sprintf(".ports: %v; the rule allows nothing", err)}
	}
	var entities []v3.EntityRule
	for i, peer := range peers {
		e, err := entityOf(peer)
		if err != nil {
			left = append(left, fmt.Sprintf(": peer %d: %v; it stands for nobody", i, err))
			continue
		}
		entities = append(entities, e)
	}
	if len(peers) == 0 {
		entities = []v3.EntityRule{{}} // everybody
	}
	for _, name := range slices.Sorted(maps.Keys(byProtocol)) {
		var protocol *numorstring.Protocol
		if name != "" {
			p := numorstring.ProtocolFromString(name)
			protocol = &p
		}
		for _, e := range entities {
			out = append(out, rule{protocol: protocol, ports: mergePorts(byProtocol[name]), peer: e})
		}
	}
	return out, left
}

// portsByProtocol gathers the ports of each protocol; none means all of them.
// The key "" stands for any protocol. The error is about a port that makes no
// sense.
func portsByProtocol(ports []networkingv1.NetworkPolicyPort) (map[string][]numorstring.Port, error) {
	if len(ports) == 0 {
		return map[string][]numorstring.Port{"": nil}, nil
	}
	out := make(map[string][]numorstring.Port)
	all := make(map[string]bool)
	for _, p := range ports {
		protocol := corev1.ProtocolTCP
		if p.Protocol != nil {
			protocol = *p.Protocol
		}
		name := string(protocol)
		if p.Port == nil {
			all[name], out[name] = true, nil
			continue
		}
		text := p.Port.String()
		if p.EndPort != nil {
			text = fmt.Sprintf("%s:%d", text, *p.EndPort)
		}
		port, err := numorstring.PortFromString(text)
		if err != nil {
			return nil, fmt.Errorf("%q is no port", text)
		}
		if !all[name] {
			out[name] = append(out[name], port)
		}
	}
	return out, nil
}

// mergePorts joins ports that follow each other into ranges, after those that
// have names. With one number alone there is nothing to join, and the order stays.
func mergePorts(ports []numorstring.Port) []numorstring.Port {
	var out, numbers []numorstring.Port
	for _, p := range ports {
		if p.PortName != "" {
			out = append(out, p)
		} else {
			numbers = append(numbers, p)
		}
	}
	if len(numbers) == 0 || len(numbers) == 1 && numbers[0].MinPort == numbers[0].MaxPort {
		return ports
	}
	slices.SortFunc(numbers, func(a, b numorstring.Port) int { return cmp.Compare(a.MinPort, b.MinPort) })
	named := len(out)
	for _, p := range numbers {
		if last := len(out) - 1; last >= named && int(p.MinPort) <= int(out[last].MaxPort)+1 {
			out[last].MaxPort = max(out[last].MaxPort, p.MaxPort)
			continue
		}
		out = append(out, p)
	}
	return out
}

// entityOf returns whom a peer means. The error is about a range of addresses that
// is none.
func entityOf(peer networkingv1.NetworkPolicyPeer) (v3.EntityRule, error) {
	if b := peer.IPBlock; b != nil {
		nets, err := maskedAll(b.CIDR)
		if err != nil {
			return v3.EntityRule{}, fmt.Errorf("ipBlock.cidr: %w", err)
		}
		not, err := maskedAll(b.Except...)
		if err != nil {
			return v3.EntityRule{}, fmt.Errorf("ipBlock.except: %w", err)
		}
		return v3.EntityRule{Nets: nets, NotNets: not}, nil
	}
	e := v3.EntityRule{Selector: podSelector(peer.PodSelector)}
	if s := peer.NamespaceSelector; s != nil {
		e.NamespaceSelector = namespaceSelector(s)
	}
	return e, nil
}

func maskedAll(cidrs ...string) ([]string, error) {
	var out []string
	for _, c := range cidrs {
		p, err := netip.ParsePrefix(c)
		if err != nil {
			return nil, fmt.Errorf("%q is no CIDR such as 10.1.0.0/16, without leading zeros", c)
		}
		out = append(out, p.Masked().String())
	}
	return out, nil
}

// podSelector says which pods a label selector means: endpoints of other
// orchestrators are never among them.
func podSelector(s *metav1.LabelSelector) string {
	pods := []string{fmt.Sprintf("%s == '%s'", store.LabelOrchestrator, orchestrator)}
	if s != nil {
		pods = append(pods, terms(s)...)
	}
	return strings.Join(pods, " && ")
}

func terms(s *metav1.LabelSelector) []string {
	var out []string
	for _, k := range slices.Sorted(maps.Keys(s.MatchLabels)) {
		out = append(out, fmt.Sprintf("%s == '%s'", k, s.MatchLabels[k]))
	}
	for _, e := range s.MatchExpressions {
		values := "{ '" + strings.Join(e.Values, "', '") + "' }"
		switch e.Operator {
		case metav1.LabelSelectorOpIn:
			out = append(out, e.Key+" in "+values)
		case metav1.LabelSelectorOpNotIn:
			out = append(out, e.Key+" not in "+values)
		case metav1.LabelSelectorOpExists:
			out = append(out, "has("+e.Key+")")
		case metav1.LabelSelectorOpDoesNotExist:
			out = append(out, "! has("+e.Key+")")
		}
	}
	return out
}
