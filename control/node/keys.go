package node

import (
	"context"
	"fmt"
	"slices"

	"github.com/routerd/routerd/store"
)

// SetBGPKeys says which keys of BGP this host has, by their ids; none: it speaks without.
// They are published for the other hosts to go by. It does not block.
func (a *Agent) SetBGPKeys(ids []string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.keys != nil && slices.Equal(*a.keys, ids) {
		return
	}
	a.keys = &ids
	a.wake.Set()
}

func (a *Agent) bgpKeys() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.keys == nil {
		return nil
	}
	return *a.keys
}

// announceKeys publishes the keys of BGP, if the resource says something else.
func (a *Agent) announceKeys(ctx context.Context, self *store.Node, keys *[]string) error {
	if self == nil || keys == nil {
		return nil // it is made with them, or nobody knows them yet
	}
	if !store.SetBGPKeys(store.Clone(self).(*store.Node), *keys) {
		return nil
	}
	if err := a.rewrite(ctx, func(n *store.Node) { store.SetBGPKeys(n, *keys) }); err != nil {
		return fmt.Errorf("publish which keys of BGP node %s has: %w", a.cfg.Name, err)
	}
	return nil
}

// rewrite changes this host's resource, if it is there.
func (a *Agent) rewrite(ctx context.Context, set func(*store.Node)) error {
	_, err := store.Modify(ctx, a.cfg.Store, store.ResourceKey(store.KindNode, a.cfg.Name), func(cur store.Object) (any, error) {
		if cur.Value == nil {
			return nil, nil //nolint:nilnil // nothing to write: somebody deleted it, and it is made anew
		}
		n := store.Clone(cur.Value).(*store.Node)
		set(n)
		return n, nil
	})
	return err
}
