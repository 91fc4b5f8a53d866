package storetest

import (
	"testing"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/store"
)

// testStatus: what is said of an object in its status is read again, and who writes the
// object's other parts leaves it.
func testStatus(t *testing.T, s store.Store) {
	node, kcc := store.ResourceKey(store.KindCalicoNodeStatus, "a"), store.ResourceKey(store.KindKubeControllersConfiguration, store.DefaultName)
	asked := store.New(node.Kind).(*v3.CalicoNodeStatus)
	period := uint32(10)
	asked.Name, asked.Spec = "a", v3.CalicoNodeStatusSpec{Node: "n1", Classes: []v3.NodeStatusClassType{v3.NodeStatusClassTypeAgent}, UpdatePeriodSeconds: &period}
	config := store.New(kcc.Kind).(*v3.KubeControllersConfiguration)
	config.Name, config.Spec.Controllers.Node = store.DefaultName, &v3.NodeControllerConfig{SyncLabels: v3.Enabled}
	for key, c := range map[store.Key]struct {
		value  any
		answer func(any)      // sets the status
		other  func(any)      // changes something else
		said   func(any) bool // the status is as answer set it
		kept   func(any) bool // the rest is as other set it
	}{
		node: {
			asked,
			func(v any) { v.(*v3.CalicoNodeStatus).Status.Agent.BIRDV4.Version = "1" },
			func(v any) { v.(*v3.CalicoNodeStatus).Spec.Node = "n2" },
			func(v any) bool { return v.(*v3.CalicoNodeStatus).Status.Agent.BIRDV4.Version == "1" },
			func(v any) bool { return v.(*v3.CalicoNodeStatus).Spec.Node == "n2" },
		},
		kcc: {
			config,
			func(v any) {
				v.(*v3.KubeControllersConfiguration).Status.EnvironmentVars = map[string]string{"A": "b"}
			},
			func(v any) { v.(*v3.KubeControllersConfiguration).Spec.HealthChecks = v3.Disabled },
			func(v any) bool { return v.(*v3.KubeControllersConfiguration).Status.EnvironmentVars["A"] == "b" },
			func(v any) bool { return v.(*v3.KubeControllersConfiguration).Spec.HealthChecks == v3.Disabled },
		},
	} {
		must(t, s, store.Op{If: store.IfAbsent(), Action: store.Put, Object: store.Object{Key: key, Value: c.value}})
		change := func(set func(any)) func(store.Object) (any, error) {
			return func(cur store.Object) (any, error) {
				v := store.Clone(cur.Value)
				set(v)
				return v, nil
			}
		}
		wrote, err := store.ModifyStatus(t.Context(), s, key, change(c.answer))
		if err != nil {
			t.Fatal(err)
		}
		if again, err := store.ModifyStatus(t.Context(), s, key, change(c.answer)); err != nil || again.Revision != wrote.Revision {
			t.Errorf("%s: the same status is written once more: %v", key, err)
		}
		if _, err := store.Modify(t.Context(), s, key, change(c.other)); err != nil {
			t.Fatal(err)
		}
		got, err := s.Get(t.Context(), key)
		if err != nil {
			t.Fatal(err)
		}
		if !c.said(got.Value) {
			t.Errorf("%s has not the status that was written: %s", key, got.Raw)
		}
		if !c.kept(got.Value) {
			t.Errorf("%s lacks what was written beside its status: %s", key, got.Raw)
		}
	}
}
