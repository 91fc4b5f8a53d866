package probe

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/store"
)

// followTunnelAddress keeps the annotation of this host's Node that says where
// hosts outside send to, whoever changes it.
func (p *Prober) followTunnelAddress(ctx context.Context) {
	pause := async.Backoff{Min: retryMin, Max: retryMax}
	for {
		select {
		case <-ctx.Done():
			return
		case <-p.publish:
		}
		p.mu.Lock()
		want, know, have := p.wantAddr, p.knowAddr, p.haveAddr
		p.mu.Unlock()
		if !know || have == nil || *have == want {
			continue
		}
		err := publish(ctx, p.cfg.Store, p.cfg.Node, want)
		if err == nil {
			pause.Reset()
			p.cfg.Log.Info("published where hosts outside send to", "tunnel_address", want)
			continue
		}
		if !errors.Is(err, store.ErrUnavailable) && ctx.Err() == nil {
			p.cfg.Log.Warn("tunnel address not published; will try again", "error", err)
		}
		if pause.Wait(ctx) != nil {
			return
		}
		p.publish.Set()
	}
}

// tunnelAddresses is the annotation's value for addresses, in a fixed order.
func tunnelAddresses(addrs []netip.Addr) string {
	addrs = slices.Clone(addrs)
	slices.SortFunc(addrs, netip.Addr.Compare)
	parts := make([]string, len(addrs))
	for i, a := range addrs {
		parts[i] = a.String()
	}
	return strings.Join(parts, ",")
}

// publish writes the annotation, or removes it when value is empty. A node that
// is not registered is left to the one who registers it.
func publish(ctx context.Context, s store.Store, node, value string) error {
	ctx, cancel := context.WithTimeout(ctx, storeWithin)
	defer cancel()
	_, err := store.Modify(ctx, s, store.ResourceKey(store.KindNode, node), func(cur store.Object) (any, error) {
		n, ok := cur.Value.(*store.Node)
		if !ok || n.Annotations[store.AnnotationTunnelAddress] == value {
			return nil, nil //nolint:nilnil // nothing to write
		}
		n = store.Clone(n).(*store.Node)
		if value == "" {
			delete(n.Annotations, store.AnnotationTunnelAddress)
			return n, nil
		}
		if n.Annotations == nil {
			n.Annotations = map[string]string{}
		}
		n.Annotations[store.AnnotationTunnelAddress] = value
		return n, nil
	})
	if err != nil {
		return fmt.Errorf("publish the tunnel address of node %s: %w", node, err)
	}
	return nil
}
