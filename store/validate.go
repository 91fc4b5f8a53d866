package store

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
)

// FieldError says what is wrong with one field of an object.
type FieldError struct {
	Field   string // JSON path from the top of the object, such as spec.blockSize or spec.exportV4[0].cidr
	Value   any    // what is there; nil when the field is missing
	Message string // what is allowed and how to mend it
}

// Error returns "field: value: message".
func (e FieldError) Error() string {
	switch v := e.Value.(type) {
	case nil:
		return e.Field + ": " + e.Message
	case string:
		return fmt.Sprintf("%s: %q: %s", e.Field, v, e.Message)
	default:
		return fmt.Sprintf("%s: %v: %s", e.Field, v, e.Message)
	}
}

// FieldErrors is everything that is wrong with one object, in the order of
// its fields. It matches [ErrInvalid]. An empty list is not an error: use
// [FieldErrors.Err] to return one.
type FieldErrors []FieldError

// Error returns the entries, separated by semicolons.
func (e FieldErrors) Error() string {
	parts := make([]string, len(e))
	for i, f := range e {
		parts[i] = f.Error()
	}
	return strings.Join(parts, "; ")
}

// Is reports that a FieldErrors is an [ErrInvalid].
func (e FieldErrors) Is(target error) bool { return target == ErrInvalid }

// Err returns e as an error, or nil when it is empty.
func (e FieldErrors) Err() error {
	if len(e) == 0 {
		return nil
	}
	return e
}

// Validate checks one resource by itself, as Calico's clients do before they
// write: metadata, the fields' values, and what the fields demand of each
// other. [SetDefaults] comes first: an unset field that has a default is not
// forgiven here. What can only be judged beside other objects is the business
// of [ValidateAgainst].
//
// v is a pointer to a v3 type of a kind that routerd knows, *[Node] or
// *[WorkloadEndpoint]. The error is a [FieldErrors] unless v is something
// else.
func Validate(v any) error {
	c := &checker{}
	if m := Meta(v); m != nil {
		c.meta(m, nameRuleOf(v))
	}
	switch o := v.(type) {
	case *v3.IPPool:
		c.ipPool(&o.Spec)
	case *v3.IPReservation:
		c.ipReservation(&o.Spec)
	case *v3.BGPPeer:
		c.bgpPeer(&o.Spec)
		c.peerLink(o.Annotations, &o.Spec)
		c.listenRange(o.Annotations, &o.Spec)
		c.tcpAO(o.Annotations, &o.Spec)
		checkAnnotation(c, o.Annotations, AnnotationBFD, ParseBFD)
	case *v3.BGPConfiguration:
		checkAnnotation(c, o.Annotations, AnnotationBFD, ParseBFD)
		checkAnnotation(c, o.Annotations, AnnotationReflectors, ParseReflectors)
		checkAnnotation(c, o.Annotations, AnnotationBMP, ParseBMP)
		checkAnnotation(c, o.Annotations, AnnotationServiceCIDRs, parseSwitch)
		checkAnnotation(c, o.Annotations, AnnotationServicesNeedEndpoints, parseSwitch)
		c.bgpConfiguration(o.Name, &o.Spec)
	case *v3.BGPFilter:
		c.bgpFilter(&o.Spec)
	case *v3.FelixConfiguration:
		c.felixConfiguration(&o.Spec)
	case *v3.ClusterInformation:
		c.clusterInformation(o)
	case *v3.Tier:
		c.tier(o)
	case *v3.Profile:
		c.profile(o)
	case *v3.IPAMConfiguration:
		c.onlyDefault(KindIPAMConfiguration, o.Name)
		c.reject(o.Spec.MaxBlocksPerHost < 0, "spec.maxBlocksPerHost", o.Spec.MaxBlocksPerHost, "must be 0, for no limit, or more")
	case *v3.KubeControllersConfiguration:
		c.onlyDefault(KindKubeControllersConfiguration, o.Name)
		c.kubeControllers(&o.Spec)
	case *v3.CalicoNodeStatus:
		c.nodeStatus(&o.Spec)
	case *v3.BlockAffinity:
	case *Node:
		c.node(o)
		c.drain(o.Annotations)
	case *WorkloadEndpoint:
		c.workloadEndpoint(o)
	default:
		if !c.policyKind(v) {
			return fmt.Errorf("validate %T: not a resource that manifests can hold", v)
		}
	}
	return c.errs.Err()
}

// checker gathers the errors of one object.
type checker struct{ errs FieldErrors }

func (c *checker) add(field string, value any, format string, args ...any) {
	c.errs = append(c.errs, FieldError{Field: field, Value: value, Message: fmt.Sprintf(format, args...)})
}

// reject is add for a value that breaks a rule.
func (c *checker) reject(broken bool, field string, value any, format string, args ...any) {
	if broken {
		c.add(field, value, format, args...)
	}
}

// each checks the entries of a list.
func each[T any](field string, list []T, check func(field string, entry T)) {
	for i, v := range list {
		check(index(field, i), v)
	}
}

