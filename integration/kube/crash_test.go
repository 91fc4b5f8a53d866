package kube_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"slices"
	"testing"
	"time"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/control/cluster/clustertest"
	"github.com/routerd/routerd/control/collect"
	"github.com/routerd/routerd/control/ipam"
	"github.com/routerd/routerd/control/ipam/audit"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/kube"
	"github.com/routerd/routerd/store"
	kubestore "github.com/routerd/routerd/store/kube"
	"github.com/routerd/routerd/store/kube/convert"
)

// crashCluster is a cluster of hosts that give addresses, through a proxy that lets some of
// their writes through.
type crashCluster struct {
	t     *testing.T
	group convert.Group
	proxy *kube.Proxy
	store *kubestore.Store // beside the proxy
}

// crashHost is one of these hosts.
type crashHost struct {
	*ipam.Allocator
	store store.Store
	stop  func()
}

func newCrashCluster(t *testing.T, g convert.Group) *crashCluster {
	t.Helper()
	_, proxy := open(t, g)
	c := &crashCluster{t: t, group: g, proxy: proxy, store: dial(t, "", g)}
	create(t, nodesPath, `{"apiVersion":"v1","kind":"Node","metadata":{"name":"a"}}`)
	return c
}

// reset begins again with one pool and nothing given.
func (c *crashCluster) reset() {
	c.t.Helper()
	for _, kind := range []store.Kind{store.KindIPAMBlock, store.KindIPAMAffinity, store.KindIPAMHandle} {
		if _, err := server.Do(c.t.Context(), http.MethodDelete, resource(c.t, c.group, kind), "", nil); err != nil {
			c.t.Fatal(err)
		}
	}
	c.pool("")
}

// pool writes the pool, for the nodes that a selector selects.
func (c *crashCluster) pool(nodes string) {
	c.t.Helper()
	p := v3.NewIPPool()
	p.Name, p.Spec.CIDR, p.Spec.BlockSize, p.Spec.NodeSelector = "p", "10.0.0.0/24", 30, nodes
	store.SetDefaults(p)
	if _, err := c.store.Txn(c.t.Context(), store.Op{Action: store.Put, Object: store.Object{Key: store.ResourceKey(store.KindIPPool, "p"), Value: p}}); err != nil {
		c.t.Fatal(err)
	}
}

// start starts a host.
func (c *crashCluster) start(node string, reserve int) *crashHost {
	c.t.Helper()
	config, err := server.Kubeconfig(c.proxy.URL, kube.Token)
	if err != nil {
		c.t.Fatal(err)
	}
	s, err := kubestore.Open(kubestore.Config{Kubeconfig: config, APIGroup: string(c.group)})
	if err != nil {
		c.t.Fatal(err)
	}
	a := ipam.New(ipam.Config{Store: s, Node: node, Log: slog.New(slog.DiscardHandler), Reserve: ipam.ReserveConfig{Min: reserve, Max: reserve}, Piecewise: true})
	ctx, cancel := context.WithCancel(context.Background())
	steps, followed := clustertest.Follow(ctx, node, ofIPAM{s}, ipam.Kinds()...)
	done := make(chan error, 1)
	go func() { done <- a.Run(ctx, steps) }()
	return &crashHost{a, s, func() {
		cancel()
		if err := <-done; err != nil {
			c.t.Error(err)
		}
		<-followed
		s.Close()
	}}
}

func (c *crashCluster) assign(h *crashHost, handle string) error {
	_, err := h.Assign(await.Context(c.t), ipam.Request{Family: dataplane.IPv4, Handle: handle})
	return err
}

func (c *crashCluster) mustAssign(h *crashHost, handle string) {
	c.t.Helper()
	if err := c.assign(h, handle); err != nil {
		c.t.Fatal(err)
	}
}

// filled waits until a host has a reserve, or was cut off while it made one.
func (c *crashCluster) filled(h *crashHost) {
	c.t.Helper()
	faults := c.proxy.Faults()
	await.Until(c.t, "the reserve is filled, or cut off", func() error {
		if h.Ready()["p"] == 0 && c.proxy.Faults() == faults {
			return errors.New("neither")
		}
		return nil
	})
}

