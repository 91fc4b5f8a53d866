// Package adjacent finds out who is on the other end of a link, for BGP
// sessions over link-local addresses, and makes this host be found.
//
// A neighbour is known by its router advertisements (RFC 4861, section 4.2),
// which FRR and the switches of top-of-rack fabrics send where they are to peer
// over a device, or else because the kernel has heard of it. On the devices that
// it is given, this host advertises itself as a router with a lifetime of 0, which is no
// host's default router, and solicits while it knows no neighbour.
package adjacent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"reflect"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/neighbour"
)

const (
	// interval is between two advertisements on a device. FRR sends every 10 s
	// where it peers so. What a neighbour hears after it started comes that late.
	interval = 5 * time.Second

	// pause is between two advertisements at least, however often it is asked (RFC
	// 4861 section 6.2.6 has 3 s for many hosts on a link; here there is one).
	pause = 200 * time.Millisecond

	// mostNeighbours bounds what is remembered of a link: anybody on it can claim
	// any number of addresses.
	mostNeighbours = 64
)

// Link is what is known of a device and of who is there. Addresses are
// link-local.
type Link struct {
	Up      bool         // administratively up and with carrier
	Addr    netip.Addr   // this host's own; invalid: there is none yet
	Routers []netip.Addr // neighbours that advertise themselves as routers, sorted
	Hosts   []netip.Addr // others of which something was heard, sorted
}

// Tracker follows who is on the links of some devices. Its methods may be
// called from any goroutine.
type Tracker struct {
	log     *slog.Logger
	changed func(map[string]Link)
	wake    async.Signal // holds a token when want or under changed

	mu    sync.Mutex // guards what follows
	want  []string
	under dataplane.Underlay
	known bool // under is
}

// New returns a Tracker that does nothing before [Tracker.Run]. changed is
// called, by one goroutine, with the wanted devices that exist whenever
// something about them has changed; a device that is missing is not in it.
func New(log *slog.Logger, changed func(map[string]Link)) *Tracker {
	return &Tracker{log: log, changed: changed, wake: async.NewSignal()}
}

// Want says which devices to look at, by name, in place of those named before.
func (t *Tracker) Want(names []string) {
	t.mu.Lock()
	t.want = slices.Clone(names)
	t.mu.Unlock()
	t.wake.Set()
}

// HandleUnderlay says which devices and addresses there are.
func (t *Tracker) HandleUnderlay(u dataplane.Underlay) {
	t.mu.Lock()
	t.under, t.known = u, true
	t.mu.Unlock()
	t.wake.Set()
}

// retry is between two attempts to listen to neighbours.
const retry = 10 * time.Second

// Run works until ctx ends, in the network namespace of the calling thread. It
// opens nothing before a device is wanted. That it cannot listen concerns the sessions over
// link-local addresses alone: it tries again.
func (t *Tracker) Run(ctx context.Context) error {
	for {
		err := t.run(ctx)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		t.log.Warn("neighbours over link-local addresses are not followed; trying again", "error", err, "pause", retry)
		if err := async.Sleep(ctx, retry); err != nil {
			return err
		}
	}
}

func (t *Tracker) run(ctx context.Context) error {
	t.wake.Set()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-t.wake:
		}
		t.mu.Lock()
		needed := len(t.want) > 0 && t.known
		t.mu.Unlock()
		if needed {
			t.wake.Set() // for the loop
			return t.follow(ctx)
		}
	}
}

