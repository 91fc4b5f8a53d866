package policy

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/dataplane/filter"
	"github.com/routerd/routerd/store"
)

// Config says for which host a [Calculator] works.
type Config struct {
	Node string // required: the name of this host's Node

	// AutoHostEndpoints gives every Node a host endpoint <node>-auto-hep for all
	// of its interfaces, with its labels, that allows everything by profile, as
	// Calico's controllers do with hostEndpoint.autoCreate. A stored object of
	// that name goes before. A KubeControllersConfiguration may ask for them too.
	AutoHostEndpoints bool

	// HostPorts is what daemons of the cluster's hosts send each other besides
	// tunnels' packets, by protocol and destination port. Host endpoints leave it
	// open between these hosts whatever policies and failsafe ports say.
	HostPorts []filter.Tunnel

	// Guarded is which of that workloads do not reach at any host. Unless there is none,
	// the ports that BGPConfigurations name are added to it.
	Guarded []filter.Tunnel

	// TunnelsFromAnywhere has the host decapsulate packets from whomever they come.
	TunnelsFromAnywhere bool

	// MaxConnections is how many tracked connections of its own a workload may have at a
	// time; 0: any number.
	MaxConnections uint32

	// Services is what the datastore tells of the Services that rules name.
	Services Services

	// Datastore is where this host reaches the datastore, which host endpoints
	// leave open likewise: a policy that cuts it off could not be taken back.
	Datastore []filter.Failsafe
}

// Kinds lists the kinds that [Calculator.Update] looks at.
func Kinds() []store.Kind {
	return []store.Kind{
		store.KindTier, store.KindProfile, store.KindNode, store.KindIPPool, store.KindFelixConfiguration, store.KindBGPConfiguration, store.KindKubeControllersConfiguration,
		store.KindWorkloadEndpoint, store.KindHostEndpoint, store.KindNetworkSet, store.KindGlobalNetworkSet,
		store.KindNetworkPolicy, store.KindGlobalNetworkPolicy,
		store.KindStagedNetworkPolicy, store.KindStagedGlobalNetworkPolicy, store.KindStagedKubernetesNetworkPolicy,
	}
}

// Calculator keeps the ruleset of one host. It is not safe for concurrent use.
type Calculator struct {
	cfg      Config
	synced   bool
	ownOnly  bool // of workloads only this host's are known, or current
	flushed  bool // there was a step
	held     bool // something waits for the workloads of other hosts
	auto     bool // every Node has a host endpoint
	problems map[store.Key]string

	members  members  // who can be in sets
	nodes    nodes    // and which Nodes
	locals   locals   // whom this host judges packets at
	policies policies // and by what
	settings settings
}

// New returns a calculator that knows nothing yet.
func New(cfg Config) *Calculator {
	c := &Calculator{cfg: cfg, auto: cfg.AutoHostEndpoints, problems: make(map[store.Key]string)}
	c.members.init()
	c.members.services.init(cfg.Services)
	for _, id := range []filter.SetID{filter.NATSources, filter.NATExempt, filter.TunnelSources} {
		c.members.feed(id)
	}
	c.locals.init()
	c.policies.init()
	c.settings.init()
	// It exists without being stored, and cannot be changed.
	c.policies.put(c, store.DefaultAllow())
	return c
}

// HandleStore applies a step of [Kinds] of the cluster's copy, and of [ServiceKinds]. What follows from it is
// published by [Calculator.Flush].
func (c *Calculator) HandleStore(s cluster.Step) {
	for _, ch := range s.Changes {
		if ch.Err != nil {
			c.problems[ch.Key] = ch.Err.Error()
			if ch.Key.Kind == store.KindEndpointSlice {
				c.members.services.breaks(ch.Key)
			}
			continue
		}
		delete(c.problems, ch.Key)
		c.change(ch)
	}
	c.members.services.setLacks(slices.Contains(s.Lacks, store.KindEndpointSlice))
	c.synced, c.ownOnly = c.synced || s.Synced, s.OwnOnly
}

// Update is [Calculator.HandleStore] of what the datastore says.
func (c *Calculator) Update(b store.Batch) {
	s := cluster.Step{Revision: b.Revision, Synced: b.Synced, OwnOnly: b.OwnOnly}
	for _, ev := range b.Events {
		s.Changes = append(s.Changes, cluster.Decode(c.cfg.Node, ev))
	}
	c.HandleStore(s)
}

// change hands an object, or its deletion, to those who use it.
func (c *Calculator) change(ch *cluster.Change) {
	key, o := ch.Key, ch.Object
	o.Key = key
	switch key.Kind {
	case store.KindTier:
		t, _ := o.Value.(*v3.Tier)
		c.policies.putTier(c, key.Name, t)
	case store.KindProfile:
		if key.Name == store.DefaultAllowProfile {
			return
		}
		p, _ := o.Value.(*v3.Profile)
		c.members.putProfile(key.Name, p)
		c.locals.putProfile(key.Name, p)
		c.policies.put(c, store.Object{Key: key, Value: o.Value, Raw: o.Raw})
	case store.KindNode:
		n, _ := ch.Value.(*cluster.Node)
		c.settings.putNode(c, key.Name, n)
		c.nodes.put(c, key.Name, n)
		c.autoHostEndpoint(key.Name, n)
	case store.KindIPPool:
		p, _ := ch.Value.(*cluster.Pool)
		c.settings.putPool(c, key.Name, p)
	case store.KindFelixConfiguration:
		c.settings.putFelix(key.Name, o)
	case store.KindBGPConfiguration:
		b, _ := o.Value.(*v3.BGPConfiguration)
		c.settings.putBGP(key.Name, b)
	case store.KindKubeControllersConfiguration:
		k, _ := ch.Value.(*cluster.Controllers)
		c.putControllers(key, k)
	case store.KindEndpointSlice:
		s, _ := o.Value.(*store.EndpointSlice)
		c.members.services.put(&c.members, key, s)
	case store.KindWorkloadEndpoint, store.KindNetworkSet, store.KindGlobalNetworkSet:
		c.putLabelled(key, o.Value)
	case store.KindHostEndpoint:
		if _, auto := c.locals.auto[key.Name]; auto && o.Value == nil {
			c.locals.stored[key.Name] = false
			c.putLabelled(key, c.locals.auto[key.Name])
			return
		}
		c.locals.stored[key.Name] = o.Value != nil
		c.putLabelled(key, o.Value)
	case store.KindNetworkPolicy, store.KindGlobalNetworkPolicy,
		store.KindStagedNetworkPolicy, store.KindStagedGlobalNetworkPolicy, store.KindStagedKubernetesNetworkPolicy:
		c.policies.put(c, store.Object{Key: key, Value: o.Value, Raw: o.Raw})
	}
}

