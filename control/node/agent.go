// Package node keeps this host's place in the cluster: it finds the host's
// address, registers the host as a Node, holds the addresses of its tunnel
// devices, and makes the default pool when there is none.
package node

import (
	"context"
	"errors"
	"iter"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
)

// Tunnel is a kind of tunnel device that has an address of its own.
type Tunnel string

// The tunnels, by the family of the packets inside.
const (
	TunnelIPIP    Tunnel = "ipip"
	TunnelVXLAN   Tunnel = "vxlan"
	TunnelIPIPv6  Tunnel = "ipip-v6"
	TunnelVXLANv6 Tunnel = "vxlan-v6"
)

// AllTunnels lists them.
func AllTunnels() []Tunnel {
	return []Tunnel{TunnelIPIP, TunnelVXLAN, TunnelIPIPv6, TunnelVXLANv6}
}

// tunnelOf returns the tunnel whose address a pool's hosts need, if they need
// one.
func tunnelOf(p *cluster.Pool) (Tunnel, bool) {
	six := p.CIDR.IsValid() && p.Family() == dataplane.IPv6
	switch p.Encap {
	case store.IPIP, store.IPIPCrossSubnet:
		if six {
			return TunnelIPIPv6, true
		}
		return TunnelIPIP, true
	case store.VXLAN, store.VXLANCrossSubnet:
		if six {
			return TunnelVXLANv6, true
		}
		return TunnelVXLAN, true
	case store.Direct:
	}
	return "", false
}

// Needed says for which tunnels the hosts of some pools need addresses.
func Needed(pools iter.Seq[*cluster.Pool]) map[Tunnel]bool {
	want := map[Tunnel]bool{}
	for p := range pools {
		if t, ok := tunnelOf(p); ok {
			want[t] = true
		}
	}
	return want
}

// Tunnels allocates the addresses of this host's tunnel devices.
type Tunnels interface {
	// Ensure returns the address of a tunnel: the one it has, if a pool with
	// that encapsulation still holds it, else a new one; invalid where no pool
	// needs the tunnel. spare says that it holds others beside it. leaving says
	// that the one it has is about to be released: where there is no new one, it
	// gets none.
	Ensure(ctx context.Context, t Tunnel, leaving bool) (addr netip.Addr, spare bool, err error)
	// Release gives back the addresses of a tunnel other than keep; with an
	// invalid keep all of them.
	Release(ctx context.Context, t Tunnel, keep netip.Addr) error
}

// Config is what an [Agent] needs.
type Config struct {
	Name    string
	Store   store.Store
	Tunnels Tunnels
	Log     *slog.Logger

	// Methods find the addresses: those of [Detect], and beside them
	// [MethodNone] and, for IPv6, [MethodAuto]. A family that is missing has
	// the default: first-found for IPv4 and auto for IPv6.
	Methods map[dataplane.Family]string
	// DefaultPools are made when the store holds no pool of their family as the
	// agent starts. Who deletes the last pool later makes room for another and
	// does not want this one back.
	DefaultPools []DefaultPool

	// AwaitIPAM returns when IPAM knows what the agent does: the datastore up to a
	// revision. Nil: it always does.
	AwaitIPAM func(ctx context.Context, rev store.Revision) error

	// UsePodCIDR says that pods have addresses of what Kubernetes gave the Node, and of
	// nothing else.
	UsePodCIDR bool

	// Conditions returns the node's present conditions. They are written when
	// they change. Nil: none.
	Conditions func() []metav1.Condition
}

// Status is what an [Agent] reached.
type Status struct {
	Addresses  map[dataplane.Family]Detected // what is registered; do not change it
	Registered bool
	Complete   bool                  // with its tunnel addresses, once since the daemon started
	Tunnels    map[Tunnel]netip.Addr // do not change it
	Err        error                 // of the last attempt

	// AddressErr says why this host should be registered with another address
	// than it is, and cannot be, or not yet.
	AddressErr error

	Drain store.Drain // how far the Node resource has this host drained
}

