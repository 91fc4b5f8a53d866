package rpc

import (
	"context"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	apiv1 "github.com/routerd/routerd/control/api/v1"
)

// Doctor is what the doctor's service asks of the daemon.
type Doctor interface {
	// Examine says what is wrong with this host now.
	Examine(ctx context.Context, req *apiv1.ExamineRequest) (*apiv1.ExamineResponse, error)
	// Look says what becomes of a packet on this host.
	Look(ctx context.Context, req *apiv1.LookRequest) (*apiv1.LookResponse, error)
	// Trace follows a packet over the hosts of both ends, and its answer back.
	Trace(ctx context.Context, req *apiv1.TraceRequest) (*apiv1.TraceResponse, error)
}

// NewDoctorServer returns the doctor's service.
func NewDoctorServer(d Doctor) apiv1.DoctorServer { return &doctorServer{d: d} }

type doctorServer struct {
	apiv1.UnimplementedDoctorServer
	d Doctor
}

func (s *doctorServer) Examine(ctx context.Context, req *apiv1.ExamineRequest) (*apiv1.ExamineResponse, error) {
	return s.d.Examine(ctx, req)
}

func (s *doctorServer) Look(ctx context.Context, req *apiv1.LookRequest) (*apiv1.LookResponse, error) {
	return s.d.Look(ctx, req)
}

func (s *doctorServer) Trace(ctx context.Context, req *apiv1.TraceRequest) (*apiv1.TraceResponse, error) {
	if req.GetFrom() == "" || req.GetTo() == "" {
		return nil, status.Error(codes.InvalidArgument, "from and to are required: a workload, a node, an address, or host")
	}
	return s.d.Trace(ctx, req)
}
