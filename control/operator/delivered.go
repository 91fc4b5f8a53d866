package operator

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/routerd/routerd/store"
)

// Delivered implements [rpc.Operator].
func (s *Server) Delivered() (uint64, error) {
	return deliveredPackets("/proc/net/dev", store.WorkloadInterfacePrefix)
}

// deliveredPackets returns how many packets the devices whose names begin with a prefix have sent: the host's ends of workloads'
// interfaces send what the workloads receive. The file is /proc/net/dev, whose columns proc_pid_net(5) has: after the name and
// a colon, eight of what was received, then bytes and packets of what was sent.
func deliveredPackets(file, prefix string) (sum uint64, err error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return 0, fmt.Errorf("count what workloads were sent: %w", err)
	}
	const sent = 9
	for line := range strings.Lines(string(b)) {
		name, counters, ok := strings.Cut(line, ":")
		if !ok || !strings.HasPrefix(strings.TrimSpace(name), prefix) {
			continue
		}
		f := strings.Fields(counters)
		if len(f) <= sent {
			return 0, fmt.Errorf("count what workloads were sent: %s has a line of %d columns: %q", file, len(f), strings.TrimSpace(line))
		}
		n, err := strconv.ParseUint(f[sent], 10, 64)
		if err != nil {
			return 0, fmt.Errorf("count what workloads were sent: %s: %w", file, err)
		}
		sum += n
	}
	return sum, nil
}
