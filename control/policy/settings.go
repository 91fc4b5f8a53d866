package policy

import (
	"encoding/json"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strings"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/routerd/routerd/dataplane/filter"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/selector"
)

// settings are what FelixConfiguration, pools and nodes say about the host as
// a whole.
type settings struct {
	felix  map[string]felix  // by resource name
	labels map[string]string // of this host's node
	hosts  map[string][]netip.Prefix
	fed    map[feedKey][]filter.Member

	stale bool // felix or labels changed
	now   effective
	told  *filter.Settings
}

// feedKey names a source of members of one of the sets that are fed by hand.
type feedKey struct {
	set    filter.SetID
	source string
}

type felix struct {
	spec    *v3.FelixConfigurationSpec
	nodes   *selector.Selector // of an object for some nodes; nil in others
	created metav1.Time
}

// effective is what the FelixConfigurations together say.
type effective struct {
	filter.Settings
	spoofing, floating, exemptHosts bool
	external                        []netip.Prefix
}

func (s *settings) init() {
	s.felix = make(map[string]felix)
	s.hosts = make(map[string][]netip.Prefix)
	s.fed = make(map[feedKey][]filter.Member)
	s.stale = true
}

func (s *settings) putFelix(name string, o store.Object) {
	s.stale = true
	f, ok := o.Value.(*v3.FelixConfiguration)
	if !ok {
		delete(s.felix, name)
		return
	}
	entry := felix{spec: &f.Spec, created: f.CreationTimestamp}
	if name != store.DefaultName && !strings.HasPrefix(name, "node.") {
		// A field of newer Calicos, which the API module's type lacks.
		var raw struct {
			Spec struct {
				NodeSelector string `json:"nodeSelector"`
			} `json:"spec"`
		}
		if err := json.Unmarshal(o.Raw, &raw); err == nil && raw.Spec.NodeSelector != "" {
			if sel, err := selector.Parse(raw.Spec.NodeSelector); err == nil {
				entry.nodes = sel
			}
		}
	}
	s.felix[name] = entry
}

func (s *settings) putNode(c *Calculator, name string, n *store.Node) {
	if n == nil {
		delete(s.hosts, name)
	} else {
		s.hosts[name] = nodeAddresses(n)
	}
	if name == c.cfg.Node && n != nil && !maps.Equal(s.labels, n.Labels) {
		s.labels, s.stale = n.Labels, true
	}
	s.feedNode(c, name)
}

// feedNode puts the addresses of a node into the sets that hold hosts.
func (s *settings) feedNode(c *Calculator, name string) {
	s.feed(c, filter.TunnelSources, "node "+name, s.hosts[name])
	var exempt []netip.Prefix
	if s.now.exemptHosts {
		exempt = s.hosts[name]
	}
	s.feed(c, filter.NATExempt, "node "+name, exempt)
}

func (s *settings) putPool(c *Calculator, name string, p *v3.IPPool) {
	var exempt, sources []netip.Prefix
	if p != nil {
		cidr, ok := parseNet(p.Spec.CIDR)
		balancer := len(p.Spec.AllowedUses) > 0 && !slices.ContainsFunc(p.Spec.AllowedUses, func(u v3.IPPoolAllowedUse) bool { return u != v3.IPPoolAllowedUseLoadBalancer })
		if ok && !balancer {
			exempt = []netip.Prefix{cidr}
		}
		if ok && p.Spec.NATOutgoing {
			sources = []netip.Prefix{cidr}
		}
	}
	s.feed(c, filter.NATExempt, "pool "+name, exempt)
	s.feed(c, filter.NATSources, "pool "+name, sources)
}

