package policy

import (
	"cmp"
	"crypto/sha256"
	"encoding/base32"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	"github.com/projectcalico/api/pkg/lib/numorstring"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/filter"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/selector"
)

// setDef is a set that a rule needs.
type setDef struct {
	filter.Set
	sel     *selector.Selector // nil: of a Service, or of nobody
	nodes   bool               // sel is of Nodes, and not of endpoints and network sets
	service serviceName        // of whose endpoints it is; empty: of none
	names   []string           // of ports, sorted

	protocol uint8 // of those ports
}

// setID makes a set's name from what it holds.
func setID(origin string) filter.SetID {
	sum := sha256.Sum256([]byte(origin))
	return filter.SetID("s-" + strings.ToLower(base32.HexEncoding.WithPadding(base32.NoPadding).EncodeToString(sum[:12])))
}

func netsDef(sel *selector.Selector) setDef {
	origin := sel.String()
	return setDef{Set: filter.Set{ID: setID("nets " + origin), Type: filter.Nets, Origin: origin}, sel: sel}
}

// nodesDef is the set of the addresses of Nodes.
func nodesDef(sel *selector.Selector) setDef {
	origin := "nodes " + sel.String()
	return setDef{Set: filter.Set{ID: setID(origin), Type: filter.Nets, Origin: origin}, sel: sel, nodes: true}
}

func portsDef(sel *selector.Selector, names []string, protocol uint8) setDef {
	origin := fmt.Sprintf("ports %q of protocol %d of %s", names, protocol, sel)
	return setDef{Set: filter.Set{ID: setID(origin), Type: filter.Ports, Origin: origin}, sel: sel, names: names, protocol: protocol}
}

// namedPortProtocol is the protocol of ports that a rule names: as in Felix, TCP
// unless the rule is about another protocol with ports.
func namedPortProtocol(p *numorstring.Protocol) uint8 {
	if p != nil && p.SupportsPorts() {
		if n, err := protocolOf(p); err == nil {
			return n
		}
	}
	return protoTCP
}

// serviceDef is the set of the endpoints of a Service: their ports, or their addresses alone.
func serviceDef(n serviceName, ports bool) setDef {
	origin, of := fmt.Sprintf("endpoints of service %s", n), filter.Nets
	if ports {
		origin, of = fmt.Sprintf("ports of service %s", n), filter.Ports
	}
	return setDef{Set: filter.Set{ID: setID(origin), Type: of, Origin: origin}, service: n}
}

// nobodyDef is the set, without members, of a Service whose endpoints are not known.
func nobodyDef(n serviceName) setDef {
	origin := fmt.Sprintf("service %s, whose endpoints are not known", n)
	return setDef{Set: filter.Set{ID: setID(origin), Type: filter.Nets, Origin: origin}}
}

// compiler translates the rules of one policy.
type compiler struct {
	namespace string // of a NetworkPolicy; "": the rules are about all namespaces
	defs      map[filter.SetID]setDef
	unknown   func(serviceName) string // why the endpoints of a Service are not known; "": they are

	services []serviceName // that rules name
	closed   []string      // what is said of those whose endpoints are not known
}

// compiled is what a policy's rules mean.
type compiled struct {
	rules    filter.Policy
	defs     map[filter.SetID]setDef // the sets that they need
	services []serviceName           // that they name
	closed   string                  // which of them match otherwise than they say, for want of what is known of a Service
}

// compileRules translates a policy's rules. The error names the field.
func compileRules(p *policySpec, unknown func(serviceName) string) (compiled, error) {
	c := &compiler{namespace: p.id.Namespace, defs: make(map[filter.SetID]setDef), unknown: unknown}
	out := filter.Policy{ID: p.id}
	var err error
	if out.Ingress, err = c.rules("spec.ingress", p.ingress, p.in); err != nil {
		return compiled{}, err
	}
	if out.Egress, err = c.rules("spec.egress", p.egress, p.out); err != nil {
		return compiled{}, err
	}
	return compiled{out, c.defs, c.services, strings.Join(c.closed, "; ")}, nil
}

func (c *compiler) rules(field string, rules []v3.Rule, used bool) ([]filter.Rule, error) {
	if !used {
		return nil, nil
	}
	var list []filter.Rule
	for i := range rules {
		at := fmt.Sprintf("%s[%d].", field, i)
		r, err := c.rule(at, &rules[i])
		if err != nil {
			return nil, fmt.Errorf("%s%w", at, err)
		}
		list = append(list, r)
	}
	return list, nil
}

