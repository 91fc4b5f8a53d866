package attach

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/routerd/routerd/control/cluster/clustertest"
	"github.com/routerd/routerd/integration/await"
)

// history is what a runtime and the world around do to one host.
type history struct {
	Behind bool
	Ops    []op
	Wakes  bool // at the end the daemon hears that the datastore is back; else it starts anew
}

type op struct {
	Do   string
	At   int    // whose: place in containers
	Step string // where something is wrong, if it comes to it
	Dies bool   // the daemon dies there; else the step fails
}

// containers are two of one pod, of which the second comes after the first, and one that is alone.
const containers = 3

func histories() *rapid.Generator[history] {
	steps := append([]string{"", "", "", ""}, slices.Concat(addSteps(), delSteps())...)
	ops := rapid.Custom(func(t *rapid.T) op {
		return op{
			Do:   rapid.SampledFrom([]string{"ADD", "ADD", "ADD", "DEL", "DEL", "GC", "flush", "away", "back", "restart", "forgotten"}).Draw(t, "do"),
			At:   rapid.IntRange(0, containers-1).Draw(t, "at"),
			Step: rapid.SampledFrom(steps).Draw(t, "step"),
			Dies: rapid.Bool().Draw(t, "dies"),
		}
	})
	return rapid.Custom(func(t *rapid.T) history {
		return history{rapid.Bool().Draw(t, "behind"), rapid.SliceOfN(ops, 1, 20).Draw(t, "ops"), rapid.Bool().Draw(t, "wakes")}
	})
}

// TestQuietEnd: whatever a runtime asks, wherever the daemon dies, however the datastore
// comes and goes and though the host's Node is deleted, in the end each container whose ADD was answered passes CHECK and is in the
// datastore, and of the others nothing is left once the runtime has repeated its DEL.
func TestQuietEnd(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		h := histories().Draw(rt, "history")
		if !t.Run("history", func(t *testing.T) { h.run(t) }) {
			rt.Fatalf("%+v", h)
		}
	})
}

// outcome is what the runtime knows of a container.
type outcome int

const (
	never    outcome = iota // or deleted, and answered
	attached                // ADD was answered
	unsure                  // a verb failed, or had no answer: DEL is next, or ADD again
)

func (h history) run(t *testing.T) {
	w := newWorld(t)
	w.ipam.reserve = h.Behind
	w.cfg = func(c *Config) { c.Behind = h.Behind }
	var reqs [containers]AddRequest
	var is [containers]outcome
	for i := range reqs {
		reqs[i] = w.numbered(i)
		if i < 2 {
			reqs[i] = podRequest(reqs[i], "ns1", "web-0")
		}
	}
	start := func() *Attacher {
		a := w.start()
		a.HandleStore(clustertest.Step("node-a", nodeBatch("node-a", true, true)))
		a.Doubt() // another may have written in the daemon's absence
		return a
	}
	a, away := start(), false
	// call reports whether the daemon lived and did not fail.
	call := func(o op, verb func() error) bool {
		switch {
		case o.Step == "":
		case o.Dies:
			killAt(a, o.Step)
		default:
			failAt(a, o.Step)
		}
		var err error
		killed := func() (killed bool) {
			defer func() {
				if r := recover(); r != nil {
					if r != errKilled { //nolint:errorlint // the very value that killAt panics with
						panic(r)
					}
					killed = true
				}
			}()
			err = verb()
			return false
		}()
		if killed {
			a = start()
		}
		a.steps.around = nil
		return !killed && err == nil
	}
	for _, o := range h.Ops {
		switch o.Do {
		case "ADD":
			if o.At == 0 && is[1] != never {
				continue // the pod's second is there
			}
			if o.At == 1 && is[0] == attached {
				is[0] = unsure // the device is the pod's, and from now on the second's
			}
			if call(o, func() error { _, err := a.Add(t.Context(), reqs[o.At]); return err }) {
				is[o.At] = attached
			} else {
				is[o.At] = unsure
			}
		case "DEL":
			if o.At == 1 && is[0] != never {
				continue // a runtime deletes the older first
			}
			if call(o, func() error { return a.Del(t.Context(), delOf(reqs[o.At])) }) {
				is[o.At] = never
			} else {
				is[o.At] = unsure
			}
		case "GC":
			var valid []ID
			for i, r := range reqs {
				if is[i] != never {
					valid = append(valid, r.ID)
				}
			}
			call(op{}, func() error { _, err := a.GC(t.Context(), reqs[0].ID.Network, valid); return err })
		case "flush":
			a.workThrough(t.Context())
		case "away":
			away = true
			w.away(true)
		case "back":
			away = false
			w.away(false)
		case "forgotten":
			if away {
				continue
			}
			w.forget()
			for _, exists := range []bool{false, true} {
				a.HandleStore(clustertest.Step("node-a", nodeBatch("node-a", exists, false)))
			}
		case "restart":
			a = start()
		}
	}
	w.away(false)
	if h.Wakes {
		a.now.Set()
	} else {
		a = start()
	}
	w.run(a)
	want := map[string]bool{}
	for i, r := range reqs {
		switch is[i] {
		case unsure:
			if err := a.Del(t.Context(), delOf(r)); err != nil {
				t.Errorf("DEL of container %d, when all is well again: %v", i, err)
			}
		case attached:
			w.check(a, r)
			want[handle(r.ID)] = true
		case never:
		}
	}
	await.Until(t, "what was attached, and nothing else", func() error {
		if got := w.ipam.handles(); !slices.Equal(got, slices.Sorted(maps.Keys(want))) {
			return fmt.Errorf("the datastore has addresses of %v, want those of %v", got, want)
		}
		pods := len(want)
		if is[0] == attached && is[1] == attached {
			pods-- // of one name
		}
		if n := w.endpoints(); n != pods {
			return fmt.Errorf("the datastore has %d endpoints, want %d", n, pods)
		}
		if n := len(a.Endpoints()); n != len(want) {
			return fmt.Errorf("the host has %d attachments, want %d", n, len(want))
		}
		return nil
	})
	for i, r := range reqs {
		if is[i] == attached {
			w.check(a, r)
			if err := a.Del(context.WithoutCancel(t.Context()), delOf(r)); err != nil && !errors.Is(err, ErrUnknown) {
				t.Errorf("DEL of container %d at the end: %v", i, err)
			}
		}
	}
	await.Until(t, "clean", w.clean)
}
