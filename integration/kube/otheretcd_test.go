package kube_test

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	"sigs.k8s.io/yaml"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/kube"
	"github.com/routerd/routerd/store"
	kubestore "github.com/routerd/routerd/store/kube"
	"github.com/routerd/routerd/store/kube/convert"
)

// TestDebiansEtcd: the API server on Debian's etcd 3.4, which cannot say how far it is: lists are not
// streamed, and no bookmark tells that nothing was written. The state is told, and each change, and an
// outage ends although nothing of the resource was written since.
func TestDebiansEtcd(t *testing.T) {
	ctx := await.Context(t)
	api, err := kube.Start(ctx, kube.ServerConfig{Dir: t.TempDir(), Etcd: "/usr/bin/etcd"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(api.Close)
	pools := definePools(ctx, t, api)
	proxy, err := api.Proxy()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(proxy.Close)
	config, err := api.Kubeconfig(proxy.URL, kube.Token)
	if err != nil {
		t.Fatal(err)
	}
	s := openStore(t, kubestore.Config{Kubeconfig: config, APIGroup: string(convert.V3)})
	make := func(name string) {
		t.Helper()
		p := v3.NewIPPool()
		p.Name, p.Spec.CIDR = name, "10.0.0.0/16"
		if _, err := store.Create(ctx, s, p); err != nil {
			t.Fatal(err)
		}
	}
	make("first")
	ch := s.Watch(ctx, store.KindIPPool)
	told := map[string]bool{}
	next := func(what string, done func(b store.Batch) bool) {
		t.Helper()
		for {
			select {
			case b := <-ch:
				for _, e := range b.Events {
					told[e.Key.Name] = !e.Deleted()
				}
				if done(b) {
					return
				}
			case <-ctx.Done():
				t.Fatalf("%s: %v", what, ctx.Err())
			}
		}
	}
	next("the state", func(b store.Batch) bool { return b.Synced && told["first"] })
	make("second")
	next("a change", func(store.Batch) bool { return told["second"] })

	heal := proxy.Interrupt()
	next("notice of the outage", func(b store.Batch) bool { return b.Err != nil })
	if _, err := api.Do(ctx, http.MethodPost, nodesPath, "application/json", []byte(`{"apiVersion":"v1","kind":"Node","metadata":{"name":"other"}}`)); err != nil {
		t.Fatal(err)
	}
	heal()
	began := time.Now()
	next("the end of the outage", func(b store.Batch) bool { return b.Synced })
	t.Logf("the outage ended after %v", time.Since(began).Round(time.Millisecond))
	make("third")
	next("a change after it", func(store.Batch) bool { return told["third"] })
	if !told["first"] || !told["second"] {
		t.Errorf("told is %v", told)
	}
	for _, r := range proxy.Requests() {
		// One with a limit of 1 asks how far the server is.
		if limit := r.Query().Get("limit"); r.Path == pools && limit != "" && limit != "1" {
			return
		}
	}
	t.Error("the state was never listed, so the etcd says how far it is: this test shows nothing")
}

// definePools defines IPPools on an API server, and returns where they are.
func definePools(ctx context.Context, t *testing.T, api *kube.Server) string {
	t.Helper()
	text, err := os.ReadFile("../../configs/kubernetes/crds/" + string(convert.V3) + ".yaml")
	if err != nil {
		t.Fatal(err)
	}
	for doc := range bytes.SplitSeq(text, []byte("---\n")) {
		raw, err := yaml.YAMLToJSON(doc)
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(string(raw), `"name":"ippools.projectcalico.org"`) {
			continue
		}
		if _, err := api.Do(ctx, http.MethodPost, "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", "application/json", raw); err != nil {
			t.Fatal(err)
		}
	}
	r, _ := convert.Custom(convert.V3, store.KindIPPool)
	await.Until(t, "pools are served", func() error {
		_, err := api.Do(ctx, http.MethodGet, r.Path("")+"?limit=1", "", nil)
		if err != nil {
			err = fmt.Errorf("not yet: %w", err)
		}
		return err
	})
	return r.Path("")
}
