package crd

import (
	"errors"
	"fmt"
	"math"
	"reflect"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/routerd/routerd/store"
)

// limit adds to the schema of a kind what [store.Validate] says of its objects, in
// the same words, as far as Calico says it too: its clients write to the same API.
// What needs more than one object, Go's regular expressions or the grammar of
// selectors is left to the clients, and so is what would cost the API server too
// much, or would want a bound on lists that have none.
//
// The records of IPAM have no rules: daemons alone write them.
func limit(kind store.Kind, root *Schema) error {
	l := &limits{root: root}
	switch kind {
	case store.KindIPPool:
		l.ipPool()
	case store.KindIPReservation:
		l.at("spec.reservedCIDRs").nets()
	case store.KindBGPPeer:
		l.bgpPeer()
	case store.KindBGPFilter:
		for _, list := range []string{"export", "import"} {
			l.filterRules("spec."+list+"V4", "IPv4", 32)
			l.filterRules("spec."+list+"V6", "IPv6", 128)
		}
	case store.KindBGPConfiguration:
		l.bgpConfiguration()
	case store.KindFelixConfiguration:
		l.felixConfiguration()
	case store.KindClusterInformation:
		l.onlyDefault(kind)
	case store.KindTier:
		l.tier()
	case store.KindKubeControllersConfiguration:
		l.onlyDefault(kind)
		l.kubeControllers()
	case store.KindCalicoNodeStatus:
		l.nodeStatus()
	case store.KindHostEndpoint:
		l.hostEndpoint()
	case store.KindNetworkSet, store.KindGlobalNetworkSet:
		l.at("spec.nets").nets()
	case store.KindNetworkPolicy, store.KindGlobalNetworkPolicy, store.KindStagedNetworkPolicy, store.KindStagedGlobalNetworkPolicy,
		store.KindStagedKubernetesNetworkPolicy:
		l.policy(kind)
	}
	return errors.Join(append(l.errs, root.check("")...)...)
}

func (l *limits) onlyDefault(kind store.Kind) {
	l.at("metadata").Properties = map[string]*Schema{"name": {Type: "string"}} // all that rules may see of it
	l.root.ruleFor(".metadata.name", "self.metadata.name == 'default'", fmt.Sprintf("must be %q: there is one %s", store.DefaultName, kind))
}

