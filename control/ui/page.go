package ui

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/control/doctor/gather"
	"github.com/routerd/routerd/control/events"
	"github.com/routerd/routerd/store"
)

// PageConfig says how a [Page] is served, and what it shows.
type PageConfig struct {
	Config // its Watch, Pods and Examine the page makes
	// Where is what ui.listen says, for people; empty: no page is served.
	Where string
	// Listen opens that.
	Listen func(context.Context) (net.Listener, error)
	// Said is the daemon's log.
	Said *events.Log
	// Store has what there is of other hosts.
	Store store.Store
	// Hosts says which hosts are there; nil: the datastore cannot.
	Hosts gather.Presences
}

// Page is what serves the page for a browser, and what `routerctl ui` asks. Make one with
// [NewPage].
type Page struct {
	apiv1.UnimplementedUIServer
	c      PageConfig
	server *Server // nil: no page is served
	watch  *Watch
	failed atomic.Pointer[error] // why it is not served; nil: it is
}

// NewPage makes the page.
func NewPage(c PageConfig) (*Page, error) {
	p := &Page{c: c}
	if c.Where == "" {
		return p, nil
	}
	p.watch = NewWatch()
	err := error(errors.New("it is about to be"))
	p.failed.Store(&err)
	of := c.Config
	of.Watch, of.Examine = p.watch, p.examine
	of.Pods = func(ctx context.Context) (Pods, error) { return pods(ctx, c.Store) }
	p.server, err = New(of)
	return p, err
}

// On reports whether a page is served.
func (p *Page) On() bool { return p.server != nil }

// HandleStore applies a step of the cluster's copy.
func (p *Page) HandleStore(s cluster.Step) { p.watch.HandleStore(s) }

// Open implements [apiv1.UIServer].
func (p *Page) Open(context.Context, *apiv1.OpenRequest) (*apiv1.OpenResponse, error) {
	if !p.On() {
		return nil, status.Error(codes.FailedPrecondition, "ui.listen is empty, so this host serves no page: set it to a loopback address and port, such as 127.0.0.1:7749, or to a socket, such as unix:///run/routerd/ui.sock, and restart routerd")
	}
	if err := p.failed.Load(); err != nil {
		return nil, status.Errorf(codes.Unavailable, "the page is not served at ui.listen %q: %v", p.c.Where, *err)
	}
	token, end := p.server.Token()
	return &apiv1.OpenResponse{Listen: p.c.Where, Token: token, Expires: timestamppb.New(end)}, nil
}

// Run serves the page. That its address is taken does not end the daemon: what runs without the page keeps running.
func (p *Page) Run(ctx context.Context) error {
	var followers sync.WaitGroup
	defer followers.Wait()
	followers.Go(func() { p.followLog(ctx) })
	if m := p.c.Hosts; m != nil {
		followers.Go(func() { m.Presences(ctx, p.watch.SetPresent) })
	}
	return async.Retry(ctx, async.Backoff{Min: time.Second, Max: time.Minute}, func(ctx context.Context) error {
		err := p.serve(ctx)
		if ctx.Err() != nil {
			return nil
		}
		p.c.Log.Warn("the page is not served; will try again", "listen", p.c.Where, "error", err)
		p.failed.Store(&err)
		return err
	})
}

func (p *Page) serve(ctx context.Context) error {
	lis, err := p.c.Listen(ctx)
	if err != nil {
		return err
	}
	p.failed.Store(nil)
	return p.server.Serve(ctx, lis)
}

// followLog says that something happened whenever the log has more.
func (p *Page) followLog(ctx context.Context) {
	var last uint64
	for {
		list, more := p.c.Said.Since(last)
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
func (p *Page) examine(ctx context.Context) (*apiv1.ExamineResponse, error) {
	r, err := p.c.Config.Examine(ctx)
	if err != nil {
		return nil, err
	}
	facts, err := gather.Cluster(ctx, p.c.Store, p.c.Hosts)
	if err != nil {
		r.Unknown = append(r.Unknown, fmt.Sprintf("other hosts: %v", err))
		return r, nil
	}
	gather.Add(r, facts)
	return r, nil
}
