package kernel

import (
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/dataplane"
)

// What a packet looks up after its route is not taken away before packets that
// chose the route before its change are gone. Where no route has changed, and
// for what no packet looks up, nothing is waited for.
func TestPacketsAreOutBeforeRemoval(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	var did []string
	note := func(s string) {
		mu.Lock()
		defer mu.Unlock()
		did = append(did, s)
	}
	_, k := newHost(t, func(cfg *Config, _ *int, _ *func(transport) transport) {
		cfg.quiesce = func() { note("packets are out") }
		cfg.Hooks.Written = func(kind dataplane.Kind, removed bool, _ int) {
			if removed {
				note("removed " + kind.String())
			} else {
				note(kind.String())
			}
		}
	})
	device := dataplane.Link{
		Name: nameVXLAN, Type: dataplane.LinkVXLAN, MTU: 1450, MAC: mac("66:07:02:c1:cc:60"), VNI: 4096, Port: 4789, Local: addr("10.0.0.1"), Parent: "up0",
	}
	vtep := dataplane.MAC{2, 0, 0, 0, 0, 1}
	neighbour := func(a string) dataplane.Neighbour {
		return dataplane.Neighbour{Link: nameVXLAN, Addr: addr(a), MAC: vtep}
	}
	fdb := dataplane.FDBEntry{Link: nameVXLAN, MAC: vtep, Dst: addr("10.0.0.2")}
	k.put(device, neighbour("192.168.2.1"), neighbour("192.168.2.2"), fdb, via(8, "192.168.2.1", nameVXLAN), route("192.168.2.0/26", 8))

	for _, step := range []struct {
		name string
		put  []dataplane.Object
		del  []dataplane.Object
		want []string
	}{
		{"a next hop leaves the tunnel", []dataplane.Object{via(8, "10.0.0.2", "up0")}, []dataplane.Object{neighbour("192.168.2.1"), fdb}, []string{
			"nexthop", "packets are out", "removed fdb", "removed neighbour",
		}},
		{"no route changed since", nil, []dataplane.Object{neighbour("192.168.2.2")}, []string{"removed neighbour"}},
		{"a route goes, which says itself what becomes of packets", nil, []dataplane.Object{route("192.168.2.0/26", 8)}, []string{"removed route"}},
		{"the device, after that", nil, []dataplane.Object{device}, []string{"packets are out", "removed link"}},
	} {
		mu.Lock()
		did = nil
		mu.Unlock()
		var keys []dataplane.Key
		for _, o := range step.del {
			keys = append(keys, o.Key())
		}
		k.wait(k.Update(dataplane.SourceCore, step.put, keys))
		mu.Lock()
		if diff := cmp.Diff(step.want, did); diff != "" {
			t.Errorf("%s (-want +got):\n%s", step.name, diff)
		}
		mu.Unlock()
	}
}

// The kernel can be asked, and nothing is waited for by the clock.
func TestMembarrier(t *testing.T) {
	t.Parallel()
	start := time.Now()
	if err := membarrier(); err != nil {
		t.Errorf("membarrier: %v", err)
	}
	t.Logf("packets were out after %v", time.Since(start))
}
