// Package inject keeps the routes that other programs of the host have it advertise by BGP: who owns each, and until when.
// It decides nothing about prefixes and speaks no protocol; it stands on the standard library and the kernel's clock.
//
// A route is there for as long as its owner is: until the owner's stream ends, its process dies, or its time passes,
// whichever it named. Over a restart of the daemon routes are kept in a file: those with a time keep what is left of
// it, those of a process stay with it, and those of a stream wait [Reconnect] for the owner to come again.
package inject

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/routerd/routerd/control/atomicfile"
	"github.com/routerd/routerd/control/bootid"
)

// Reconnect is for how long the routes of a stream wait for their owner after the daemon was restarted.
const Reconnect = 30 * time.Second

// MaxTTL bounds what an owner may ask for: who lives longer says so again.
const MaxTTL = 24 * time.Hour

// maxOwners bounds how many there are: each may have as many routes as the limit says.
const maxOwners = 64

// maxName bounds an owner's name, in bytes.
const maxName = 64

// Errors of a [Table].
var (
	ErrInvalid = errors.New("not a valid request")
	ErrLimit   = errors.New("limit reached")
	ErrTaken   = errors.New("injected by another owner")
)

// Route is what an owner has this host advertise.
type Route struct {
	Prefix      netip.Prefix `json:"prefix"`
	NextHop     netip.Addr   `json:"nextHop,omitzero"`      // invalid: this host
	LocalPref   uint32       `json:"localPref,omitempty"`   // 0: that of this host's own routes
	Communities []string     `json:"communities,omitempty"` // values
}

func (r *Route) equal(q *Route) bool {
	return r.NextHop == q.NextHop && r.LocalPref == q.LocalPref && slices.Equal(r.Communities, q.Communities)
}

// check says what is wrong with a route, whoever owns it.
func (r *Route) check() error {
	p, hop := r.Prefix, r.NextHop
	if !p.IsValid() || p != p.Masked() {
		return fmt.Errorf("%w: prefix %s: want one without bits beyond its length", ErrInvalid, p)
	}
	if hop.IsValid() && (hop.Is4() != p.Addr().Is4() || hop.IsUnspecified() || hop.IsLoopback() || hop.IsMulticast() || hop.IsLinkLocalUnicast()) {
		return fmt.Errorf("%w: next hop %s of %s: want the address of a host, of the prefix's family; none for this host", ErrInvalid, hop, p)
	}
	return nil
}

// Entry is a route with its owner.
type Entry struct {
	Route
	Owner  string
	Stream bool          // its owner's stream is open
	PID    int           // of the process with which it goes; 0: none
	TTL    time.Duration // that is left; 0: no time passes
}

// held is a route as it is kept.
type held struct {
	Route
	Owner   string        `json:"owner"`
	Stream  bool          `json:"stream,omitempty"` // it goes with its owner's stream
	Process process       `json:"process,omitzero"` // with which it goes
	Until   time.Duration `json:"until,omitempty"`  // since the host booted; 0: no time passes
	stream  uint64        // that it goes with, if that is open
}

// Options are the settings of a [Table].
type Options struct {
	MaxRoutes int    // of an owner
	File      string // where it is kept over a restart of the daemon; empty: nowhere

	// Changed is called after routes have come or gone, or are to go earlier, without a lock; it must not block. nil: it is not called.
	Changed func()
}

// Table keeps routes by prefix. Its methods are safe for concurrent use.
type Table struct {
	o    Options
	boot string
	now  func() time.Duration // since the host booted
	born func(pid int) uint64 // when a process was started; 0: there is none

	mu      sync.Mutex
	routes  map[netip.Prefix]*held
	streams map[uint64]string // open ones, with their owners
	last    uint64
	frozen  bool // the daemon ends, and streams with it: their owners are not gone
}

// New returns a table with what the previous run of the daemon left in the file.
func New(o Options) (*Table, error) {
	boot, err := bootid.Read()
	t, openErr := open(o, boot, sinceBoot, startOf)
	return t, errors.Join(err, openErr)
}

func open(o Options, boot string, now func() time.Duration, born func(int) uint64) (*Table, error) {
	t := &Table{o: o, boot: boot, now: now, born: born, routes: map[netip.Prefix]*held{}, streams: map[uint64]string{}}
	if t.o.Changed == nil {
		t.o.Changed = func() {}
	}
	if o.File == "" {
		return t, nil
	}
	raw, err := os.ReadFile(o.File)
	if errors.Is(err, fs.ErrNotExist) {
		return t, nil
	}
	var f file
	if err == nil {
		err = json.Unmarshal(raw, &f)
	}
	if err != nil {
		return t, fmt.Errorf("read the routes that were injected: %w", err)
	}
	if f.Boot != boot {
		return t, nil // whoever owned them is no more
	}
	var errs []error
	for _, h := range f.Routes {
		if h.Stream {
			h.Until = now() + Reconnect
		}
		if err := h.check(now()); err != nil {
			errs = append(errs, fmt.Errorf("a route that was injected is left out: %w", err))
			continue
		}
		t.routes[h.Prefix] = &h
	}
	t.expire()
	return t, errors.Join(errs...)
}

