package kube

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/internal/backend"
	"github.com/routerd/routerd/store/kube/convert"
)

func watchPools(t *testing.T, s *script) <-chan store.Batch {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	return s.open(t).Watch(ctx, store.KindIPPool)
}

// later lets virtual time pass.
func later(d time.Duration) { <-time.After(d) }

func TestBookmarks(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := &script{}
		s.say = func(n int, req *http.Request) *http.Response {
			if !initial(req) {
				return s.stream(req, false)
			}
			return s.stream(req, false,
				line("ADDED", pool("a", 5, `"10.0.0.0/16"`)), bookmark(7, true),
				bookmark(9, false), bookmark(8, false), // one that goes back
				line("MODIFIED", pool("a", 10, `"10.1.0.0/16"`)),
				line("DELETED", pool("a", 11, `"10.1.0.0/16"`)))
		}
		ch := watchPools(t, s)
		batches := collect(ch)
		for i, b := range batches {
			if i > 0 && b.Revision < batches[i-1].Revision {
				t.Errorf("the revision goes back from %d to %d", batches[i-1].Revision, b.Revision)
			}
		}
		got := told(batches)
		// How much comes in one batch is a matter of who is faster.
		for _, part := range []string{"synced", "11["} {
			if !strings.Contains(got, part) {
				t.Errorf("told %q", got)
			}
		}
	})
}

// TestGoneEverywhere: the history is gone whenever it is asked for. The state is
// read again, ever less often, and nothing is told of that did not happen.
func TestGoneEverywhere(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := &script{}
		s.say = func(n int, req *http.Request) *http.Response {
			if initial(req) {
				return s.stream(req, true, line("ADDED", pool("a", 5, `"10.0.0.0/16"`)), line("ADDED", pool("b", 6, `"10.1.0.0/16"`)), bookmark(7, true))
			}
			return answer(http.StatusGone, refusal(410, "Expired", "too old resource version"))
		}
		ch := watchPools(t, s)
		end := time.After(time.Minute)
		first := true
		for {
			select {
			case b := <-ch:
				if b.Err != nil || !first && len(b.Events) > 0 {
					t.Errorf("told %q", told([]store.Batch{b}))
				}
				first = false
				continue
			case <-end:
			}
			break
		}
		if n := s.count(); n > 80 {
			t.Errorf("%d requests in a minute", n)
		}
	})
}

// TestWithoutStreamingLists: a server on an old etcd says in the stream that it
// cannot, one older than 1.30 at once, and names its version, which is reported; the state is
// then listed.
func TestWithoutStreamingLists(t *testing.T) {
	t.Parallel()
	for name, refuses := range map[string]func(s *script, req *http.Request) *http.Response{
		"an old etcd": func(s *script, req *http.Request) *http.Response {
			return s.stream(req, true, line("ERROR", refusal(500, "InternalError", "the required storage feature RequestWatchProgress is disabled")))
		},
		"an old API server": func(*script, *http.Request) *http.Response {
			return answer(http.StatusUnprocessableEntity, refusal(422, "Invalid", `ListOptions.meta.k8s.io "" is invalid: sendInitialEvents: Forbidden: sendInitialEvents is forbidden for watch unless the WatchList feature gate is enabled`))
		},
	} {
		synctest.Test(t, func(t *testing.T) {
			s := &script{}
			s.say = func(n int, req *http.Request) *http.Response {
				switch {
				case req.URL.Path == "/version":
					return answer(http.StatusOK, `{"major":"1","minor":"28+","gitVersion":"v1.28.9"}`)
				case initial(req):
					return refuses(s, req)
				case !watching(req):
					return answer(http.StatusOK, page1(7, pool("a", 5, `"10.0.0.0/16"`)))
				}
				if rv := req.URL.Query().Get("resourceVersion"); rv != "7" {
					t.Errorf("%s: the watch begins at %q", name, rv)
				}
				return s.stream(req, false)
			}
			var log bytes.Buffer
			st := s.open(t)
			st.asked, st.log = false, slog.New(slog.NewTextHandler(&log, nil))
			ctx, cancel := context.WithCancel(t.Context())
			t.Cleanup(cancel)
			for range 2 {
				want(t, name, st.Watch(ctx, store.KindIPPool), "7[a@5] synced")
			}
			if said := log.String(); strings.Count(said, "oldest=1.30") != 1 || !strings.Contains(said, "version=v1.28.9") {
				t.Errorf("%s: said is %q", name, said)
			}
		})
	}
}