func (l *limits) ipPool() {
	l.root.require("spec")
	spec := l.at("spec")
	spec.require("cidr")
	cidr := l.at("spec.cidr")
	cidr.cidr("")
	for _, r := range []string{"169.254.0.0/16", "fe80::/10"} {
		cidr.rule(fmt.Sprintf("!isCIDR(self) || !cidr('%[1]s').containsCIDR(self) && !cidr(self).containsCIDR('%[1]s')", r),
			fmt.Sprintf("overlaps the link-local range %s, which is not routed; choose another range", r))
	}
	// A block size that is not set is 26 or 122, by the family.
	const legal = "(!has(self.blockSize) || self.blockSize == 0 || (cidr(self.cidr).ip().family() == 4 ? " +
		"self.blockSize >= 20 && self.blockSize <= 32 : self.blockSize >= 116 && self.blockSize <= 128))"
	spec.ruleFor(".blockSize", "!isCIDR(self.cidr) || "+legal,
		"must be a number from 20 to 32 for an IPv4 pool, and from 116 to 128 for an IPv6 pool; leave it out for 26 or 122")
	spec.explain("cidr(self.cidr).ip().family() == 4 ? 'must be a number from 20 to 32 for an IPv4 pool; leave it out for 26' : " +
		"'must be a number from 116 to 128 for an IPv6 pool; leave it out for 122'")
	spec.ruleFor(".cidr", "has(self.disabled) && self.disabled || !isCIDR(self.cidr) || !"+legal+" || cidr(self.cidr).prefixLength() <= "+
		"(has(self.blockSize) && self.blockSize != 0 ? self.blockSize : cidr(self.cidr).ip().family() == 4 ? 26 : 122)",
		"is smaller than one block of blockSize; use a prefix length of at most blockSize, or a larger blockSize")

	modes := []string{"Never", "Always", "CrossSubnet"}
	l.at("spec.ipipMode").oneOf(modes...)
	l.at("spec.vxlanMode").oneOf(modes...)
	const ipip, vxlan = "has(self.ipipMode) && !(self.ipipMode in ['', 'Never'])", "has(self.vxlanMode) && !(self.vxlanMode in ['', 'Never'])"
	spec.ruleFor(".vxlanMode", "!("+ipip+" && "+vxlan+")", "cannot be used together with ipipMode; set one of the two to Never")
	l.at("spec.assignmentMode").oneOf("Automatic", "Manual")
	spec.ruleFor(".ipip", "!has(self.ipip)", "is a field of the v1 API; use spec.ipipMode")
	spec.ruleFor("['nat-outgoing']", "!has(self.nat__dash__outgoing) || !self.nat__dash__outgoing", "is a field of the v1 API; use spec.natOutgoing")

	uses := l.at("spec.allowedUses")
	uses.Items.exactly("Workload", "Tunnel", "LoadBalancer")
	uses.MaxItems = 64 // some may stand there twice
	balancers := "!has(self.allowedUses) || !self.allowedUses.exists(u, u == 'LoadBalancer') || "
	spec.ruleFor(".allowedUses", balancers+"size(self.allowedUses) == 1", "LoadBalancer must stand alone; make a pool of its own for it")
	spec.ruleFor(".allowedUses", balancers+"!("+ipip+") && !("+vxlan+")", "a LoadBalancer pool has no encapsulation; set ipipMode and vxlanMode to Never")
	spec.ruleFor(".disableBGPExport", balancers+"!has(self.disableBGPExport) || !self.disableBGPExport", "a LoadBalancer pool is reached by BGP only; leave this field out")
	spec.ruleFor(".nodeSelector", balancers+"!has(self.nodeSelector) || self.nodeSelector in ['', 'all()']", "must be all() in a LoadBalancer pool")
}

func (l *limits) bgpPeer() {
	spec := l.at("spec")
	spec.ruleFor(".nodeSelector", "!("+set("node", "nodeSelector")+")", "cannot be given together with node; keep one of the two")
	l.at("spec.node").name()
	peer := l.at("spec.peerIP")
	peer.MaxLength = maxText
	const port = "int(self.substring(self.lastIndexOf(':') + 1))"
	// IPv4 addresses in IPv6's form are none for CEL; it has no say about them.
	peer.rule(`self == '' || isIP(self) || self.matches('^[[]?[0:]*:[fF]{4}:') || self.matches('^([[][0-9a-fA-F:.]+[]]|[0-9.]+):[0-9]{1,5}$') && `+
		port+` >= 1 && `+port+` <= 65535 && isIP(self.startsWith('[') ? self.substring(1, self.lastIndexOf(']')) : self.split(':')[0])`,
		"must be an address, with or without a port: 10.1.0.254, 10.1.0.254:1790, fd00::1 or [fd00::1]:1790")
	const selected = "!(" + "has(self.peerSelector) && self.peerSelector != ''" + ") || "
	spec.ruleFor(".peerIP", selected+"!("+set("peerIP")+")", "cannot be given together with peerSelector; keep one of the two")
	spec.ruleFor(".asNumber", selected+"!has(self.asNumber) || self.asNumber == 0", "cannot be given together with peerSelector: each node's own AS number is used; leave it out")
	const workloads = "!(" + "has(self.localWorkloadSelector) && self.localWorkloadSelector != ''" + ") || "
	spec.ruleFor(".peerIP", workloads+"!("+set("peerIP")+")", "cannot be given together with localWorkloadSelector; keep one of the two")
	spec.ruleFor(".peerSelector", workloads+"!("+set("peerSelector")+")", "cannot be given together with localWorkloadSelector; keep one of the two")
	spec.ruleFor(".asNumber", workloads+"has(self.asNumber) && self.asNumber != 0", "required with localWorkloadSelector: the AS number that the workloads use")
	l.at("spec.nextHopMode").oneOf("Auto", "Self", "Keep")
	spec.ruleFor(".keepOriginalNextHop", "!has(self.nextHopMode) || !has(self.keepOriginalNextHop) || !self.keepOriginalNextHop",
		"is deprecated and cannot be given together with nextHopMode; leave it out")
	l.at("spec.reversePeering").oneOf("Auto", "Manual")
	l.at("spec.sourceAddress").oneOf("UseNodeIP", "None")
	l.at("spec.reachableBy").addr("")
	spec.ruleFor(".reachableBy", "!("+set("reachableBy")+") || "+set("peerIP"), "is the gateway to spec.peerIP, which is missing; add it or leave this out")
	spec.ruleFor(".reachableBy", "!("+set("reachableBy", "peerIP")+") || !isIP(self.reachableBy) || ip(self.reachableBy).family() == (size(self.peerIP.split(':')) > 2 ? 6 : 4)",
		"is of another family than spec.peerIP; give a gateway of the same")
	l.at("spec.filters").names()
}

