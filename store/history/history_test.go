package history

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"pgregory.net/rapid"

	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/memory"
)

var start = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// operator is who changes things in tests.
type operator struct {
	t     *testing.T
	s     store.Store // as others see it
	r     *Recorder
	names []string
}

func newOperator(t *testing.T, confirm time.Duration) *operator {
	t.Helper()
	s := memory.New()
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	o := &operator{t: t, s: s}
	o.r = Record(s, Author{User: "ann", Host: "h", Command: "test", Confirm: confirm}, func() time.Time { return start }, func(n string) { o.names = append(o.names, n) })
	return o
}

func (o *operator) create(values ...any) {
	o.t.Helper()
	if _, err := store.CreateAll(o.t.Context(), o.r, values...); err != nil {
		o.t.Fatal(err)
	}
}

func (o *operator) modify(s store.Store, key store.Key, f func(any)) {
	o.t.Helper()
	if _, err := store.Modify(o.t.Context(), s, key, func(cur store.Object) (any, error) {
		v := store.Clone(cur.Value)
		f(v)
		return v, nil
	}); err != nil {
		o.t.Fatal(err)
	}
}

// undo undoes the newest change.
func (o *operator) undo() error {
	return o.undoBy(Options{})
}

func (o *operator) undoBy(how Options) error {
	_, err := Undo(o.t.Context(), o.s, o.names[len(o.names)-1], Author{User: "bob", Host: "h"}, start.Add(time.Minute), how)
	return err
}

// promise plays a daemon that takes it on to undo whatever is not confirmed.
func promise(t *testing.T, s store.Store) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		for b := range s.Watch(ctx, store.KindUnconfirmed) {
			for _, ev := range b.Events {
				if u, ok := ev.Object.Value.(*store.Unconfirmed); ok && u.By == "" {
					op := store.Op{If: store.IfRevision(ev.Object.Revision), Action: store.Put, Object: store.Object{Key: ev.Key, Value: &store.Unconfirmed{Seconds: u.Seconds, By: "n"}}}
					if _, err := s.Txn(ctx, op); err != nil && ctx.Err() == nil {
						t.Error(err)
					}
				}
			}
		}
	})
	t.Cleanup(func() { cancel(); wg.Wait() })
}

// put is what an operator's tool writes without a condition.
func put(v any) store.Op {
	key, _ := store.KeyOf(v) // of what tests make there is one
	return store.Op{Action: store.Put, Object: store.Object{Key: key, Value: v}}
}

// raw returns what is stored under a key; empty: nothing is.
func (o *operator) raw(key store.Key) string {
	o.t.Helper()
	obj, err := o.s.Get(o.t.Context(), key)
	if errors.Is(err, store.ErrNotFound) {
		return ""
	}
	if err != nil {
		o.t.Fatal(err)
	}
	return string(obj.Raw)
}

func (o *operator) state() store.ChangeState {
	o.t.Helper()
	obj, err := o.s.Get(o.t.Context(), store.ChangeKey(o.names[len(o.names)-1]))
	if err != nil {
		o.t.Fatal(err)
	}
	return obj.Value.(*store.Change).State
}

func pool(name, cidr string) *v3.IPPool {
	return &v3.IPPool{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: v3.IPPoolSpec{CIDR: cidr, BlockSize: 26, NodeSelector: "all()", VXLANMode: v3.VXLANModeNever, IPIPMode: v3.IPIPModeNever}}
}

func tier(name string) *v3.Tier { return &v3.Tier{ObjectMeta: metav1.ObjectMeta{Name: name}} }