// TestBusy: a server that is too busy for a moment is no outage, and is left in
// peace for as long as it says.
func TestBusy(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := &script{}
		s.say = func(n int, req *http.Request) *http.Response {
			if n < 2 {
				resp := answer(http.StatusTooManyRequests, refusal(429, "TooManyRequests", "please wait"))
				resp.Header.Set("Retry-After", "3")
				return resp
			}
			return s.stream(req, false, bookmark(7, true))
		}
		ch := watchPools(t, s)
		want(t, "at once", ch, "")
		if n := s.count(); n > 2 {
			t.Errorf("%d requests at once", n)
		}
		later(10 * time.Second)
		want(t, "after a while", ch, "7[] synced")
	})
}

// TestDefinitionComesLater: a resource that the API does not have is empty, and
// is looked for again.
func TestDefinitionComesLater(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := &script{}
		s.say = func(n int, req *http.Request) *http.Response {
			if n == 0 {
				return answer(http.StatusNotFound, "404 page not found")
			}
			return s.stream(req, false, line("ADDED", pool("a", 5, `"10.0.0.0/16"`)), bookmark(7, true))
		}
		ch := watchPools(t, s)
		want(t, "without a definition", ch, "1[] synced")
		later(definitionPause + time.Second)
		want(t, "with a definition", ch, "7[a@5] synced")
	})
}

// TestRestored: a server that was restored from a backup has never reached the
// revision that is known. What it has is then read, and the difference told.
func TestRestored(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := &script{}
		s.say = func(n int, req *http.Request) *http.Response {
			switch {
			case n == 0:
				return s.stream(req, true, line("ADDED", pool("a", 50, `"10.0.0.0/16"`)), line("ADDED", pool("b", 60, `"10.1.0.0/16"`)), bookmark(70, true))
			case initial(req):
				return s.stream(req, false, line("ADDED", pool("a", 40, `"10.2.0.0/16"`)), bookmark(45, true))
			case !watching(req):
				return answer(http.StatusOK, page1(45))
			}
			return answer(http.StatusGatewayTimeout, refusal(504, "Timeout", "Too large resource version: 70, current: 45"))
		}
		ch := watchPools(t, s)
		want(t, "the first state", ch, "70[a@50 b@60] synced, 70[] outage")
		later(time.Minute)
		want(t, "the state before it", ch, "70[a@40 -b] synced")
	})
}

