package rpc

import (
	"context"

	"github.com/routerd/routerd/control/attach"
	"github.com/routerd/routerd/control/spans"
)

// Traced returns an Attacher that does as a does, with a span for each verb.
func Traced(a Attacher, t *spans.Tracer) Attacher {
	if !t.Enabled() {
		return a
	}
	return traced{a, t}
}

type traced struct {
	Attacher
	tracer *spans.Tracer
}

func (s traced) Add(ctx context.Context, req attach.AddRequest) (res attach.Result, err error) {
	ctx, end := s.verb(ctx, "ADD", req.ID, req.Workload)
	defer func() { end(err) }()
	return s.Attacher.Add(ctx, req)
}

func (s traced) Del(ctx context.Context, req attach.DelRequest) (err error) {
	ctx, end := s.verb(ctx, "DEL", req.ID, req.Workload)
	defer func() { end(err) }()
	return s.Attacher.Del(ctx, req)
}

func (s traced) Check(ctx context.Context, req attach.CheckRequest) (err error) {
	ctx, end := s.verb(ctx, "CHECK", req.ID, attach.Workload{})
	defer func() { end(err) }()
	return s.Attacher.Check(ctx, req)
}

func (s traced) GC(ctx context.Context, network string, valid []attach.ID) (c attach.Collected, err error) {
	ctx, end := s.tracer.Start(ctx, "CNI GC", spans.String("cni.network", network), spans.Int("cni.valid", len(valid)))
	defer func() { end(err) }()
	return s.Attacher.GC(ctx, network, valid)
}

func (s traced) Allocate(ctx context.Context, req attach.AllocateRequest) (res attach.Result, err error) {
	ctx, end := s.verb(ctx, "IPAM ADD", req.ID, req.Workload)
	defer func() { end(err) }()
	return s.Attacher.Allocate(ctx, req)
}

func (s traced) verb(ctx context.Context, name string, id attach.ID, w attach.Workload) (context.Context, func(error)) {
	attrs := []spans.Attr{spans.String("container.id", id.ContainerID), spans.String("cni.interface", id.Interface), spans.String("cni.network", id.Network)}
	if w.Pod != "" {
		attrs = append(attrs, spans.String("k8s.namespace.name", w.Namespace), spans.String("k8s.pod.name", w.Pod))
	}
	return s.tracer.Start(ctx, "CNI "+name, attrs...)
}