// TestUndo undoes each kind of change, beside what others did meanwhile.
func TestUndo(t *testing.T) {
	t.Parallel()
	key := store.ResourceKey(store.KindIPPool, "p")
	for _, tt := range []struct {
		name  string
		setUp func(*operator) // leaves one change to be undone
		fails string
		want  func(p *v3.IPPool) bool // of the pool p; nil: it is not there
	}{
		{"made", func(o *operator) { o.create(pool("p", "10.0.0.0/16")) }, "", nil},
		{"made and changed since", func(o *operator) {
			o.create(pool("p", "10.0.0.0/16"))
			o.modify(o.s, key, func(v any) { v.(*v3.IPPool).Spec.NATOutgoing = true })
		}, "IPPool(p): cannot be undone: the change made it, and it was changed since, at revision 3; with --force it is undone all the same", func(p *v3.IPPool) bool { return p.Spec.NATOutgoing }},
		{"made and deleted since", func(o *operator) {
			o.create(pool("p", "10.0.0.0/16"))
			obj, _ := o.s.Get(t.Context(), key)
			if _, err := o.s.Txn(t.Context(), store.RemoveOp(obj)); err != nil {
				t.Fatal(err)
			}
		}, "", nil},
		{"made, with blocks", func(o *operator) {
			o.create(pool("p", "10.0.0.0/16"))
			cidr := "10.0.1.0/26"
			b := &store.Block{}
			if err := json.Unmarshal([]byte(`{"cidr":"`+cidr+`","affinity":"host:n","allocations":[],"unallocated":[],"attributes":[]}`), b); err != nil {
				t.Fatal(err)
			}
			if _, err := o.s.Txn(t.Context(), store.Op{Action: store.Put, Object: store.Object{Key: store.Key{Kind: store.KindIPAMBlock, Name: cidr}, Value: b}}); err != nil {
				t.Fatal(err)
			}
		}, "", func(p *v3.IPPool) bool { return p.Spec.Disabled }},
		{"changed, and another field since", func(o *operator) {
			o.create(pool("p", "10.0.0.0/16"))
			o.modify(o.r, key, func(v any) { v.(*v3.IPPool).Spec.NATOutgoing = true })
			o.modify(o.s, key, func(v any) {
				p := v.(*v3.IPPool)
				p.Spec.Disabled, p.Labels = true, map[string]string{"a": "b"}
			})
		}, "", func(p *v3.IPPool) bool { return !p.Spec.NATOutgoing && p.Spec.Disabled && p.Labels["a"] == "b" }},
		{"changed, and the same field since", func(o *operator) {
			o.create(pool("p", "10.0.0.0/16"))
			o.modify(o.r, key, func(v any) { v.(*v3.IPPool).Spec.VXLANMode = v3.VXLANModeAlways })
			o.modify(o.s, key, func(v any) { v.(*v3.IPPool).Spec.VXLANMode = v3.VXLANModeCrossSubnet })
		}, "IPPool(p): cannot be undone: spec.vxlanMode was changed since, at revision 4; with --force", func(p *v3.IPPool) bool { return p.Spec.VXLANMode == v3.VXLANModeCrossSubnet }},
		{"deleted", func(o *operator) {
			o.create(pool("p", "10.0.0.0/16"))
			obj, _ := o.s.Get(t.Context(), key)
			if _, err := o.r.Txn(t.Context(), store.RemoveOp(obj)); err != nil {
				t.Fatal(err)
			}
		}, "", func(p *v3.IPPool) bool { return p.Spec.CIDR == "10.0.0.0/16" }},
		{"deleted, and the place taken since", func(o *operator) {
			o.create(pool("p", "10.0.0.0/16"))
			obj, _ := o.s.Get(t.Context(), key)
			if _, err := o.r.Txn(t.Context(), store.RemoveOp(obj)); err != nil {
				t.Fatal(err)
			}
			if _, err := store.Create(t.Context(), o.s, pool("q", "10.0.128.0/17")); err != nil {
				t.Fatal(err)
			}
		}, "beside what would be there then: spec.cidr", nil},
		{"deleted, and made anew since", func(o *operator) {
			o.create(pool("p", "10.0.0.0/16"))
			obj, _ := o.s.Get(t.Context(), key)
			if _, err := o.r.Txn(t.Context(), store.RemoveOp(obj)); err != nil {
				t.Fatal(err)
			}
			if _, err := store.Create(t.Context(), o.s, pool("p", "10.9.0.0/16")); err != nil {
				t.Fatal(err)
			}
		}, "it was deleted by the change, and made anew since, at revision", func(p *v3.IPPool) bool { return p.Spec.CIDR == "10.9.0.0/16" }},
		{"what is left would not be valid", func(o *operator) {
			p := pool("p", "10.0.0.0/16")
			p.Spec.VXLANMode = v3.VXLANModeAlways
			o.create(p)
			o.modify(o.r, key, func(v any) { v.(*v3.IPPool).Spec.VXLANMode = v3.VXLANModeNever })
			o.modify(o.s, key, func(v any) { v.(*v3.IPPool).Spec.IPIPMode = v3.IPIPModeAlways })
		}, "IPPool(p): cannot be undone: what was there before, with what was changed since", func(p *v3.IPPool) bool { return p.Spec.IPIPMode == v3.IPIPModeAlways }},
		{"a tier that somebody has put a policy in", func(o *operator) {
			o.create(tier("ops"))
			policy := &v3.GlobalNetworkPolicy{ObjectMeta: metav1.ObjectMeta{Name: "ops.x"}, Spec: v3.GlobalNetworkPolicySpec{Tier: "ops", Selector: "all()"}}
			if _, err := store.Create(t.Context(), o.s, policy); err != nil {
				t.Fatal(err)
			}
		}, "GlobalNetworkPolicy(ops.x): cannot be undone: beside what would be there then: spec.tier", nil},
		{"a node's deletion", func(o *operator) {
			o.create(&store.Node{ObjectMeta: metav1.ObjectMeta{Name: "n"}})
			obj, _ := o.s.Get(t.Context(), store.ResourceKey(store.KindNode, "n"))
			if _, err := o.r.Txn(t.Context(), store.RemoveOp(obj)); err != nil {
				t.Fatal(err)
			}
		}, "a deleted Node does not come back by its record", nil},
		{"two at once, one of them stuck", func(o *operator) {
			o.create(pool("p", "10.0.0.0/16"), tier("ops"))
			o.modify(o.s, store.ResourceKey(store.KindTier, "ops"), func(v any) { v.(*v3.Tier).Labels = map[string]string{"x": "y"} })
		}, "Tier(ops): cannot be undone", func(*v3.IPPool) bool { return true }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			o := newOperator(t, 0)
			tt.setUp(o)
			err := o.undo()
			if tt.fails == "" && err != nil || tt.fails != "" && (err == nil || !strings.Contains(err.Error(), tt.fails)) {
				t.Fatalf("undo: %v; want %q", err, tt.fails)
			}
			if got := o.state(); (got == store.ChangeUndone) != (tt.fails == "") {
				t.Errorf("the change is %q", got)
			}
			obj, err := o.s.Get(t.Context(), key)
			switch {
			case errors.Is(err, store.ErrNotFound) && tt.want == nil:
			case err != nil:
				t.Error(err)
			case tt.want == nil || !tt.want(obj.Value.(*v3.IPPool)):
				t.Errorf("there is %s", obj.Raw)
			}
			if tt.fails == "" {
				if err := o.undo(); err == nil || !strings.Contains(err.Error(), "it is undone, by bob@h at 2026-01-02T03:05:05Z") {
					t.Errorf("undone twice: %v", err)
				}
			}
		})
	}
}