// rule translates the rule of a field, which ends in a dot.
func (c *compiler) rule(field string, r *v3.Rule) (filter.Rule, error) {
	var out filter.Rule
	r, nodes, err := ofNodes(r)
	if err != nil {
		return out, err
	}
	if out.Action, err = actionOf(r.Action); err != nil {
		return out, fmt.Errorf("action: %w", err)
	}
	if v := r.IPVersion; v != nil {
		if *v != 4 && *v != 6 {
			return out, fmt.Errorf("ipVersion: %d is not 4 or 6", *v)
		}
		out.Family = dataplane.Family(*v) //nolint:gosec // 4 or 6
	}
	if out.Protocol, err = protocolOf(r.Protocol); err != nil {
		return out, fmt.Errorf("protocol: %w", err)
	}
	if out.NotProtocol, err = protocolOf(r.NotProtocol); err != nil {
		return out, fmt.Errorf("notProtocol: %w", err)
	}
	if out.ICMP, err = icmpOf(r.ICMP, out.Protocol); err != nil {
		return out, fmt.Errorf("icmp%w", err)
	}
	if out.NotICMP, err = icmpOf(r.NotICMP, out.Protocol); err != nil {
		return out, fmt.Errorf("notICMP%w", err)
	}
	if out.Source, err = c.side(&r.Source, r.Protocol); err != nil {
		return out, fmt.Errorf("source.%w", err)
	}
	if out.Destination, err = c.side(&r.Destination, r.Protocol); err != nil {
		return out, fmt.Errorf("destination.%w", err)
	}
	if nodes != nil {
		out.Destination.Set = c.need(nodesDef(nodes))
	}
	for _, of := range []struct {
		name  string
		match *v3.ServiceMatch
		side  *filter.Side
		ports bool // they are matched too, as in Felix
	}{{"source.services", r.Source.Services, &out.Source, false}, {"destination.services", r.Destination.Services, &out.Destination, true}} {
		if of.match == nil {
			continue
		}
		if err := c.service(field+of.name, of.match, &out, of.side, of.ports); err != nil {
			return out, fmt.Errorf("%s%w", of.name, err)
		}
	}
	if out.Family == 0 {
		out.Family = familyOf(&out)
	}
	return out, nil
}

// service has a side of a rule match the endpoints of a Service. Where they are not known the rule is
// closed, as one with an unknown peer is: an Allow matches nobody, and a Deny whatever it would match
// without the Service. So does a Pass, which denies then: what it passes on a later rule may allow,
// and what it does not another one of its tier.
func (c *compiler) service(field string, of *v3.ServiceMatch, r *filter.Rule, s *filter.Side, ports bool) error {
	n := serviceName{cmp.Or(of.Namespace, c.namespace), of.Name}
	switch {
	case n.name == "":
		return errors.New(".name: missing")
	case n.namespace == "":
		return errors.New(".namespace: missing, and the rule is of no namespace of its own")
	case s.Set != "":
		return errors.New(": cannot be matched together with selectors")
	}
	if !slices.Contains(c.services, n) {
		c.services = append(c.services, n)
	}
	why := c.unknown(n)
	if why == "" {
		s.Set = c.need(serviceDef(n, ports))
		return nil
	}
	does := "the rule matches nobody"
	switch r.Action {
	case filter.Allow, filter.Log:
		s.Set = c.need(nobodyDef(n))
	case filter.Deny, filter.Pass:
		r.Action, does = filter.Deny, "it denies whatever else the rule matches"
	}
	c.closed = append(c.closed, fmt.Sprintf("%s: the endpoints of Service %s are not known: %s; until they are, %s", field, n, why, does))
	return nil
}

// ofNodes returns what a rule says besides that its destination are Nodes, and which; nil: it is not
// about Nodes.
func ofNodes(r *v3.Rule) (*v3.Rule, *selector.Selector, error) {
	if r.Metadata == nil || r.Metadata.Annotations[store.RuleNodes] == "" {
		return r, nil, nil
	}
	sel, err := selector.Parse(r.Metadata.Annotations[store.RuleNodes])
	if err != nil {
		return nil, nil, fmt.Errorf("metadata.annotations[%s]: %w", store.RuleNodes, err)
	}
	out := *r
	out.Action = v3.Action(cmp.Or(r.Metadata.Annotations[store.RuleAction], string(r.Action)))
	// In its place stands what those match who do not know Nodes.
	out.Destination.Selector = ""
	return &out, sel, nil
}