func (l *limits) filterRules(list, family string, bits int64) {
	l.at(list).MaxItems = maxEntries / 4 // there are four lists, and a rule that says something is longer
	path := list + "[]"
	rule := l.at(path)
	rule.require("action")
	l.at(path+".action").exactly("Accept", "Reject")
	l.at(path + ".source").oneOf("RemotePeers")
	l.at(path+".matchOperator").oneOf("Equal", "NotEqual", "In", "NotIn")
	l.at(path + ".interface").interfaceGlob()
	l.at(path + ".cidr").cidr(family)
	rule.ruleFor(".matchOperator", "!("+set("cidr")+") || "+set("matchOperator"), "required with cidr: one of Equal, NotEqual, In, NotIn")
	rule.ruleFor(".cidr", set("cidr")+" || !("+set("matchOperator")+")", fmt.Sprintf("required with matchOperator: an %s CIDR", family))
	rule.ruleFor(".cidr", set("cidr")+" || "+set("matchOperator")+" || !has(self.prefixLength)", fmt.Sprintf("required with prefixLength: an %s CIDR", family))
	l.at(path+".prefixLength.min").between(0, bits)
	l.at(path+".prefixLength.max").between(0, bits)
}

func (l *limits) bgpConfiguration() {
	l.at("spec.logSeverityScreen").oneOfAnyCase("Trace", "Debug", "Info", "Warning", "Error", "Fatal", "None")
	for _, list := range []string{"serviceLoadBalancerIPs", "serviceExternalIPs", "serviceClusterIPs"} {
		l.at("spec." + list).MaxItems = maxEntries
		l.at("spec." + list + "[].cidr").cidr("")
	}
	l.at("spec.serviceLoadBalancerAggregation").oneOf("Enabled", "Disabled")
	l.at("spec.bindMode").oneOf("None", "NodeIP")
	l.at("spec.ignoredInterfaces").MaxItems = maxEntries
	l.at("spec.ignoredInterfaces[]").interfaceGlob()
	l.at("spec.localWorkloadPeeringIPV4").addr("IPv4")
	l.at("spec.localWorkloadPeeringIPV6").addr("IPv6")

	spec := l.at("spec")
	spec.ruleFor(".communities", "!has(self.communities) || size(self.communities) == 0 || has(self.prefixAdvertisements) && size(self.prefixAdvertisements) > 0",
		"has no effect without spec.prefixAdvertisements; add these or leave it out")
	l.at("spec.communities").MaxItems = maxEntries / 4
	l.at("spec.communities[]").require("name", "value")
	l.at("spec.communities[].name").MaxLength = 253
	l.at("spec.communities[].name").Pattern = namePattern
	value := l.at("spec.communities[].value")
	value.MaxLength = maxText
	const n = "int(self.split(':')[%d]) <= %d"
	value.rule("self.matches('^[0-9]+:[0-9]+$') ? "+fmt.Sprintf(n+" && "+n, 0, math.MaxUint16, 1, math.MaxUint16)+
		" : self.matches('^[0-9]+:[0-9]+:[0-9]+$') && "+fmt.Sprintf(n+" && "+n+" && "+n, 0, math.MaxUint32, 1, math.MaxUint32, 2, math.MaxUint32),
		"write aa:nn with two numbers up to 65535, or aa:nn:mm with three up to 4294967295")
	l.at("spec.prefixAdvertisements").MaxItems = maxEntries
	l.at("spec.prefixAdvertisements[]").require("cidr", "communities")
	l.at("spec.prefixAdvertisements[].cidr").cidr("")
	l.at("spec.prefixAdvertisements[].communities").MinItems = 1

	const mesh = "!has(self.nodeToNodeMeshEnabled) || self.nodeToNodeMeshEnabled || "
	for _, f := range []string{"nodeMeshPassword", "nodeMeshMaxRestartTime"} {
		spec.ruleFor("."+f, mesh+"!has(self."+f+")", "is for the node-to-node mesh, which nodeToNodeMeshEnabled turns off; leave it out, or set it on a BGPPeer")
	}
	const elsewhere = "self.metadata.name == 'default' || !has(self.spec) || !has(self.spec."
	for _, f := range []string{"nodeToNodeMeshEnabled", "asNumber", "nodeMeshPassword", "nodeMeshMaxRestartTime"} {
		l.onDefault(f, elsewhere+f+")")
	}
	for _, f := range []string{"serviceExternalIPs", "serviceClusterIPs", "serviceLoadBalancerIPs"} {
		l.onDefault(f, elsewhere+f+") || size(self.spec."+f+") == 0")
	}
}

