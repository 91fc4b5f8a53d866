package kubecontrollers

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
)

// Kinds lists what [Keeper.HandleStore] wants to know. There may be no
// KubeControllersConfiguration.
func Kinds() []store.Kind {
	return []store.Kind{store.KindNode, store.KindHostEndpoint, store.KindKubeControllersConfiguration}
}

// Keeper writes the endpoints of one Node, and deletes those of Nodes that are gone. Its
// methods are safe for concurrent use.
type Keeper struct {
	node    string
	store   store.Store
	virtual func(string) bool
	log     *slog.Logger

	changed, others async.Signal

	mu         sync.Mutex
	live       bool                 // all that the datastore has is known
	asked      *cluster.Controllers // nil: there is no resource
	self       *cluster.Node
	interfaces map[string][]netip.Addr // nil: not known yet
	nodes      map[string]bool
	stored     map[string]*v3.HostEndpoint // by name: those that were made for Nodes
	users      map[string]bool             // names that others have

	logged map[string]bool // names of which was logged that a user has them; Run's
}

// NewKeeper returns a Keeper for the Node of that name. virtual says of which names interfaces
// are workloads', tunnels' and the like: no template is about them.
func NewKeeper(node string, s store.Store, virtual func(string) bool, log *slog.Logger) *Keeper {
	return &Keeper{
		node: node, store: s, virtual: virtual, log: log, changed: async.NewSignal(), others: async.NewSignal(),
		nodes: make(map[string]bool), stored: make(map[string]*v3.HostEndpoint), users: make(map[string]bool), logged: make(map[string]bool),
	}
}

// HandleStore applies a step of the cluster's copy. It does not block.
func (k *Keeper) HandleStore(s cluster.Step) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.live = s.Source == cluster.Live
	for _, ch := range s.Changes {
		if ch.Err != nil {
			continue // what was known holds
		}
		k.change(ch)
	}
	k.changed.Set()
	k.others.Set()
}

func (k *Keeper) change(ch *cluster.Change) {
	switch ch.Key.Kind {
	case store.KindKubeControllersConfiguration:
		if ch.Key.Name == store.DefaultName {
			k.asked, _ = ch.Value.(*cluster.Controllers)
		}
	case store.KindNode:
		n, _ := ch.Value.(*cluster.Node)
		if ch.Key.Name == k.node {
			k.self = n
		}
		if n == nil {
			delete(k.nodes, ch.Key.Name)
		} else {
			k.nodes[ch.Key.Name] = true
		}
	case store.KindHostEndpoint:
		h, _ := ch.Object.Value.(*v3.HostEndpoint)
		delete(k.stored, ch.Key.Name)
		delete(k.users, ch.Key.Name)
		switch {
		case h == nil:
		case made(h):
			k.stored[ch.Key.Name] = h
		default:
			k.users[ch.Key.Name] = true
		}
	}
}

// HandleUnderlay applies what the kernel says of the host's interfaces. It does not block.
func (k *Keeper) HandleUnderlay(u dataplane.Underlay) {
	now := make(map[string][]netip.Addr)
	for _, l := range u.Links {
		if !k.virtual(l.Name) {
			now[l.Name] = nil
		}
	}
	for _, a := range u.Addresses {
		addr := a.Prefix.Addr()
		if _, host := now[a.Link]; host && addr.IsGlobalUnicast() && !a.Deprecated && (addr.Is4() || !a.Secondary) {
			now[a.Link] = append(now[a.Link], addr)
		}
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.interfaces != nil && maps.EqualFunc(k.interfaces, now, slices.Equal) {
		return
	}
	k.interfaces = now
	k.changed.Set()
}

// Run keeps the endpoints of this host's Node as they are asked for, until ctx ends.
func (k *Keeper) Run(ctx context.Context) error {
	return rounds(ctx, k.changed, k.log, "host endpoints of this Node", k.own)
}

// RunCluster deletes those that were made for Nodes that are gone, until ctx ends. It is for
// one host of the cluster.
func (k *Keeper) RunCluster(ctx context.Context) {
	_ = rounds(ctx, k.others, k.log, "host endpoints of Nodes that are gone", k.gone) // ctx ended
}

// rounds calls round after each change until ctx ends, and again after a pause where it
// failed; of is what it writes.
func rounds(ctx context.Context, changed async.Signal, log *slog.Logger, of string, round func(context.Context) error) error {
	backoff := async.Backoff{Min: 100 * time.Millisecond, Max: 5 * time.Minute, Jitter: 0.5}
	again := time.NewTimer(0)
	defer again.Stop()
	level := slog.LevelWarn
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-changed:
		case <-again.C:
		}
		err := round(ctx)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err == nil {
			backoff.Reset()
			level = slog.LevelWarn
			again.Stop()
			continue
		}
		wait := backoff.Next()
		log.Log(ctx, level, "what the KubeControllersConfiguration asks for cannot be written; will try again", "part", of, "error", err, "retry", wait)
		level = slog.LevelDebug
		again.Reset(wait)
	}
}

