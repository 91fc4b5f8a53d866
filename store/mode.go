package store

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
)

// What Calico uses where FelixConfiguration does not say.
const (
	DefaultVXLANVNI  = 4096
	DefaultVXLANPort = 4789
)

// Mode is how a pool is carried, with the numbers on which both ends of a
// tunnel must agree. Modes are comparable.
type Mode struct {
	Encapsulation Encapsulation
	VNI           uint32 // of VXLAN and VXLANCrossSubnet; else 0
	Port          uint16 // as VNI
}

// vxlan reports whether some packets go in VXLAN.
func (e Encapsulation) vxlan() bool { return e == VXLAN || e == VXLANCrossSubnet }

// NewMode returns the mode of a pool in a cluster with these numbers.
func NewMode(e Encapsulation, vni uint32, port uint16) Mode {
	if !e.vxlan() {
		return Mode{Encapsulation: e}
	}
	return Mode{e, vni, port}
}

// VXLANNumbers returns the VNI and the port that FelixConfiguration objects
// ask for, weakest first. Values out of range count as not set; validation
// refuses them where they are written.
func VXLANNumbers(specs ...*v3.FelixConfigurationSpec) (vni uint32, port uint16) {
	vni, port = DefaultVXLANVNI, DefaultVXLANPort
	for _, f := range specs {
		if f == nil {
			continue
		}
		if v := f.VXLANVNI; v != nil && *v > 0 && *v < 1<<24 {
			vni = uint32(*v)
		}
		if v := f.VXLANPort; v != nil && *v > 0 && *v < 1<<16 {
			port = uint16(*v)
		}
	}
	return vni, port
}

// IsSystemPort reports whether a UDP port is one of those that IANA assigns to services
// of systems (RFC 6335 section 6): what a Node publishes of VXLAN at one counts only
// where FelixConfiguration asks for it.
func IsSystemPort(port uint16) bool { return port < 1024 }

// String returns the mode as nodes publish it: Direct, IPIP, IPIPCrossSubnet,
// VXLAN/VNI/PORT or VXLANCrossSubnet/VNI/PORT.
func (m Mode) String() string {
	if !m.Encapsulation.vxlan() {
		return string(m.Encapsulation)
	}
	return fmt.Sprintf("%s/%d/%d", m.Encapsulation, m.VNI, m.Port)
}

// ParseMode reads what [Mode.String] returns.
func ParseMode(s string) (Mode, error) {
	name, rest, numbers := strings.Cut(s, "/")
	e, err := ParseEncapsulation(name)
	if err != nil {
		return Mode{}, fmt.Errorf("parse mode %q: %w", s, err)
	}
	if e.vxlan() != numbers {
		return Mode{}, fmt.Errorf("parse mode %q: want a VNI and a port with VXLAN, and only there, such as VXLAN/4096/4789", s)
	}
	if !numbers {
		return Mode{Encapsulation: e}, nil
	}
	first, second, _ := strings.Cut(rest, "/")
	vni, err1 := strconv.ParseUint(first, 10, 24)
	port, err2 := strconv.ParseUint(second, 10, 16)
	m := Mode{e, uint32(vni), uint16(port)}
	if err1 != nil || err2 != nil || vni == 0 || port == 0 || m.String() != s {
		return Mode{}, fmt.Errorf("parse mode %q: want a VNI from 1 to 16777215 and a port from 1 to 65535, such as VXLAN/4096/4789", s)
	}
	return m, nil
}

// Encaps lists the encapsulations, as dataplane.Encap's String has them, in which packets
// of an IPv4 or an IPv6 pool may travel in this mode; which of those between
// two nodes depends on the nodes' addresses.
func (m Mode) Encaps() []string {
	var out []string
	if m.Encapsulation != IPIP && m.Encapsulation != VXLAN {
		out = append(out, "direct")
	}
	switch m.Encapsulation {
	case IPIP, IPIPCrossSubnet:
		out = append(out, "ipip", "ip6tnl")
	case VXLAN, VXLANCrossSubnet:
		out = append(out, fmt.Sprintf("vxlan/%d/%d", m.VNI, m.Port), fmt.Sprintf("vxlan6/%d/%d", m.VNI, m.Port))
	case Direct:
	}
	slices.Sort(out)
	return out
}