// check says why a route out of the file is not what an owner may have asked for: it would stay for ever, or have no owner.
func (h *held) check(now time.Duration) error {
	switch {
	case h.Owner == "" || len(h.Owner) > maxName:
		return fmt.Errorf("%w: prefix %s: owner %q: want a name of 1 to %d bytes", ErrInvalid, h.Prefix, h.Owner, maxName)
	case h.Until == 0 && h.Process == process{}, h.Until < 0 || h.Until > now+MaxTTL, h.Process.PID < 0:
		return fmt.Errorf("%w: prefix %s: it goes neither with a process nor within %s", ErrInvalid, h.Prefix, MaxTTL)
	}
	return h.Route.check()
}

// file is what is on disk.
type file struct {
	Boot   string `json:"boot"`
	Routes []held `json:"routes"`
}

// save writes the file. The caller holds t.mu.
func (t *Table) save() error {
	if t.o.File == "" {
		return nil
	}
	f := file{Boot: t.boot}
	for _, p := range slices.SortedFunc(maps.Keys(t.routes), netip.Prefix.Compare) {
		f.Routes = append(f.Routes, *t.routes[p])
	}
	raw, err := json.Marshal(f)
	if err == nil {
		err = atomicfile.Write(t.o.File, raw, 0o600)
	}
	if err != nil {
		return fmt.Errorf("keep the routes that were injected: %w", err)
	}
	return nil
}

// Lease says with what a route goes. At least one is to be set; with several it goes with the first.
type Lease struct {
	TTL    time.Duration
	PID    int
	stream uint64
}

// Put has an owner inject routes, in place of what it said of these prefixes before; all says that it injects no others. It
// does all that was asked for or nothing.
func (t *Table) Put(owner string, l Lease, routes []Route, all bool) error {
	h := held{Owner: owner, Stream: l.stream != 0, stream: l.stream}
	switch {
	case owner == "" || len(owner) > maxName:
		return fmt.Errorf("%w: owner %q: want a name of 1 to %d bytes", ErrInvalid, owner, maxName)
	case l.stream == 0 && l.PID == 0 && l.TTL == 0:
		return fmt.Errorf("%w: say how long owner %s is there: a ttl, a pid, or a stream", ErrInvalid, owner)
	case l.TTL < 0 || l.TTL > MaxTTL || l.TTL > 0 && l.TTL < time.Second:
		return fmt.Errorf("%w: ttl %s: want 1s to %s", ErrInvalid, l.TTL, MaxTTL)
	case l.TTL > 0:
		h.Until = t.now() + l.TTL
	}
	if l.PID != 0 {
		if h.Process = (process{l.PID, t.born(l.PID)}); h.Process.Start == 0 {
			return fmt.Errorf("%w: pid %d: there is no such process on this host", ErrInvalid, l.PID)
		}
	}
	changed, err := t.put(h, routes, all)
	if changed {
		t.o.Changed()
	}
	return err
}

func (t *Table) put(h held, routes []Route, all bool) (changed bool, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if h.stream != 0 && t.streams[h.stream] == "" {
		return false, fmt.Errorf("%w: the stream has ended, or another one of owner %s has taken its place", ErrInvalid, h.Owner)
	}
	want := make(map[netip.Prefix]bool, len(routes))
	for _, r := range routes {
		if err := r.check(); err != nil {
			return false, err
		}
		if old := t.routes[r.Prefix]; old != nil && old.Owner != h.Owner {
			return false, fmt.Errorf("%w: prefix %s: owner %s has it", ErrTaken, r.Prefix, old.Owner)
		}
		want[r.Prefix] = true
	}
	owners := map[string]int{h.Owner: len(want)}
	for p, old := range t.routes {
		if old.Owner != h.Owner || !all && !want[p] {
			owners[old.Owner]++
		}
	}
	switch {
	case owners[h.Owner] > t.o.MaxRoutes:
		return false, fmt.Errorf("%w: owner %s would have %d routes; bgp.inject.maxRoutes is %d", ErrLimit, h.Owner, owners[h.Owner], t.o.MaxRoutes)
	case len(owners) > maxOwners:
		return false, fmt.Errorf("%w: there are %d owners already", ErrLimit, maxOwners)
	}
	before := maps.Clone(t.routes)
	for p, old := range t.routes {
		if all && old.Owner == h.Owner && !want[p] {
			delete(t.routes, p)
			changed = true
		}
	}
	for _, r := range routes {
		old := t.routes[r.Prefix]
		sooner := old != nil && h.Until != 0 && (old.Until == 0 || h.Until < old.Until)
		changed = changed || old == nil || !old.equal(&r) || sooner || old.Process != h.Process
		now := h
		now.Route = r
		t.routes[r.Prefix] = &now
	}
	if err := t.save(); err != nil {
		t.routes = before
		return false, err
	}
	return changed, nil
}

