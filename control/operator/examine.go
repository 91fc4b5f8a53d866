package operator

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/attach"
	"github.com/routerd/routerd/control/bgp"
	"github.com/routerd/routerd/control/doctor"
	"github.com/routerd/routerd/control/encap"
	"github.com/routerd/routerd/control/rib"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/felix"
	"github.com/routerd/routerd/dataplane/survey"
	"github.com/routerd/routerd/store"
)

// How long an examination takes at most, and parts of it.
const (
	examineWithin = 4 * time.Second
	claimsWithin  = 500 * time.Millisecond
	// maxClaims bounds for how many addresses of one link is asked.
	maxClaims = 256
	// podsAtOnce is how many workloads are looked into at a time.
	podsAtOnce = 8
)

// examination gathers facts. Its parts run side by side; each fills in its own.
type examination struct {
	s  *Server
	v  view
	wg sync.WaitGroup

	mu      sync.Mutex // guards what follows
	facts   doctor.Facts
	unknown []string
	clocked []doctor.Clock // by what peers answered to probes
}

// Examine implements [rpc.Doctor]: it says what is wrong with this host now and, if it is asked to look at the others, with their
// clocks.
func (s *Server) Examine(ctx context.Context, req *apiv1.ExamineRequest) (*apiv1.ExamineResponse, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, examineWithin, fmt.Errorf("no answer within %v", examineWithin))
	defer cancel()
	n, err := s.Node(ctx)
	if err != nil {
		return nil, err
	}
	e := &examination{s: s, v: s.view(ctx, s.sessions())}
	e.facts.Node, e.facts.Now = n, time.Now()
	e.underlay()
	part := func(what string, f func(context.Context) error) {
		e.wg.Go(func() {
			if err := f(ctx); err != nil {
				e.set(func() { e.unknown = append(e.unknown, fmt.Sprintf("%s: %v", what, err)) })
			}
		})
	}
	nodes := e.ways(ctx)
	e.facts.Nodes = nodes
	part("the host", e.host)
	part("the underlay", e.paths)
	part("tunnels", e.echoes)
	part("addresses", func(ctx context.Context) error { return e.claims(ctx, nodes) })
	part("workloads", e.pods)
	part("disks", e.disks)
	part("announcements", e.hidden)
	if req.GetHosts() {
		part("clocks", e.clocks)
	}
	e.wg.Wait()
	e.unknown = append(e.unknown, doctor.Awaited(e.facts)...)
	e.facts.Clocks = withClocks(e.facts.Clocks, e.clocked)
	slices.Sort(e.unknown)
	out := &apiv1.ExamineResponse{Node: s.cfg.Node, Unknown: e.unknown}
	for _, f := range doctor.Examine(e.facts) {
		out.Findings = append(out.Findings, f.Proto())
	}
	return out, nil
}

// set changes the facts.
func (e *examination) set(f func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	f()
}

// underlay is what the parts know already.
func (e *examination) underlay() {
	f := &e.facts
	f.Pools = cidrs(e.v.pools)
	for _, r := range e.s.foreignRoutes(e.v) {
		f.Foreign = append(f.Foreign, doctor.Foreign{Theirs: r.String(), Ours: r.Ours()})
	}
	u, _ := e.s.cfg.Agent.Underlay()
	for _, l := range u.Links {
		if l.Name == f.Node.GetUplink() || l.Name == f.Node.GetIpv6Uplink() {
			f.Uplinks = append(f.Uplinks, l)
		}
	}
	for _, s := range []string{f.Node.GetIpv4Address(), f.Node.GetIpv6Address()} {
		p, err := netip.ParsePrefix(s)
		if err == nil && !slices.ContainsFunc(u.Addresses, func(a dataplane.UnderlayAddress) bool { return a.Prefix.Addr() == p.Addr() }) {
			f.Missing = append(f.Missing, p)
		}
	}
	for _, st := range e.s.cfg.Kernel.Statuses() {
		if st.State == dataplane.Failed && !e.poolsOwn(st.Object.Key()) {
			o := &apiv1.ObjectStatus{Kind: st.Object.Key().Kind().String(), Object: st.Object.String(), Source: st.Source.String(), State: st.State.String()}
			if st.Err != nil {
				o.Reason = st.Err.Error()
			}
			f.Failed = append(f.Failed, o)
		}
	}
}

