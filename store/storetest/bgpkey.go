package storetest

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/store"
)

// testBGPKey: hosts that begin a cluster at once make one key of BGP; it is replaced in two
// steps, each of which changes nothing when it is done again, as after the first half of it,
// and taken away for good. A cluster that is there gets none by itself.
func testBGPKey(t *testing.T, s store.Store) {
	read := func(want func(*store.Secret) bool) *store.Secret {
		t.Helper()
		k, err := store.BGPKey(t.Context(), s)
		if err != nil || !want(k) {
			t.Fatalf("%q, %v", k.KeyIDs(), err)
		}
		// The nodes are told to look by a resource that they watch.
		o, err := s.Get(t.Context(), store.ResourceKey(store.KindBGPConfiguration, store.DefaultName))
		if err != nil {
			t.Fatal(err)
		}
		told := o.Value.(*v3.BGPConfiguration).Annotations[store.AnnotationBGPKeys]
		if want := strings.Join(k.KeyIDs(), ","); told != "" && (k == nil) != (told == "none") || !strings.HasPrefix(told, want) && told != "" && k != nil {
			t.Errorf("nodes are told %q of %q", told, want)
		}
		return k
	}
	alone := func(k *store.Secret) bool { return k != nil && len(k.KeyIDs()) == 1 && !k.Open() }
	rotate := func() *store.Secret {
		t.Helper()
		k, err := store.RotateBGPKey(t.Context(), s)
		if err != nil {
			t.Fatal(err)
		}
		again, err := store.RotateBGPKey(t.Context(), s)
		if diff := cmp.Diff(k, again); err != nil || diff != "" {
			t.Errorf("again: %v\n%s", err, diff)
		}
		return read(func(have *store.Secret) bool { return cmp.Equal(have, k) })
	}
	finish := func(k *store.Secret) {
		t.Helper()
		for range 2 {
			if _, err := store.FinishBGPKey(t.Context(), s, k.KeyIDs()[0]); err != nil {
				t.Fatal(err)
			}
		}
		read(func(have *store.Secret) bool { return alone(have) && have.KeyIDs()[0] == k.KeyIDs()[0] })
	}
	drop := func() {
		t.Helper()
		for range 2 {
			if err := store.DropBGPKey(t.Context(), s); err != nil {
				t.Fatal(err)
			}
		}
		read(func(k *store.Secret) bool { return k == nil })
	}

	const hosts = 8
	errs := make(chan error)
	for range hosts {
		go func() {
			err := store.Bootstrap(t.Context(), s)
			k, err2 := store.BGPKey(t.Context(), s)
			if err2 == nil && !alone(k) {
				err2 = errors.New("a host that began the cluster has no key")
			}
			errs <- errors.Join(err, err2)
		}()
	}
	for range hosts {
		if err := <-errs; err != nil {
			t.Fatal(err)
		}
	}
	began := read(alone)
	if err := store.Bootstrap(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	read(func(k *store.Secret) bool { return cmp.Equal(k, began) })

	second := rotate()
	if ids := second.KeyIDs(); len(ids) != 2 || ids[1] != began.KeyIDs()[0] || ids[0] == ids[1] || second.Open() {
		t.Errorf("the second: %q after %q, open %t", ids, began.KeyIDs(), second.Open())
	}
	finish(second)
	if _, err := store.FinishBGPKey(t.Context(), s, "another"); err == nil || !strings.Contains(err.Error(), "somebody else changed it") {
		t.Errorf("a key that is not there any more: %v", err)
	}

	drop()
	if err := store.Bootstrap(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	read(func(k *store.Secret) bool { return k == nil })
	first := rotate()
	if len(first.KeyIDs()) != 1 || !first.Open() {
		t.Errorf("the first: %q, open %t", first.KeyIDs(), first.Open())
	}
	finish(first)

	// One that somebody wrote past us.
	if _, err := s.Txn(t.Context(), store.Op{Action: store.Put, Object: store.Object{Key: store.SecretKey(store.BGPSecret), Value: &store.Secret{Key: []byte("short")}}}); err != nil {
		t.Fatal(err)
	}
	_, reads := store.BGPKey(t.Context(), s)
	_, rotates := store.RotateBGPKey(t.Context(), s)
	for _, err := range []error{reads, rotates} {
		if err == nil || !strings.Contains(err.Error(), "has a key of 5 bytes, not of 32: delete it (routerctl bgp key off)") {
			t.Error(err)
		}
	}
	drop()
}
