// Package reference says what Calico's policies do to a packet by looking at
// the raw resources, one after the other, as their documentation reads. It is
// slow, keeps nothing between two questions and shares no code with the
// calculator in control/policy, so that each can be held against the other.
//
// It takes resources as [store.Validate] accepts them.
package reference

import (
	"cmp"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/dataplane/filter"
	"github.com/routerd/routerd/store"
)

// World is what is in the store, and which host of it is asked about.
type World struct {
	Node       string
	Objects    []store.Object
	Interfaces map[string][]netip.Addr // addresses of the host's own interfaces
	HostPorts  []filter.Tunnel         // what hosts of the cluster send each other besides tunnels' packets

	NoSlices bool // nothing is told of EndpointSlices
	Brought  bool // of a Service without one it is not known who its endpoints are
}

// Judge says what becomes of the first packet of a flow, with the steps that
// [filter.Ruleset.Judge] describes.
func (w *World) Judge(f filter.Flow) filter.Verdict {
	q := &question{w: w, p: f.Packet, felix: w.felix()}
	q.ask(f)
	if len(q.steps) == 0 {
		q.add(filter.Step{Hook: filter.Normal, Rule: filter.NoRule, Action: filter.Allow, Reason: filter.ByNobody})
	}
	return filter.Verdict{Allowed: q.steps[len(q.steps)-1].Action != filter.Deny, Steps: q.steps}
}

// question is one packet on its way.
type question struct {
	w     *World
	p     filter.Packet
	felix felix
	steps []filter.Step
}

func (q *question) add(s filter.Step) filter.Action {
	q.steps = append(q.steps, s)
	return s.Action
}

func (q *question) ask(f filter.Flow) {
	out := q.w.endpoint(f.Out, q.felix)
	if f.In == "" && out.workload {
		return // a host reaches its own workloads
	}
	if f.In != "" && f.Out == "" && q.outside() {
		q.add(filter.Step{Interface: f.In, Hook: filter.Normal, Direction: filter.Ingress, Rule: filter.NoRule, Action: filter.Deny, Reason: filter.ByOutside})
		return
	}
	if f.In != "" && !q.arrives(f) {
		return
	}
	switch {
	case f.Out == "" || !out.exists && !out.workload:
	case !out.exists:
		q.add(filter.Step{Interface: f.Out, Hook: filter.Normal, Rule: filter.NoRule, Action: filter.Deny, Reason: filter.ByNoEndpoint})
	case out.workload:
		q.path(out, filter.Normal, filter.Ingress)
	case f.In != "":
		q.path(out, filter.Forward, filter.Egress)
	default:
		if q.open(filter.Untracked, filter.Egress) != "" || q.path(out, filter.Untracked, filter.Egress) == filter.Pass {
			q.local(out, filter.Egress)
		}
	}
}

// arrives judges where the packet comes from, and reports whether it goes on
// to where it leaves.
func (q *question) arrives(f filter.Flow) bool {
	in := q.w.endpoint(f.In, q.felix)
	s := filter.Step{Interface: f.In, Hook: filter.Normal, Direction: filter.Egress, Rule: filter.NoRule, Action: filter.Deny}
	switch {
	case in.workload && !in.exists:
		s.Reason = filter.ByNoEndpoint
		q.add(s)
		return false
	case in.workload:
		if !holds(in.sources(q.felix), q.p.Src) {
			s.Reason = filter.BySpoofing
			q.add(s)
			return false
		}
		if q.ipInIP() && !q.felix.ipip || q.vxlan() && !q.felix.vxlan {
			s.Reason = filter.ByTunnel
			q.add(s)
			return false
		}
		if q.path(in, filter.Normal, filter.Egress) == filter.Deny {
			return false
		}
		if f.Out == "" {
			s.Reason = filter.ByToHost
			if q.felix.toHost != "drop" {
				s.Action = filter.Allow
			}
			q.add(s)
		}
		return f.Out != ""
	case !in.exists:
		return true
	}
	for _, h := range []filter.Hook{filter.Untracked, filter.PreDNAT} {
		if q.open(h, filter.Ingress) != "" {
			continue
		}
		switch q.path(in, h, filter.Ingress) {
		case filter.Deny:
			return false
		case filter.Allow:
			return true
		case filter.Pass, filter.Log:
		}
	}
	if f.Out == "" {
		q.local(in, filter.Ingress)
		return false
	}
	return q.path(in, filter.Forward, filter.Ingress) != filter.Deny
}

