package filter

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"github.com/routerd/routerd/dataplane"
)

// ProtocolName returns the usual name of an IP protocol number, or the number.
func ProtocolName(p uint8) string {
	switch p {
	case 1:
		return "icmp"
	case 6:
		return "tcp"
	case 17:
		return "udp"
	case 58:
		return "icmpv6"
	case 132:
		return "sctp"
	case 136:
		return "udplite"
	}
	return strconv.Itoa(int(p))
}

// ParseProtocol reads what [ProtocolName] writes, in any case, or a number from
// 1 to 255.
func ParseProtocol(s string) (uint8, error) {
	for _, p := range []uint8{1, 6, 17, 58, 132, 136} {
		if strings.EqualFold(s, ProtocolName(p)) {
			return p, nil
		}
	}
	n, err := strconv.ParseUint(s, 10, 8)
	if err != nil || n == 0 {
		return 0, fmt.Errorf("protocol %q: want tcp, udp, icmp, icmpv6, sctp, udplite or a number from 1 to 255", s)
	}
	return uint8(n), nil
}

// Describe says for people what a rule matches. Sets are called by what their
// members have in common.
func (r *Ruleset) Describe(rule Rule) string {
	var parts []string
	add := func(format string, args ...any) { parts = append(parts, fmt.Sprintf(format, args...)) }
	switch rule.Family {
	case dataplane.IPv4:
		add("IPv4")
	case dataplane.IPv6:
		add("IPv6")
	}
	if rule.Protocol != 0 {
		add("%s", ProtocolName(rule.Protocol))
	}
	if rule.NotProtocol != 0 {
		add("not %s", ProtocolName(rule.NotProtocol))
	}
	if rule.ICMP.Set {
		add("%s", rule.ICMP)
	}
	if rule.NotICMP.Set {
		add("not %s", rule.NotICMP)
	}
	for _, s := range []struct {
		word string
		side Side
	}{{"from", rule.Source}, {"to", rule.Destination}} {
		if text := r.describeSide(s.side); text != "" {
			add("%s %s", s.word, text)
		}
	}
	if len(parts) == 0 {
		return "everything"
	}
	return strings.Join(parts, " ")
}

func (m ICMP) String() string {
	if m.CodeSet {
		return fmt.Sprintf("type %d code %d", m.Type, m.Code)
	}
	return fmt.Sprintf("type %d", m.Type)
}

func (r *Ruleset) describeSide(s Side) string {
	var parts []string
	set := func(word string, id SetID) {
		if id == "" {
			return
		}
		name := r.Sets[id].Origin
		if name == "" {
			name = string(id)
		}
		parts = append(parts, word+"("+name+")")
	}
	if s.Nets != nil {
		parts = append(parts, listOf(s.Nets))
	}
	if s.NotNets != nil {
		parts = append(parts, "not "+listOf(s.NotNets))
	}
	set("", s.Set)
	set("not ", s.NotSet)
	ports := func(word string, ranges []PortRange, id SetID) {
		var list []string
		for _, p := range ranges {
			list = append(list, p.String())
		}
		if id != "" {
			list = append(list, "("+r.Sets[id].Origin+")")
		}
		if len(list) > 0 {
			parts = append(parts, word+"port "+strings.Join(list, ","))
		}
	}
	ports("", s.Ports, s.PortSet)
	ports("not ", s.NotPorts, s.NotPortSet)
	return strings.Join(parts, " and ")
}

func listOf(nets []netip.Prefix) string {
	var list []string
	for _, p := range nets {
		list = append(list, p.String())
	}
	return strings.Join(list, ",")
}
