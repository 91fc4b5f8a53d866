package operator

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/bgp"
	"github.com/routerd/routerd/control/encap"
	"github.com/routerd/routerd/control/foreign"
	"github.com/routerd/routerd/control/health"
	"github.com/routerd/routerd/control/node"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/felix"
	"github.com/routerd/routerd/store"
)

// loopLimit is how long a loop may be silent before the daemon counts as hung.
// Loops turn at least every second or two when idle; a pass over a large table
// takes tens of milliseconds.
const loopLimit = 15 * time.Second

// Live says whether the loops turn.
func (s *Server) Live() error {
	now := time.Now()
	return errors.Join(
		// One that has not turned yet is as old as the daemon.
		health.Turning("the core", cmp.Or(s.cfg.Core.Alive(), s.cfg.Started), now, loopLimit),
		health.Turning("the kernel writer", cmp.Or(s.cfg.Kernel.Alive(), s.cfg.Started), now, loopLimit),
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
	pools   []encap.PoolStatus
	hosts   []dataplane.Host // by family, where this host has an address
	waiting string           // what the core waits for
	tunnels []string         // which nodes' tunnel addresses are left out, and why
	pods    *podCIDRs        // nil: the pod CIDRs of Nodes do not count
	coreErr error            // the core did not answer
}

// podCIDRs is what is wrong with the Nodes' pod CIDRs.
type podCIDRs struct{ conflicts []string }

func (s *Server) view(ctx context.Context, b bgp.Status) view {
	ctx, cancel := context.WithTimeout(ctx, answerWithin)
	defer cancel()
	v := view{node: s.cfg.Agent.Status(), refused: s.cfg.Presence.Refused(), bgp: b}
	if v.waiting, v.coreErr = s.cfg.Core.Waiting(ctx); v.coreErr == nil {
		v.pools, v.coreErr = s.cfg.Core.Pools(ctx)
	}
	if v.coreErr == nil {
		v.tunnels, v.coreErr = s.cfg.Core.TunnelConflicts(ctx)
	}
	if v.coreErr == nil {
		var pods podCIDRs
		var count bool
		if pods.conflicts, count, v.coreErr = s.cfg.Core.PodCIDRConflicts(ctx); count {
			v.pods = &pods
		}
	}
	for _, f := range dataplane.Families() {
		if h, err := s.cfg.Core.Host(ctx, f); err == nil && h.Addr.IsValid() {
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
		return errors.New("waiting for the first answer of the datastore")
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

// peerCheck begins the names of answers about sessions.
const peerCheck = "peer "

// Report answers all of health's questions.
func (s *Server) Report(ctx context.Context) health.Report {
	return s.reportOf(s.view(ctx, s.sessions()))
}

func (s *Server) reportOf(v view) health.Report {
	programmed := v.programmed(s.cfg.Kernel.Ready)
	if programmed == nil {
		programmed = s.cfg.PolicyWaiting()
	}
	ready := []health.Check{
		s.checks.Note("Registered", v.registered()),
		s.checks.Note("DataplaneProgrammed", programmed),
	}
	r := health.Report{Live: s.LiveCheck(), Ready: health.Join("ready", ready)}
	// A datastore that is away does not make this host unready: what runs
	// keeps running. It is a condition of its own.
	r.Conditions = append(ready, s.checks.Note("Address", v.node.AddressErr), s.checks.Note("Datastore", s.cfg.DatastoreError()),
		s.checks.Note("Certificates", s.cfg.CertificateError()),
		s.checks.Note("BGP", v.bgp.Err), s.checks.Note("WorkloadMTU", s.cfg.MTUError(v.hosts)),
		s.checks.Note("Policy", s.cfg.PolicyError()), s.checks.Note("Journal", s.cfg.JournalError()), s.checks.Note("Files", filesError(s.cfg.Dirs)),
		s.checks.Note("FelixRules", foreign.FelixError(s.felix.Look(time.Now(), felix.Find, s.cfg.Log))),
		s.checks.Note("WorkloadAddresses", s.fenced()),
		s.checks.Note("TunnelAddresses", tunnelError(v.tunnels)),
		s.checks.Note("ForeignRoutes", foreign.RoutesError(s.foreignRoutes(v))))
	if v.pods != nil {
		r.Conditions = append(r.Conditions, s.checks.Note("PodCIDRs", conflictError("pod CIDRs", v.pods.conflicts)))
	}
	for _, p := range v.pools {
		r.Conditions = append(r.Conditions, s.checks.Note("Pool/"+p.Name, s.poolError(p)))
	}
	for _, p := range peersOf(v.bgp) {
		if p.called {
			continue
		}
		var err error
		if !p.up {
			err = errors.New(p.proto.GetInfo())
		}
		r.Peers = append(r.Peers, s.checks.Note(peerCheck+p.proto.GetAddress(), err))
	}
	return r
}

// LiveCheck is [Server.Live] as a check of health.
func (s *Server) LiveCheck() health.Check { return s.checks.Note("live", s.Live()) }

// Conditions are those that the Node resource carries.
func (s *Server) Conditions() []metav1.Condition {
	r := s.Report(context.Background())
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
func (s *Server) poolError(p encap.PoolStatus) error {
	if p.Err != nil {
		return p.Err
	}
	if reason := s.UnusablePool(p.Name); reason != "" {
		return errors.New(reason)
	}
	for _, key := range p.Host {
		st, ok := s.cfg.Kernel.Status(key)
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

// foreignRoutes returns the foreign routes that matter. Where the pools are not
// known for a moment the last answer stays.
func (s *Server) foreignRoutes(v view) []foreign.Route {
	if v.coreErr != nil {
		return s.cfg.Foreign.Last()
	}
	return s.cfg.Foreign.Find(cidrs(v.pools))
}

func cidrs(pools []encap.PoolStatus) []netip.Prefix {
	out := make([]netip.Prefix, 0, len(pools))
	for _, p := range pools {
		out = append(out, p.CIDR)
	}
	return out
}

// HandleUnderlay looks for foreign routes after a change of the network around the
// host.
func (s *Server) HandleUnderlay(ctx context.Context, u dataplane.Underlay) {
	s.cfg.Foreign.HandleUnderlay(u)
	if pools, err := s.cfg.Core.Pools(ctx); err == nil {
		s.cfg.Foreign.Find(cidrs(pools))
	}
}

// tunnelError says which nodes get no packets through tunnels.
func tunnelError(conflicts []string) error {
	return conflictError("no packets are sent to nodes whose tunnel address another node has", conflicts)
}

// conflictError says what the conflicts are about, and the first of them.
func conflictError(about string, conflicts []string) error {
	const most = 5
	n := len(conflicts)
	switch {
	case n == 0:
		return nil
	case n > most:
		conflicts = append(slices.Clone(conflicts[:most]), fmt.Sprintf("and %d more", n-most))
	}
	return errors.New(about + ": " + strings.Join(conflicts, "; "))
}

// fenced names the workloads without a route, for their addresses are
// somebody else's.
func (s *Server) fenced() error {
	var names []string
	for _, e := range s.cfg.Attach.Endpoints() {
		if e.Lost != "" {
			names = append(names, fmt.Sprintf("%s (%s): %s", workloadName(e), e.ID.ContainerID, e.Lost))
		}
	}
	if len(names) == 0 {
		return nil
	}
	more := ""
	const most = 5
	if n := len(names) - most; n > 0 {
		names, more = names[:most], fmt.Sprintf("; and %d more", n)
	}
	return errors.New("workloads whose addresses belong to something else have no route; recreate them: " + strings.Join(names, "; ") + more)
}
