// Package events is the daemon's log as seen from inside: it decides record by record what is written, at a level
// for each part that can change while the daemon runs, and keeps the newest records, so that an operator can ask
// what happened without the log's files.
package events

import (
	"context"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// PartKey is the key by which a logger says which part of the daemon it belongs to, as in log.With(PartKey, "bgp").
const PartKey = "component"

// kept is how many records are kept: days of a quiet host, and about a megabyte.
const kept = 2048

// Attr is a key of a record with its value as text.
type Attr struct{ Key, Value string }

// Event is a record of the log.
type Event struct {
	Seq     uint64 // counts all events from 1 on; what is missing was dropped
	Time    time.Time
	Level   slog.Level
	Part    string // empty: the daemon as a whole
	Message string
	Attrs   []Attr // in the order in which they were given
}

// Log decides what is written and keeps what was said. It is safe for concurrent use.
type Log struct {
	to     slog.Handler
	levels atomic.Pointer[levels]
	change sync.Mutex // by who changes levels

	mu    sync.Mutex
	seq   uint64
	ring  []Event
	next  int           // where the next one goes, once the ring is full
	added chan struct{} // closed when an event is added; nil: nobody waits
	parts map[string]bool
}

// levels are those in force; they are not changed once others can see them.
type levels struct {
	all  slog.Level
	part map[string]slog.Level
}

func (l *levels) of(part string) slog.Level {
	if own, ok := l.part[part]; ok {
		return own
	}
	return l.all
}

// New returns a Log that writes records of level and above to a handler, which must take all levels.
func New(to slog.Handler, level slog.Level) *Log {
	l := &Log{to: to, parts: map[string]bool{}}
	l.levels.Store(&levels{all: level})
	return l
}

// Logger returns the logger of the daemon as a whole.
func (l *Log) Logger() *slog.Logger { return slog.New(&handler{log: l, to: l.to}) }

// Levels returns the level of parts that come later, and that of every part that has a logger.
func (l *Log) Levels() (all slog.Level, parts map[string]slog.Level) {
	v := l.levels.Load()
	l.mu.Lock()
	defer l.mu.Unlock()
	parts = make(map[string]slog.Level, len(l.parts))
	for p := range l.parts {
		parts[p] = v.of(p)
	}
	return v.all, parts
}

// Parts returns the names of the parts that have a logger, sorted.
func (l *Log) Parts() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Sorted(maps.Keys(l.parts))
}

// SetLevel sets the level of one part, or of all: then no part has another one. It holds from the next record on, and
// until the daemon ends.
func (l *Log) SetLevel(part string, level slog.Level) {
	l.change.Lock()
	defer l.change.Unlock()
	if part == "" {
		l.levels.Store(&levels{all: level})
		return
	}
	old := l.levels.Load()
	v := &levels{all: old.all, part: maps.Clone(old.part)}
	if v.part == nil {
		v.part = map[string]slog.Level{}
	}
	v.part[part] = level
	l.levels.Store(v)
}

// Since returns the events that are kept and newer than seq, oldest first, and a channel that is closed when there
// are more.
func (l *Log) Since(seq uint64) ([]Event, <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.added == nil {
		l.added = make(chan struct{})
	}
	n := min(uint64(len(l.ring)), l.seq-min(seq, l.seq))
	list := make([]Event, 0, n)
	for i := uint64(len(l.ring)) - n; i < uint64(len(l.ring)); i++ {
		list = append(list, l.ring[(uint64(l.next)+i)%uint64(len(l.ring))])
	}
	return list, l.added
}

func (l *Log) add(e Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.seq++
	e.Seq = l.seq
	if len(l.ring) < kept {
		l.ring = append(l.ring, e)
	} else {
		l.ring[l.next] = e
		l.next = (l.next + 1) % kept
	}
	if l.added != nil {
		close(l.added)
		l.added = nil
	}
}

// known notes that a part has a logger.
func (l *Log) known(part string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.parts[part] = true
}

// handler is what a logger of a part, with some attributes, does.
type handler struct {
	log   *Log
	to    slog.Handler
	part  string
	attrs []Attr
	group string // prefix of keys
}

// keptLevel is the level from which on records are kept, whatever is written.
const keptLevel = slog.LevelInfo

// Enabled implements [slog.Handler].
func (h *handler) Enabled(_ context.Context, level slog.Level) bool {
	return level >= keptLevel || level >= h.log.levels.Load().of(h.part)
}

// Handle implements [slog.Handler].
func (h *handler) Handle(ctx context.Context, r slog.Record) error {
	written := r.Level >= h.log.levels.Load().of(h.part)
	if r.Level >= keptLevel || written {
		e := Event{Time: r.Time, Level: r.Level, Part: h.part, Message: r.Message, Attrs: slices.Clip(h.attrs)}
		r.Attrs(func(a slog.Attr) bool {
			e.Attrs = flatten(e.Attrs, h.group, a)
			return true
		})
		h.log.add(e)
	}
	if !written {
		return nil
	}
	return h.to.Handle(ctx, r)
}

// WithAttrs implements [slog.Handler].
func (h *handler) WithAttrs(list []slog.Attr) slog.Handler {
	out := *h
	out.to = h.to.WithAttrs(list)
	out.attrs = slices.Clip(h.attrs)
	for _, a := range list {
		if a.Key == PartKey && h.group == "" {
			out.part = a.Value.String()
			h.log.known(out.part)
			continue
		}
		out.attrs = flatten(out.attrs, h.group, a)
	}
	return &out
}

// WithGroup implements [slog.Handler].
func (h *handler) WithGroup(name string) slog.Handler {
	if name == "" {
		return h
	}
	out := *h
	out.to = h.to.WithGroup(name)
	out.group = h.group + name + "."
	return &out
}

// flatten appends an attribute, or those of a group with its name before theirs.
func flatten(list []Attr, prefix string, a slog.Attr) []Attr {
	v := a.Value.Resolve()
	if v.Kind() != slog.KindGroup {
		if a.Equal(slog.Attr{}) {
			return list
		}
		return append(list, Attr{prefix + a.Key, v.String()})
	}
	if a.Key != "" {
		prefix += a.Key + "."
	}
	for _, in := range v.Group() {
		list = flatten(list, prefix, in)
	}
	return list
}
