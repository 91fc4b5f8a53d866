package crd

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Rule is a rule of a definition in CEL, by which the API server judges a value,
// and what it answers when the rule does not hold.
type Rule struct {
	Rule       string `json:"rule"`
	Message    string `json:"message"`
	Expression string `json:"messageExpression,omitempty"` // of the message, where that names values
	Field      string `json:"fieldPath,omitempty"`         // that the message is about, from the value: ".spec.order"
}

// limits adds to a definition's schema what validation says of single fields.
type limits struct {
	root *Schema
	errs []error
}

// at returns the schema of a field, such as spec.exportV4[].cidr.
func (l *limits) at(path string) *Schema {
	s := l.root
	for name := range strings.SplitSeq(path, ".") {
		name, items := strings.CutSuffix(name, "[]")
		if s = s.Properties[name]; s != nil && items {
			s = s.Items
		}
		if s == nil {
			l.errs = append(l.errs, fmt.Errorf("no field %s", path))
			return &Schema{}
		}
	}
	return s
}

func (s *Schema) require(names ...string) { s.Required = append(s.Required, names...) }

func (s *Schema) between(low, high int64) *Schema {
	s.Minimum, s.Maximum = &low, &high
	return s
}

// rule adds a rule about the value itself.
func (s *Schema) rule(rule, message string) { s.ruleFor("", rule, message) }

// ruleFor adds a rule about a member of the value.
func (s *Schema) ruleFor(field, rule, message string) {
	s.Rules = append(s.Rules, Rule{Rule: rule, Message: message, Field: field})
}

// explain replaces the message of the last rule by what a CEL expression says.
func (s *Schema) explain(expression string) { s.Rules[len(s.Rules)-1].Expression = expression }

// oneOf takes the values, and the empty text, which stands for "not set".
func (s *Schema) oneOf(values ...string) { s.exactly(append(values, "")...) }

// exactly takes nothing but the values.
func (s *Schema) exactly(values ...string) {
	for _, v := range values {
		s.Enum = append(s.Enum, v)
	}
}

// maxText bounds texts of which the longest that is allowed is shorter: it bounds
// what the rules about them cost, and leaves the message to these.
const maxText = 64

// maxEntries bounds lists whose entries have rules. The API's etcd takes 1.5 MiB of one
// object: more than so many that say something do not fit in.
const maxEntries = 1 << 16

// oneOfAnyCase is oneOf for values that are compared without regard to case.
func (s *Schema) oneOfAnyCase(values ...string) {
	s.MaxLength = maxText
	s.rule(fmt.Sprintf("self.matches('^(?i)(%s)?$')", strings.Join(values, "|")), "must be one of "+strings.Join(values, ", "))
}

// namePattern is a DNS-1123 subdomain.
const namePattern = `^[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`

// name takes the name of an object, or nothing.
func (s *Schema) name() {
	s.MaxLength = 253
	s.rule("self == '' || self.matches('"+namePattern+"')", "must be the name of an object: lower case letters, digits, '-' and '.'")
}

// names is for a list of names. A rule for each entry would cost more than the API
// server allows where the list is not bounded.
func (s *Schema) names() {
	s.Items.MaxLength = 253
	s.Items.Pattern = namePattern
}

// cidr takes a CIDR without host bits, of a family if one is named, or nothing.
func (s *Schema) cidr(family string) {
	s.MaxLength = maxText
	s.rule("self == '' || isCIDR(self)", "must be a CIDR such as 192.168.0.0/16 or fd00:10::/48")
	s.explain("isIP(self) ? 'must be a CIDR, not an address; write ' + self + (ip(self).family() == 4 ? '/32' : '/128') + ' for this one address' : 'must be a CIDR such as 192.168.0.0/16 or fd00:10::/48'")
	// What masked() makes is taken for unbounded: a message with it would cost too much.
	s.rule("!isCIDR(self) || cidr(self).ip() == cidr(self).masked().ip()", "has host bits set; write the network's own address, such as 10.0.0.0/16 for 10.0.0.1/16")
	if n, other := familyNumber(family); n != 0 {
		s.rule(fmt.Sprintf("!isCIDR(self) || cidr(self).ip().family() == %d", n), fmt.Sprintf("is %s; this list takes %s", other, family))
	}
}