// onDefault adds a rule about what has a meaning on the object of that name only.
func (l *limits) onDefault(field, rule string) {
	l.root.ruleFor(".spec."+field, rule, fmt.Sprintf("can be set on the BGPConfiguration named %q only", store.DefaultName))
}

// felixConfiguration holds the rules of the store. Calico's validation has no lower
// bounds but for WireGuard's, so that 0 passes elsewhere.
func (l *limits) felixConfiguration() {
	spec := l.at("spec")
	for name, r := range store.FelixRules() {
		f := l.at("spec." + name)
		switch {
		case r.Values != nil:
			f.oneOfAnyCase(r.Values...)
		case strings.HasPrefix(name, "wireguard"):
			f.between(int64(r.Low), int64(r.High))
		default:
			f.between(0, int64(r.High))
		}
	}
	l.durations("spec", store.New(store.KindFelixConfiguration))
	l.at("spec.natOutgoingAddress").addr("")
	l.at("spec.deviceRouteSourceAddress").addr("IPv4")
	l.at("spec.deviceRouteSourceAddressIPv6").addr("IPv6")
	l.at("spec.externalNodesList").nets()
	for _, list := range []string{"failsafeInboundHostPorts", "failsafeOutboundHostPorts"} {
		l.at("spec." + list + "[].protocol").Pattern = "^(?i)(TCP|UDP|SCTP)?$"
		net := l.at("spec." + list + "[].net")
		net.net()
		net.AnyOf = append(net.AnyOf, &Schema{Enum: []any{""}})
	}
	spec.ruleFor(".routeTableRange", "!has(self.routeTableRange) || self.routeTableRange.min >= 1 && self.routeTableRange.max >= self.routeTableRange.min", badRange)
	l.at("spec.routeTableRange").require("min", "max")
	ranges := l.at("spec.routeTableRanges[]")
	ranges.require("min", "max")
	ranges.rule("self.min >= 1 && self.max >= self.min", badRange)
	for _, r := range []*Schema{ranges, l.at("spec.routeTableRange")} {
		r.rule("self.max < 253 || self.min > 255", "must not contain the kernel's own tables 253 to 255")
	}
}

const badRange = "min must be at least 1 and at most max"

