package collect

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/routerd/routerd/control/ipam"
	"github.com/routerd/routerd/store"
)

const (
	// blocksPerWrite are swept in one transaction: with their affinities, handles
	// and nodes they stay below [store.MaxOps] as a rule, and are parted if not.
	blocksPerWrite = 16
	// readsAtOnce of handles.
	readsAtOnce = 8
	// loadBalancer begins the handles of Calico's load balancer addresses, and
	// windowsHandle is the one that reserves addresses on Windows hosts.
	loadBalancer, windowsHandle = "lb-", "windows-reserved-ipam-handle"
)

// look is one look at the whole cluster.
type look struct {
	*Collector
	now      time.Time
	cooldown time.Duration
	nodes    map[string]bool
	live     map[netip.Addr]bool // suspects of earlier looks that an endpoint has
	held     []uint64            // hashes of the handles that blocks name, sorted once all are read
	report   Report
	errs     []error
}

// LookCluster looks once at everything, and frees what is due.
func (c *Collector) LookCluster(ctx context.Context) (Report, error) {
	l := &look{Collector: c, now: c.cfg.Clock(), nodes: map[string]bool{}, live: map[netip.Addr]bool{}}
	c.cluster.begin()
	for _, step := range []func(context.Context) error{l.readConfig, l.readNodes, l.endpoints, l.blocks, l.affinities, l.handles, l.incarnations} {
		if err := step(ctx); err != nil {
			// Suspects are kept: what a look could not see, it says nothing about.
			return l.report, errors.Join(append(l.errs, err)...)
		}
	}
	c.cluster.end()
	return l.report, errors.Join(l.errs...)
}

func (l *look) readConfig(ctx context.Context) error {
	obj, err := l.cfg.Store.Get(ctx, store.IPAMConfigKey())
	if err != nil {
		if errors.Is(err, store.ErrNotFound) {
			return nil
		}
		return fmt.Errorf("read IPAM's settings: %w", err)
	}
	if conf, ok := obj.Value.(*store.IPAMConfig); ok && conf.IPCooldownSeconds != nil {
		l.cooldown = time.Duration(*conf.IPCooldownSeconds) * time.Second
	}
	return nil
}

// readNodes learns which nodes exist. One that cannot be decoded does.
func (l *look) readNodes(ctx context.Context) error {
	return store.Pages(ctx, l.cfg.Store, store.KindNode, "", func(objs []store.Object) error {
		for _, o := range objs {
			l.nodes[o.Key.Name] = true
		}
		return nil
	})
}

// gone reports whether something is of a node that does not exist.
func (l *look) gone(node string) bool { return node != "" && !l.nodes[node] }

// endpoints learns which suspects of earlier looks have an endpoint on a node
// that exists (no others can be due in this look, so no others need be
// remembered), and deletes the endpoints of nodes that have been gone for long.
func (l *look) endpoints(ctx context.Context) error {
	return store.Pages(ctx, l.cfg.Store, store.KindWorkloadEndpoint, "", func(objs []store.Object) error {
		for _, o := range objs {
			w, ok := o.Value.(*store.WorkloadEndpoint)
			if !ok {
				l.report.Unreadable++
				return fmt.Errorf("%s cannot be decoded, and may have any address; repair or delete it: %w", o.Key, store.ErrDecode)
			}
			if !l.gone(w.Spec.Node) {
				for _, a := range endpointAddrs(w) {
					if l.cluster.knows(a.String()) {
						l.live[a] = true
					}
				}
				continue
			}
			l.report.Suspects++
			if !l.cluster.see(o.Key.Path(), uint64(o.Revision), l.now, l.cfg.Grace) {
				continue
			}
			ops := append(l.absent(w.Spec.Node), store.Op{If: store.IfRevision(o.Revision), Action: store.Remove, Object: store.Object{Key: o.Key}})
			if l.write(ctx, ops) {
				l.report.Endpoints++
				l.report.Suspects--
				l.cfg.Log.Info("leaked endpoint freed", "endpoint", o.Key.Name, "namespace", o.Key.Namespace, "node", w.Spec.Node)
			}
		}
		return nil
	})
}