// addr takes an address, of a family if one is named, or nothing.
func (s *Schema) addr(family string) {
	s.MaxLength = maxText
	example := "10.0.0.1"
	if family == "IPv6" {
		example = "fd00::1"
	}
	s.rule("self == '' || isIP(self)", fmt.Sprintf("must be an %s address such as %s, without a prefix length", cmp.Or(family, "IP"), example))
	if n, other := familyNumber(family); n != 0 {
		s.rule(fmt.Sprintf("!isIP(self) || ip(self).family() == %d", n), fmt.Sprintf("is an %s address; this field takes %s, such as %s", other, family, example))
	}
}

func familyNumber(family string) (n int, other string) {
	switch family {
	case "IPv4":
		return 4, "IPv6"
	case "IPv6":
		return 6, "IPv4"
	}
	return 0, ""
}

// nets takes CIDRs and addresses, with or without host bits. Formats cost nothing,
// and there are policies with hundreds of thousands.
func (s *Schema) nets() { s.Items.net() }

func (s *Schema) net() {
	s.AnyOf = []*Schema{{Format: "cidr"}, {Format: "ipv4"}, {Format: "ipv6"}}
}

// addrs takes addresses.
func (s *Schema) addrs() { s.Items.AnyOf = []*Schema{{Format: "ipv4"}, {Format: "ipv6"}} }

// interfaceGlob takes an interface's name with wildcards, or nothing.
func (s *Schema) interfaceGlob() {
	s.MaxLength = maxText / 2
	s.rule("self.matches('^[a-zA-Z0-9_.*?-]{0,15}$')", "must be an interface's name of at most 15 characters, with * and ? as wildcards, such as docker*")
}

// duration takes a time that is not negative.
func (s *Schema) duration() {
	s.MaxLength = maxText
	s.rule("duration(self) >= duration('0s')", "must be a time such as 90s or 1h30m and not negative; 0s turns it off where that is possible")
}

// protocolNames are numorstring's.
func protocolNames() []string { return []string{"TCP", "UDP", "ICMP", "ICMPv6", "SCTP", "UDPLite"} }

// protocol takes a protocol's number or its name.
func (s *Schema) protocol() {
	s.between(1, 255)
	s.Pattern = "^(" + strings.Join(protocolNames(), "|") + "|[0-9]+)$"
}

// hasPorts says in CEL that a protocol, a number or a name, has ports.
func hasPorts(protocol string) string {
	return fmt.Sprintf("(%[1]s in ['TCP', 'UDP', 'SCTP', '6', '17', '132'] || %[1]s in [6, 17, 132])", protocol)
}

// set says in CEL that members of self are there and not empty.
func set(names ...string) string {
	var out []string
	for _, n := range names {
		out = append(out, "has(self."+n+") && self."+n+" != ''")
	}
	return strings.Join(out, " && ")
}

// check says whether each rule can be shown to users: the API refuses one that names
// a field that is not there.
func (s *Schema) check(path string) (errs []error) {
	for _, r := range s.Rules {
		field := s
		for name := range strings.SplitSeq(strings.TrimPrefix(r.Field, "."), ".") {
			name = strings.TrimSuffix(strings.TrimPrefix(name, "['"), "']")
			if name != "" && field != nil {
				field = field.Properties[name]
			}
		}
		if field == nil || r.Message == "" {
			errs = append(errs, fmt.Errorf("%s: rule %s is about %q and says %q", path, r.Rule, r.Field, r.Message))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(s.Properties)) {
		errs = append(errs, s.Properties[name].check(path+"."+name)...)
	}
	if s.Items != nil {
		errs = append(errs, s.Items.check(path+"[]")...)
	}
	return errs
}
