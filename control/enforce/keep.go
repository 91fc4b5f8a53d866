package enforce

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/store"
)

// Pauses between two writes of the memory, and after one that failed.
const (
	keepPause = time.Second
	keepRetry = 10 * time.Second
)

// unkept is what was told of an object last and the memory does not have.
type unkept struct {
	event store.Event
	fresh bool // the object is another than the memory knows: it ended in between
}

// then returns what is to be kept after a later one.
func (u unkept) then(next unkept) unkept {
	switch {
	case next.fresh:
		return next
	case next.event.Err == nil:
		return unkept{next.event, u.fresh}
	case u.event.Deleted():
		return unkept{next.event, true}
	case u.event.Err == nil:
		return u // what was known of it holds
	}
	return unkept{next.event, u.fresh}
}

// toBeKept marks what the datastore said in a step for the memory. The caller has
// the lock.
func (e *Enforcer) toBeKept(s cluster.Step) {
	for _, ch := range s.Changes {
		said := ch.Said()
		if said == nil {
			continue
		}
		next := unkept{event: *said}
		if old, ok := e.toKeep[ch.Key]; ok {
			next = old.then(next)
		}
		e.toKeep[ch.Key] = next
	}
	e.complete = e.complete || s.Synced
	if e.complete {
		e.keep.Set()
	}
}

// keeper is what [Enforcer.Run] knows of the memory.
type keeper struct {
	heard bool // Heard was called
	whole bool // the memory has what this run heard first
	valid bool // and says on the disk that it is complete
}

// hear tells that the next rules follow the datastore.
func (e *Enforcer) hear() {
	if !e.keeper.heard && e.cfg.Heard != nil {
		e.cfg.Heard()
	}
	e.keeper.heard = true
}

// remember keeps what the datastore tells, until ctx ends.
func (e *Enforcer) remember(ctx context.Context) {
	if e.cfg.Memory == nil {
		return
	}
	rest := time.NewTimer(time.Hour)
	defer rest.Stop()
	listen := e.keep
	for {
		select {
		case <-ctx.Done():
			return
		case <-listen:
		case <-rest.C:
			listen = e.keep
		}
		// What changes meanwhile is written together, and what failed is not tried
		// with every change.
		pause := keepPause
		if did, err := e.keepNow(); err != nil {
			pause = keepRetry
		} else if !did {
			continue
		}
		listen = nil
		rest.Reset(pause)
	}
}

// keepRest writes what is left at the end.
func (e *Enforcer) keepRest() {
	if e.cfg.Memory == nil {
		return
	}
	_, err := e.keepNow()
	e.mu.Lock()
	defer e.mu.Unlock()
	e.remembered = err == nil && e.complete
}

// Remembered reports whether the memory is at least as new as the kernel's rules:
// after Run, where the datastore has told all and the disk took it.
func (e *Enforcer) Remembered() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.remembered
}

// keepNow writes what is to be kept and reports whether there was anything. Nothing
// is until the datastore has told all.
func (e *Enforcer) keepNow() (did bool, err error) {
	e.mu.Lock()
	pending := e.toKeep
	if !e.complete || len(pending) == 0 && e.keeper.whole && e.keeper.valid {
		e.mu.Unlock()
		return false, nil
	}
	e.toKeep = make(map[store.Key]unkept)
	e.mu.Unlock()
	if err = e.write(pending); err != nil {
		e.keeper.valid = false
		// What the disk holds may lack a policy that is in force.
		err = errors.Join(err, e.cfg.Memory.Forget(), e.cfg.Memory.Delete(completeKey))
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if before := e.status.KeepErr; err != nil && (before == nil || before.Error() != err.Error()) {
		e.log.Warn("policy is not remembered; will try again", "error", err)
	} else if err == nil && before != nil {
		e.log.Info("policy is remembered again")
	}
	e.status.KeepErr = err
	if err != nil {
		for key, u := range pending {
			if newer, ok := e.toKeep[key]; ok {
				u = u.then(newer)
			}
			e.toKeep[key] = u
		}
	}
	return true, err
}

// write brings the memory up to date, in the order that a memory cut off in
// between has what is new beside what went. The first time pending is all that
// there is: it takes the place of what the previous run knew in one step.
func (e *Enforcer) write(pending map[store.Key]unkept) error {
	m, k := e.cfg.Memory, &e.keeper
	var before map[string]json.RawMessage // nil: it is not worth the look
	if !k.whole || !k.valid {
		before = m.Entries()
	}
	put, gone, err := toWrite(pending, before, !k.whole, func() map[string]json.RawMessage {
		if before != nil {
			return before
		}
		return m.Entries()
	})
	if err != nil {
		return err
	}
	_, marked := before[completeKey]
	mark := before != nil && !marked
	if len(put)+len(gone) == 0 && !mark {
		k.whole, k.valid = true, true // all is as the previous run left it
		return nil
	}
	if before != nil {
		m.Begin()
	}
	for path, raw := range put {
		if err := m.Put(path, raw); err != nil {
			return err
		}
	}
	for _, path := range gone {
		if err := m.Delete(path); err != nil {
			return err
		}
	}
	if mark {
		if err := m.Put(completeKey, true); err != nil {
			return err
		}
	}
	if err := m.Sync(); err != nil {
		return err
	}
	k.whole, k.valid = true, true
	return nil
}

// toWrite decides what of pending changes a memory that holds before; with all,
// what pending does not name went. known returns what the memory holds where
// before is nil.
func toWrite(pending map[store.Key]unkept, before map[string]json.RawMessage, all bool, known func() map[string]json.RawMessage) (put map[string]json.RawMessage, gone []string, err error) {
	put = make(map[string]json.RawMessage, len(pending))
	var has map[string]json.RawMessage // looked up once, for objects that cannot be read
	for key, u := range pending {
		path := key.Path()
		if u.event.Deleted() {
			if _, ok := before[path]; ok || before == nil {
				gone = append(gone, path)
			}
			continue
		}
		if u.event.Err != nil && !u.fresh {
			if has == nil {
				has = known()
			}
			if _, ok := has[path]; ok {
				continue // what was known of it holds
			}
		}
		raw, err := content(u.event)
		if err != nil {
			return nil, nil, err
		}
		if old, ok := before[path]; !ok || !bytes.Equal(old, raw) {
			put[path] = raw
		}
	}
	if !all {
		return put, gone, nil
	}
	told := make(map[string]bool, len(pending))
	for key := range pending {
		told[key.Path()] = true
	}
	for path := range before {
		if !told[path] && path != completeKey {
			gone = append(gone, path)
		}
	}
	return put, gone, nil
}

// content is what is kept of an object: JSON, and a string of it where it is none.
func content(ev store.Event) (json.RawMessage, error) {
	raw := ev.Object.Raw
	switch {
	case ev.Err != nil && !json.Valid(raw):
		return json.Marshal(string(raw))
	case raw != nil:
		return raw, nil
	}
	raw, err := store.Encode(ev.Key, ev.Object.Value, nil)
	if err != nil {
		return nil, fmt.Errorf("remember %s: %w", ev.Key, err)
	}
	return raw, nil
}