// TestForce: with force the change is undone although others changed the same since; what they did elsewhere stays.
func TestForce(t *testing.T) {
	t.Parallel()
	o := newOperator(t, 0)
	p, gone, made := pool("p", "10.0.0.0/16"), pool("gone", "10.1.0.0/16"), tier("made")
	key := store.ResourceKey(store.KindIPPool, "p")
	o.create(p, gone)
	old, err := o.s.Get(t.Context(), store.ResourceKey(store.KindIPPool, "gone"))
	if err != nil {
		t.Fatal(err)
	}
	changed := store.Clone(p).(*v3.IPPool)
	changed.Spec.VXLANMode = v3.VXLANModeAlways
	if _, err := o.r.Txn(t.Context(), put(changed), store.RemoveOp(old), put(made)); err != nil {
		t.Fatal(err)
	}
	before := o.raw(key)
	o.modify(o.s, key, func(v any) {
		v.(*v3.IPPool).Spec.VXLANMode, v.(*v3.IPPool).Labels = v3.VXLANModeCrossSubnet, map[string]string{"a": "b"}
	})
	o.modify(o.s, store.ResourceKey(store.KindTier, "made"), func(v any) { v.(*v3.Tier).Labels = map[string]string{"a": "b"} })
	if _, err := store.Create(t.Context(), o.s, pool("gone", "10.2.0.0/16")); err != nil {
		t.Fatal(err)
	}
	if err := o.undo(); !errors.Is(err, ErrStuck) || strings.Count(err.Error(), "with --force") != 3 {
		t.Fatalf("without force: %v", err)
	}
	refuse := Options{Force: true, Check: func(_ context.Context, ops []store.Op) error { return fmt.Errorf("not these %d", len(ops)) }}
	if err := o.undoBy(refuse); err == nil || !strings.Contains(err.Error(), "not these 3") {
		t.Errorf("refused: %v", err)
	}
	if err := o.undoBy(Options{Force: true, DryRun: true}); err != nil || o.state() != store.ChangeMade {
		t.Fatalf("dry run: %v, the change is %q", err, o.state())
	}
	if err := o.undoBy(Options{Force: true}); err != nil {
		t.Fatal(err)
	}
	obj, err := o.s.Get(t.Context(), key)
	if got, ok := obj.Value.(*v3.IPPool); err != nil || !ok || got.Spec.VXLANMode != v3.VXLANModeNever || got.Labels["a"] != "b" {
		t.Errorf("the pool is %s, %v; was %s", obj.Raw, err, before)
	}
	if got := o.raw(store.ResourceKey(store.KindTier, "made")); got != "" {
		t.Errorf("still there: %s", got)
	}
	if got := o.raw(old.Key); got != string(old.Raw) {
		t.Errorf("what was deleted is %s; want %s", got, old.Raw)
	}
}

