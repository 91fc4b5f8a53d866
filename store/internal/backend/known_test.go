package backend

import (
	"maps"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/routerd/routerd/store"
)

// Keys are told apart by kind, namespace and name, as those of one map.
func TestDelivered(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		d, want := delivered{}, map[store.Key]known{}
		names := rapid.SampledFrom([]string{"", "a", "b"})
		for range rapid.IntRange(0, 40).Draw(t, "steps") {
			k := store.Key{
				Kind:      rapid.SampledFrom([]store.Kind{store.KindNode, store.KindIPAMAffinity}).Draw(t, "kind"),
				Namespace: names.Draw(t, "namespace"), Name: names.Draw(t, "name"),
			}
			if rapid.Bool().Draw(t, "remove") {
				d.remove(k)
				delete(want, k)
			} else {
				v := known{store.Revision(rapid.Int64Range(0, 9).Draw(t, "revision")), rapid.Uint64().Draw(t, "sum")}
				d.set(k, v)
				want[k] = v
			}
			got, ok := d.get(k)
			if w, wok := want[k]; got != w || ok != wok {
				t.Fatalf("%s: %v, %t, want %v, %t", k, got, ok, w, wok)
			}
		}
		got := slices.SortedFunc(d.keys(), compareAll)
		if diff := cmp.Diff(slices.SortedFunc(maps.Keys(want), compareAll), got); diff != "" {
			t.Errorf("keys (-want +got):\n%s", diff)
		}
	})
}

func compareAll(a, b store.Key) int {
	return slices.Compare([]string{string(a.Kind), a.Namespace, a.Name}, []string{string(b.Kind), b.Namespace, b.Name})
}
