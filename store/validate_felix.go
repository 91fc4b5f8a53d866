package store

import (
	"fmt"
	"reflect"
	"regexp"
	"slices"
	"strings"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// FelixRule says what the text or the number in one field of a
// FelixConfiguration may be. The kind has nearly 200 fields, most of which are
// of no concern here; those that have rules are checked through their JSON
// names.
type FelixRule struct {
	Values    []string // of a text, in any case
	Low, High int      // of a number, when High is not zero
}

// FelixRules returns the rules by the JSON names of the fields.
func FelixRules() map[string]FelixRule {
	logLevels := FelixRule{Values: []string{"Trace", "Debug", "Info", "Warning", "Error", "Fatal", "None"}}
	onOff := FelixRule{Values: []string{"Enabled", "Disabled"}}
	acceptReturn := FelixRule{Values: []string{"Accept", "Return"}}
	dropReject := FelixRule{Values: []string{"Drop", "Reject"}}
	port := FelixRule{Low: 0, High: 65535}
	listenPort := FelixRule{Low: 1, High: 65535}
	// The kernel refuses an MTU below 68 (RFC 791), but 0 means "detect".
	mtu := FelixRule{Low: 0, High: 65535}
	return map[string]FelixRule{
		"iptablesBackend":              {Values: []string{"Auto", "Legacy", "NFT"}},
		"nftablesMode":                 {Values: []string{"Auto", "Enabled", "Disabled"}},
		"chainInsertMode":              {Values: []string{"Insert", "Append"}},
		"defaultEndpointToHostAction":  {Values: []string{"Drop", "Accept", "Return"}},
		"iptablesFilterAllowAction":    acceptReturn,
		"iptablesMangleAllowAction":    acceptReturn,
		"nftablesFilterAllowAction":    acceptReturn,
		"nftablesMangleAllowAction":    acceptReturn,
		"iptablesFilterDenyAction":     dropReject,
		"nftablesFilterDenyAction":     dropReject,
		"logSeverityFile":              logLevels,
		"logSeverityScreen":            logLevels,
		"logSeveritySys":               logLevels,
		"programClusterRoutes":         {Values: []string{"Enabled", "Disabled", "EnabledIPIPOnly", "EnabledNoEncapOnly"}},
		"ipForwarding":                 onOff,
		"floatingIPs":                  onOff,
		"routeSource":                  {Values: []string{"WorkloadIPs", "CalicoIPAM"}},
		"serviceLoopPrevention":        {Values: []string{"Drop", "Reject", "Disabled"}},
		"workloadSourceSpoofing":       {Values: []string{"Disabled", "Any"}},
		"natOutgoingExclusions":        {Values: []string{"IPPoolsOnly", "IPPoolsAndHostIPs"}},
		"bpfLogLevel":                  {Values: []string{"Off", "Info", "Debug"}},
		"bpfExternalServiceMode":       {Values: []string{"Tunnel", "DSR"}},
		"bpfConnectTimeLoadBalancing":  {Values: []string{"TCP", "Enabled", "Disabled"}},
		"awsSrcDstCheck":               {Values: []string{"DoNothing", "Enable", "Disable"}},
		"windowsManageFirewallRules":   onOff,
		"ipipMTU":                      mtu,
		"vxlanMTU":                     mtu,
		"vxlanMTUV6":                   mtu,
		"wireguardMTU":                 mtu,
		"wireguardMTUV6":               mtu,
		"vxlanPort":                    listenPort,
		"vxlanVNI":                     {Low: 1, High: 1<<24 - 1}, // RFC 7348, section 5: 24 bits
		"healthPort":                   port,
		"prometheusMetricsPort":        port,
		"metadataPort":                 port,
		"debugPort":                    port,
		"wireguardListeningPort":       listenPort,
		"wireguardListeningPortV6":     listenPort,
		"wireguardRoutingRulePriority": {Low: 1, High: 32765},
		"deviceRouteProtocol":          {Low: 1, High: 255},
	}
}

// maxLogPrefix is how much of spec.logPrefix the kernel takes: its
// NF_LOG_PREFIXLEN without ": " and the final zero.
const maxLogPrefix = 125

func (c *checker) felixConfiguration(s *v3.FelixConfigurationSpec) {
	rules := FelixRules()
	v := reflect.ValueOf(s).Elem()
	for i := range v.NumField() {
		name, _, _ := strings.Cut(v.Type().Field(i).Tag.Get("json"), ",")
		c.felixField("spec."+name, v.Field(i), rules[name])
	}
	for _, f := range []struct{ name, value string }{
		{"logDebugFilenameRegex", s.LogDebugFilenameRegex},
		{"mtuIfacePattern", s.MTUIfacePattern},
		{"bpfDataIfacePattern", s.BPFDataIfacePattern},
		{"bpfL3IfacePattern", s.BPFL3IfacePattern},
	} {
		if _, err := regexp.Compile(f.value); err != nil {
			c.add("spec."+f.name, f.value, "is not a regular expression: %v", err)
		}
	}
	c.felixInterfaces(s)
	c.reject(len(s.LogPrefix) > maxLogPrefix, "spec.logPrefix", s.LogPrefix, "must be at most %d bytes: the kernel takes no more", maxLogPrefix)
	c.optAddr("spec.natOutgoingAddress", s.NATOutgoingAddress, "")
	c.optAddr("spec.deviceRouteSourceAddress", s.DeviceRouteSourceAddress, "IPv4")
	c.optAddr("spec.deviceRouteSourceAddressIPv6", s.DeviceRouteSourceAddressIPv6, "IPv6")
	if s.ExternalNodesCIDRList != nil {
		c.nets("spec.externalNodesList", *s.ExternalNodesCIDRList)
	}
	c.failsafe("spec.failsafeInboundHostPorts", s.FailsafeInboundHostPorts)
	c.failsafe("spec.failsafeOutboundHostPorts", s.FailsafeOutboundHostPorts)
	if s.RouteTableRanges != nil {
		for i, r := range *s.RouteTableRanges {
			c.tableRange(index("spec.routeTableRanges", i), r.Min, r.Max)
		}
	}
	if r := s.RouteTableRange; r != nil {
		c.tableRange("spec.routeTableRange", r.Min, r.Max)
	}
}

// felixField applies the rule of one field, and to durations the one that all
// of them share.
func (c *checker) felixField(field string, v reflect.Value, rule FelixRule) {
	if v.Kind() == reflect.Pointer {
		if v.IsNil() {
			return
		}
		if d, ok := v.Interface().(*metav1.Duration); ok {
			if d.Duration < 0 {
				c.add(field, d.Duration.String(), "must not be negative; 0s turns it off where that is possible")
			}
			return
		}
		v = v.Elem()
	}
	switch {
	case rule.Values != nil && v.Kind() == reflect.String:
		s := v.String()
		if s != "" && !slices.ContainsFunc(rule.Values, func(a string) bool { return strings.EqualFold(a, s) }) {
			c.add(field, s, "must be one of %s", strings.Join(rule.Values, ", "))
		}
	case rule.High != 0 && v.CanInt():
		c.between(field, int(v.Int()), rule.Low, rule.High)
	}
}

func (c *checker) felixInterfaces(s *v3.FelixConfigurationSpec) {
	prefix := regexp.MustCompile(`^[a-zA-Z0-9_-]{1,15}$`)
	for i, p := range splitList(s.InterfacePrefix) {
		if !prefix.MatchString(p) {
			c.add("spec.interfacePrefix", p, "entry %d must be at most %d letters, digits, '_' and '-'", i+1, MaxInterfaceName)
			continue
		}
		name, own := HostInterfaceWith(p)
		c.reject(own, "spec.interfacePrefix", p, "entry %d is a prefix of interfaces of the host itself, such as %s: workloads' need one of their own, such as cali", i+1, name)
	}
	for i, p := range splitList(s.InterfaceExclude) {
		inner, isRegexp := strings.CutPrefix(p, "/")
		if !isRegexp {
			c.interfaceName("spec.interfaceExclude", p)
			continue
		}
		inner, closed := strings.CutSuffix(inner, "/")
		if _, err := regexp.Compile(inner); err != nil || !closed || inner == "" {
			c.add("spec.interfaceExclude", p, "entry %d must be an interface's name, or a regular expression between slashes such as /^kube/", i+1)
		}
	}
	for _, f := range []struct{ name, value string }{
		{"wireguardInterfaceName", s.WireguardInterfaceName},
		{"wireguardInterfaceNameV6", s.WireguardInterfaceNameV6},
		{"iptablesNATOutgoingInterfaceFilter", s.IptablesNATOutgoingInterfaceFilter},
	} {
		c.interfaceName("spec."+f.name, f.value)
	}
}

func splitList(s string) []string {
	if s == "" {
		return nil
	}
	return strings.Split(s, ",")
}

func (c *checker) failsafe(field string, ports *[]v3.ProtoPort) {
	if ports == nil {
		return
	}
	for i, p := range *ports {
		f := index(field, i)
		if !slices.Contains([]string{"", "TCP", "UDP", "SCTP"}, strings.ToUpper(p.Protocol)) {
			c.add(f+".protocol", p.Protocol, "must be one of TCP, UDP, SCTP")
		}
		if p.Net != "" {
			c.net(f+".net", p.Net)
		}
	}
}

// reservedTable is the first of the kernel's own routing tables (default,
// main, local: 253 to 255, linux/rtnetlink.h).
const reservedTable = 253

func (c *checker) tableRange(field string, low, high int) {
	switch {
	case low < 1 || high < low:
		c.add(field, fmt.Sprintf("%d-%d", low, high), "min must be at least 1 and at most max")
	case low <= reservedTable+2 && high >= reservedTable:
		c.add(field, fmt.Sprintf("%d-%d", low, high), "must not contain the kernel's own tables %d to %d", reservedTable, reservedTable+2)
	}
}