// TestSecrets: nothing of what daemons keep is recorded, nothing that cannot be read, and of a password that a peer has
// only where it is.
func TestSecrets(t *testing.T) {
	t.Parallel()
	o := newOperator(t, 0)
	ctx := t.Context()
	peer := &v3.BGPPeer{ObjectMeta: metav1.ObjectMeta{Name: "tor"}}
	path := store.ResourceKey(store.KindBGPPeer, "tor").Path()
	o.s.(*memory.Store).PutRaw(path, []byte(`{"spec":{"password":"hunter2"}}`))
	if _, err := o.s.Get(ctx, store.ResourceKey(store.KindBGPPeer, "tor")); !errors.Is(err, store.ErrDecode) {
		t.Fatalf("it is to be unreadable: %v", err)
	}
	peer.Spec = v3.BGPPeerSpec{PeerIP: "10.0.0.1", ASNumber: 64512, Password: &v3.BGPPassword{SecretKeyRef: &corev1.SecretKeySelector{LocalObjectReference: corev1.LocalObjectReference{Name: "bgp"}, Key: "tor"}}}
	if _, err := o.r.Txn(ctx, put(peer), store.Op{Action: store.Put, Object: store.Object{Key: store.SecretKey("reach"), Value: &store.Secret{Key: []byte("hunter2hunter2")}}}); err != nil {
		t.Fatal(err)
	}
	raw := o.raw(store.ChangeKey(o.names[0]))
	if !strings.Contains(raw, `"secretKeyRef":{"name":"bgp","key":"tor"}`) || strings.Contains(raw, "hunter2") || strings.Contains(raw, base64.StdEncoding.EncodeToString([]byte("hunter2"))[:8]) {
		t.Errorf("the record is %s", raw)
	}
	if err := o.undo(); err == nil || !strings.Contains(err.Error(), "it also writes what is no resource") {
		t.Errorf("undone: %v", err)
	}
	o.s.(*memory.Store).PutRaw(path, []byte(`{"spec":{"password":"hunter2"}}`))
	if _, err := o.r.Txn(ctx, put(peer)); err != nil {
		t.Fatal(err)
	}
	if err := o.undo(); err == nil || !strings.Contains(err.Error(), "what BGPPeer(tor) was before cannot be read") || strings.Contains(o.raw(store.ChangeKey(o.names[1])), "hunter2") {
		t.Errorf("undone: %v; the record is %s", err, o.raw(store.ChangeKey(o.names[1])))
	}
	if got := o.raw(store.ResourceKey(store.KindBGPPeer, "tor")); !strings.Contains(got, "10.0.0.1") {
		t.Errorf("the peer is %s", got)
	}
}

