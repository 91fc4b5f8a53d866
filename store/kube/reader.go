package kube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/url"
	"strconv"
	"sync"
	"time"

	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/internal/backend"
)

const (
	// watchTime is how long the server is asked to keep a watch, at least; as much
	// again is added at random, so that not all begin anew at once.
	watchTime = 5 * time.Minute
	// catchUp is the time of a watch that shall say soon that all was told: the
	// server sends a bookmark two seconds before its end.
	catchUp = 4 * time.Second
	// silence is how long a watch may say nothing: bookmarks come each minute.
	silence = 150 * time.Second
	// definitionPause is between two looks for a definition that is missing.
	definitionPause = 30 * time.Second
	// staleTries is how often a server is asked to go on from a revision that it
	// says it has not reached, before the state is read again; and for a state that is
	// not older than what was told, before an older one counts.
	staleTries = 5
	// unsaidTries is how often a watch that shall say soon that all was told ends without, before
	// the state is read.
	unsaidTries = 2
	// settled is how long a watch lasts after which those that broke before it are
	// forgotten.
	settled = 10 * time.Second
	// notYet is how often a user is refused before that is logged, after some seconds: a
	// server that starts knows nobody's rights for a moment.
	notYet = 6
	// patient is how often a server may be too busy before that is an outage.
	patient = 4
)

var (
	errExpired = errors.New("the history is gone")
	errSilent  = errors.New("the watch says nothing")
	errBehind  = errors.New("the server's state is older than what was told")
)

// reader follows one source.
type reader struct {
	s *Store
	m *merger
	p *part

	at      store.Revision // what was told up to; 0: the state is needed
	down    bool
	logged  slog.Level     // of that it is down
	paged   bool           // this server does not stream lists
	least   store.Revision // what the state must have come to: see behind
	stale   int            // how often it had not reached at, or least
	unsaid  int            // how often it ended without saying that all was told
	missing bool           // there is no definition
	denied  bool           // this user may not read it
	refused int            // how often that was said
	resumes bool           // it goes on from what an earlier process knew, and has not come as far as the server yet
}

// pause waits before another try.
func pause(ctx context.Context, err error, failures int) error {
	return async.Sleep(ctx, pauseAfter(err, failures))
}

// runInDemand is run while the watch is in demand.
func (r *reader) runInDemand(ctx context.Context) {
	if r.p.demand == nil {
		r.run(ctx)
		return
	}
	for ctx.Err() == nil {
		is, changed := r.p.demand.Is()
		if !is {
			select {
			case <-changed:
			case <-ctx.Done():
			}
			continue
		}
		r.m.open(r.p)
		running, cancel := context.WithCancel(ctx)
		var over sync.WaitGroup
		over.Go(func() {
			select {
			case <-changed:
			case <-running.Done():
			}
			cancel()
		})
		r.run(running)
		cancel()
		over.Wait()
		if ctx.Err() == nil { // the end of all watches is no word on what is in demand
			r.pause()
		}
	}
}

// pause notes that the watch is not in demand any more. When it is again it goes on where it
// is, unless that is too long ago.
func (r *reader) pause() {
	told := r.m.shut(r.p)
	if !told {
		r.at = 0
	}
	r.down, r.denied, r.refused, r.stale = false, false, 0, 0
	r.resumes = r.at != 0
}

// run follows the source until ctx ends.
func (r *reader) run(ctx context.Context) {
	for failures := 0; ctx.Err() == nil; failures++ {
		began := time.Now()
		heard, err := r.follow(ctx)
		if ctx.Err() != nil {
			return
		}
		if time.Since(began) > settled {
			failures = 0
		}
		switch {
		case errors.Is(err, errExpired):
			r.at, r.resumes, r.unsaid = 0, false, 0
		case errors.Is(err, errBehind):
			r.s.log.Debug("a state is read again", "resource", r.p.String(), "error", err)
		case err == nil, heard:
			// The server's time is up, or the connection is lost: another one tells
			// whether there is an outage.
		case isCode(err, http.StatusNotFound):
			r.noDefinition(ctx)
			continue
		case isCode(err, http.StatusForbidden):
			r.noRight(r.s.explain(ctx, err))
		case isCode(err, http.StatusTooManyRequests) && failures < patient:
		case !r.down:
			r.down = true
			why := r.s.explain(ctx, err)
			r.logged = slog.LevelDebug
			if r.m.outage(r.p, why) {
				r.logged = slog.LevelWarn
			}
			r.s.log.Log(ctx, r.logged, "datastore unavailable", "resource", r.p.String(), "error", why)
		}
		if failures > 0 && pause(ctx, err, failures-1) != nil {
			return
		}
	}
}