// poolsOwn reports whether an object is one that a pool needs of this host: what is
// wrong with it is said of the pool.
func (e *examination) poolsOwn(k dataplane.Key) bool {
	return slices.ContainsFunc(e.v.pools, func(p encap.PoolStatus) bool { return slices.Contains(p.Host, k) })
}

// host looks at what is nobody's own.
func (e *examination) host(context.Context) error {
	h, err := survey.Look(uint8(e.s.cfg.RouteProtocol), e.s.cfg.Sysctls)
	var rest []string
	left, err2 := felix.Find()
	for _, r := range left {
		if r.Judges() {
			rest = append(rest, r.String())
		}
	}
	programs, err3 := felix.Running()
	e.set(func() { e.facts.Host, e.facts.Felix, e.facts.Calico = h, rest, programs })
	return errors.Join(err, err2, err3)
}

func (e *examination) paths(ctx context.Context) error {
	r, err := e.s.Paths(ctx)
	if err != nil {
		return err
	}
	e.set(func() { e.facts.Paths, e.clocked = r.GetPaths(), clocked(r.GetPaths()) })
	return nil
}

func (e *examination) echoes(ctx context.Context) error {
	list, err := e.s.Echoes(ctx)
	if err != nil {
		return errors.Join(err, e.barred(ctx, nil))
	}
	var heard []doctor.Known
	var asking sync.WaitGroup
	asking.Go(func() { heard = e.s.heardBy(ctx, list) })
	err = e.barred(ctx, list)
	asking.Wait()
	var out []doctor.Echo
	for i, x := range list {
		if x.Refused || x.Err != nil {
			continue // packets get there, and nobody answers probes; or the device is said of its pool
		}
		out = append(out, doctor.Echo{
			Node: x.Node, Encap: x.Encap.String(), Device: x.Device, Addr: x.Addr, Answered: x.Answered, Heard: heard[i], Full: x.Full, Size: x.Size, Offload: x.Answered && x.Checksum == dataplane.No,
		})
	}
	e.set(func() { e.facts.Echoes = out })
	return err
}

// ways asks the kernel where it sends packets to and from each other host's blocks. It
// returns the other hosts by their addresses.
func (e *examination) ways(ctx context.Context) map[netip.Addr]string {
	nodes := map[netip.Addr]string{}
	asker, err := survey.Open()
	if err != nil {
		e.unknown = append(e.unknown, fmt.Sprintf("routes: %v", err))
		return nodes
	}
	defer asker.Close()
	for _, pool := range e.v.pools {
		cands, err := e.s.cfg.Core.Explain(ctx, pool.CIDR)
		if err != nil {
			e.unknown = append(e.unknown, fmt.Sprintf("routes: %v", err))
			return nodes
		}
		e.lost(ctx, cands)
		pod := e.podOf(dataplane.FamilyOf(pool.CIDR.Addr()))
		for _, c := range cands {
			if !c.Best || c.Source != rib.SourceStore || c.Link == "" || c.Peer == e.s.cfg.Node {
				continue
			}
			if c.NextHop.IsValid() {
				nodes[c.NextHop] = c.Peer
			}
			e.ask(asker, c, pod)
		}
	}
	return nodes
}

// lost notes the blocks of other hosts, among the candidates for a pool's prefixes, to
// which there is no route.
func (e *examination) lost(ctx context.Context, cands []rib.Candidate) {
	routed := map[netip.Prefix]bool{}
	for _, c := range cands {
		routed[c.Prefix] = routed[c.Prefix] || c.Best
	}
	for _, c := range cands {
		if routed[c.Prefix] || c.Source != rib.SourceStore || c.Peer == "" || c.Peer == e.s.cfg.Node {
			continue
		}
		routed[c.Prefix] = true // it is said once
		e.facts.Lost = append(e.facts.Lost, doctor.Lost{Prefix: c.Prefix, Node: c.Peer, Reason: c.Reason, Refused: e.refused(ctx, c.Prefix), Gone: e.gone(c.Peer)})
	}
}

