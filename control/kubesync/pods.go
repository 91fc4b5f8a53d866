package kubesync

import (
	"context"
	"encoding/json"
	"log/slog"
	"strings"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/control/journal"
	"github.com/routerd/routerd/store"
)

// PodWatcher tells of the pods of one node.
type PodWatcher interface {
	WatchPods(ctx context.Context, node string) <-chan store.Batch
}

// Pods follows the pods of one node. Each host follows its own: what an ADD needs of one is
// there before the runtime asks, and on the disk for a start at which the API is away.
type Pods struct {
	API  PodWatcher
	Node string
	File string // where what the API said last is kept
	// Handle takes steps like those of the cluster's copy, first what the disk has.
	Handle func(cluster.Step)
	Log    *slog.Logger
}

// Run follows them until ctx ends, whose error it returns.
func (p Pods) Run(ctx context.Context) error {
	j, err := journal.Open(p.File, p.Log)
	if err != nil {
		p.Log.Warn("the pods of this host are not on the disk for a start without the API", "error", err)
	} else {
		defer func() { _ = j.Close() }() // a pod that is not there is asked for
	}
	unheard := p.load(j) // of what the disk has, what the API has not said yet
	for b := range p.API.WatchPods(ctx, p.Node) {
		s := cluster.Step{Revision: b.Revision, Source: cluster.Live, Synced: b.Synced, Err: b.Err}
		add := func(e store.Event) {
			delete(unheard, e.Key)
			s.Changes = append(s.Changes, &cluster.Change{Event: e, Value: e.Object.Value})
		}
		for _, e := range b.Events {
			add(e)
		}
		if b.Synced {
			for key := range unheard {
				add(store.Event{Key: key})
			}
		}
		p.Handle(s)
		p.save(j, s.Changes)
	}
	return ctx.Err()
}

// load hands over what the disk has, and returns it.
func (p Pods) load(j *journal.Journal) map[store.Key]bool {
	known := map[store.Key]bool{}
	if j == nil {
		return known
	}
	s := cluster.Step{Source: cluster.Disk}
	for path, raw := range j.Entries() {
		namespace, name, _ := strings.Cut(path, "/")
		key := store.Key{Kind: store.KindWorkloadEndpoint, Namespace: namespace, Name: name}
		known[key] = true
		value, err := store.Decode(key, raw)
		if err != nil {
			continue // of another version: the API says it anew
		}
		s.Changes = append(s.Changes, &cluster.Change{Event: store.Event{Key: key, Object: store.Object{Key: key, Value: value, Raw: raw}}, Value: value})
	}
	p.Handle(s)
	return known
}

// save keeps changes on the disk.
func (p Pods) save(j *journal.Journal, changes []*cluster.Change) {
	if j == nil || len(changes) == 0 {
		return
	}
	var list []journal.Change
	for _, c := range changes {
		path := c.Key.Namespace + "/" + c.Key.Name
		switch {
		case c.Err != nil: // what was known holds
		case c.Deleted():
			list = append(list, journal.Change{Key: path})
		default:
			list = append(list, journal.Change{Key: path, Value: json.RawMessage(c.Object.Raw)})
		}
	}
	if err := j.Apply(list...); err != nil {
		p.Log.Debug("what the API says of pods is not on the disk", "error", err)
	}
}
