package main

import (
	"context"
	"errors"
	"slices"
	"strings"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/routerd/routerd/store"
)

// list reads the objects of a kind. BlockAffinities are IPAM's records in another
// form.
func list(ctx context.Context, s store.Store, kind store.Kind, namespace string) ([]store.Object, store.Revision, error) {
	if kind != store.KindBlockAffinity {
		return s.List(ctx, kind, namespace)
	}
	records, rev, err := s.List(ctx, store.KindIPAMAffinity, "")
	if err != nil && !errors.Is(err, store.ErrDecode) {
		return nil, 0, err
	}
	objects := make([]store.Object, len(records))
	for i, r := range records {
		objects[i] = blockAffinity(r)
	}
	slices.SortFunc(objects, func(a, b store.Object) int { return strings.Compare(a.Key.Name, b.Key.Name) })
	return objects, rev, err
}

// blockAffinity shows a record that a node holds a block as Calico does where its
// datastore is Kubernetes.
func blockAffinity(r store.Object) store.Object {
	a := r.Value.(*store.Affinity)
	name := r.Key.Namespace + "-" + strings.NewReplacer(".", "-", ":", "-", "/", "-").Replace(r.Key.Name)
	state := a.State
	if a.Confirmed() {
		state = store.AffinityConfirmed // also old data, which has none
	}
	return store.Object{
		Key: store.ResourceKey(store.KindBlockAffinity, name), Revision: r.Revision,
		Value: &v3.BlockAffinity{
			ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec:       v3.BlockAffinitySpec{State: v3.BlockAffinityState(state), Node: r.Key.Namespace, CIDR: r.Key.Name, Deleted: a.Deleted},
		},
	}
}
