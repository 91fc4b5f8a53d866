package storetest

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"sync"
	"testing"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
)

// testModifyRace lets a thousand writers of one process count in one object.
func testModifyRace(t *testing.T, s store.Store) { modifyRace(t, s, 1000) }

// testModifyRaceOfHosts does the same for writers that know nothing of each
// other, as on different hosts.
func testModifyRaceOfHosts(t *testing.T, s store.Store) {
	modifyRace(t, struct{ store.Store }{s}, 30)
}

func modifyRace(t *testing.T, s store.Store, writers int) {
	ctx := await.Context(t)
	var wg sync.WaitGroup
	for range writers {
		wg.Go(func() {
			_, err := store.Modify(ctx, s, poolKey("counter"), func(cur store.Object) (any, error) {
				if cur.Revision == 0 {
					return account("counter", 1), nil
				}
				p := store.Clone(cur.Value).(*v3.IPPool)
				p.Annotations["amount"] = strconv.Itoa(amount(p) + 1)
				return p, nil
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	got, err := s.Get(t.Context(), poolKey("counter"))
	if err != nil {
		t.Fatal(err)
	}
	if n := amount(got.Value); n != writers {
		t.Errorf("%d writers counted to %d", writers, n)
	}

	// A change that changes nothing is not written; an error is the caller's.
	same, err := store.Modify(ctx, s, poolKey("counter"), func(cur store.Object) (any, error) { return store.Clone(cur.Value), nil })
	if err != nil || same.Revision != got.Revision {
		t.Errorf("an idle change moved revision %d to %d, %v", got.Revision, same.Revision, err)
	}
	none, err := store.Modify(ctx, s, poolKey("none"), func(store.Object) (any, error) { return nil, nil })
	if err != nil || none.Revision != 0 {
		t.Errorf("a change to nothing: %+v, %v", none, err)
	}
	mine := errors.New("mine")
	if _, err := store.Modify(ctx, s, poolKey("counter"), func(store.Object) (any, error) { return nil, mine }); err != mine {
		t.Errorf("the caller's error comes back as %v", err)
	}
}

// account is an object that counts: where no rule of a backend bounds the number.
func account(name string, amount int) *v3.IPPool {
	p := pool(name, "10.0.0.0/16")
	p.Annotations = map[string]string{"amount": strconv.Itoa(amount)}
	return p
}

func amount(v any) int {
	n, _ := strconv.Atoi(v.(*v3.IPPool).Annotations["amount"])
	return n
}

// testConflictingTransfers moves amounts between two objects from many sides
// at once, in transactions over both: the sum must stay, and an observer who
// gets both changes of a transaction in one batch must never see another.
func testConflictingTransfers(t *testing.T, s store.Store) {
	const total, movers, moves = 100, 8, 20
	first := must(t, s, put(store.IfAbsent(), account("a", total)), put(store.IfAbsent(), account("b", 0)))

	w := watch(t, s, store.KindIPPool)
	stop := make(chan struct{})
	observed := make(chan error, 1)
	go func() {
		amounts := make(map[string]int)
		for {
			select {
			case b := <-w.ch:
				for _, e := range b.Events {
					amounts[e.Key.Name] = amount(e.Object.Value)
				}
				if sum := amounts["a"] + amounts["b"]; sum != total {
					observed <- fmt.Errorf("at revision %d the sum is %d: a transaction was torn", b.Revision, sum)
					return
				}
			case <-stop:
				observed <- nil
				return
			}
		}
	}()

	var wg sync.WaitGroup
	for range movers {
		wg.Go(func() {
			for cur, done := first, 0; done < moves; {
				a, b := amount(cur[0].Value), amount(cur[1].Value)
				d := rand.IntN(a+b+1) - b
				objs, err := s.Txn(t.Context(),
					put(store.IfRevision(cur[0].Revision), account("a", a-d)),
					put(store.IfRevision(cur[1].Revision), account("b", b+d)))
				var conflict *store.ConflictError
				switch {
				case errors.As(err, &conflict):
					cur = conflict.Current
				case err != nil:
					t.Error(err)
					return
				default:
					cur = objs
					done++
				}
			}
		})
	}
	wg.Wait()
	close(stop)
	if err := <-observed; err != nil {
		t.Error(err)
	}
	objs, _, err := s.List(t.Context(), store.KindIPPool, "")
	if err != nil {
		t.Fatal(err)
	}
	if sum := amount(objs[0].Value) + amount(objs[1].Value); sum != total {
		t.Errorf("the sum is %d, it was %d", sum, total)
	}
}