// local judges the host's own traffic.
func (q *question) local(e endpoint, d filter.Direction) {
	if why := q.open(filter.Normal, d); why != "" {
		q.add(filter.Step{Interface: e.iface, Hook: filter.Normal, Direction: d, Rule: filter.NoRule, Action: filter.Allow, Reason: why})
		return
	}
	q.path(e, filter.Normal, d)
}

// open says why the packet passes whatever policies say; "": it does not.
func (q *question) open(h filter.Hook, d filter.Direction) filter.Reason {
	switch {
	case q.failsafe(h, d):
		return filter.ByFailsafe
	case q.betweenHosts(h, d):
		return filter.ByHosts
	}
	return ""
}

// betweenHosts reports whether the packet is of what a host of the cluster and
// this one send each other: IP in IP, VXLAN, and the ports of their daemons.
func (q *question) betweenHosts(h filter.Hook, d filter.Direction) bool {
	far := q.p.Src
	if d == filter.Egress {
		far = q.p.Dst
	}
	if !q.host(far) {
		return false
	}
	if q.ipInIP() || q.vxlan() {
		return true
	}
	list := slices.Clone(q.w.HostPorts)
	for _, port := range q.vxlanPorts() {
		list = append(list, filter.Tunnel{Protocol: 17, Port: port})
	}
	for _, t := range list {
		if t.Protocol == q.p.Protocol && (t.Port == 0 || t.Port == q.p.DstPort || h == filter.Untracked && t.Port == q.p.SrcPort) {
			return true
		}
	}
	return false
}

// host reports whether a host of the cluster has an address.
func (q *question) host(addr netip.Addr) bool {
	for _, o := range q.w.Objects {
		if n, ok := o.Value.(*store.Node); ok && n.Spec.BGP != nil {
			for _, a := range []string{n.Spec.BGP.IPv4Address, n.Spec.BGP.IPv6Address} {
				if address, _, _ := strings.Cut(a, "/"); address == addr.String() {
					return true
				}
			}
		}
	}
	return false
}

// outside reports whether the packet is one of a tunnel's that this host decapsulates,
// and no host sent it.
func (q *question) outside() bool {
	if q.host(q.p.Src) {
		return false
	}
	forms := q.published()
	for _, o := range q.w.Objects {
		p, ok := o.Value.(*v3.IPPool)
		if !ok {
			continue
		}
		if p.Spec.VXLANMode == v3.VXLANModeAlways || p.Spec.VXLANMode == v3.VXLANModeCrossSubnet {
			forms = append(forms, fmt.Sprintf("vxlan/1/%d", q.felix.vxlanPort))
		}
		if p.Spec.IPIPMode == v3.IPIPModeAlways || p.Spec.IPIPMode == v3.IPIPModeCrossSubnet {
			forms = append(forms, "ipip")
			if strings.Contains(p.Spec.CIDR, ":") {
				forms = append(forms, "ip6tnl")
			}
		}
	}
	for _, form := range forms {
		var vni, port uint16
		_, err := fmt.Sscanf(strings.Replace(form, "vxlan6", "vxlan", 1), "vxlan/%d/%d", &vni, &port)
		switch {
		case err == nil && q.p.Protocol == 17 && q.p.DstPort == port && (port >= 1024 || port == q.felix.vxlanPort),
			(form == "ipip" || form == "ip6tnl") && q.p.Protocol == 4,
			form == "ip6tnl" && q.p.Protocol == 41 && q.p.Src.Is6():
			return true
		}
	}
	return false
}

