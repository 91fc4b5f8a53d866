package kube

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/store"
)

// manyPods is an API server with pods of which it tells those that a field selector selects, from
// any revision that it has not forgotten.
type manyPods struct {
	script
	mu        sync.Mutex
	lines     []podLine
	forgotten int
	asked     []string // of each watch: the node's or the others', and from where
	more      chan struct{}
}

type podLine struct {
	rev             int
	kind, node, obj string
}

func newManyPods() *manyPods {
	s := &manyPods{more: make(chan struct{})}
	s.say = func(_ int, req *http.Request) *http.Response {
		if !watching(req) {
			return answer(http.StatusOK, page1(s.rev()))
		}
		return s.watch(req)
	}
	return s
}

func (s *manyPods) rev() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.lines) == 0 {
		return 1
	}
	return s.lines[len(s.lines)-1].rev
}

// write has the server tell that a pod was written, or with kind DELETED is gone.
func (s *manyPods) write(rev int, kind, node, name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lines = append(s.lines, podLine{rev, kind, node, fmt.Sprintf(`{"kind":"Pod","apiVersion":"v1","metadata":{"name":%q,"namespace":"n","resourceVersion":"%d","annotations":{"cni.projectcalico.org/podIP":"10.0.0.1/32"}},"spec":{"nodeName":%q}}`, name, rev, node)})
	close(s.more)
	s.more = make(chan struct{})
}

func (s *manyPods) watch(req *http.Request) *http.Response {
	q := req.URL.Query()
	selects, who := func(string) bool { return true }, "all"
	switch f := q.Get("fieldSelector"); f {
	case "spec.nodeName=me":
		selects, who = func(n string) bool { return n == "me" }, "own"
	case "spec.nodeName!=me,spec.nodeName!=":
		selects, who = func(n string) bool { return n != "me" && n != "" }, "others"
	}
	at := 0
	fmt.Sscan(q.Get("resourceVersion"), &at) //nolint:errcheck // empty: from the state on
	s.mu.Lock()
	s.asked = append(s.asked, fmt.Sprintf("%s from %d", who, at))
	forgotten := !initial(req) && at < s.forgotten
	s.mu.Unlock()
	if forgotten {
		return answer(http.StatusGone, refusal(410, "Expired", "too old resource version"))
	}
	resp, tell := piped(req)
	s.ended.Go(func() {
		end := time.After(time.Hour)
		if n := 0; q.Get("timeoutSeconds") != "" {
			fmt.Sscan(q.Get("timeoutSeconds"), &n) //nolint:errcheck // it is a number
			end = time.After(time.Duration(n)*time.Second - 2*time.Second)
		}
		defer tell("")
		if initial(req) {
			s.mu.Lock()
			last, state := 1, map[string]podLine{}
			for _, l := range s.lines {
				if last = l.rev; selects(l.node) {
					name := l.obj[strings.Index(l.obj, `"name":`)+8:]
					name = name[:strings.Index(name, `"`)]
					if state[name] = l; l.kind == "DELETED" {
						delete(state, name)
					}
				}
			}
			s.mu.Unlock()
			for _, l := range s.lines {
				for _, is := range state {
					if is == l {
						tell(line("ADDED", l.obj))
					}
				}
			}
			tell(bookmark(last, true))
			at = last
		}
		for {
			s.mu.Lock()
			more, now := s.more, 1
			var news []string
			for _, l := range s.lines {
				if now = l.rev; l.rev > at && selects(l.node) {
					news = append(news, line(l.kind, l.obj))
				}
			}
			at = max(at, now)
			s.mu.Unlock()
			for _, n := range news {
				tell(n)
			}
			select {
			case <-more:
			case <-end:
				tell(bookmark(at, false))
				return
			case <-req.Context().Done():
				return
			}
		}
	})
	return resp
}

func (s *manyPods) watches() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := strings.Join(s.asked, ", ")
	s.asked = nil
	return out
}

// follow makes a watch of the node's pods, and returns what tells what came of it since.
func (s *manyPods) follow(t *testing.T, others *store.Demand, from store.Known) (*Store, func() (string, store.Batch)) {
	t.Helper()
	st := s.script.open(t)
	st.id = 42
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	ch := st.WatchNode(ctx, "me", others, from, store.KindWorkloadEndpoint)
	var last store.Batch
	return st, func() (string, store.Batch) {
		t.Helper()
		later(20 * time.Second)
		var out []string
		for _, b := range collect(ch) {
			for _, e := range b.Events {
				sign := "+"
				if e.Deleted() {
					sign = "-"
				}
				out = append(out, sign+strings.TrimSuffix(e.Key.Name, "-eth0")+fmt.Sprintf("@%d", e.Object.Revision))
				if e.Deleted() {
					out[len(out)-1] = sign + strings.TrimSuffix(e.Key.Name, "-eth0")
				}
			}
			if b.Synced {
				out = append(out, "synced")
			}
			if b.Err != nil {
				out = append(out, "outage")
			}
			if b.OwnOnly != last.OwnOnly {
				out = append(out, map[bool]string{true: "own only", false: "all"}[b.OwnOnly])
			}
			last = b
		}
		return strings.Join(out, " "), last
	}
}

