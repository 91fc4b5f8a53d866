package policy_test

import (
	"fmt"
	"maps"
	"runtime"
	"slices"
	"testing"

	"github.com/routerd/routerd/control/policy"
	"github.com/routerd/routerd/control/policy/policytest"
	"github.com/routerd/routerd/dataplane/filter"
	"github.com/routerd/routerd/store"
)

func heap() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

func members(r filter.Delta) int {
	n := 0
	for _, c := range r.Members {
		n += len(c.Add) + len(c.Del)
	}
	return n
}

// BenchmarkSync100k brings up a host in a cluster of 100,000 endpoints and 500
// policies, all of them in force here. heap-MB is what the calculator keeps
// beside the events themselves.
func BenchmarkSync100k(b *testing.B) {
	list := policytest.Cluster(100_000, 500)
	for b.Loop() {
		b.StopTimer()
		before := heap()
		b.StartTimer()
		c, _ := newMirror(policy.Config{})
		c.Update(store.Batch{Events: list, Synced: true})
		d, _ := c.Flush()
		b.StopTimer()
		b.ReportMetric(float64(len(d.PutSets)), "sets")
		b.ReportMetric(float64(members(d)), "members")
		b.ReportMetric(float64(len(d.PutPolicies)), "policies")
		d = filter.Delta{}
		b.ReportMetric(float64(heap()-before)/(1<<20), "heap-MB")
		runtime.KeepAlive(c)
		b.StartTimer()
	}
}

// BenchmarkChange100k makes one change in such a cluster and publishes it.
func BenchmarkChange100k(b *testing.B) {
	list := policytest.Cluster(100_000, 500)
	c, _ := newMirror(policy.Config{})
	c.Update(store.Batch{Events: list, Synced: true})
	c.Flush()
	relabelled := func(i, n int) store.Event {
		o := policytest.Endpoint(i, i%100, n%50, i/100)
		return event(o)
	}
	b.Run("label", func(b *testing.B) {
		n := 0
		for b.Loop() {
			n++
			c.Update(store.Batch{Events: []store.Event{relabelled(77_777, n)}})
			d, _ := c.Flush()
			if members(d) == 0 {
				b.Fatal("nothing changed")
			}
		}
	})
	b.Run("label that nobody asks for", func(b *testing.B) {
		n := 0
		for b.Loop() {
			n++
			o := policytest.Endpoint(77_777, 77, 27, 777)
			w := store.Clone(o.Value).(*store.WorkloadEndpoint)
			w.Labels["pod"] = fmt.Sprintf("other%d", n)
			c.Update(store.Batch{Events: []store.Event{event(store.Object{Key: o.Key, Value: w})}})
			if d, _ := c.Flush(); n > 1 && !d.Empty() {
				b.Fatalf("%+v", d)
			}
		}
	})
	b.Run("endpoint comes and goes", func(b *testing.B) {
		for b.Loop() {
			o := policytest.Endpoint(200_000, 1, 2, 5)
			c.Update(store.Batch{Events: []store.Event{event(o)}})
			c.Flush()
			c.Update(store.Batch{Events: []store.Event{gone(o.Key)}})
			c.Flush()
		}
	})
	b.Run("policy comes and goes", func(b *testing.B) {
		p := gnp("new", `{selector: "app == 'app3'", ingress: [{action: Allow, source: {selector: "version == 'v3' && tier == 'tier2'"}}]}`)
		for b.Loop() {
			c.Update(store.Batch{Events: []store.Event{event(p)}})
			c.Flush()
			c.Update(store.Batch{Events: []store.Event{gone(p.Key)}})
			c.Flush()
		}
	})
}

// TestCostFollowsChange counts what a change of one endpoint's label publishes, in
// a cluster that is large enough to publish more.
func TestCostFollowsChange(t *testing.T) {
	t.Parallel()
	c, mirror := newMirror(policy.Config{})
	c.Update(store.Batch{Events: policytest.Cluster(2_000, 60), Synced: true})
	step(t, c, mirror)
	o := policytest.Endpoint(1_234, 34, 7, 12)
	c.Update(store.Batch{Events: []store.Event{event(o)}})
	step(t, c, mirror)
	for _, tt := range []struct {
		name   string
		change func(*store.WorkloadEndpoint)
		most   int // members published
	}{
		{"nothing", func(*store.WorkloadEndpoint) {}, 0},
		{"label that nobody asks for", func(w *store.WorkloadEndpoint) { w.Labels["pod"] = "x" }, 0},
		{"field that no rule looks at", func(w *store.WorkloadEndpoint) { w.Spec.MAC = "ee:ee:ee:ee:ee:ee" }, 0},
		{"label", func(w *store.WorkloadEndpoint) { w.Labels["app"] = "app8" }, 40},
		{"one of its addresses", func(w *store.WorkloadEndpoint) { w.Spec.IPNetworks[1] = "fd00::ffff/128" }, 60},
	} {
		w := store.Clone(o.Value).(*store.WorkloadEndpoint)
		w.Labels = maps.Clone(w.Labels)
		w.Spec.IPNetworks = slices.Clone(w.Spec.IPNetworks)
		tt.change(w)
		o.Value = w
		c.Update(store.Batch{Events: []store.Event{event(o)}})
		d := step(t, c, mirror)
		n := members(d)
		if n > tt.most || tt.most > 0 && n == 0 {
			t.Errorf("%s: %d members told, want at most %d, and some if any", tt.name, n, tt.most)
		}
		if len(d.PutSets)+len(d.DelSets)+len(d.PutPolicies)+len(d.DelPolicies)+len(d.PutEndpoints)+len(d.DelEndpoints) > 0 || d.Settings != nil {
			t.Errorf("%s: more than members is told: %+v", tt.name, d)
		}
	}
}
