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

// pageSize is how many objects one request of a list asks for.
const pageSize = 500

// Store is a client of one cluster's API. Its methods are safe for concurrent
// use. Make one with [Open].
//
// A write that fails with [store.ErrUnavailable] may have taken place all the
// same: its answer can be lost. Conditions make a second try safe.
type Store struct {
	store.KeyLocks

	api      client
	describe func() (user, authority string) // of the credentials, for people; may be nil
	log      *slog.Logger

	others    []string // servers beside the configured one
	native    bool     // see Config.NativeOnly
	namespace string   // of routerd's own objects
	node      string   // see Config.Node
	inPod     bool     // see InPod
	setting   string   // of the group
	groupMu   sync.Mutex
	group     convert.Group // empty: not known yet
	asked     bool          // how old the API is

	asks watched // see [Store.Watches]

	cluster      store.Revision // of [Store.clusterOf]
	clusterKnown bool

	ctx     context.Context // ends with Close; all watches hang on it
	cancel  context.CancelFunc
	mu      sync.Mutex // makes Watch and Close exclude each other
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
	s := &Store{
		api: client{http: &http.Client{Transport: cr}, base: cr.base}, describe: cr.describe, log: log,
		setting: c.APIGroup, namespace: c.namespace(), node: c.Node, inPod: c.inPod(), others: c.Servers, native: c.NativeOnly,
	}
	s.api.warned = newDropped(log).note
	s.ctx, s.cancel = context.WithCancel(context.Background())
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
	s.api.http.CloseIdleConnections()
	return nil
}

// Servers lists the URLs at which the API is reached.
func (s *Store) Servers() []string {
	out := []string{s.api.base}
	for _, server := range s.others {
		out = append(out, "https://"+server)
	}
	return out
}

// InPod reports whether the API is reached as pods reach it, by a service account's files, and by no
// kubeconfig.
func (s *Store) InPod() bool { return s.inPod }

