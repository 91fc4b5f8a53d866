package kube

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"sync"

	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/internal/backend"
	"github.com/routerd/routerd/store/kube/convert"
)

// Store is a client of one cluster's API. Its methods are safe for concurrent
// use. Make one with [Open].
//
// A write that fails with [store.ErrUnavailable] may have taken place all the
// same: its answer can be lost. Conditions make a second try safe.
type Store struct {
	store.KeyLocks
	*cluster

	node   string   // see Config.Node
	inPod  bool     // see InPod
	others []string // servers beside the configured one
	asks   watched  // see [Store.Watches]

	cancel  context.CancelFunc // ends the client, on which all watches hang
	mu      sync.Mutex         // makes Watch and Close exclude each other
	watches sync.WaitGroup
}

// Open makes a client. It reads the configuration's files; an error matches
// [store.ErrInvalid]. It does not need the API server to be there.
func Open(c Config) (*Store, error) {
	d := &dialer{configured: c.Servers}
	log := c.Logger
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	cr, err := newCredentials(c, d, log)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	api := &client{
		http: &http.Client{Transport: cr}, base: cr.base, warned: newDropped(log).note, describe: cr.describe, native: c.NativeOnly, log: log, ctx: ctx,
	}
	s := &Store{
		cluster: &cluster{client: api, setting: c.APIGroup, namespace: c.namespace()},
		node:    c.Node, inPod: c.inPod(), others: c.Servers, cancel: cancel,
	}
	if c.ServersFile != "" {
		d.loadServers(c.ServersFile, s.log)
		s.watches.Go(func() { s.followServers(s.ctx, d, c.ServersFile) })
	}
	return s, nil
}

// Close ends all watches, waits for them, and closes the connections.
func (s *Store) Close() error {
	s.mu.Lock()
	s.cancel()
	s.mu.Unlock()
	s.watches.Wait()
	s.http.CloseIdleConnections()
	return nil
}

// Servers lists the URLs at which the API is reached.
func (s *Store) Servers() []string {
	out := []string{s.base}
	for _, server := range s.others {
		out = append(out, "https://"+server)
	}
	return out
}

// InPod reports whether the API is reached as pods reach it, by a service account's files, and by no
// kubeconfig.
func (s *Store) InPod() bool { return s.inPod }

// Get implements [store.Store].
func (s *Store) Get(ctx context.Context, key store.Key) (store.Object, error) {
	obj, err := s.get(ctx, key)
	if err != nil {
		return obj, fmt.Errorf("get %s: %w", key, err)
	}
	return obj, nil
}

func (s *Store) get(ctx context.Context, key store.Key) (store.Object, error) {
	p, err := s.placeOf(ctx, key)
	if err != nil {
		return store.Object{}, err
	}
	o, err := s.read(ctx, &p)
	switch {
	case errors.Is(err, convert.ErrNotOurs):
		return store.Object{}, fmt.Errorf("%w: %w", store.ErrNotFound, err)
	case errors.Is(err, store.ErrDecode):
		return store.Object{Key: key, Revision: o.Revision, Raw: o.Raw}, err
	case err != nil:
		return store.Object{}, s.explain(ctx, err)
	case o.Marked:
		// Whoever marked it may have died before the second step.
		if err := s.destroy(ctx, p, o.Revision, string(o.UID)); err != nil && !isCode(err, http.StatusConflict) && !isCode(err, http.StatusNotFound) {
			s.log.Debug("an object that is marked as deleted stays for now", "object", key.String(), "error", err)
		}
		return store.Object{}, store.ErrNotFound
	}
	return backend.Object(key, o.Revision, o.Raw)
}

// List implements [store.Store]. Of a kind that comes from two resources the
// revision is the lower one.
func (s *Store) List(ctx context.Context, kind store.Kind, namespace string) ([]store.Object, store.Revision, error) {
	g, err := s.groupOf(ctx)
	if err != nil {
		return nil, 0, fmt.Errorf("list %s: %w", kind, err)
	}
	sources := s.sources(g, kind)
	if len(sources) == 0 {
		return nil, 0, fmt.Errorf("list: %w: the Kubernetes datastore holds no objects of kind %q", store.ErrInvalid, kind)
	}
	var objs []store.Object
	var bad backend.DecodeErrors
	rev := store.Revision(0)
	for _, src := range sources {
		items, at, err := s.listSource(ctx, src, namespace, "")
		if err != nil && !isCode(err, http.StatusNotFound) { // the definition may come yet
			return nil, 0, fmt.Errorf("list %s: %w", kind, s.explain(ctx, err))
		}
		if rev == 0 || at != 0 && at < rev {
			rev = at
		}
		for _, it := range items {
			if namespace != "" && it.Key.Namespace != namespace && (kind.Namespaced() || kind == store.KindIPAMAffinity) {
				continue
			}
			if it.Err != nil {
				bad = append(bad, it.Err)
				continue
			}
			obj, err := backend.Object(it.Key, it.Revision, it.Raw)
			if err != nil {
				bad = append(bad, err)
				continue
			}
			objs = append(objs, obj)
		}
	}
	slices.SortFunc(objs, func(a, b store.Object) int { return cmp.Compare(a.Key.Path(), b.Key.Path()) })
	return objs, max(rev, 1), bad.Err()
}

// listSource reads all objects of a source that are ours, page by page, as they are at one
// revision; with a field selector, unless that is empty, those that it selects. The error
// is the API's.
func (s *Store) listSource(ctx context.Context, src convert.Source, namespace, fields string) ([]backend.Item, store.Revision, error) {
	if !src.Resource.Namespaced || src.Kind == store.KindProfile {
		namespace = ""
	}
	var items []backend.Item
	query := url.Values{}
	if fields != "" {
		query.Set("fieldSelector", fields)
	}
	at, err := s.pages(ctx, src.Resource.Path(namespace), query, func(first bool, raw []json.RawMessage) {
		if first {
			items = nil
		}
		for _, raw := range raw {
			if it, _, there := s.item(src, raw); there {
				items = append(items, it)
			}
		}
	})
	if err != nil {
		return nil, 0, err
	}
	rev, err := strconv.ParseInt(at, 10, 64)
	if err != nil {
		return nil, 0, fmt.Errorf("list of %s: resourceVersion %q is no number", src.Resource, at)
	}
	return items, store.Revision(rev), nil
}

// item reads an object of a list or of a watch, and its revision. It reports false for those that
// count as not there. One of which not even the key can be known is logged.
func (c *client) item(src convert.Source, raw []byte) (it backend.Item, rev store.Revision, there bool) {
	o, err := src.Read(raw)
	switch {
	case err == nil:
		it = backend.Item{Key: o.Key, Stored: backend.Stored{Revision: o.Revision, Raw: o.Raw}}
		there = !o.Marked
	case errors.Is(err, convert.ErrNotOurs):
	case o.Key.Name == "" || o.Revision == 0:
		c.log.Warn("an object in the datastore cannot be read", "resource", src.Resource.String(), "error", err)
	default:
		it = backend.Item{Key: o.Key, Stored: backend.Stored{Revision: o.Revision, Raw: raw}, Err: err}
		there = true
	}
	return it, o.Revision, there
}
