package ui

import (
	"maps"
	"slices"
	"sync"
	"time"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/control/doctor"
	"github.com/routerd/routerd/control/doctor/gather"
	"github.com/routerd/routerd/store"
)

// Kinds lists the kinds that the page follows.
func Kinds() []store.Kind {
	return []store.Kind{
		store.KindNode, store.KindIPPool, store.KindIPAMBlock, store.KindBGPConfiguration, store.KindBGPPeer,
		store.KindWorkloadEndpoint, store.KindHostEndpoint, store.KindTier,
		store.KindNetworkPolicy, store.KindGlobalNetworkPolicy, store.KindStagedNetworkPolicy,
		store.KindStagedGlobalNetworkPolicy, store.KindStagedKubernetesNetworkPolicy,
	}
}

// Revisions count what changed of each view. They begin anew with the daemon, and say nothing but whether to look again.
type Revisions struct {
	Topology uint64 `json:"topology"`
	Pools    uint64 `json:"pools"`
	Policy   uint64 `json:"policy"`
	Events   uint64 `json:"events"`
}

// Watch is the cluster as the page needs it, kept up to date change by change. It is safe for concurrent use.
type Watch struct {
	mu      sync.Mutex
	nodes   map[string]*cluster.Node
	members map[string]doctor.Member
	pools   map[store.Key]*cluster.Pool
	blocks  map[store.Key]*cluster.Block
	present map[string]bool // nil: not known
	loads   map[string]*apiv1.HostLoad
	loaded  time.Time // when hosts said that
	rev     Revisions
	changed chan struct{} // closed at the next change
}

// NewWatch returns a Watch that knows nothing yet.
func NewWatch() *Watch {
	return &Watch{
		nodes: map[string]*cluster.Node{}, members: map[string]doctor.Member{},
		pools: map[store.Key]*cluster.Pool{}, blocks: map[store.Key]*cluster.Block{}, changed: make(chan struct{}),
	}
}

// HandleStore takes what changed in the cluster.
func (w *Watch) HandleStore(s cluster.Step) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, ch := range s.Changes {
		switch ch.Key.Kind {
		case store.KindNode:
			w.rev.Topology++
			w.setNode(ch)
		case store.KindIPPool:
			w.rev.Pools++
			set(w.pools, ch)
		case store.KindIPAMBlock:
			w.rev.Pools++
			w.rev.Topology++ // which says how many blocks a host has
			set(w.blocks, ch)
		case store.KindBGPConfiguration, store.KindBGPPeer:
			w.rev.Topology++
		default:
			w.rev.Policy++
		}
	}
	w.tell()
}

// set keeps what a change says of a key, or forgets it.
func set[T any](m map[store.Key]T, ch *cluster.Change) {
	if v, ok := ch.Value.(T); ok {
		m[ch.Key] = v
	} else if ch.Deleted() {
		delete(m, ch.Key) // of one that cannot be read the last that could stays
	}
}

func (w *Watch) setNode(ch *cluster.Change) {
	n, ok := ch.Value.(*cluster.Node)
	if !ok {
		if ch.Deleted() {
			delete(w.nodes, ch.Key.Name)
			delete(w.members, ch.Key.Name)
		}
		return
	}
	w.nodes[ch.Key.Name] = n
	if raw, ok := ch.Object.Value.(*store.Node); ok {
		w.members[ch.Key.Name] = gather.Member(raw, n)
	}
}

// SetPresent takes which hosts' daemons are there.
func (w *Watch) SetPresent(nodes []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.present = make(map[string]bool, len(nodes))
	for _, n := range nodes {
		w.present[n] = true
	}
	w.rev.Topology++
	w.tell()
}

// Happened says that the log has a new record: something changed on this host, a session or a condition, say.
func (w *Watch) Happened() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.rev.Events++
	w.rev.Topology++
	w.tell()
}

// sessionsChanged says that sessions of other hosts are not as they were.
func (w *Watch) sessionsChanged() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.rev.Topology++
	w.tell()
}

// setLoads takes what hosts say of themselves, and reports whether their sessions are others
// than before.
func (w *Watch) setLoads(hosts []*apiv1.HostLoad, now time.Time) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	loads := make(map[string]*apiv1.HostLoad, len(hosts))
	changed := len(hosts) != len(w.loads)
	for _, h := range hosts {
		loads[h.GetNode()] = h
		changed = changed || said(h) != said(w.loads[h.GetNode()])
	}
	w.loads, w.loaded = loads, now
	return changed
}

// size is how many nodes there are.
func (w *Watch) size() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.nodes)
}

// tell wakes those who wait. The caller has the lock.
func (w *Watch) tell() {
	close(w.changed)
	w.changed = make(chan struct{})
}

// Revisions returns what they are now, and a channel that is closed at the next change.
func (w *Watch) Revisions() (Revisions, <-chan struct{}) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.rev, w.changed
}

// facts returns what the cluster is, to be completed by what this host says.
func (w *Watch) facts(now time.Time) Facts {
	w.mu.Lock()
	defer w.mu.Unlock()
	loads := w.loads
	if now.Sub(w.loaded) > othersCount {
		loads = nil
	}
	return Facts{
		Loads: loads,
		Nodes: slices.Collect(maps.Values(w.nodes)), Members: maps.Clone(w.members), Present: maps.Clone(w.present),
		Blocks: slices.Collect(maps.Values(w.blocks)),
	}
}

func (w *Watch) mapPools() Pools {
	w.mu.Lock()
	pools, blocks := slices.Collect(maps.Values(w.pools)), slices.Collect(maps.Values(w.blocks))
	w.mu.Unlock()
	return mapPools(pools, blocks)
}