// call makes a request, unless the store is closed.
func (s *Store) call(ctx context.Context, r request) ([]byte, error) {
	if s.ctx.Err() != nil {
		return nil, fmt.Errorf("%w: the store was closed", store.ErrUnavailable)
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	return s.api.call(ctx, r)
}

// groupOf returns the group of Calico's custom resources, which it asks the
// cluster for once.
func (s *Store) groupOf(ctx context.Context) (convert.Group, error) {
	s.groupMu.Lock()
	defer s.groupMu.Unlock()
	if s.group != "" {
		return s.group, nil
	}
	if s.native {
		return convert.V3, nil // it is not asked for anything of it
	}
	if s.setting != "" {
		s.group = convert.Choose(s.setting, false, false)
		return s.group, nil
	}
	raw, err := s.call(ctx, request{method: http.MethodGet, path: "/apis"})
	if err != nil {
		return "", s.explain(ctx, err)
	}
	var list struct {
		Groups []struct{ Name string }
	}
	if err := json.Unmarshal(raw, &list); err != nil {
		return "", fmt.Errorf("%w: %s: the list of API groups: %w", store.ErrUnavailable, s.api.base, err)
	}
	has := func(g convert.Group) bool {
		return slices.ContainsFunc(list.Groups, func(l struct{ Name string }) bool { return l.Name == string(g) })
	}
	g := convert.Choose("", has(convert.V1), has(convert.V3))
	if has(convert.V1) && has(convert.V3) {
		s.log.Info("the API has the definitions of both groups; the one that Calico's clients choose is used, another one is to be set (datastore.kubernetes.apiGroup, CALICO_API_GROUP)", "group", g)
	}
	if has(g) {
		s.group = g // else the definitions may come yet
	}
	return g, nil
}

// place is where an object is in the API.
type place struct {
	convert.Source
	key             store.Key
	namespace, name string
}

func (p place) collection() string { return p.Resource.Path(p.namespace) }
func (p place) path() string       { return p.collection() + "/" + url.PathEscape(p.name) }

var errNoPlace = errors.New("the Kubernetes datastore holds no such object")

// sources are those from which the objects of a kind come.
func (s *Store) sources(g convert.Group, kind store.Kind) []convert.Source {
	all := convert.Sources(g, kind)
	if !s.native {
		return all
	}
	return slices.DeleteFunc(all, convert.Source.Custom)
}

// placeOf returns where the object of a key is.
func (s *Store) placeOf(ctx context.Context, key store.Key) (place, error) {
	if key.Path() == "" {
		return place{}, fmt.Errorf("%w: no key", store.ErrInvalid)
	}
	g, err := s.groupOf(ctx)
	if err != nil {
		return place{}, err
	}
	if key.Kind == store.KindSecret {
		return place{Source: convert.Secrets(g), key: key, namespace: s.namespace, name: convert.SecretName(key)}, nil
	}
	src, namespace, name, ok := convert.SourceOf(g, key)
	if !ok {
		return place{}, fmt.Errorf("%w: %w", store.ErrInvalid, errNoPlace)
	}
	return place{Source: src, key: key, namespace: namespace, name: name}, nil
}

// read reads the object at a place, as it stands: also one that is marked as
// about to be deleted. The error is the API's, or matches [store.ErrDecode] or
// [convert.ErrNotOurs].
func (s *Store) read(ctx context.Context, p *place) (convert.Object, error) {
	raw, err := s.call(ctx, request{method: http.MethodGet, path: p.path()})
	if older, ok := p.OlderName(p.key); ok && isCode(err, http.StatusNotFound) {
		q := *p
		q.name = older
		if raw, err = s.call(ctx, request{method: http.MethodGet, path: q.path()}); err == nil {
			*p = q
		}
	}
	if err != nil {
		return convert.Object{}, err
	}
	o, err := p.Read(raw)
	if err == nil && o.Key != p.key {
		// Two handles may differ in case alone, which names in the API cannot.
		return convert.Object{}, &statusError{
			code: http.StatusNotFound, message: fmt.Sprintf("%s %s holds %s", p.Resource, p.name, o.Key),
		}
	}
	return o, err
}

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

// page is a part of a list of the API's.
type page struct {
	Metadata struct {
		ResourceVersion string `json:"resourceVersion"`
		Continue        string `json:"continue"`
	} `json:"metadata"`
	Items []json.RawMessage `json:"items"`
}

// listSource reads all objects of a source that are ours, page by page, as they are at one
// revision; with a field selector, unless that is empty, those that it selects. The error
// is the API's.
func (s *Store) listSource(ctx context.Context, src convert.Source, namespace, fields string) ([]backend.Item, store.Revision, error) {
	if !src.Resource.Namespaced || src.Kind == store.KindProfile {
		namespace = ""
	}
	var items []backend.Item
	query := url.Values{"limit": {strconv.Itoa(pageSize)}}
	if fields != "" {
		query.Set("fieldSelector", fields)
	}
	for {
		raw, err := s.call(ctx, request{method: http.MethodGet, path: src.Resource.Path(namespace), query: query})
		if isCode(err, http.StatusGone) && query.Get("continue") != "" {
			items = nil // the revision of the first page is no more: begin at a later one
			query.Del("continue")
			continue
		}
		if err != nil {
			return nil, 0, err
		}
		var p page
		if err := json.Unmarshal(raw, &p); err != nil {
			return nil, 0, fmt.Errorf("list of %s: %w", src.Resource, err)
		}
		for _, raw := range p.Items {
			if it, ok := s.item(src, raw); ok {
				items = append(items, it)
			}
		}
		if p.Metadata.Continue == "" {
			rev, err := strconv.ParseInt(p.Metadata.ResourceVersion, 10, 64)
			if err != nil {
				return nil, 0, fmt.Errorf("list of %s: resourceVersion %q is no number", src.Resource, p.Metadata.ResourceVersion)
			}
			return items, store.Revision(rev), nil
		}
		query.Set("continue", p.Metadata.Continue)
	}
}

// item reads an object of a list. It reports false for those that count as not
// there. One of which not even the key can be known is logged.
func (s *Store) item(src convert.Source, raw []byte) (backend.Item, bool) {
	o, err := src.Read(raw)
	if err == nil {
		return backend.Item{Key: o.Key, Stored: backend.Stored{Revision: o.Revision, Raw: o.Raw}}, !o.Marked
	}
	if errors.Is(err, convert.ErrNotOurs) {
		return backend.Item{}, false
	}
	if o.Key.Name == "" || o.Revision == 0 {
		s.log.Warn("an object in the datastore cannot be read", "resource", src.Resource.String(), "error", err)
		return backend.Item{}, false
	}
	return backend.Item{Key: o.Key, Stored: backend.Stored{Revision: o.Revision, Raw: raw}, Err: err}, true
}
