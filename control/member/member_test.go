package member

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
)

// world is a host with etcd's cluster around it, of which it is told what a kill leaves.
type world struct {
	role    Role
	secrets bool
	data    bool
	running bool
	others  int // voters beside it
	among   Standing
	away    bool // nobody answers
}

func (w *world) facts(wanted Role) Facts {
	f := Facts{Role: w.role, Wanted: wanted, Secrets: w.secrets, Data: w.data, Running: w.running, Among: w.among}
	if !w.role.IsMember() || w.away || w.among == HasVote && w.others == 1 && !w.running { // its vote is missing
		f.Among = Unknown
	}
	return f
}

// do takes a step as hosts do, and reports whether that was possible.
func (w *world) do(t *rapid.T, a Action) bool {
	switch a {
	case Nothing:
	case TakeSecrets:
		w.secrets = true
	case Enter:
		if w.running {
			t.Fatal("data are put away under a server")
		}
		w.role, w.data = Learner, false
	case Add:
		if w.among != Absent {
			t.Fatal("it is added twice")
		}
		w.among = Added
	case Start:
		if w.running {
			t.Fatal("it is started twice")
		}
		if !w.data && w.among != Added {
			t.Fatal("a member without its data comes back as itself")
		}
		w.running, w.data = true, true
		if w.among == Added {
			w.among = Learning
		}
	case Promote:
		if !w.running {
			t.Fatal("a learner that is down gets a vote")
		}
		w.among = HasVote
	case Vote:
		w.role = Voter
	case Leave:
		if w.among == HasVote && w.others == 0 {
			return false
		}
		w.role = Leaving
	case Remove:
		w.among, w.running = Absent, false // its server ends by itself
	case Stop:
		w.running = false
	case PutAway:
		if w.running {
			t.Fatal("data are put away under a server")
		}
		w.data = false
	case Retire:
		if w.data || w.running || w.among != Absent {
			t.Fatalf("it retires with %+v", *w)
		}
		w.role, w.secrets = Client, false
	}
	return true
}

// TestNext: from whatever a kill, the loss of data, a removal by others or an outage left,
// a host gets to what it is to be, and never does what would harm.
func TestNext(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		w := &world{role: Client, others: rapid.IntRange(1, 2).Draw(t, "other voters"), among: Absent}
		wanted := Role("")
		for range rapid.IntRange(0, 60).Draw(t, "steps") {
			switch rapid.IntRange(0, 11).Draw(t, "event") {
			case 0:
				wanted = rapid.SampledFrom([]Role{"", Voter, Client}).Draw(t, "wanted")
			case 1: // killed
				w.running = false
			case 2:
				w.away = !w.away
			case 3: // removed by others
				if !w.away && (w.among != HasVote || w.others > 1) {
					w.among, w.running = Absent, false
				}
			case 4: // data lost, of a host that is down
				if !w.running {
					w.data = false
				}
			default:
				w.do(t, Next(w.facts(wanted)))
			}
		}
		w.away = false
		// Whose only partner has lost its data has lost the cluster: that is for people.
		if w.others == 1 && w.among == HasVote && !w.data && !w.running {
			return
		}
		wanted = rapid.SampledFrom([]Role{Voter, Client}).Draw(t, "in the end")
		for range 30 {
			a := Next(w.facts(wanted))
			if a == Nothing {
				break
			}
			w.do(t, a)
		}
		if f := w.facts(wanted); !is(f, wanted) || wanted == Voter && w.among != HasVote || wanted == Client && (w.among != Absent || w.secrets || w.data) {
			t.Fatalf("it is %+v and is to be %s", *w, wanted)
		}
	})
}

// memory is a datastore with one order.
type memory struct {
	mu     sync.Mutex
	record []byte
	rev    int64
	told   async.Signal
}

func (m *memory) Read(context.Context, string) ([]byte, int64, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.record, m.rev, nil
}

