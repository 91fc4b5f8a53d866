package bgp

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/routerd/routerd/control/bgp/engine"
)

// Event is a change as [Controller.Watch] reports it.
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

// watcher is the queue of one reader. What waits in it is shared with the other
// readers and is put into words by the reader, so that it costs the speaker the
// same whatever a reader does and however much has changed.
type watcher struct {
	wake  chan struct{}
	mu    sync.Mutex
	queue []news
	size  int // events in queue
	lost  int
}

// news is several events of one moment: changes of paths, or of a session.
type news struct {
	time    time.Time
	changes Changes
	peer    Peer
	state   string // empty: it is about paths
	info    string
}

// size is how many events it is.
func (n *news) size() int {
	if n.state != "" {
		return 1
	}
	return len(n.changes.Del) + len(n.changes.Put)
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

// tell queues an event for every watcher; it costs nothing when there is none.
func (w *watchers) tell(n news) {
	if n.size() == 0 {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for reader := range w.list {
		reader.put(n)
		select {
		case reader.wake <- struct{}{}:
		default:
		}
	}
}

// put keeps of n what there is room for.
func (w *watcher) put(n news) {
	w.mu.Lock()
	defer w.mu.Unlock()
	room := maxWaiting - w.size
	over := n.size() - room
	if over > 0 {
		w.lost += over
		if room <= 0 || n.state != "" {
			return
		}
		c := &n.changes
		c.Del = c.Del[:min(len(c.Del), room)]
		c.Put = c.Put[:min(len(c.Put), room-len(c.Del))]
	}
	w.queue = append(w.queue, n)
	w.size += n.size()
}

func (w *watcher) take() ([]news, int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	queue, lost := w.queue, w.lost
	w.queue, w.size, w.lost = nil, 0, 0
	return queue, lost
}

// changes reports best paths.
func (w *watchers) changes(ch Changes, now time.Time) { w.tell(news{time: now, changes: ch}) }

// session reports a session's state.
func (w *watchers) session(p Peer, state, info string, now time.Time) {
	w.tell(news{time: now, peer: p, state: state, info: info})
}

// each calls yield for each event until that fails.
func (n *news) each(yield func(Event) error) error {
	if n.state != "" {
		return yield(Event{Time: n.time, What: "session", Subject: fmt.Sprintf("%s (%s)", n.peer.Name, engine.Name(n.peer.id())), Detail: n.state + ": " + n.info})
	}
	for _, p := range n.changes.Del {
		if err := yield(Event{Time: n.time, What: "withdrawn", Subject: p.String()}); err != nil {
			return err
		}
	}
	for _, p := range n.changes.Put {
		detail := fmt.Sprintf("via %s from %s (%s)", p.NextHop, p.Peer, p.PeerAddr)
		if !p.PeerAddr.IsValid() {
			detail = fmt.Sprintf("via %s to reach %s", p.NextHop, p.Peer)
		}
		if p.ASPath != "" {
			detail += " as-path " + p.ASPath
		}
		if err := yield(Event{Time: n.time, What: "route", Subject: p.Prefix.String(), Detail: detail}); err != nil {
			return err
		}
	}
	return nil
}

// Watch calls yield for each change of a best path and of a session until ctx
// ends or yield fails. A reader that is too slow learns how much it missed.
func (c *Controller) Watch(ctx context.Context, yield func(Event) error) error {
	n := c.watchers.add()
	defer c.watchers.remove(n)
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-n.wake:
		}
		queue, lost := n.take()
		for i := range queue {
			if err := queue[i].each(yield); err != nil {
				return err
			}
		}
		if lost > 0 {
			if err := yield(Event{Time: time.Now(), What: "lost", Detail: fmt.Sprintf("%d events were dropped: they came faster than they were read", lost)}); err != nil {
				return err
			}
		}
	}
}