// noDefinition takes a resource that the API does not have for an empty one, and
// waits before another look.
func (r *reader) noDefinition(ctx context.Context) {
	if !r.missing {
		r.missing = true
		r.s.log.Info("the API has no such resource (yet): install its definition", "resource", r.p.String())
		r.m.missing(r.p, true)
		r.m.state(r.p, max(r.at, 1), nil)
	}
	r.at, r.down, r.resumes = 0, false, false
	_ = async.Sleep(ctx, definitionPause) // the caller looks at ctx
}

// noRight leaves a resource that this user may not read out, until it may: the others
// are followed.
func (r *reader) noRight(err error) {
	r.down, r.denied = false, true
	if r.refused++; r.refused == notYet {
		r.s.log.Error("this user may not read a resource; the others are followed", "resource", r.p.String(), "error", err)
	}
	r.m.denied(r.p, r.at, err)
}

// follow reads the state if that is needed, and then each change, until the watch
// ends. It reports whether anything was heard.
func (r *reader) follow(ctx context.Context) (heard bool, err error) {
	if r.at == 0 && r.paged {
		if err := r.list(ctx); err != nil {
			return false, err
		}
		r.allowed()
		heard = true
	}
	query := url.Values{}
	if r.p.fields != "" {
		query.Set("fieldSelector", r.p.fields)
	}
	keep := watchTime + rand.N(watchTime)
	if r.at == 0 {
		query.Set("sendInitialEvents", "true")
		query.Set("resourceVersionMatch", "NotOlderThan")
	} else {
		query.Set("resourceVersion", strconv.FormatInt(int64(r.at), 10))
		if r.down || r.resumes {
			keep = catchUp
		}
	}
	st := stream{r: r, initial: r.at == 0}
	began, states, open := time.Now(), uint64(0), 0
	if st.initial {
		states = 1
	}
	r.s.asks.note(r.p.String(), 0, 1, states)
	defer func() { r.s.asks.note(r.p.String(), -open, 0, 0) }()
	err = r.s.events(ctx, r.p.source.Resource.Path(""), query, keep, func(ctx context.Context) {
		open = 1
		r.s.asks.note(r.p.String(), open, 0, 0)
		if r.missing {
			r.missing = false
			r.m.missing(r.p, false)
		}
		if r.at != 0 {
			r.allowed()
		}
		if (r.down || r.resumes) && r.at != 0 && r.unchanged(ctx) {
			st.caughtUp()
		}
	}, func(e event) error {
		err := st.take(e)
		heard = heard || err == nil && !st.initial
		return err
	})
	switch {
	case err == nil && st.initial:
		err = errors.New("the server ended a watch before it had sent the whole state")
	case err == nil && keep == catchUp && (r.down || r.resumes) && time.Since(began) >= catchUp/2:
		// It sent no bookmark before the end: on an etcd that cannot say how far it is, as 3.4, there is
		// none where nothing of the resource is written, and no other way to know that all was told.
		if r.unsaid++; r.unsaid >= unsaidTries {
			r.least = max(r.least, r.at)
			err = errExpired
		}
	}
	return heard, r.judge(err)
}

// allowed notes that this user may read the resource.
func (r *reader) allowed() {
	if r.denied {
		if r.refused >= notYet {
			r.s.log.Info("this user may read a resource again", "resource", r.p.String())
		}
		r.denied, r.refused = false, 0
		r.m.denied(r.p, r.at, nil)
	}
}

// unchanged asks the server how far its datastore is, and reports whether that is no further
// than the watch began: then there is nothing to be told, and no bookmark comes until
// something is written. Where the datastore is further, the question makes the server find
// that out, which it would by itself in minutes; its bookmark says when all is told.
func (r *reader) unchanged(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, catchUp)
	defer cancel()
	raw, err := r.s.once(ctx, request{method: http.MethodGet, path: r.p.source.Resource.Path(""), query: url.Values{"limit": {"1"}}})
	if err != nil {
		r.s.log.Debug("the API server did not say how far it is", "resource", r.p.String(), "error", err)
		return false
	}
	var list page
	if err := json.Unmarshal(raw, &list); err != nil {
		r.s.log.Debug("the API server did not say how far it is", "resource", r.p.String(), "error", err)
		return false
	}
	return list.Metadata.ResourceVersion == strconv.FormatInt(int64(r.at), 10)
}

