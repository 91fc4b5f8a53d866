package etcd_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/embedded"
	"github.com/routerd/routerd/store/etcd"
)

// TestMembers follows who holds a name and who stands for leases, the oldest first.
func TestMembers(t *testing.T) {
	t.Parallel()
	server := start(t, embedded.Config{})
	s := open(t, etcd.Config{Endpoints: []string{server.Endpoint()}})
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	var mu sync.Mutex
	said := map[string][]string{}
	follow := func(what string, f func(context.Context, func([]string))) {
		wg.Go(func() {
			f(ctx, func(list []string) {
				mu.Lock()
				defer mu.Unlock()
				said[what] = list
			})
		})
	}
	follow("presences", s.Presences)
	follow("leaders", func(ctx context.Context, yield func([]string)) { s.Leaders(ctx, "test/", yield) })
	want := func(what string, list ...string) {
		t.Helper()
		await.Until(t, fmt.Sprint(what, " ", list), func() error {
			mu.Lock()
			defer mu.Unlock()
			if !slices.Equal(said[what], list) {
				return fmt.Errorf("%v", said[what])
			}
			return nil
		})
	}
	lead := func(name string) (stop func()) {
		ctx, cancel := context.WithCancel(ctx)
		done := make(chan struct{})
		go func() {
			defer close(done)
			s.Lead(ctx, "test/"+name, name, 30*time.Second, func(ctx context.Context) { <-ctx.Done() })
		}()
		stop = sync.OnceFunc(func() { cancel(); <-done })
		t.Cleanup(stop)
		return stop
	}
	want("leaders")
	second := lead("b")
	want("leaders", "b")
	lead("a")
	want("leaders", "b", "a")
	second()
	want("leaders", "a")

	seen, err := s.Name(ctx, "node1")
	if err != nil {
		t.Fatal(err)
	}
	hold, err := s.Claim(ctx, "node1", seen, store.Incarnation{}, time.Second)
	if err != nil {
		t.Fatal(err)
	}
	want("presences", "node1")
	hold.Forget()
	want("presences") // when its lease is over
}
