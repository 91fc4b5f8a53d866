package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/control/doctor/gather"
	"github.com/routerd/routerd/control/rpc"
	"github.com/routerd/routerd/control/ui"
	"github.com/routerd/routerd/dataplane/netdev"
)

// page is what serves the page for a browser, and what `routerctl ui` asks. Its server is nil where ui.listen is empty.
type page struct {
	apiv1.UnimplementedUIServer
	d      *router
	server *ui.Server
	watch  *ui.Watch
	failed atomic.Pointer[error] // why it is not served; nil: it is
}

func (d *router) newPage() (*page, error) {
	p := &page{d: d}
	if d.cfg.UI.Listen == "" {
		return p, nil
	}
	p.watch = ui.NewWatch()
	err := error(errors.New("it is about to be"))
	p.failed.Store(&err)
	p.server, err = ui.New(ui.Config{
		Node: d.name, Operator: rpc.NewOperatorServer(d.operator), Events: rpc.NewEventsServer(d.said), Watch: p.watch,
		Examine: p.examine, Wanted: p.wanted, Sessions: p.sessions,
		Counters: netdev.Read,
		Now:      time.Now, Log: d.log.With("component", "ui"),
	})
	return p, err
}

func (p *page) on() bool { return p.server != nil }

// Open implements [apiv1.UIServer].
func (p *page) Open(context.Context, *apiv1.OpenRequest) (*apiv1.OpenResponse, error) {
	if !p.on() {
		return nil, status.Error(codes.FailedPrecondition, "ui.listen is empty, so this host serves no page: set it to a loopback address and port, such as 127.0.0.1:7749, or to a socket, such as unix:///run/routerd/ui.sock, and restart routerd")
	}
	if err := p.failed.Load(); err != nil {
		return nil, status.Errorf(codes.Unavailable, "the page is not served at ui.listen %q: %v", p.d.cfg.UI.Listen, *err)
	}
	token, end := p.server.Token()
	return &apiv1.OpenResponse{Listen: p.d.cfg.UI.Listen, Token: token, Expires: timestamppb.New(end)}, nil
}

// run serves the page. That its address is taken does not end the daemon: what runs without the page keeps running.
func (p *page) run(ctx context.Context) error {
	log := p.d.log.With("component", "ui")
	var followers sync.WaitGroup
	defer followers.Wait()
	followers.Go(func() { p.followLog(ctx) })
	if m := p.d.reflectors.members; m != nil {
		followers.Go(func() { m.Presences(ctx, p.watch.SetPresent) })
	}
	return async.Retry(ctx, async.Backoff{Min: time.Second, Max: time.Minute}, func(ctx context.Context) error {
		err := p.serve(ctx)
		if ctx.Err() != nil {
			return nil
		}
		log.Warn("the page is not served; will try again", "listen", p.d.cfg.UI.Listen, "error", err)
		p.failed.Store(&err)
		return err
	})
}

func (p *page) serve(ctx context.Context) error {
	network, address, err := p.d.cfg.UI.Address()
	if err != nil {
		return err
	}
	var lis net.Listener
	if network == "unix" {
		lis, err = rpc.Listen(address)
	} else {
		lis, err = new(net.ListenConfig).Listen(ctx, network, address)
	}
	if err != nil {
		return err
	}
	p.failed.Store(nil)
	return p.server.Serve(ctx, lis)
}

// followLog says that something happened whenever the log has more.
func (p *page) followLog(ctx context.Context) {
	var last uint64
	for {
		list, more := p.d.said.Since(last)
		if len(list) > 0 {
			last = list[len(list)-1].Seq
			p.watch.Happened()
		}
		select {
		case <-more:
		case <-ctx.Done():
			return
		}
	}
}

// examine asks the doctor of this host, and what the datastore shows of others, as routerctl doctor --all does.
func (p *page) examine(ctx context.Context) (*apiv1.ExamineResponse, error) {
	r, err := p.d.operator.Examine(ctx)
	if err != nil {
		return nil, err
	}
	var present gather.Presences
	if m := p.d.reflectors.members; m != nil {
		present = m
	}
	facts, err := gather.Cluster(ctx, p.d.store, present)
	if err != nil {
		r.Unknown = append(r.Unknown, fmt.Sprintf("other hosts: %v", err))
		return r, nil
	}
	gather.Add(r, facts)
	return r, nil
}

// wanted lists the sessions of all nodes.
func (p *page) wanted(ctx context.Context) []ui.Session {
	if p.d.bgp == nil {
		return nil
	}
	all, err := p.d.bgp.Wanted(ctx)
	if err != nil {
		return nil // not known yet, or nobody waits for it
	}
	var out []ui.Session
	for _, node := range slices.Sorted(maps.Keys(all)) {
		for _, q := range all[node] {
			s := ui.Session{Node: node, Peer: q.Name, Type: string(q.Type), ASN: q.ASN, Problem: q.Problem}
			if q.Addr.IsValid() {
				s.Addr = q.Addr.String()
			}
			out = append(out, s)
		}
	}
	return out
}

// sessions is this host's sessions and their states.
func (p *page) sessions() string {
	if p.d.bgp == nil {
		return ""
	}
	var b strings.Builder
	for _, q := range p.d.bgp.Sessions().Peers {
		fmt.Fprintln(&b, q.Name, q.Addr, q.State, q.Info)
	}
	return b.String()
}
