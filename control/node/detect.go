package node

import (
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"

	"github.com/routerd/routerd/dataplane"
)

// Detected is the address that a method chose.
type Detected struct {
	Prefix netip.Prefix // the address with its subnet's length
	Link   string
	Method string
}

// ErrNoAddress says that no address of the host fits the method.
var ErrNoAddress = errors.New("no address found")

// virtualLinks are devices of container runtimes, hypervisors and of routerd
// itself: what first-found never takes. The list is Calico's, with podman's
// and routerd's names added.
func virtualLinks() *regexp.Regexp {
	return regexp.MustCompile(`^(docker.*|podman.*|cbr.*|dummy.*|virbr.*|lxcbr.*|veth.*|lo|cali.*|tunl.*|flannel.*|kube-ipvs.*|cni.*|vxlan\.calico|vxlan-v6\.calico|wireguard\.cali|wg-v6\.cali|nodelocaldns|br-.*)$`)
}

// Detect finds this host's address of a family.
//
// The method is one of first-found, interface=REGEX[,REGEX…],
// skip-interface=REGEX[,REGEX…], can-reach=ADDRESS, cidr=CIDR[,CIDR…], or an
// address, with or without its prefix length, that the host has. Of the
// addresses that fit, the first is taken: by device index, primary before
// secondary.
func Detect(u dataplane.Underlay, method string, f dataplane.Family) (Detected, error) {
	name, arg, _ := strings.Cut(method, "=")
	var fits func(candidate) bool
	var err error
	switch name {
	case "", "first-found":
		skip := virtualLinks()
		fits = func(c candidate) bool { return !skip.MatchString(c.link.Name) }
	case "interface":
		fits, err = byLink(arg, func(matched bool) bool { return matched })
	case "skip-interface":
		skip := virtualLinks()
		fits, err = byLink(arg, func(matched bool) bool { return !matched })
		if err == nil {
			inner := fits
			fits = func(c candidate) bool { return inner(c) && !skip.MatchString(c.link.Name) }
		}
	case "can-reach":
		fits, err = canReach(u, arg, f)
	case "cidr":
		fits, err = byCIDR(arg)
	default:
		fits, err = byAddress(method)
	}
	if err != nil {
		return Detected{}, fmt.Errorf("address method %q: %w", method, err)
	}
	cs := candidates(u, f)
	for _, c := range cs {
		if fits(c) {
			return Detected{Prefix: c.addr.Prefix, Link: c.link.Name, Method: method}, nil
		}
	}
	return Detected{}, fmt.Errorf("address method %q: %w: this host has %s; set address.%s to interface=REGEX, skip-interface=REGEX, cidr=CIDR, can-reach=ADDRESS or the address itself",
		method, ErrNoAddress, describe(cs, f), strings.ToLower(f.String()))
}

// errNoRoute says that the host has no route to an address that it is to reach.
var errNoRoute = errors.New("this host has no route")

// CheckMethod reports whether a method for [Detect] is well formed, whatever
// the host.
func CheckMethod(method string, f dataplane.Family) error {
	_, err := Detect(dataplane.Underlay{}, method, f)
	if errors.Is(err, ErrNoAddress) || errors.Is(err, errNoRoute) {
		return nil
	}
	return err
}

type candidate struct {
	link dataplane.UnderlayLink
	addr dataplane.UnderlayAddress
}

// candidates lists the addresses that other hosts might reach, best first.
func candidates(u dataplane.Underlay, f dataplane.Family) []candidate {
	links := slices.Clone(u.Links)
	slices.SortStableFunc(links, func(a, b dataplane.UnderlayLink) int { return a.Index - b.Index })
	var primary, secondary []candidate
	for _, l := range links {
		if l.Loopback || !l.Up {
			continue
		}
		for _, a := range u.Addresses {
			if a.Link != l.Name || dataplane.FamilyOf(a.Prefix.Addr()) != f {
				continue
			}
			if a.LinkScope || a.Deprecated || a.Tentative || a.Prefix.Addr().IsLinkLocalUnicast() {
				continue
			}
			if a.Secondary {
				secondary = append(secondary, candidate{l, a})
			} else {
				primary = append(primary, candidate{l, a})
			}
		}
	}
	return append(primary, secondary...)
}

