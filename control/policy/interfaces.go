package policy

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/routerd/routerd/store"
)

// interfaces says which of the host's interfaces can be a workload's.
type interfaces struct {
	prefixes []string        // of workloads' names, beside those that ADD gives
	own      map[string]bool // interfaces of the host itself, besides those that are by their names
}

// refuses says why no workload endpoint counts on an interface, "" if one does.
func (i *interfaces) refuses(name string) string {
	switch {
	case i.host(name):
		return fmt.Sprintf("interface %s is the host's own: no workload endpoint counts on it", name)
	case strings.HasPrefix(name, store.WorkloadInterfacePrefix), hasAnyPrefix(name, i.prefixes):
		return ""
	}
	return fmt.Sprintf("interface %s is not a workload's: the names of those begin with %s (FelixConfiguration, interfacePrefix)",
		name, strings.Join(append([]string{store.WorkloadInterfacePrefix}, i.prefixes...), ", "))
}

func (i *interfaces) host(name string) bool { return store.HostInterface(name) || i.own[name] }

// usable returns the prefixes that are workloads' alone, and why the others are
// not. What ADD itself gives is never refused: who gives a device of his own
// such a name may not open the host to its workloads.
func (i *interfaces) usable(prefixes []string) (good []string, refused []string) {
	for _, p := range prefixes {
		of, _ := store.HostInterfaceWith(p)
		for name := range i.own {
			if strings.HasPrefix(name, p) && (of == "" || name < of) {
				of = name
			}
		}
		switch {
		case strings.HasPrefix(p, store.WorkloadInterfacePrefix):
			good = append(good, p)
		case len(p) > store.MaxInterfaceName:
			refused = append(refused, fmt.Sprintf("interfacePrefix %.20q… is longer than the %d bytes of an interface's name", p, store.MaxInterfaceName))
		case of != "":
			refused = append(refused, fmt.Sprintf("interfacePrefix %s is not used: interface %s is the host's own", p, of))
		default:
			good = append(good, p)
		}
	}
	if len(good) == 0 {
		good = []string{store.WorkloadInterfacePrefix}
	}
	return good, refused
}

func hasAnyPrefix(name string, prefixes []string) bool {
	return slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(name, p) })
}

// ownInterfaces returns the interfaces of the host itself: the links that cannot be
// workloads', and those with an address of the host's Node.
func ownInterfaces(links map[string]bool, addrs map[string][]netip.Addr, node []netip.Prefix) map[string]bool {
	own := make(map[string]bool, len(links))
	for name := range links {
		own[name] = true
	}
	for name, list := range addrs {
		if slices.ContainsFunc(list, func(a netip.Addr) bool { return slices.Contains(node, netip.PrefixFrom(a, a.BitLen())) }) {
			own[name] = true
		}
	}
	return own
}
