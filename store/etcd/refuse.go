package etcd

import (
	"context"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// RefuseKV answers on r who asks for etcd's keys where there is no etcd, with the reason.
func RefuseKV(r grpc.ServiceRegistrar, reason string) {
	pb.RegisterKVServer(r, noKV{err: status.Error(codes.FailedPrecondition, reason)})
}

type noKV struct {
	pb.UnimplementedKVServer

	err error
}

func (n noKV) Range(context.Context, *pb.RangeRequest) (*pb.RangeResponse, error) { return nil, n.err }

func (n noKV) Put(context.Context, *pb.PutRequest) (*pb.PutResponse, error) { return nil, n.err }

func (n noKV) DeleteRange(context.Context, *pb.DeleteRangeRequest) (*pb.DeleteRangeResponse, error) {
	return nil, n.err
}

func (n noKV) Txn(context.Context, *pb.TxnRequest) (*pb.TxnResponse, error) { return nil, n.err }