func describe(cs []candidate, f dataplane.Family) string {
	if len(cs) == 0 {
		return fmt.Sprintf("no %s address on a device that is up", f)
	}
	var parts []string
	for _, c := range cs {
		parts = append(parts, fmt.Sprintf("%s on %s", c.addr.Prefix, c.link.Name))
	}
	return strings.Join(parts, ", ")
}

func byLink(arg string, want func(matched bool) bool) (func(candidate) bool, error) {
	var res []*regexp.Regexp
	for s := range strings.SplitSeq(arg, ",") {
		// Anchored: "eth1" must not also mean "eth10".
		re, err := regexp.Compile("^(?:" + strings.TrimSpace(s) + ")$")
		if err != nil {
			return nil, fmt.Errorf("want regular expressions of device names: %w", err)
		}
		res = append(res, re)
	}
	if strings.TrimSpace(arg) == "" {
		return nil, errors.New("want a regular expression of device names, such as interface=eth.*")
	}
	return func(c candidate) bool {
		return want(slices.ContainsFunc(res, func(re *regexp.Regexp) bool { return re.MatchString(c.link.Name) }))
	}, nil
}

func byCIDR(arg string) (func(candidate) bool, error) {
	var cidrs []netip.Prefix
	for s := range strings.SplitSeq(arg, ",") {
		p, err := netip.ParsePrefix(strings.TrimSpace(s))
		if err != nil {
			return nil, fmt.Errorf("want a CIDR, such as cidr=10.0.0.0/8: %w", err)
		}
		cidrs = append(cidrs, p)
	}
	return func(c candidate) bool {
		return slices.ContainsFunc(cidrs, func(p netip.Prefix) bool { return p.Contains(c.addr.Prefix.Addr()) })
	}, nil
}

func byAddress(arg string) (func(candidate) bool, error) {
	if p, err := netip.ParsePrefix(arg); err == nil {
		return func(c candidate) bool { return c.addr.Prefix == p }, nil
	}
	a, err := netip.ParseAddr(arg)
	if err != nil {
		return nil, errors.New("want first-found, interface=, skip-interface=, can-reach=, cidr=, or an address")
	}
	return func(c candidate) bool { return c.addr.Prefix.Addr() == a }, nil
}

// canReach takes the device that the longest matching route to an address
// uses.
func canReach(u dataplane.Underlay, arg string, f dataplane.Family) (func(candidate) bool, error) {
	dst, err := netip.ParseAddr(arg)
	if err != nil {
		return nil, fmt.Errorf("want an address, such as can-reach=10.0.0.1: %w", err)
	}
	if dataplane.FamilyOf(dst) != f {
		return nil, fmt.Errorf("%s is not an %s address", dst, f)
	}
	best := -1
	for i, r := range u.Routes {
		if !r.Prefix.Contains(dst) {
			continue
		}
		if best < 0 || r.Prefix.Bits() > u.Routes[best].Prefix.Bits() ||
			r.Prefix.Bits() == u.Routes[best].Prefix.Bits() && r.Metric < u.Routes[best].Metric {
			best = i
		}
	}
	if best < 0 {
		return nil, fmt.Errorf("%w to %s", errNoRoute, dst)
	}
	r := u.Routes[best]
	return func(c candidate) bool {
		if c.link.Name != r.Link {
			return false
		}
		// The kernel takes the source from the subnet of the gateway, or of
		// the destination itself, where the device has several.
		towards := dst
		if r.Gateway.IsValid() {
			towards = r.Gateway
		}
		if c.addr.Prefix.Contains(towards) {
			return true
		}
		return !slices.ContainsFunc(u.Addresses, func(a dataplane.UnderlayAddress) bool {
			return a.Link == r.Link && a.Prefix.Contains(towards)
		})
	}, nil
}
