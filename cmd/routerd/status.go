package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/routerd/routerd/cni"
	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/bgp"
	"github.com/routerd/routerd/control/health"
	"github.com/routerd/routerd/control/node"
	"github.com/routerd/routerd/control/vrouter"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/felix"
	"github.com/routerd/routerd/store"
)

// loopLimit is how long a loop may be silent before the daemon counts as hung.
// Loops turn at least every second or two when idle; a pass over a large table
// takes tens of milliseconds.
const loopLimit = 15 * time.Second

// live says whether the loops turn.
func (d *router) live() error {
	now := time.Now()
	return errors.Join(
		health.Turning("the core", d.core.Alive(), now, loopLimit),
		health.Turning("the kernel writer", d.kernel.Alive(), now, loopLimit),
	)
}

// answerWithin is how long a report waits for a part that does not answer. It
// then says so instead of hanging: reports are for the time of trouble.
const answerWithin = 2 * time.Second

// view is what a report is made of. Each part is asked once.
type view struct {
	node    node.Status
	refused error // another machine has this host's name
	bgp     bgp.Status
	pools   []vrouter.PoolStatus
	hosts   []dataplane.Host // by family, where this host has an address
	waiting string           // what the core waits for
	coreErr error            // the core did not answer
}

func (d *router) view(ctx context.Context, b bgp.Status) view {
	ctx, cancel := context.WithTimeout(ctx, answerWithin)
	defer cancel()
	v := view{node: d.node.Status(), refused: d.presence.Refused(), bgp: b}
	if v.waiting, v.coreErr = d.core.Waiting(ctx); v.coreErr == nil {
		v.pools, v.coreErr = d.core.Pools(ctx)
	}
	for _, f := range []dataplane.Family{dataplane.IPv4, dataplane.IPv6} {
		if h, err := d.core.Host(ctx, f); err == nil && h.Addr.IsValid() {
			v.hosts = append(v.hosts, h)
		}
	}
	return v
}

// registered says what keeps this host from being registered. Once it was, a
// datastore that is away does not count: what runs keeps running, and that is
// a condition of its own.
func (v view) registered() error {
	switch {
	case v.refused != nil:
		return v.refused
	case v.node.Complete && errors.Is(v.node.Err, store.ErrUnavailable):
		return nil
	case v.node.Err != nil:
		return v.node.Err
	case !v.node.Registered:
		return errors.New("waiting for the datastore's first answer")
	case !v.node.Complete:
		return errors.New("waiting for the addresses of its tunnel devices")
	}
	return nil
}

// programmed says what keeps this host's dataplane from being programmed.
func (v view) programmed(kernelReady func() (bool, string)) error {
	switch ok, reason := kernelReady(); {
	case v.coreErr != nil:
		return v.coreErr
	case v.waiting != "":
		return errors.New("waiting for " + v.waiting)
	case !ok:
		return errors.New(reason)
	}
	return nil
}

// report answers all of health's questions.
func (d *router) report(ctx context.Context) health.Report {
	return d.reportOf(d.view(ctx, d.bgpSessions()))
}

func (d *router) reportOf(v view) health.Report {
	programmed := v.programmed(d.kernel.Ready)
	if programmed == nil {
		programmed = d.policyWaiting()
	}
	ready := []health.Check{
		d.checks.Note("Registered", v.registered()),
		d.checks.Note("DataplaneProgrammed", programmed),
	}
	r := health.Report{Live: d.liveCheck(), Ready: health.Join("ready", ready)}
	// A datastore that is away does not make this host unready: what runs
	// keeps running. It is a condition of its own.
	r.Conditions = append(ready, d.checks.Note("Address", v.node.AddressErr), d.checks.Note("Datastore", d.datastoreError()),
		d.checks.Note("BGP", v.bgp.Err), d.checks.Note("WorkloadMTU", d.mtuError(v)),
		d.checks.Note("Policy", d.policyError()), d.checks.Note("Journal", d.journalError()),
		d.checks.Note("FelixRules", felixError(d.felix.look(time.Now(), felix.Find, d.log))),
		d.checks.Note("WorkloadAddresses", d.lostAddresses()),
		d.checks.Note("ForeignRoutes", foreignError(d.foreignRoutes(v.pools, v.coreErr))))
	for _, p := range v.pools {
		r.Conditions = append(r.Conditions, d.checks.Note("Pool/"+p.Name, d.poolError(p)))
	}
	for _, p := range peersOf(v.bgp) {
		var err error
		if !p.up {
			err = errors.New(p.proto.GetInfo())
		}
		r.Peers = append(r.Peers, d.checks.Note("peer "+p.proto.GetAddress(), err))
	}
	return r
}

func (d *router) liveCheck() health.Check { return d.checks.Note("live", d.live()) }

// conditions are those that the Node resource carries.
func (d *router) conditions() []metav1.Condition {
	r := d.report(context.Background())
	out := []metav1.Condition{condition("Ready", r.Ready)}
	for _, c := range r.Conditions {
		// What says that the store is away cannot be written to it.
		if c.Name != "Datastore" {
			out = append(out, condition(strings.ReplaceAll(c.Name, "/", "-"), c))
		}
	}
	return out
}

func condition(name string, c health.Check) metav1.Condition {
	var err error
	if !c.OK {
		err = errors.New(c.Reason)
	}
	return node.Condition(name, err)
}

// poolError says what this host lacks to carry a pool's packets: the driver's
// device cannot be made, say.
func (d *router) poolError(p vrouter.PoolStatus) error {
	if p.Err != nil {
		return p.Err
	}
	if reason := d.unusablePool(p.Name); reason != "" {
		return errors.New(reason)
	}
	for _, key := range p.Host {
		st, ok := d.kernel.Status(key)
		if !ok || st.State != dataplane.Failed {
			continue
		}
		if l, ok := key.(dataplane.LinkKey); ok {
			return fmt.Errorf("device %s: %w", l.Name, st.Err)
		}
		return fmt.Errorf("%s: %w", key, st.Err)
	}
	return nil
}

