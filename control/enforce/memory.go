package enforce

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/routerd/routerd/store"
)

// Memory keeps on disk what the datastore told, for a start at which it does not
// answer; *journal.Journal does. One of which a part was lost must not be used: a
// policy that is missing leaves open what it denied.
type Memory interface {
	Put(key string, value any) error
	Delete(key string) error
	Sync() error
	Entries() map[string]json.RawMessage
}

// completeKey is the key in a [Memory] that says that the others are all that
// there was. Keys of objects are their paths, which begin with a slash.
const completeKey = "complete"

// recall has the rules follow what an earlier life of the daemon knew, until the
// datastore has told all.
func (e *Enforcer) recall() {
	if e.cfg.Memory == nil {
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

// keepRetry is the pause after a memory that could not be written.
const keepRetry = 10 * time.Second

// remember keeps what the datastore tells, until ctx ends.
func (e *Enforcer) remember(ctx context.Context) {
	if e.cfg.Memory == nil {
		return
	}
	before := e.cfg.Memory.Entries()
	retry := time.NewTimer(keepRetry)
	defer retry.Stop()
	complete := false        // the datastore's state was, once
	var listed []store.Batch // of it until then
	for {
		select {
		case <-ctx.Done():
			return
		case <-e.keep:
		case <-retry.C:
		}
		e.mu.Lock()
		batches := e.toKeep
		e.toKeep = nil
		e.mu.Unlock()
		if !complete {
			listed = append(listed, batches...)
			if !slices.ContainsFunc(batches, func(b store.Batch) bool { return b.Synced }) {
				continue
			}
			batches, listed = listed, nil
		}
		if err := e.write(batches, before, !complete); err != nil {
			e.log.Warn("policy is not remembered; will try again", "error", err)
			e.mu.Lock()
			e.toKeep = append(batches, e.toKeep...)
			e.mu.Unlock()
			retry.Reset(keepRetry)
			continue
		}
		before, complete = nil, true
	}
}

// write brings the memory up to date. The first time the batches are all that
// there is, and before is what the memory holds.
func (e *Enforcer) write(batches []store.Batch, before map[string]json.RawMessage, all bool) error {
	if len(batches) == 0 {
		return nil
	}
	m, seen := e.cfg.Memory, map[string]bool{}
	for _, b := range batches {
		for _, ev := range b.Events {
			path := ev.Key.Path()
			seen[path] = true
			if err := keepEvent(m, path, ev, before); err != nil {
				return err
			}
		}
	}
	if all {
		for path := range before {
			if !seen[path] && path != completeKey {
				if err := m.Delete(path); err != nil {
					return err
				}
			}
		}
		if err := m.Put(completeKey, true); err != nil {
			return err
		}
	}
	return m.Sync()
}

func keepEvent(m Memory, path string, ev store.Event, before map[string]json.RawMessage) error {
	if ev.Deleted() {
		return m.Delete(path)
	}
	raw := ev.Object.Raw
	if ev.Err != nil {
		if _, known := m.Entries()[path]; known {
			return nil // what was known of it holds
		}
		if !json.Valid(raw) {
			return m.Put(path, string(raw)) // as unreadable as it is
		}
	}
	if raw == nil {
		var err error
		if raw, err = store.Encode(ev.Key, ev.Object.Value, nil); err != nil {
			return fmt.Errorf("remember %s: %w", ev.Key, err)
		}
	}
	if bytes.Equal(before[path], raw) {
		return nil
	}
	return m.Put(path, json.RawMessage(raw))
}