// own writes what is due of this host's Node.
func (k *Keeper) own(ctx context.Context) error {
	put, remove := k.due()
	var errs []error
	for _, want := range put {
		key := store.ResourceKey(store.KindHostEndpoint, want.Name)
		if err := store.Validate(want); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", key, err))
			continue
		}
		_, err := store.Modify(ctx, k.store, key, func(cur store.Object) (any, error) {
			if cur.Revision == 0 {
				return want, nil
			}
			h, ok := cur.Value.(*v3.HostEndpoint)
			if !ok || !made(h) || same(h, want) {
				return nil, nil // a user's, that the watch has not shown yet
			}
			return update(h, want), nil
		})
		errs = append(errs, err)
	}
	for _, name := range remove {
		errs = append(errs, k.remove(ctx, name, func(h *v3.HostEndpoint) bool { return h.Spec.Node == k.node }))
	}
	return errors.Join(errs...)
}

// gone deletes what was made for Nodes that are no more.
func (k *Keeper) gone(ctx context.Context) error {
	k.mu.Lock()
	lost := make(map[string]string)
	if k.live {
		for name, h := range k.stored {
			if !k.nodes[h.Spec.Node] {
				lost[name] = h.Spec.Node
			}
		}
	}
	k.mu.Unlock()
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(lost)) {
		// The watch may not have shown yet that a Node was made anew.
		_, err := k.store.Get(ctx, store.ResourceKey(store.KindNode, lost[name]))
		if errors.Is(err, store.ErrNotFound) {
			err = k.remove(ctx, name, func(h *v3.HostEndpoint) bool { return h.Spec.Node == lost[name] })
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// due lists what is to be made or changed, and the names of what is to be deleted.
func (k *Keeper) due() (put []*v3.HostEndpoint, remove []string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if !k.live || k.asked == nil || k.asked.Elsewhere || k.self == nil || k.interfaces == nil {
		return nil, nil
	}
	want := map[string]*v3.HostEndpoint{}
	if k.asked.Create {
		want = wanted(k.asked, k.self, k.interfaces)
	}
	for _, name := range slices.Sorted(maps.Keys(want)) {
		if k.users[name] {
			if !k.logged[name] {
				k.logged[name] = true
				k.log.Warn("a host endpoint is not made: there is one of that name that has not the label of those that are", "name", name, "label", LabelCreatedBy+"="+CreatedBy)
			}
			continue
		}
		delete(k.logged, name)
		if have := k.stored[name]; have == nil || !same(have, want[name]) {
			put = append(put, want[name])
		}
	}
	for _, name := range slices.Sorted(maps.Keys(k.stored)) {
		if k.stored[name].Spec.Node == k.node && want[name] == nil {
			remove = append(remove, name)
		}
	}
	return put, remove
}

// remove deletes an endpoint that was made, if it still is one that may be deleted.
func (k *Keeper) remove(ctx context.Context, name string, may func(*v3.HostEndpoint) bool) error {
	cur, err := k.store.Get(ctx, store.ResourceKey(store.KindHostEndpoint, name))
	if errors.Is(err, store.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	if h, ok := cur.Value.(*v3.HostEndpoint); !ok || !made(h) || !may(h) {
		return nil
	}
	_, err = k.store.Txn(ctx, store.RemoveOp(cur))
	if errors.Is(err, store.ErrConflict) || errors.Is(err, store.ErrNotFound) {
		return nil // the watch shows what it is now
	}
	return err
}

// same reports whether an endpoint says what is wanted. Profiles and ports of it are whoever
// set them.
func same(have, want *v3.HostEndpoint) bool {
	return maps.Equal(have.Labels, want.Labels) && have.Spec.Node == want.Spec.Node && have.Spec.InterfaceName == want.Spec.InterfaceName &&
		slices.Equal(have.Spec.ExpectedIPs, want.Spec.ExpectedIPs)
}

func update(have, want *v3.HostEndpoint) *v3.HostEndpoint {
	h := store.Clone(have).(*v3.HostEndpoint)
	h.Labels, h.Spec.Node, h.Spec.InterfaceName, h.Spec.ExpectedIPs = want.Labels, want.Spec.Node, want.Spec.InterfaceName, want.Spec.ExpectedIPs
	return h
}
