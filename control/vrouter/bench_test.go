package vrouter

import (
	"fmt"
	"testing"

	"github.com/routerd/routerd/store"
)

// BenchmarkOwnPublication is what this host's own writes cost it: the sender's
// rule for each of 5,000 nodes. There are a handful of these in a change.
func BenchmarkOwnPublication(b *testing.B) {
	tab := newTestTable(cluster(store.VXLAN)...)
	f := store.NodeForms{Accepts: []string{"direct", "vxlan/4096/4789"}, Uses: []string{"vxlan/4096/4789"}, Sends: map[string]string{"pool": "VXLAN/4096/4789"}}
	for i := range 5000 {
		tab.apply(saying(nodeEvent(fmt.Sprintf("n%d", i), fmt.Sprintf("10.9.%d.%d/24", i/200, i%200+1), "", fmt.Sprintf("192.168.%d.%d", i/200, i%200+1)), f))
	}
	tab.settle()
	self := cluster(store.VXLAN)[1]
	for i := 0; b.Loop(); i++ {
		f.Accepts = [][]string{{"direct", "vxlan/4096/4789"}, {"vxlan/4096/4789"}}[i%2]
		tab.apply(saying(self, f))
		tab.settle()
	}
}

// BenchmarkPeerPublication is what another node's write costs this host.
func BenchmarkPeerPublication(b *testing.B) {
	tab := newTestTable(cluster(store.VXLAN)...)
	for i := 0; b.Loop(); i++ {
		f := store.NodeForms{Accepts: []string{"vxlan/4096/4789"}, Uses: [][]string{{"direct"}, {"vxlan/4096/4789"}}[i%2]}
		tab.apply(saying(nodeEvent("node2", "10.1.0.12/24", "192.168.2.0", "192.168.2.1"), f))
		tab.settle()
	}
}