// checkAnnotation checks an annotation, if it is there, by what reads it.
func checkAnnotation[T any](c *checker, annotations map[string]string, name string, parse func(string) (T, error)) {
	if v, ok := annotations[name]; ok {
		if _, err := parse(v); err != nil {
			c.add("metadata.annotations["+name+"]", v, "%v", err)
		}
	}
}

// oneOf accepts the empty string too, which stands for "not set".
func (c *checker) oneOf(field, value string, allowed ...string) {
	c.reject(value != "" && !slices.Contains(allowed, value), field, value, "must be one of %s", strings.Join(allowed, ", "))
}

func (c *checker) between(field string, value, low, high int) {
	c.reject(value < low || value > high, field, value, "must be a number from %d to %d", low, high)
}

// cidr parses a prefix and refuses host bits. The result is valid only
// without error.
func (c *checker) cidr(field, value string) netip.Prefix {
	p := c.anyCIDR(field, value)
	if p.IsValid() && p != p.Masked() {
		c.add(field, value, "has host bits set; write %s", p.Masked())
		return netip.Prefix{}
	}
	return p
}

// anyCIDR parses a prefix with or without host bits.
func (c *checker) anyCIDR(field, value string) netip.Prefix {
	p, err := netip.ParsePrefix(value)
	if err == nil && !p.Addr().Is4In6() {
		return p
	}
	if a, err := netip.ParseAddr(value); err == nil && a.Zone() == "" {
		c.add(field, value, "must be a CIDR, not an address; write %s for this one address", netip.PrefixFrom(a, a.BitLen()))
	} else if value == "" {
		c.add(field, nil, "required: a CIDR such as 192.168.0.0/16 or fd00:10::/48")
	} else {
		c.add(field, value, "must be a CIDR such as 192.168.0.0/16 or fd00:10::/48")
	}
	return netip.Prefix{}
}

// net accepts a CIDR or an address, as policy rules do.
func (c *checker) net(field, value string) netip.Prefix {
	if a, err := netip.ParseAddr(value); err == nil && a.Zone() == "" {
		return netip.PrefixFrom(a, a.BitLen())
	}
	p, err := netip.ParsePrefix(value)
	c.reject(err != nil, field, value, "must be a CIDR or an address, such as 10.0.0.0/8 or 10.0.0.1")
	return p
}

func (c *checker) nets(field string, list []string) {
	for i, n := range list {
		c.net(index(field, i), n)
	}
}

// family is "IPv4", "IPv6" or "" for either.
func (c *checker) addr(field, value, family string) netip.Addr {
	example := "10.0.0.1"
	if family == "IPv6" {
		example = "fd00::1"
	}
	a, err := netip.ParseAddr(value)
	if err != nil || a.Zone() != "" || a.Is4In6() {
		c.add(field, value, "must be an %s address such as %s, without a prefix length", orIP(family), example)
		return netip.Addr{}
	}
	if family != "" && familyName(a) != family {
		c.add(field, value, "is an %s address; this field takes %s, such as %s", familyName(a), family, example)
		return netip.Addr{}
	}
	return a
}

// optAddr is addr for a field that may be empty.
func (c *checker) optAddr(field, value, family string) {
	if value != "" {
		c.addr(field, value, family)
	}
}

// addrOrCIDR accepts an address with or without the length of its subnet.
func (c *checker) addrOrCIDR(field, value, family string) {
	s, _, _ := strings.Cut(value, "/")
	if s == value {
		c.optAddr(field, value, family)
		return
	}
	p, err := netip.ParsePrefix(value)
	switch {
	case err != nil:
		c.add(field, value, "must be an %s address with the length of its subnet, such as %s", orIP(family), exampleNodeAddress(family))
	case family != "" && familyName(p.Addr()) != family:
		c.add(field, value, "is %s; this field takes %s, such as %s", familyName(p.Addr()), family, exampleNodeAddress(family))
	}
}

func exampleNodeAddress(family string) string {
	if family == "IPv6" {
		return "fd00:1::11/64"
	}
	return "10.1.0.11/24"
}

func (c *checker) mac(field, value string) {
	if value == "" {
		return
	}
	if hw, err := net.ParseMAC(value); err != nil || len(hw) != 6 {
		c.add(field, value, "must be a MAC address of six bytes, such as ee:ee:ee:ee:ee:ee")
	}
}

func (c *checker) interfaceName(field, value string) {
	c.reject(len(value) > MaxInterfaceName || strings.ContainsAny(value, "/ \t\n") || value == "." || value == "..",
		field, value, "must be a network interface's name: at most %d characters without slashes or spaces", MaxInterfaceName)
}

// workloadInterface refuses the name of an interface that is the host's own.
func (c *checker) workloadInterface(field, value string) {
	c.interfaceName(field, value)
	c.reject(HostInterface(value), field, value, "is an interface of the host itself; give the host's end of the workload's wire, such as cali1234")
}

func familyName(a netip.Addr) string {
	if a.Is4() {
		return "IPv4"
	}
	return "IPv6"
}

func orIP(family string) string {
	if family == "" {
		return "IP"
	}
	return family
}

func index(field string, i int) string { return fmt.Sprintf("%s[%d]", field, i) }
