package kube

import (
	"maps"
	"slices"
	"strings"
	"sync"
)

// Watched is how the API server is asked for the objects of one watch.
type Watched struct {
	Watch    string // the resource, with the selector
	Open     int    // connections that tell changes now
	Requests uint64 // how often the server was asked for changes
	States   uint64 // how often for all objects
}

// watched counts what is asked. It is safe for concurrent use.
type watched struct {
	mu sync.Mutex
	of map[string]Watched
}

func (w *watched) note(watch string, open int, requests, states uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.of == nil {
		w.of = make(map[string]Watched)
	}
	is := w.of[watch]
	w.of[watch] = Watched{watch, is.Open + open, is.Requests + requests, is.States + states}
}

// Watches lists the watches that there are or were, by name.
func (s *Store) Watches() []Watched {
	s.asks.mu.Lock()
	defer s.asks.mu.Unlock()
	return slices.SortedFunc(maps.Values(s.asks.of), func(a, b Watched) int { return strings.Compare(a.Watch, b.Watch) })
}
