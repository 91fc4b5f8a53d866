package rpc

import (
	"context"

	apiv1 "github.com/routerd/routerd/control/api/v1"
)

// Doctor is what the doctor's service asks of the daemon.
type Doctor interface {
	// Examine says what is wrong with this host now.
	Examine(ctx context.Context) (*apiv1.ExamineResponse, error)
}

// NewDoctorServer returns the doctor's service.
func NewDoctorServer(d Doctor) apiv1.DoctorServer { return &doctorServer{d: d} }

type doctorServer struct {
	apiv1.UnimplementedDoctorServer
	d Doctor
}

func (s *doctorServer) Examine(ctx context.Context, _ *apiv1.ExamineRequest) (*apiv1.ExamineResponse, error) {
	return s.d.Examine(ctx)
}