// TestRivals: operators who write at once each have their change recorded, and none more is kept than is to be.
func TestRivals(t *testing.T) {
	t.Parallel()
	s := memory.New()
	t.Cleanup(func() { s.Close() }) //nolint:errcheck // it is in memory
	const rivals, each = 4, 30
	var wg sync.WaitGroup
	made := make([]map[string]bool, rivals)
	for i := range rivals {
		made[i] = map[string]bool{}
		r := Record(s, Author{User: fmt.Sprint("u", i)}, func() time.Time { return start }, func(n string) { made[i][n] = true })
		wg.Go(func() {
			for j := range each {
				v := tier(fmt.Sprintf("t%d-%d", i, j))
				for {
					_, err := store.Create(t.Context(), r, v)
					if err == nil {
						break
					}
					if !errors.Is(err, store.ErrConflict) || errors.Is(err, store.ErrExists) {
						t.Errorf("create: %v", err)
						return
					}
				}
			}
		})
	}
	wg.Wait()
	all := map[string]bool{}
	for _, m := range made {
		if len(m) != each {
			t.Errorf("%d changes are told of; want %d", len(m), each)
		}
		for n := range m {
			if all[n] {
				t.Errorf("two changes are named %s", n)
			}
			all[n] = true
		}
	}
	last := Record(s, Author{}, func() time.Time { return start }, nil)
	if _, err := store.Create(t.Context(), last, tier("last")); err != nil {
		t.Fatal(err)
	}
	if list, err := List(t.Context(), s); err != nil || len(list) != kept {
		t.Errorf("%d changes are kept, %v", len(list), err)
	}
}

// TestNobody: where no daemon takes it on to undo the change, it is not made, and nothing is left of the question.
func TestNobody(t *testing.T) {
	t.Parallel()
	o := newOperator(t, time.Minute)
	o.r.patient = 50 * time.Millisecond
	_, err := store.Create(t.Context(), o.r, tier("x"))
	if !errors.Is(err, ErrNobody) || o.raw(store.ResourceKey(store.KindTier, "x")) != "" {
		t.Errorf("made: %v", err)
	}
	for _, k := range []store.Kind{store.KindUnconfirmed, store.KindChange} {
		if list, _, err := o.s.List(t.Context(), k, ""); err != nil || len(list) != 0 {
			t.Errorf("left: %v, %v", list, err)
		}
	}
	// Nor of that of a change which the datastore refuses then.
	promise(t, o.s)
	o.r.patient = time.Minute
	_, err = o.r.Txn(t.Context(), store.Op{If: store.IfRevision(99), Action: store.Put, Object: store.Object{Key: store.ResourceKey(store.KindTier, "a"), Value: tier("a")}})
	if !errors.Is(err, store.ErrConflict) {
		t.Errorf("conflict: %v", err)
	}
	if list, _, err := o.s.List(t.Context(), store.KindUnconfirmed, ""); err != nil || len(list) != 0 {
		t.Errorf("left: %v, %v", list, err)
	}
}

