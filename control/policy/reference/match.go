package reference

import (
	"maps"
	"net/netip"
	"slices"
	"strings"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	"github.com/projectcalico/api/pkg/lib/numorstring"

	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/selector"
)

// is evaluates a selector; an empty one is all().
func is(text string, labels map[string]string) bool {
	s, err := selector.Parse(text)
	return err == nil && s.Matches(labels)
}

// inheritedBy returns the labels that something has from its namespace or service
// account, without their prefix.
func inheritedBy(prefix string, labels map[string]string) map[string]string {
	inherited := make(map[string]string)
	for k, v := range labels {
		if name, ok := strings.CutPrefix(k, prefix); ok {
			inherited[name] = v
		}
	}
	return inherited
}

// everyone replaces all() by a test for being in a namespace, or having a
// service account, at all.
func everyone(text, mark string, there bool, labels map[string]string) bool {
	if there {
		labels[mark] = ""
	}
	return is(strings.ReplaceAll(text, "all()", "has("+mark+")"), labels)
}

func isNamespace(text string, labels map[string]string) bool {
	_, in := labels[store.LabelNamespace]
	if strings.TrimSpace(text) == "global()" {
		return !in
	}
	return text == "" || everyone(text, "..any-namespace", in, inheritedBy("pcns.", labels))
}

func isServiceAccount(text string, labels map[string]string) bool {
	_, has := labels[store.LabelServiceAccount]
	return text == "" || everyone(text, "..any-account", has, inheritedBy("pcsa.", labels))
}

// labels returns what selectors see of an endpoint or a network set.
func (w *World) labels(o store.Object) map[string]string {
	all := make(map[string]string)
	var profiles []string
	implied := make(map[string]string)
	switch v := o.Value.(type) {
	case *store.WorkloadEndpoint:
		profiles = v.Spec.Profiles
		implied[store.LabelNamespace], implied[store.LabelOrchestrator] = o.Key.Namespace, v.Spec.Orchestrator
		if v.Spec.ServiceAccountName != "" {
			implied[store.LabelServiceAccount] = v.Spec.ServiceAccountName
		}
	case *v3.HostEndpoint:
		profiles = v.Spec.Profiles
	case *v3.NetworkSet:
		profiles = []string{"kns." + o.Key.Namespace}
		implied[store.LabelNamespace] = o.Key.Namespace
	}
	for _, name := range slices.Backward(profiles) { // the first of them wins
		for _, p := range w.Objects {
			if v, ok := p.Value.(*v3.Profile); ok && p.Key.Name == name {
				maps.Copy(all, v.Spec.LabelsToApply)
			}
		}
	}
	for k, value := range store.Meta(o.Value).Labels {
		if !strings.HasPrefix(k, "pcns.") && !strings.HasPrefix(k, "pcsa.") {
			all[k] = value
		}
	}
	maps.Copy(all, implied)
	return all
}

// party is an endpoint or a network set that an address belongs to.
type party struct {
	labels map[string]string
	ports  []v3.EndpointPort
}

// parties returns everything that an address belongs to.
func (w *World) parties(a netip.Addr) []party {
	var list []party
	for _, o := range w.Objects {
		var nets []string
		var ports []v3.EndpointPort
		switch v := o.Value.(type) {
		case *store.WorkloadEndpoint:
			nets = v.Spec.IPNetworks
			for _, p := range v.Spec.Ports {
				ports = append(ports, v3.EndpointPort{Name: p.Name, Protocol: p.Protocol, Port: p.Port})
			}
		case *v3.HostEndpoint:
			nets, ports = v.Spec.ExpectedIPs, v.Spec.Ports
		case *v3.NetworkSet:
			nets = v.Spec.Nets
		case *v3.GlobalNetworkSet:
			nets = v.Spec.Nets
		default:
			continue
		}
		if slices.ContainsFunc(nets, func(n string) bool { return prefixOf(n).Contains(a) }) {
			list = append(list, party{w.labels(o), ports})
		}
	}
	return list
}

// matches reports whether all parts of a rule match the packet.
func (q *question) matches(r *v3.Rule, namespace string) bool {
	version := 6
	if q.p.Dst.Is4() {
		version = 4
	}
	if r.IPVersion != nil && *r.IPVersion != version {
		return false
	}
	if r.Protocol != nil && number(*r.Protocol) != q.p.Protocol || r.NotProtocol != nil && number(*r.NotProtocol) == q.p.Protocol {
		return false
	}
	if f := r.ICMP; f != nil && f.Type != nil && !q.icmp(f) {
		return false
	}
	if f := r.NotICMP; f != nil && f.Type != nil && q.icmp(f) {
		return false
	}
	return q.side(&r.Source, namespace, q.p.Src, q.p.SrcPort, r.Protocol) && q.side(&r.Destination, namespace, q.p.Dst, q.p.DstPort, r.Protocol) &&
		q.behind(r.Source.Services, namespace, q.p.Src, false) && q.behind(r.Destination.Services, namespace, q.p.Dst, true)
}