// sound fails the test for what no crash may leave, and returns what else "ipam check" finds,
// without leaks: no endpoint has what these hosts give.
func (c *crashCluster) sound() (found []audit.Finding) {
	c.t.Helper()
	r, err := audit.Read(c.t.Context(), c.store)
	if err != nil {
		c.t.Fatal(err)
	}
	given, all := r.Check()
	counts := map[string]map[string]int{}
	for _, a := range given {
		if counts[a.Handle] == nil {
			counts[a.Handle] = map[string]int{}
		}
		counts[a.Handle][a.Block.String()]++
	}
	for _, o := range r.Handles {
		for cidr, n := range counts[o.Key.Name] {
			if known := o.Value.(*store.Handle).Block[cidr]; known < n {
				c.t.Errorf("handle %s has %d addresses of %s and knows of %d", o.Key.Name, n, cidr, known)
			}
		}
	}
	for _, f := range all {
		switch f.Problem {
		case "leaked":
		case "empty handle", "claim without block", "block without claim", "claim of no node", "block of no node":
			found = append(found, f)
		default:
			c.t.Errorf("%s: %s: %s", f.Problem, f.What, f.Why)
		}
	}
	return found
}

// looks has a collector look twice, so that what it suspects is due.
func looks(look func(context.Context) (collect.Report, error)) func(context.Context) error {
	return func(ctx context.Context) error {
		_, err := look(ctx)
		if err == nil {
			_, err = look(ctx)
		}
		return err
	}
}

// leaving is a host that uses nothing but what it has been told.
type leaving struct {
	*ipam.Allocator
	uses []string
}

func (l leaving) Uses(handle string) bool { return slices.Contains(l.uses, handle) }

func (leaving) Wired(context.Context) (map[string]bool, error) { return nil, nil }

func (l leaving) Release(ctx context.Context, used func(ipam.Claim) bool, claims ...ipam.Claim) ([]netip.Addr, error) {
	return l.ReleaseUnless(ctx, used, claims...)
}

// crash is a transaction, or several that belong together.
type crash struct {
	before  []string // handles that have an address of node a
	reserve int      // of node a
	again   bool     // node a starts when its writes are counted, not before
	do      func(c *crashCluster, h *crashHost) error
}

const crashGrace = time.Nanosecond

var crashes = map[string]crash{
	"first address, with its block": {do: func(c *crashCluster, h *crashHost) error { return c.assign(h, "new") }},
	"another address":               {before: []string{"old"}, do: func(c *crashCluster, h *crashHost) error { return c.assign(h, "new") }},
	"another address of one handle": {before: []string{"old"}, do: func(c *crashCluster, h *crashHost) error { return c.assign(h, "old") }},
	"release": {before: []string{"old", "goes"}, do: func(c *crashCluster, h *crashHost) error {
		_, err := h.ReleaseHandle(await.Context(c.t), "goes")
		return err
	}},
	"release from two blocks": {before: []string{"goes", "a", "b", "c", "goes"}, do: func(c *crashCluster, h *crashHost) error {
		_, err := h.ReleaseHandle(await.Context(c.t), "goes")
		return err
	}},
	"the block given up": {before: []string{"goes"}, do: func(c *crashCluster, h *crashHost) error {
		faults := c.proxy.Faults()
		if _, err := h.ReleaseHandle(await.Context(c.t), "goes"); err != nil {
			return err
		}
		c.pool("rack == 'other'") // by an operator
		await.Until(c.t, "the block is given up, or that is cut off", func() error {
			_, _ = h.Tidy(await.Context(c.t)) // it may be cut off
			left, _, err := c.store.List(c.t.Context(), store.KindIPAMAffinity, "a")
			if err == nil && len(left) > 0 && c.proxy.Faults() == faults {
				err = fmt.Errorf("%d claims", len(left))
			}
			return err
		})
		return nil
	}},
	"the reserve": {reserve: 2, again: true, do: func(c *crashCluster, h *crashHost) error {
		c.filled(h)
		return nil
	}},
	"confirm": {reserve: 2, do: func(c *crashCluster, h *crashHost) error {
		got, ok := h.Take(ipam.Part{Request: ipam.Request{Family: dataplane.IPv4, Handle: "new"}})
		if !ok {
			return errors.New("nothing is in reserve")
		}
		return errors.Join(h.Confirm(await.Context(c.t), ipam.Confirmation{Addr: got[0].Addr, Handle: "new"})...)
	}},
	"leaks of the host": {before: []string{"old", "goes"}, do: func(c *crashCluster, h *crashHost) error {
		l := collect.New(collect.Config{Store: h.store, Node: "a", Host: leaving{h.Allocator, []string{"old"}}, Grace: crashGrace})
		return looks(l.LookHost)(await.Context(c.t))
	}},
	"leaks of the cluster": {before: []string{"old"}, do: func(c *crashCluster, h *crashHost) error {
		l := collect.New(collect.Config{Store: h.store, Node: "a", Grace: crashGrace})
		return looks(l.LookCluster)(await.Context(c.t))
	}},
}

