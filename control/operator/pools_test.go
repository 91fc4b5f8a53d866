package operator

import (
	"testing"

	"github.com/routerd/routerd/control/encap"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
)

// TestDelays: who holds a change of mode up is told in a sentence.
func TestDelays(t *testing.T) {
	t.Parallel()
	p := encap.PoolStatus{Mode: store.NewMode(store.IPIP, 0, 0)}
	if s := delays(p); s != "" {
		t.Errorf("nobody is behind: %q", s)
	}
	p.BehindTotal = 7
	p.Behind = []encap.Delay{
		{Node: "node2", Encap: dataplane.Encap{Driver: dataplane.DriverDirect}, Reason: "node node2 does not accept ipip: no module"},
		{Node: "node3", Reason: "IPv4 address of node node3: not known yet"},
	}
	want := "not yet using IPIP: node2 (direct): node node2 does not accept ipip: no module; " +
		"node3 (nothing): IPv4 address of node node3: not known yet; and 5 more"
	if s := delays(p); s != want {
		t.Errorf("%q, want %q", s, want)
	}
}
