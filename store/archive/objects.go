package archive

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"golang.org/x/sync/errgroup"

	"github.com/routerd/routerd/store"
)

// secrets are the names of those that the hosts of a cluster share.
func secrets() []string { return []string{store.BGPSecret, store.ProbeSecret, store.ReachSecret} }

// inPart reports whether an object of a kind is another program's in Kubernetes' API, of which
// only a part is written: it is not made, nor removed.
func inPart(kind store.Kind) (absent string, is bool) {
	switch kind {
	case store.KindNode:
		return "the API has no Node of these names, which kubelets make", true
	case store.KindWorkloadEndpoint:
		return "the API has no pod of these names, for which endpoints stand", true
	}
	return "", false
}

// notMoved says why an object has no place in a datastore that is Kubernetes' API; empty: it
// has one.
func notMoved(key store.Key) string {
	switch key.Kind {
	case store.KindProfile:
		return "namespaces and service accounts stand for profiles"
	case store.KindService, store.KindEndpointSlice, store.KindServiceCIDR:
		return "the API has Services itself"
	case store.KindIncarnation:
		return "each host says anew who it is"
	case store.KindChange, store.KindUnconfirmed:
		return "the history of changes stays behind"
	case store.KindIPAMConfiguration, store.KindBlockAffinity:
		return "the API has these as IPAM's own records"
	case store.KindNetworkPolicy:
		if strings.HasPrefix(key.Name, store.PrefixNetworkPolicy) {
			return "NetworkPolicies of Kubernetes stand for these"
		}
	case store.KindGlobalNetworkPolicy:
		if strings.HasPrefix(key.Name, store.PrefixClusterNetworkPolicy) {
			return "ClusterNetworkPolicies of Kubernetes stand for these"
		}
	}
	return ""
}

// Objects reads what a datastore holds that is Kubernetes' API, as the keys that etcd would
// have: for the objects of Kubernetes, too, the resources that they stand for, of which pods
// without addresses stand for none. It is of one moment only if nothing is written meanwhile.
func Objects(ctx context.Context, s store.Store) ([]Entry, error) {
	var out []Entry
	add := func(objects ...store.Object) {
		for _, o := range objects {
			if w, ok := o.Value.(*store.WorkloadEndpoint); ok && len(w.Spec.IPNetworks) == 0 {
				continue
			}
			out = append(out, Entry{Path: o.Key.Path(), Value: o.Raw})
		}
	}
	for _, kind := range store.AllKinds() {
		switch kind {
		case store.KindSecret, store.KindIncarnation, store.KindChange, store.KindUnconfirmed,
			store.KindService, store.KindEndpointSlice, store.KindServiceCIDR, store.KindIPAMConfiguration, store.KindBlockAffinity:
			continue // of no use elsewhere, or read below
		}
		objects, _, err := s.List(ctx, kind, "")
		if err != nil {
			return nil, err
		}
		add(objects...)
	}
	shared, err := objectsOf(ctx, s, store.KindSecret)
	if err != nil {
		return nil, err
	}
	add(slices.Collect(maps.Values(shared))...)
	slices.SortFunc(out, func(a, b Entry) int { return cmp.Compare(a.Path, b.Path) })
	return out, nil
}

// Loading writes entries into a datastore that is Kubernetes' API.
type Loading struct {
	// Replace has what is there and is not in the entries removed, and what is there
	// otherwise made as they say; else there may be nothing that they do not say.
	Replace bool
	DryRun  bool // nothing is written
}

// Loaded is what became of entries.
type Loaded struct {
	Written, Same, Removed int
	Left                   map[string][]string // paths that have no place there, by the reason
}

// parallel is how many objects are written at once.
const parallel = 8