// Agent does the package's work in one goroutine; see [Agent.Run].
type Agent struct {
	cfg   Config
	wake  async.Signal
	peers *peers
	claim claim // Run's; the zero value: none is open

	announced map[netip.Addr]time.Time // Run's: when addresses were published as ones to send from
	// mayHold has the tunnels of which this host may hold addresses in IPAM: all at first, for
	// nobody knows what a previous run left. The Node does not tell: the watch may show it
	// first when the address is no longer in it. Run's.
	mayHold map[Tunnel]bool

	mu       sync.Mutex
	underlay *dataplane.Underlay
	synced   bool
	pools    map[string]*cluster.Pool
	hadPool  map[dataplane.Family]bool // there was one since the daemon started
	self     *store.Node
	podCIDRs []netip.Prefix                 // self's, where they count
	internal []netip.Addr                   // what the kubelet says, where that is not in self; empty: nothing yet
	encaps   store.NodeEncaps               // what self published, also after somebody deleted it
	revision store.Revision                 // that the agent knows of
	missing  map[dataplane.Family]time.Time // since when the host lacks its registered address
	overlaps map[string][]Overlap           // by pool, as far as somebody asked; nil: nobody has
	spare    map[Tunnel]time.Time           // since when a tunnel has addresses to be given back
	due      bool                           // the tunnels' addresses are to be looked at
	keys     *[]string                      // ids of the keys of BGP that this host has; nil: not known yet
	status   Status
}

// New returns an agent that does nothing until [Agent.Run].
func New(cfg Config) *Agent {
	mayHold := map[Tunnel]bool{}
	for _, t := range AllTunnels() {
		mayHold[t] = true
	}
	return &Agent{
		mayHold: mayHold,
		cfg:     cfg, wake: async.NewSignal(), announced: map[netip.Addr]time.Time{},
		pools: map[string]*cluster.Pool{}, hadPool: map[dataplane.Family]bool{}, peers: newPeers(),
		missing: map[dataplane.Family]time.Time{}, spare: map[Tunnel]time.Time{},
	}
}

// Kinds lists what the agent follows of the cluster.
func Kinds() []store.Kind {
	return []store.Kind{store.KindNode, store.KindIPPool, store.KindClusterInformation}
}

// HandleStore applies a step of the cluster's copy. It does not block.
func (a *Agent) HandleStore(s cluster.Step) {
	a.peers.apply(a.cfg.Name, s)
	a.mu.Lock()
	defer a.mu.Unlock()
	changed, woken := s.Synced && !a.synced, false
	a.synced = a.synced || s.Synced
	a.revision = s.Revision
	for _, ev := range s.Changes {
		if ev.Err != nil {
			if ev.Key == store.ResourceKey(store.KindNode, a.cfg.Name) {
				a.self, changed = nil, true // nobody can go by it: this host registers anew
			}
			continue
		}
		switch ev.Key.Kind {
		case store.KindIPPool:
			changed, a.overlaps = true, nil
			if p, ok := ev.Value.(*cluster.Pool); ok {
				a.pools[ev.Key.Name] = p
				if p.CIDR.IsValid() {
					a.hadPool[p.Family()] = true
				}
			} else {
				delete(a.pools, ev.Key.Name)
			}
		case store.KindClusterInformation:
			woken = true // who unlocked the datastore has what failed done now
		case store.KindNode:
			if ev.Key.Name == a.cfg.Name {
				changed = true
				a.self, _ = ev.Object.Value.(*store.Node)
				if n, ok := ev.Value.(*cluster.Node); ok {
					a.encaps, a.status.Drain = n.Encaps.NodeEncaps, n.Drain
					if a.cfg.UsePodCIDR && !slices.Equal(a.podCIDRs, n.PodCIDRs) {
						a.podCIDRs, a.overlaps = n.PodCIDRs, nil
					}
				}
			}
			// Another one may be that which has our address.
			woken = woken || !a.status.Registered || a.status.AddressErr != nil
		}
	}
	a.due = a.due || changed
	if changed || woken {
		a.wake.Set()
	}
}

