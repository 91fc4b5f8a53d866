package collect

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"net/netip"
	"slices"
	"time"

	"github.com/routerd/routerd/control/ipam"
	"github.com/routerd/routerd/store"
)

// blocksPerWrite are swept in one transaction: with their affinities, handles
// and nodes they stay below [store.MaxOps] as a rule, and are parted if not.
const blocksPerWrite = 16

// look is one look at the whole cluster.
type look struct {
	*Collector
	now      time.Time
	grace    time.Duration // of this look
	cooldown time.Duration
	nodes    map[string]bool
	live     map[netip.Addr]bool // suspects of earlier looks that an endpoint has
	held     []uint64            // hashes of the handles that blocks name, sorted once all are read
	report   Report
	errs     []error
}

// LookCluster looks once at everything, and frees what is due.
func (c *Collector) LookCluster(ctx context.Context) (Report, error) {
	grace, _ := c.grace()
	if grace == 0 {
		return Report{}, nil
	}
	l := &look{Collector: c, now: c.cfg.Clock(), grace: grace, nodes: map[string]bool{}, live: map[netip.Addr]bool{}}
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
	if conf, ok := obj.Value.(*store.IPAMConfig); ok {
		l.cooldown = conf.Cooldown()
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
				for _, a := range w.Addresses() {
					if l.cluster.knows(a.String()) {
						l.live[a] = true
					}
				}
				continue
			}
			l.report.Suspects++
			if !l.cluster.see(o.Key.Path(), uint64(o.Revision), l.now, l.grace) {
				continue
			}
			ops := []store.Op{nodeAbsent(w.Spec.Node), store.RemoveOp(o)}
			if l.write(ctx, ops) {
				l.report.Endpoints++
				l.report.Suspects--
				l.cfg.Log.Info("leaked endpoint freed", "endpoint", o.Key.Name, "namespace", o.Key.Namespace, "node", w.Spec.Node)
			}
		}
		return nil
	})
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

// nodeAbsent is the condition that a node still does not exist.
func nodeAbsent(name string) store.Op {
	return store.CheckAbsent(store.ResourceKey(store.KindNode, name))
}

func (l *look) blocks(ctx context.Context) error {
	var pending []ipam.BlockEdit
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
func (l *look) block(o store.Object) (e ipam.BlockEdit, ok bool, err error) {
	b, _ := o.Value.(*store.Block)
	all, err := ipam.Allocations(o.Key.CIDR(), b)
	if err != nil {
		return ipam.BlockEdit{}, false, err
	}
	owner, virtual := b.Holder(), b.Virtual()
	due := map[netip.Addr]bool{}
	for _, a := range all {
		if a.Handle != "" {
			l.held = append(l.held, l.hash(a.Handle))
		}
		// What names no node at all is nobody's either.
		if virtual || !a.ReleasedAt.IsZero() || a.Node != "" && l.nodes[a.Node] || !old(a, l.now, l.grace) ||
			a.Reserved() {
			continue
		}
		l.report.Suspects++
		if l.cluster.see(a.Addr.String(), a.Sequence, l.now, l.grace) && !l.live[a.Addr] {
			due[a.Addr] = true
		}
	}
	disown := false
	if !virtual && l.gone(owner) {
		disown = l.cluster.see(o.Key.Path(), hashOf(owner), l.now, l.grace)
	}
	if len(due) == 0 && !disown {
		return ipam.BlockEdit{}, false, nil
	}
	return ipam.EditBlock(o, func(a ipam.Allocation) bool { return due[a.Addr] }, disown, l.now, l.cooldown)
}

// sweep writes several blocks in one transaction, or one by one when that is
// refused.
func (l *look) sweep(ctx context.Context, list []ipam.BlockEdit) {
	handles, err := ipam.ReadHandles(ctx, l.cfg.Store, list...)
	if err != nil && !errors.Is(err, store.ErrDecode) {
		if len(l.errs) < 10 {
			l.errs = append(l.errs, err)
		}
		return
	}
	ops, deleted := ipam.EditOps(handles, list...)
	ops = append(ipam.NodesAbsent(list...), ops...)
	if len(ops) <= store.MaxOps && l.write(ctx, ops) {
		l.report.Handles += deleted
		for _, e := range list {
			l.report.Addresses += len(e.Freed)
			l.report.Suspects -= len(e.Freed)
			l.report.Blocks++
			l.log(e)
		}
		return
	}
	if len(list) > 1 && ctx.Err() == nil {
		for i := range list {
			l.sweep(ctx, list[i:i+1])
		}
	}
}

// log names in the log what was freed of a block. A count would not do: who asks
// later why an address is another's knows the address.
func (l *look) log(e ipam.BlockEdit) {
	for _, a := range e.Freed {
		l.cfg.Log.Info("leaked address freed", "address", a.Addr, "handle", a.Handle, "node", a.Node)
	}
	if e.Gone || e.Disowned != "" {
		l.cfg.Log.Info("leaked block freed", "block", e.Op.Object.Key.CIDR(), "node", e.Disowned)
	}
}

// affinities deletes the claims of nodes that do not exist. Their blocks say
// who holds them; a claim is only its echo.
func (l *look) affinities(ctx context.Context) error {
	return store.Pages(ctx, l.cfg.Store, store.KindIPAMAffinity, "", func(objs []store.Object) error {
		var ops []store.Op
		nodes := map[string]bool{}
		flush := func() {
			var checks []store.Op
			for n := range nodes {
				checks = append(checks, nodeAbsent(n))
			}
			if len(ops) > 0 && l.write(ctx, append(checks, ops...)) {
				for _, op := range ops {
					l.cfg.Log.Info("leaked claim freed", "block", op.Object.Key.CIDR(), "node", op.Object.Key.Namespace)
				}
			}
			ops = nil
			clear(nodes)
		}
		for _, o := range objs {
			if !l.gone(o.Key.Namespace) || !l.cluster.see(o.Key.Path(), uint64(o.Revision), l.now, l.grace) {
				continue
			}
			nodes[o.Key.Namespace] = true
			op := store.RemoveOp(o)
			op.Role = store.Prepares // each stands for itself
			if ops = append(ops, op); len(ops) == store.MaxOps/2 {
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
			if _, ok := o.Value.(*store.Handle); !ok {
				l.report.Unreadable++
				continue
			}
			if _, held := slices.BinarySearch(l.held, l.hash(o.Key.Name)); held {
				continue
			}
			l.report.Suspects++
			if !l.cluster.see(o.Key.Path(), uint64(o.Revision), l.now, l.grace) {
				continue
			}
			if err := l.dropHandle(ctx, o); err != nil {
				return err
			}
		}
		return ctx.Err()
	})
}

func (l *look) dropHandle(ctx context.Context, o store.Object) error {
	ops, err := ipam.RemoveHandle(ctx, l.cfg.Store, o)
	if err != nil || len(ops) == 0 {
		return err
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
			if !l.gone(o.Key.Name) || !l.cluster.see(o.Key.Path(), uint64(o.Revision), l.now, l.grace) {
				continue
			}
			if l.write(ctx, []store.Op{nodeAbsent(o.Key.Name), store.RemoveOp(o)}) {
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
