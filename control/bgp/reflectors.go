package bgp

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/routerd/routerd/store"
)

const (
	// reflectorLease begins the names of the leases that reflectors hold, each its own.
	reflectorLease = "bgp-reflector/"
	// reflectorTTL is how long a reflector that has died counts as there: then another node takes its place.
	reflectorTTL = 5 * time.Second
	// reflectorsEvery is how often a host looks at whether it is to reflect.
	reflectorsEvery = time.Second
)

// ReflectorsConfig says what [Reflectors] work with.
type ReflectorsConfig struct {
	Node       string
	Controller *Controller
	// Hosts says who is there; nil: their Nodes do, and reflectors hold no leases.
	Hosts Hosts
	// Lead calls lead while this process holds the leader-election lease of that name, with Hosts.
	Lead func(ctx context.Context, name, id string, ttl time.Duration, lead func(context.Context))
	// Publish writes what this host's Node says of reflectors.
	Publish func(context.Context, store.NodeReflection) error
	Log     *slog.Logger
}

// Reflectors is this host's part in the choice of route reflectors. Make it with
// [NewReflectors].
type Reflectors struct {
	c ReflectorsConfig

	mu    sync.Mutex
	alive Alive

	follow leaving     // follows who is there
	lease  leaving     // holds this host's lease
	held   atomic.Bool // it does
}

// NewReflectors makes this host's part in the choice.
func NewReflectors(c ReflectorsConfig) *Reflectors { return &Reflectors{c: c} }

// Hosts says which hosts are there and who is there, as *[etcd.Store] does.
type Hosts interface {
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

// Run has this host be a reflector when it is chosen, and says of which it has the routes.
func (r *Reflectors) Run(ctx context.Context) error {
	defer func() {
		r.follow.set(ctx, false, nil)
		r.lease.set(ctx, false, nil)
	}()
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
func (r *Reflectors) look(ctx context.Context, now time.Time) {
	asked, leases := r.c.Controller.ReflectionAsked(), r.c.Hosts != nil
	r.follow.set(ctx, asked && leases, r.followAlive)
	if !asked {
		r.lease.set(ctx, false, nil)
		return
	}
	want, differs := r.c.Controller.Reflection(r.Alive(), now)
	if want.Reflects && leases {
		r.lease.set(ctx, true, r.hold)
	}
	// Others count who holds a lease: it comes before the word and goes after it.
	if want.Reflects && leases && !r.held.Load() && differs {
		return
	}
	if differs {
		if err := r.c.Publish(ctx, want); err != nil {
			r.c.Log.Debug("the state of reflectors is not published; will try again", "error", err)
			return
		}
		r.c.Log.Info("published by which reflectors this host has routes", "reflects", want.Reflects, "by", want.By)
	}
	if !want.Reflects {
		r.lease.set(ctx, false, nil)
	}
}

// hold holds this host's lease of a reflector until ctx ends.
func (r *Reflectors) hold(ctx context.Context) {
	r.c.Lead(ctx, reflectorLease+r.c.Node, r.c.Node, reflectorTTL, func(ctx context.Context) {
		r.held.Store(true)
		<-ctx.Done()
		r.held.Store(false)
	})
}

// followAlive follows which hosts are there until ctx ends.
func (r *Reflectors) followAlive(ctx context.Context) {
	set := func(change func(*Alive)) {
		r.mu.Lock()
		defer r.mu.Unlock()
		change(&r.alive)
	}
	set(func(a *Alive) { *a = Alive{} })
	var leases, nodes bool // both have been read
	var known Alive
	tell := func() {
		if leases && nodes {
			set(func(a *Alive) { *a = known })
		}
	}
	var mu sync.Mutex // of the two followers
	var both sync.WaitGroup
	both.Go(func() {
		r.c.Hosts.Presences(ctx, func(list []string) {
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
		r.c.Hosts.Leaders(ctx, reflectorLease, func(list []string) {
			mu.Lock()
			defer mu.Unlock()
			leases, known.Reflectors = true, list
			tell()
		})
	})
	both.Wait()
}

// Alive is which hosts are there, as far as it is known.
func (r *Reflectors) Alive() Alive {
	if r.c.Hosts == nil {
		return r.c.Controller.Present()
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.alive
}

// Service is BGP as `routerctl bgp` asks for it.
type Service struct {
	*Controller
	reflectors *Reflectors
}

// Service returns what answers `routerctl bgp`.
func (r *Reflectors) Service() Service { return Service{r.c.Controller, r} }

// Reflectors says how far the nodes' choice of reflectors is.
func (s Service) Reflectors() (ReflectorStatus, error) {
	alive := s.reflectors.Alive()
	st, err := s.ReflectorStatus(alive)
	switch {
	case st.Setting == "" || st.Problem != "":
	case alive.Nodes == nil:
		st.Problem = "the present hosts are not known yet: the datastore cannot be reached, or this host's user of etcd may not read /routerd/v1/presences/ (configs/etcd/roles.sh)"
	}
	return st, err
}