// feed replaces what one source gives to a set.
func (s *settings) feed(c *Calculator, id filter.SetID, source string, nets []netip.Prefix) {
	key := feedKey{id, source}
	set := c.members.sets[id]
	var now []filter.Member
	for _, p := range nets {
		m := filter.Member{Prefix: p}
		now = append(now, m)
		set.insert(m)
	}
	for _, m := range s.fed[key] {
		set.remove(m)
	}
	if len(now)+len(s.fed[key]) > 0 {
		c.members.changed[set] = struct{}{}
	}
	if now == nil {
		delete(s.fed, key)
	} else {
		s.fed[key] = now
	}
}

// current returns what holds now, after bringing it up to date.
func (s *settings) current(c *Calculator) *effective {
	if !s.stale {
		return &s.now
	}
	s.stale = false
	was := s.now
	s.now = effectiveOf(s.levels(c.cfg.Node))
	if was.exemptHosts != s.now.exemptHosts {
		for name := range s.hosts {
			s.feedNode(c, name)
		}
	}
	if !slices.Equal(was.external, s.now.external) {
		s.feed(c, filter.TunnelSources, "externalNodesList", s.now.external)
	}
	if was.spoofing != s.now.spoofing || was.floating != s.now.floating {
		c.locals.touchAll()
	}
	return &s.now
}

// levels returns the configurations that hold for this host, the strongest
// last: the cluster's, the oldest of those that select the node, its own.
func (s *settings) levels(node string) []*v3.FelixConfigurationSpec {
	var list []*v3.FelixConfigurationSpec
	if f, ok := s.felix[store.DefaultName]; ok {
		list = append(list, f.spec)
	}
	var oldest *felix
	for _, name := range slices.Sorted(maps.Keys(s.felix)) {
		f := s.felix[name]
		if f.nodes != nil && f.nodes.Matches(s.labels) && (oldest == nil || f.created.Before(&oldest.created)) {
			oldest = &f
		}
	}
	if oldest != nil {
		list = append(list, oldest.spec)
	}
	if f, ok := s.felix["node."+node]; ok {
		list = append(list, f.spec)
	}
	return list
}

// emit reports the settings if they changed.
func (s *settings) emit(c *Calculator) *filter.Settings {
	now := s.current(c).Settings
	if s.told != nil && reflect.DeepEqual(*s.told, now) {
		return nil
	}
	s.told = &now
	return &now
}

// effectiveOf merges configurations, the strongest last, over Felix's defaults.
func effectiveOf(levels []*v3.FelixConfigurationSpec) effective {
	var e effective
	e.LogPrefix = "calico-packet"
	prefix := "cali"
	var allowAction, denyAction, toHost string
	in, out := failsafeIn(), failsafeOut()
	for _, f := range levels {
		setString(&prefix, f.InterfacePrefix)
		setString(&toHost, f.DefaultEndpointToHostAction)
		setString(&e.LogPrefix, f.LogPrefix)
		setString(&denyAction, f.IptablesFilterDenyAction)
		setString(&denyAction, f.NftablesFilterDenyAction)
		setString(&allowAction, f.IptablesFilterAllowAction)
		setString(&allowAction, f.NftablesFilterAllowAction)
		setString(&e.NAT.OutInterface, f.IptablesNATOutgoingInterfaceFilter)
		if a, ok := parseAddr(f.NATOutgoingAddress); ok {
			e.NAT.Address = a
		}
		if r := f.NATPortRange; r != nil && r.PortName == "" && r.MinPort <= r.MaxPort {
			e.NAT.PortLow, e.NAT.PortHigh = r.MinPort, r.MaxPort
		}
		if f.WorkloadSourceSpoofing != "" {
			e.spoofing = strings.EqualFold(f.WorkloadSourceSpoofing, "Any")
		}
		if f.FloatingIPs != nil {
			e.floating = *f.FloatingIPs == v3.FloatingIPsEnabled
		}
		if x := f.NATOutgoingExclusions; x != nil {
			e.exemptHosts = *x == v3.NATOutgoingExclusionsIPPoolsAndHostIPs
		}
		if f.ExternalNodesCIDRList != nil {
			e.external, _ = setNets(*f.ExternalNodesCIDRList)
		}
		setBool(&e.AllowInvalid, f.DisableConntrackInvalidCheck)
		setBool(&e.WorkloadIPIP, f.AllowIPIPPacketsFromWorkloads)
		setBool(&e.WorkloadVXLAN, f.AllowVXLANPacketsFromWorkloads)
		if f.FailsafeInboundHostPorts != nil {
			in = failsafes(*f.FailsafeInboundHostPorts)
		}
		if f.FailsafeOutboundHostPorts != nil {
			out = failsafes(*f.FailsafeOutboundHostPorts)
		}
	}
	e.FailsafeIn, e.FailsafeOut = in, out
	e.Reject, e.AllowReturns = strings.EqualFold(denyAction, "Reject"), strings.EqualFold(allowAction, "Return")
	switch {
	case strings.EqualFold(toHost, "Accept"):
		e.WorkloadToHost = filter.HostAccept
	case strings.EqualFold(toHost, "Return"):
		e.WorkloadToHost = filter.HostReturn
	}
	for p := range strings.SplitSeq(prefix, ",") {
		if p = strings.TrimSpace(p); p != "" {
			e.WorkloadPrefixes = append(e.WorkloadPrefixes, p)
		}
	}
	return e
}

