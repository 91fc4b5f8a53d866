package reconcile

import (
	"encoding/binary"
	"time"

	"github.com/routerd/routerd/dataplane"
)

// Packed is a key without a pointer. Its last byte is zero.
type Packed [28]byte

// Packing says how a tracker keeps the keys of which there are hundreds of thousands.
type Packing[K comparable] struct {
	// Pack returns a key as bytes, different ones for different keys, and Unpack takes
	// them back; ok is false for keys of which there are few.
	Pack   func(K) (p Packed, ok bool)
	Unpack func(Packed) K
}

// entry is all that is kept of a key that is wanted or there. There may be a million, so
// it has no pointers: what few entries have besides stands in [Tracker.failures] and
// [Tracker.losers].
type entry struct {
	key        Packed
	want, have uint32 // numbers of values, so that an entry has no pointers and equal values stand in memory once; 0: none
	mark       uint32
	rev        dataplane.Revision // of the last call that named the key, in whose count it is
	since      ticks              // of state
	flags      flags
	place      uint8 // the queue that it was in last, or one of its class
	src        dataplane.Source
}

// ticks is a time since the tracker's start in which a tenth of a second counts one.
type ticks uint32

const tick = time.Second / 10

// flags say what is so of an entry.
type flags uint16

const (
	isWanted    flags = 1 << iota
	isThere           // it exists
	isOurs            // was wanted in this run
	isDone            // nothing to do
	isQueued          // in the queue that place names
	isFailing         // has a failure
	isContested       // has losers

	stateShift   = iota           // above them stands the state
	countedShift = stateShift + 2 // and how the key counts in its revision's group

	stateMask   flags = 3 << stateShift
	countedMask flags = 3 << countedShift
)

func (e *entry) wanted() bool    { return e.flags&isWanted != 0 }
func (e *entry) exists() bool    { return e.flags&isThere != 0 }
func (e *entry) ours() bool      { return e.flags&isOurs != 0 }
func (e *entry) done() bool      { return e.flags&isDone != 0 }
func (e *entry) queued() bool    { return e.flags&isQueued != 0 }
func (e *entry) failing() bool   { return e.flags&isFailing != 0 }
func (e *entry) contested() bool { return e.flags&isContested != 0 }

func (e *entry) set(f flags, on bool) {
	if e.flags &^= f; on {
		e.flags |= f
	}
}

func (e *entry) state() dataplane.State { return dataplane.State(e.flags & stateMask >> stateShift) }
func (e *entry) counted() phase         { return phase(e.flags & countedMask >> countedShift) }
func (e *entry) count(p phase)          { e.flags = e.flags&^countedMask | flags(p)<<countedShift }

// numbered marks the packed form of a key that has a number instead.
const numbered = 1

// find returns the entry of a key; nil: there is none.
func (t *Tracker[K, V]) find(k K) *entry {
	p, ok := t.pack(k)
	if !ok {
		return nil
	}
	if r := t.table.Find(p); r != 0 {
		return t.table.At(r)
	}
	return nil
}

// pack returns a key as bytes; false: it has no number, and so no entry.
func (t *Tracker[K, V]) pack(k K) (p Packed, ok bool) {
	if p, ok = t.cfg.Packing.Pack(k); ok {
		return p, true
	}
	id, ok := t.keys.Find(k)
	return packNumber(id), ok
}

func packNumber(id uint32) (p Packed) {
	binary.LittleEndian.PutUint32(p[:], id)
	p[len(p)-1] = numbered
	return p
}

func (t *Tracker[K, V]) key(e *entry) K {
	if e.key[len(e.key)-1] == numbered {
		return t.keys.Value(binary.LittleEndian.Uint32(e.key[:]))
	}
	return t.cfg.Packing.Unpack(e.key)
}

// entry returns the entry of a key, a new one if there is none.
func (t *Tracker[K, V]) entry(k K) *entry {
	p, ok := t.pack(k)
	if !ok {
		id, _ := t.keys.Take(k)
		p = packNumber(id)
	}
	r, fresh := t.table.Make(p)
	e := t.table.At(r)
	if !fresh {
		return e
	}
	*e = entry{key: p, place: uint8(t.queue(t.cfg.Class(k), false, 0)), flags: isDone, since: t.now}
	if len(t.removed) == 0 {
		return e
	}
	if tr, ok := t.removed[k]; ok {
		*t.fails(e) = failure{drifts: tr.drifts, lastDrift: tr.lastDrift}
		delete(t.removed, k)
	}
	return e
}

// drop forgets an entry. Who holds it still finds nothing to be done for it.
func (t *Tracker[K, V]) drop(e *entry) {
	if tr := t.failure(e); tr != nil && tr.drifts > 0 {
		t.removed[t.key(e)] = *tr
	}
	t.clearFailure(e)
	t.values.Leave(e.want)
	t.values.Leave(e.have)
	p := e.key
	t.table.Remove(p)
	if p[len(p)-1] == numbered {
		t.keys.Leave(binary.LittleEndian.Uint32(p[:]))
	}
	e.set(isDone, true)
}

// wants and has return what is wanted and what there is of an entry.
func (t *Tracker[K, V]) wants(e *entry) V { return t.values.Value(e.want) }
func (t *Tracker[K, V]) has(e *entry) V   { return t.values.Value(e.have) }

// take numbers a value, with one more user.
func (t *Tracker[K, V]) take(v V) uint32 {
	id, _ := t.values.Take(v)
	return id
}

// failure returns the failure of an entry; nil: it has none.
func (t *Tracker[K, V]) failure(e *entry) *failure {
	if !e.failing() {
		return nil
	}
	return t.failures[e]
}

// fails returns the failure of an entry, a new one if it has none.
func (t *Tracker[K, V]) fails(e *entry) *failure {
	if !e.failing() {
		e.set(isFailing, true)
		t.failures[e] = new(failure)
	}
	return t.failures[e]
}

// clearFailure forgets the failure of an entry.
func (t *Tracker[K, V]) clearFailure(e *entry) {
	if e.failing() {
		e.set(isFailing, false)
		delete(t.failures, e)
		delete(t.waiting, e)
	}
}

// turned notes that the state of an entry is another.
func (t *Tracker[K, V]) turned(e *entry, s dataplane.State) {
	e.flags, e.since = e.flags&^stateMask|flags(s)<<stateShift, t.now
}