// published lists the encapsulations that this host publishes.
func (q *question) published() (list []string) {
	for _, o := range q.w.Objects {
		n, ok := o.Value.(*store.Node)
		if !ok || o.Key.Name != q.w.Node {
			continue
		}
		for _, name := range []string{store.AnnotationAccepts, store.AnnotationUses} {
			list = append(list, strings.Split(n.Annotations[name], ",")...)
		}
	}
	return list
}

// ipInIP reports whether the packet has another of IPv4 or IPv6 inside.
func (q *question) ipInIP() bool { return q.p.Protocol == 4 || q.p.Protocol == 41 }

// vxlan reports whether a node takes the packet for one of VXLAN.
func (q *question) vxlan() bool {
	return q.p.Protocol == 17 && slices.Contains(q.vxlanPorts(), q.p.DstPort)
}

// vxlanPorts lists the configured port and those that this host says it uses.
func (q *question) vxlanPorts() []uint16 {
	ports := []uint16{q.felix.vxlanPort}
	for _, form := range q.published() {
		var vni, port uint16
		if _, err := fmt.Sscanf(strings.Replace(form, "vxlan6", "vxlan", 1), "vxlan/%d/%d", &vni, &port); err == nil && port >= 1024 {
			ports = append(ports, port)
		}
	}
	return ports
}

// failsafe reports whether a failsafe port lets the packet by. Without
// connection tracking answers need it too.
func (q *question) failsafe(h filter.Hook, d filter.Direction) bool {
	far := q.p.Src
	towards, back := q.felix.failsafeIn, q.felix.failsafeOut
	if d == filter.Egress {
		far, towards, back = q.p.Dst, back, towards
	}
	for _, f := range towards {
		if f.Protocol == q.p.Protocol && f.Port == q.p.DstPort && (!f.Net.IsValid() || f.Net.Contains(far)) {
			return true
		}
	}
	for _, f := range back {
		if h == filter.Untracked && f.Protocol == q.p.Protocol && f.Port == q.p.SrcPort && (!f.Net.IsValid() || f.Net.Contains(far)) {
			return true
		}
	}
	return false
}

// path walks the tiers, then the profiles.
func (q *question) path(e endpoint, h filter.Hook, d filter.Direction) filter.Action {
	policies := q.w.policiesFor(e, h, d)
	at := filter.Step{Interface: e.iface, Hook: h, Direction: d}
	for len(policies) > 0 {
		tier := policies[0].tier
		n := 0
		for n < len(policies) && policies[n].tier == tier {
			n++
		}
		at.Tier = tier
		decided := false
		for _, p := range policies[:n] {
			a, ok := q.rules(p.id, p.rules(d), p.id.Namespace, at)
			if ok && a != filter.Pass {
				return a
			}
			if ok {
				decided = true
				break
			}
		}
		policies = policies[n:]
		if decided {
			continue
		}
		end := filter.Pass
		if h == filter.Normal || h == filter.Forward {
			end = q.w.tierEnd(tier)
		}
		s := at
		s.Rule, s.Action, s.Reason = filter.NoRule, end, filter.ByTierEnd
		if q.add(s) == filter.Deny {
			return filter.Deny
		}
	}
	at.Tier = ""
	switch h {
	case filter.Untracked, filter.PreDNAT:
		return filter.Pass
	case filter.Forward:
		at.Rule, at.Action, at.Reason = filter.NoRule, filter.Allow, filter.ByPathEnd
		return q.add(at)
	case filter.Normal:
	}
	for _, name := range e.profiles {
		if a, ok := q.rules(filter.PolicyID{Kind: "Profile", Name: name}, q.w.profileRules(name, d), "", at); ok && a != filter.Pass {
			return a
		}
	}
	at.Rule, at.Action, at.Reason = filter.NoRule, filter.Deny, filter.ByPathEnd
	return q.add(at)
}

