package attach

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
)

// What the datastore is told after an answer was given. A record that is
// attached and Queued waits for its addresses to be confirmed and its endpoint
// to be written; one that is releasing waits to be released. One writer,
// [Attacher.Run], does both, so that for one attachment they never overlap.

// Confirmation is an address out of the reserve and how it is to be written.
type Confirmation struct {
	Addr       netip.Addr
	Handle     string
	Attributes map[string]string
}

// behind reports whether an answer for r may come before the datastore knows
// of the endpoint: not where rules are waited for that come by way of the
// datastore alone.
func (a *Attacher) behind() bool {
	return a.cfg.Behind && (a.cfg.Rules == nil || a.cfg.Announce != nil)
}

// announce tells the parts of this host of an endpoint, or of its end, before
// the datastore does. An endpoint that another container of the pod has by now
// does not end with the earlier one's.
func (a *Attacher) announce(r record, there bool) {
	if a.cfg.Announce == nil || r.AddressesOnly || !there && a.taken(r) {
		return
	}
	key, ok := a.endpointKey(r)
	if !ok {
		return
	}
	ev := store.Event{Key: key}
	if there {
		w, err := a.endpointOf(r)
		if err != nil {
			return
		}
		a.announceProfile(r.Network)
		ev.Object = store.Object{Key: key, Value: w}
	}
	a.cfg.Announce(ev)
}

// endpointKey returns the key of an attachment's endpoint. One whose endpoint can
// have no name never got one.
func (a *Attacher) endpointKey(r record) (store.Key, bool) {
	if r.Network == "" || r.AddressesOnly {
		return store.Key{}, false
	}
	w, err := a.endpointOf(r)
	if err != nil {
		return store.Key{}, false
	}
	key, err := store.KeyOf(w)
	return key, err == nil
}

// AnnounceAgain takes in what the datastore says, after those who follow it
// have: the end of an earlier container's endpoint, which hides that of the
// next one of the same name until the datastore is told of it. That one is announced anew.
func (a *Attacher) AnnounceAgain(b store.Batch) {
	gone := make(map[store.Key]bool)
	for _, ev := range b.Events {
		if ev.Key.Kind == store.KindWorkloadEndpoint && ev.Deleted() {
			gone[ev.Key] = true
		}
	}
	if len(gone) == 0 || a.cfg.Announce == nil {
		return
	}
	for _, r := range a.snapshot() {
		if r.State != stateAttached || !r.Queued || r.AddressesOnly {
			continue
		}
		w, err := a.endpointOf(r)
		if err != nil {
			continue
		}
		if key, err := store.KeyOf(w); err == nil && gone[key] {
			a.announce(r, true)
		}
	}
}

// announceProfile tells of the profile of a network's endpoints, which without
// it are denied everything, unless the datastore told of one. The lock is held
// meanwhile, so that what the datastore tells comes later and holds.
func (a *Attacher) announceProfile(network string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.profiles[network] {
		return
	}
	p := profileOf(network)
	key, err := store.KeyOf(p)
	if err != nil {
		return
	}
	store.SetDefaults(p)
	a.cfg.Announce(store.Event{Key: key, Object: store.Object{Key: key, Value: p}})
}

// localOnly reports whether the datastore has heard nothing of an attachment:
// its addresses are still the reserve's there.
func (a *Attacher) localOnly(r record) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return r.Queued && !a.touched[r.id()] && !r.Given && !r.Stale && len(r.Claims) > 0
}

// mark answers a DEL: from here on the attachment is on its way out, also after
// the loss of power. The rest is the work of [Attacher.Run]. The caller has the
// attachment's locks.
func (a *Attacher) mark(ctx context.Context, r record) error {
	if err := a.at("del start"); err != nil {
		return err
	}
	r.State = stateReleasing
	if err := a.save(r); err != nil {
		return err
	}
	a.fresh(r.id())
	if err := a.at("del marked"); err != nil {
		return err
	}
	a.cfg.Sink.Update(dataplane.SourceWorkload, nil, a.goneWith(r))
	a.announce(r, false)
	if err := a.cfg.Journal.Sync(); err != nil {
		return fmt.Errorf("write attachment record: %w", err)
	}
	if err := a.at("del answered"); err != nil {
		return err
	}
	a.cutLater()
	return nil
}

// cutLater has [Attacher.Run] cut wires.
func (a *Attacher) cutLater() {
	select {
	case a.cuts <- struct{}{}:
	default:
	}
}

