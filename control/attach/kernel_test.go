package attach

import (
	"context"
	"log/slog"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/kernel"
	"github.com/routerd/routerd/integration/await"
)

// realKernel makes the world's sink the one that the daemon has.
func (w *world) realKernel() {
	w.t.Helper()
	var k *kernel.Kernel
	err := w.host.Do(func() (err error) {
		k, err = kernel.New(kernel.Config{Log: slog.New(slog.DiscardHandler)})
		return err
	})
	if err != nil {
		w.t.Fatal(err)
	}
	k.Replace(dataplane.SourceCore, nil)
	k.Synced(dataplane.SourceCore)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- k.Run(ctx) }()
	w.t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			w.t.Error(err)
		}
	})
	w.cfg = func(c *Config) { c.Sink = k }
}

// programmed verifies what the host's kernel has for an attachment when ADD
// returns.
func (w *world) programmed(res Result) {
	w.t.Helper()
	if err := w.wire.VerifyRoute(w.t.Context(), res.Device, res.Addresses[0].Addr); err != nil {
		w.t.Error(err)
	}
	err := w.host.Do(func() error {
		for name, want := range map[string]string{
			"conf/" + res.Device + "/proxy_arp": "1", "conf/" + res.Device + "/forwarding": "1",
			"conf/" + res.Device + "/route_localnet": "1", "neigh/" + res.Device + "/proxy_delay": "0",
		} {
			b, err := os.ReadFile("/proc/sys/net/ipv4/" + name)
			if err != nil {
				return err
			}
			if got := strings.TrimSpace(string(b)); got != want {
				w.t.Errorf("%s is %s, want %s", name, got, want)
			}
		}
		return nil
	})
	if err != nil {
		w.t.Error(err)
	}
}

// The device that holds the route and the settings is made anew under the same
// name: by a repair, and by the pod's next container. Its kernel state must not
// be taken for that of the old one.
func TestKernelFollowsDevice(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.realKernel()
	a := w.start()
	first := podRequest(w.request(1), "ns1", "web-0")
	res := w.add(a, first)
	w.programmed(res)
	for range 5 {
		if err := w.wire.Detach(t.Context(), res.Device, first.ID); err != nil {
			t.Fatal(err)
		}
		w.programmed(w.add(a, first))
		w.check(a, first)
	}
	second := podRequest(w.request(2), "ns1", "web-0")
	next := w.add(a, second)
	if next.Device != res.Device {
		t.Fatalf("device %s, then %s", res.Device, next.Device)
	}
	w.programmed(next)
	w.del(a, first)
	w.programmed(next)
	w.check(a, second)
	w.del(a, second)
	await.True(w.t, "no route", func() bool {
		routes, err := w.sink.netlink.RouteList(nil, unix.AF_INET)
		return err == nil && len(routes) == 0
	})
}
