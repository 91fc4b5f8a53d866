package operator

import (
	"fmt"
	"strings"

	"github.com/routerd/routerd/dataplane/netdev"
	"github.com/routerd/routerd/store"
)

// Delivered implements [rpc.Operator]. The host's ends of workloads' interfaces send what the workloads receive.
func (s *Server) Delivered() (sum uint64, err error) {
	all, err := netdev.Read()
	if err != nil {
		return 0, fmt.Errorf("count packets sent to workloads: %w", err)
	}
	for name, d := range all {
		if strings.HasPrefix(name, store.WorkloadInterfacePrefix) {
			sum += d.SentPackets
		}
	}
	return sum, nil
}