// Into writes entries, kind by kind. What it does may be done in part when it fails; doing it
// again with Replace completes it. A Node is written where the API has one of its name.
func (l Loading) Into(ctx context.Context, s store.Store, entries []Entry) (done Loaded, err error) {
	done.Left = make(map[string][]string)
	left := func(why, path string) { done.Left[why] = append(done.Left[why], path) }
	want := make(map[store.Kind]map[store.Key]Entry)
	for _, e := range entries {
		key, ok := store.ParsePath(e.Path)
		if !ok {
			left("routerd does not know them", e.Path)
			continue
		}
		if why := notMoved(key); why != "" {
			left(why, e.Path)
			continue
		}
		if want[key.Kind] == nil {
			want[key.Kind] = make(map[store.Key]Entry)
		}
		want[key.Kind][key] = e
	}
	var ops []store.Op
	var others []string
	for _, kind := range store.AllKinds() {
		have, err := objectsOf(ctx, s, kind)
		if err != nil {
			return done, err
		}
		for _, key := range slices.SortedFunc(maps.Keys(want[kind]), comparePaths) {
			is, there := have[key]
			absent, inPart := inPart(kind)
			if inPart && !there {
				left(absent, key.Path())
				continue
			}
			op, same, err := putOf(key, want[kind][key].Value, is)
			switch {
			case err != nil:
				return done, err
			case same:
				done.Same++
				continue
			case there && !inPart && !l.Replace:
				others = append(others, key.String())
			}
			ops = append(ops, op)
		}
		for _, key := range slices.SortedFunc(maps.Keys(have), comparePaths) {
			if _, wanted := want[kind][key]; wanted || kind == store.KindSecret || notMoved(key) != "" {
				continue
			}
			if _, inPart := inPart(kind); inPart {
				continue
			}
			others = append(others, key.String())
			if l.Replace {
				ops = append(ops, store.RemoveOp(have[key]))
			}
		}
	}
	if len(others) > 0 && !l.Replace {
		return done, fmt.Errorf("%w: %s, and %d more", store.ErrExists, others[0], len(others)-1)
	}
	err = l.do(ctx, s, ops)
	for _, op := range ops {
		if op.Action == store.Remove {
			done.Removed++
		} else {
			done.Written++
		}
	}
	return done, err
}

func comparePaths(a, b store.Key) int { return cmp.Compare(a.Path(), b.Path()) }

// objectsOf lists what there is of a kind that has a place in the API.
func objectsOf(ctx context.Context, s store.Store, kind store.Kind) (map[store.Key]store.Object, error) {
	out := make(map[store.Key]store.Object)
	if kind == store.KindSecret {
		for _, name := range secrets() {
			o, err := s.Get(ctx, store.SecretKey(name))
			if errors.Is(err, store.ErrNotFound) {
				continue
			}
			if err != nil {
				return nil, err
			}
			out[o.Key] = o
		}
		return out, nil
	}
	if notMoved(store.Key{Kind: kind}) != "" {
		return nil, nil
	}
	objects, _, err := s.List(ctx, kind, "")
	if err != nil {
		return nil, err
	}
	for _, o := range objects {
		out[o.Key] = o
	}
	return out, nil
}

// putOf returns the write that makes an object what an entry says; same: it is that but for
// its identity, which is the datastore's.
func putOf(key store.Key, raw []byte, is store.Object) (op store.Op, same bool, err error) {
	value, err := store.Decode(key, raw)
	if err != nil {
		return op, false, err
	}
	op = store.Op{If: store.IfAbsent(), Action: store.Put, Object: store.Object{Key: key, Value: value, Raw: raw}}
	if is.Revision == 0 {
		return op, false, nil
	}
	op.If = store.IfRevision(is.Revision)
	if w, ok := value.(*store.WorkloadEndpoint); ok {
		// Of a pod its addresses are written and its container, whatever its identity is in etcd.
		w.UID, op.Object.Raw = "", nil
		pod, ok := is.Value.(*store.WorkloadEndpoint)
		return op, ok && slices.Equal(w.Spec.IPNetworks, pod.Spec.IPNetworks) && w.Spec.ContainerID == pod.Spec.ContainerID, nil
	}
	a, err := plain(key, value, raw)
	if err != nil {
		return op, false, err
	}
	b, err := plain(key, is.Value, is.Raw)
	return op, bytes.Equal(a, b), err
}

// plain returns an object as it is stored, without what a datastore gives it.
func plain(key store.Key, value any, raw []byte) ([]byte, error) {
	c := store.Clone(value)
	if m := store.Meta(c); m != nil {
		m.UID, m.ResourceVersion = "", ""
		m.CreationTimestamp.Reset()
	}
	return store.Encode(key, c, raw)
}

// do carries ops out, those of a kind at once. What only the server can judge it is asked first.
func (l Loading) do(ctx context.Context, s store.Store, ops []store.Op) error {
	if l.DryRun {
		if p, ok := s.(store.Piecewise); ok {
			return p.Try(ctx, ops...)
		}
		return nil
	}
	for len(ops) > 0 {
		n := 1
		for n < len(ops) && ops[n].Object.Key.Kind == ops[0].Object.Key.Kind {
			n++
		}
		var g errgroup.Group
		g.SetLimit(parallel)
		for _, op := range ops[:n] {
			g.Go(func() error { _, err := s.Txn(ctx, op); return err })
		}
		if err := g.Wait(); err != nil {
			return err
		}
		ops = ops[n:]
	}
	return nil
}
