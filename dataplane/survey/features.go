package survey

import (
	"bufio"
	"compress/gzip"
	"fmt"
	"io"
	"io/fs"
	"path"
	"strconv"
	"strings"
)

// Feature is something that the kernel must have, for all of routerd or for a part of it.
type Feature struct {
	Name   string // as people know it
	Module string // that has it, by the name of modprobe(8); empty: it is in no module
	Config string // the option of the kernel's configuration that brings it
	Needed bool   // nothing works without
	For    string // what it is for
	Else   string // what to do without
}

// MinRelease is the oldest kernel that has all that is needed: marks of chains in nftables (Linux 5.10), filters of dumps of
// connection tracking (5.8), ethtool over netlink (5.7), next-hop objects (5.3).
const MinRelease = "5.10"

// Features lists what the kernel must have.
func Features() []Feature {
	return []Feature{
		{"network namespaces", "", "CONFIG_NET_NS", true, "workloads", "another kernel"},
		{"policy routing", "", "CONFIG_IP_MULTIPLE_TABLES", true, "probes of tunnels", "another kernel"},
		{"ethtool netlink", "", "CONFIG_ETHTOOL_NETLINK", true, "offloads of tunnels' devices", "another kernel"},
		{"veth", "veth", "CONFIG_VETH", true, "the interfaces of workloads", ""},
		{"nftables", "nf_tables", "CONFIG_NF_TABLES", true, "network policy, natOutgoing", ""},
		{"connection tracking", "nf_conntrack", "CONFIG_NF_CONNTRACK", true, "network policy", ""},
		{"nftables: ct", "nft_ct", "CONFIG_NFT_CT", true, "network policy", ""},
		{"nftables: reject", "nft_reject", "CONFIG_NFT_REJECT", true, "network policy", ""},
		{"nftables: limit", "nft_limit", "CONFIG_NFT_LIMIT", true, "bounds on what rules log", ""},
		{"nftables: log", "nft_log", "CONFIG_NFT_LOG", true, "routerctl flows, rules that log", ""},
		{"nfnetlink log", "nfnetlink_log", "CONFIG_NETFILTER_NETLINK_LOG", true, "routerctl flows", ""},
		{"nftables: NAT", "nft_chain_nat", "CONFIG_NFT_NAT", true, "natOutgoing", ""},
		{"nftables: masquerade", "nft_masq", "CONFIG_NFT_MASQ", true, "natOutgoing", ""},
		{"connection tracking netlink", "nf_conntrack_netlink", "CONFIG_NF_CT_NETLINK", true, "connections that a change of policy denies are cut", ""},
		{"nftables: connlimit", "nft_connlimit", "CONFIG_NFT_CONNLIMIT", false, "a bound on the connections of a workload", "leave the bound out"},
		{"VXLAN", "vxlan", "CONFIG_VXLAN", false, "pools with vxlanMode", "IPIP or no encapsulation"},
		{"IPIP", "ipip", "CONFIG_NET_IPIP", false, "pools with ipipMode", "VXLAN or no encapsulation"},
		{"IPv6", "ipv6", "CONFIG_IPV6", false, "IPv6 of hosts and workloads", "IPv4 alone"},
		{"IPv6 tunnels", "ip6_tunnel", "CONFIG_IPV6_TUNNEL", false, "pools with ipipMode on hosts that reach each other by IPv6", "VXLAN or no encapsulation"},
		{"TCP MD5", "", "CONFIG_TCP_MD5SIG", false, "passwords of BGP sessions and the key of the mesh (RFC 2385)", "sessions without passwords: routerctl bgp key off"},
		{"flowtables", "nf_flow_table", "CONFIG_NF_FLOW_TABLE", false, "policy.offload", "policy.offload: false"},
		{"nftables: flow offload", "nft_flow_offload", "CONFIG_NFT_FLOW_OFFLOAD", false, "policy.offload", "policy.offload: false"},
	}
}

// Where a feature was found.
const (
	InUse    = "loaded"        // the module is there
	Loadable = "can be loaded" // its file is
	BuiltIn  = "built in"
	NotFound = "missing"
	NotKnown = "unknown" // nothing tells
)

