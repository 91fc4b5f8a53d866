package workload

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/routerd/routerd/dataplane"
)

// ipv4Sysctls returns the host end's settings for IPv4. rpFilter is the value
// that the kernel gives new devices: reverse-path checks of workloads are
// policy's.
func ipv4Sysctls(device, rpFilter string) []dataplane.Sysctl {
	conf := "net/ipv4/conf/" + device + "/"
	return []dataplane.Sysctl{
		// The host answers the workload's ARP requests for its gateway, at once.
		{Name: conf + "proxy_arp", Value: "1"},
		{Name: "net/ipv4/neigh/" + device + "/proxy_delay", Value: "0"},
		{Name: conf + "forwarding", Value: "1"},
		{Name: conf + "route_localnet", Value: "1"},
		{Name: conf + "rp_filter", Value: rpFilter},
	}
}

// ipv6Sysctls returns the host end's settings for IPv6, of a workload that has
// an IPv6 address or none.
func ipv6Sysctls(device string, on bool) []dataplane.Sysctl {
	conf := "net/ipv6/conf/" + device + "/"
	if !on {
		return []dataplane.Sysctl{{Name: conf + "disable_ipv6", Value: "1"}}
	}
	return []dataplane.Sysctl{
		{Name: conf + "disable_ipv6", Value: "0"},
		{Name: conf + "proxy_ndp", Value: "1"},
		{Name: conf + "forwarding", Value: "1"},
		// A workload must not tell the host of routers.
		{Name: conf + "accept_ra", Value: "0"},
	}
}

// ErrNoIPv6 says that the kernel, or an operator, does without IPv6.
var ErrNoIPv6 = errors.New("IPv6 is off")

// hasIPv6 reports whether the kernel has IPv6 at all.
func (s settings) hasIPv6() (bool, error) {
	_, err := os.Stat(s.path("net/ipv6/conf"))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}

// checkIPv6 says why the calling thread's namespace cannot be a router of IPv6.
func (s settings) checkIPv6() error {
	ok, err := s.hasIPv6()
	if err != nil {
		return err
	}
	const cure = "or do not ask for IPv6 addresses (ipam.assign_ipv6 of the CNI configuration, cni.assignIPv6 of the daemon's)"
	if !ok {
		return fmt.Errorf("%w: the kernel was started without it (ipv6.disable=1); start it with IPv6, %s", ErrNoIPv6, cure)
	}
	off, err := s.read("net/ipv6/conf/all/disable_ipv6")
	if err == nil && off != "0" {
		err = fmt.Errorf("%w: net.ipv6.conf.all.disable_ipv6 is %s; set it to 0, %s", ErrNoIPv6, off, cure)
	}
	return err
}

// enableIPv6 makes a device of the calling thread's namespace take IPv6
// addresses, and use them at once: runtimes switch IPv6 off in containers that
// no network gives it to.
func (s settings) enableIPv6(device string) error {
	if ok, err := s.hasIPv6(); err != nil || !ok {
		return errors.Join(err, fmt.Errorf("%w: the kernel has none", ErrNoIPv6))
	}
	for _, want := range []dataplane.Sysctl{
		{Name: "net/ipv6/conf/all/disable_ipv6", Value: "0"},
		{Name: "net/ipv6/conf/default/disable_ipv6", Value: "0"},
		{Name: "net/ipv6/conf/lo/disable_ipv6", Value: "0"},
		{Name: "net/ipv6/conf/" + device + "/disable_ipv6", Value: "0"},
		{Name: "net/ipv6/conf/" + device + "/accept_dad", Value: "0"}, // for its link-local address
	} {
		if err := s.write(want.Name, want.Value); err != nil {
			return err
		}
	}
	return nil
}

// familiesOf returns the families of addresses, IPv4 first.
func familiesOf(addrs []netip.Addr) []dataplane.Family {
	var out []dataplane.Family
	for _, f := range dataplane.Families() {
		if slices.ContainsFunc(addrs, func(a netip.Addr) bool { return dataplane.FamilyOf(a) == f }) {
			out = append(out, f)
		}
	}
	return out
}

// settings is where the kernel's settings are. Those below net are of the network
// namespace of the thread that opens them.
type settings string

// procSys is where they usually are.
const procSys settings = "/proc/sys"

func (s settings) path(name string) string { return filepath.Join(string(s), name) }

func (s settings) read(name string) (string, error) {
	b, err := os.ReadFile(s.path(name))
	if err != nil {
		return "", fmt.Errorf("read sysctl %s: %w", name, err)
	}
	return strings.TrimSpace(string(b)), nil
}

// write writes a setting unless it has that value: /proc/sys may be
// mounted read-only inside a container while all is as it should be.
func (s settings) write(name, value string) error {
	have, err := s.read(name)
	if err != nil {
		return err
	}
	if have == value {
		return nil
	}
	if err := os.WriteFile(s.path(name), []byte(value), 0); err != nil {
		return fmt.Errorf("set sysctl %s to %s: %w", name, value, err)
	}
	return nil
}