// TestStateOfAReplicaBehind: the history of a watch is gone, and another server, which has not come
// so far, tells the state. What was made since then is not told as deleted: the state is read
// again until a server is as far, or all say so for so long that they were restored.
func TestStateOfAReplicaBehind(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		lists  bool // the server does not stream the state
		behind int  // how often the state is an old one
		told   string
	}{
		"it streams": {false, 3, "80[c@80]"},
		"it lists":   {true, 3, "80[c@80]"},
		"all are":    {false, 100, "70[-b]"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				s, states := &script{}, 0
				state := func(req *http.Request, rev int, pools ...string) *http.Response {
					if tt.lists {
						return answer(http.StatusOK, page1(rev, pools...))
					}
					var lines []string
					for _, p := range pools {
						lines = append(lines, line("ADDED", p))
					}
					return s.stream(req, false, append(lines, bookmark(rev, true))...)
				}
				a, b := pool("a", 50, `"10.0.0.0/16"`), pool("b", 60, `"10.1.0.0/16"`)
				s.say = func(_ int, req *http.Request) *http.Response {
					switch q := req.URL.Query(); {
					case tt.lists && initial(req):
						return answer(http.StatusUnprocessableEntity, refusal(422, "Invalid", "sendInitialEvents is forbidden"))
					case tt.lists && watching(req) && q.Get("resourceVersion") == "70" && states == 1, !tt.lists && !initial(req) && states == 1:
						return answer(http.StatusGone, refusal(410, "Expired", "too old resource version"))
					case !tt.lists && !initial(req), tt.lists && watching(req):
						return s.stream(req, false)
					}
					switch states++; {
					case states == 1 && tt.lists:
						return state(req, 70, a, b)
					case states == 1: // and the watch ends
						return s.stream(req, true, line("ADDED", a), line("ADDED", b), bookmark(70, true))
					case states <= 1+tt.behind:
						return state(req, 55, a)
					}
					return state(req, 80, a, b, pool("c", 80, `"10.2.0.0/16"`))
				}
				ch := watchPools(t, s)
				var all []store.Batch
				for range 60 {
					all = append(all, collect(ch)...)
					later(time.Second)
				}
				if got := told(all); !strings.HasPrefix(got, "70[a@50 b@60] synced") || !strings.Contains(got, tt.told) || tt.behind < 100 && strings.Contains(got, "-b") {
					t.Errorf("told %q, with %q", got, tt.told)
				}
			})
		})
	}
}

// TestSilence: a watch that says nothing for minutes, not even by a bookmark, is
// begun anew from where it was.
func TestSilence(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := &script{}
		s.say = func(n int, req *http.Request) *http.Response {
			if n == 0 {
				return s.stream(req, false, bookmark(7, true))
			}
			if rv := req.URL.Query().Get("resourceVersion"); rv != "7" {
				t.Errorf("the watch goes on at %q", rv)
			}
			return s.stream(req, false, line("ADDED", pool("a", 8, `"10.0.0.0/16"`)))
		}
		ch := watchPools(t, s)
		want(t, "the state", ch, "7[] synced")
		later(silence + time.Second)
		want(t, "after the silence", ch, "8[a@8]")
	})
}

// TestUndecodableObject: one that cannot be read is reported, stops nothing, and
// is known again when it can.
func TestUndecodableObject(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := &script{}
		more := make(chan struct{})
		s.say = func(n int, req *http.Request) *http.Response {
			if initial(req) {
				return s.stream(req, true, line("ADDED", pool("a", 5, `"10.0.0.0/16"`)), line("ADDED", pool("b", 6, `[1]`)), bookmark(7, true))
			}
			if n == 1 {
				<-more
				return s.stream(req, false, line("MODIFIED", pool("a", 8, `5`)), line("MODIFIED", pool("b", 9, `"10.1.0.0/16"`)), line("DELETED", pool("a", 10, `5`)))
			}
			return s.stream(req, false)
		}
		ch := watchPools(t, s)
		want(t, "the state", ch, "7[a@5 !b] synced")
		close(more)
		got := told(collect(ch))
		for _, part := range []string{"b@9", "-a"} {
			if !strings.Contains(got, part) {
				t.Errorf("told %q", got)
			}
		}
	})
}

// TestForbidden: an outage for want of a right names the verb and the resource.
func TestForbidden(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := &script{}
		s.say = func(n int, req *http.Request) *http.Response {
			return answer(http.StatusForbidden, refusal(403, "Forbidden", `ippools.projectcalico.org is forbidden`))
		}
		ch := watchPools(t, s)
		b := <-ch
		if !errors.Is(b.Err, store.ErrUnavailable) || !strings.Contains(b.Err.Error(), "lacks the right to watch it") || b.Synced {
			t.Errorf("got %+v", b)
		}
	})
}