// judge says what the answer to a watch means.
func (r *reader) judge(err error) error {
	var st *statusError
	if !errors.As(err, &st) {
		return err
	}
	switch {
	case st.code == http.StatusGone:
		r.least = max(r.least, r.at)
		return errExpired
	case r.at == 0 && !r.paged && (st.code == http.StatusUnprocessableEntity || st.code == http.StatusBadRequest || st.code == http.StatusInternalServerError):
		// An older server, or one on an etcd that cannot say how far it is.
		r.paged = true
		r.s.log.Debug("the API server does not stream lists", "resource", r.p.String(), "error", err)
		return errExpired
	case r.at != 0 && st.code == http.StatusGatewayTimeout:
		// The server has not got so far: it lags, or it was restored from a backup.
		if r.stale++; r.stale >= staleTries {
			r.stale, r.least = 0, 0
			return errExpired
		}
	}
	return err
}

// behind says of a state that it is older than what was told before a server said that the history
// of that is gone, so has come further: the state is that of a replica which lags, and by it what
// was made since would be deleted. If all say so for long the datastore was restored, and nil.
func (r *reader) behind(rev store.Revision) error {
	if rev < r.least {
		if r.stale++; r.stale < staleTries {
			return fmt.Errorf("%w: %d, told was up to %d", errBehind, rev, r.least)
		}
	}
	r.stale, r.least = 0, 0
	return nil
}

// list reads the state where the server does not stream it.
func (r *reader) list(ctx context.Context) error {
	r.s.asks.note(r.p.String(), 0, 0, 1)
	items, rev, err := r.s.listSource(ctx, r.p.source, "", r.p.fields)
	if err != nil {
		return r.judge(err)
	}
	if err := r.behind(rev); err != nil {
		return err
	}
	r.at, r.down = rev, false
	r.m.state(r.p, rev, items)
	return nil
}

// event is what a watch says.
type event struct {
	Type   string          `json:"type"`
	Object json.RawMessage `json:"object"`
}

// status returns what an event of type ERROR says, of a watch of a path.
func (e event) status(path string) error {
	var s status
	if err := json.Unmarshal(e.Object, &s); err != nil {
		return fmt.Errorf("watch of %s: %w", path, err)
	}
	return &statusError{
		req:  request{method: http.MethodGet, path: path, query: url.Values{"watch": {"1"}}},
		code: s.Code, reason: s.Reason, message: s.Message,
		after: time.Duration(s.Details.RetryAfterSeconds) * time.Second,
	}
}

// stream is one watch of the API's.
type stream struct {
	r       *reader
	initial bool // the state is being told
	items   []backend.Item
}

// take takes one event. The error is the API's.
func (st *stream) take(e event) error {
	switch e.Type {
	case "BOOKMARK":
		return st.bookmark(e.Object)
	case "ADDED", "MODIFIED", "DELETED":
		st.object(e)
	}
	return nil
}

func (st *stream) bookmark(raw []byte) error {
	var mark struct {
		Metadata struct {
			ResourceVersion string            `json:"resourceVersion"`
			Annotations     map[string]string `json:"annotations"`
		} `json:"metadata"`
	}
	if err := json.Unmarshal(raw, &mark); err != nil {
		return fmt.Errorf("watch of %s: bookmark: %w", st.r.p.source.Resource, err)
	}
	n, err := strconv.ParseInt(mark.Metadata.ResourceVersion, 10, 64)
	if err != nil {
		return fmt.Errorf("watch of %s: bookmark: %w", st.r.p.source.Resource, err)
	}
	rev, r := store.Revision(n), st.r
	if st.initial {
		if mark.Metadata.Annotations["k8s.io/initial-events-end"] != "true" {
			return nil
		}
		if err := r.behind(rev); err != nil {
			return err
		}
		st.initial = false
		r.at, r.down = rev, false
		r.m.state(r.p, rev, st.items)
		r.allowed()
		st.items = nil
		return nil
	}
	if rev > r.at { // one that goes back is of a server that lags
		r.at = rev
		r.m.progress(r.p, rev)
	}
	st.caughtUp()
	return nil
}

// caughtUp notes that all was told that happened while the server was away.
func (st *stream) caughtUp() {
	r := st.r
	r.unsaid = 0
	if r.resumes {
		r.resumes = false
		r.s.log.Debug("the watch goes on where the run before was", "resource", r.p.String(), "revision", r.at)
		r.m.resumed(r.p, r.at)
	}
	if r.stale = 0; r.down {
		r.down = false
		r.s.log.Log(r.s.ctx, min(r.logged, slog.LevelInfo), "datastore is back", "resource", r.p.String())
		r.m.recovered(r.p)
	}
}

func (st *stream) object(e event) {
	r := st.r
	it, rev, there := r.s.item(r.p.source, e.Object)
	there = there && e.Type != "DELETED"
	if st.initial {
		if there {
			st.items = append(st.items, it)
		}
		return
	}
	r.at = max(r.at, rev)
	if it.Key.Kind == "" {
		r.m.progress(r.p, rev)
		return
	}
	r.m.change(r.p, rev, it, !there)
}
