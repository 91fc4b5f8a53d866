package kubesync

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/store"
)

// API is what is asked of Kubernetes. A [kube.Store] whose Calico resources are elsewhere
// has it.
//
// [kube.Store]: https://pkg.go.dev/github.com/routerd/routerd/store/kube#Store
type API interface {
	Watch(ctx context.Context, kinds ...store.Kind) <-chan store.Batch
	Get(ctx context.Context, key store.Key) (store.Object, error)
}

// rightsCheck is how often what this host might not write is tried again.
const rightsCheck = 30 * time.Second

// maxBatch is how many objects are written in one transaction.
const maxBatch = 64

// Controller brings what Kubernetes says into a datastore. Make one with [New].
type Controller struct {
	api   API
	store store.Store
	log   *slog.Logger

	want, have side
	// keepLabels is set where Nodes keep the labels that they have.
	keepLabels bool
	// order is the place of each kind among those that are written.
	order map[store.Kind]int
	// refs is which Nodes of the datastore are a Node of Kubernetes.
	refs map[string]map[store.Key]bool
	// due is what is to be compared.
	due map[store.Key]bool
	// refused is what the datastore refuses, until one of the two changes.
	refused map[store.Key]bool
	// lacks are the kinds that this host may not write, and aside what is due of them, until
	// it is tried again; logged are those of which that was said.
	lacks, logged map[store.Kind]bool
	aside         map[store.Key]bool
	backoff       async.Backoff
	// notBefore is when the next try may be after one that failed.
	notBefore time.Time
	told      bool // that all is in the datastore
}

// side is what one of the two says.
type side struct {
	objects map[store.Key]store.Object
	synced  bool
	// withheld are the kinds of which nothing is known, for want of a right.
	withheld map[store.Kind]bool
}

// New returns a Controller for one term: it keeps nothing between two calls of Run.
func New(api API, s store.Store, log *slog.Logger) *Controller {
	c := &Controller{
		api: api, store: s, log: log,
		want: side{objects: make(map[store.Key]store.Object)}, have: side{objects: make(map[store.Key]store.Object)},
		order: make(map[store.Kind]int), refs: make(map[string]map[store.Key]bool),
		due: make(map[store.Key]bool), refused: make(map[store.Key]bool),
		lacks: make(map[store.Kind]bool), logged: make(map[store.Kind]bool), aside: make(map[store.Key]bool),
		backoff: async.Backoff{Min: 100 * time.Millisecond, Max: 10 * time.Second},
	}
	for i, k := range kinds() {
		c.order[k] = i
	}
	return c
}

// Run follows both sides until ctx ends. It is for the one host of the cluster that holds
// the lease; two at once do no harm, for every write is on condition of what it was decided by.
func (c *Controller) Run(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	api, datastore := c.api.Watch(ctx, kinds()...), c.store.Watch(ctx, append(kinds(), store.KindKubeControllersConfiguration)...)
	again := time.NewTimer(0)
	defer again.Stop()
	rights := time.NewTicker(rightsCheck)
	defer rights.Stop()
	for {
		select {
		case b, ok := <-api:
			if !ok {
				return
			}
			c.kubernetesSays(b)
		case b, ok := <-datastore:
			if !ok {
				return
			}
			c.datastoreSays(b)
		case <-again.C:
		case <-rights.C:
			c.tryAside()
		}
		if !c.want.synced || !c.have.synced || len(c.due) == 0 || time.Now().Before(c.notBefore) {
			continue
		}
		if err := c.write(ctx); err != nil {
			if ctx.Err() != nil {
				return
			}
			wait := c.backoff.Next()
			c.log.Debug("what Kubernetes says is not in the datastore yet; will try again", "objects", len(c.due), "error", err, "retry", wait)
			c.notBefore = time.Now().Add(wait)
			again.Reset(wait)
			continue
		}
		c.backoff.Reset()
		if !c.told && len(c.aside) == 0 {
			c.told = true
			c.log.Info("what Kubernetes says is in the datastore", "objects", len(c.want.objects))
		}
	}
}

// kubernetesSays takes account of a step of the API's watch.
func (c *Controller) kubernetesSays(b store.Batch) {
	c.want.synced = c.want.synced || b.Synced
	c.withhold(&c.want, b)
	for _, e := range b.Events {
		switch {
		case e.Err != nil: // what was known holds
			c.log.Warn("an object of Kubernetes cannot be converted", "object", e.Key.String(), "error", e.Err)
			continue
		case e.Deleted():
			delete(c.want.objects, e.Key)
		default:
			c.want.objects[e.Key] = e.Object
		}
		if e.Key.Kind != store.KindNode {
			c.touch(e.Key)
			continue
		}
		for key := range c.refs[e.Key.Name] {
			c.touch(key)
		}
	}
}