// TestWritesAreNotRepeated: what may have been done is not done again by itself;
// what was refused before it was done is.
func TestWritesAreNotRepeated(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name  string
		first *http.Response
		posts int
		err   error
	}{
		{"the server fails", answer(http.StatusInternalServerError, refusal(500, "InternalError", "oops")), 1, store.ErrUnavailable},
		{"the server is busy", answer(http.StatusTooManyRequests, refusal(429, "TooManyRequests", "wait")), 2, nil},
	} {
		synctest.Test(t, func(t *testing.T) {
			posts := 0
			s := &script{}
			s.say = func(n int, req *http.Request) *http.Response {
				if req.Method != http.MethodPost {
					return answer(http.StatusNotFound, refusal(404, "NotFound", "no"))
				}
				if posts++; posts == 1 {
					return tt.first
				}
				return answer(http.StatusCreated, pool("a", 5, `"10.0.0.0/16"`))
			}
			p := store.New(store.KindIPPool)
			store.Meta(p).Name = "a"
			_, err := store.Create(t.Context(), s.open(t), p)
			if posts != tt.posts || !errors.Is(err, tt.err) {
				t.Errorf("%s: %d requests, %v", tt.name, posts, err)
			}
		})
	}
}

// TestResumes: a watch goes on from what an earlier process knew. Nothing is read
// again, the state is told when all changes since have come, and of another cluster
// nothing is taken over.
func TestResumes(t *testing.T) {
	t.Parallel()
	const pools = "ippools.projectcalico.org"
	known := func(cluster store.Revision) store.Known {
		key := func(name string) store.Key { return store.ResourceKey(store.KindIPPool, name) }
		raw := func(name string) []byte {
			return fmt.Appendf(nil, `{"kind":"IPPool","apiVersion":"projectcalico.org/v3","metadata":{"name":%q},"spec":{"cidr":"10.0.0.0/16"}}`, name)
		}
		return store.Known{
			Kinds: []store.Kind{store.KindIPPool}, Places: map[string]store.Revision{pools: 7, clusterPlace: cluster},
			Objects: []store.Object{{Key: key("a"), Revision: 5, Raw: raw("a")}, {Key: key("b"), Revision: 6, Raw: raw("b")}, {Key: key("c"), Revision: 7, Raw: raw("c")}},
		}
	}
	for _, tt := range []struct {
		name    string
		cluster store.Revision
		at      int  // how far the server says that it is
		gone    bool // the server has the changes no more
		told    string
		read    int // how often the state was asked for
	}{
		{"it goes on", 42, 10, false, "10[a@5 b@9 d@10] synced", 0},
		{"nothing was written meanwhile, so there is no bookmark", 42, 7, false, "7[a@5 b@6 c@7] synced", 0},
		{"the changes are gone", 42, 10, true, "20[x@20] synced", 1},
		{"another cluster", 41, 10, false, "20[x@20] synced", 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				s, read := &script{}, 0
				s.say = func(_ int, req *http.Request) *http.Response {
					switch q := req.URL.Query(); {
					case initial(req):
						read++
						return s.stream(req, false, line("ADDED", pool("x", 20, `"10.9.0.0/16"`)), bookmark(20, true))
					case q.Get("watch") == "": // the server is asked how far it is
						return answer(http.StatusOK, page1(tt.at))
					case tt.gone:
						return answer(http.StatusGone, refusal(410, "Expired", "too old resource version"))
					case q.Get("resourceVersion") != "7", tt.at == 7:
						return s.stream(req, false)
					}
					return s.stream(req, false,
						line("MODIFIED", pool("b", 9, `"10.1.0.0/16"`)), line("DELETED", pool("c", 10, `"10.0.0.0/16"`)), line("ADDED", pool("d", 10, `"10.2.0.0/16"`)), bookmark(10, false))
				}
				st := s.open(t)
				st.id = 42
				ctx, cancel := context.WithCancel(t.Context())
				ch := st.WatchFrom(ctx, known(tt.cluster), store.KindIPPool)
				later(time.Second)
				got := collect(ch)
				if text := told(got); text != tt.told {
					t.Fatalf("told %q, want %q", text, tt.told)
				}
				if last := got[len(got)-1].Places; last[pools] != got[len(got)-1].Revision || last[clusterPlace] != 42 {
					t.Errorf("places %v", last)
				}
				if read != tt.read {
					t.Errorf("the state was read %d times, want %d", read, tt.read)
				}
				cancel()
				for range ch { //nolint:revive // until it ends
				}
			})
		})
	}
}