// Withdraw takes routes of an owner back, all if none is named, and says how many there were.
func (t *Table) Withdraw(owner string, prefixes []netip.Prefix) (n int, err error) {
	defer func() {
		if n > 0 {
			t.o.Changed()
		}
	}()
	t.mu.Lock()
	defer t.mu.Unlock()
	before := maps.Clone(t.routes)
	for p, h := range t.routes {
		if h.Owner == owner && (len(prefixes) == 0 || slices.Contains(prefixes, p)) {
			delete(t.routes, p)
			n++
		}
	}
	if n == 0 {
		return 0, nil
	}
	if err := t.save(); err != nil {
		t.routes = before
		return 0, err
	}
	return n, nil
}

// Stream is an owner that is there until it is closed.
type Stream struct {
	t     *Table
	id    uint64
	owner string
	grace time.Duration
}

// Open begins a stream of an owner. What the owner has by an earlier stream is this one's; what it has by one that the
// daemon's restart, or its own, has ended, it has to say again. When the stream is closed, its routes go after grace.
func (t *Table) Open(owner string, grace time.Duration) (*Stream, error) {
	switch {
	case owner == "" || len(owner) > maxName:
		return nil, fmt.Errorf("%w: owner %q: want a name of 1 to %d bytes", ErrInvalid, owner, maxName)
	case grace < 0 || grace > MaxTTL:
		return nil, fmt.Errorf("%w: grace period %s: want 0s to %s", ErrInvalid, grace, MaxTTL)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.streams) >= maxOwners {
		return nil, fmt.Errorf("%w: there are %d streams already", ErrLimit, maxOwners)
	}
	t.last++
	for id, o := range t.streams {
		if o != owner {
			continue
		}
		delete(t.streams, id)
		for p, h := range t.routes {
			if h.stream == id {
				now := *h
				now.stream = t.last
				t.routes[p] = &now
			}
		}
	}
	t.streams[t.last] = owner
	return &Stream{t: t, id: t.last, owner: owner, grace: grace}, nil
}

// Put is [Table.Put] for as long as the stream is open.
func (s *Stream) Put(routes []Route, all bool) error {
	return s.t.Put(s.owner, Lease{stream: s.id}, routes, all)
}

// Withdraw is [Table.Withdraw] of the stream's owner.
func (s *Stream) Withdraw(prefixes []netip.Prefix) (int, error) {
	return s.t.Withdraw(s.owner, prefixes)
}

// Close ends the stream. Of one whose place another stream has taken nothing is left to be done.
func (s *Stream) Close() {
	s.t.end(s)
	s.t.Expire()
}

func (t *Table) end(s *Stream) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.frozen {
		return
	}
	delete(t.streams, s.id)
	for p, h := range t.routes {
		if h.stream == s.id {
			now := *h
			now.stream, now.Stream, now.Until = 0, false, max(t.now()+s.grace, 1)
			t.routes[p] = &now
		}
	}
	if s.grace > 0 {
		_ = t.save() // what the file has of it otherwise lasts as long as a restart
	}
}

// Freeze says that the daemon ends: streams that end from now on do so because of it.
func (t *Table) Freeze() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.frozen = true
}

// Expire removes what is to go by now, and returns how long until it is to be called again.
func (t *Table) Expire() time.Duration {
	t.mu.Lock()
	gone, next := t.expire()
	t.mu.Unlock()
	if gone {
		t.o.Changed()
	}
	return next
}

// watchEvery is how often processes are looked at.
const watchEvery = time.Second

func (t *Table) expire() (gone bool, next time.Duration) {
	now := t.now()
	next = time.Hour
	for p, h := range t.routes {
		over := h.stream == 0 && h.Until != 0 && h.Until <= now
		over = over || h.Process != process{} && t.born(h.Process.PID) != h.Process.Start
		switch {
		case over:
			delete(t.routes, p)
			gone = true
			continue
		case h.Process != process{}:
			next = min(next, watchEvery)
		}
		if h.Until != 0 && h.stream == 0 {
			next = min(next, h.Until-now)
		}
	}
	if gone {
		_ = t.save() // a file that has too much is put right when it is read
	}
	return gone, next
}

// List returns all routes by their prefixes.
func (t *Table) List() []Entry {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := t.now()
	out := make([]Entry, 0, len(t.routes))
	for _, h := range t.routes {
		e := Entry{Route: h.Route, Owner: h.Owner, Stream: h.stream != 0, PID: h.Process.PID}
		if h.Until != 0 && h.stream == 0 {
			e.TTL = max(h.Until-now, 1)
		}
		out = append(out, e)
	}
	slices.SortFunc(out, func(a, b Entry) int { return a.Prefix.Compare(b.Prefix) })
	return out
}