// withhold notes the kinds of which one of the two says nothing.
func (c *Controller) withhold(s *side, b store.Batch) {
	if b.Withheld == nil && !b.Synced {
		return
	}
	was := s.withheld
	s.withheld = make(map[store.Kind]bool)
	for k, w := range b.Withheld {
		if !w.Known {
			s.withheld[k] = true
		}
	}
	maps.DeleteFunc(was, func(k store.Kind, _ bool) bool { return s.withheld[k] })
	if len(was) == 0 {
		return
	}
	for _, known := range []map[store.Key]store.Object{c.want.objects, c.have.objects} {
		for key := range known {
			if was[key.Kind] {
				c.touch(key)
			}
		}
	}
}

// datastoreSays takes account of a step of the datastore's watch.
func (c *Controller) datastoreSays(b store.Batch) {
	c.have.synced = c.have.synced || b.Synced
	c.withhold(&c.have, b)
	for _, e := range b.Events {
		if e.Key.Kind == store.KindKubeControllersConfiguration {
			c.configure(e)
			continue
		}
		o := e.Object
		if o.Key = e.Key; e.Deleted() {
			o.Revision = 0
		}
		c.note(o)
		c.touch(e.Key)
	}
}

// configure follows the KubeControllersConfiguration.
func (c *Controller) configure(e store.Event) {
	if e.Key.Name != store.DefaultName || e.Err != nil {
		return
	}
	if keep := keepsLabels(e.Object.Value); keep != c.keepLabels {
		c.keepLabels = keep
		for key := range c.have.objects {
			if key.Kind == store.KindNode {
				c.touch(key)
			}
		}
	}
}

// note keeps what the datastore has of an object.
func (c *Controller) note(o store.Object) {
	if o.Key.Kind == store.KindNode {
		name := c.kubeKey(o.Key).Name
		if delete(c.refs[name], o.Key); len(c.refs[name]) == 0 {
			delete(c.refs, name)
		}
	}
	if o.Revision == 0 {
		delete(c.have.objects, o.Key)
		return
	}
	c.have.objects[o.Key] = o
	if _, ok := o.Value.(*store.Node); ok {
		name := c.kubeKey(o.Key).Name
		if c.refs[name] == nil {
			c.refs[name] = make(map[store.Key]bool)
		}
		c.refs[name][o.Key] = true
	}
}

func (c *Controller) touch(key store.Key) {
	c.due[key] = true
	delete(c.refused, key)
}

// current returns an object as the datastore has it.
func (c *Controller) current(key store.Key) store.Object {
	cur := c.have.objects[key]
	cur.Key = key
	return cur
}

// kubeKey returns the key of what an object of the datastore is in Kubernetes: a Node may
// have another name there.
func (c *Controller) kubeKey(key store.Key) store.Key {
	if n, ok := c.have.objects[key].Value.(*store.Node); ok {
		key.Name, _ = nodeRef(n)
	}
	return key
}

// said returns what Kubernetes says of an object of the datastore; nil: nothing.
func (c *Controller) said(key store.Key) any { return c.want.objects[c.kubeKey(key)].Value }

// op returns the write that is due of an object; none: it is as it should be.
func (c *Controller) op(key store.Key) (op store.Op, due bool, err error) {
	if c.want.withheld[key.Kind] || c.have.withheld[key.Kind] || c.refused[key] {
		return op, false, nil
	}
	cur := c.current(key)
	d := decide(key, c.said(key), cur)
	if next, ok := d.value.(*store.Node); ok && c.keepLabels {
		keepLabels(next, cur.Value.(*store.Node)) // there is one, or nothing would be decided
	}
	switch {
	case d.remove:
		return store.RemoveOp(cur), true, nil
	case d.value == nil:
		return op, false, nil
	case cur.Value == nil && cur.Revision != 0:
		// What cannot be decoded has no identity to keep.
		op, _, err = store.PutOp(store.Object{Key: key}, d.value)
		op.If = store.IfRevision(cur.Revision)
		return op, true, err
	}
	op, same, err := store.PutOp(cur, d.value)
	return op, !same, err
}

