package reconcile

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/routerd/routerd/dataplane"
)

const (
	first  dataplane.Source = 1
	second dataplane.Source = 2
)

// clock is a clock that tests move.
type clock struct{ now time.Time }

func (c *clock) Now() time.Time { return c.now }

func newTracker(c *clock) *Tracker[string, int] {
	return New(Config[string, int]{
		Sources: []dataplane.Source{first, second},
		Classes: 2,
		Class:   func(k string) int { return int(k[0]) % 2 },
		Now:     c.Now,
		Jitter:  func() float64 { return 0 },
		// Some keys are packed, as some of a kernel's are.
		Packing: Packing[string]{
			Pack: func(k string) (p Packed, ok bool) {
				copy(p[:], k)
				return p, k[0]%3 != 0
			},
			Unpack: func(p Packed) string { return string(bytes.TrimRight(p[:], "\x00")) },
		},
	})
}

// world is what a tracker works on: a kernel of strings and numbers.
type world struct {
	t     *Tracker[string, int]
	clock *clock
	there map[string]int
	// fail, when set, may refuse an operation.
	fail func(Op[string, int]) (Outcome, error)
	done int // operations that changed the world
}

func newWorld() *world {
	c := &clock{now: time.Unix(1_000_000, 0)}
	return &world{t: newTracker(c), clock: c, there: map[string]int{}}
}

// turn does all work that is due, as an owner's loop would.
func (w *world) turn() {
	for _, remove := range []bool{false, true} {
		for class := range 2 {
			ops := w.t.Due(class, remove, 1000)
			var results []Result[string, int]
			for _, op := range ops {
				results = append(results, w.try(op))
			}
			w.t.Report(results)
		}
	}
}

func (w *world) try(op Op[string, int]) Result[string, int] {
	if w.fail != nil {
		if o, err := w.fail(op); err != nil {
			return Result[string, int]{op, o, err}
		}
	}
	w.done++
	if op.Wanted {
		w.there[op.Key] = op.Want
	} else {
		delete(w.there, op.Key)
	}
	return Result[string, int]{Op: op}
}

// rest turns until nothing is due, however long the delays.
func (w *world) rest() {
	for range 100 {
		w.turn()
		if w.t.HasDue(false) || w.t.HasDue(true) {
			continue
		}
		next, ok := w.t.Next()
		if !ok {
			return
		}
		w.clock.now = next
	}
}

func (w *world) update(src dataplane.Source, put map[string]int, del ...string) dataplane.Revision {
	return w.t.Update(src, maps.All(put), slices.Values(del))
}

func TestBestSourceWins(t *testing.T) {
	t.Parallel()
	w := newWorld()
	w.update(second, map[string]int{"a": 2})
	w.rest()
	w.update(first, map[string]int{"a": 1})
	w.rest()
	if diff := cmp.Diff(map[string]int{"a": 1}, w.there); diff != "" {
		t.Errorf("with both (-want +got):\n%s", diff)
	}
	w.update(second, map[string]int{"a": 3})
	w.rest()
	if diff := cmp.Diff(map[string]int{"a": 1}, w.there); diff != "" {
		t.Errorf("after the loser changed its wish (-want +got):\n%s", diff)
	}
	w.update(first, nil, "a")
	w.rest()
	if diff := cmp.Diff(map[string]int{"a": 3}, w.there); diff != "" {
		t.Errorf("after the winner withdrew (-want +got):\n%s", diff)
	}
	if s, ok := w.t.Status("a"); !ok || s.Source != second || s.State != dataplane.Done {
		t.Errorf("status %+v, %v; want the second source's, done", s, ok)
	}
}

