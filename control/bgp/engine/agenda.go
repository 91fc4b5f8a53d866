package engine

import (
	"slices"

	"github.com/routerd/routerd/control/bgp/engine/rib"
)

// step is how many prefixes are gone over before others have their turn.
const step = 4096

// agenda is what is to be done by and by: tasks with the lock, in steps, and orders without it.
type agenda struct {
	tasks  []task
	fills  []task // of new groups, which wait for no task
	orders []order
	stride int    // prefixes of a step
	poke   func() // has the caller see to tasks, orders and times; it must not wait
}

// task is something that is done in steps.
type task struct {
	step func(n int) (done bool)
	done func() // nil: nothing
}

// order is something that the core has its caller do without the lock.
type order struct {
	kind orderKind
	peer *peer
}

type orderKind uint8

const (
	orderPause      orderKind = iota // stop the peer for the time after a limit
	orderForwarding                  // later OPENs say that routes were kept
	orderRestarted                   // later OPENs of all peers say no more that this side restarts
)

func (a *agenda) order(kind orderKind, p *peer) {
	a.orders = append(a.orders, order{kind, p})
	a.poke()
}

// fill has a new group filled in steps.
func (a *agenda) fill(step func(n int) (done bool), done func()) {
	a.fills = append(a.fills, task{step, done})
	a.poke()
}

// later has something done in steps, after what is under way.
func (a *agenda) later(step func(n int) bool, done func()) {
	a.tasks = append(a.tasks, task{step, done})
	a.poke()
}

// after has something done after what is under way.
func (a *agenda) after(do func()) { a.later(func(int) bool { return true }, do) }

// walk has a table gone over.
func (a *agenda) walk(t *table, w *rib.Walk, done func()) {
	a.later(func(n int) bool { return t.rib.Step(w, n) }, done)
}

func (a *agenda) idle() bool { return len(a.fills)+len(a.tasks) == 0 }

// work does the next step of a fill and of a task, and calls behind after each.
func (a *agenda) work(behind func()) {
	for _, list := range []*[]task{&a.fills, &a.tasks} {
		if len(*list) == 0 {
			continue
		}
		t := (*list)[0]
		done := t.step(a.stride)
		behind()
		if done {
			*list = slices.Delete(*list, 0, 1)
			if t.done != nil {
				t.done()
			}
		}
	}
}
