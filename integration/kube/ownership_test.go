package kube_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/routerd/routerd/control/ipam"
	"github.com/routerd/routerd/integration/kube"
	"github.com/routerd/routerd/integration/ownership"
	"github.com/routerd/routerd/store"
	kubestore "github.com/routerd/routerd/store/kube"
	"github.com/routerd/routerd/store/kube/convert"
)

// ownershipTime is some twenty lives of hosts.
const ownershipTime = 10 * time.Second

// faultyAPI is the API behind a proxy that makes faults.
type faultyAPI struct {
	config kubestore.Config
	proxy  *kube.Proxy

	made sync.Map // the names of Nodes
}

// ofIPAM is a datastore of which nothing is watched but what IPAM follows.
type ofIPAM struct{ store.Store }

func (s ofIPAM) Watch(ctx context.Context, _ ...store.Kind) <-chan store.Batch {
	return s.Store.Watch(ctx, ipam.Kinds()...)
}

func (f *faultyAPI) Open() (store.Store, error) {
	s, err := kubestore.Open(f.config)
	return ofIPAM{s}, err
}

// MakeNode does what a kubelet does.
func (f *faultyAPI) MakeNode(ctx context.Context, _ store.Store, name string) error {
	f.made.Store(name, nil)
	_, err := server.Do(ctx, http.MethodPost, nodesPath, "application/json", fmt.Appendf(nil, `{"apiVersion":"v1","kind":"Node","metadata":{"name":%q}}`, name))
	if err != nil && strings.Contains(err.Error(), "AlreadyExists") {
		return nil
	}
	return err
}

func (*faultyAPI) DeleteNode(ctx context.Context, _ store.Store, name string) error {
	_, err := server.Do(ctx, http.MethodDelete, nodesPath+"/"+name, "", nil)
	if err != nil && strings.Contains(err.Error(), "NotFound") {
		return nil
	}
	return err
}

// Harm has requests be refused, cut off, lost, late and answered as it was, watches lag behind, end and have their
// history gone, and now and then nothing answer at all.
func (f *faultyAPI) Harm(ctx context.Context, _ store.Store) {
	pause := func(least, more time.Duration) {
		select {
		case <-ctx.Done():
		case <-time.After(least + rand.N(more)):
		}
	}
	defer f.proxy.Disturb(kube.Faults{})
	for ctx.Err() == nil {
		f.proxy.Disturb(kube.Faults{Refuse: rand.Float64() / 20, Cut: rand.Float64() / 20, Lose: rand.Float64() / 10, Delay: 1 + rand.N(100*time.Millisecond), Lag: rand.N(time.Second), Stale: rand.Float64() / 2})
		pause(200*time.Millisecond, 500*time.Millisecond)
		switch rand.N(4) {
		case 0:
			heal := f.proxy.Interrupt()
			pause(100*time.Millisecond, 500*time.Millisecond)
			heal()
		case 1:
			f.proxy.Expire(f.watched()...)
		}
	}
}

// watched is where the hosts watch.
func (f *faultyAPI) watched() []string {
	paths := []string{nodesPath}
	for _, kind := range ipam.Kinds() {
		if r, ok := convert.Custom(convert.Group(f.config.APIGroup), kind); ok {
			paths = append(paths, r.Path(""))
		}
	}
	return paths
}

func (f *faultyAPI) Harmed() int { return f.proxy.Faults() }

// TestOwnership: no address has two owners, and none is lost or without one, on an API whose
// answers and watches go wrong in every way.
func TestOwnership(t *testing.T) {
	_, proxy := open(t, convert.V3)
	config, err := server.Kubeconfig(proxy.URL, kube.Token)
	if err != nil {
		t.Fatal(err)
	}
	api := &faultyAPI{config: kubestore.Config{Kubeconfig: config, APIGroup: string(convert.V3)}, proxy: proxy}
	t.Cleanup(func() {
		for name := range api.made.Range {
			if err := api.DeleteNode(context.WithoutCancel(t.Context()), nil, name.(string)); err != nil {
				t.Error(err)
			}
		}
	})
	ownership.Run(t, ownership.Config{Datastore: api, Time: ownershipTime, Life: time.Second, MinHarmed: 20})
}
