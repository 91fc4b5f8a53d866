package ownership

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"sync/atomic"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/embedded/clustertest"
	"github.com/routerd/routerd/store/etcd"
)

func TestMain(m *testing.M) {
	clustertest.Main()
	os.Exit(m.Run())
}

const (
	members = 3
	// chaosTime is about a hundred lives of hosts.
	chaosTime = 6 * time.Second
)

// cluster is one of etcd whose members are killed.
type cluster struct {
	etcd   *clustertest.Cluster
	killed atomic.Int64
}

func (c *cluster) Open() (store.Store, error) {
	return etcd.Open(context.Background(), etcd.Config{Endpoints: c.etcd.Endpoints(), DialTimeout: time.Second})
}

func (*cluster) MakeNode(ctx context.Context, s store.Store, name string) error {
	n := &store.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	store.SetDefaults(n)
	if _, err := store.Create(ctx, s, n); err != nil && !errors.Is(err, store.ErrExists) {
		return err
	}
	return nil
}

func (*cluster) DeleteNode(ctx context.Context, s store.Store, name string) error {
	if err := store.Delete(ctx, s, store.ResourceKey(store.KindNode, name), 0); err != nil && !errors.Is(err, store.ErrNotFound) {
		return err
	}
	return nil
}

// Harm kills members, now and then two at once, and starts them again. The next one is
// killed when the cluster answers again, so that there is something to be done between.
func (c *cluster) Harm(ctx context.Context, s store.Store) {
	pause := func(least, more time.Duration) {
		select {
		case <-ctx.Done():
		case <-time.After(least + rand.N(more)):
		}
	}
	for ctx.Err() == nil {
		pause(500*time.Millisecond, time.Second)
		first := rand.N(members)
		c.etcd.Kill(first)
		c.killed.Add(1)
		if rand.N(4) == 0 {
			second := (first + 1) % members // nobody has a majority
			c.etcd.Kill(second)
			c.killed.Add(1)
			pause(100*time.Millisecond, 500*time.Millisecond)
			c.etcd.Up(second)
		}
		pause(200*time.Millisecond, 800*time.Millisecond)
		c.etcd.Up(first)
		for !readable(ctx, s) && ctx.Err() == nil {
			pause(20*time.Millisecond, 50*time.Millisecond)
		}
	}
}

func readable(ctx context.Context, s store.Store) bool {
	ctx, cancel := context.WithTimeout(ctx, attemptTime)
	defer cancel()
	_, err := s.Get(ctx, store.ResourceKey(store.KindIPPool, "p"))
	return err == nil
}

func (c *cluster) Harmed() int { return int(c.killed.Load()) }

// TestOwnership: no address has two owners, and none is lost or without one, over a real etcd
// of three members of which some are killed.
func TestOwnership(t *testing.T) {
	t.Parallel()
	Run(t, Config{Datastore: &cluster{etcd: clustertest.Start(t, members)}, Time: chaosTime, Life: 300 * time.Millisecond, MinHarmed: 2})
}
