package bgp

import (
	"context"
	"fmt"
	"sync"
	"time"
)

// Event is a change as [Controller.Watch] tells it.
type Event struct {
	Time    time.Time
	What    string // "route", "withdrawn", "session", or "lost" for events that a slow reader missed
	Subject string // the prefix, or the peer's name and address
	Detail  string
}

// maxWaiting is how many events wait for a slow reader of a watch; what comes
// beyond is counted and not kept.
const maxWaiting = 10_000

// watchers are those who watch. The zero value is ready.
type watchers struct {
	mu   sync.Mutex
	list map[*watcher]bool
}

type watcher struct {
	wake   chan struct{}
	mu     sync.Mutex
	events []Event
	lost   int
}

func (w *watchers) add() *watcher {
	n := &watcher{wake: make(chan struct{}, 1)}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.list == nil {
		w.list = map[*watcher]bool{}
	}
	w.list[n] = true
	return n
}

func (w *watchers) remove(n *watcher) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.list, n)
}

// tell calls each for every watcher; it costs nothing when there is none.
func (w *watchers) tell(each func(*watcher)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for n := range w.list {
		each(n)
		select {
		case n.wake <- struct{}{}:
		default:
		}
	}
}

func (n *watcher) put(e Event) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if len(n.events) >= maxWaiting {
		n.lost++
		return
	}
	n.events = append(n.events, e)
}

func (n *watcher) take() ([]Event, int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	events, lost := n.events, n.lost
	n.events, n.lost = nil, 0
	return events, lost
}

// changes tells of best paths.
func (w *watchers) changes(ch Changes, now time.Time) {
	w.tell(func(n *watcher) {
		for _, p := range ch.Del {
			n.put(Event{Time: now, What: "withdrawn", Subject: p.String()})
		}
		for _, p := range ch.Put {
			detail := fmt.Sprintf("via %s from %s (%s)", p.NextHop, p.Peer, p.PeerAddr)
			if p.ASPath != "" {
				detail += " as-path " + p.ASPath
			}
			n.put(Event{Time: now, What: "route", Subject: p.Prefix.String(), Detail: detail})
		}
	})
}

// session tells of a session's state.
func (w *watchers) session(p Peer, state, info string, now time.Time) {
	w.tell(func(n *watcher) {
		n.put(Event{Time: now, What: "session", Subject: fmt.Sprintf("%s (%s)", p.Name, p.Addr), Detail: state + ": " + info})
	})
}

// Watch calls yield for each change of a best path and of a session until ctx
// ends or yield fails. A reader that is too slow is told how much it missed.
func (c *Controller) Watch(ctx context.Context, yield func(Event) error) error {
	n := c.watchers.add()
	defer c.watchers.remove(n)
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-n.wake:
		}
		events, lost := n.take()
		for _, e := range events {
			if err := yield(e); err != nil {
				return err
			}
		}
		if lost > 0 {
			if err := yield(Event{Time: time.Now(), What: "lost", Detail: fmt.Sprintf("%d events came too fast", lost)}); err != nil {
				return err
			}
		}
	}
}
