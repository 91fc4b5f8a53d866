package reconcile

import (
	"errors"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/routerd/routerd/dataplane"
)

func genSource() *rapid.Generator[dataplane.Source] {
	return rapid.SampledFrom([]dataplane.Source{first, second})
}

func genKey() *rapid.Generator[string] {
	return rapid.SampledFrom([]string{"a", "b", "c", "d", "e", "f"})
}

func genSet() *rapid.Generator[map[string]int] {
	return rapid.MapOfN(genKey(), rapid.IntRange(1, 3), 0, 6)
}

// model is the plain statement of what a tracker should bring about.
type model struct {
	wantedBy map[dataplane.Source]map[string]int
	wanted   map[string]bool // ever, in this run
	old      map[string]int  // there before
	synced   map[dataplane.Source]bool
}

func newModel(old map[string]int) *model {
	return &model{
		wantedBy: map[dataplane.Source]map[string]int{first: {}, second: {}},
		wanted:   map[string]bool{},
		old:      old,
		synced:   map[dataplane.Source]bool{},
	}
}

func (m *model) replace(src dataplane.Source, want map[string]int) {
	m.wantedBy[src] = maps.Clone(want)
	m.note(want)
}

func (m *model) update(src dataplane.Source, put map[string]int, del []string) {
	for _, k := range del {
		delete(m.wantedBy[src], k)
	}
	maps.Copy(m.wantedBy[src], put)
	m.note(put)
}

func (m *model) note(want map[string]int) {
	for k := range want {
		m.wanted[k] = true
	}
}

// expect is what should be there in the end.
func (m *model) expect() map[string]int {
	out := map[string]int{}
	for k, v := range m.old {
		if !m.wanted[k] && !(m.synced[first] && m.synced[second]) {
			out[k] = v
		}
	}
	maps.Copy(out, m.wantedBy[second])
	maps.Copy(out, m.wantedBy[first])
	return out
}

// actions are what may happen to a tracker, and to its model.
func actions(w *world, m *model, revs *[]dataplane.Revision) map[string]func(*rapid.T) {
	return map[string]func(*rapid.T){
		"replace": func(t *rapid.T) {
			src, want := genSource().Draw(t, "source"), genSet().Draw(t, "want")
			m.replace(src, want)
			*revs = append(*revs, w.t.Replace(src, maps.All(want)))
		},
		"update": func(t *rapid.T) {
			src, put := genSource().Draw(t, "source"), genSet().Draw(t, "put")
			del := rapid.SliceOf(genKey()).Draw(t, "del")
			m.update(src, put, del)
			*revs = append(*revs, w.update(src, put, del...))
		},
		"synced": func(t *rapid.T) {
			src := genSource().Draw(t, "source")
			m.synced[src] = true
			w.t.Synced(src)
		},
		"turn with refusals": func(t *rapid.T) {
			outcomes := rapid.SliceOfN(rapid.SampledFrom([]Outcome{Succeeded, Refused, Blocked, Postponed, Lost}), 1, 4).Draw(t, "outcomes")
			i := 0
			w.fail = func(op Op[string, int]) (Outcome, error) {
				o := outcomes[i%len(outcomes)]
				i++
				switch {
				case o == Succeeded:
					return o, nil
				case o == Lost:
					delete(w.there, op.Key)
					delete(m.old, op.Key)
				}
				return o, errors.New("no")
			}
			w.turn()
			w.fail = nil
		},
		"foreign hand": func(t *rapid.T) {
			k, v := genKey().Draw(t, "key"), rapid.IntRange(0, 3).Draw(t, "value")
			delete(m.old, k)
			if v == 0 {
				delete(w.there, k)
				w.t.LoseHave(k)
			} else {
				w.there[k] = v
				m.old[k] = v
				w.t.SetHave(k, v)
			}
			// What appears under a key that was never wanted is a leftover.
		},
		"foreign hand unseen until the listing": func(t *rapid.T) {
			k := genKey().Draw(t, "key")
			delete(m.old, k)
			delete(w.there, k)
			w.t.ReplaceHave(maps.All(w.there))
		},
		"time": func(t *rapid.T) {
			w.clock.now = w.clock.now.Add(time.Duration(rapid.IntRange(0, 100_000).Draw(t, "ms")) * time.Millisecond)
		},
		"": func(t *rapid.T) {
			checkUsers(t, w.t)
			for _, e := range w.t.table.All() {
				k := w.t.key(e)
				if e.done() != (e.wanted() && e.exists() && e.want == e.have || !e.wanted() && (!e.exists() || !e.ours() && !w.t.swept)) {
					t.Fatalf("%s: done is %v of %+v", k, e.done(), e)
				}
			}
		},
	}
}

