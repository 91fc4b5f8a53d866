package attach

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync/atomic"
	"time"

	"github.com/routerd/routerd/store"
)

// flusher writes to the datastore what was attached before the datastore knew.
// One goroutine, [Attacher.Run], flushes and completes releases, so that for one
// attachment they never overlap.
type flusher struct {
	ledger    *ledger
	store     *datastore
	addresses *addresses
	endpoints *endpoints
	own       *ownWrites
	schedule  *schedule
	reclaim   *reclaimer
	steps     *runner
	log       *slog.Logger
	linger    time.Duration // see Config.LingerConfirm
	ending    atomic.Bool   // nothing waits any more
	pass      chan struct{} // holds a token while it flushes
	away      bool          // the datastore was, when it was written to last; for who has the token
}

// flushChunk is how many attachments are written together: each has an endpoint,
// and a handle of its own.
const flushChunk = 48

// all flushes what is pending, but for what is to be tried again later, and
// reports whether nothing is left.
func (f *flusher) all(ctx context.Context, later func(ID) bool) bool {
	select {
	case f.pass <- struct{}{}:
		defer func() { <-f.pass }()
	case <-ctx.Done():
		return false
	}
	f.gather(later)
	writable := f.store.writable()
	// What the datastore has heard nothing of is released without it.
	due, waiting := f.ledger.pending(writable, later, f.patches)
	if !writable {
		f.schedule.failed(waiting...)
	}
	left := len(waiting)
	for chunk := range slices.Chunk(due, flushChunk) {
		var errs []error
		away := false
		for i, err := range f.flush(ctx, chunk) {
			if err == nil {
				continue
			}
			left++
			f.schedule.failed(chunk[i].id())
			away = away || errors.Is(err, store.ErrUnavailable)
			if errs = append(errs, err); len(errs) > 3 {
				errs = errs[:3]
			}
		}
		if len(errs) > 0 {
			level := slog.LevelWarn
			if away && f.away {
				level = slog.LevelDebug // pods that come and go meanwhile say nothing else
			}
			f.log.Log(ctx, level, "not all attachments are in the datastore yet; will try again", "attachments", len(due), "left", left, "error", errors.Join(errs...))
		}
		if f.away = away; away {
			// The others would only wait as long.
			for _, r := range due {
				f.schedule.failed(r.id())
			}
			return false
		}
	}
	return left == 0
}

// patches reports whether an attachment's addresses are to be confirmed later than its endpoint
// is written: no other host goes by whose they are.
func (f *flusher) patches(r record) bool {
	return f.linger > 0 && !f.ending.Load() && f.endpoints.kubernetes && r.State == attachedLocal && !f.endpoints.local(r) && !r.Given
}

// gather has those confirmed with the first whose time has come that have lived half as long:
// they probably go on living, and share the writes of the blocks.
func (f *flusher) gather(later func(ID) bool) {
	if f.linger == 0 {
		return
	}
	patched := func(r record) bool { return r.State == attachedPatched && r.Endpoint != 0 }
	f.schedule.gather(f.ledger.snapshot(), patched, later, func(r record) bool { return time.Since(r.Since) >= f.linger/2 })
}

// flush writes attachments: their addresses first, then their endpoints. It
// returns an error or nil for each.
func (f *flusher) flush(ctx context.Context, rs []record) []error {
	ctx, cancel := f.store.context(ctx)
	defer cancel()
	errs, revs := make([]error, len(rs)), make([]store.Revision, len(rs))
	err := f.steps.run(ctx,
		step{"confirm addresses", func(ctx context.Context) error {
			for i, r := range rs {
				if r.Reused {
					errs[i] = f.addresses.releaseFormer(ctx, r)
				}
			}
			f.addresses.confirm(ctx, rs, errs)
			return nil
		}},
		step{"write endpoints", func(ctx context.Context) error {
			f.write(ctx, rs, revs, errs)
			return nil
		}},
		step{"note flushed", func(context.Context) error {
			for i, r := range rs {
				if refused(errs[i]) {
					// What an operator deleted is taken again.
					f.log.Warn("an address of a running workload is not this host's in the datastore", append(logID(r.id()), "error", errs[i])...)
					f.reclaim.later()
				}
				if errs[i] == nil {
					errs[i] = f.written(r, revs[i])
				}
			}
			return nil
		}},
	)
	if err != nil {
		return slices.Repeat([]error{err}, len(rs))
	}
	return errs
}

// write writes the endpoints of those attachments that have no error.
func (f *flusher) write(ctx context.Context, rs []record, revs []store.Revision, errs []error) {
	var good []record
	var of []int // index in rs of each of good
	for i, r := range rs {
		if revs[i] = r.Endpoint; errs[i] == nil && !r.patched {
			good, of = append(good, r), append(of, i)
		}
	}
	written, failed := f.endpoints.putAll(ctx, good)
	for i, at := range of {
		revs[at] = written[i]
		if failed[i] != nil {
			errs[at] = storeError("write the workload endpoint", failed[i])
		}
	}
}

// written takes account of an attachment that the datastore has.
func (f *flusher) written(r record, rev store.Revision) error {
	if !r.patched {
		f.own.written(r, rev)
	}
	if r.State == attachedPatched {
		if err := f.ledger.amend(r.id(), r.Since, none, func(have *record) { have.Endpoint = rev }); err != nil {
			return err
		}
		if f.schedule.await(r.id(), f.linger); f.ledger.state(r.id()) != attachedPatched {
			f.schedule.await(r.id(), 0) // it ended meanwhile
		}
		return nil
	}
	return f.ledger.amend(r.id(), r.Since, stored, func(have *record) {
		have.Claims, have.Endpoint = nil, rev
		have.Reused, have.Former = false, nil
		f.schedule.done(r.id()) // here, where it is not on its way out: what is to come of a DEL stays
	})
}

// wait waits until no flush is under way, so that what is released next is not
// confirmed afterwards.
func (f *flusher) wait(ctx context.Context) error {
	select {
	case f.pass <- struct{}{}:
		<-f.pass
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for the flush to the datastore: %w", ctx.Err())
	}
}
