package kube_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"testing"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/kube"
	"github.com/routerd/routerd/store"
	kubestore "github.com/routerd/routerd/store/kube"
	"github.com/routerd/routerd/store/kube/convert"
)

// TestLargeObjects: an object of 1 MB is written, read and told; one that the server's datastore
// does not take is refused, and what comes after it is told all the same.
func TestLargeObjects(t *testing.T) {
	s, _ := open(t, convert.V3)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ch := s.Watch(ctx, store.KindGlobalNetworkSet)
	set := func(name string, size int) *v3.GlobalNetworkSet {
		o := store.New(store.KindGlobalNetworkSet).(*v3.GlobalNetworkSet)
		o.Name = name
		for i := 0; size > 0; i++ {
			o.Spec.Nets = append(o.Spec.Nets, fmt.Sprintf("10.%d.%d.%d/32", i>>16, i>>8&255, i&255))
			size -= len(o.Spec.Nets[i]) + 3 // as JSON
		}
		return o
	}
	large := set("large", 1<<20)
	if _, err := store.Create(ctx, s, large); err != nil {
		t.Fatal(err)
	}
	e := until(t, ch, "the large one", func(e store.Event) bool { return e.Key.Name == "large" })
	if n := len(e.Object.Raw); n < 1<<20 {
		t.Errorf("%d bytes are told", n)
	}
	o, err := s.Get(ctx, e.Key)
	if err != nil || len(o.Raw) != len(e.Object.Raw) {
		t.Errorf("%d bytes are read, %v", len(o.Raw), err)
	}
	for _, size := range []int{7 << 18, 5 << 19, 4 << 20} { // etcd's server, its client and the API server refuse it
		if _, err := store.Create(ctx, s, set("too-large", size)); !errors.Is(err, store.ErrInvalid) || !strings.Contains(err.Error(), "too-large") {
			t.Errorf("one that is too large: %v", err)
		}
	}
	if _, err := store.Create(ctx, s, set("small", 100)); err != nil {
		t.Error(err)
	}
	until(t, ch, "the one after it", func(e store.Event) bool { return e.Key.Name == "small" })
}

// TestOlderDefinition: where the definition in the API has no field of this name, apply is
// refused with it before anything is written, and what a daemon writes is said once.
func TestOlderDefinition(t *testing.T) {
	open(t, convert.V3)
	const path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/ipreservations.projectcalico.org"
	schema := func(text string) {
		t.Helper()
		patch := `[{"op":"replace","path":"/spec/versions/0/schema/openAPIV3Schema","value":` + text + `}]`
		if _, err := server.Do(context.WithoutCancel(t.Context()), http.MethodPatch, path, "application/json-patch+json", []byte(patch)); err != nil {
			t.Fatal(err)
		}
	}
	raw, err := server.Do(t.Context(), http.MethodGet, path, "", nil)
	if err != nil {
		t.Fatal(err)
	}
	var crd struct {
		Spec struct {
			Versions []struct {
				Schema struct {
					Text json.RawMessage `json:"openAPIV3Schema"`
				}
			}
		}
	}
	if err := json.Unmarshal(raw, &crd); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { schema(string(crd.Spec.Versions[0].Schema.Text)) })
	schema(`{"type":"object","properties":{"spec":{"type":"object","properties":{"older":{"type":"string"}}}}}`)

	config, err := server.Kubeconfig("", kube.Token)
	if err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	s := openStore(t, kubestore.Config{Kubeconfig: config, APIGroup: string(convert.V3), Logger: slog.New(slog.NewTextHandler(&log, nil))})
	r := store.New(store.KindIPReservation).(*v3.IPReservation)
	r.Name, r.Spec.ReservedCIDRs = "r", []string{"10.0.0.0/30"}
	key, err := store.KeyOf(r)
	if err != nil {
		t.Fatal(err)
	}
	op := store.Op{Action: store.Put, Object: store.Object{Key: key, Value: r}}
	await.Until(t, "what an operator writes is refused", func() error {
		if err := s.Try(t.Context(), op); !errors.Is(err, store.ErrInvalid) || !strings.Contains(err.Error(), `unknown field "spec.reservedCIDRs"`) || !strings.Contains(err.Error(), "routerctl kubernetes crds") {
			return fmt.Errorf("tried: %w", err)
		}
		return nil
	})
	if _, err := s.Get(t.Context(), key); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("after the try: %v", err)
	}
	for range 2 {
		r.Labels = map[string]string{"a": fmt.Sprint(len(r.Labels))}
		if _, err := s.Txn(t.Context(), op); err != nil {
			t.Fatal(err)
		}
	}
	if said := log.String(); strings.Count(said, "field=spec.reservedCIDRs") != 1 {
		t.Errorf("said is %q", said)
	}
}