// familyOf returns the only family that a rule's nets are of. A rule with nets
// of both, which Calico's clients refuse, is about each with its own.
func familyOf(r *filter.Rule) dataplane.Family {
	var f dataplane.Family
	for _, p := range slices.Concat(r.Source.Nets, r.Source.NotNets, r.Destination.Nets, r.Destination.NotNets) {
		switch is := dataplane.FamilyOf(p.Addr()); f {
		case 0:
			f = is
		case is:
		default:
			return 0
		}
	}
	return f
}

func actionOf(a v3.Action) (filter.Action, error) {
	switch a {
	case v3.Allow:
		return filter.Allow, nil
	case v3.Deny:
		return filter.Deny, nil
	case v3.Pass:
		return filter.Pass, nil
	case v3.Log:
		return filter.Log, nil
	}
	return 0, fmt.Errorf("%q is none of Allow, Deny, Log, Pass", a)
}

// protocolOf returns a protocol's number (IANA, Assigned Internet Protocol
// Numbers), and 0 for none.
func protocolOf(p *numorstring.Protocol) (uint8, error) {
	if p == nil {
		return 0, nil
	}
	if n, err := p.NumValue(); err == nil {
		if n == 0 {
			return 0, fmt.Errorf("0 is no protocol that a rule can match")
		}
		return n, nil
	}
	for _, known := range []struct {
		name   string
		number uint8
	}{
		{numorstring.ProtocolICMP, 1},
		{numorstring.ProtocolTCP, 6},
		{numorstring.ProtocolUDP, 17},
		{numorstring.ProtocolICMPv6, 58},
		{numorstring.ProtocolSCTP, 132},
		{numorstring.ProtocolUDPLite, 136},
	} {
		if strings.EqualFold(known.name, p.String()) {
			return known.number, nil
		}
	}
	return 0, fmt.Errorf("%q is not known", p.String())
}

func icmpOf(f *v3.ICMPFields, protocol uint8) (filter.ICMP, error) {
	if f == nil || f.Type == nil && f.Code == nil {
		return filter.ICMP{}, nil
	}
	switch {
	case f.Type == nil:
		return filter.ICMP{}, fmt.Errorf(".type: missing beside code")
	case protocol != 1 && protocol != 58:
		return filter.ICMP{}, fmt.Errorf(": needs protocol ICMP or ICMPv6")
	case *f.Type < 0 || *f.Type > 255:
		return filter.ICMP{}, fmt.Errorf(".type: %d is out of range", *f.Type)
	case f.Code != nil && (*f.Code < 0 || *f.Code > 255):
		return filter.ICMP{}, fmt.Errorf(".code: %d is out of range", *f.Code)
	}
	m := filter.ICMP{Set: true, Type: uint8(*f.Type)} //nolint:gosec // checked above
	if f.Code != nil {
		m.CodeSet, m.Code = true, uint8(*f.Code) //nolint:gosec // checked above
	}
	return m, nil
}

func (c *compiler) side(e *v3.EntityRule, protocol *numorstring.Protocol) (filter.Side, error) {
	var s filter.Side
	var err error
	if s.Nets, err = netsOf(e.Nets); err != nil {
		return s, fmt.Errorf("nets%w", err)
	}
	if s.NotNets, err = netsOf(e.NotNets); err != nil {
		return s, fmt.Errorf("notNets%w", err)
	}
	within, err := positive(e, c.namespace)
	if err != nil {
		return s, err
	}
	if within != nil {
		s.Set = c.need(netsDef(within))
	}
	if e.NotSelector != "" {
		sel, err := selector.Parse(e.NotSelector)
		if err != nil {
			return s, fmt.Errorf("notSelector: %w", err)
		}
		s.NotSet = c.need(netsDef(sel))
	}
	if within == nil {
		within = selector.All()
	}
	if s.Ports, s.PortSet, err = c.ports(e.Ports, protocol, within); err != nil {
		return s, fmt.Errorf("ports%w", err)
	}
	if s.NotPorts, s.NotPortSet, err = c.ports(e.NotPorts, protocol, within); err != nil {
		return s, fmt.Errorf("notPorts%w", err)
	}
	return s, nil
}

func (c *compiler) need(d setDef) filter.SetID {
	c.defs[d.ID] = d
	return d.ID
}

