package enforce

import (
	"encoding/json"
	"fmt"
	"slices"

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

// recall has the rules follow what an earlier life of the daemon knew, until the
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
	signal(e.poke)
}

// told returns what is to be taken in after a batch of the watch: nothing while
// the rules follow what was remembered, and all in one step when the datastore's
// state is complete. The caller has the lock.
func (e *Enforcer) told(b store.Batch) []store.Batch {
	if e.recalled == nil {
		return []store.Batch{b}
	}
	e.unheard = append(e.unheard, b)
	for _, ev := range b.Events {
		delete(e.recalled, ev.Key)
	}
	if !b.Synced {
		return nil
	}
	gone := store.Batch{Revision: b.Revision}
	for key := range e.recalled {
		gone.Events = append(gone.Events, store.Event{Key: key, Object: store.Object{Key: key}})
	}
	all := append(e.unheard, gone)
	e.recalled, e.unheard, e.status.Recalled = nil, nil, false
	return all
}

// relevant leaves out of a batch what is not of a kind that policy looks at.
func (e *Enforcer) relevant(b store.Batch) store.Batch {
	other := func(ev store.Event) bool { return !e.kinds[ev.Key.Kind] }
	if slices.ContainsFunc(b.Events, other) {
		b.Events = slices.DeleteFunc(slices.Clone(b.Events), other)
	}
	return b
}