// TestWatchNode: of pods the server is asked for the node's, and for the others while they are in
// demand. What others were told stays when they are not any more; when they are again, the difference
// is told, from where the watch was, before they count as known. Of a server that has forgotten that
// the state is read.
func TestWatchNode(t *testing.T) {
	t.Parallel()
	for _, forgets := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			s, others := newManyPods(), &store.Demand{}
			s.write(2, "ADDED", "me", "a")
			s.write(3, "ADDED", "you", "b")
			s.write(4, "ADDED", "you", "c")
			s.write(5, "ADDED", "", "waits")
			st, told := s.follow(t, others, store.Known{})
			is := func(what, events, watches string) (b store.Batch) {
				t.Helper()
				got, b := told()
				if got != events {
					t.Errorf("forgets=%v: %s: told %q, want %q", forgets, what, got, events)
				}
				if got := s.watches(); got != watches {
					t.Errorf("forgets=%v: %s: watches %q, want %q", forgets, what, got, watches)
				}
				return b
			}
			is("the node's", "+me-k8s-a@2 synced own only", "own from 0")
			s.write(6, "ADDED", "you", "d")
			is("another's pod", "", "")
			others.Set(true)
			b := is("in demand", "+you-k8s-b@3 +you-k8s-c@4 +you-k8s-d@6 all", "others from 0")
			if at := b.Places["pods with spec.nodeName!=me,spec.nodeName!="]; at != 6 {
				t.Errorf("places %v", b.Places)
			}
			s.write(7, "MODIFIED", "you", "d")
			is("a change of another's", "+you-k8s-d@7", "")
			s.write(8, "MODIFIED", "me", "a")
			is("a change of the node's", "+me-k8s-a@8", "")
			open := func() (out []string) {
				for _, w := range st.Watches() {
					out = append(out, fmt.Sprintf("%s: %d open, %d asked for, %d with all", w.Watch, w.Open, w.Requests, w.States))
				}
				return out
			}
			if diff := cmp.Diff([]string{"pods with spec.nodeName!=me,spec.nodeName!=: 1 open, 1 asked for, 1 with all", "pods with spec.nodeName=me: 1 open, 1 asked for, 1 with all"}, open()); diff != "" {
				t.Errorf("watches (-want +got):\n%s", diff)
			}
			others.Set(false)
			b = is("not in demand any more", "own only", "")
			if len(b.Places) != 2 {
				t.Errorf("places %v", b.Places)
			}
			if got := open()[0]; !strings.Contains(got, ": 0 open") {
				t.Error(got)
			}
			s.write(9, "DELETED", "you", "b")
			s.write(10, "MODIFIED", "me", "a")
			s.write(11, "ADDED", "you", "e")
			is("meanwhile", "+me-k8s-a@10", "")
			if forgets {
				s.forgotten = 9
				others.Set(true)
				is("in demand again", "+you-k8s-e@11 -you-k8s-b all", "others from 7, others from 0")
				return
			}
			others.Set(true)
			is("in demand again", "-you-k8s-b +you-k8s-e@11 all", "others from 7, others from 11")
		})
	}
}

// TestWatchNodeResumes: a restart goes on from the disk with the node's pods and with the others,
// where these were followed.
func TestWatchNodeResumes(t *testing.T) {
	t.Parallel()
	const own, all = "pods with spec.nodeName=me", "pods with spec.nodeName!=me,spec.nodeName!="
	object := func(node, name string, rev store.Revision) store.Object {
		return store.Object{
			Key: store.Key{Kind: store.KindWorkloadEndpoint, Namespace: "n", Name: node + "-k8s-" + name + "-eth0"}, Revision: rev,
			Raw: fmt.Appendf(nil, `{"kind":"WorkloadEndpoint","apiVersion":"projectcalico.org/v3","metadata":{"name":%q,"namespace":"n"},"spec":{"node":%q}}`, node+"-k8s-"+name+"-eth0", node),
		}
	}
	for _, tt := range []struct {
		name          string
		others        bool // in demand
		ownOnly       bool // of the disk
		places        map[string]store.Revision
		told, watches string
	}{
		{"both", true, false, map[string]store.Revision{own: 4, all: 5}, "+me-k8s-a@3 +you-k8s-c@6 synced", "own from 4, others from 5"},
		{"the node's alone", false, true, map[string]store.Revision{own: 4}, "+me-k8s-a@3 synced own only", "own from 4"},
		{"others were told in part", true, true, map[string]store.Revision{own: 4, all: 5}, "+me-k8s-a@3 +you-k8s-c@6 synced", "own from 4, others from 0"},
		{"others are in demand that were not", true, true, map[string]store.Revision{own: 4}, "+me-k8s-a@3 +you-k8s-c@6 synced", "own from 4, others from 0"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				s, others := newManyPods(), &store.Demand{}
				others.Set(tt.others)
				s.write(3, "ADDED", "me", "a")
				s.write(5, "DELETED", "you", "x")
				s.write(6, "DELETED", "you", "b")
				s.write(6, "ADDED", "you", "c")
				tt.places[clusterPlace] = 42
				_, told := s.follow(t, others, store.Known{
					Kinds: []store.Kind{store.KindWorkloadEndpoint}, Places: tt.places, OwnOnly: tt.ownOnly,
					Objects: []store.Object{object("me", "a", 3), object("you", "b", 4)},
				})
				got, _ := told()
				if got != tt.told {
					t.Errorf("told %q, want %q", got, tt.told)
				}
				w := s.watches()
				for want := range strings.SplitSeq(tt.watches, ", ") {
					if !strings.Contains(w, want) {
						t.Errorf("watches %q, want %q", w, tt.watches)
					}
				}
				if strings.Contains(tt.watches, "from 0") != strings.Contains(w, "from 0") || strings.Contains(w, "all from") {
					t.Errorf("watches %q, want %q", w, tt.watches)
				}
			})
		})
	}
}