// rules returns what the first rule decides that matches and does more than
// log.
func (q *question) rules(id filter.PolicyID, rules []v3.Rule, namespace string, at filter.Step) (filter.Action, bool) {
	for i := range rules {
		rule := q.closed(rules[i], namespace)
		if rule == nil || !q.matches(rule, namespace) {
			continue
		}
		at.Policy, at.Rule, at.Reason = id, i, filter.ByRule
		at.Action = map[v3.Action]filter.Action{v3.Allow: filter.Allow, v3.Deny: filter.Deny, v3.Pass: filter.Pass, v3.Log: filter.Log}[rule.Action]
		if q.add(at) != filter.Log {
			return at.Action, true
		}
	}
	return 0, false
}

// policy is what is the same in all enforced policies.
type policy struct {
	id              filter.PolicyID
	tier            string
	order           float64
	types           []v3.PolicyType
	ingress, egress []v3.Rule
	hook            filter.Hook
	forward         bool
}

func (p policy) rules(d filter.Direction) []v3.Rule {
	if d == filter.Ingress {
		return p.ingress
	}
	return p.egress
}

// policiesFor returns the enforced policies that an endpoint meets at a hook in
// a direction, in their order.
func (w *World) policiesFor(e endpoint, h filter.Hook, d filter.Direction) []policy {
	var list []policy
	for _, o := range w.Objects {
		var p policy
		switch v := o.Value.(type) {
		case *v3.NetworkPolicy:
			s := v.Spec
			if e.labels[store.LabelNamespace] != o.Key.Namespace || !is(s.Selector, e.labels) || !isServiceAccount(s.ServiceAccountSelector, e.labels) {
				continue
			}
			p = policy{tier: s.Tier, order: orderOf(s.Order), types: s.Types, ingress: s.Ingress, egress: s.Egress, hook: filter.Normal}
		case *v3.GlobalNetworkPolicy:
			s := v.Spec
			if !is(s.Selector, e.labels) || !isServiceAccount(s.ServiceAccountSelector, e.labels) || !isNamespace(s.NamespaceSelector, e.labels) {
				continue
			}
			p = policy{tier: s.Tier, order: orderOf(s.Order), types: s.Types, ingress: s.Ingress, egress: s.Egress, hook: filter.Normal, forward: s.ApplyOnForward}
			if s.DoNotTrack {
				p.hook = filter.Untracked
			}
			if s.PreDNAT {
				p.hook = filter.PreDNAT
			}
		default:
			continue
		}
		p.id = filter.PolicyID{Kind: string(o.Key.Kind), Namespace: o.Key.Namespace, Name: o.Key.Name}
		if p.tier == "" {
			p.tier = "default"
		}
		if len(p.types) == 0 {
			p.types = []v3.PolicyType{"Ingress", "Egress"}
			if len(p.egress) == 0 {
				p.types = p.types[:1]
			} else if len(p.ingress) == 0 {
				p.types = p.types[1:]
			}
		}
		wanted := p.hook == h || p.hook == filter.Normal && h == filter.Forward && p.forward
		if wanted && slices.Contains(p.types, v3.PolicyType(map[filter.Direction]string{filter.Ingress: "Ingress", filter.Egress: "Egress"}[d])) {
			list = append(list, p)
		}
	}
	slices.SortFunc(list, func(a, b policy) int {
		return cmp.Or(
			cmp.Compare(w.tierOrder(a.tier), w.tierOrder(b.tier)), cmp.Compare(a.tier, b.tier),
			cmp.Compare(a.order, b.order), cmp.Compare(a.id.Name, b.id.Name), cmp.Compare(a.id.Namespace, b.id.Namespace), cmp.Compare(a.id.Kind, b.id.Kind),
		)
	})
	return list
}

func orderOf(o *float64) float64 {
	if o == nil {
		return math.Inf(1)
	}
	return *o
}

func (w *World) tier(name string) *v3.Tier {
	for _, o := range w.Objects {
		if t, ok := o.Value.(*v3.Tier); ok && o.Key.Name == name {
			return t
		}
	}
	return nil
}

func (w *World) tierOrder(name string) float64 {
	if t := w.tier(name); t != nil {
		return orderOf(t.Spec.Order)
	}
	switch name {
	case "kube-admin":
		return 1e3
	case "default":
		return 1e6
	case "kube-baseline":
		return 1e7
	}
	return math.Inf(1)
}