func checkProto(c health.Check) *apiv1.Check {
	return &apiv1.Check{Name: c.Name, Ok: c.OK, Reason: c.Reason, Since: timestamp(c.Since)}
}

func timestamp(t time.Time) *timestamppb.Timestamp {
	if t.IsZero() {
		return nil
	}
	return timestamppb.New(t)
}

// Node implements [rpc.Operator].
func (d *router) Node(ctx context.Context) (*apiv1.NodeResponse, error) {
	v := d.view(ctx, d.bgpStatus(ctx))
	ns, rep := v.node, d.reportOf(v)
	out := &apiv1.NodeResponse{
		Name: d.name, Version: version, Pid: int64(os.Getpid()), Started: timestamp(d.started),
		Datastore: d.datastoreName(), WorkloadMtu: int32(d.workloadMTU()),
		Health: &apiv1.Health{Live: checkProto(rep.Live), Ready: checkProto(rep.Ready)},
	}
	addAddresses(ns, out)
	for _, c := range rep.Conditions {
		out.Health.Conditions = append(out.Health.Conditions, checkProto(c))
	}
	d.addBGP(v.bgp, out)
	out.Workloads = int32(len(d.endpoints()))
	for _, p := range v.pools {
		ps := &apiv1.PoolStatus{Name: p.Name, Cidr: p.CIDR.String(), Encapsulation: string(p.Encapsulation), Usable: true}
		if err := d.poolError(p); err != nil {
			ps.Usable, ps.Reason = false, err.Error()
		} else {
			ps.Reason = delays(p)
		}
		out.Pools = append(out.Pools, ps)
	}
	out.Blocks = d.blocks()
	out.Notes = d.notes(v)
	return out, nil
}

// Routes implements [rpc.Operator].
func (d *router) Routes(ctx context.Context, filter netip.Prefix, all bool) (*apiv1.RoutesResponse, error) {
	cands, err := d.core.Explain(ctx, filter)
	if err != nil {
		return nil, err
	}
	statuses := d.kernel.Statuses()
	byPrefix := map[netip.Prefix]dataplane.Status{}
	for _, st := range statuses {
		if r, ok := st.Object.(dataplane.Route); ok {
			byPrefix[r.Prefix] = st
		}
	}
	out := &apiv1.RoutesResponse{}
	for _, e := range d.endpoints() {
		for _, a := range e.Addresses {
			p := netip.PrefixFrom(a, a.BitLen())
			if filter.IsValid() && !filter.Overlaps(p) {
				continue
			}
			r := &apiv1.Route{
				Prefix: p.String(), Best: true, Source: vrouter.SourceLocal, Type: "workload", Device: e.Device,
				Peer: e.ID.ContainerID, Reason: "workload " + workloadName(e) + " on this host",
			}
			d.addState(r, byPrefix[p])
			out.Routes = append(out.Routes, r)
		}
	}
	for _, c := range cands {
		r := &apiv1.Route{
			Prefix: c.Prefix.String(), Best: c.Best, Source: c.Source, Type: c.Type, Driver: c.Driver, Pool: c.Pool,
			Peer: c.Peer, Device: c.Link, Reason: c.Reason,
		}
		if c.NextHop.IsValid() {
			r.NextHop = c.NextHop.String()
		}
		if c.Via.IsValid() {
			r.Via = c.Via.String()
		}
		if c.Best {
			d.addState(r, byPrefix[c.Prefix])
		}
		out.Routes = append(out.Routes, r)
	}
	if all {
		for _, st := range statuses {
			o := &apiv1.ObjectStatus{
				Kind: st.Object.Key().Kind().String(), Object: st.Object.String(), Source: st.Source.String(),
				State: st.State.String(), Since: timestamp(st.Since),
			}
			if st.Err != nil {
				o.Reason = st.Err.Error()
			}
			out.Objects = append(out.Objects, o)
		}
	}
	return out, nil
}

// addState says what became of a chosen route in the kernel.
func (d *router) addState(r *apiv1.Route, st dataplane.Status) {
	route, ok := st.Object.(dataplane.Route)
	if !ok {
		r.State = dataplane.Pending.String()
		return
	}
	r.State, r.Since, r.NextHopId = st.State.String(), timestamp(st.Since), uint32(route.NextHop)
	if st.Err != nil {
		r.Reason = st.Err.Error()
	}
	var b strings.Builder
	if route.Type == dataplane.Blackhole {
		b.WriteString("blackhole ")
	}
	b.WriteString(route.Prefix.String())
	if route.NextHop != 0 {
		fmt.Fprintf(&b, " nhid %d via %s dev %s", route.NextHop, r.GetVia(), r.GetDevice())
	}
	if route.Link != "" {
		fmt.Fprintf(&b, " dev %s", route.Link)
	}
	fmt.Fprintf(&b, " proto %s", d.protocolName())
	switch {
	case route.NextHop != 0:
		b.WriteString(" onlink")
	case route.Link != "":
		b.WriteString(" scope link")
	}
	r.Kernel = b.String()
}

// protocolName is how ip(8) shows our routes where rt_protos.d is installed.
func (d *router) protocolName() string {
	if d.cfg.Dataplane.RouteProtocol == 77 {
		return "routerd"
	}
	return fmt.Sprint(d.cfg.Dataplane.RouteProtocol)
}

// CNIConfig implements [rpc.Operator].
func (d *router) CNIConfig(context.Context) ([]byte, error) {
	return cni.Conflist(conflistOptions(d.cfg))
}
