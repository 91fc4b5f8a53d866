package operator

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc/status"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/bgp"
	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/control/doctor/gather"
	"github.com/routerd/routerd/control/ipam"
	"github.com/routerd/routerd/control/node"
	"github.com/routerd/routerd/control/rib"
	"github.com/routerd/routerd/control/rpc"
	"github.com/routerd/routerd/control/vrouter"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
)

const (
	// planWithin is how long the hosts have for their answers.
	planWithin = 10 * time.Second
	// plannedAtMost bounds how many objects and how many rules an answer lists: it passes through the
	// datastore, which takes no value above 1.5 MiB.
	plannedAtMost = 2000
)

// Plan implements [rpc.Operator]. It asks every host, and yields one answer for each; those
// that cannot be asked say why.
func (s *Server) Plan(ctx context.Context, req *apiv1.PlanRequest, yield func(*apiv1.HostPlan) error) error {
	if _, err := rpc.Changes(req.GetChanges(), everyKind); err != nil {
		return err
	}
	listing, done := context.WithTimeout(ctx, listWithin)
	defer done()
	c, err := gather.Members(listing, s.cfg.Store, s.cfg.Presences)
	if err != nil {
		return fmt.Errorf("list the hosts: %w", err)
	}
	hosts, ask := s.members(c)
	for _, name := range slices.Sorted(maps.Keys(hosts)) {
		if why := hosts[name].GetError(); why != "" {
			if err := yield(&apiv1.HostPlan{Node: name, Error: why}); err != nil {
				return err
			}
		}
	}
	answers := make(chan *apiv1.HostPlan)
	var asking sync.WaitGroup
	defer asking.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	give := func(p *apiv1.HostPlan) {
		select {
		case answers <- p:
		case <-ctx.Done():
		}
	}
	asking.Go(func() {
		defer close(answers)
		var both sync.WaitGroup
		both.Go(func() {
			p, err := s.hostPlan(ctx, req)
			if err != nil {
				p = &apiv1.HostPlan{Error: status.Convert(err).Message()}
			}
			p.Node = s.cfg.Node
			give(p)
		})
		both.Go(func() {
			if len(ask) == 0 {
				return
			}
			s.askAll(ctx, planWithin, ask, &apiv1.Question{Plan: req}, func(name string, a *apiv1.Answer, err error) {
				p := a.GetPlan()
				if err != nil {
					p = &apiv1.HostPlan{Error: err.Error()}
				}
				p.Node = name // whatever it calls itself
				give(p)
			})
		})
		both.Wait()
	})
	for p := range answers {
		if err := yield(p); err != nil {
			return err
		}
	}
	return ctx.Err()
}

func everyKind(store.Kind) bool { return true }

// hostPlan says what a change would do to this host.
func (s *Server) hostPlan(ctx context.Context, req *apiv1.PlanRequest) (*apiv1.HostPlan, error) {
	events, err := rpc.Changes(req.GetChanges(), everyKind)
	if err != nil {
		return nil, err
	}
	changes := s.decoded(events)
	out := &apiv1.HostPlan{Node: s.cfg.Node}
	f := s.foreseeing()
	ahead := vrouter.Ahead{Changes: changes, Hosts: f.hosts, Learned: s.stillLearned(events)}
	foreseen, err := s.cfg.Core.Plan(ctx, ahead)
	if err != nil {
		out.Unknown = append(out.Unknown, fmt.Sprintf("the kernel's routes and devices: %v", err))
	}
	name := f.names()
	for _, d := range foreseen.Objects {
		if len(out.GetObjects()) == plannedAtMost {
			out.LeftOut++
			continue
		}
		kind := d.Key.Kind().String()
		out.Objects = append(out.Objects, &apiv1.PlannedObject{
			Kind: kind, Name: name.Replace(strings.TrimPrefix(d.Key.String(), kind+" ")), Was: name.Replace(d.Was), Will: name.Replace(d.Will),
		})
	}
	out.Annotations = plannedAnnotations(foreseen.Was, foreseen.Will)
	rules, err := s.plannedRules(ctx, changes)
	if err != nil {
		out.Unknown = append(out.Unknown, fmt.Sprintf("rules of policy: %v", status.Convert(err).Message()))
	}
	out.Rules = rules[:min(len(rules), plannedAtMost)]
	out.LeftOut += uint32(len(rules) - len(out.GetRules())) //nolint:gosec // it is not negative
	out.Tunnels = f.said
	out.Addresses = s.addressesIn(changes)
	return out, nil
}

// decoded reads changes of resources as the cluster's copy has them.
func (s *Server) decoded(events []store.Event) []*cluster.Change {
	changes := make([]*cluster.Change, 0, len(events))
	for _, ev := range events {
		changes = append(changes, cluster.Decode(s.cfg.Node, ev))
	}
	return changes
}

// plannedAnnotations compares what a host publishes about encapsulations before and after a change. What its kernel refuses,
// and where it stays because probes get lost, is not foreseen.
func plannedAnnotations(was, will store.NodeEncaps) []*apiv1.PlannedObject {
	var before, after store.Node
	store.SetNodeEncaps(&before, was)
	store.SetNodeEncaps(&after, will)
	var out []*apiv1.PlannedObject
	for _, name := range []string{store.AnnotationAccepts, store.AnnotationUses, store.AnnotationSends} {
		show := func(n *store.Node) string {
			if v, ok := n.Annotations[name]; ok {
				return name + ": " + v
			}
			return ""
		}
		if a, b := show(&before), show(&after); a != b {
			out = append(out, &apiv1.PlannedObject{Kind: "annotation", Name: name, Was: a, Will: b})
		}
	}
	return out
}