// HandleUnderlay applies a snapshot of the network around the host. It does
// not block.
func (a *Agent) HandleUnderlay(u dataplane.Underlay) {
	a.mu.Lock()
	defer a.mu.Unlock()
	u = withoutWorkloads(u)
	if a.underlay != nil && u.Same(*a.underlay) {
		return
	}
	a.underlay, a.overlaps = &u, nil
	a.wake.Set()
}

// withoutWorkloads leaves out what comes and goes with every workload.
func withoutWorkloads(u dataplane.Underlay) dataplane.Underlay {
	ours := func(link string) bool { return strings.HasPrefix(link, "cali") }
	return dataplane.Underlay{
		Links:     slices.DeleteFunc(slices.Clone(u.Links), func(l dataplane.UnderlayLink) bool { return ours(l.Name) }),
		Addresses: slices.DeleteFunc(slices.Clone(u.Addresses), func(a dataplane.UnderlayAddress) bool { return ours(a.Link) }),
		Routes:    slices.DeleteFunc(slices.Clone(u.Routes), func(r dataplane.UnderlayRoute) bool { return ours(r.Link) }),
		Dropping:  u.Dropping,
	}
}

// publishedEncaps is what this host published of its encapsulations.
func (a *Agent) publishedEncaps() store.NodeEncaps {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.encaps
}

// Status returns what was reached.
func (a *Agent) Status() Status {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.status
}

// Backoff of failed attempts, and how often conditions are compared: what they
// are derived from has no event of its own.
const (
	retryMin        = 200 * time.Millisecond
	retryMax        = 30 * time.Second
	attemptTimeout  = 15 * time.Second
	conditionsEvery = 2 * time.Second
)

// Run works until ctx ends. A failed attempt is repeated with growing pauses,
// and at once when the store or the underlay changes.
func (a *Agent) Run(ctx context.Context) error {
	retry := async.Backoff{Min: retryMin, Max: retryMax}
	timer := time.NewTimer(0)
	defer timer.Stop()
	conditions := time.NewTicker(conditionsEvery)
	defer conditions.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-conditions.C:
			a.writeConditions(ctx)
			continue
		case <-a.wake:
		case <-timer.C:
		}
		again, err := a.attempt(ctx)
		if ctx.Err() != nil {
			return ctx.Err() // what it needs of others may have ended before it
		}
		a.note(err)
		if err == nil {
			retry.Reset()
		} else if pause := retry.Next(); again == 0 || again > pause {
			again = pause
		}
		if again > 0 {
			timer.Reset(again)
		}
	}
}

func (a *Agent) note(err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	was := a.status.Err
	a.status.Err = err
	switch {
	case err != nil && (was == nil || was.Error() != err.Error()):
		a.cfg.Log.Error("this host is not fully registered; will try again", "error", err)
	case err == nil && was != nil:
		for f, d := range a.status.Addresses {
			a.cfg.Log.Info("this host is registered", "family", f, "address", d.Prefix)
		}
	}
}

// attempt brings everything up to date that is not, and says when there will be
// more to do even if nothing changes; 0: not by itself. It does nothing while
// the store or the underlay is not known yet.
func (a *Agent) attempt(ctx context.Context) (again time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, attemptTimeout)
	defer cancel()
	a.mu.Lock()
	u, synced, self, pools, due, rev, keys := a.underlay, a.synced, a.self, a.pools, a.due, a.revision, a.keys
	want := Needed(maps.Values(pools))
	var missing []DefaultPool
	for _, p := range a.cfg.DefaultPools {
		if !a.hadPool[dataplane.FamilyOf(p.CIDR.Addr())] {
			missing = append(missing, p)
		}
	}
	a.due = false // what comes from now on is not in these pools
	a.mu.Unlock()
	defer func() {
		if due {
			a.setDue()
		}
	}()
	if u == nil || !synced {
		return 0, nil
	}
	pool := a.ensurePools(ctx, *u, missing)
	if err := a.announce(ctx, *u, self); err != nil {
		return 0, errors.Join(pool, err)
	}
	if err := a.announceKeys(ctx, self, keys); err != nil {
		return 0, errors.Join(pool, err)
	}
	again, err = a.register(ctx, *u, self)
	// Addresses are given to nodes that the watch has shown; it wakes us.
	if err != nil || self == nil || !due && len(a.spare) == 0 {
		return again, errors.Join(pool, err)
	}
	if a.cfg.AwaitIPAM != nil {
		if err := a.cfg.AwaitIPAM(ctx, rev); err != nil {
			return again, errors.Join(pool, err)
		}
	}
	next, err := a.tunnels(ctx, self, want)
	due = err != nil
	return sooner(again, next), errors.Join(pool, err)
}

