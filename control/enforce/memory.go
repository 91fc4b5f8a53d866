package enforce

import (
	"encoding/json"
	"fmt"
	"slices"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/store"
)

// Memory keeps on disk what the datastore told, for a start at which it does not
// answer; *journal.Journal does. One of which a part was lost must not be used: a
// policy that is missing leaves open what it denied. Where it cannot be written it
// is forgotten, for what is old may lack one too.
type Memory interface {
	Put(key string, value any) error
	Delete(key string) error
	// Begin has the changes until Sync be made all or not at all.
	Begin()
	// Sync returns when the changes are on the disk.
	Sync() error
	// Forget has the disk hold nothing until Sync succeeds, which then writes all
	// entries.
	Forget() error
	Entries() map[string]json.RawMessage
}

// completeKey is the key in a [Memory] that says that the others are all that
// there was. Keys of objects are their paths, which begin with a slash.
const completeKey = "complete"

// recall has the rules follow what the previous run knew, until the
// datastore has told all.
func (e *Enforcer) recall() {
	if e.cfg.Memory == nil || !e.cfg.Recall {
		return
	}
	entries := e.cfg.Memory.Entries()
	if _, ok := entries[completeKey]; !ok {
		return
	}
	known := make(map[store.Key]bool, len(entries))
	b := store.Batch{Synced: true}
	for path, raw := range entries {
		if path == completeKey {
			continue
		}
		key, ok := store.ParsePath(path)
		if !ok {
			e.log.Error("policy of the last life is not used: its memory makes no sense", "key", path)
			return
		}
		known[key] = true
		value, err := store.Decode(key, raw)
		if err != nil {
			err = fmt.Errorf("read what is remembered of %s: %w", key, err)
			value = nil
		}
		b.Events = append(b.Events, store.Event{Key: key, Object: store.Object{Key: key, Value: value, Raw: raw}, Err: err})
	}
	e.recalled, e.queue = known, append(e.queue, b)
	e.status.Recalled = true
	e.poke.Set()
}

// told returns what is to be applied after a step of the cluster's copy: while
// the rules follow what was remembered just this host's own writes, and all at once
// when the datastore's state is complete. The caller has the lock.
func (e *Enforcer) told(s cluster.Step) []store.Batch {
	all := store.Batch{Revision: s.Revision, Synced: s.Synced, Events: make([]store.Event, 0, len(s.Changes))}
	var own store.Batch
	for _, ch := range s.Changes {
		switch {
		case e.recalled == nil || !ch.Own:
			all.Events = append(all.Events, ch.Event)
		case ch.Key.Kind != store.KindWorkloadEndpoint && ch.Stored == nil && e.recalled[ch.Key]:
			continue // what is remembered of it stands
		default:
			own.Events = append(own.Events, ch.Event)
		}
		delete(e.recalled, ch.Key)
	}
	if e.recalled == nil {
		return []store.Batch{all}
	}
	var batches []store.Batch
	if len(own.Events) > 0 {
		e.outdate(own)
		batches = append(batches, own)
	}
	if len(all.Events) > 0 || s.Synced {
		e.unheard = append(e.unheard, all)
	}
	if !s.Synced {
		return batches
	}
	gone := store.Batch{Revision: s.Revision}
	for key := range e.recalled {
		gone.Events = append(gone.Events, store.Event{Key: key, Object: store.Object{Key: key}})
	}
	batches = append(append(batches, e.unheard...), gone)
	e.recalled, e.unheard, e.status.Recalled = nil, nil, false
	return batches
}

// outdate drops what the datastore told of what this host wrote since.
func (e *Enforcer) outdate(own store.Batch) {
	newer := make(map[store.Key]bool, len(own.Events))
	for _, ev := range own.Events {
		newer[ev.Key] = true
	}
	for i, b := range e.unheard {
		e.unheard[i].Events = slices.DeleteFunc(b.Events, func(ev store.Event) bool { return newer[ev.Key] })
	}
}