func setString(p *string, v string) {
	if v != "" {
		*p = v
	}
}

func setBool(p *bool, v *bool) {
	if v != nil {
		*p = *v
	}
}

// failsafeIn is Felix's default: SSH, DHCP, BGP, etcd, Typha, Kubernetes' API,
// and etcd's ports of old.
func failsafeIn() []filter.Failsafe {
	return append([]filter.Failsafe{{Protocol: 6, Port: 22}, {Protocol: 17, Port: 68}}, failsafeTCP()...)
}

// failsafeOut is Felix's default: DNS, DHCP, and what failsafeIn has too.
func failsafeOut() []filter.Failsafe {
	return append([]filter.Failsafe{{Protocol: 17, Port: 53}, {Protocol: 17, Port: 67}}, failsafeTCP()...)
}

func failsafeTCP() []filter.Failsafe {
	var list []filter.Failsafe
	for _, port := range []uint16{179, 2379, 2380, 5473, 6443, 6666, 6667} {
		list = append(list, filter.Failsafe{Protocol: 6, Port: port})
	}
	return list
}

func failsafes(ports []v3.ProtoPort) []filter.Failsafe {
	var list []filter.Failsafe
	for _, p := range ports {
		f := filter.Failsafe{Protocol: 6, Port: p.Port}
		switch strings.ToUpper(p.Protocol) {
		case "", "TCP":
		case "UDP":
			f.Protocol = 17
		case "SCTP":
			f.Protocol = 132
		default:
			continue
		}
		if p.Net != "" {
			net, ok := parseNet(p.Net)
			if !ok {
				continue // open to some that cannot be read is not open to all
			}
			f.Net = net
		}
		list = append(list, f)
	}
	return list
}

// nodeAddresses returns the addresses of a host on the underlay.
func nodeAddresses(n *store.Node) []netip.Prefix {
	var list []netip.Prefix
	add := func(s string) {
		if a, ok := parseHostAddr(s); ok {
			if p := netip.PrefixFrom(a, a.BitLen()); !slices.Contains(list, p) {
				list = append(list, p)
			}
		}
	}
	if b := n.Spec.BGP; b != nil {
		add(b.IPv4Address)
		add(b.IPv6Address)
	}
	for _, a := range n.Spec.Addresses {
		add(a.Address)
	}
	return list
}

// parseHostAddr reads an address with or without the length of its subnet.
func parseHostAddr(s string) (netip.Addr, bool) {
	if p, err := netip.ParsePrefix(s); err == nil {
		return p.Addr().Unmap(), true
	}
	return parseAddr(s)
}
