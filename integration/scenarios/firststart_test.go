package scenarios

import (
	"testing"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/integration/lab/traffic"
	"github.com/routerd/routerd/store"
)

// TestPortChangesAtFirstStart changes the VXLAN port of a cluster that has just started
// for the first time, under traffic, before its hosts have measured their ways to each
// other. No packet is lost.
func TestPortChangesAtFirstStart(t *testing.T) {
	beside(t)
	c := &changing{Lab: bringUp(t, "first", topology(3, 2, store.VXLAN))}
	c.store = openStore(t, c.Lab)
	packets := startPackets(t, c.Lab, traffic.LoadOptions{Rate: loadRate()}, loadPairs()...)
	const port = 4790
	changeFelix(t, c.store, store.DefaultName, func(f *v3.FelixConfigurationSpec) { f.VXLANPort = new(port) })
	c.waitNumbers(t, "another port", store.NewMode(store.VXLAN, store.DefaultVXLANVNI, port))
	r := packets.Interval()
	t.Log(r.Sum())
	for _, f := range r.Bad() {
		t.Error(f)
	}
	if r.Sum().Sent == 0 {
		t.Error("nothing was sent")
	}
}
