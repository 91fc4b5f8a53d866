package vrouter

import (
	"testing"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/control/cluster/clustertest"
	"github.com/routerd/routerd/store"
)

// take applies what an event of the datastore means.
func (t *table) take(ev store.Event) { t.apply(cluster.Decode(t.nodes.Self, ev)) }

func feed(t *testing.T, c *Core, b store.Batch) error {
	t.Helper()
	return c.Store(t.Context(), clustertest.Step(c.cfg.Node, b))
}
