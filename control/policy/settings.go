package policy

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strings"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/dataplane/filter"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/selector"
)

// settings are what FelixConfiguration, pools and nodes say about the host as
// a whole.
type settings struct {
	felix  map[string]felix  // by resource name
	labels map[string]string // of this host's node
	nodes  map[string]*cluster.Node
	fed    map[feedKey][]netip.Prefix
	seen   map[string][]netip.Prefix // by node: where its packets were seen to come from
	asked  map[string]poolTunnel     // by pool that asks for a tunnel
	own    []filter.Tunnel           // what this host publishes that it decapsulates or sends
	bgp    map[string]uint16         // by BGPConfiguration: listenPort

	stale     bool // felix or labels changed
	now       effective
	published *filter.Settings
}

// feedKey names a source, other than a node, of members of one of the sets that are fed by hand.
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
	vxlanPort                       uint16
	problems                        []string // why fields are not used
}

func (s *settings) init() {
	s.felix = make(map[string]felix)
	s.nodes = make(map[string]*cluster.Node)
	s.fed = make(map[feedKey][]netip.Prefix)
	s.seen = make(map[string][]netip.Prefix)
	s.asked = make(map[string]poolTunnel)
	s.bgp = make(map[string]uint16)
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

func (s *settings) putNode(c *Calculator, name string, n *cluster.Node) {
	was := s.gives(name)
	if n == nil {
		delete(s.nodes, name)
	} else {
		s.nodes[name] = n
	}
	if name == c.cfg.Node && n != nil && !maps.Equal(s.labels, n.Labels) {
		s.labels, s.stale = n.Labels, true
	}
	if name == c.cfg.Node {
		c.ownInterfaces()
		if own := publishedTunnels(n); !slices.Equal(own, s.own) {
			s.own, s.stale = own, true
		}
	}
	s.feedNode(c, name, was)
}

// ownHosts returns the addresses of a node on the underlay.
func (s *settings) ownHosts(name string) []netip.Prefix {
	if n := s.nodes[name]; n != nil {
		return hostPrefixes(n.Hosts)
	}
	return nil
}

// given is what a node gives to the sets that hold hosts. It follows from the node, and is
// not kept: there are thousands.
type given struct{ sources, exempt []netip.Prefix }

func (s *settings) gives(name string) (g given) {
	n := s.nodes[name]
	if n == nil {
		return g
	}
	hosts := hostPrefixes(n.Hosts)
	g.sources = slices.Concat(hosts, hostPrefixes(tunnelAddresses(n)), s.seen[name])
	if s.now.exemptHosts {
		g.exempt = hosts
	}
	return g
}

// feedNode has the sets that hold hosts follow a node that gave something else before.
func (s *settings) feedNode(c *Calculator, name string, was given) {
	now := s.gives(name)
	c.members.replace(filter.TunnelSources, was.sources, now.sources)
	c.members.replace(filter.NATExempt, was.exempt, now.exempt)
}

// putBGP takes note of a port at which nodes take BGP sessions.
func (s *settings) putBGP(name string, b *v3.BGPConfiguration) {
	var port uint16
	if b != nil {
		port = b.Spec.ListenPort
	}
	if s.bgp[name] == port {
		return
	}
	s.stale = true
	if s.bgp[name] = port; port == 0 {
		delete(s.bgp, name)
	}
}

// putPool takes note of a pool, as the cluster reads it for all; nil: there is none any more.
func (s *settings) putPool(c *Calculator, name string, p *cluster.Pool) {
	var exempt, sources []netip.Prefix
	if p != nil {
		ok := p.CIDR.IsValid()
		balancer := !slices.ContainsFunc(p.Uses, func(u v3.IPPoolAllowedUse) bool { return u != v3.IPPoolAllowedUseLoadBalancer })
		if ok && !balancer {
			exempt = []netip.Prefix{p.CIDR}
		}
		if ok && p.Translated {
			sources = []netip.Prefix{p.CIDR}
		}
	}
	s.feed(c, filter.NATExempt, "pool "+name, exempt)
	s.feed(c, filter.NATSources, "pool "+name, sources)
	if asked := tunnelOfPool(p); asked != s.asked[name] {
		s.stale = true
		if s.asked[name] = asked; asked == (poolTunnel{}) {
			delete(s.asked, name)
		}
	}
}

// feed replaces what one source gives to a set.
func (s *settings) feed(c *Calculator, id filter.SetID, source string, nets []netip.Prefix) {
	key := feedKey{id, source}
	c.members.replace(id, s.fed[key], nets)
	if len(nets) == 0 {
		delete(s.fed, key)
	} else {
		s.fed[key] = nets
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
	var refused []string
	s.now.WorkloadPrefixes, refused = c.locals.setPrefixes(s.now.WorkloadPrefixes)
	s.now.problems = append(s.now.problems, refused...)
	s.now.FailsafeOut = append(s.now.FailsafeOut, c.cfg.Datastore...)
	s.now.VXLANPorts = s.vxlanInUse()
	s.now.HostTraffic = s.hostTraffic(c.cfg.HostPorts)
	s.now.Guarded = s.guarded(c.cfg.Guarded)
	s.now.MaxConnections = c.cfg.MaxConnections
	s.now.Tunnels = nil
	if !c.cfg.TunnelsFromAnywhere {
		s.now.Tunnels = s.tunnels()
	}
	if was.exemptHosts != s.now.exemptHosts {
		for _, n := range s.nodes {
			if hosts := hostPrefixes(n.Hosts); s.now.exemptHosts {
				c.members.replace(filter.NATExempt, nil, hosts)
			} else {
				c.members.replace(filter.NATExempt, hosts, nil)
			}
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
	now.Virtual = c.locals.hostLinks[virtualLink]
	if s.published != nil && reflect.DeepEqual(*s.published, now) {
		return nil
	}
	s.published = &now
	return &now
}

// effectiveOf merges configurations, the strongest last, over Felix's defaults.
func effectiveOf(levels []*v3.FelixConfigurationSpec) effective {
	e := effective{vxlanPort: store.DefaultVXLANPort}
	e.LogPrefix = "calico-packet"
	prefix := store.WorkloadInterfacePrefix
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
		if out := f.IptablesNATOutgoingInterfaceFilter; len(out) > store.MaxInterfaceName {
			e.problems = append(e.problems, fmt.Sprintf("iptablesNATOutgoingInterfaceFilter is not used: it is longer than the %d bytes of an interface's name", store.MaxInterfaceName))
		} else {
			setString(&e.NAT.OutInterface, out)
		}
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
		if v := f.VXLANPort; v != nil && *v > 0 && *v < 1<<16 {
			e.vxlanPort = uint16(*v)
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

// hostTraffic returns what the hosts of the cluster send each other: tunnels'
// packets, in each form that some node uses or may be using, and what comes to
// these ports.
func (s *settings) hostTraffic(ports []filter.Tunnel) []filter.Tunnel {
	list := []filter.Tunnel{{Protocol: protoIPIP}, {Protocol: protoIPv6}}
	for _, p := range s.now.VXLANPorts {
		list = append(list, filter.Tunnel{Protocol: protoUDP, Port: p})
	}
	for _, name := range slices.Sorted(maps.Keys(s.bgp)) {
		if t := (filter.Tunnel{Protocol: protoTCP, Port: s.bgp[name]}); !slices.Contains(list, t) {
			list = append(list, t)
		}
	}
	return append(list, ports...)
}

// guarded returns what workloads do not reach: with the port of BGP any that some nodes
// take sessions at.
func (s *settings) guarded(ports []filter.Tunnel) []filter.Tunnel {
	if len(ports) == 0 {
		return nil
	}
	list := slices.Clone(ports)
	for _, name := range slices.Sorted(maps.Keys(s.bgp)) {
		if t := (filter.Tunnel{Protocol: protoTCP, Port: s.bgp[name]}); !slices.Contains(list, t) {
			list = append(list, t)
		}
	}
	return list
}

// vxlanInUse returns the ports of VXLAN that this host is configured with and those that
// it publishes: during a change both the old and the new. What another Node says closes
// no port for all pods, nor opens one between hosts.
func (s *settings) vxlanInUse() []uint16 {
	numbers := map[uint16]bool{s.now.vxlanPort: true}
	for _, t := range s.own {
		if t.Protocol == protoUDP && !store.IsSystemPort(t.Port) {
			numbers[t.Port] = true
		}
	}
	return slices.Sorted(maps.Keys(numbers))
}

// Numbers of the protocols between hosts, and of the ports of Services (IANA, Assigned Internet Protocol
// Numbers): IPv4 and IPv6 in either, BGP, VXLAN; SCTP.
const (
	protoIPIP = 4
	protoTCP  = 6
	protoUDP  = 17
	protoSCTP = 132
	protoIPv6 = 41
)

// tunnelAddresses returns the addresses with which a host's packets arrive inside
// tunnels, those to which peers send its tunnels' packets instead of its own, and those
// from which it may send them besides.
func tunnelAddresses(n *cluster.Node) []netip.Addr {
	list := slices.Concat(n.Inner, n.Sources)
	for _, a := range []netip.Addr{n.IPIPAddr.IPv4, n.IPIPAddr.IPv6, n.Public.IPv4, n.Public.IPv6} {
		if a.IsValid() && !slices.Contains(list, a) {
			list = append(list, a)
		}
	}
	return list
}

// hostPrefixes returns the prefixes of single addresses.
func hostPrefixes(addrs []netip.Addr) []netip.Prefix {
	list := make([]netip.Prefix, 0, len(addrs))
	for _, a := range addrs {
		list = append(list, netip.PrefixFrom(a, a.BitLen()))
	}
	return list
}