func (m *memory) Change(_ context.Context, _ string, rev int64, record []byte) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if rev != m.rev {
		return store.ErrConflict
	}
	m.record, m.rev = record, m.rev+1
	m.told.Set()
	return nil
}

func (m *memory) Follow(ctx context.Context, yield func(map[string]int64)) {
	for ctx.Err() == nil {
		_, rev, _ := m.Read(ctx, "")
		yield(map[string]int64{"host12": rev})
		select {
		case <-m.told:
		case <-ctx.Done():
		}
	}
}

func (m *memory) order(t *testing.T) Order {
	t.Helper()
	var o Order
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := json.Unmarshal(m.record, &o); err != nil {
		t.Fatal(err)
	}
	return o
}

// flaky is a host of which each step fails at first.
type flaky struct {
	mu     sync.Mutex
	w      world
	failed map[Action]bool
}

func (h *flaky) Facts(_ context.Context, wanted Role) Facts {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.w.facts(wanted)
}

func (h *flaky) Do(_ context.Context, a Action, _ *Order) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.failed[a] {
		h.failed[a] = true
		return fmt.Errorf("not yet: %s", a)
	}
	h.w.do(nil, a)
	return nil
}

func (h *flaky) Settled(context.Context) {}

// TestAgent: an order is carried out although everything fails once, and says so in the
// end; one that nobody has signed is not.
func TestAgent(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name   string
		change func(*Order)
		done   bool
	}{
		{"good", func(*Order) {}, true},
		{"unsigned", func(o *Order) { o.Signature = nil }, false},
		{"for another", func(o *Order) { o.Node = "host13" }, false},
		{"too old", func(o *Order) { o.Expires = time.Now().Add(-time.Second) }, false},
		{"of a later version", func(o *Order) { o.Wanted = "emperor" }, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			o := Order{Node: "host12", Wanted: Voter, Expires: time.Now().Add(time.Hour), Signature: []byte("good")}
			tt.change(&o)
			b, err := json.Marshal(o)
			if err != nil {
				t.Fatal(err)
			}
			m := &memory{told: async.NewSignal()}
			h := &flaky{w: world{role: Client, others: 2, among: Absent}, failed: map[Action]bool{}}
			seen := make(chan struct{}, 100)
			a := New(Config{
				Node: "host12", Orders: m, Host: h, Changed: async.NewSignal(), Log: slog.New(slog.DiscardHandler),
				Verify: func(_, sig []byte) bool { seen <- struct{}{}; return string(sig) == "good" },
			})
			ctx, cancel := context.WithCancel(t.Context())
			over := make(chan error, 1)
			go func() { over <- a.Run(ctx) }()
			if err := m.Change(ctx, "host12", 0, b); err != nil {
				t.Fatal(err)
			}
			if tt.done {
				await.True(t, "the order is carried out", func() bool { return m.order(t).Done })
			} else if tt.name == "unsigned" {
				<-seen
			}
			cancel()
			if err := <-over; !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
			if role := h.w.role; (role == Voter) != tt.done {
				t.Errorf("it is a %s", role)
			}
		})
	}
}

// TestState: what was written is read, and what is not a state is not.
func TestState(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "etcd", "member.json")
	if s, err := LoadState(file); err != nil || s != (State{}) {
		t.Errorf("nothing: %v, %v", s, err)
	}
	for _, r := range []Role{Client, Learner, Voter, Leaving} {
		if err := (State{Role: r}).Save(file); err != nil {
			t.Fatal(err)
		}
		if s, err := LoadState(file); err != nil || s.Role != r {
			t.Errorf("%s: %v, %v", r, s, err)
		}
	}
	if err := (State{Role: "emperor"}).Save(file); err != nil {
		t.Fatal(err)
	}
	if _, err := LoadState(file); err == nil || !strings.Contains(err.Error(), file) {
		t.Errorf("got %v", err)
	}
}