func TestLeftoversGoOnlyWhenAllAreSynced(t *testing.T) {
	t.Parallel()
	w := newWorld()
	w.there = map[string]int{"kept": 1, "orphan": 2, "withdrawn": 3}
	w.t.ReplaceHave(maps.All(w.there))
	if diff := cmp.Diff([]dataplane.Source{first, second}, w.t.Silent()); diff != "" {
		t.Errorf("silent at the start (-want +got):\n%s", diff)
	}
	w.update(second, map[string]int{"kept": 1, "withdrawn": 3})
	w.rest()
	if diff := cmp.Diff([]dataplane.Source{first}, w.t.Silent()); diff != "" {
		t.Errorf("silent after one spoke (-want +got):\n%s", diff)
	}
	if w.done != 0 {
		t.Errorf("%d operations on a world that was as wanted", w.done)
	}
	w.t.Synced(second)
	w.update(second, nil, "withdrawn")
	w.rest()
	if diff := cmp.Diff(map[string]int{"kept": 1, "orphan": 2}, w.there); diff != "" {
		t.Errorf("with one source synced (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]dataplane.Source{first}, w.t.Unsynced()); diff != "" {
		t.Errorf("unsynced (-want +got):\n%s", diff)
	}
	w.t.Synced(first)
	w.rest()
	if got := w.t.Silent(); got != nil {
		t.Errorf("silent after all are synced: %v", got)
	}
	if diff := cmp.Diff(map[string]int{"kept": 1}, w.there); diff != "" {
		t.Errorf("with all synced (-want +got):\n%s", diff)
	}
}

func TestRefusedKeyBacksOffAloneAndRecovers(t *testing.T) {
	t.Parallel()
	w := newWorld()
	refused := errors.New("no")
	tries := 0
	w.fail = func(op Op[string, int]) (Outcome, error) {
		if op.Key == "bad" {
			tries++
			return Refused, refused
		}
		return Succeeded, nil
	}
	w.update(first, map[string]int{"bad": 1, "good": 1})
	start := w.clock.now
	var delays []time.Duration
	for range 13 {
		w.turn()
		next, ok := w.t.Next()
		if !ok {
			t.Fatal("a refused key is not tried again")
		}
		delays = append(delays, next.Sub(w.clock.now))
		w.clock.now = next
	}
	want := []time.Duration{100, 200, 400, 800, 1600, 3200, 6400, 12800, 25600, 51200, 60000, 60000, 60000}
	for i := range want {
		want[i] *= time.Millisecond
	}
	if diff := cmp.Diff(want, delays); diff != "" {
		t.Errorf("delays (-want +got):\n%s", diff)
	}
	if w.there["good"] != 1 {
		t.Error("a bad key stopped a good one")
	}
	s, _ := w.t.Status("bad")
	if s.State != dataplane.Failed || s.Attempts != tries || !errors.Is(s.Err, refused) || !s.Since.Equal(start) {
		t.Errorf("status %+v; want failed since %v after %d tries", s, start, tries)
	}
	w.fail = nil
	w.turn()
	if s, _ := w.t.Status("bad"); s.State != dataplane.Done || s.Err != nil || s.Attempts != 0 {
		t.Errorf("status %+v; want done", s)
	}
}

func TestJitterStaysWithinAFifth(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		j := rapid.Float64Range(0, 0.999999).Draw(t, "jitter")
		n := rapid.IntRange(1, 1000).Draw(t, "attempt")
		tr := New(Config[string, int]{Sources: []dataplane.Source{first}, Jitter: func() float64 { return j }})
		d := tr.backoff(n)
		if d < 80*time.Millisecond || d > time.Minute {
			t.Errorf("try %d is delayed by %v", n, d)
		}
	})
}

