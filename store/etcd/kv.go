package etcd

import (
	"context"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
)

// RegisterKV serves etcd's KV service on r and passes every request on over
// the store's own connection, so that clients on this host need neither the
// address nor the credentials of etcd. Compaction is refused: it is the
// business of whoever runs etcd.
func (s *Store) RegisterKV(r grpc.ServiceRegistrar) {
	pb.RegisterKVServer(r, &kvProxy{kv: pb.NewKVClient(s.conn)})
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
