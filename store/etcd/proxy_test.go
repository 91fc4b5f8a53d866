package etcd_test

import (
	"bytes"
	"errors"
	"net"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/embedded"
	"github.com/routerd/routerd/store/etcd"
)

// TestProxy: whoever has only the socket of a daemon reads, writes, watches and takes
// snapshots by it, and can do nothing else to etcd.
func TestProxy(t *testing.T) {
	t.Parallel()
	direct := open(t, etcd.Config{Endpoints: []string{start(t, embedded.Config{}).Endpoint()}})
	socket := filepath.Join(t.TempDir(), "p.sock")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	g := grpc.NewServer()
	direct.RegisterKV(g)
	done := make(chan struct{})
	go func() {
		defer close(done)
		g.Serve(l)
	}()
	defer func() {
		g.Stop()
		<-done
	}()
	s := open(t, etcd.Config{Endpoints: []string{"unix://" + socket}})
	ctx := await.Context(t)

	batches := s.Watch(ctx, store.KindIPAMConfig)
	if b := <-batches; b.Err != nil || !b.Synced {
		t.Fatalf("the first batch is %+v", b)
	}
	if err := write(ctx, s); err != nil {
		t.Fatal(err)
	}
	if b := <-batches; len(b.Events) != 1 || b.Events[0].Key != store.IPAMConfigKey() {
		t.Errorf("the change comes as %+v", b)
	}

	var snapshot bytes.Buffer // Snapshot checks that it is whole
	if n, err := s.Snapshot(ctx, &snapshot); err != nil || n != int64(snapshot.Len()) {
		t.Errorf("a snapshot of %d bytes, %v; %d came", n, err, snapshot.Len())
	}
	if !bytes.Contains(snapshot.Bytes(), []byte(store.IPAMConfigKey().Path())) {
		t.Error("the snapshot lacks what was written")
	}

	_, err = etcdserverpb.NewMaintenanceClient(s.Conn()).Defragment(ctx, &etcdserverpb.DefragmentRequest{})
	if status.Code(err) != codes.Unimplemented {
		t.Errorf("defragment: %v", err)
	}
	_, err = etcdserverpb.NewKVClient(s.Conn()).Compact(ctx, &etcdserverpb.CompactionRequest{Revision: 2})
	if status.Code(err) != codes.Unimplemented {
		t.Errorf("compact: %v", err)
	}
}

// all returns every key of a store by its path.
func all(t *testing.T, s *etcd.Store) map[string]string {
	t.Helper()
	got := map[string]string{}
	if err := s.Raw(await.Context(t), 0, func(k etcd.RawKey) error { got[k.Path] = string(k.Value); return nil }); err != nil {
		t.Fatal(err)
	}
	return got
}

// TestLoad: what is loaded is what was read; what is there is not overwritten, unless
// that is asked for; what a lease holds is left alone.
func TestLoad(t *testing.T) {
	t.Parallel()
	s := open(t, etcd.Config{Endpoints: []string{start(t, embedded.Config{}).Endpoint()}})
	ctx := await.Context(t)
	kv, leases := etcdserverpb.NewKVClient(s.Conn()), etcdserverpb.NewLeaseClient(s.Conn())
	lease, err := leases.LeaseGrant(ctx, &etcdserverpb.LeaseGrantRequest{TTL: 3600})
	if err != nil {
		t.Fatal(err)
	}
	for key, lease := range map[string]int64{"/routerd/v1/presences/n": lease.ID, "/others/key": 0} {
		if _, err := kv.Put(ctx, &etcdserverpb.PutRequest{Key: []byte(key), Value: []byte("x"), Lease: lease}); err != nil {
			t.Fatal(err)
		}
	}

	want := map[string]string{}
	var keys []etcd.RawKey
	add := func(path string, value []byte) {
		keys = append(keys, etcd.RawKey{Path: path, Value: value})
		want[path] = string(value)
	}
	// More keys than one transaction has, and more bytes.
	for i := range 2 * store.MaxOps {
		add(store.HandleKey(string(rune('a'+i%26))+string(rune('a'+i/26))).Path(), []byte(`{}`))
	}
	for i := range 5 {
		add("/calico/large/"+string(rune('a'+i)), bytes.Repeat([]byte("x"), 400<<10))
	}
	add("/routerd/v1/secrets/s", []byte(`{"key":""}`))

	dry, err := s.Load(ctx, etcd.Loading{Keys: keys, DryRun: true})
	if diff := cmp.Diff(etcd.Loaded{Written: len(keys)}, dry); err != nil || diff != "" || len(all(t, s)) != 0 {
		t.Errorf("dry run: %v, %s", err, diff)
	}
	if _, err := s.Load(ctx, etcd.Loading{Keys: keys}); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, all(t, s)); diff != "" {
		t.Fatalf("loaded (-want +got):\n%s", diff)
	}
	done, err := s.Load(ctx, etcd.Loading{Keys: keys})
	if diff := cmp.Diff(etcd.Loaded{Same: len(keys)}, done); err != nil || diff != "" {
		t.Errorf("a second time: %v, %s", err, diff)
	}

	delete(want, keys[0].Path)
	keys = keys[1:]
	keys[0].Value = []byte(`{"deleted":true}`)
	want[keys[0].Path] = string(keys[0].Value)
	if _, err := s.Load(ctx, etcd.Loading{Keys: keys}); !errors.Is(err, store.ErrExists) {
		t.Errorf("over others: %v", err)
	}
	done, err = s.Load(ctx, etcd.Loading{Keys: keys, Replace: true})
	if diff := cmp.Diff(etcd.Loaded{Written: 1, Removed: 1, Same: len(keys) - 1}, done); err != nil || diff != "" {
		t.Errorf("replace: %v, %s", err, diff)
	}
	if diff := cmp.Diff(want, all(t, s)); diff != "" {
		t.Errorf("replaced (-want +got):\n%s", diff)
	}
	for _, key := range []string{"/routerd/v1/presences/n", "/others/key"} {
		if r, err := kv.Range(ctx, &etcdserverpb.RangeRequest{Key: []byte(key)}); err != nil || len(r.Kvs) != 1 {
			t.Errorf("%s: %v, %v", key, r.GetKvs(), err)
		}
	}
}