// durations adds the rule about times to all members that are one.
func (l *limits) durations(path string, v any) {
	spec, _ := reflect.TypeOf(v).Elem().FieldByName("Spec")
	for f := range spec.Type.Fields() {
		if f.Type == reflect.TypeFor[*metav1.Duration]() {
			name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
			l.at(path + "." + name).duration()
		}
	}
}

func (l *limits) tier() {
	l.at("spec.defaultAction").oneOf("Deny", "Pass")
	for _, name := range []string{store.DefaultName, store.TierKubeAdmin, store.TierKubeBaseline} {
		order, action, _ := store.BuiltInTier(name)
		other := fmt.Sprintf("self.metadata.name != '%s' || !has(self.spec) || ", name)
		l.root.ruleFor(".spec.order", fmt.Sprintf("%s!has(self.spec.order) || self.spec.order == %.1f", other, order),
			fmt.Sprintf("the order of the built-in tier %s is %.0f and cannot be changed", name, order))
		l.root.ruleFor(".spec.defaultAction", fmt.Sprintf("%s!has(self.spec.defaultAction) || self.spec.defaultAction in ['', '%s']", other, action),
			fmt.Sprintf("the default action of the built-in tier %s is %s and cannot be changed", name, action))
	}
}

func (l *limits) kubeControllers() {
	l.at("spec.logSeverityScreen").oneOfAnyCase("None", "Debug", "Info", "Warning", "Warn", "Error", "Fatal")
	for _, f := range []string{"healthChecks", "controllers.node.syncLabels", "controllers.node.hostEndpoint.autoCreate", "controllers.node.hostEndpoint.createDefaultHostEndpoint"} {
		l.at("spec."+f).oneOf("Enabled", "Disabled")
	}
	l.at("spec.prometheusMetricsPort").between(0, math.MaxUint16)
	l.at("spec.debugProfilePort").between(0, math.MaxUint16)
	l.at("spec.controllers.node.hostEndpoint.templates[].interfaceCIDRs").nets()
	l.at("spec.controllers.loadBalancer.assignIPs").oneOf("AllServices", "RequestedServicesOnly")
}

func (l *limits) nodeStatus() {
	l.root.require("spec")
	spec := l.at("spec")
	spec.require("node", "classes", "updatePeriodSeconds")
	node := l.at("spec.node")
	node.name()
	node.rule("self != ''", "required: the node that is to report")
	classes := l.at("spec.classes")
	classes.MinItems = 1
	classes.Items.exactly("Agent", "BGP", "Routes")
	classes.MaxItems = len(classes.Items.Enum) // each once
	classes.rule("self.all(c, self.exists_one(d, c == d))", "one is given twice; keep one")
	l.at("spec.updatePeriodSeconds").between(0, store.MaxStatusPeriod)
}

func (l *limits) hostEndpoint() {
	l.root.require("spec")
	spec := l.at("spec")
	spec.require("node")
	node := l.at("spec.node")
	node.name()
	node.rule("self != ''", "required: the name of the node that the interface is on")
	spec.ruleFor(".interfaceName", "has(self.interfaceName) && self.interfaceName != '' || has(self.expectedIPs) && size(self.expectedIPs) > 0",
		`required, unless expectedIPs tells the interface by its addresses; "*" stands for all of the host's`)
	name := l.at("spec.interfaceName")
	name.MaxLength = maxText
	name.rule(`size(self) <= 15 && !self.matches('[/ \t\n]') && !(self in ['.', '..'])`,
		"must be a network interface's name: at most 15 characters without slashes or spaces")
	l.at("spec.expectedIPs").addrs()
	l.at("spec.profiles").names()
	port := l.at("spec.ports[]")
	port.require("name", "port", "protocol")
	l.at("spec.ports[].name").Pattern = "^[^ :,]{1,128}$"
	l.at("spec.ports[].port").between(1, math.MaxUint16)
	l.at("spec.ports[].protocol").protocol()
	port.ruleFor(".protocol", hasPorts("self.protocol"), "has no ports; use TCP, UDP or SCTP")
}
