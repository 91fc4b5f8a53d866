package policy

import (
	"fmt"
	"slices"
	"strings"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	"github.com/projectcalico/api/pkg/lib/numorstring"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/routerd/routerd/store"
)

// kubernetesOrder is the order that Calico gives Kubernetes' policies.
const kubernetesOrder = 1000

// fromKubernetes says a Kubernetes NetworkPolicy as one of Calico's, as
// Calico's converter does: one rule per protocol and peer.
func fromKubernetes(k *v3.StagedKubernetesNetworkPolicySpec) v3.NetworkPolicySpec {
	s := v3.NetworkPolicySpec{
		Tier:     store.DefaultName,
		Order:    new(float64(kubernetesOrder)),
		Selector: ofPods(&k.PodSelector),
	}
	for _, in := range k.Ingress {
		var ports kubernetesPorts
		for _, p := range in.Ports {
			ports.add((*string)(p.Protocol), p.Port, p.EndPort)
		}
		var peers []v3.EntityRule
		for _, p := range in.From {
			var cidr string
			var except []string
			if p.IPBlock != nil {
				cidr, except = p.IPBlock.CIDR, p.IPBlock.Except
			}
			peers = append(peers, kubernetesPeer(p.PodSelector, p.NamespaceSelector, cidr, except))
		}
		s.Ingress = append(s.Ingress, ports.rules(peers, true)...)
	}
	for _, out := range k.Egress {
		var ports kubernetesPorts
		for _, p := range out.Ports {
			ports.add((*string)(p.Protocol), p.Port, p.EndPort)
		}
		var peers []v3.EntityRule
		for _, p := range out.To {
			var cidr string
			var except []string
			if p.IPBlock != nil {
				cidr, except = p.IPBlock.CIDR, p.IPBlock.Except
			}
			peers = append(peers, kubernetesPeer(p.PodSelector, p.NamespaceSelector, cidr, except))
		}
		s.Egress = append(s.Egress, ports.rules(peers, false)...)
	}
	for _, t := range k.PolicyTypes {
		s.Types = append(s.Types, v3.PolicyType(t))
	}
	if s.Types == nil {
		s.Types = []v3.PolicyType{v3.PolicyTypeIngress}
		if len(k.Egress) > 0 {
			// Kubernetes infers Ingress always, and Egress from its rules.
			s.Types = append(s.Types, v3.PolicyTypeEgress)
		}
	}
	return s
}

// kubernetesPorts is the ports of one rule, by protocol.
type kubernetesPorts struct {
	protocols []string // in the order of their first mention
	ports     map[string][]numorstring.Port
	any       map[string]bool // protocols that are named without a port
}

func (k *kubernetesPorts) add(protocol *string, port *intstr.IntOrString, end *int32) {
	name := numorstring.ProtocolTCP
	if protocol != nil && *protocol != "" {
		name = *protocol
	}
	if k.ports == nil {
		k.ports, k.any = make(map[string][]numorstring.Port), make(map[string]bool)
	}
	if !slices.Contains(k.protocols, name) {
		k.protocols = append(k.protocols, name)
	}
	switch {
	case port == nil:
		k.any[name] = true
	case port.Type == intstr.String:
		k.ports[name] = append(k.ports[name], numorstring.NamedPort(port.StrVal))
	default:
		p := numorstring.SinglePort(uint16(port.IntVal)) //nolint:gosec // a port in Kubernetes' API
		if end != nil {
			p.MaxPort = uint16(*end) //nolint:gosec // likewise
		}
		k.ports[name] = append(k.ports[name], p)
	}
}

// rules returns one rule for each protocol and peer; none of either stands for
// all.
func (k *kubernetesPorts) rules(peers []v3.EntityRule, ingress bool) []v3.Rule {
	if len(peers) == 0 {
		peers = []v3.EntityRule{{}}
	}
	protocols := k.protocols
	if len(protocols) == 0 {
		protocols = []string{""}
	}
	var rules []v3.Rule
	for _, name := range protocols {
		for _, peer := range peers {
			r := v3.Rule{Action: v3.Allow}
			if name != "" {
				r.Protocol = new(numorstring.ProtocolFromString(name))
			}
			if ingress {
				r.Source = peer
			} else {
				r.Destination = peer
			}
			if !k.any[name] {
				r.Destination.Ports = k.ports[name]
			}
			rules = append(rules, r)
		}
	}
	return rules
}

func kubernetesPeer(pods, namespaces *metav1.LabelSelector, cidr string, except []string) v3.EntityRule {
	if cidr != "" {
		return v3.EntityRule{Nets: []string{cidr}, NotNets: except}
	}
	e := v3.EntityRule{Selector: ofPods(pods)}
	if namespaces != nil {
		e.NamespaceSelector = strings.Join(kubernetesTerms(namespaces), " && ")
		if e.NamespaceSelector == "" {
			e.NamespaceSelector = "all()"
		}
	}
	return e
}

func ofPods(s *metav1.LabelSelector) string {
	terms := []string{store.LabelOrchestrator + " == 'k8s'"}
	if s != nil {
		terms = append(terms, kubernetesTerms(s)...)
	}
	return strings.Join(terms, " && ")
}

func kubernetesTerms(s *metav1.LabelSelector) []string {
	var terms []string
	for k, v := range s.MatchLabels {
		terms = append(terms, fmt.Sprintf("%s == '%s'", k, v))
	}
	slices.Sort(terms)
	for _, e := range s.MatchExpressions {
		values := "{ '" + strings.Join(e.Values, "', '") + "' }"
		switch e.Operator {
		case metav1.LabelSelectorOpIn:
			terms = append(terms, e.Key+" in "+values)
		case metav1.LabelSelectorOpNotIn:
			terms = append(terms, e.Key+" not in "+values)
		case metav1.LabelSelectorOpExists:
			terms = append(terms, "has("+e.Key+")")
		case metav1.LabelSelectorOpDoesNotExist:
			terms = append(terms, "!has("+e.Key+")")
		}
	}
	return terms
}