// gone reports whether the cluster's copy has no Node of a name.
func (e *examination) gone(name string) bool {
	found, err := e.s.cfg.Snapshot(func(k store.Key) bool { return k == store.ResourceKey(store.KindNode, name) })
	return err == nil && len(found) == 0
}

// refused says why what BGP peers announce of a prefix is not let in.
func (e *examination) refused(ctx context.Context, p netip.Prefix) []string {
	if e.s.cfg.BGP == nil {
		return nil
	}
	var out []string
	for _, peer := range e.v.bgp.Peers {
		if peer.State != bgp.StateUp {
			continue
		}
		q := bgp.Query{Table: bgp.TableReceived, Peer: peer.ID, Prefix: p, Exact: true}
		_ = e.s.cfg.BGP.Query(ctx, q, func(r bgp.Route) bool { // without an answer the route is said to be missing, which it is
			if r.State == bgp.RouteFiltered {
				out = append(out, fmt.Sprintf("%s announces it, and %s", peer.Name, r.Reason))
			}
			return true
		})
	}
	return out
}

// hidden finds out which blocks of this host filters keep from its BGP peers.
func (e *examination) hidden(ctx context.Context) error {
	if e.s.cfg.BGP == nil {
		return nil
	}
	var own []netip.Prefix
	for _, b := range e.s.cfg.IPAM.Blocks() {
		own = append(own, b.CIDR)
	}
	list, err := e.s.cfg.BGP.Hidden(ctx, own)
	e.set(func() {
		for _, h := range list {
			e.facts.Hidden = append(e.facts.Hidden, doctor.Hidden{Prefix: h.Prefix, Peer: h.Peer.Name, Addr: h.Peer.Addr, Filter: h.Filter, Reason: h.Reason})
		}
	})
	return err
}

// podOf returns a workload of this host with an address of a family; the zero Endpoint:
// there is none.
func (e *examination) podOf(f dataplane.Family) attach.Endpoint {
	for _, w := range e.s.cfg.Attach.Endpoints() {
		if w.Device == "" || w.Lost != "" || w.State != "attached" {
			continue
		}
		if i := slices.IndexFunc(w.Addresses, func(a netip.Addr) bool { return dataplane.FamilyOf(a) == f }); i >= 0 {
			w.Addresses = w.Addresses[i : i+1]
			return w
		}
	}
	return attach.Endpoint{}
}

// ask asks for a packet from a workload, or this host where it has none, to the host
// of a candidate, and for one from there.
func (e *examination) ask(asker *survey.Asker, c rib.Candidate, pod attach.Endpoint) {
	there := c.Prefix.Addr()
	if !c.Prefix.IsSingleIP() {
		there = there.Next()
	}
	note := func(p survey.Packet, via netip.Addr, want ...string) {
		w := doctor.Way{Packet: p, Node: c.Peer, Want: want, Via: via}
		w.Hop, w.Err = asker.Ask(p)
		e.facts.Ways = append(e.facts.Ways, w)
	}
	links := strings.FieldsFunc(c.Link, func(r rune) bool { return r == ',' || r == ' ' })
	if pod.Device == "" {
		note(survey.Packet{To: there}, c.Via, links...)
		return
	}
	here := pod.Addresses[0]
	note(survey.Packet{From: here, To: there, In: pod.Device}, c.Via, links...)
	for _, l := range links {
		note(survey.Packet{From: there, To: here, In: l}, netip.Addr{}, pod.Device)
	}
}

