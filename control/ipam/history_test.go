package ipam

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
)

// history is who owned which address when. Its checker finds two at one time.
type history struct {
	mu     sync.Mutex
	owners map[netip.Addr]string
	wrong  []string
	gains  int
}

func (h *history) gain(a netip.Addr, who string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.gains++
	if other, ok := h.owners[a]; ok {
		h.wrong = append(h.wrong, fmt.Sprintf("%s is %s's while it is %s's", a, who, other))
	}
	h.owners[a] = who
}

func (h *history) lose(a netip.Addr) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.owners, a)
}

// player is a host with its workloads. What it holds outlives its allocator, as
// the journal of a daemon does.
type player struct {
	name string
	open func() store.Store
	disk *disk
	h    *host
	held map[string]Assignment // by handle
	told map[string]bool       // confirmed, or perhaps
	// unsettled are handles of operations of unknown outcome, to be taken back.
	unsettled map[string]bool
}

// boot starts the allocator with what the disk knows.
func (p *player) boot(t *testing.T) {
	t.Helper()
	st := p.open()
	a := New(Config{
		Store: st, Node: p.name, Log: slog.New(slog.DiscardHandler), Timeout: 20 * time.Second,
		Reserve: ReserveConfig{Min: 4, Max: 16, Journal: p.disk},
	})
	for handle, as := range p.held {
		a.Claim(handle, as.Addr)
		p.told[handle] = true
	}
	p.h = run(t, a, st)
}

// add gives a workload an address, out of the reserve or the long way.
func (p *player) add(t *testing.T, hist *history, handle string) {
	t.Helper()
	var got Assignment
	if as, ok := p.h.Take(part4(handle)); ok {
		got = as[0]
	} else {
		as, err := p.h.Assign(await.Context(t), Request{Family: v4("").Family, Handle: handle, Idempotent: true})
		switch {
		case errors.Is(err, ErrExhausted):
			return
		case errors.Is(err, store.ErrUnavailable):
			// Neither done nor not done: nobody was told of an address, and the
			// datastore may have one for the handle. It is asked to take it back.
			p.unsettled[handle] = true
			return
		case err != nil:
			t.Errorf("%s: assign: %v", p.name, err)
			return
		}
		got, p.told[handle] = as[0], true
	}
	got.Handle = handle
	hist.gain(got.Addr, handle)
	p.held[handle] = got
}

// del takes a workload's address back.
func (p *player) del(t *testing.T, hist *history, handle string) {
	t.Helper()
	hist.lose(p.held[handle].Addr)
	if p.told[handle] {
		p.unsettled[handle] = true
	}
	delete(p.held, handle)
	delete(p.told, handle)
	p.settle(t)
	p.h.Unclaim(handle)
}

// settle takes back what was left open. A release of unknown outcome is asked
// for again later.
func (p *player) settle(t *testing.T) {
	t.Helper()
	for handle := range p.unsettled {
		_, err := p.h.ReleaseHandleHere(await.Context(t), handle)
		switch {
		case err == nil:
			delete(p.unsettled, handle)
		case !errors.Is(err, store.ErrUnavailable):
			t.Errorf("%s: release: %v", p.name, err)
		}
	}
}

// confirm tells the datastore of all that it may not know.
func (p *player) confirm(t *testing.T) {
	t.Helper()
	var cs []Confirmation
	for handle, a := range p.held {
		p.told[handle] = true
		cs = append(cs, Confirmation{Addr: a.Addr, Handle: handle})
	}
	for i, err := range p.h.Confirm(await.Context(t), cs...) {
		if err != nil && !errors.Is(err, store.ErrUnavailable) { // else it is told, or will be
			t.Errorf("%s: confirm %s: %v", p.name, cs[i].Addr, err)
		}
	}
}

// play makes random moves: workloads come and go, the datastore is told, the
// daemon is killed.
func (p *player) play(t *testing.T, hist *history, moves int) {
	t.Helper()
	for i := range moves {
		switch n := rand.N(10); {
		case n < 5:
			p.add(t, hist, fmt.Sprintf("net.%s-%d", p.name, i))
		case n < 7:
			if handles := slices.Sorted(maps.Keys(p.held)); len(handles) > 0 {
				p.del(t, hist, handles[rand.N(len(handles))])
			}
		case n < 9:
			p.confirm(t)
		default:
			p.h.stop()
			p.boot(t)
		}
	}
}

// Eight hosts with reserves share one pool that is too small for them, on real
// etcd, and are killed at random: no address has two owners at any time, and
// in the end each that is assigned has one.
func TestHistory(t *testing.T) {
	t.Parallel()
	open := realStore(t)
	st := open()
	put(t, st, newPool("p", "10.0.0.0/23", blockSize(28)))
	hist := &history{owners: map[netip.Addr]string{}}
	var players []*player
	for i := range 8 {
		p := &player{name: fmt.Sprint("node", i), open: open, disk: &disk{}, held: map[string]Assignment{}, told: map[string]bool{}, unsettled: map[string]bool{}}
		put(t, st, newNode(p.name, nil))
		p.boot(t)
		t.Cleanup(func() { p.h.stop() })
		players = append(players, p)
	}
	var wg sync.WaitGroup
	for _, p := range players {
		wg.Go(func() { p.play(t, hist, 60) })
	}
	wg.Wait()
	for _, w := range hist.wrong {
		t.Error(w)
	}
	if hist.gains < 100 {
		t.Errorf("only %d addresses were given", hist.gains)
	}
	want := map[netip.Addr]string{}
	for _, p := range players {
		await.True(t, p.name+" settles what was left open", func() bool {
			p.settle(t)
			return len(p.unsettled) == 0
		})
		p.confirm(t)
		for handle, a := range p.held {
			want[a.Addr] = handle
		}
	}
	for _, p := range players {
		p.h.stop()
	}
	have := audit(t, st)
	maps.DeleteFunc(have, func(_ netip.Addr, handle string) bool {
		return slices.ContainsFunc(players, func(p *player) bool { return handle == store.ReserveHandle(p.name) })
	})
	mustDiff(t, "what is assigned and to whom", want, have)
}