// TestTrackerReachesTheModel does random things to a tracker, with refusals,
// foreign hands and time in between, and compares the end with the model.
func TestTrackerReachesTheModel(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld()
		w.there = genSet().Draw(t, "old")
		m := newModel(maps.Clone(w.there))
		w.t.ReplaceHave(maps.All(w.there))
		var revs []dataplane.Revision
		t.Repeat(actions(w, m, &revs))
		w.t.RetryWaiting()
		w.rest()
		// A key that a foreign hand brought back after it was withdrawn may stay
		// until the sweep or go at once, as its history was forgotten or not.
		want := m.expect()
		for k := range m.old {
			_, wanted := want[k]
			if _, there := w.there[k]; m.wanted[k] && !wanted && there && !w.t.swept {
				want[k] = w.there[k]
			}
		}
		if diff := cmp.Diff(want, w.there); diff != "" {
			t.Fatalf("the end (-want +got):\n%s", diff)
		}
		before := w.done
		w.t.ReplaceHave(maps.All(w.there))
		w.rest()
		if w.done != before {
			t.Fatalf("%d operations on a world that is as wanted", w.done-before)
		}
		for _, rev := range revs {
			if err := w.t.Wait(t.Context(), rev); err != nil {
				t.Fatalf("wait for %d: %v", rev, err)
			}
		}
		if len(w.t.revisions.groups) != 0 || len(w.t.waiting) != 0 {
			t.Fatalf("left behind: %d groups, %d waiting", len(w.t.revisions.groups), len(w.t.waiting))
		}
	})
}

// checkUsers holds that what entries share has the users that are counted, and that what
// few of them have belongs to one.
func checkUsers(t *rapid.T, tr *Tracker[string, int]) {
	values, keys, failing, contested := map[uint32]int{}, 0, 0, 0
	for r, e := range tr.table.All() {
		if tr.find(tr.key(e)) != e || tr.table.Find(e.key) != r {
			t.Fatalf("%s is not found", tr.key(e))
		}
		if e.key[len(e.key)-1] == numbered {
			keys++
		}
		values[e.want]++
		values[e.have]++
		for _, l := range tr.losers[e] {
			values[l.value]++
		}
		if e.failing() {
			failing++
		}
		if e.contested() {
			contested++
		}
		if e.failing() != (tr.failures[e] != nil) || e.contested() != (len(tr.losers[e]) > 0) {
			t.Fatalf("%s fails %t, %v, and is contested %t by %v", tr.key(e), e.failing(), tr.failures[e], e.contested(), tr.losers[e])
		}
	}
	if failing != len(tr.failures) || contested != len(tr.losers) {
		t.Fatalf("%d failures of %d entries, %d losers of %d", len(tr.failures), failing, len(tr.losers), contested)
	}
	for id := range tr.keys.Len() {
		keys -= tr.keys.Users(id)
	}
	if keys != 0 {
		t.Fatalf("%d keys more than numbers", keys)
	}
	numbers := tr.values
	for id := uint32(1); id < numbers.Len(); id++ {
		if numbers.Users(id) != values[id] {
			t.Fatalf("value %v has %d users; counted %d", numbers.Value(id), numbers.Users(id), values[id])
		}
	}
}

// state is what can be seen of a tracker and its world, without times.
type state struct {
	There  map[string]int
	Wishes map[string][]dataplane.Source
	Want   map[string]int
}

