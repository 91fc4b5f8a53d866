package hostile

import (
	"strings"
	"testing"

	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/store"
)

// TestPod attacks as a pod: hosts, other pods and the kernel's tables, in a tunnel and
// in plain packets, over both families.
func TestPod(t *testing.T) {
	t.Parallel()
	for _, mode := range []store.Encapsulation{store.VXLAN, store.Direct} {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			top := topology(2, 2, mode)
			for i := range top.Nodes {
				top.Nodes[i].Config = map[string]any{"policy": map[string]any{"maxConnectionsPerWorkload": mostConnections}}
			}
			top.Underlay, top.Pool6 = lab.UnderlayDual, &lab.Pool{Encapsulation: mode}
			l := bringUp(t, "pod-"+strings.ToLower(string(mode)), top)
			reachable(t, l)
			t.Run("sockets", func(t *testing.T) { listensOnly(t, l, mode) })
			t.Run("spoofed_source", func(t *testing.T) { spoofSources(t, l) })
			t.Run("neighbour_table", func(t *testing.T) { floodNeighbours(t, l) })
			if mode == store.VXLAN { // the others have none that would be taken: see TestIPIP
				t.Run("tunnels", func(t *testing.T) { tunnelsFromPods(t, l, vxlanTunnels()) })
			}
			// The last: it leaves a pod with no connections to spare.
			t.Run("connections", func(t *testing.T) { floodConnections(t, l) })
		})
	}
}