// absent returns the conditions that nodes still do not exist.
func (l *look) absent(nodes ...string) []store.Op {
	slices.Sort(nodes)
	var out []store.Op
	for _, n := range slices.Compact(nodes) {
		if n != "" {
			key := store.Key{Kind: store.KindNode, Name: n}
			out = append(out, store.Op{If: store.IfAbsent(), Action: store.Check, Object: store.Object{Key: key}})
		}
	}
	return out
}

// write carries out a transaction and reports whether it took place. A
// condition that does not hold any more is no error: the next look sees anew.
func (l *look) write(ctx context.Context, ops []store.Op) bool {
	_, err := l.cfg.Store.Txn(ctx, ops...)
	if err != nil && !errors.Is(err, store.ErrConflict) && len(l.errs) < 10 {
		l.errs = append(l.errs, err)
	}
	return err == nil
}

// sweep is what is to become of one block.
type sweep struct {
	edit  ipam.BlockEdit
	owner string   // that it is taken from; empty: it is not
	nodes []string // that must still be absent
}

func (l *look) blocks(ctx context.Context) error {
	var pending []sweep
	flush := func() {
		for len(pending) > 0 && ctx.Err() == nil {
			n := min(len(pending), blocksPerWrite)
			l.sweep(ctx, pending[:n])
			pending = pending[n:]
		}
		pending = nil
	}
	err := store.Pages(ctx, l.cfg.Store, store.KindIPAMBlock, "", func(objs []store.Object) error {
		for _, o := range objs {
			s, ok, err := l.block(o)
			if err != nil {
				l.report.Unreadable++
				l.cfg.Log.Warn("block left alone", "block", o.Key.Name, "error", err)
			} else if ok {
				pending = append(pending, s)
			}
		}
		flush()
		return ctx.Err()
	})
	slices.Sort(l.held)
	return err
}

// block looks at one block and says what is due of it.
func (l *look) block(o store.Object) (s sweep, ok bool, err error) {
	b, _ := o.Value.(*store.Block)
	all, err := ipam.Allocations(o.Key.CIDR(), b)
	if err != nil {
		return sweep{}, false, err
	}
	owner, virtual := ipam.Owner(b)
	due := map[netip.Addr]bool{}
	for _, a := range all {
		if a.Handle != "" {
			l.held = append(l.held, l.hash(a.Handle))
		}
		// What names no node at all is nobody's either.
		if virtual || !a.ReleasedAt.IsZero() || a.Node != "" && l.nodes[a.Node] || !l.old(a, l.now) ||
			strings.HasPrefix(a.Handle, loadBalancer) || a.Handle == windowsHandle {
			continue
		}
		l.report.Suspects++
		if l.cluster.see(a.Addr.String(), a.Sequence, l.now, l.cfg.Grace) && !l.live[a.Addr] {
			due[a.Addr] = true
			s.nodes = append(s.nodes, a.Node)
		}
	}
	disown := false
	if !virtual && l.gone(owner) {
		disown = l.cluster.see(o.Key.Path(), hashOf(owner), l.now, l.cfg.Grace)
		s.nodes = append(s.nodes, owner)
	}
	if len(due) == 0 && !disown {
		return sweep{}, false, nil
	}
	if disown {
		s.owner = owner
	}
	s.edit, ok, err = ipam.EditBlock(o, func(a ipam.Allocation) bool { return due[a.Addr] }, disown, l.now, l.cooldown)
	return s, ok, err
}