func (w *world) state() state {
	s := state{There: maps.Clone(w.there), Wishes: map[string][]dataplane.Source{}, Want: map[string]int{}}
	for _, e := range w.t.table.All() {
		k := w.t.key(e)
		if !e.wanted() {
			continue
		}
		s.Want[k] = w.t.wants(e)
		s.Wishes[k] = append(s.Wishes[k], e.src)
		for _, l := range w.t.losers[e] {
			s.Wishes[k] = append(s.Wishes[k], l.src)
		}
	}
	return s
}

// TestReplaceEqualsUpdates brings two trackers to the same wantedBy, one by
// replacing sets, one by changing keys in random order.
func TestReplaceEqualsUpdates(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		a, b := newWorld(), newWorld()
		for _, w := range []*world{a, b} {
			w.t.Synced(first)
			w.t.Synced(second)
		}
		now := map[dataplane.Source]map[string]int{first: {}, second: {}}
		for range rapid.IntRange(1, 6).Draw(t, "states") {
			src, want := genSource().Draw(t, "source"), genSet().Draw(t, "want")
			a.t.Replace(src, maps.All(want))
			type step struct {
				key string
				put bool
			}
			var steps []step
			for k, v := range want {
				if old, ok := now[src][k]; !ok || old != v {
					steps = append(steps, step{k, true})
				}
			}
			for k := range now[src] {
				if _, ok := want[k]; !ok {
					steps = append(steps, step{k, false})
				}
			}
			slices.SortFunc(steps, func(x, y step) int { return int(x.key[0]) - int(y.key[0]) })
			for _, s := range rapid.Permutation(steps).Draw(t, "steps") {
				if s.put {
					b.update(src, map[string]int{s.key: want[s.key]})
				} else {
					b.update(src, nil, s.key)
				}
				if rapid.Bool().Draw(t, "turn") {
					b.turn()
				}
			}
			now[src] = want
			if rapid.Bool().Draw(t, "turn") {
				a.turn()
			}
		}
		a.rest()
		b.rest()
		if diff := cmp.Diff(a.state(), b.state()); diff != "" {
			t.Fatalf("replaced and updated (-replace +update):\n%s", diff)
		}
	})
}

// TestPathIndependence takes one list of states along several paths and asks
// for the same end.
func TestPathIndependence(t *testing.T) {
	t.Parallel()
	paths := map[string]func([]map[string]int) []map[string]int{
		"as it is": func(s []map[string]int) []map[string]int { return s },
		"last only": func(s []map[string]int) []map[string]int {
			return s[len(s)-1:]
		},
		"each twice": func(s []map[string]int) []map[string]int {
			var out []map[string]int
			for _, x := range s {
				out = append(out, x, x)
			}
			return out
		},
		"empty between": func(s []map[string]int) []map[string]int {
			var out []map[string]int
			for _, x := range s {
				out = append(out, map[string]int{}, x)
			}
			return out
		},
		"there and back": func(s []map[string]int) []map[string]int {
			back := slices.Clone(s)
			slices.Reverse(back)
			return append(append(slices.Clone(s), back...), s[len(s)-1])
		},
	}
	rapid.Check(t, func(t *rapid.T) {
		states := rapid.SliceOfN(genSet(), 1, 5).Draw(t, "states")
		old := genSet().Draw(t, "old")
		var want *state
		for _, name := range slices.Sorted(maps.Keys(paths)) {
			for _, turns := range []bool{false, true} {
				w := newWorld()
				w.there = maps.Clone(old)
				w.t.ReplaceHave(maps.All(w.there))
				for _, s := range paths[name](states) {
					w.t.Replace(second, maps.All(s))
					if turns {
						w.turn()
					}
				}
				w.t.Synced(first)
				w.t.Synced(second)
				w.rest()
				got := w.state()
				if want == nil {
					want = &got
				}
				if diff := cmp.Diff(*want, got); diff != "" {
					t.Fatalf("path %q, turns %v (-first +this):\n%s", name, turns, diff)
				}
			}
		}
	})
}