// closed returns what a rule stands for where it is not known who the endpoints of a Service are that
// it names: one that allows for nothing, one that denies or passes on for a denial without the Service.
func (q *question) closed(r v3.Rule, namespace string) *v3.Rule {
	from, to := q.isUnknown(r.Source.Services, namespace), q.isUnknown(r.Destination.Services, namespace)
	if !from && !to {
		return &r
	}
	if r.Action == v3.Allow || r.Action == v3.Log {
		return nil
	}
	r.Action = v3.Deny
	if from {
		r.Source.Services = nil
	}
	if to {
		r.Destination.Services = nil
	}
	return &r
}

// slicesOf returns the EndpointSlices of a Service.
func (q *question) slicesOf(s *v3.ServiceMatch, namespace string) (list []*store.EndpointSlice) {
	if s.Namespace != "" {
		namespace = s.Namespace
	}
	for _, o := range q.w.Objects {
		if e, ok := o.Value.(*store.EndpointSlice); ok && o.Key.Namespace == namespace && e.Service == s.Name {
			list = append(list, e)
		}
	}
	return list
}

func (q *question) isUnknown(s *v3.ServiceMatch, namespace string) bool {
	if s == nil {
		return false
	}
	list := q.slicesOf(s, namespace)
	return q.w.NoSlices || q.w.Brought && len(list) == 0 ||
		slices.ContainsFunc(list, func(e *store.EndpointSlice) bool { return e.Endpoints == nil })
}

// behind reports whether an address is that of an endpoint of a Service, with the packet's destination
// port where ports count; s is nil: of any.
func (q *question) behind(s *v3.ServiceMatch, namespace string, a netip.Addr, ports bool) bool {
	if s == nil {
		return true
	}
	return slices.ContainsFunc(q.slicesOf(s, namespace), func(e *store.EndpointSlice) bool {
		return slices.Contains(e.Endpoints.Addrs, a) && (!ports || slices.ContainsFunc(e.Endpoints.Ports, func(p store.SlicePort) bool {
			return p.Port == q.p.DstPort && number(numorstring.ProtocolFromString(p.Protocol)) == q.p.Protocol
		}))
	})
}

func (q *question) icmp(f *v3.ICMPFields) bool {
	return *f.Type == int(q.p.ICMPType) && (f.Code == nil || *f.Code == int(q.p.ICMPCode))
}

func number(p numorstring.Protocol) uint8 {
	if n, err := p.NumValue(); err == nil {
		return n
	}
	return map[string]uint8{"icmp": 1, "tcp": 6, "udp": 17, "icmpv6": 58, "sctp": 132, "udplite": 136}[strings.ToLower(p.StrVal)]
}

// side reports whether one end of the packet is as a rule wants it.
func (q *question) side(e *v3.EntityRule, namespace string, a netip.Addr, port uint16, protocol *numorstring.Protocol) bool {
	if !inNets(e.Nets, a) {
		return false
	}
	for _, n := range e.NotNets {
		if prefixOf(n).Contains(a) {
			return false
		}
	}
	// Nets of one family make a rule of that family.
	if len(e.NotNets) > 0 && !slices.ContainsFunc(e.NotNets, func(n string) bool { return prefixOf(n).Addr().Is4() == a.Is4() }) {
		return false
	}
	all := q.w.parties(a)
	wanted := func(p party) bool { return fits(e, namespace, p.labels) }
	if asks(e, namespace) && !slices.ContainsFunc(all, wanted) {
		return false
	}
	if e.NotSelector != "" && slices.ContainsFunc(all, func(p party) bool { return is(e.NotSelector, p.labels) }) {
		return false
	}
	isPort := func(want numorstring.Port) bool {
		if want.PortName == "" {
			return want.MinPort <= port && port <= want.MaxPort
		}
		return slices.ContainsFunc(all, func(p party) bool {
			return wanted(p) && slices.ContainsFunc(p.ports, func(has v3.EndpointPort) bool {
				return has.Name == want.PortName && has.Port == port && number(has.Protocol) == q.p.Protocol && (q.p.Protocol == 6 || protocol != nil)
			})
		})
	}
	return (len(e.Ports) == 0 || slices.ContainsFunc(e.Ports, isPort)) && !slices.ContainsFunc(e.NotPorts, isPort)
}

func inNets(nets []string, a netip.Addr) bool {
	return len(nets) == 0 || slices.ContainsFunc(nets, func(n string) bool { return prefixOf(n).Contains(a) })
}

// asks reports whether a side of a rule is about endpoints and network sets
// only.
func asks(e *v3.EntityRule, namespace string) bool {
	sa := e.ServiceAccounts
	return e.Selector != "" || e.NamespaceSelector != "" || sa != nil && (len(sa.Names) > 0 || sa.Selector != "") ||
		namespace != "" && (e.NotSelector != "" || sa != nil)
}

// fits reports whether labels are those of an endpoint that a side of a rule is
// about.
func fits(e *v3.EntityRule, namespace string, labels map[string]string) bool {
	if !is(e.Selector, labels) {
		return false
	}
	if sa := e.ServiceAccounts; sa != nil {
		name, ok := labels[store.LabelServiceAccount]
		if len(sa.Names) > 0 && !(ok && slices.Contains(sa.Names, name)) || !isServiceAccount(sa.Selector, labels) {
			return false
		}
	}
	if e.NamespaceSelector != "" {
		return isNamespace(e.NamespaceSelector, labels)
	}
	scoped := e.Selector != "" || e.NotSelector != "" || e.ServiceAccounts != nil
	return namespace == "" || !scoped || labels[store.LabelNamespace] == namespace
}