func (t *Tracker) follow(ctx context.Context) error {
	s, err := openSocket()
	if err != nil {
		return err
	}
	asker, err := neighbour.Open()
	if err != nil {
		return errors.Join(err, s.close())
	}
	w := newWatch(t.log, s)
	g, ctx := errgroup.WithContext(ctx)
	messages, events := make(chan heard), make(chan neighbour.Event)
	g.Go(func() error {
		<-ctx.Done()
		return errors.Join(ctx.Err(), s.close())
	})
	g.Go(func() error {
		for {
			m, err := s.receive()
			if ctx.Err() != nil {
				return ctx.Err() // what closed the socket
			}
			if err != nil {
				return fmt.Errorf("receive router advertisements: %w", err)
			}
			select {
			case messages <- m:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	})
	g.Go(func() error {
		return asker.Run(ctx, func(e neighbour.Event) {
			if !onLink(e) {
				return
			}
			select {
			case events <- e:
			case <-ctx.Done():
			}
		})
	})
	g.Go(func() error { return t.loop(ctx, w, asker.List, messages, events) })
	return g.Wait()
}

// onLink reports whether an event is of an address that can be a neighbour's.
func onLink(e neighbour.Event) bool { return e.Addr.Is6() && e.Addr.IsLinkLocalUnicast() }

// loop is what uses w. list says what the kernel knows.
func (t *Tracker) loop(ctx context.Context, w *watch, list func(func(neighbour.Event)) error, messages <-chan heard, events <-chan neighbour.Event) error {
	var published map[string]Link // nil: nothing yet
	set := false
	clock := time.NewTicker(interval)
	defer clock.Stop()
	owed := time.NewTimer(interval)
	defer owed.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-owed.C:
		case m := <-messages:
			w.heard(m, time.Now())
		case e := <-events:
			w.neighbour(e)
		case <-clock.C:
			w.tick(time.Now())
		case <-t.wake:
			t.mu.Lock()
			want, under := t.want, t.under
			t.mu.Unlock()
			set = true
			if w.set(want, under, time.Now()) {
				if err := list(w.neighbour); err != nil && ctx.Err() == nil {
					return err
				}
			}
		}
		if wait := w.answer(time.Now()); wait > 0 {
			owed.Reset(wait)
		}
		if !set {
			continue // it is not known yet which devices there are
		}
		if now := w.links(); published == nil || !reflect.DeepEqual(now, published) {
			published = now
			t.changed(now)
		}
	}
}

// sender sends on links; [socket] is one.
type sender interface {
	join(link int) error
	leave(link int) error
	send(link int, from netip.Addr, to net.IP, message []byte) error
}

// watch is what a Tracker knows. It is used by one goroutine.
type watch struct {
	log     *slog.Logger
	out     sender
	devices map[int]*device // that are wanted and exist, by index

	present map[int]map[netip.Addr]neighbourState // by index of a device above
	seq     uint16
}

type device struct {
	name       string
	mac        dataplane.MAC
	up         bool
	addr       netip.Addr
	advertised time.Time
	owes       bool // an answer, which has to wait for the pause to be over
}

type neighbourState struct {
	router bool // it has advertised itself
	silent bool // the kernel found that it does not answer
}

func newWatch(log *slog.Logger, out sender) *watch {
	return &watch{log: log, out: out, devices: map[int]*device{}, present: map[int]map[netip.Addr]neighbourState{}}
}

// set applies which devices are wanted, and what there is. It reports whether
// there are new devices, of whose links the kernel may know something.
func (w *watch) set(want []string, u dataplane.Underlay, now time.Time) (news bool) {
	wanted := map[int]bool{}
	for _, l := range u.Links {
		if !slices.Contains(want, l.Name) {
			continue
		}
		wanted[l.Index] = true
		d := w.devices[l.Index]
		if d == nil {
			news = true
			d = &device{}
			w.devices[l.Index], w.present[l.Index] = d, map[netip.Addr]neighbourState{}
			if err := w.out.join(l.Index); err != nil {
				w.log.Warn("router solicitations are not heard", "device", l.Name, "error", err)
			}
		}
		was := d.ready()
		d.name, d.mac, d.up, d.addr = l.Name, l.MAC, l.Up, ownAddr(u, l.Name)
		if d.ready() && !was {
			w.advertise(l.Index, d, now)
			w.solicit(l.Index, d)
		}
	}
	for i, d := range w.devices {
		if wanted[i] {
			continue
		}
		delete(w.devices, i)
		delete(w.present, i)
		if err := w.out.leave(i); err != nil { // the device may be gone
			w.log.Debug("router solicitations are heard on", "device", d.name, "error", err)
		}
	}
	return news
}

func (d *device) ready() bool { return d.up && d.addr.IsValid() }

// ownAddr returns a device's link-local address that can be used.
func ownAddr(u dataplane.Underlay, name string) netip.Addr {
	for _, a := range u.Addresses {
		if ip := a.Prefix.Addr(); a.Link == name && ip.Is6() && ip.IsLinkLocalUnicast() && !a.Tentative {
			return ip
		}
	}
	return netip.Addr{}
}