// putLabelled applies what can be a member of sets, and judges packets if it
// is of this host.
func (c *Calculator) putLabelled(key store.Key, v any) {
	c.members.put(c, key, v)
	c.locals.put(c, key, v)
}

// SetInterfaces sets the addresses of the host's own interfaces, by name. Host
// endpoints that name no interface are found by them.
func (c *Calculator) SetInterfaces(addrs map[string][]netip.Addr) {
	c.locals.setInterfaces(addrs)
	c.ownInterfaces()
}

// virtualLink is where kube-proxy has the addresses of Services in its mode ipvs, and nowhere else.
const virtualLink = "kube-ipvs0"

// SetHostLinks sets which interfaces cannot be workloads', by what they are:
// physical devices, tunnels, bridges and the like.
func (c *Calculator) SetHostLinks(names map[string]bool) {
	c.settings.stale = c.settings.stale || names[virtualLink] != c.locals.hostLinks[virtualLink]
	c.locals.hostLinks = maps.Clone(names)
	c.ownInterfaces()
}

// ownInterfaces has the endpoints of interfaces that became the host's own, or
// are it no more, judged anew, and the prefixes of workloads' names too.
func (c *Calculator) ownInterfaces() {
	l := &c.locals
	own := ownInterfaces(l.hostLinks, l.addrs, c.settings.ownHosts(c.cfg.Node))
	if !maps.Equal(own, l.links.own) {
		l.links.own, c.settings.stale = own, true
		l.touchNamed()
	}
}

// Problem is an object that cannot be used as it is.
type Problem struct {
	Key    store.Key
	Reason string
}

// Problems lists the objects that cannot be used, or not all of them, in the
// order of their keys.
func (c *Calculator) Problems() []Problem {
	var list []Problem
	for k, reason := range c.problems {
		list = append(list, Problem{k, reason})
	}
	for _, reason := range c.settings.now.problems {
		list = append(list, Problem{store.ResourceKey(store.KindFelixConfiguration, store.DefaultName), reason})
	}
	for id, reason := range c.policies.closed {
		list = append(list, Problem{store.Key{Kind: store.Kind(id.Kind), Namespace: id.Namespace, Name: id.Name}, reason})
	}
	c.locals.clashes(func(k store.Key, reason string) { list = append(list, Problem{k, reason}) })
	slices.SortFunc(list, func(a, b Problem) int { return cmp.Or(compareKeys(a.Key, b.Key), cmp.Compare(a.Reason, b.Reason)) })
	return list
}

// Flush returns the step from what was published before to what is known now. It is
// false before the store's state is complete, for rules from half of it would
// let through what they must not. Where workloads of other hosts are not all known,
// what depends on them stays as it was published: see [Calculator.AsksOthers].
func (c *Calculator) Flush() (filter.Delta, bool) {
	if !c.synced {
		return filter.Delta{}, false
	}
	var d filter.Delta
	c.policies.settle(c)
	c.settings.current(c) // what changes there can touch endpoints and sets
	c.members.settle()
	c.nodes.settle()
	c.locals.settle(c)
	if c.held = c.ownOnly && !c.flushed && c.dependsOnOthers(); c.held {
		return filter.Delta{}, false // the kernel has the rules of the run before
	}
	c.flushed = true
	d.PutEndpoints, d.DelEndpoints = c.locals.emit(c)
	d.PutPolicies, d.DelPolicies = c.policies.emit(c)
	d.Settings = c.settings.emit(c)
	d.PutSets, d.Members, d.DelSets = c.members.emit(c.ownOnly)
	put, changes, del := c.nodes.emit(false) // of Nodes all are known
	d.PutSets, d.Members, d.DelSets = append(d.PutSets, put...), append(d.Members, changes...), append(d.DelSets, del...)
	return d, true
}

// Snapshot returns the ruleset that the steps published so far lead to.
func (c *Calculator) Snapshot() *filter.Ruleset {
	r := filter.NewRuleset()
	c.members.published(r)
	c.nodes.published(r)
	maps.Copy(r.Policies, c.policies.published)
	for name, e := range c.locals.published {
		r.Endpoints[name] = e.Endpoint
	}
	if c.settings.published != nil {
		r.Settings = *c.settings.published
	}
	return r
}

// sortedKeys returns the keys of a map in order, and empties it.
func sortedKeys[K comparable, V any](m map[K]V, compare func(a, b K) int) []K {
	keys := slices.SortedFunc(maps.Keys(m), compare)
	clear(m)
	return keys
}