func TestNewWishOrNamingAgainEndsTheDelay(t *testing.T) {
	t.Parallel()
	for name, again := range map[string]map[string]int{
		"new wish":  {"a": 2},
		"same wish": {"a": 1},
	} {
		w := newWorld()
		w.fail = func(Op[string, int]) (Outcome, error) { return Refused, errors.New("no") }
		w.update(first, map[string]int{"a": 1})
		w.turn()
		if w.t.HasDue(false) {
			t.Errorf("%s: a refused key is due at once", name)
		}
		w.fail = nil
		w.update(first, again)
		w.turn()
		if diff := cmp.Diff(again, w.there); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

func TestBlockedKeyWaitsForRetry(t *testing.T) {
	t.Parallel()
	w := newWorld()
	w.fail = func(Op[string, int]) (Outcome, error) { return Blocked, errors.New("waiting for b") }
	rev := w.update(first, map[string]int{"a": 1})
	w.turn()
	s, _ := w.t.Status("a")
	if s.State != dataplane.Pending || s.Err == nil || s.Attempts != 0 {
		t.Errorf("status %+v; want pending with a reason", s)
	}
	if _, ok := w.t.Next(); ok || w.t.HasDue(false) {
		t.Error("a blocked key is due")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	err := w.t.Wait(ctx, rev)
	if !errors.Is(err, context.Canceled) || !strings.Contains(fmt.Sprint(err), "waiting for b") {
		t.Errorf("wait: %v; want the context's error and the reason", err)
	}
	w.fail = nil
	w.t.Retry("a")
	w.turn()
	if err := w.t.Wait(t.Context(), rev); err != nil || w.there["a"] != 1 {
		t.Errorf("after the retry: %v, %v", err, w.there)
	}
}

// What is stuck is there, not as it should be, and not due.
func TestStuck(t *testing.T) {
	t.Parallel()
	w := newWorld()
	w.t.Synced(first)
	w.t.Synced(second)
	w.update(first, map[string]int{"a": 1, "c": 1, "e": 1, "g": 1, "b": 1, "same": 1})
	w.turn()
	w.fail = func(op Op[string, int]) (Outcome, error) {
		switch op.Key {
		case "a", "i-new", "b":
			return Refused, errors.New("no")
		case "c", "g":
			return Blocked, errors.New("waiting")
		}
		return Succeeded, nil
	}
	stuck := func() string {
		var out []string
		for _, o := range w.t.Stuck(1) {
			out = append(out, fmt.Sprint(o.Key, o.Have))
		}
		slices.Sort(out)
		return strings.Join(out, " ")
	}
	w.update(first, map[string]int{"a": 2, "c": 2, "e": 2, "i-new": 1, "b": 2}, "g")
	if got := stuck(); got != "" {
		t.Errorf("%q are stuck before they were tried", got)
	}
	w.turn()
	if got := stuck(); got != "a1 c1 g1" {
		t.Errorf("%q are stuck; want a1 c1 g1: e is done, b of another class, and i-new is not there", got)
	}
	w.fail = nil
	w.t.Retry("a", "c", "g")
	w.turn()
	if got := stuck(); got != "" {
		t.Errorf("%q are stuck; want none: all is done", got)
	}
}

func TestBetterSourcesComeFirst(t *testing.T) {
	t.Parallel()
	w := newWorld()
	w.update(second, map[string]int{"a": 1, "c": 1, "e": 1})
	w.update(first, map[string]int{"g": 1})
	ops := w.t.Due(1, false, 1)
	if len(ops) != 1 || ops[0].Key != "g" {
		t.Errorf("due %v; want the first source's", ops)
	}
	if ops := w.t.Due(0, false, 10); len(ops) != 0 {
		t.Errorf("due %v of a class without work", ops)
	}
}

func TestWishChangedWhileAtWork(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		change func(w *world)
		want   map[string]int
	}{
		"changed":             {func(w *world) { w.update(first, map[string]int{"a": 2}) }, map[string]int{"a": 2}},
		"withdrawn":           {func(w *world) { w.update(first, nil, "a") }, map[string]int{}},
		"withdrawn and again": {func(w *world) { w.update(first, nil, "a"); w.update(first, map[string]int{"a": 1}) }, map[string]int{"a": 1}},
	}
	for name, tt := range tests {
		w := newWorld()
		w.update(first, map[string]int{"a": 1})
		ops := w.t.Due(1, false, 10)
		tt.change(w)
		w.there["a"] = 1
		w.t.Report([]Result[string, int]{{Op: ops[0]}})
		w.rest()
		if diff := cmp.Diff(tt.want, w.there); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

func TestLostHaveIsDoneAgain(t *testing.T) {
	t.Parallel()
	w := newWorld()
	w.update(first, map[string]int{"a": 1, "b": 1})
	w.rest()
	delete(w.there, "a")
	if !w.t.LoseHave("a") || w.t.LoseHave("never") {
		t.Error("only a key that was as wanted can be lost")
	}
	w.there["b"] = 7
	if !w.t.SetHave("b", 7) {
		t.Error("a foreign change was not seen")
	}
	w.turn()
	if diff := cmp.Diff(map[string]int{"a": 1, "b": 1}, w.there); diff != "" {
		t.Errorf("put back (-want +got):\n%s", diff)
	}
	w.there = map[string]int{"b": 9, "c": 1}
	drift := w.t.ReplaceHave(maps.All(w.there))
	slices.Sort(drift)
	if diff := cmp.Diff([]string{"a", "b"}, drift); diff != "" {
		t.Errorf("drift (-want +got):\n%s", diff)
	}
	if got := w.t.LoseWhere(func(k string, _ int) bool { return k == "c" }); got != nil {
		t.Errorf("losing what nobody wants is reported: %v", got)
	}
}

// What comes before the sweep and nobody wants stays for now, and is reported.
func TestStrayWaitsForTheSweep(t *testing.T) {
	t.Parallel()
	w := newWorld()
	w.there = map[string]int{"old": 1}
	if drift := w.t.ReplaceHave(maps.All(w.there)); drift != nil {
		t.Errorf("what an earlier life left is drift: %v", drift)
	}
	w.update(first, map[string]int{"a": 1})
	w.rest()
	w.there["x"] = 1
	if !w.t.SetHave("x", 1) || w.t.SetHave("x", 2) || w.t.SetHave("old", 2) {
		t.Error("a stray is one when it comes, and only then")
	}
	w.there["y"] = 1
	if drift := w.t.ReplaceHave(maps.All(w.there)); !slices.Equal(drift, []string{"y"}) {
		t.Errorf("drift %v, want y", drift)
	}
	for k, want := range map[string]bool{"a": true, "x": false, "y": false, "old": false, "never": true} {
		if w.t.Settled(k) != want {
			t.Errorf("%s: settled is %v", k, !want)
		}
	}
	w.rest()
	if diff := cmp.Diff(map[string]int{"a": 1, "x": 1, "y": 1, "old": 1}, w.there); diff != "" {
		t.Errorf("before the sweep (-want +got):\n%s", diff)
	}
	w.t.Synced(first)
	w.t.Synced(second)
	w.rest()
	if diff := cmp.Diff(map[string]int{"a": 1}, w.there); diff != "" {
		t.Errorf("after the sweep (-want +got):\n%s", diff)
	}
	w.there["x"] = 1
	if !w.t.SetHave("x", 1) {
		t.Error("after the sweep a stray is not reported")
	}
}

func TestQuarrelIsDamped(t *testing.T) {
	t.Parallel()
	w := newWorld()
	w.update(first, map[string]int{"a": 1})
	w.rest()
	start := w.done
	for range 1000 {
		w.clock.now = w.clock.now.Add(10 * time.Millisecond)
		if w.there["a"] == 1 {
			delete(w.there, "a")
			w.t.LoseHave("a")
		}
		w.turn()
	}
	if n := w.done - start; n < CalmDrifts || n > CalmDrifts+8 {
		t.Errorf("put back %d times in ten seconds of quarrel", n)
	}
	w.rest()
	if w.there["a"] != 1 {
		t.Error("not put back when the quarrel ended")
	}
	w.clock.now = w.clock.now.Add(time.Hour)
	delete(w.there, "a")
	w.t.LoseHave("a")
	w.turn()
	if w.there["a"] != 1 {
		t.Error("a single loss after a long peace is not put back at once")
	}
}

func TestWait(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		w.fail = func(op Op[string, int]) (Outcome, error) {
			if op.Key == "bad" {
				return Refused, errors.New("no")
			}
			return Succeeded, nil
		}
		bad := w.update(first, map[string]int{"bad": 1})
		good := w.update(first, map[string]int{"good": 1})
		other := w.update(second, map[string]int{"other": 1})
		if !(bad < good && good < other) {
			t.Errorf("revisions do not grow: %d %d %d", bad, good, other)
		}
		errs := make([]error, 3)
		over := make([]bool, 3)
		for i, rev := range []dataplane.Revision{bad, good, other} {
			go func() {
				errs[i] = w.t.Wait(t.Context(), rev)
				over[i] = true
			}()
		}
		synctest.Wait()
		if over[0] || over[1] || over[2] {
			t.Error("a wait ended before anything was tried")
		}
		w.turn()
		synctest.Wait()
		if errs[0] == nil || !strings.Contains(errs[0].Error(), "bad: no") {
			t.Errorf("the wait for the bad key: %v", errs[0])
		}
		if !over[1] || errs[1] != nil || !over[2] || errs[2] != nil {
			t.Errorf("the waits for good keys: %v %v, %v %v", over[1], errs[1], over[2], errs[2])
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		err := w.t.Wait(ctx, w.update(first, nil, "good"))
		if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(fmt.Sprint(err), "not tried yet") {
			t.Errorf("the wait for a removal that nobody does: %v", err)
		}
	})
}

func TestWaitCountsErrorsItDoesNotName(t *testing.T) {
	t.Parallel()
	w := newWorld()
	w.fail = func(op Op[string, int]) (Outcome, error) { return Refused, errors.New("no") }
	put := map[string]int{}
	for i := range 20 {
		put[fmt.Sprint("k", i)] = i
	}
	rev := w.update(first, put)
	w.turn()
	err := w.t.Wait(t.Context(), rev)
	if lines := strings.Split(fmt.Sprint(err), "\n"); len(lines) != maxErrors+1 || lines[maxErrors] != "and 15 more" {
		t.Errorf("error %q; want %d lines and a count", err, maxErrors)
	}
	// An earlier fault does not fail a later, empty call.
	if err := w.t.Wait(t.Context(), w.update(first, nil)); err != nil {
		t.Errorf("wait for an empty call: %v", err)
	}
}
