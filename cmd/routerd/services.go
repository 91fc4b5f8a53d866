package main

import (
	"context"
	"errors"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/attach"
	"github.com/routerd/routerd/control/bgp"
	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/control/health"
	"github.com/routerd/routerd/control/heap"
	"github.com/routerd/routerd/control/operator"
	"github.com/routerd/routerd/control/rpc"
	"github.com/routerd/routerd/control/systemd"
)

// services are by what others ask the daemon.
type services struct {
	daemon
	op         *operator.Server
	bgp        *bgp.Controller // nil: not enabled
	reflectors *bgp.Reflectors // with bgp
	ds         *datastore
	attach     *attach.Attacher
	cluster    *cluster.Cluster
	page       *cluster.Follower // nil: there is no page
	collectors []prometheus.Collector
}

// open opens the sockets, which the parts serve.
func (s services) open(p *parts) error {
	asked, err := rpc.Listen(s.OperatorSocket())
	if err != nil {
		return err
	}
	plugin, err := rpc.Listen(s.CNISocket())
	if err != nil {
		return errors.Join(err, asked.Close())
	}
	page, err := newPage(s)
	if err != nil {
		return errors.Join(err, asked.Close(), plugin.Close())
	}
	sessions := rpc.NewBGPServer(nil)
	if s.bgp != nil {
		sessions = rpc.NewBGPServer(operator.Speaker{BGP: s.reflectors.Service(), Server: s.op})
	}
	p.runs("operator socket", func(ctx context.Context) error {
		return serve(ctx, asked, rpc.ServerOptions(s.log), func(r *grpc.Server) {
			apiv1.RegisterOperatorServer(r, rpc.NewOperatorServer(s.op))
			apiv1.RegisterBGPServer(r, sessions)
			apiv1.RegisterEventsServer(r, rpc.NewEventsServer(s.said))
			apiv1.RegisterDoctorServer(r, rpc.NewDoctorServer(s.op))
			apiv1.RegisterUIServer(r, page)
			s.ds.serve(r)
		})
	})
	p.runs("cni socket", func(ctx context.Context) error {
		cni := rpc.NewCNIServer(rpc.Traced(s.attach, s.tracer))
		return serve(ctx, rpc.NewFrames(plugin, cni, s.log), rpc.ServerOptions(s.log), func(r *grpc.Server) { apiv1.RegisterCNIServer(r, cni) })
	})
	if s.Health.Listen != "" {
		p.runs("health endpoint", func(ctx context.Context) error {
			h := health.Handler(s.op.LiveCheck, s.op.Report, s.op.Metrics(s.collectors...))
			if s.Health.Profiles {
				h = health.WithProfiles(h)
			}
			return health.Serve(ctx, s.Health.Listen, h, s.log)
		})
	}
	if page.On() {
		s.cluster.AskOthers("page", true) // which shows what concerns any of them
		p.runs("page follows", each(s.page, page.HandleStore))
		p.runs("page", page.Run)
	}
	p.runs("memory", endless(func(ctx context.Context) {
		heap.Pace(ctx)
		heap.Release(ctx, s.log)
	}))
	p.runs("systemd", endless(func(ctx context.Context) { systemd.Notify(ctx, s.log, s.op.Live, s.op.StatusLine) }))
	return nil
}
