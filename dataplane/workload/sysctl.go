package workload

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/routerd/routerd/dataplane"
)

// HostSysctls returns the settings that the host end of a wire needs, those
// that Calico makes. rpFilter is the value that the kernel gives new devices
// (see [Wire.RPFilter]): reverse-path checks of workloads are policy's.
func HostSysctls(device, rpFilter string) []dataplane.Sysctl {
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

// procSys is where the kernel shows its settings.
const procSys = "/proc/sys"

func readSysctl(name string) (string, error) {
	b, err := os.ReadFile(filepath.Join(procSys, name))
	if err != nil {
		return "", fmt.Errorf("read sysctl %s: %w", name, err)
	}
	return strings.TrimSpace(string(b)), nil
}

// writeSysctl writes a setting unless it has that value: /proc/sys may be
// mounted read-only inside a container while all is as it should be.
func writeSysctl(name, value string) error {
	have, err := readSysctl(name)
	if err != nil {
		return err
	}
	if have == value {
		return nil
	}
	if err := os.WriteFile(filepath.Join(procSys, name), []byte(value), 0); err != nil {
		return fmt.Errorf("set sysctl %s to %s: %w", name, value, err)
	}
	return nil
}
