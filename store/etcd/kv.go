package etcd

import (
	"context"
	"errors"
	"io"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
)

// RegisterKV serves of etcd's API what reads and writes keys on r, and passes
// every request on over the store's own connection, so that clients on this host
// need neither the address nor the credentials of etcd: the KV service, watches,
// and snapshots. Compaction is refused, and so is the rest of maintenance: it is
// the business of whoever runs etcd.
func (s *Store) RegisterKV(r grpc.ServiceRegistrar) {
	pb.RegisterKVServer(r, &kvProxy{kv: pb.NewKVClient(s.conn)})
	pb.RegisterWatchServer(r, &watchProxy{watch: pb.NewWatchClient(s.conn)})
	pb.RegisterMaintenanceServer(r, &snapshotProxy{maintenance: pb.NewMaintenanceClient(s.conn)})
}

// kvProxy passes requests on. Answers and errors, which are gRPC statuses
// already, come back as they are.
type kvProxy struct {
	pb.UnimplementedKVServer
	kv pb.KVClient
}

func (p *kvProxy) Range(ctx context.Context, r *pb.RangeRequest) (*pb.RangeResponse, error) {
	return p.kv.Range(ctx, r)
}

func (p *kvProxy) Put(ctx context.Context, r *pb.PutRequest) (*pb.PutResponse, error) {
	return p.kv.Put(ctx, r)
}

func (p *kvProxy) DeleteRange(ctx context.Context, r *pb.DeleteRangeRequest) (*pb.DeleteRangeResponse, error) {
	return p.kv.DeleteRange(ctx, r)
}

func (p *kvProxy) Txn(ctx context.Context, r *pb.TxnRequest) (*pb.TxnResponse, error) {
	return p.kv.Txn(ctx, r)
}

// watchProxy passes watches on. When etcd goes away the stream ends with its
// error, and the client's library opens it again.
type watchProxy struct {
	pb.UnimplementedWatchServer
	watch pb.WatchClient
}

func (p *watchProxy) Watch(client pb.Watch_WatchServer) error {
	ctx, cancel := context.WithCancel(client.Context())
	defer cancel()
	etcd, err := p.watch.Watch(ctx)
	if err != nil {
		return err
	}
	// It ends with this call, at which the client's stream ends: so nothing here
	// can wait for it.
	go func() {
		if pass(client.Recv, etcd.Send) == nil {
			etcd.CloseSend() //nolint:errcheck // Recv says what is wrong
		}
	}()
	return pass(etcd.Recv, client.Send)
}

// snapshotProxy passes snapshots on.
type snapshotProxy struct {
	pb.UnimplementedMaintenanceServer
	maintenance pb.MaintenanceClient
}

func (p *snapshotProxy) Snapshot(r *pb.SnapshotRequest, client pb.Maintenance_SnapshotServer) error {
	etcd, err := p.maintenance.Snapshot(client.Context(), r)
	if err != nil {
		return err
	}
	return pass(etcd.Recv, client.Send)
}

// pass hands on what a stream gives until it ends.
func pass[M any](from func() (M, error), to func(M) error) error {
	for {
		m, err := from()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := to(m); err != nil {
			return err
		}
	}
}