// write writes what is due. With an error some of it is due still.
func (c *Controller) write(ctx context.Context) error {
	keys := make([]store.Key, 0, len(c.due))
	for key := range c.due {
		keys = append(keys, key)
	}
	slices.SortFunc(keys, func(a, b store.Key) int {
		return cmp.Or(cmp.Compare(c.order[a.Kind], c.order[b.Kind]), strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name))
	})
	var batch []store.Op
	for _, key := range keys {
		if c.lacks[key.Kind] {
			c.setAside(key)
			continue
		}
		op, due, err := c.op(key)
		if err == nil && due && key.Kind == store.KindNode && op.Action == store.Remove {
			due, err = c.gone(ctx, key)
		}
		if errors.Is(err, store.ErrUnavailable) || ctx.Err() != nil {
			return cmp.Or(err, ctx.Err())
		}
		switch {
		case err != nil:
			c.refuse(key, err)
		case !due:
			delete(c.due, key)
		default:
			batch = append(batch, op)
		}
		if len(batch) == maxBatch {
			if err := c.commit(ctx, batch); err != nil {
				return err
			}
			batch = batch[:0]
		}
	}
	return c.commit(ctx, batch)
}

// gone asks the API whether a Node is not there, before it is deleted in the datastore with
// all that this leads to.
func (c *Controller) gone(ctx context.Context, key store.Key) (bool, error) {
	key = c.kubeKey(key)
	_, err := c.api.Get(ctx, key)
	if errors.Is(err, store.ErrNotFound) {
		return true, nil
	}
	if err != nil {
		return false, fmt.Errorf("ask Kubernetes for %s, which its watch says is gone: %w: %w", key, store.ErrUnavailable, err)
	}
	return false, nil // the watch will say so too
}

// refuse leaves an object alone until one of the two says something else of it.
func (c *Controller) refuse(key store.Key, err error) {
	c.log.Warn("what Kubernetes says of an object cannot be brought into the datastore", "object", key.String(), "error", err)
	c.refused[key] = true
	delete(c.due, key)
}

// setAside leaves an object alone that this host may not write, until that is tried again.
func (c *Controller) setAside(key store.Key) {
	c.aside[key] = true
	delete(c.due, key)
}

// mayNot notes that this host may not write a kind: the others are written.
func (c *Controller) mayNot(key store.Key, err error) {
	if !c.logged[key.Kind] {
		c.log.Error("this host may not write a kind of object that Kubernetes has; the others are written", "kind", key.Kind, "error", err)
	}
	c.lacks[key.Kind], c.logged[key.Kind] = true, true
	c.setAside(key)
}

// tryAside has what was set aside tried again.
func (c *Controller) tryAside() {
	maps.Copy(c.due, c.aside)
	clear(c.aside)
	clear(c.lacks)
}

// commit writes a batch in one transaction, or, where not all of it can be written, each by
// itself.
func (c *Controller) commit(ctx context.Context, batch []store.Op) error {
	if len(batch) == 0 {
		return nil
	}
	written, err := c.store.Txn(ctx, batch...)
	if err == nil {
		c.wrote(batch, written)
		return nil
	}
	if errors.Is(err, store.ErrUnavailable) && !errors.Is(err, store.ErrDenied) {
		return err
	}
	var failed error
	for _, op := range batch {
		key := op.Object.Key
		if c.lacks[key.Kind] {
			c.setAside(key)
			continue
		}
		written, err := c.store.Txn(ctx, op)
		var conflict *store.ConflictError
		switch {
		case err == nil:
			c.wrote([]store.Op{op}, written)
		case errors.As(err, &conflict):
			c.note(conflict.Current[0])
			failed = cmp.Or(failed, err) // it stays due
		case errors.Is(err, store.ErrDenied):
			c.mayNot(key, err)
		case errors.Is(err, store.ErrUnavailable), ctx.Err() != nil:
			return err
		default:
			c.refuse(key, err)
		}
	}
	return failed
}

// wrote notes what was written, which the watch will say again.
func (c *Controller) wrote(batch []store.Op, written []store.Object) {
	for i, op := range batch {
		key, o := op.Object.Key, store.Object{Key: op.Object.Key}
		if op.Action == store.Put {
			o = written[i]
		}
		c.note(o)
		delete(c.due, key)
		c.log.Debug("brought into the datastore", "object", key.String(), "removed", op.Action == store.Remove)
	}
}
