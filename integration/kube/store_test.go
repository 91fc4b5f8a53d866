package kube_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"testing"

	"github.com/routerd/routerd/integration/kube"
	"github.com/routerd/routerd/store"
	kubestore "github.com/routerd/routerd/store/kube"
	"github.com/routerd/routerd/store/kube/convert"
	"github.com/routerd/routerd/store/storetest"
)

// world is the one cluster, which tests have one after the other.
var world sync.Mutex

// open returns an empty datastore in a group, reached through a proxy.
func open(t *testing.T, g convert.Group) (*kubestore.Store, *kube.Proxy) {
	t.Helper()
	world.Lock()
	t.Cleanup(world.Unlock)
	if err := wipe(t.Context(), g); err != nil {
		t.Fatal(err)
	}
	p, err := server.Proxy()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	return dial(t, p.URL, g), p
}

func dial(t *testing.T, url string, g convert.Group) *kubestore.Store {
	t.Helper()
	config, err := server.Kubeconfig(url, kube.Token)
	if err != nil {
		t.Fatal(err)
	}
	return openStore(t, kubestore.Config{Kubeconfig: config, APIGroup: string(g)})
}

// dialAs opens the v3 group with a kubeconfig.
func dialAs(t *testing.T, config string) *kubestore.Store {
	t.Helper()
	return openStore(t, kubestore.Config{Kubeconfig: config, APIGroup: string(convert.V3)})
}

func openStore(t *testing.T, c kubestore.Config) *kubestore.Store {
	t.Helper()
	s, err := kubestore.Open(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// wipe deletes all that a test left in a group.
func wipe(ctx context.Context, g convert.Group) error {
	for _, kind := range convert.CustomKinds() {
		r, _ := convert.Custom(g, kind)
		for _, namespace := range []string{"", "default"} {
			if r.Namespaced != (namespace != "") {
				continue
			}
			if _, err := server.Do(ctx, http.MethodDelete, r.Path(namespace), "", nil); err != nil {
				return err
			}
		}
	}
	_, err := server.Do(ctx, http.MethodDelete, convert.Secrets(g).Resource.Path("kube-system"), "", nil)
	return err
}

// faulty makes the suite's faults out of the proxy's.
type faulty struct {
	*kubestore.Store
	proxy *kube.Proxy
	group convert.Group
}

func (f faulty) Compact(context.Context) error {
	r, ok := convert.Custom(f.group, store.KindIPPool)
	if !ok {
		return errors.New("pools have no resource")
	}
	f.proxy.Expire(r.Path(""))
	return nil
}

func (f faulty) Interrupt() func() { return f.proxy.Interrupt() }

func (f faulty) PutRaw(context.Context, string, []byte) error {
	return fmt.Errorf("the API server takes no bytes")
}

func TestConformanceV1(t *testing.T) { conformance(t, convert.V1) }

func TestConformanceV3(t *testing.T) { conformance(t, convert.V3) }

func conformance(t *testing.T, g convert.Group) {
	storetest.RunSequential(t, func(t *testing.T) store.Store {
		s, p := open(t, g)
		return faulty{s, p, g}
	})
}
