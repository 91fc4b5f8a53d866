package vrouter

import (
	"fmt"
	"testing"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
)

// BenchmarkOwnPublication is what this host's own writes cost it: the sender's
// rule for each of 5,000 nodes. There are a handful of these in a change.
func BenchmarkOwnPublication(b *testing.B) {
	tab := newTestTable(testCluster(store.VXLAN)...)
	f := store.NodeEncaps{Accepts: []string{"direct", "vxlan/4096/4789"}, Uses: []string{"vxlan/4096/4789"}, Sends: map[string]string{"pool": "VXLAN/4096/4789"}}
	for i := range 5000 {
		tab.take(saying(nodeEvent(fmt.Sprintf("n%d", i), fmt.Sprintf("10.9.%d.%d/24", i/200, i%200+1), "", fmt.Sprintf("192.168.%d.%d", i/200, i%200+1)), f))
	}
	tab.settle()
	self := testCluster(store.VXLAN)[1]
	for i := 0; b.Loop(); i++ {
		f.Accepts = [][]string{{"direct", "vxlan/4096/4789"}, {"vxlan/4096/4789"}}[i%2]
		tab.take(saying(self, f))
		tab.settle()
	}
}

// BenchmarkPeerPublication is what another node's write costs this host.
func BenchmarkPeerPublication(b *testing.B) {
	tab := newTestTable(testCluster(store.VXLAN)...)
	for i := 0; b.Loop(); i++ {
		f := store.NodeEncaps{Accepts: []string{"vxlan/4096/4789"}, Uses: [][]string{{"direct"}, {"vxlan/4096/4789"}}[i%2]}
		tab.take(saying(nodeEvent("node2", "10.1.0.12/24", "192.168.2.0", "192.168.2.1"), f))
		tab.settle()
	}
}

// BenchmarkOneMoreNode is what a node with a block that joins 5,000 others costs
// this host, in a turn of its own.
func BenchmarkOneMoreNode(b *testing.B) {
	const n = 5000
	tab := newTestTable(testCluster(store.VXLAN)...)
	join := func(i int) {
		name := fmt.Sprintf("n%d", i)
		tab.take(nodeEvent(name, fmt.Sprintf("10.%d.%d.%d/24", 16+i>>14, i>>7&0x7f, i&0x7f+1), "", fmt.Sprintf("192.168.%d.%d", i>>8&0xff, i&0xff)))
		tab.take(blockEvent(fmt.Sprintf("192.168.%d.%d/30", i>>6&0xff, i&0x3f<<2), name, nil))
	}
	turn := func() {
		tab.settle()
		handedOver(tab)
		tab.encap.MTU(dataplane.IPv4)
		tab.encap.Offer()
	}
	for i := range n {
		join(i)
	}
	turn()
	for i := n; b.Loop(); i++ {
		join(i)
		turn()
	}
}
