package kube

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/internal/backend"
	"github.com/routerd/routerd/store/kube/convert"
)

// Watch implements [store.Store]: one watch of the API's for each resource, made
// one stream. Kinds that this datastore does not hold have no objects.
func (s *Store) Watch(ctx context.Context, kinds ...store.Kind) <-chan store.Batch {
	return s.WatchFrom(ctx, store.Known{}, kinds...)
}

// WatchFrom implements [store.Resumer].
func (s *Store) WatchFrom(ctx context.Context, from store.Known, kinds ...store.Kind) <-chan store.Batch {
	return s.watch(ctx, from, scope{}, kinds)
}

// Conversion names what a [Store] makes of the objects of an API: what was known by another
// one is not for [Store.WatchFrom].
func Conversion() string { return strconv.Itoa(convert.Version) }

// WatchNode implements [store.NodeWatcher]: the pods of the node are one watch of the API's,
// and those of other nodes another one, which is there while they are in demand.
func (s *Store) WatchNode(ctx context.Context, node string, others *store.Demand, from store.Known, kinds ...store.Kind) <-chan store.Batch {
	return s.watch(ctx, from, scope{node, others}, kinds)
}

// WatchPods is Watch of the endpoints that the pods of one node stand for: the server is
// asked for no others.
func (s *Store) WatchPods(ctx context.Context, node string) <-chan store.Batch {
	return s.watch(ctx, store.Known{}, scope{node: node}, []store.Kind{store.KindWorkloadEndpoint})
}

// scope says of which nodes the pods are followed.
type scope struct {
	node   string        // only of this one; empty: of all
	others *store.Demand // and of the others while they are in demand
}

// parts are the watches that a source is followed by.
func (c scope) parts(src convert.Source) []*part {
	if src.Kind != store.KindWorkloadEndpoint || c.node == "" {
		return []*part{{source: src}}
	}
	of := func(key store.Key) bool { return store.IsEndpointOf(key, c.node) }
	out := []*part{{source: src, fields: "spec.nodeName=" + c.node, within: of}}
	if c.others != nil {
		is, _ := c.others.Is()
		out = append(out, &part{
			// One without a node is no endpoint yet.
			source: src, fields: "spec.nodeName!=" + c.node + ",spec.nodeName!=",
			within: func(key store.Key) bool { return !of(key) }, demand: c.others, off: !is,
		})
	}
	return out
}

// watch is WatchFrom, of pods within a scope.
func (s *Store) watch(ctx context.Context, from store.Known, within scope, kinds []store.Kind) <-chan store.Batch {
	out := make(chan store.Batch)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ctx.Err() != nil {
		close(out)
		return out
	}
	ctx, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(s.ctx, cancel)
	feed := backend.NewFeed(kinds)
	s.watches.Go(func() {
		defer close(out)
		defer stop()
		var readers sync.WaitGroup
		readers.Go(func() { s.follow(ctx, feed, from, within, kinds) })
		feed.Run(ctx, out)
		cancel()
		readers.Wait()
	})
	return out
}

// follow runs the watches of a stream until ctx ends.
func (s *Store) follow(ctx context.Context, feed *backend.Feed, from store.Known, within scope, kinds []store.Kind) {
	m := &merger{feed: feed}
	var sources []convert.Source
	for failures := 0; ; failures++ {
		g, err := s.groupOf(ctx)
		if err == nil {
			m.cluster, err = s.identify(ctx)
		}
		if err == nil {
			kinds = slices.Compact(slices.Sorted(slices.Values(kinds)))
			for _, k := range kinds {
				sources = append(sources, s.sources(g, k)...)
			}
			break
		}
		if ctx.Err() != nil {
			return
		}
		m.outage(nil, err)
		if pause(ctx, err, failures) != nil {
			return
		}
	}
	for _, src := range sources {
		m.parts = append(m.parts, within.parts(src)...)
	}
	m.start()
	var readers sync.WaitGroup
	readers.Go(func() { s.checkVersion(ctx) }) // nothing waits for it
	for _, p := range m.parts {
		r := &reader{s: s, m: m, p: p}
		if at := from.Places[p.String()]; at != 0 && !p.off && (p.demand == nil || !from.OwnOnly) && from.Places[clusterPlace] == m.cluster && slices.Contains(from.Kinds, p.source.Kind) {
			p.resume(from.Objects)
			r.at, r.resumes = at, true
		}
		readers.Go(func() { r.runInDemand(ctx) })
	}
	readers.Wait()
}

