package oldapi

import (
	"fmt"
	"strings"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	"github.com/projectcalico/api/pkg/lib/numorstring"

	"github.com/routerd/routerd/store"
)

// oldNamespace is the label by which selectors named a namespace of Kubernetes.
const oldNamespace = "calico/k8s_ns"

func convertRules(f *fields, field string, rules []rule) []v3.Rule {
	var out []v3.Rule
	for i, r := range rules {
		at := fmt.Sprintf("%s[%d]", field, i)
		out = append(out, v3.Rule{
			Action: actionOf(f, at+".action", r.Action), IPVersion: r.IPVersion,
			Protocol: protocolOf(r.Protocol), ICMP: icmpOf(r.ICMP), NotProtocol: protocolOf(r.NotProtocol), NotICMP: icmpOf(r.NotICMP),
			Source: entityOf(f, at+".source", r.Source), Destination: entityOf(f, at+".destination", r.Destination),
		})
	}
	return out
}

// actionOf reads an action; a rule without one allows.
func actionOf(f *fields, field, action string) v3.Action {
	switch strings.ToLower(action) {
	case "", "allow":
		return v3.Allow
	case "deny":
		return v3.Deny
	case "log":
		return v3.Log
	case "pass", "next-tier":
		return v3.Pass
	}
	f.fail(field, action, "want allow, deny, log or pass")
	return ""
}

func protocolOf(p *numorstring.Protocol) *numorstring.Protocol {
	if p == nil {
		return nil
	}
	out := numorstring.ProtocolV3FromProtocolV1(*p)
	return &out
}

func icmpOf(i *icmp) *v3.ICMPFields {
	if i == nil || i.Type == nil && i.Code == nil {
		return nil
	}
	return &v3.ICMPFields{Type: i.Type, Code: i.Code}
}

func entityOf(f *fields, field string, e entity) v3.EntityRule {
	return v3.EntityRule{
		Nets: netsOf(f, field, "net", e.Net, e.Nets), Selector: selectorOf(e.Selector, e.Tag), Ports: e.Ports,
		NotNets: netsOf(f, field, "notNet", e.NotNet, e.NotNets), NotSelector: selectorOf(e.NotSelector, e.NotTag), NotPorts: e.NotPorts,
	}
}

// netsOf joins the two fields that name networks, of which a rule has one.
func netsOf(f *fields, field, name, one string, several []string) []string {
	if one != "" && len(several) > 0 {
		f.fail(field+"."+name, one, "a rule has %s or %ss: keep one", name, name)
	}
	var out []string
	if one != "" {
		out = append(out, f.network(field+"."+name, one).String())
	}
	for i, n := range several {
		out = append(out, f.network(fmt.Sprintf("%s.%ss[%d]", field, name, i), n).String())
	}
	return out
}

// selectorOf joins a selector with a tag, which version 3 has as a label without a value.
func selectorOf(selector, tag string) string {
	selector = strings.ReplaceAll(selector, oldNamespace, store.LabelNamespace)
	switch {
	case tag == "":
		return selector
	case selector == "":
		return tag + " == ''"
	}
	return fmt.Sprintf("(%s) && %s == ''", selector, tag)
}