// TestResumesWithoutProgress: a server on an etcd that does not say how far it is, as Debian's 3.4, sends
// no bookmark where nothing of the resource was written. A watch that goes on, after an outage or from
// the disk, would never be known to have told all: the state is read.
func TestResumesWithoutProgress(t *testing.T) {
	t.Parallel()
	const pools = "ippools.projectcalico.org"
	a := pool("a", 5, `"10.0.0.0/16"`)
	for name, first := range map[string]func(st *Store, ctx context.Context) <-chan store.Batch{
		"after an outage": func(st *Store, ctx context.Context) <-chan store.Batch { return st.Watch(ctx, store.KindIPPool) },
		"from the disk": func(st *Store, ctx context.Context) <-chan store.Batch {
			return st.WatchFrom(ctx, store.Known{
				Kinds: []store.Kind{store.KindIPPool}, Places: map[string]store.Revision{pools: 7, clusterPlace: 42},
				Objects: []store.Object{{Key: store.ResourceKey(store.KindIPPool, "a"), Revision: 5, Raw: []byte(a)}},
			}, store.KindIPPool)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				var down atomic.Bool
				s, rev := &script{}, 7
				s.say = func(_ int, req *http.Request) *http.Response {
					switch {
					case down.Load():
						return nil
					case initial(req):
						return s.stream(req, true, line("ERROR", refusal(500, "InternalError", "the required storage feature RequestWatchProgress is disabled")))
					case !watching(req):
						rev++ // others write other things
						return answer(http.StatusOK, page1(rev, a))
					}
					resp, tell := piped(req)
					keep, err := time.ParseDuration(req.URL.Query().Get("timeoutSeconds") + "s")
					if err != nil {
						t.Error(err)
					}
					time.AfterFunc(min(keep, 20*time.Second), func() { tell("") })
					return resp
				}
				st := s.open(t)
				st.id = 42
				ctx, cancel := context.WithCancel(t.Context())
				t.Cleanup(cancel)
				ch := first(st, ctx)
				if name == "after an outage" {
					later(time.Second)
					_ = collect(ch)
					down.Store(true)
					later(40 * time.Second)
					if got := told(collect(ch)); !strings.HasSuffix(got, "outage") {
						t.Fatalf("told %q in an outage", got)
					}
					down.Store(false)
				}
				later(20 * time.Second)
				if got := told(collect(ch)); !strings.HasSuffix(got, "synced") {
					t.Errorf("told %q", got)
				}
			})
		})
	}
}

// TestStateWithPlaces: a state is told with how far each watch is, whoever waits for it: a daemon
// that ends before the next batch goes on from there.
func TestStateWithPlaces(t *testing.T) {
	t.Parallel()
	const parts = 64
	for range 200 {
		feed := backend.NewFeed([]store.Kind{store.KindIPPool})
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		out := make(chan store.Batch)
		running.Go(func() { feed.Run(ctx, out) })
		m := &merger{feed: feed, cluster: 42}
		for i := range parts {
			m.parts = append(m.parts, &part{source: convert.Source{Kind: store.KindIPPool}, fields: fmt.Sprint("i=", i)})
		}
		running.Go(func() {
			for _, p := range m.parts {
				m.state(p, 7, nil)
			}
		})
		b := <-out
		cancel()
		running.Wait()
		if !b.Synced || len(b.Places) != parts+1 {
			t.Fatalf("synced %v with %d places, want %d", b.Synced, len(b.Places), parts+1)
		}
	}
}

