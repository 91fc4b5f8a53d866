package main

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/routerd/routerd/control/bgp"
)

const (
	// reflectorLease begins the names of the leases that reflectors hold, each its own.
	reflectorLease = "bgp-reflector/"
	// reflectorTTL is how long a reflector that has died counts as there: then another node takes its place.
	reflectorTTL = 5 * time.Second
	// reflectorsEvery is how often a host looks at whether it is to reflect.
	reflectorsEvery = time.Second
)

// reflectors is this host's part in the choice of route reflectors.
type reflectors struct {
	d       *router
	members members // nil: the datastore cannot say who is there, so nobody is chosen

	mu    sync.Mutex
	alive bgp.Alive

	follow leaving     // follows who is there
	lease  leaving     // holds this host's lease
	held   atomic.Bool // it does
}

// members says who is there, as *[etcd.Store] does.
type members interface {
	Presences(ctx context.Context, yield func(nodes []string))
	Leaders(ctx context.Context, prefix string, yield func(ids []string))
}

// leaving is a goroutine that can be ended.
type leaving struct {
	stop context.CancelFunc
	done sync.WaitGroup
}

// set has f run, or not.
func (l *leaving) set(ctx context.Context, on bool, f func(context.Context)) {
	switch {
	case on && l.stop == nil:
		ctx, l.stop = context.WithCancel(ctx)
		l.done.Go(func() { f(ctx) })
	case !on && l.stop != nil:
		l.stop()
		l.done.Wait()
		l.stop = nil
	}
}

// runReflectors has this host be a reflector when it is chosen, and says of which it has the routes.
func (d *router) runReflectors(ctx context.Context) error {
	r := d.reflectors
	defer func() {
		r.follow.set(ctx, false, nil)
		r.lease.set(ctx, false, nil)
	}()
	select {
	case <-d.presence.Held():
	case <-ctx.Done():
		return nil
	}
	tick := time.NewTicker(reflectorsEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case now := <-tick.C:
			r.look(ctx, now)
		}
	}
}

// look does what is due.
func (r *reflectors) look(ctx context.Context, now time.Time) {
	asked := r.members != nil && r.d.bgp.ReflectionAsked()
	r.follow.set(ctx, asked, r.followAlive)
	if !asked {
		r.lease.set(ctx, false, nil)
		return
	}
	want, differs := r.d.bgp.Reflection(r.Alive(), now)
	if want.Reflects {
		r.lease.set(ctx, true, r.hold)
	}
	// Others count who holds a lease: it comes before the word and goes after it.
	if want.Reflects && !r.held.Load() && differs {
		return
	}
	if differs {
		if err := r.d.node.PublishReflection(ctx, want); err != nil {
			r.d.log.Debug("what this host says of reflectors is not written; will try again", "error", err)
			return
		}
		r.d.log.Info("published by which reflectors this host has routes", "reflects", want.Reflects, "by", want.By)
	}
	if !want.Reflects {
		r.lease.set(ctx, false, nil)
	}
}

// hold holds this host's lease of a reflector until ctx ends.
func (r *reflectors) hold(ctx context.Context) {
	r.d.store.Lead(ctx, reflectorLease+r.d.name, r.d.name, reflectorTTL, func(ctx context.Context) {
		r.held.Store(true)
		<-ctx.Done()
		r.held.Store(false)
	})
}

// followAlive follows which hosts are there until ctx ends.
func (r *reflectors) followAlive(ctx context.Context) {
	set := func(change func(*bgp.Alive)) {
		r.mu.Lock()
		defer r.mu.Unlock()
		change(&r.alive)
	}
	set(func(a *bgp.Alive) { *a = bgp.Alive{} })
	var leases, nodes bool // both have been read
	var known bgp.Alive
	tell := func() {
		if leases && nodes {
			set(func(a *bgp.Alive) { *a = known })
		}
	}
	var mu sync.Mutex // of the two followers
	var both sync.WaitGroup
	both.Go(func() {
		r.members.Presences(ctx, func(list []string) {
			mu.Lock()
			defer mu.Unlock()
			there := make(map[string]bool, len(list))
			for _, name := range list {
				there[name] = true
			}
			nodes, known.Nodes = true, there
			tell()
		})
	})
	both.Go(func() {
		r.members.Leaders(ctx, reflectorLease, func(list []string) {
			mu.Lock()
			defer mu.Unlock()
			leases, known.Reflectors = true, list
			tell()
		})
	})
	both.Wait()
}

// Alive is which hosts are there, as far as it is known.
func (r *reflectors) Alive() bgp.Alive {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.alive
}

// bgpService is BGP as `routerctl bgp` asks for it.
type bgpService struct {
	*bgp.Controller
	reflectors *reflectors
}

// Reflectors says how far the nodes' choice of reflectors is.
func (s bgpService) Reflectors() (bgp.ReflectorStatus, error) {
	alive := s.reflectors.Alive()
	st, err := s.ReflectorStatus(alive)
	switch {
	case st.Setting == "" || st.Problem != "":
	case s.reflectors.members == nil:
		st.Problem = "the datastore is a Kubernetes API, which does not say which hosts are there: name the reflectors by spec.bgp.routeReflectorClusterID of their Nodes"
	case alive.Nodes == nil:
		st.Problem = "which hosts are there is not known yet: the datastore is away, or this host's user of etcd may not read /routerd/v1/presences/ (configs/etcd/roles.sh)"
	}
	return st, err
}
