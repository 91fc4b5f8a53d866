package store

import "strings"

// MaxInterfaceName is how many bytes the name of a network interface has at
// most: the kernel's IFNAMSIZ without the final zero.
const MaxInterfaceName = 15

// WorkloadInterfacePrefix begins the names of the interfaces that ADD makes.
const WorkloadInterfacePrefix = "cali"

// tunnelInterfaces are devices of routerd's and Calico's own, and the loopback:
// on no host are they a workload's.
func tunnelInterfaces() []string {
	return []string{
		"lo", "tunl0", "ip6tnl0", "tunl6.calico", "vxlan.calico", "vxlan-v6.calico", "wireguard.cali", "wg-v6.cali", "kube-ipvs0",
	}
}

// uplinkClasses begin the names that the kernel and systemd give the devices by
// which a host reaches its network (systemd.net-naming-scheme(7)); a number follows.
func uplinkClasses() []string {
	return []string{"eth", "eno", "enp", "ens", "enx", "ib", "wlan", "wlp", "wls", "bond", "team"}
}

// HostInterface reports whether an interface of that name is the host's own
// wherever it is found, so that no workload endpoint may name it: the loopback,
// a tunnel's device, an uplink by its usual name, or "*".
func HostInterface(name string) bool {
	for _, dev := range tunnelInterfaces() {
		// The VXLAN devices of further VNIs and ports carry a number.
		if name == dev || strings.HasPrefix(dev, "vxlan") && strings.HasPrefix(name, dev) {
			return true
		}
	}
	for _, class := range uplinkClasses() {
		if rest, ok := strings.CutPrefix(name, class); ok && strings.IndexAny(rest, "0123456789") == 0 {
			return true
		}
	}
	return name == "*"
}

// HostInterfaceWith returns an interface of the host's own, if there can be one
// whose name begins with prefix.
func HostInterfaceWith(prefix string) (string, bool) {
	names := tunnelInterfaces()
	for _, class := range uplinkClasses() {
		names = append(names, class+"0")
	}
	for _, name := range names {
		if strings.HasPrefix(name, prefix) {
			return name, true
		}
	}
	if HostInterface(prefix) {
		return prefix, true
	}
	return "", false
}
