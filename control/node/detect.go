package node

import (
	"cmp"
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

// Errors of [Detect] that callers branch on.
var (
	// ErrNoAddress says that no address of the host fits the method.
	ErrNoAddress = errors.New("no address found")
	// ErrAmbiguous says that several fit it equally well.
	ErrAmbiguous = errors.New("no telling which address")
)

// virtualLinks are devices of container runtimes, hypervisors and of routerd
// itself: what first-found never takes. The list is Calico's, with podman's,
// kube-router's and routerd's names added.
func virtualLinks() *regexp.Regexp {
	return regexp.MustCompile(`^(docker.*|podman.*|cbr.*|dummy.*|virbr.*|lxcbr.*|veth.*|lo|cali.*|tunl.*|flannel.*|kube-ipvs.*|kube-bridge|kube-dummy-if|cni.*|vxlan\.calico.*|vxlan-v6\.calico|ip6tnl0|wireguard\.cali|wg-v6\.cali|nodelocaldns|br-.*)$`)
}

// Virtual reports whether a device of that name is one of a container runtime, a hypervisor or
// routerd itself.
func Virtual(name string) bool { return virtualLinks().MatchString(name) }

// Detect finds this host's address of a family.
//
// The method is one of first-found, interface=REGEX[,REGEX…],
// skip-interface=REGEX[,REGEX…], can-reach=ADDRESS, cidr=CIDR[,CIDR…], or an
// address, with or without its prefix length, that the host has. Of the
// addresses that fit, the best is taken: by the order of the method's list,
// then primary before secondary before one that stands alone (a /32, such as
// a virtual address that moves between hosts), then the one that the kernel
// sends from towards most peers, which are the addresses of other nodes, then
// the one that it sends from by its default route. If several are still
// equally good, nobody but the operator knows: the error matches
// [ErrAmbiguous] and names them.
func Detect(u dataplane.Underlay, method string, f dataplane.Family, peers ...netip.Addr) (Detected, error) {
	fits, err := parseMethod(u, method, f)
	if err != nil {
		return Detected{}, fmt.Errorf("address method %q: %w", method, err)
	}
	all := candidates(u, f)
	cs := rank(u, all, fits, f, peers)
	setting := "address." + strings.ToLower(f.String())
	if len(cs) == 0 {
		return Detected{}, fmt.Errorf("address method %q: %w: this host has %s; set %s to interface=REGEX, skip-interface=REGEX, cidr=CIDR, can-reach=ADDRESS or the address itself",
			method, ErrNoAddress, describe(all, f), setting)
	}
	if n := ties(cs); n > 1 {
		return Detected{}, fmt.Errorf("address method %q: %w: %s are equally good; set %s to one of them, such as interface=%s, or cidr=%s",
			method, ErrAmbiguous, describe(cs[:n], f), setting, cs[0].link.Name, cs[0].addr.Prefix.Masked())
	}
	return Detected{Prefix: cs[0].addr.Prefix, Link: cs[0].link.Name, Method: method}, nil
}

// fitting tells the place of a candidate in a method's list; negative: it does
// not fit.
type fitting func(candidate) int

// parseMethod reads a method.
func parseMethod(u dataplane.Underlay, method string, f dataplane.Family) (fitting, error) {
	skip := virtualLinks()
	name, arg, _ := strings.Cut(method, "=")
	switch name {
	case "", "first-found":
		return func(c candidate) int { return place(!skip.MatchString(c.link.Name)) }, nil
	case "interface":
		return byLink(arg)
	case "skip-interface":
		named, err := byLink(arg)
		if err != nil {
			return nil, err
		}
		return func(c candidate) int { return place(named(c) < 0 && !skip.MatchString(c.link.Name)) }, nil
	case "can-reach":
		return canReach(u, arg, f)
	case "cidr":
		return byCIDR(arg)
	case MethodInternal:
		return nil, errors.New("this host's Node in Kubernetes has no InternalIP, or the API has not said it yet: the kubelet writes it, by the name that nodeName has")
	}
	return byAddress(method)
}

func place(ok bool) int {
	if ok {
		return 0
	}
	return -1
}

// How well a candidate stands by what it is.
const (
	primary = iota
	secondary
	alone // without a subnet
)

// rank returns the candidates that fit with what they are judged by, best
// first; those equally good stay in the kernel's order.
func rank(u dataplane.Underlay, all []candidate, fits fitting, f dataplane.Family, peers []netip.Addr) []candidate {
	votes := map[netip.Addr]int{}
	for _, p := range peers {
		if dataplane.FamilyOf(p) == f {
			votes[source(u, p)]++
		}
	}
	away := source(u, unspecified(f))
	var cs []candidate
	for _, c := range all {
		c.place = fits(c)
		if c.place < 0 {
			continue
		}
		a := c.addr.Prefix.Addr()
		switch {
		case c.addr.Prefix.IsSingleIP():
			c.class = alone
		case c.addr.Secondary:
			c.class = secondary
		}
		c.votes, c.away = votes[a], a == away
		cs = append(cs, c)
	}
	slices.SortStableFunc(cs, compareCandidates)
	return cs
}

func compareCandidates(a, b candidate) int {
	if c := cmp.Or(cmp.Compare(a.place, b.place), cmp.Compare(a.class, b.class), cmp.Compare(b.votes, a.votes)); c != 0 || a.away == b.away {
		return c
	}
	if a.away {
		return -1
	}
	return 1
}

// ties returns how many of the best are equally good. Addresses of one subnet
// of one device are no tie: they differ in nothing, and the kernel's own order
// decides.
func ties(cs []candidate) int {
	n := 1
	for n < len(cs) && compareCandidates(cs[0], cs[n]) == 0 {
		n++
	}
	same := !slices.ContainsFunc(cs[:n], func(c candidate) bool {
		return c.link.Name != cs[0].link.Name || c.addr.Prefix.Masked() != cs[0].addr.Prefix.Masked()
	})
	if same {
		return 1
	}
	return n
}

func unspecified(f dataplane.Family) netip.Addr {
	if f == dataplane.IPv6 {
		return netip.IPv6Unspecified()
	}
	return netip.IPv4Unspecified()
}

// source returns the address that the kernel sends from towards dst when
// nothing else is said: the route's preferred source, else the first address
// of the device in the gateway's subnet, else its first. The unspecified
// address stands for the default route. It is invalid when no route leads
// there.
func source(u dataplane.Underlay, dst netip.Addr) netip.Addr {
	r, ok := routeTo(u, dst)
	if !ok {
		return netip.Addr{}
	}
	if r.Source.IsValid() {
		return r.Source
	}
	towards := dst
	if r.Gateway.IsValid() {
		towards = r.Gateway
	}
	first := netip.Addr{}
	for _, a := range u.Addresses {
		if a.Link != r.Link || !eligible(a, dataplane.FamilyOf(dst)) || a.Secondary {
			continue
		}
		if a.Prefix.Contains(towards) {
			return a.Prefix.Addr()
		}
		if !first.IsValid() {
			first = a.Prefix.Addr()
		}
	}
	return first
}

// routeTo returns the longest matching route.
func routeTo(u dataplane.Underlay, dst netip.Addr) (best dataplane.UnderlayRoute, ok bool) {
	for _, r := range u.Routes {
		if !r.Prefix.Contains(dst) || dst.IsUnspecified() && r.Prefix.Bits() != 0 {
			continue
		}
		if !ok || r.Prefix.Bits() > best.Prefix.Bits() || r.Prefix.Bits() == best.Prefix.Bits() && r.Metric < best.Metric {
			best, ok = r, true
		}
	}
	return best, ok
}

// errNoRoute says that the host has no route to an address that it is to reach.
var errNoRoute = errors.New("this host has no route")

// CheckMethod reports whether a method for [Detect] is well formed, whatever
// the host.
func CheckMethod(method string, f dataplane.Family) error {
	_, err := parseMethod(dataplane.Underlay{}, method, f)
	if err != nil && !errors.Is(err, errNoRoute) {
		return fmt.Errorf("address method %q: %w", method, err)
	}
	return nil
}

type candidate struct {
	link dataplane.UnderlayLink
	addr dataplane.UnderlayAddress

	// What [rank] judges by.
	place int  // in the method's list
	class int  // primary, secondary or alone
	votes int  // peers towards which the kernel sends from it
	away  bool // so does its default route
}

// eligible reports whether an address may stand for the host at all.
func eligible(a dataplane.UnderlayAddress, f dataplane.Family) bool {
	return dataplane.FamilyOf(a.Prefix.Addr()) == f && !a.LinkScope && !a.Deprecated && !a.Tentative && !a.Prefix.Addr().IsLinkLocalUnicast()
}

// candidates lists the addresses that other hosts might reach, by device index
// and in the kernel's order.
func candidates(u dataplane.Underlay, f dataplane.Family) []candidate {
	links := slices.Clone(u.Links)
	slices.SortStableFunc(links, func(a, b dataplane.UnderlayLink) int { return a.Index - b.Index })
	var cs []candidate
	for _, l := range links {
		if l.Loopback || !l.Up {
			continue
		}
		for _, a := range u.Addresses {
			if a.Link == l.Name && eligible(a, f) {
				cs = append(cs, candidate{link: l, addr: a})
			}
		}
	}
	return cs
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

func byLink(arg string) (fitting, error) {
	if strings.TrimSpace(arg) == "" {
		return nil, errors.New("want a regular expression of device names, such as interface=eth.*")
	}
	var res []*regexp.Regexp
	for s := range strings.SplitSeq(arg, ",") {
		// Anchored: "eth1" must not also mean "eth10".
		re, err := regexp.Compile("^(?:" + strings.TrimSpace(s) + ")$")
		if err != nil {
			return nil, fmt.Errorf("want regular expressions of device names: %w", err)
		}
		res = append(res, re)
	}
	return func(c candidate) int {
		return slices.IndexFunc(res, func(re *regexp.Regexp) bool { return re.MatchString(c.link.Name) })
	}, nil
}

func byCIDR(arg string) (fitting, error) {
	var cidrs []netip.Prefix
	for s := range strings.SplitSeq(arg, ",") {
		p, err := netip.ParsePrefix(strings.TrimSpace(s))
		if err != nil {
			return nil, fmt.Errorf("want a CIDR, such as cidr=10.0.0.0/8: %w", err)
		}
		cidrs = append(cidrs, p)
	}
	return func(c candidate) int {
		return slices.IndexFunc(cidrs, func(p netip.Prefix) bool { return p.Contains(c.addr.Prefix.Addr()) })
	}, nil
}

func byAddress(arg string) (fitting, error) {
	if p, err := netip.ParsePrefix(arg); err == nil {
		return func(c candidate) int { return place(c.addr.Prefix == p) }, nil
	}
	a, err := netip.ParseAddr(arg)
	if err != nil {
		return nil, errors.New("want first-found, interface=, skip-interface=, can-reach=, cidr=, or an address")
	}
	return func(c candidate) int { return place(c.addr.Prefix.Addr() == a) }, nil
}

// canReach takes the address that the kernel sends from towards another.
func canReach(u dataplane.Underlay, arg string, f dataplane.Family) (fitting, error) {
	dst, err := netip.ParseAddr(arg)
	if err != nil {
		return nil, fmt.Errorf("want an address, such as can-reach=10.0.0.1: %w", err)
	}
	if dataplane.FamilyOf(dst) != f {
		return nil, fmt.Errorf("%s is not an %s address", dst, f)
	}
	if _, ok := routeTo(u, dst); !ok {
		return nil, fmt.Errorf("%w to %s", errNoRoute, dst)
	}
	from := source(u, dst)
	return func(c candidate) int { return place(c.addr.Prefix.Addr() == from) }, nil
}