// clusterPlace is where the places of a watch say of which cluster they are.
const clusterPlace = "cluster"

// part is what a merger knows of one source.
type part struct {
	source   convert.Source
	fields   string               // the selector; empty: all objects
	within   func(store.Key) bool // which of the source's it selects; nil: all
	demand   *store.Demand        // while it is followed; nil: always
	off      bool                 // it is not in demand
	current  bool                 // of one in demand: all was told since it is
	synced   bool
	down     bool
	frontier store.Revision             // all changes up to it were told
	items    map[store.Key]backend.Item // until the whole is complete
	absent   bool                       // it has no definition
	denied   error                      // why it is not read; nil: it is
}

// String names the watch, for operators and for its place.
func (p *part) String() string {
	if p.fields == "" {
		return p.source.Resource.String()
	}
	return p.source.Resource.String() + " with " + p.fields
}

// owns reports whether an object is told by this watch.
func (p *part) owns(key store.Key) bool {
	return p.source.Owns(key) && (p.within == nil || p.within(key))
}

// resume takes what was known of a source, to which the changes since come.
func (p *part) resume(known []store.Object) {
	p.items = make(map[store.Key]backend.Item)
	for _, o := range known {
		if p.owns(o.Key) {
			p.items[o.Key] = backend.Item{Key: o.Key, Stored: backend.Stored{Revision: o.Revision, Raw: o.Raw}}
		}
	}
}

// merger makes one stream of many sources: complete before it is synced, then
// each change as it comes.
type merger struct {
	feed    *backend.Feed
	cluster store.Revision // which it is; 0: not known

	mu       sync.Mutex
	parts    []*part
	complete bool
	told     bool         // of an outage
	failed   map[int]bool // the answers in it, by their status
}

// start tells the state if there is nothing to wait for.
func (m *merger) start() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.parts) == 0 {
		m.complete = true
		m.feed.Reset(1, nil)
	}
}

// state tells all that there is of a source.
func (m *merger) state(p *part, rev store.Revision, items []backend.Item) {
	m.mu.Lock()
	defer m.mu.Unlock()
	widens := p.widens()
	p.frontier, p.synced, p.current = rev, true, true
	ended := m.up(p)
	if p.denied != nil {
		p.denied = nil
		m.withhold()
	}
	if m.complete {
		m.feed.Together(func() {
			if widens && !ended {
				m.feed.Widen(rev, items, p.owns)
			} else {
				m.feed.ResetPart(rev, items, p.owns)
			}
			m.place(p)
			m.ownOnly()
		})
		return
	}
	p.items = make(map[store.Key]backend.Item, len(items))
	for _, it := range items {
		p.items[it.Key] = it
	}
	m.finish()
}

// finish tells the state when all sources have told theirs. The lock is held.
func (m *merger) finish() {
	var all []backend.Item
	rev := store.Revision(1)
	for _, p := range m.parts {
		if !p.synced && p.denied == nil && !p.off {
			return
		}
		rev = max(rev, p.frontier)
	}
	for _, p := range m.parts {
		all = slices.AppendSeq(all, maps.Values(p.items))
		p.synced = p.synced || p.items != nil // of one that is denied what was known holds
		p.items = nil
	}
	slices.SortFunc(all, func(a, b backend.Item) int { return strings.Compare(a.Key.Path(), b.Key.Path()) })
	m.complete, m.told = true, false
	// A batch of the state without its places would have a daemon that ends before the next
	// one read all anew.
	m.feed.Together(func() {
		m.ownOnly()
		m.feed.Reset(rev, all)
		for _, p := range m.parts {
			m.place(p)
		}
		m.feed.Place(clusterPlace, m.cluster)
	})
}

// place tells how far a source is, after its changes. The lock is held.
func (m *merger) place(p *part) {
	at := p.frontier
	if p.absent || p.widens() || m.cluster == 0 {
		at = 0
	}
	m.feed.Place(p.String(), at)
}

// widens reports whether a watch came into demand, and has not told all since.
func (p *part) widens() bool { return p.demand != nil && !p.current }

// ownOnly tells whether there is a watch that is not in demand, or has not told all since it
// is. The lock is held.
func (m *merger) ownOnly() {
	m.feed.OwnOnly(slices.ContainsFunc(m.parts, (*part).widens))
}

