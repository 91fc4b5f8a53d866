package rpc

import (
	"log/slog"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/bgp"
	"github.com/routerd/routerd/integration/await"
)

// TestBGPInject puts routes in by calls and by a stream, whose end takes its own along.
func TestBGPInject(t *testing.T) {
	t.Parallel()
	b := bgp.New(bgp.Options{Log: slog.New(slog.DiscardHandler), Node: "node1", Inject: bgp.InjectOptions{MaxRoutes: 2}})
	c := bgpClient(t, &table{Injector: b})
	ctx := t.Context()
	routes := func(list ...string) (out []*apiv1.BGPInjectedRoute) {
		for _, p := range list {
			out = append(out, &apiv1.BGPInjectedRoute{Prefix: p})
		}
		return out
	}
	has := func() string {
		r, err := c.Injected(ctx, &apiv1.BGPInjectedRequest{})
		if err != nil {
			t.Fatal(err)
		}
		var out []string
		for _, i := range r.GetRoutes() {
			out = append(out, i.GetOwner()+":"+i.GetPrefix()+" "+i.GetNextHop())
		}
		return strings.Join(out, ", ")
	}
	minute := durationpb.New(time.Minute)
	for _, bad := range []struct {
		req  *apiv1.BGPInjectRequest
		code codes.Code
	}{
		{&apiv1.BGPInjectRequest{Owner: "a", Ttl: minute, Routes: routes("nonsense")}, codes.InvalidArgument},
		{&apiv1.BGPInjectRequest{Owner: "a", Ttl: minute, Routes: []*apiv1.BGPInjectedRoute{{Prefix: "203.0.113.1/32", NextHop: "x"}}}, codes.InvalidArgument},
		{&apiv1.BGPInjectRequest{Owner: "a", Routes: routes("203.0.113.1/32")}, codes.InvalidArgument},
		{&apiv1.BGPInjectRequest{Owner: "a", Ttl: minute, Routes: routes("203.0.113.1/32", "203.0.113.2/32", "203.0.113.3/32")}, codes.ResourceExhausted},
		{&apiv1.BGPInjectRequest{Owner: "a", Ttl: minute, Routes: routes("127.0.0.1/32")}, codes.FailedPrecondition},
	} {
		if _, err := c.Inject(ctx, bad.req); status.Code(err) != bad.code {
			t.Errorf("%v: %v, want %s", bad.req, err, bad.code)
		}
	}
	if _, err := c.Inject(ctx, &apiv1.BGPInjectRequest{Owner: "a", Ttl: minute, Routes: []*apiv1.BGPInjectedRoute{{Prefix: "203.0.113.1/32", NextHop: "10.1.0.99"}}}); err != nil {
		t.Fatal(err)
	}
	stream, err := c.Hold(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for _, step := range []struct {
		req  *apiv1.BGPHoldRequest
		says string
		has  string
	}{
		{&apiv1.BGPHoldRequest{Owner: "b", Routes: routes("203.0.113.1/32")}, "owner a has it", "a:203.0.113.1/32 10.1.0.99"},
		{&apiv1.BGPHoldRequest{Routes: routes("203.0.113.2/32", "203.0.113.3/32")}, "", "a:203.0.113.1/32 10.1.0.99, b:203.0.113.2/32 , b:203.0.113.3/32 "},
		{&apiv1.BGPHoldRequest{Withdraw: []string{"203.0.113.3"}}, "withdraw", "a:203.0.113.1/32 10.1.0.99, b:203.0.113.2/32 , b:203.0.113.3/32 "},
		{&apiv1.BGPHoldRequest{Withdraw: []string{"203.0.113.3/32"}}, "", "a:203.0.113.1/32 10.1.0.99, b:203.0.113.2/32 "},
	} {
		if err := stream.Send(step.req); err != nil {
			t.Fatal(err)
		}
		r, err := stream.Recv()
		if err != nil || (r.GetError() == "") != (step.says == "") || !strings.Contains(r.GetError(), step.says) {
			t.Errorf("%v: %q, %v, want %q", step.req, r.GetError(), err, step.says)
		}
		if got := has(); got != step.has {
			t.Errorf("%v: %s, want %s", step.req, got, step.has)
		}
	}
	if err := stream.CloseSend(); err != nil {
		t.Fatal(err)
	}
	const left = "a:203.0.113.1/32 10.1.0.99"
	await.Until(t, "the end of the stream", func() error {
		if got := has(); got != left {
			return status.Error(codes.Internal, got)
		}
		return nil
	})
	if r, err := c.Withdraw(ctx, &apiv1.BGPWithdrawRequest{Owner: "a"}); err != nil || r.GetWithdrawn() != 1 || has() != "" {
		t.Errorf("withdrew %d, %v; left %s", r.GetWithdrawn(), err, has())
	}
	if _, err := bgpClient(t, nil).Inject(ctx, &apiv1.BGPInjectRequest{}); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("without BGP: %v", err)
	}
}