// sweep writes several blocks in one transaction, or one by one when that is
// refused.
func (l *look) sweep(ctx context.Context, list []sweep) {
	handles, err := l.readHandles(ctx, list)
	if err != nil {
		if len(l.errs) < 10 {
			l.errs = append(l.errs, err)
		}
		return
	}
	ops, deleted := sweepOps(list, handles)
	var nodes []string
	for _, s := range list {
		nodes = append(nodes, s.nodes...)
	}
	ops = append(l.absent(nodes...), ops...)
	if len(ops) <= store.MaxOps && l.write(ctx, ops) {
		l.report.Handles += deleted
		for _, s := range list {
			l.report.Addresses += len(s.edit.Freed)
			l.report.Suspects -= len(s.edit.Freed)
			l.report.Blocks++
			l.tell(s)
		}
		return
	}
	if len(list) > 1 && ctx.Err() == nil {
		for i := range list {
			l.sweep(ctx, list[i:i+1])
		}
	}
}

// tell says in the log what was freed of a block. A count would not do: who asks
// later why an address is another's knows the address.
func (l *look) tell(s sweep) {
	for _, a := range s.edit.Freed {
		l.cfg.Log.Info("leaked address freed", "address", a.Addr, "handle", a.Handle, "node", a.Node)
	}
	if s.edit.Gone || s.owner != "" {
		l.cfg.Log.Info("leaked block freed", "block", s.edit.Op.Object.Key.CIDR(), "node", s.owner)
	}
}

// sweepOps returns what writes the blocks and lowers their handles, and how
// many handles that deletes.
func sweepOps(list []sweep, handles map[string]store.Object) (ops []store.Op, deleted int) {
	left := map[string]map[string]int{} // handle → block → addresses
	for _, s := range list {
		ops = append(ops, s.edit.Op)
		for h, n := range s.edit.Left {
			if left[h] == nil {
				left[h] = map[string]int{}
			}
			left[h][s.edit.Op.Object.Key.CIDR().String()] = n
		}
	}
	for _, h := range slices.Sorted(maps.Keys(left)) {
		op, ok := ipam.EditHandle(handles[h], left[h])
		if !ok {
			continue
		}
		ops = append(ops, op)
		if op.Action == store.Remove {
			deleted++
		}
	}
	return ops, deleted
}

func (l *look) readHandles(ctx context.Context, list []sweep) (map[string]store.Object, error) {
	ids := map[string]bool{}
	for _, s := range list {
		for h := range s.edit.Left {
			ids[h] = true
		}
	}
	names := slices.Sorted(maps.Keys(ids))
	got := make([]store.Object, len(names))
	var g errgroup.Group
	g.SetLimit(readsAtOnce)
	for i, id := range names {
		g.Go(func() error {
			obj, err := l.cfg.Store.Get(ctx, store.HandleKey(id))
			switch {
			case err == nil:
				got[i] = obj
				got[i].Key = store.HandleKey(id)
			case errors.Is(err, store.ErrNotFound), errors.Is(err, store.ErrDecode):
			default:
				return fmt.Errorf("read handle %s: %w", id, err)
			}
			return nil
		})
	}
	err := g.Wait()
	out := make(map[string]store.Object, len(names))
	for i, id := range names {
		out[id] = got[i]
	}
	return out, err
}

// affinities deletes the claims of nodes that do not exist. Their blocks say
// who holds them; a claim is only its echo.
func (l *look) affinities(ctx context.Context) error {
	return store.Pages(ctx, l.cfg.Store, store.KindIPAMAffinity, "", func(objs []store.Object) error {
		var ops []store.Op
		var nodes []string
		flush := func() {
			if len(ops) > 0 && l.write(ctx, append(l.absent(nodes...), ops...)) {
				for _, op := range ops {
					l.cfg.Log.Info("leaked claim freed", "block", op.Object.Key.CIDR(), "node", op.Object.Key.Namespace)
				}
			}
			ops, nodes = nil, nil
		}
		for _, o := range objs {
			if !l.gone(o.Key.Namespace) || !l.cluster.see(o.Key.Path(), uint64(o.Revision), l.now, l.cfg.Grace) {
				continue
			}
			ops = append(ops, store.Op{If: store.IfRevision(o.Revision), Action: store.Remove, Object: store.Object{Key: o.Key}})
			if nodes = append(nodes, o.Key.Namespace); len(ops) == store.MaxOps/2 {
				flush()
			}
		}
		flush()
		return ctx.Err()
	})
}