// open notes that a watch is in demand.
func (m *merger) open(p *part) {
	m.mu.Lock()
	defer m.mu.Unlock()
	p.off = false
}

// shut notes that a watch is not in demand any more, and reports whether it has told all
// there was: what it told stays.
func (m *merger) shut(p *part) (told bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	p.off, p.current = true, false
	if !p.synced {
		p.items = nil
	}
	ended := m.up(p)
	if p.denied != nil {
		p.denied = nil
		m.withhold()
	}
	if !m.complete {
		m.finish()
		return p.synced
	}
	m.ownOnly()
	if m.place(p); ended {
		m.feed.Synced()
	}
	return p.synced
}

// resumed tells that all changes of a source since the places that were known have
// come.
func (m *merger) resumed(p *part, rev store.Revision) {
	m.mu.Lock()
	defer m.mu.Unlock()
	widens := p.widens()
	p.frontier, p.synced, p.current = max(p.frontier, rev), true, true
	if ended := m.up(p); m.complete {
		m.place(p)
		if !widens || ended {
			m.feed.Synced()
		}
		m.ownOnly()
		return
	}
	m.finish()
}

// denied notes that a source may not be read, or with nil that it may again. What was
// known of it holds. Where nothing at all may be read there is no state to tell.
func (m *merger) denied(p *part, at store.Revision, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	changed := (p.denied == nil) != (err == nil)
	p.denied, p.frontier = err, max(p.frontier, at)
	if all := !slices.ContainsFunc(m.parts, func(q *part) bool { return q.denied == nil && !q.off }); all {
		if !m.told {
			m.told, m.failed = true, make(map[int]bool)
			m.feed.Outage(err)
		}
		return
	}
	ended := m.up(p)
	if changed {
		m.withhold()
	}
	switch {
	case !m.complete:
		m.finish()
	case ended:
		m.feed.Synced()
	}
}

// withhold tells which kinds may not be read. The lock is held.
func (m *merger) withhold() {
	kinds := make(map[store.Kind]store.Withheld)
	for _, p := range m.parts {
		if p.denied == nil {
			continue
		}
		known := p.synced || p.items != nil
		if w, ok := kinds[p.source.Kind]; ok { // its other source
			known = known && w.Known
		}
		kinds[p.source.Kind] = store.Withheld{Err: p.denied, Known: known}
	}
	m.feed.Withhold(kinds)
}

// change tells that an object of a source was written, or is gone.
func (m *merger) change(p *part, rev store.Revision, it backend.Item, gone bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	p.frontier = max(p.frontier, rev)
	switch {
	case m.complete && gone:
		m.feed.Change(rev, []store.Event{backend.Deletion(it.Key, rev)})
		m.place(p)
	case m.complete:
		m.feed.Change(rev, []store.Event{it.Event()})
		m.place(p)
	case gone:
		delete(p.items, it.Key)
	default:
		p.items[it.Key] = it
	}
}

// missing notes whether a source has no definition.
func (m *merger) missing(p *part, is bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	p.absent = is
}

// progress tells that all changes of a source up to a revision were told.
func (m *merger) progress(p *part, rev store.Revision) {
	m.mu.Lock()
	defer m.mu.Unlock()
	p.frontier = max(p.frontier, rev)
	if !m.complete {
		return
	}
	m.place(p)
	least := p.frontier
	for _, q := range m.parts {
		if q.denied == nil && !q.widens() {
			least = min(least, q.frontier)
		}
	}
	m.feed.Progress(least)
}

// outage tells that a source cannot be reached; nil: none can. It reports whether that is
// the first one in this outage which fails so: a server that is gone fails all alike.
func (m *merger) outage(p *part, err error) (first bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if p != nil {
		p.down = true
	}
	if !m.told {
		m.told, m.failed = true, make(map[int]bool)
		m.feed.Outage(err)
	}
	var st *statusError
	code := 0 // no answer
	if errors.As(err, &st) {
		code = st.code
	}
	if m.failed[code] {
		return false
	}
	m.failed[code] = true
	return true
}

// recovered tells that a source is there again, and that all of its changes were
// told.
func (m *merger) recovered(p *part) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.up(p) && m.complete {
		m.feed.Synced()
	}
}

// up notes that a source is there, and reports whether that ends an outage. The
// lock is held.
func (m *merger) up(p *part) bool {
	p.down = false
	if !m.told || slices.ContainsFunc(m.parts, func(q *part) bool { return q.down }) {
		return false
	}
	m.told = false
	return true
}