// TestOneRightIsMissing: a kind that this user may not read is withheld, with the verb,
// the resource and the cure; the others are told. Once it may, all is told. Of a kind
// that an earlier process knew, what that knew is told.
func TestOneRightIsMissing(t *testing.T) {
	t.Parallel()
	tier := `{"kind":"Tier","apiVersion":"projectcalico.org/v3","metadata":{"name":"t","resourceVersion":"6"},"spec":{}}`
	key := store.ResourceKey(store.KindTier, "t")
	known := store.Known{
		Kinds: []store.Kind{store.KindTier}, Places: map[string]store.Revision{"tiers.projectcalico.org": 6, clusterPlace: 42},
		Objects: []store.Object{{Key: key, Revision: 6, Raw: []byte(`{"kind":"Tier","apiVersion":"projectcalico.org/v3","metadata":{"name":"t"},"spec":{}}`)}},
	}
	for _, tt := range []struct {
		name          string
		from          store.Known
		told, granted string
	}{
		{"nothing was known", store.Known{}, "7[a@5] synced", "9[t@6] synced"},
		{"it was known", known, "7[a@5 t@6] synced", "7[] synced"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				s := &script{}
				var may atomic.Bool
				s.say = func(_ int, req *http.Request) *http.Response {
					switch {
					case !strings.HasSuffix(req.URL.Path, "/tiers"):
						return s.stream(req, false, line("ADDED", pool("a", 5, `"10.0.0.0/16"`)), bookmark(7, true))
					case !may.Load():
						return answer(http.StatusForbidden, refusal(403, "Forbidden", `tiers.projectcalico.org is forbidden`))
					case !watching(req): // it is asked how far it is
						return answer(http.StatusOK, page1(9))
					case initial(req):
						return s.stream(req, false, line("ADDED", tier), bookmark(9, true))
					}
					return s.stream(req, false, bookmark(9, false))
				}
				st := s.open(t)
				st.id = 42
				ctx, cancel := context.WithCancel(t.Context())
				ch := st.WatchFrom(ctx, tt.from, store.KindIPPool, store.KindTier)
				// all returns what is told of, in one.
				all := func() (b store.Batch) {
					for _, x := range collect(ch) {
						x.Events, x.Synced = append(b.Events, x.Events...), b.Synced || x.Synced
						if b = x; b.Err != nil {
							t.Errorf("an outage is told: %v", b.Err)
						}
					}
					return b
				}
				b := all()
				if got := told([]store.Batch{b}); got != tt.told {
					t.Errorf("told %q, want %q", got, tt.told)
				}
				w, ok := b.Withheld[store.KindTier]
				if len(b.Withheld) != 1 || !ok || w.Known != (len(tt.from.Kinds) > 0) {
					t.Errorf("withheld is %v", b.Withheld)
				} else if text := w.Err.Error(); !strings.Contains(text, "tiers.projectcalico.org is forbidden") || !strings.Contains(text, "the right to watch it") || !strings.Contains(text, "configs/kubernetes/base/account.yaml") {
					t.Errorf("the reason is %q", text)
				}
				later(time.Minute)
				if b := all(); b.Synced || len(b.Events) > 0 {
					t.Errorf("without the right told %q", told([]store.Batch{b}))
				}
				may.Store(true)
				later(time.Minute)
				b = all()
				if got := told([]store.Batch{b}); got != tt.granted {
					t.Errorf("with the right told %q, want %q", got, tt.granted)
				}
				if len(b.Withheld) != 0 {
					t.Errorf("still withheld: %v", b.Withheld)
				}
				cancel()
				for range ch { //nolint:revive // until it ends
				}
			})
		})
	}
}
