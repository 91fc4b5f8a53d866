package vrouter

import (
	"context"
	"sync"
	"time"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/control/spans"
	"github.com/routerd/routerd/dataplane"
)

// kernelPatience is how long a span waits for the kernel: an object may wait for its
// device for ever.
const kernelPatience = 10 * time.Second

// tracing follows changes of the datastore until the kernel has what follows from
// them. Only the loop touches it.
type tracing struct {
	tracer *spans.Tracer
	wait   func(context.Context, dataplane.Revision) error
	open   []span // changes that the table has, and the kernel writer not yet
	ends   sync.WaitGroup
}

// span is one change under way.
type span struct {
	ctx context.Context // with the span, for its parts
	end func(error)
}

// begin starts the span of a step of the cluster's copy.
func (t *tracing) begin(ctx context.Context, s cluster.Step) span {
	var about string
	if len(s.Changes) > 0 {
		about = s.Changes[0].Key.String()
	}
	ctx, end := t.tracer.Start(ctx, "datastore change",
		spans.Int("revision", int(s.Revision)), spans.Int("changes", len(s.Changes)), spans.String("first", about))
	return span{ctx, end}
}

// handed notes that the kernel writer was handed all that follows from the changes
// so far, as rev; 0: nothing follows.
func (t *tracing) handed(rev dataplane.Revision) {
	if len(t.open) == 0 {
		return
	}
	open := t.open
	t.open = nil
	if rev == 0 {
		for _, s := range open {
			s.end(nil)
		}
		return
	}
	var parts []func(error)
	for _, s := range open {
		_, end := t.tracer.Start(s.ctx, "kernel")
		parts = append(parts, end)
	}
	t.ends.Go(func() {
		ctx, cancel := context.WithTimeout(open[0].ctx, kernelPatience)
		defer cancel()
		err := t.wait(ctx, rev)
		for i, s := range open {
			parts[i](err)
			s.end(err)
		}
	})
}
