package bench

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	clientv3 "go.etcd.io/etcd/client/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/routerd/routerd/control/cluster/clustertest"
	"github.com/routerd/routerd/control/ipam"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/embedded"
	"github.com/routerd/routerd/store/etcd"
)

// ipamNode is the node that allocates.
const ipamNode = "bench"

// ipamRound is how many addresses one round takes before they are released: a
// few blocks, and far from the limit of blocks per node.
const ipamRound = 500

// MeasureIPAM returns rows for allocations by one caller and by sixteen, each
// beside a bare compare-and-put on the same etcd: those that wait for the
// datastore, and those out of the reserve, until the datastore knows of all.
func MeasureIPAM(ctx context.Context, atLeast time.Duration, log *slog.Logger) (rows []Row, err error) {
	dir, err := os.MkdirTemp("", "routerd-bench-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	server, err := embedded.Start(ctx, embedded.Config{
		Dir: filepath.Join(dir, "etcd"), PKIDir: filepath.Join(dir, "pki"), Socket: filepath.Join(dir, "run", "etcd.sock"),
		Name: ipamNode, Logger: log,
	})
	if err != nil {
		return nil, err
	}
	defer server.Close()
	st, err := etcd.Open(ctx, etcd.Config{Endpoints: []string{server.Endpoint()}, Logger: log})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, st.Close()) }()
	for _, v := range []any{
		&v3.IPPool{ObjectMeta: metav1.ObjectMeta{Name: "bench"}, Spec: v3.IPPoolSpec{CIDR: "192.168.0.0/16"}},
		&store.Node{ObjectMeta: metav1.ObjectMeta{Name: ipamNode}},
	} {
		store.SetDefaults(v)
		if _, err := store.Create(ctx, st, v); err != nil {
			return nil, err
		}
	}
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{server.Endpoint()}, DialTimeout: 5 * time.Second})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, client.Close()) }()

	a := ipam.New(ipam.Config{Store: st, Node: ipamNode, Log: log})
	stop := serve(ctx, a, st)
	defer func() { err = errors.Join(err, stop()) }()

	for _, callers := range []int{1, 16} {
		bare, err := rateBare(ctx, client, atLeast, callers)
		if err != nil {
			return nil, err
		}
		ours, err := rateIPAM(ctx, a, atLeast, callers)
		if err != nil {
			return nil, err
		}
		rows = append(rows, Row{
			What: fmt.Sprintf("IPAM allocations, %d at a time", callers), Ours: ours, Reference: bare,
			Against: "a bare compare-and-put on the same etcd", Unit: PerSecond,
		})
	}
	if err := stop(); err != nil {
		return nil, err
	}
	r := ipam.New(ipam.Config{Store: st, Node: ipamNode, Log: log, Reserve: ipam.ReserveConfig{Min: 32, Max: 128}})
	stopReserve := serve(ctx, r, st)
	defer func() { err = errors.Join(err, stopReserve()) }()
	for i, callers := range []int{1, 16} {
		ours, err := rateReserve(ctx, r, atLeast, callers)
		if err != nil {
			return nil, err
		}
		rows = append(rows, Row{
			What: fmt.Sprintf("IPAM out of the reserve, %d at a time", callers), Ours: ours, Reference: rows[i].Reference,
			Against: rows[i].Against, Unit: PerSecond,
		})
	}
	return rows, nil
}

// serve runs an allocator until the result is called.
func serve(ctx context.Context, a *ipam.Allocator, st store.Store) (stop func() error) {
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	steps, _ := clustertest.Follow(ctx, ipamNode, st, ipam.Kinds()...)
	go func() { ended <- a.Run(ctx, steps) }()
	return sync.OnceValue(func() error {
		cancel()
		return <-ended
	})
}

// rateReserve allocates as the daemon does: out of the reserve, or the long way
// where that is empty, and in the end the datastore knows of every address.
func rateReserve(ctx context.Context, a *ipam.Allocator, atLeast time.Duration, callers int) (float64, error) {
	handle := func(i int) string { return fmt.Sprintf("reserve.%d-%d", callers, i) }
	var spent time.Duration
	calls := 0
	for spent < atLeast {
		taken := make(chan ipam.Confirmation, ipamRound)
		confirmed := make(chan error, 1)
		start := time.Now()
		go func() { confirmed <- confirmAll(ctx, a, taken) }()
		_, err := Each(ctx, ipamRound, callers, func(ctx context.Context, i int) error {
			r := ipam.Request{Family: dataplane.IPv4, Handle: handle(i)}
			if got, ok := a.Take(ipam.Part{Request: r}); ok {
				taken <- ipam.Confirmation{Addr: got[0].Addr, Handle: r.Handle}
				return nil
			}
			_, err := a.Assign(ctx, r)
			return err
		})
		close(taken)
		err = errors.Join(err, <-confirmed)
		spent += time.Since(start)
		calls += ipamRound
		for i := range ipamRound {
			_, relErr := a.ReleaseHandle(ctx, handle(i))
			err = errors.Join(err, relErr)
			a.Unclaim(handle(i))
		}
		if err != nil {
			return 0, err
		}
	}
	return float64(calls) / spent.Seconds(), nil
}

// confirmAll confirms what is taken, what comes meanwhile together.
func confirmAll(ctx context.Context, a *ipam.Allocator, taken <-chan ipam.Confirmation) error {
	for c := range taken {
		batch := []ipam.Confirmation{c}
		for len(taken) > 0 {
			if more, ok := <-taken; ok {
				batch = append(batch, more)
			}
		}
		if err := errors.Join(a.Confirm(ctx, batch...)...); err != nil {
			return err
		}
	}
	return nil
}

func rateIPAM(ctx context.Context, a *ipam.Allocator, atLeast time.Duration, callers int) (float64, error) {
	handle := func(i int) string { return fmt.Sprintf("bench.%d-%d", callers, i) }
	release := func() error {
		for i := range ipamRound {
			if _, err := a.ReleaseHandle(ctx, handle(i)); err != nil {
				return err
			}
		}
		return nil
	}
	rate, err := Rate(ctx, atLeast, ipamRound, callers,
		func(int) error { return release() },
		func(ctx context.Context, _, i int) error {
			_, err := a.Assign(ctx, ipam.Request{Family: dataplane.IPv4, Handle: handle(i)})
			return err
		})
	return rate, errors.Join(err, release())
}

// rateBare returns how many compare-and-puts a second etcd does: each caller
// on a key of its own, as nodes on their own blocks do.
func rateBare(ctx context.Context, client *clientv3.Client, atLeast time.Duration, callers int) (float64, error) {
	value := string(make([]byte, 256))
	keys := make(chan string, callers)
	var mu sync.Mutex
	revisions := map[string]int64{}
	for i := range callers {
		keys <- fmt.Sprintf("/bench/%d/%d", callers, i)
	}
	return Rate(ctx, atLeast, ipamRound, callers, nil, func(ctx context.Context, _, _ int) error {
		key := <-keys
		defer func() { keys <- key }()
		mu.Lock()
		rev := revisions[key]
		mu.Unlock()
		resp, err := client.Txn(ctx).
			If(clientv3.Compare(clientv3.ModRevision(key), "=", rev)).
			Then(clientv3.OpPut(key, value)).Commit()
		if err != nil {
			return err
		}
		if !resp.Succeeded {
			return fmt.Errorf("%s was written by somebody else", key)
		}
		mu.Lock()
		revisions[key] = resp.Header.Revision
		mu.Unlock()
		return nil
	})
}