func (a *Agent) setDue() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.due = true
}

// sooner returns the shorter of two times, of which 0 is never.
func sooner(a, b time.Duration) time.Duration {
	if a == 0 || b != 0 && b < a {
		return b
	}
	return a
}

// ensurePools makes the default pools of families that never had one.
func (a *Agent) ensurePools(ctx context.Context, u dataplane.Underlay, missing []DefaultPool) error {
	var errs []error
	for _, p := range missing {
		overlaps := slices.DeleteFunc(Overlaps(u, p.CIDR, a.OwnPodCIDRs()), func(o Overlap) bool { return o.OtherPods })
		made, err := EnsureDefaultPool(ctx, a.cfg.Store, p, overlaps...)
		if err != nil {
			errs = append(errs, err)
		}
		if made {
			a.cfg.Log.Info("made the default pool", "cidr", p.CIDR, "encapsulation", p.Encapsulation)
		}
	}
	return errors.Join(errs...)
}

// nodeTunnel returns the address of a tunnel that a Node resource has.
func nodeTunnel(n *store.Node, t Tunnel) netip.Addr {
	if n == nil {
		return netip.Addr{}
	}
	s := ""
	switch t {
	case TunnelIPIP:
		if n.Spec.BGP != nil {
			s = n.Spec.BGP.IPv4IPIPTunnelAddr
		}
	case TunnelVXLAN:
		s = n.Spec.IPv4VXLANTunnelAddr
	case TunnelIPIPv6:
		s = n.Annotations[store.AnnotationIPv6IPIPTunnelAddr]
	case TunnelVXLANv6:
		s = n.Spec.IPv6VXLANTunnelAddr
	}
	a, _ := addressOf(s)
	return a
}

// conditionPrefix marks conditions as routerd's, so that those of others in
// the same resource are left alone.
const conditionPrefix = "routerd.io/"

func ownCondition(t string) bool { return strings.HasPrefix(t, conditionPrefix) }

// Condition makes one of the node's conditions. It is true when err is nil.
func Condition(name string, err error) metav1.Condition {
	c := metav1.Condition{
		Type: conditionPrefix + name, Status: metav1.ConditionTrue, Reason: "AsWanted",
		LastTransitionTime: metav1.NewTime(time.Now().UTC().Truncate(time.Second)),
	}
	if err != nil {
		c.Status, c.Reason, c.Message = metav1.ConditionFalse, "NotAsWanted", err.Error()
	}
	return c
}

// writeConditions writes the conditions if the resource has others.
func (a *Agent) writeConditions(ctx context.Context) {
	a.mu.Lock()
	self, registered := a.self, a.status.Registered
	a.mu.Unlock()
	if a.cfg.Conditions == nil || !registered || self == nil {
		return
	}
	now := a.cfg.Conditions()
	have := slices.DeleteFunc(slices.Clone(self.Status.Conditions), func(c metav1.Condition) bool { return !ownCondition(c.Type) })
	same := slices.EqualFunc(now, have, func(x, y metav1.Condition) bool {
		return x.Type == y.Type && x.Status == y.Status && x.Message == y.Message
	})
	if same {
		return
	}
	call, cancel := context.WithTimeout(ctx, attemptTimeout)
	defer cancel()
	err := SetConditions(call, a.cfg.Store, a.cfg.Name, now)
	if err != nil && ctx.Err() == nil && !errors.Is(err, store.ErrUnavailable) { // that the store is away is told elsewhere
		a.cfg.Log.Warn("conditions not written; will try again", "error", err)
	}
}