// handles deletes those that no block names. What names them is read again
// first: the blocks that the handle itself names.
func (l *look) handles(ctx context.Context) error {
	return store.Pages(ctx, l.cfg.Store, store.KindIPAMHandle, "", func(objs []store.Object) error {
		for _, o := range objs {
			h, ok := o.Value.(*store.Handle)
			if !ok {
				l.report.Unreadable++
				continue
			}
			if _, held := slices.BinarySearch(l.held, l.hash(o.Key.Name)); held {
				continue
			}
			l.report.Suspects++
			if !l.cluster.see(o.Key.Path(), uint64(o.Revision), l.now, l.cfg.Grace) {
				continue
			}
			if err := l.dropHandle(ctx, o, h); err != nil {
				return err
			}
		}
		return ctx.Err()
	})
}

func (l *look) dropHandle(ctx context.Context, o store.Object, h *store.Handle) error {
	ops := []store.Op{{If: store.IfRevision(o.Revision), Action: store.Remove, Object: store.Object{Key: o.Key}}}
	for c := range h.Block {
		cidr, err := netip.ParsePrefix(c)
		if err != nil || cidr != cidr.Masked() {
			continue
		}
		check := store.Op{If: store.IfAbsent(), Action: store.Check, Object: store.Object{Key: store.BlockKey(cidr)}}
		b, err := l.cfg.Store.Get(ctx, check.Object.Key)
		switch {
		case errors.Is(err, store.ErrNotFound):
		case err != nil && !errors.Is(err, store.ErrDecode):
			return fmt.Errorf("read block %s: %w", cidr, err)
		default:
			block, _ := b.Value.(*store.Block)
			all, err := ipam.Allocations(cidr, block)
			if err != nil || slices.ContainsFunc(all, func(a ipam.Allocation) bool { return a.Handle == o.Key.Name }) {
				return nil //nolint:nilerr // a block that cannot be read may name the handle
			}
			check.If = store.IfRevision(b.Revision)
		}
		ops = append(ops, check)
	}
	if len(ops) <= store.MaxOps && l.write(ctx, ops) {
		l.report.Handles++
		l.report.Suspects--
		l.cfg.Log.Info("leaked handle freed", "handle", o.Key.Name)
	}
	return nil
}

// incarnations deletes the records of who held the names of nodes that have been
// gone for long.
func (l *look) incarnations(ctx context.Context) error {
	return store.Pages(ctx, l.cfg.Store, store.KindIncarnation, "", func(objs []store.Object) error {
		for _, o := range objs {
			if !l.gone(o.Key.Name) || !l.cluster.see(o.Key.Path(), uint64(o.Revision), l.now, l.cfg.Grace) {
				continue
			}
			if l.write(ctx, append(l.absent(o.Key.Name), store.Op{If: store.IfRevision(o.Revision), Action: store.Remove, Object: store.Object{Key: o.Key}})) {
				l.cfg.Log.Info("leaked incarnation freed", "node", o.Key.Name)
			}
		}
		return ctx.Err()
	})
}

// hash names a handle in eight bytes. Two that collide keep a leaked handle
// alive until the daemon restarts, and nothing else.
func (l *look) hash(handle string) uint64 { return maphash.String(l.cluster.seed, handle) }

func hashOf(s string) uint64 {
	var h uint64 = 14695981039346656037 // FNV-1a
	for i := range len(s) {
		h = (h ^ uint64(s[i])) * 1099511628211
	}
	return h
}