func (w *World) tierEnd(name string) filter.Action {
	t := w.tier(name)
	if t == nil && (name == "kube-admin" || name == "kube-baseline") || t != nil && t.Spec.DefaultAction != nil && *t.Spec.DefaultAction == v3.Pass {
		return filter.Pass
	}
	return filter.Deny
}

// profileRules returns one rule that denies everything for a profile that does
// not exist.
func (w *World) profileRules(name string, d filter.Direction) []v3.Rule {
	if name == "projectcalico-default-allow" {
		return []v3.Rule{{Action: v3.Allow}}
	}
	for _, o := range w.Objects {
		if p, ok := o.Value.(*v3.Profile); ok && o.Key.Name == name {
			if d == filter.Ingress {
				return p.Spec.Ingress
			}
			return p.Spec.Egress
		}
	}
	return []v3.Rule{{Action: v3.Deny}}
}

// felix is the little of FelixConfiguration that verdicts depend on.
type felix struct {
	toHost                  string // in lower case
	prefixes                []string
	spoofing                bool
	ipip, vxlan             bool // workloads may send such packets
	vxlanPort               uint16
	failsafeIn, failsafeOut []filter.Failsafe
}

func (w *World) felix() felix {
	ports := func(protocol uint8, list ...uint16) (all []filter.Failsafe) {
		for _, p := range list {
			all = append(all, filter.Failsafe{Protocol: protocol, Port: p})
		}
		return all
	}
	common := ports(6, 179, 2379, 2380, 5473, 6443, 6666, 6667)
	f := felix{
		toHost: "drop", prefixes: []string{"cali"}, vxlanPort: 4789,
		failsafeIn:  slices.Concat(common, ports(6, 22), ports(17, 68)),
		failsafeOut: slices.Concat(common, ports(17, 53, 67)),
	}
	for _, name := range []string{"default", "node." + w.Node} {
		for _, o := range w.Objects {
			c, ok := o.Value.(*v3.FelixConfiguration)
			if !ok || o.Key.Name != name {
				continue
			}
			s := c.Spec
			if s.DefaultEndpointToHostAction != "" {
				f.toHost = strings.ToLower(s.DefaultEndpointToHostAction)
			}
			if s.InterfacePrefix != "" {
				f.prefixes = strings.Split(s.InterfacePrefix, ",")
			}
			if s.WorkloadSourceSpoofing != "" {
				f.spoofing = strings.EqualFold(s.WorkloadSourceSpoofing, "any")
			}
			if s.VXLANPort != nil {
				f.vxlanPort = uint16(*s.VXLANPort)
			}
			if s.AllowIPIPPacketsFromWorkloads != nil {
				f.ipip = *s.AllowIPIPPacketsFromWorkloads
			}
			if s.AllowVXLANPacketsFromWorkloads != nil {
				f.vxlan = *s.AllowVXLANPacketsFromWorkloads
			}
			if s.FailsafeInboundHostPorts != nil {
				f.failsafeIn = failsafes(*s.FailsafeInboundHostPorts)
			}
			if s.FailsafeOutboundHostPorts != nil {
				f.failsafeOut = failsafes(*s.FailsafeOutboundHostPorts)
			}
		}
	}
	return f
}

func failsafes(ports []v3.ProtoPort) (list []filter.Failsafe) {
	for _, p := range ports {
		f := filter.Failsafe{Port: p.Port, Protocol: map[string]uint8{"": 6, "tcp": 6, "udp": 17, "sctp": 132}[strings.ToLower(p.Protocol)]}
		if p.Net != "" {
			f.Net = prefixOf(p.Net)
		}
		list = append(list, f)
	}
	return list
}

// prefixOf reads a CIDR or an address. The resources were validated: what
// cannot be read is a programmer's error.
func prefixOf(s string) netip.Prefix {
	if !strings.Contains(s, "/") {
		a := netip.MustParseAddr(s)
		return netip.PrefixFrom(a, a.BitLen())
	}
	return netip.MustParsePrefix(s).Masked()
}