// ports splits a list into numbers and a set of what the names stand for with
// the endpoints that the side is about.
func (c *compiler) ports(ports []numorstring.Port, protocol *numorstring.Protocol, within *selector.Selector) ([]filter.PortRange, filter.SetID, error) {
	var ranges []filter.PortRange
	var names []string
	for i, p := range ports {
		switch {
		case p.PortName != "":
			names = append(names, p.PortName)
		case p.MinPort > p.MaxPort:
			return nil, "", fmt.Errorf("[%d]: %s is no range", i, p)
		case protocol == nil || !protocol.SupportsPorts():
			return nil, "", fmt.Errorf("[%d]: %s needs a protocol with ports", i, p)
		default:
			ranges = append(ranges, filter.PortRange{Low: p.MinPort, High: p.MaxPort})
		}
	}
	if names == nil {
		return ranges, "", nil
	}
	slices.Sort(names)
	return ranges, c.need(portsDef(within, slices.Compact(names), namedPortProtocol(protocol))), nil
}

func netsOf(list []string) ([]netip.Prefix, error) {
	var nets []netip.Prefix
	for i, s := range list {
		p, ok := parseNet(s)
		if !ok {
			return nil, fmt.Errorf("[%d]: %q is no CIDR and no address", i, s)
		}
		nets = append(nets, p)
	}
	return nets, nil
}

// parseNet reads a CIDR or an address. IPv4-mapped addresses are IPv4.
func parseNet(s string) (netip.Prefix, bool) {
	if a, ok := parseAddr(s); ok {
		return netip.PrefixFrom(a, a.BitLen()), true
	}
	p, err := netip.ParsePrefix(s)
	if err != nil {
		return netip.Prefix{}, false
	}
	if p.Addr().Is4In6() {
		const mapped = 96 // bits in front of the IPv4 address (RFC 4291, section 2.5.5.2)
		if p.Bits() < mapped {
			return netip.Prefix{}, false
		}
		p = netip.PrefixFrom(p.Addr().Unmap(), p.Bits()-mapped)
	}
	return p.Masked(), true
}

func parseAddr(s string) (netip.Addr, bool) {
	a, err := netip.ParseAddr(s)
	if err != nil || a.Zone() != "" {
		return netip.Addr{}, false
	}
	return a.Unmap(), true
}

// positive returns the selector of who is on one side of a rule, or nil when
// the rule is about anybody. Selectors in a policy of a namespace look at that
// namespace only, unless a namespaceSelector says otherwise.
func positive(e *v3.EntityRule, namespace string) (*selector.Selector, error) {
	if e.Selector == "" && e.NotSelector == "" && e.NamespaceSelector == "" && e.ServiceAccounts == nil {
		return nil, nil
	}
	var parts []*selector.Selector
	switch {
	case e.NamespaceSelector != "":
		sel, err := selector.Parse(e.NamespaceSelector)
		if err != nil {
			return nil, fmt.Errorf("namespaceSelector: %w", err)
		}
		parts = append(parts, ofNamespaces(sel))
	case namespace != "":
		parts = append(parts, selector.Equal(store.LabelNamespace, namespace))
	}
	if e.Selector != "" {
		sel, err := selector.Parse(e.Selector)
		if err != nil {
			return nil, fmt.Errorf("selector: %w", err)
		}
		parts = append(parts, sel)
	}
	if sa := e.ServiceAccounts; sa != nil {
		if len(sa.Names) > 0 {
			parts = append(parts, selector.In(store.LabelServiceAccount, sa.Names))
		}
		if sa.Selector != "" {
			sel, err := ofServiceAccounts(sa.Selector)
			if err != nil {
				return nil, fmt.Errorf("serviceAccounts.selector: %w", err)
			}
			parts = append(parts, sel)
		}
	}
	if len(parts) == 0 {
		return nil, nil
	}
	return selector.And(parts...), nil
}

// ofNamespaces turns a selector over the labels of namespaces into one over
// endpoints. global() stands for what is in no namespace.
func ofNamespaces(sel *selector.Selector) *selector.Selector {
	if sel.String() == "global()" {
		return selector.Not(selector.Has(store.LabelNamespace))
	}
	return sel.Prefixed(store.LabelPrefixNamespace, store.LabelNamespace)
}

func ofServiceAccounts(s string) (*selector.Selector, error) {
	sel, err := selector.Parse(s)
	if err != nil {
		return nil, err
	}
	return sel.Prefixed(store.LabelPrefixServiceAccount, store.LabelServiceAccount), nil
}