// TestCrashBetweenWritesOfIPAM lets a host die between any two writes of each transaction of
// IPAM's and of the collector's. What is left is sound: no block contradicts itself, each
// address has a handle that knows of it; and the host that starts anew, and the collector,
// leave nothing behind.
func TestCrashBetweenWritesOfIPAM(t *testing.T) {
	for g, names := range map[convert.Group][]string{
		convert.V3: slices.Collect(func(yield func(string) bool) {
			for name := range crashes {
				if !yield(name) {
					return
				}
			}
		}),
		// What is written differs in how affinities are marked.
		convert.V1: {"first address, with its block", "the block given up", "leaks of the cluster"},
	} {
		t.Run(string(g), func(t *testing.T) {
			c := newCrashCluster(t, g)
			for _, name := range names {
				c.crashes(name, crashes[name])
			}
		})
	}
}

// crashes lets a transaction die after any number of writes, until it needs no more.
func (c *crashCluster) crashes(name string, tt crash) {
	c.t.Helper()
	for n, cut := 0, true; cut; n++ {
		if c.t.Failed() {
			return
		}
		what := fmt.Sprintf("%s, after %d writes", name, n)
		c.reset()
		c.another(name == "leaks of the cluster")
		var h *crashHost
		if !tt.again {
			h = c.start("a", tt.reserve)
			for _, handle := range tt.before {
				c.mustAssign(h, handle)
			}
			if tt.reserve > 0 {
				c.filled(h)
			}
		}
		faults := c.proxy.Faults()
		c.proxy.LetWrites(n)
		if tt.again {
			h = c.start("a", tt.reserve)
		}
		if err := tt.do(c, h); err != nil && !errors.Is(err, store.ErrUnavailable) {
			c.t.Errorf("%s: it fails with %v", what, err)
		}
		h.stop()
		c.proxy.LetWrites(-1)
		cut = c.proxy.Faults() > faults
		c.sound()

		c.pool("")
		again := c.start("a", 0)
		c.mustAssign(again, "after")
		if _, err := again.Tidy(await.Context(c.t)); err != nil {
			c.t.Errorf("%s: %v", what, err)
		}
		c.sound()
		for _, handle := range append(slices.Clone(tt.before), "new", "after", store.ReserveHandle("a")) {
			if _, err := again.ReleaseHandle(await.Context(c.t), handle); err != nil {
				c.t.Errorf("%s: release %s: %v", what, handle, err)
			}
		}
		l := collect.New(collect.Config{Store: again.store, Node: "a", Grace: crashGrace})
		if err := looks(l.LookCluster)(await.Context(c.t)); err != nil {
			c.t.Errorf("%s: %v", what, err)
		}
		for _, f := range c.sound() {
			c.t.Errorf("%s: left behind: %s: %s: %s", what, f.Problem, f.What, f.Why)
		}
		again.stop()
		if !cut {
			c.t.Logf("%s: %d writes", name, n)
		}
	}
}

// another has a host give addresses whose Node is then deleted.
func (c *crashCluster) another(is bool) {
	c.t.Helper()
	if !is {
		return
	}
	api := &faultyAPI{}
	if err := api.MakeNode(c.t.Context(), nil, "b"); err != nil {
		c.t.Fatal(err)
	}
	h := c.start("b", 0)
	c.mustAssign(h, "lost")
	h.stop()
	if err := api.DeleteNode(c.t.Context(), nil, "b"); err != nil {
		c.t.Fatal(err)
	}
}
