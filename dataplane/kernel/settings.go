package kernel

import (
	"os"
	"path/filepath"
	"strconv"

	"github.com/routerd/routerd/dataplane"
)

// addSettings fills in those settings of devices that the underlay tells. Only
// devices with addresses are asked: they are few, while workloads' are many.
// What cannot be read stays zero, as on a host without IPv6.
func (k *Kernel) addSettings(u *dataplane.Underlay) error {
	asked := map[string]bool{}
	for _, a := range u.Addresses {
		asked[a.Link] = !isWorkload(a.Link)
	}
	return k.ns.do(func() error {
		all := readNumber("net/ipv4/conf/all/rp_filter")
		for i := range u.Links {
			l := &u.Links[i]
			if !asked[l.Name] {
				continue
			}
			// The larger of the two is in effect (ip-sysctl.rst of the kernel).
			l.RPFilter = max(all, readNumber("net/ipv4/conf/"+l.Name+"/rp_filter"))
			l.AcceptRA = readNumber("net/ipv6/conf/" + l.Name + "/accept_ra")
		}
		return nil
	})
}

func readNumber(name string) int {
	b, err := os.ReadFile(filepath.Join(sysctlRoot, name))
	if err != nil {
		return 0
	}
	n, err := strconv.Atoi(canonicalSysctl(string(b)))
	if err != nil {
		return 0
	}
	return n
}