// parallelCuts is how many wires are cut at once: the kernel deletes a group of
// devices in the time of one.
const parallelCuts = 64

// runCuts cuts the wires of what is on its way out, whatever the datastore
// does, and has the writer do the rest.
func (a *Attacher) runCuts(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-a.cuts:
		}
		a.cutAll(ctx)
		a.writeLater()
	}
}

// cutAll reports whether no wire is left of what is on its way out. What the
// datastore has heard nothing of is released too.
func (a *Attacher) cutAll(ctx context.Context) bool {
	var g errgroup.Group
	g.SetLimit(parallelCuts)
	for id, r := range a.snapshot() {
		if r.State != stateReleasing || r.cut {
			continue
		}
		g.Go(func() error {
			l, ok := a.tryLock(id)
			if !ok {
				return nil // whoever has it cuts it
			}
			defer l.unlock()
			if l.State != stateReleasing {
				return nil
			}
			err := a.cut(ctx, l.record)
			if err == nil && (a.localOnly(l.record) || a.disowned(id)) {
				err = a.finish(ctx, l.record)
			}
			if err != nil {
				a.completeLater(id)
			}
			return err
		})
	}
	if err := g.Wait(); err != nil {
		a.log.Warn("wires are not all cut; will try again", "error", err)
		return false
	}
	return true
}

// confirmAll tells the datastore of what was attached since, but for what is to
// be tried again later, and reports whether nothing is left to be told.
func (a *Attacher) confirmAll(ctx context.Context, later func(ID, time.Time) bool) bool {
	select {
	case a.pass <- struct{}{}:
		defer func() { <-a.pass }()
	case <-ctx.Done():
		return false
	}
	due, left := a.untold(later)
	slices.SortFunc(due, func(x, y record) int { return x.Since.Compare(y.Since) })
	for chunk := range slices.Chunk(due, confirmChunk) {
		var errs []error
		away := false
		for i, err := range a.confirm(ctx, chunk) {
			if err == nil {
				continue
			}
			left++
			a.failed(chunk[i].id())
			away = away || errors.Is(err, store.ErrUnavailable)
			if errs = append(errs, err); len(errs) > 3 {
				errs = errs[:3]
			}
		}
		if len(errs) > 0 {
			a.log.Warn("the datastore is not told yet of what was attached; will try again", "attachments", len(due), "left", left, "error", errors.Join(errs...))
		}
		if away {
			// The others would only wait as long.
			for _, r := range due {
				a.failed(r.id())
			}
			return false
		}
	}
	return left == 0
}

// untold returns the attachments that the datastore is to be told of now, and how
// many have to wait. It may have heard of the former from here on.
func (a *Attacher) untold(later func(ID, time.Time) bool) (due []record, left int) {
	unheld := a.held() != nil
	a.mu.Lock()
	defer a.mu.Unlock()
	now := time.Now()
	mute := a.storeAway || unheld
	for id, r := range a.records {
		switch {
		case r.State != stateAttached || !r.Queued:
		case mute || later(id, now): // what the datastore never heard of is released without it
			left++
			if mute {
				a.retries.failed(id, now)
			}
		default:
			due = append(due, r)
			a.touched[id] = true
		}
	}
	return due, left
}

// confirmChunk is how many attachments are written together: each has an
// endpoint, and a handle of its own.
const confirmChunk = 48

// confirm writes attachments: their addresses first, then their endpoints. It
// returns an error or nil for each.
func (a *Attacher) confirm(ctx context.Context, rs []record) []error {
	ctx, cancel := a.storeContext(ctx)
	defer cancel()
	var cs []Confirmation
	var of []int // index in rs of each of cs
	for i, r := range rs {
		for _, addr := range r.Claims {
			cs = append(cs, Confirmation{Addr: addr, Handle: handle(r.id()), Attributes: a.assignRequest(r, 0).Attributes})
			of = append(of, i)
		}
	}
	errs := make([]error, len(rs))
	for i, r := range rs {
		if r.Stale {
			errs[i] = a.dropFormer(ctx, r)
		}
	}
	all := func(err error) []error { return slices.Repeat([]error{err}, len(rs)) }
	if len(cs) > 0 {
		for i, err := range a.cfg.IPAM.Confirm(ctx, cs...) {
			if err == nil || errs[of[i]] != nil {
				continue
			}
			if errors.Is(err, ErrNoAddress) {
				a.lost(rs[of[i]], err)
			}
			errs[of[i]] = storeError("confirm addresses", err)
		}
	}
	if err := a.at("confirmed"); err != nil {
		return all(err)
	}
	var good []record
	var at []int // index in rs of each of good
	for i, r := range rs {
		if errs[i] == nil {
			good, at = append(good, r), append(at, i)
		}
	}
	revs, epErrs := a.putEndpoints(ctx, good)
	if err := a.at("written"); err != nil {
		return all(err)
	}
	for i, r := range good {
		if epErrs[i] != nil {
			errs[at[i]] = storeError("write the workload endpoint", epErrs[i])
			continue
		}
		if key, ok := a.endpointKey(r); ok && a.cfg.Written != nil {
			a.cfg.Written(key, revs[i])
		}
		errs[at[i]] = a.amend(r.id(), r.Since, func(have *record) {
			have.Claims, have.Queued, have.Endpoint = nil, false, revs[i]
			have.Stale, have.Former = false, nil
		})
	}
	return errs
}

