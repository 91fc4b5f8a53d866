package enforce

import (
	"net/netip"
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/control/cluster/clustertest"
	"github.com/routerd/routerd/control/policy"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
)

// TestPlan: the step that is planned leads from the rules that the kernel has to those that it has
// when the change was made.
func TestPlan(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := startUnknown(t)
		equal := cmpopts.EquateComparable(netip.Prefix{}, netip.Addr{})
		changes := func(values ...any) []*cluster.Change {
			b := store.Batch{}
			for _, v := range values {
				store.SetDefaults(v)
				key, err := store.KeyOf(v)
				if err != nil {
					t.Fatal(err)
				}
				b.Events = append(b.Events, store.Event{Key: key, Object: store.Object{Key: key, Value: v}})
			}
			return clustertest.Step("node1", b, policy.Kinds()...).Changes
		}
		if _, _, err := w.e.Plan(nil, nil, nil); err == nil {
			t.Error("there is a plan before the host's addresses are known")
		}
		w.e.HandleUnderlay(dataplane.Underlay{})
		before := []any{pod("a", "10.0.0.1", map[string]string{"app": "web"}), pod("b", "10.0.0.2", map[string]string{"bad": "yes"}), denyFrom("bad == 'yes'")}
		after := []any{pod("c", "10.0.0.3", map[string]string{"bad": "yes", "app": "web"}), denyFrom("bad in {'yes', 'maybe'}")}
		w.store(before...)
		planned, step, err := w.e.Plan(changes(before...), changes(after...), nil)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(w.table.have, planned, equal); diff != "" {
			t.Errorf("rules before (-kernel +planned):\n%s", diff)
		}
		w.store(after...)
		if err := planned.Apply(&step); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(w.table.have, planned, equal); diff != "" {
			t.Errorf("rules after (-kernel +planned):\n%s", diff)
		}
	})
}