// System is what the files of a host say of its kernel.
type System struct {
	Release string
	known   bool // modules or the configuration could be read
	loaded  map[string]bool
	files   map[string]bool // modules that can be loaded
	builtin map[string]bool
	config  map[string]string
}

// ReadSystem reads what a host's files say of its kernel: root is the host's file system, release the kernel's, config the file
// of its configuration, or empty for where it usually is.
func ReadSystem(root fs.FS, release, config string) (System, error) {
	s := System{Release: release, loaded: map[string]bool{}, files: map[string]bool{}, builtin: map[string]bool{}, config: map[string]string{}}
	modules := path.Join("lib/modules", release)
	s.lines(root, "proc/modules", func(line string) { s.loaded[moduleName(strings.Fields(line)[0])] = true })
	// Modules that are built in and have parameters are there too.
	dirs, _ := fs.ReadDir(root, "sys/module")
	for _, d := range dirs {
		s.loaded[moduleName(d.Name())] = true
	}
	s.lines(root, path.Join(modules, "modules.dep"), func(line string) {
		file, _, _ := strings.Cut(line, ":")
		s.files[moduleName(path.Base(file))] = true
	})
	s.lines(root, path.Join(modules, "modules.builtin"), func(line string) { s.builtin[moduleName(path.Base(line))] = true })
	option := func(line string) {
		if name, value, ok := strings.Cut(line, "="); ok && strings.HasPrefix(name, "CONFIG_") {
			s.config[name] = value
		}
	}
	if config != "" {
		if err := lines(root, config, option); err != nil {
			return s, fmt.Errorf("read the kernel's configuration: %w", err)
		}
		return s, nil
	}
	for _, file := range []string{
		"proc/config.gz", "boot/config-" + release, path.Join(modules, "config"), path.Join(modules, "build/.config"), "usr/src/linux-headers-" + release + "/.config",
		"usr/src/linux-" + release + "/.config", "usr/src/linux/.config",
	} {
		if lines(root, file, option) == nil && len(s.config) > 0 {
			s.known = true
			break
		}
	}
	return s, nil
}

// lines reads a file that says something of modules, if it is there.
func (s *System) lines(root fs.FS, file string, each func(string)) {
	if lines(root, file, each) == nil {
		s.known = true
	}
}

func lines(root fs.FS, file string, each func(string)) error {
	f, err := root.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	var r io.Reader = f
	if strings.HasSuffix(file, ".gz") {
		z, err := gzip.NewReader(f)
		if err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
		r = z
	}
	sc := bufio.NewScanner(r)
	sc.Buffer(nil, 1<<20) // a module with many that it needs
	for sc.Scan() {
		if line := strings.TrimSpace(sc.Text()); line != "" {
			each(line)
		}
	}
	return sc.Err()
}

// moduleName is a module's name: of its file, without what it is packed with, and with underscores, as the kernel has it.
func moduleName(file string) string {
	name, _, _ := strings.Cut(file, ".ko")
	return strings.ReplaceAll(name, "-", "_")
}

// Find says where a feature is.
func (s System) Find(f Feature) string {
	if s.config[f.Config] == "y" {
		return BuiltIn
	}
	module := s.config[f.Config] == "m"
	m := f.Module
	switch {
	case s.builtin[m]:
		return BuiltIn
	case s.loaded[m]:
		return InUse
	case s.files[m]:
		return Loadable
	case module && len(s.files) == 0: // it is built as a module; where modules are is not known
		return Loadable
	case len(s.config) == 0 && (m == "" || !s.known):
		return NotKnown
	}
	return NotFound
}

// AtLeast reports whether a release of the kernel, such as 6.1.0-18-amd64, is not older than another; false for what is no
// release.
func AtLeast(release, least string) bool {
	a, ok := numbers(release)
	b, _ := numbers(least)
	return ok && (a[0] > b[0] || a[0] == b[0] && a[1] >= b[1])
}

func numbers(release string) (n [2]int, ok bool) {
	major, rest, _ := strings.Cut(release, ".")
	end := strings.IndexFunc(rest, func(r rune) bool { return r < '0' || r > '9' })
	if end >= 0 {
		rest = rest[:end]
	}
	var err1, err2 error
	n[0], err1 = strconv.Atoi(major)
	n[1], err2 = strconv.Atoi(rest)
	return n, err1 == nil && err2 == nil
}