func holds(list []netip.Prefix, a netip.Addr) bool {
	for _, p := range list {
		if p.Contains(a) {
			return true
		}
	}
	return false
}

// endpoint is who judges at an interface.
type endpoint struct {
	exists, workload bool
	iface            string // "*" where that one stands in
	labels           map[string]string
	profiles         []string
	own, spoof       []netip.Prefix
}

func (e endpoint) sources(f felix) []netip.Prefix {
	if f.spoofing {
		return slices.Concat(e.own, e.spoof)
	}
	return e.own
}

// endpoint finds who judges at an interface.
func (w *World) endpoint(name string, f felix) endpoint {
	if name == "" {
		return endpoint{}
	}
	var workload *store.Object
	var host, wild *store.Object
	for i, o := range w.Objects {
		switch v := o.Value.(type) {
		case *store.WorkloadEndpoint:
			if v.Spec.Node != w.Node || v.Spec.InterfaceName != name || !w.workloads(name, f) {
				continue
			}
			if workload == nil || younger(v, workload.Value.(*store.WorkloadEndpoint)) {
				workload = &w.Objects[i]
			}
		case *v3.HostEndpoint:
			if v.Spec.Node != w.Node {
				continue
			}
			if v.Spec.InterfaceName == "*" && (wild == nil || o.Key.Name < wild.Key.Name) {
				wild = &w.Objects[i]
			}
			byAddress := v.Spec.InterfaceName == "" && slices.ContainsFunc(v.Spec.ExpectedIPs, func(s string) bool {
				return slices.Contains(w.Interfaces[name], netip.MustParseAddr(s))
			})
			if (v.Spec.InterfaceName == name || byAddress) && (host == nil || o.Key.Name < host.Key.Name) {
				host = &w.Objects[i]
			}
		}
	}
	if workload != nil {
		v := workload.Value.(*store.WorkloadEndpoint)
		e := endpoint{exists: true, workload: true, iface: name, labels: w.labels(*workload), profiles: v.Spec.Profiles}
		for _, n := range v.Spec.IPNetworks {
			e.own = append(e.own, prefixOf(n))
		}
		for _, n := range v.Spec.AllowSpoofedSourcePrefixes {
			e.spoof = append(e.spoof, prefixOf(n))
		}
		return e
	}
	if host != nil {
		return endpoint{exists: true, iface: name, labels: w.labels(*host), profiles: host.Value.(*v3.HostEndpoint).Spec.Profiles}
	}
	for _, p := range f.prefixes {
		if strings.HasPrefix(name, p) {
			return endpoint{workload: true}
		}
	}
	if wild != nil && name != "lo" {
		return endpoint{exists: true, iface: "*", labels: w.labels(*wild), profiles: wild.Value.(*v3.HostEndpoint).Spec.Profiles}
	}
	return endpoint{}
}

// workloads reports whether an interface can be a workload's: by its name, and
// because it has none of the host's addresses.
func (w *World) workloads(name string, f felix) bool {
	for _, o := range w.Objects {
		n, ok := o.Value.(*store.Node)
		if !ok || n.Name != w.Node || n.Spec.BGP == nil {
			continue
		}
		for _, a := range w.Interfaces[name] {
			if s := a.String(); strings.HasPrefix(n.Spec.BGP.IPv4Address, s) || strings.HasPrefix(n.Spec.BGP.IPv6Address, s) {
				return false
			}
		}
	}
	return slices.ContainsFunc(append([]string{"cali"}, f.prefixes...), func(p string) bool { return strings.HasPrefix(name, p) })
}

func younger(a, b *store.WorkloadEndpoint) bool {
	if !a.CreationTimestamp.Equal(&b.CreationTimestamp) {
		return b.CreationTimestamp.Before(&a.CreationTimestamp)
	}
	return fmt.Sprint(a.Namespace, "/", a.Name) < fmt.Sprint(b.Namespace, "/", b.Name)
}