func (w *watch) advertise(index int, d *device, now time.Time) {
	d.advertised, d.owes = now, false
	w.send(index, d, net.IPv6linklocalallnodes, advertisement(d.mac))
}

// solicit asks routers and everybody else on a link to say that they are there.
func (w *watch) solicit(index int, d *device) {
	w.seq++
	w.send(index, d, net.IPv6linklocalallrouters, solicitation(d.mac))
	w.send(index, d, net.IPv6linklocalallnodes, echo(w.seq))
}

func (w *watch) send(index int, d *device, to net.IP, message []byte) {
	if err := w.out.send(index, d.addr, to, message); err != nil {
		w.log.Debug("not sent to neighbours", "device", d.name, "error", err) // the device went; the clock tries again
	}
}

// heard applies a message: a router that is new or comes back is answered at
// once, and so is who asks, or when the pause after the last advertisement is
// over.
func (w *watch) heard(m heard, now time.Time) {
	d := w.devices[m.link]
	if d == nil || m.from == d.addr {
		return
	}
	answer := false
	switch m.kind {
	case advertises:
		answer = w.note(m.link, m.from, func(neighbourState) neighbourState { return neighbourState{router: true} })
	case answers:
		w.note(m.link, m.from, func(s neighbourState) neighbourState { s.silent = false; return s })
	case solicits:
		answer = true
	case nothing:
	}
	d.owes = d.owes || answer
	w.answer(now)
}

// answer advertises where that is owed and the pause is over, and returns when
// the next one is due; 0: none is owed.
func (w *watch) answer(now time.Time) time.Duration {
	next := time.Duration(0)
	for i, d := range w.devices {
		switch wait := pause - now.Sub(d.advertised); {
		case !d.owes || !d.ready():
		case wait <= 0:
			w.advertise(i, d, now)
		case next == 0 || wait < next:
			next = wait
		}
	}
	return next
}

// note changes what is known of a neighbour on a wanted device's link and reports
// whether that is news.
func (w *watch) note(link int, a netip.Addr, change func(neighbourState) neighbourState) bool {
	was, known := w.present[link][a]
	now := change(was)
	if known && was == now || !known && !w.room(link, now) {
		return false
	}
	w.present[link][a] = now
	return true
}

// room makes room for one more neighbour of a link and reports whether there is:
// a silent one gives way to it, and a host to a router.
func (w *watch) room(link int, s neighbourState) bool {
	present := w.present[link]
	if len(present) < mostNeighbours {
		return present != nil // nil: nobody asked for it
	}
	for a, old := range present {
		if old.silent || s.router && !old.router {
			delete(present, a)
			return true
		}
	}
	return false
}

// neighbour applies what the kernel found out. One that does not answer is
// remembered only if it was a router, so that it is one again when it answers.
func (w *watch) neighbour(e neighbour.Event) {
	if !onLink(e) {
		return
	}
	silent := e.Answer == dataplane.No
	if silent && !w.present[e.LinkIndex][e.Addr].router {
		delete(w.present[e.LinkIndex], e.Addr)
		return
	}
	w.note(e.LinkIndex, e.Addr, func(s neighbourState) neighbourState { s.silent = silent; return s })
}

// tick is the clock's.
func (w *watch) tick(now time.Time) {
	for i, d := range w.devices {
		if !d.ready() {
			continue
		}
		w.advertise(i, d, now)
		if l := w.link(i, d); len(l.Routers)+len(l.Hosts) == 0 {
			w.solicit(i, d)
		}
	}
}

// links says what is known.
func (w *watch) links() map[string]Link {
	out := map[string]Link{}
	for i, d := range w.devices {
		out[d.name] = w.link(i, d)
	}
	return out
}

func (w *watch) link(index int, d *device) Link {
	l := Link{Up: d.up, Addr: d.addr}
	for a, s := range w.present[index] {
		switch {
		case s.silent || a == d.addr:
		case s.router:
			l.Routers = append(l.Routers, a)
		default:
			l.Hosts = append(l.Hosts, a)
		}
	}
	slices.SortFunc(l.Routers, netip.Addr.Compare)
	slices.SortFunc(l.Hosts, netip.Addr.Compare)
	return l
}