// stillLearned says which of BGP's paths are left after a change: a session that ends takes along
// what its peer is the best for. Which others announce the same is known when it has ended.
func (s *Server) stillLearned(events []store.Event) func(rib.Path) bool {
	if s.cfg.BGP == nil {
		return nil
	}
	plan, err := s.cfg.BGP.PlanOwn(events)
	if err != nil {
		return nil // the plan for BGP says why
	}
	ended := map[string]bool{}
	for _, x := range plan.Sessions {
		if x.Fate == bgp.SessionEnds || x.Fate == bgp.SessionRefused {
			ended[x.Peer.Name] = true
		}
	}
	for _, x := range plan.Sessions {
		if x.Fate != bgp.SessionEnds && x.Fate != bgp.SessionRefused {
			delete(ended, x.Peer.Name) // it has another one, by another address
		}
	}
	return func(p rib.Path) bool { return !ended[p.Value().Peer] }
}

// addressesIn lists the addresses of this host's workloads that lie in pools that change.
func (s *Server) addressesIn(changes []*cluster.Change) []*apiv1.PlannedAddresses {
	var out []*apiv1.PlannedAddresses
	for _, ch := range changes {
		p, ok := ch.Value.(*cluster.Pool)
		if !ok {
			continue
		}
		in := &apiv1.PlannedAddresses{Pool: p.Name}
		for _, e := range s.cfg.Attach.Endpoints() {
			for _, a := range e.Addresses {
				if p.CIDR.IsValid() && p.CIDR.Contains(a) {
					in.Addresses = append(in.Addresses, a.String())
				}
			}
		}
		if slices.Sort(in.Addresses); len(in.Addresses) > 0 {
			out = append(out, in)
		}
	}
	return out
}

// foreseeing says which addresses nodes' tunnels will have, and which blocks nodes hold. An address that a node is yet to
// take is not known: another stands for it, which is of no network (RFC 1112, section 4; RFC 6666).
type foreseeing struct {
	self     string
	ipam     *ipam.Allocator
	kind     func(node.Tunnel) ipam.TunnelKind
	invented map[netip.Addr]string // what each is, for people
	said     []string              // of this host
}

// hosts implements [vrouter.Ahead].
func (f *foreseeing) hosts(pools []*cluster.Pool) func(*cluster.Node) (*cluster.Node, []*cluster.Block) {
	needed, foresight := node.Needed(slices.Values(pools)), f.ipam.Foresight(pools)
	return func(n *cluster.Node) (*cluster.Node, []*cluster.Block) {
		foresight.Node(n)
		out := f.node(n, needed, foresight)
		blocks := foresight.Blocks()
		for _, b := range blocks {
			switch {
			case n.Name != f.self:
			case b.Holder == "":
				f.said = append(f.said, fmt.Sprintf("releases block %s, which is then empty", b.CIDR))
			default:
				f.said = append(f.said, fmt.Sprintf("takes block %s", b.CIDR))
			}
		}
		return out, blocks
	}
}

// node says what becomes of a node's tunnels.
func (f *foreseeing) node(n *cluster.Node, needed map[node.Tunnel]bool, foresight *ipam.Foresight) *cluster.Node {
	out := *n
	for _, t := range node.AllTunnels() {
		kind, addrs, family := f.kind(t), &out.IPIPAddr, dataplane.IPv4
		if t == node.TunnelVXLAN || t == node.TunnelVXLANv6 {
			addrs = &out.VXLANAddr
		}
		if t == node.TunnelIPIPv6 || t == node.TunnelVXLANv6 {
			family = dataplane.IPv6
		}
		have := addrs.Of(family)
		keep, from := false, ""
		if needed[t] {
			keep, from = foresight.Tunnel(kind, have)
			// A tunnel that a pool wants, and through which packets travel, keeps the address that it has.
			keep = keep || from == "" && have.IsValid()
		}
		if keep {
			continue
		}
		if have.IsValid() {
			foresight.Release(have)
		}
		var will netip.Addr
		if from != "" {
			will = f.invent(n.Name, family)
		}
		if *addrs = addrs.With(family, will); n.Name == f.self {
			f.say(kind, have, from)
		}
	}
	return &out
}

// invent returns an address that stands for one that a node is yet to take.
func (f *foreseeing) invent(name string, family dataplane.Family) netip.Addr {
	n := len(f.invented) + 1
	addr := netip.AddrFrom4([4]byte{240, byte(n >> 16), byte(n >> 8), byte(n)})
	if family == dataplane.IPv6 {
		addr = netip.AddrFrom16([16]byte{0: 1, 13: byte(n >> 16), 14: byte(n >> 8), 15: byte(n)})
	}
	f.invented[addr] = "(an address that " + name + " takes)"
	return addr
}

func (f *foreseeing) say(kind ipam.TunnelKind, have netip.Addr, from string) {
	if from != "" {
		f.said = append(f.said, fmt.Sprintf("takes an address of pool %s for its %s", from, kind))
	}
	if have.IsValid() {
		f.said = append(f.said, fmt.Sprintf("releases %s of its %s", have, kind))
	}
}

// names replaces invented addresses by what they are.
func (f *foreseeing) names() *strings.Replacer {
	var pairs []string
	// The longest first: another may begin with a shorter one.
	for _, a := range slices.SortedFunc(maps.Keys(f.invented), func(a, b netip.Addr) int { return len(b.String()) - len(a.String()) }) {
		pairs = append(pairs, a.String(), f.invented[a])
	}
	return strings.NewReplacer(pairs...)
}