// succeed returns the record of an attachment that follows on one with the same
// names that is on its way out, old. It does not wait for the datastore, which
// may know of the former's addresses, or be hearing of them just now: they go
// back when it is told of this one. The caller has the locks.
func (a *Attacher) succeed(ctx context.Context, r, old record) (record, error) {
	if a.localOnly(old) || a.disowned(old.id()) {
		return r, a.release(ctx, old)
	}
	if !old.cut {
		if err := a.cut(ctx, old); err != nil {
			return r, err
		}
	}
	a.fresh(r.id())
	r.Stale = old.Stale || !old.Given
	r.Former = append(slices.Clone(old.Former), old.Claims...)
	return r, nil
}

// dropFormer releases what the handle of an attachment has of an earlier life.
func (a *Attacher) dropFormer(ctx context.Context, r record) error {
	if _, shared := a.namesake(r.id()); shared {
		return nil
	}
	if err := a.cfg.IPAM.ReleaseHandle(ctx, handle(r.id()), r.addrs()...); err != nil {
		return storeError("release the address of an earlier container of this name", err)
	}
	former := slices.DeleteFunc(slices.Clone(r.Former), func(f netip.Addr) bool { return slices.Contains(r.addrs(), f) })
	if len(former) > 0 {
		a.cfg.IPAM.Unclaim(handle(r.id()), former...)
	}
	return nil
}

// lost takes in that the datastore gives an address of a running workload to
// nobody, or to somebody else: what somebody deleted is taken again.
func (a *Attacher) lost(r record, err error) {
	a.log.Warn("an address of a running workload is not this host's in the datastore", append(logID(r.id()), "error", err)...)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.reclaimLater()
}

// amend changes the record of a complete attachment unless it is another by now
// or on its way out.
func (a *Attacher) amend(id ID, since time.Time, change func(*record)) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	r, ok := a.records[id]
	if !ok || r.State != stateAttached || !r.Since.Equal(since) {
		return nil
	}
	change(&r)
	a.retries.done(id)
	return a.put(r)
}

// putEndpoints writes endpoints in one transaction where they are new, as they
// nearly always are, else one by one.
func (a *Attacher) putEndpoints(ctx context.Context, rs []record) ([]store.Revision, []error) {
	revs, errs := make([]store.Revision, len(rs)), make([]error, len(rs))
	var values []any
	var of []int
	for i, r := range rs {
		if r.AddressesOnly {
			continue
		}
		w, err := a.endpointOf(r)
		if errs[i] = err; err == nil {
			values, of = append(values, w), append(of, i)
		}
	}
	if len(values) == 0 {
		return revs, errs
	}
	err := a.putProfiles(ctx, rs)
	if err == nil {
		var written []store.Object
		if written, err = store.CreateAll(ctx, a.cfg.Store, values...); err == nil {
			for i, o := range written {
				revs[of[i]] = o.Revision
			}
			return revs, errs
		}
	}
	for _, i := range of {
		if errs[i] = err; !errors.Is(err, store.ErrUnavailable) {
			revs[i], errs[i] = a.putEndpoint(ctx, rs[i])
		}
	}
	return revs, errs
}

// quiesce waits until no confirmation is under way, so that what is released
// next is not confirmed afterwards.
func (a *Attacher) quiesce(ctx context.Context) error {
	select {
	case a.pass <- struct{}{}:
		<-a.pass
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for the datastore to be told: %w", ctx.Err())
	}
}