// claims asks on the uplinks whether another machine has this host's address, or two
// have another host's.
func (e *examination) claims(ctx context.Context, nodes map[netip.Addr]string) error {
	for _, h := range e.v.hosts {
		i := slices.IndexFunc(e.facts.Uplinks, func(l dataplane.UnderlayLink) bool { return l.Name == h.Uplink })
		if i < 0 || !h.Addr.Addr().Is4() || e.facts.Uplinks[i].MAC == (dataplane.MAC{}) {
			continue
		}
		link := e.facts.Uplinks[i]
		ask := []netip.Addr{h.Addr.Addr()}
		for _, a := range slices.SortedFunc(maps.Keys(nodes), netip.Addr.Compare) {
			if h.Addr.Masked().Contains(a) && len(ask) < maxClaims {
				ask = append(ask, a)
			}
		}
		peers := e.downOn(h.Addr)
		got, err := survey.Claims(ctx, link, append(slices.Clone(ask), peers...), claimsWithin)
		if err != nil {
			return err
		}
		if err := e.silent(link.Name, slices.DeleteFunc(peers, func(a netip.Addr) bool { return len(got[a]) > 0 })); err != nil {
			return err
		}
		u, _ := e.s.cfg.Agent.Underlay()
		for _, a := range ask {
			// Another device of this host on the same wire answers for it, unless arp_ignore says otherwise.
			got[a] = slices.DeleteFunc(got[a], func(m dataplane.MAC) bool {
				return slices.ContainsFunc(u.Links, func(l dataplane.UnderlayLink) bool { return l.MAC == m })
			})
			enough := 2
			if a == h.Addr.Addr() {
				enough = 1 // the kernel does not answer itself
			}
			if len(got[a]) >= enough {
				e.set(func() {
					e.facts.Claims = append(e.facts.Claims, doctor.Claim{Device: link.Name, Addr: a, MACs: got[a]})
				})
			}
		}
	}
	return nil
}

// downOn returns the addresses on a link of BGP peers with which there is no session.
func (e *examination) downOn(link netip.Prefix) (out []netip.Addr) {
	for _, p := range e.facts.Node.GetPeers() {
		a, err := netip.ParseAddr(p.GetAddress())
		if err == nil && p.GetState() != "up" && a != link.Addr() && link.Masked().Contains(a) && !slices.Contains(out, a) && len(out) < maxClaims {
			out = append(out, a)
		}
	}
	return out
}

// silent takes note of addresses that did not answer, if the kernel, which asks as one that has an address, has no answer
// either: there are hosts that answer no probe.
func (e *examination) silent(device string, addrs []netip.Addr) error {
	if len(addrs) == 0 {
		return nil
	}
	asker, err := survey.Open()
	if err != nil {
		return err
	}
	defer asker.Close()
	for _, a := range addrs {
		n, err := asker.Neighbour(device, a)
		if err != nil {
			return err
		}
		if n.Unanswered() {
			e.set(func() {
				if e.facts.Silent == nil {
					e.facts.Silent = map[netip.Addr]string{}
				}
				e.facts.Silent[a] = device
			})
		}
	}
	return nil
}

// pods compares each workload with what ADD made.
func (e *examination) pods(ctx context.Context) error {
	var checks errgroup.Group
	checks.SetLimit(podsAtOnce)
	var late atomic.Int64
	for _, w := range e.s.cfg.Attach.Endpoints() {
		if w.State != "attached" || w.Lost != "" || w.Device == "" {
			continue
		}
		checks.Go(func() error {
			if ctx.Err() != nil {
				late.Add(1)
				return nil
			}
			if err := e.s.cfg.Attach.Check(ctx, attach.CheckRequest{ID: w.ID}); err != nil && ctx.Err() == nil {
				e.set(func() {
					e.facts.Pods = append(e.facts.Pods, doctor.Pod{Name: workloadName(w), Device: w.Device, Err: err})
				})
			}
			return nil
		})
	}
	_ = checks.Wait() // what failed is in the facts
	slices.SortFunc(e.facts.Pods, func(a, b doctor.Pod) int { return strings.Compare(a.Name, b.Name) })
	if n := late.Load(); n > 0 {
		return fmt.Errorf("%d of them were not checked in time", n)
	}
	return nil
}

// disks asks how full the file systems are that the daemon writes to.
func (e *examination) disks(context.Context) error {
	seen := map[unix.Fsid]bool{}
	for _, dir := range e.s.cfg.Dirs {
		var st unix.Statfs_t
		if err := unix.Statfs(dir, &st); err != nil {
			return fmt.Errorf("read the free space of %s: %w", dir, err)
		}
		if seen[st.Fsid] && st.Fsid != (unix.Fsid{}) {
			continue
		}
		seen[st.Fsid] = true
		size := uint64(st.Bsize) //nolint:gosec // of a block
		e.set(func() {
			e.facts.Disks = append(e.facts.Disks, doctor.Disk{Dir: dir, Free: st.Bavail * size, Size: st.Blocks * size, Files: st.Ffree, Inodes: st.Files})
		})
	}
	return nil
}
