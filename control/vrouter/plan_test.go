package vrouter

import (
	"maps"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
)

// TestPlan: what was planned is what the simulated kernels have when a change has been
// carried out on all hosts by what they publish to each other, and no more.
func TestPlan(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		mode := func() store.Encapsulation { return rapid.SampledFrom(store.Encapsulations()).Draw(rt, "mode") }
		w := newWorld(rapid.IntRange(2, 3).Draw(rt, "hosts"), mode(), rapid.Bool().Draw(rt, "strict"))
		if !w.settle() {
			rt.Fatal("the world does not come to rest")
		}
		for range rapid.IntRange(1, 3).Draw(rt, "changes") {
			var change store.Event
			switch rapid.IntRange(0, 5).Draw(rt, "kind") {
			case 0:
				change = felixEvent(rapid.IntRange(4096, 4099).Draw(rt, "vni"), rapid.IntRange(4789, 4790).Draw(rt, "port"))
			case 1:
				change = poolEvent("other", "10.50.0.0/16", mode())
			default:
				change = poolEvent("pool", "192.168.0.0/16", mode())
			}
			before, plans := map[string]map[dataplane.Key]string{}, map[string]Foreseen{}
			for _, h := range w.hosts {
				before[h.name] = h.shown()
				facts := h.l.facts()
				plans[h.name] = facts.plan(facts.table(), Ahead{Changes: []*cluster.Change{cluster.Decode(h.name, change)}})
			}
			w.put(change)
			if !w.settle() {
				rt.Fatal("the world does not come to rest")
			}
			for _, h := range w.hosts {
				if diff := cmp.Diff(plans[h.name].Objects, differences(before[h.name], h.shown()), cmp.Comparer(func(a, b dataplane.Key) bool { return a == b })); diff != "" {
					rt.Fatalf("%s: %v (-planned +happened):\n%s", h.name, change.Key, diff)
				}
				if diff := cmp.Diff(plans[h.name].Will, h.l.nodes.Own().Encaps.NodeEncaps, cmpopts.EquateEmpty(), cmpopts.IgnoreFields(store.NodeEncaps{}, "Refuses", "Stays")); diff != "" {
					rt.Fatalf("%s publishes after %v (-planned +happened):\n%s", h.name, change.Key, diff)
				}
			}
		}
	})
}

// shown is what a host's kernel has.
func (h *simHost) shown() map[dataplane.Key]string {
	var all []dataplane.Object
	for o := range maps.Values(h.kernel.have) {
		all = append(all, o)
	}
	return shown(all)
}