// TestConfirm: a change that is to be confirmed says so beside itself, until it is confirmed or undone.
func TestConfirm(t *testing.T) {
	t.Parallel()
	o := newOperator(t, time.Minute)
	o.r.patient = time.Minute
	promise(t, o.s)
	by := Author{User: "bob"}
	for _, undo := range []bool{false, true} {
		o.create(tier(fmt.Sprint("t", undo)))
		name := o.names[len(o.names)-1]
		if got := o.raw(store.UnconfirmedKey(name)); got != `{"time":"2026-01-02T03:04:05Z","seconds":60,"by":"n"}` {
			t.Errorf("it says %s", got)
		}
		want := store.ChangeConfirmed
		if undo {
			want = store.ChangeUndone
			if err := o.undo(); err != nil {
				t.Fatal(err)
			}
		} else if err := Confirm(t.Context(), o.s, name, by, start); err != nil {
			t.Fatal(err)
		}
		if got := o.state(); got != want {
			t.Errorf("the change is %q; want %q", got, want)
		}
		if got := o.raw(store.UnconfirmedKey(name)); got != "" {
			t.Errorf("it still says %s", got)
		}
		if err := Confirm(t.Context(), o.s, name, by, start); err == nil || !strings.Contains(err.Error(), "it is "+string(want)) {
			t.Errorf("confirmed again: %v", err)
		}
	}
	if err := Confirm(t.Context(), o.s, "nothing", by, start); !errors.Is(err, store.ErrNotFound) || !strings.Contains(err.Error(), "routerctl history") {
		t.Error(err)
	}
}

// TestRecords: what others write is not recorded, what changes nothing neither; the oldest changes go; IPAM's records are
// not undone.
func TestRecords(t *testing.T) {
	t.Parallel()
	o := newOperator(t, 0)
	ctx := t.Context()
	if _, err := o.r.Txn(ctx, store.Op{Action: store.Remove, Object: store.Object{Key: store.ResourceKey(store.KindTier, "none")}}); err != nil {
		t.Fatal(err)
	}
	handle := store.Op{Action: store.Put, Object: store.Object{Key: store.HandleKey("h"), Value: &store.Handle{}}}
	if _, err := o.r.Txn(ctx, handle); err != nil {
		t.Fatal(err)
	}
	if list, err := List(ctx, o.s); err != nil || len(list) != 0 {
		t.Fatalf("recorded: %v, %v", list, err)
	}
	// A conflict is told of the caller's own keys.
	_, err := o.r.Txn(ctx, store.Op{If: store.IfRevision(99), Action: store.Put, Object: store.Object{Key: store.ResourceKey(store.KindTier, "a"), Value: tier("a")}})
	if c := new(store.ConflictError); !errors.As(err, &c) || len(c.Current) != 1 {
		t.Errorf("conflict: %v", err)
	}
	for i := range kept + 20 {
		o.create(tier(fmt.Sprint("t", i)))
	}
	list, err := List(ctx, o.s)
	if err != nil || len(list) != kept {
		t.Fatalf("%d changes are kept, %v", len(list), err)
	}
	var names []string
	for _, c := range list {
		names = append(names, c.Key.Name)
	}
	if !slices.IsSorted(names) || !slices.Equal(names, o.names[20:]) {
		t.Errorf("kept: %v\nmade: %v", names, o.names)
	}
	out, err := o.r.Txn(ctx, handle, store.Op{Action: store.Put, Object: store.Object{Key: store.ResourceKey(store.KindTier, "b"), Value: tier("b")}})
	if err != nil || len(out) != 2 {
		t.Fatal(len(out), err)
	}
	if err := o.undo(); err == nil || !strings.Contains(err.Error(), "cannot be undone: it also writes what is no resource") {
		t.Errorf("undone: %v", err)
	}
	unsure := Record(o.s, Author{Confirm: time.Minute}, time.Now, nil)
	_, err = unsure.Txn(ctx, handle, store.Op{Action: store.Put, Object: store.Object{Key: store.ResourceKey(store.KindTier, "c"), Value: tier("c")}})
	if err == nil || !strings.Contains(err.Error(), "could not be undone: it also writes what is no resource") || o.raw(store.ResourceKey(store.KindTier, "c")) != "" {
		t.Errorf("to be confirmed: %v", err)
	}
}

