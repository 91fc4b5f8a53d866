package main

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	tracev1 "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc"

	"github.com/routerd/routerd/integration/await"
)

// traces is a collector that keeps all it is sent.
type traces struct {
	collector.UnimplementedTraceServiceServer

	mu       sync.Mutex
	spans    []*tracev1.Span
	resource string
}

func (c *traces) Export(_ context.Context, req *collector.ExportTraceServiceRequest) (*collector.ExportTraceServiceResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, r := range req.GetResourceSpans() {
		c.resource = r.GetResource().String()
		for _, s := range r.GetScopeSpans() {
			c.spans = append(c.spans, s.GetSpans()...)
		}
	}
	return &collector.ExportTraceServiceResponse{}, nil
}

// parts returns the names of the parts of each span of that name.
func (c *traces) parts(name string) (all []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, s := range c.spans {
		if s.GetName() != name {
			continue
		}
		var parts []string
		for _, p := range c.spans {
			if string(p.GetParentSpanId()) == string(s.GetSpanId()) {
				parts = append(parts, p.GetName())
			}
		}
		slices.Sort(parts)
		all = append(all, strings.Join(parts, " "))
	}
	return all
}

// TestTraces: with OpenTelemetry's variables set, a collector is sent what each step
// of an ADD took, and what a change of the datastore took to the kernel; what is left
// when the daemon ends too.
func TestTraces(t *testing.T) {
	t.Parallel()
	h := newHost(t, "10.1.0.11/24")
	var lis net.Listener
	if err := h.ns.Do(func() (err error) { lis, err = net.Listen("tcp", "127.0.0.1:0"); return err }); err != nil {
		t.Fatal(err)
	}
	server, got := grpc.NewServer(), &traces{}
	collector.RegisterTraceServiceServer(server, got)
	var serving sync.WaitGroup
	serving.Go(func() { _ = server.Serve(lis) }) // until Stop
	t.Cleanup(func() { server.Stop(); serving.Wait() })

	h.env = []string{"OTEL_EXPORTER_OTLP_ENDPOINT=http://" + lis.Addr().String(), "OTEL_RESOURCE_ATTRIBUTES=rack=r1"}
	r := h.start()
	r.ready()
	if _, err := r.attach("c1"); err != nil {
		t.Fatal(err)
	}
	r.kill(syscall.SIGTERM)

	for name, want := range map[string]string{
		"CNI ADD":          "address done endpoint intent record route rules vacant wire",
		"datastore change": "kernel",
		"policy change":    "kernel",
	} {
		await.Until(t, "spans "+name, func() error {
			if parts := got.parts(name); !slices.Contains(parts, want) {
				return fmt.Errorf("have the parts %q, want %q", parts, want)
			}
			return nil
		})
	}
	got.mu.Lock()
	defer got.mu.Unlock()
	for _, want := range []string{`"rack"`, `"r1"`, `"service.name"`, `"host.name"`, `"node1"`} {
		if !strings.Contains(got.resource, want) {
			t.Errorf("resource %s lacks %s", got.resource, want)
		}
	}
}

// TestTracesUnsent: a collector that is not there delays nothing, and the log says so.
func TestTracesUnsent(t *testing.T) {
	t.Parallel()
	h := newHost(t, "10.1.0.11/24")
	h.env = []string{"OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:4317", "OTEL_BSP_SCHEDULE_DELAY=100", "OTEL_EXPORTER_OTLP_TIMEOUT=100"}
	r := h.start()
	r.ready()
	if _, err := r.attach("c1"); err != nil {
		t.Fatal(err)
	}
	await.Until(t, "the log says that traces are lost", func() error {
		if len(r.log.lines("traces were not sent", "component=traces")) == 0 {
			return fmt.Errorf("it does not")
		}
		return nil
	})
}
