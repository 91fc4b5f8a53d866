package kube

import (
	"encoding/json"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/kube/kubetest"
)

// TestSetEvent: an object has one event of routerd's, in its namespace or, without one, in
// that of the API; it names the object by its uid.
func TestSetEvent(t *testing.T) {
	t.Parallel()
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	api, kubeconfig := kubetest.New(t, listener), filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(kubeconfig, []byte(api.Kubeconfig()), 0o600); err != nil {
		t.Fatal(err)
	}
	open := func(native bool) *Store {
		s, err := Open(Config{Kubeconfig: kubeconfig, APIGroup: "projectcalico.org", NativeOnly: native})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { s.Close() })
		return s
	}
	for path, text := range map[string]string{
		"/apis/networking.k8s.io/v1/namespaces/prod/networkpolicies/web":              `{"spec":{"podSelector":{}}}`,
		"/apis/policy.networking.k8s.io/v1alpha2/clusternetworkpolicies/without-tier": `{"spec":{"subject":{"namespaces":{}}}}`,
		"/apis/projectcalico.org/v3/globalnetworkpolicies/theirs":                     `{"spec":{}}`,
	} {
		if err := api.Create(path, text); err != nil {
			t.Fatal(err)
		}
	}
	type told struct{ Namespace, APIVersion, Kind, In, Name, Type, Reason, Message string }
	web := store.Key{Kind: store.KindNetworkPolicy, Namespace: "prod", Name: "knp.default.web"}
	unread := store.ResourceKey(store.KindGlobalNetworkPolicy, "kcnp.without-tier")
	theirs := store.ResourceKey(store.KindGlobalNetworkPolicy, "theirs")
	ofWeb := func(kind, reason, message string) told {
		return told{"prod", "networking.k8s.io/v1", "NetworkPolicy", "prod", "web", kind, reason, message}
	}
	ofUnread := told{"default", "policy.networking.k8s.io/v1alpha2", "ClusterNetworkPolicy", "", "without-tier", "Warning", "Not", "no tier"}
	ofTheirs := told{"default", "projectcalico.org/v3", "GlobalNetworkPolicy", "", "theirs", "Warning", "Not", "y"}
	events := func() (list []told) {
		raw, err := open(false).call(t.Context(), request{method: "GET", path: "/api/v1/events"})
		if err != nil {
			t.Fatal(err)
		}
		var l struct {
			Items []struct {
				Metadata       struct{ Namespace string }
				InvolvedObject eventReference
				Type, Reason   string
				Message        string
				FirstTimestamp string
			}
		}
		if err := json.Unmarshal(raw, &l); err != nil {
			t.Fatal(err)
		}
		for _, e := range l.Items {
			o := e.InvolvedObject
			if o.UID == "" || e.FirstTimestamp == "" {
				t.Errorf("no uid, or no time: %+v", e)
			}
			list = append(list, told{e.Metadata.Namespace, o.APIVersion, o.Kind, o.Namespace, o.Name, e.Type, e.Reason, e.Message})
		}
		return list
	}
	warn := func(text string) Event { return Event{Warning: true, Reason: "Not", Message: text} }
	s := open(false)
	for _, step := range []struct {
		what string
		s    *Store
		key  store.Key
		e    Event
		gone bool
		want []told
	}{
		{"mended before anything was said", s, web, Event{Reason: "Is", Message: "well"}, false, nil},
		{"a policy", s, web, warn("no port"), false, []told{ofWeb("Warning", "Not", "no port")}},
		{"something else", s, web, warn(strings.Repeat("ä", 700)), false, []told{ofWeb("Warning", "Not", strings.Repeat("ä", 510)+" …")}},
		{"mended", s, web, Event{Reason: "Is", Message: "well"}, false, []told{ofWeb("Normal", "Is", "well")}},
		{"one that cannot be read, in no namespace", s, unread, warn("no tier"), false, []told{ofUnread, ofWeb("Normal", "Is", "well")}},
		{"one that is gone", s, store.Key{Kind: store.KindNetworkPolicy, Namespace: "prod", Name: "knp.default.gone"}, warn("x"), true, []told{ofUnread, ofWeb("Normal", "Is", "well")}},
		{"one of another datastore", open(true), theirs, warn("x"), true, []told{ofUnread, ofWeb("Normal", "Is", "well")}},
		{"one of this one", s, theirs, warn("y"), false, []told{ofTheirs, ofUnread, ofWeb("Normal", "Is", "well")}},
	} {
		err := step.s.SetEvent(t.Context(), step.key, step.e)
		if errors.Is(err, store.ErrNotFound) != step.gone || err != nil && !step.gone {
			t.Errorf("%s: %v", step.what, err)
		}
		if diff := cmp.Diff(step.want, events()); diff != "" {
			t.Errorf("%s: the events (-want +got):\n%s", step.what, diff)
		}
	}
}