// TestTooLarge: a change that is too large for a record is made, and its record says what it was about.
func TestTooLarge(t *testing.T) {
	t.Parallel()
	o := newOperator(t, 0)
	large := tier("large")
	large.Annotations = map[string]string{"x": strings.Repeat("x", maxSize)}
	o.create(large)
	if err := o.undo(); err == nil || !strings.Contains(err.Error(), "it is too large to be kept: ") {
		t.Error(err)
	}
	unsure := Record(o.s, Author{Confirm: time.Minute}, time.Now, nil)
	large.Name = "other"
	if _, err := store.Create(context.Background(), unsure, large); err == nil || !strings.Contains(err.Error(), "too large") {
		t.Errorf("to be confirmed: %v", err)
	}
}

// value draws a value as JSON has it.
func value(t *rapid.T, depth int) any {
	if depth == 0 || rapid.IntRange(0, 2).Draw(t, "leaf") > 0 {
		return float64(rapid.IntRange(0, 2).Draw(t, "number"))
	}
	m := map[string]any{}
	for _, k := range []string{"a", "b", "c"} {
		if rapid.Bool().Draw(t, k) {
			m[k] = value(t, depth-1)
		}
	}
	return m
}

func object(t *rapid.T) map[string]any {
	m := map[string]any{}
	for _, k := range []string{"a", "b", "c"} {
		if rapid.Bool().Draw(t, k) {
			m[k] = value(t, 3)
		}
	}
	return m
}

func marshal(t *rapid.T, v any) []byte {
	raw, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

// TestRevert: what nobody changed since comes back as it was; what somebody else added stays; nothing changes by undoing
// nothing.
func TestRevert(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		before, after, now := object(t), object(t), object(t)
		b, a, n := marshal(t, before), marshal(t, after), marshal(t, now)
		for _, tt := range []struct{ b, a, n, want []byte }{{b, a, a, b}, {b, b, n, n}, {nil, a, a, nil}, {b, a, b, b}} {
			got, both := revert(tt.b, tt.a, tt.n, rapid.Bool().Draw(t, "force"))
			if diff := cmp.Diff(string(tt.want), string(got)); diff != "" || len(both) > 0 {
				t.Fatalf("revert(%s, %s, %s): %s; in both %v", tt.b, tt.a, tt.n, diff, both)
			}
		}
		// What somebody else did to a member that the change did not touch.
		now = map[string]any{"other": "x"}
		want := map[string]any{"other": "x"}
		maps.Copy(now, after)
		maps.Copy(want, before)
		got, both := revert(b, a, marshal(t, now), false)
		if diff := cmp.Diff(string(marshal(t, want)), string(got)); diff != "" || len(both) > 0 {
			t.Fatalf("beside another member: %s; in both %v", diff, both)
		}
		// Whatever happened, what both changed is as it is now.
		got, both = revert(b, a, n, false)
		var out any
		if err := json.Unmarshal(got, &out); err != nil {
			t.Fatal(err)
		}
		for _, path := range both {
			if x, y := at(out, path), at(parse(n), path); !cmp.Equal(fmt.Sprint(x), fmt.Sprint(y)) {
				t.Fatalf("%s is %v; want %v", path, x, y)
			}
		}
		// With force it is as before.
		got, none := revert(b, a, n, true)
		if err := json.Unmarshal(got, &out); err != nil || len(none) > 0 {
			t.Fatal(none, err)
		}
		for _, path := range both {
			if x, y := at(out, path), at(parse(b), path); !cmp.Equal(fmt.Sprint(x), fmt.Sprint(y)) {
				t.Fatalf("forced: %s is %v; want %v", path, x, y)
			}
		}
	})
}

func at(v any, path string) any {
	for k := range strings.SplitSeq(path, ".") {
		m, _ := v.(map[string]any)
		v = m[k]
	}
	return v
}
