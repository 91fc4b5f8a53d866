// Package operator answers what an operator asks of a host: its state, its health and
// metrics, why a route or a verdict is as it is. It asks the parts when it is asked;
// it keeps nothing of its own but when a condition changed last.
package operator

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"time"

	"github.com/routerd/routerd/cni"
	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/attach"
	"github.com/routerd/routerd/control/bgp"
	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/control/doctor/gather"
	"github.com/routerd/routerd/control/foreign"
	"github.com/routerd/routerd/control/health"
	"github.com/routerd/routerd/control/ipam"
	"github.com/routerd/routerd/control/journal"
	"github.com/routerd/routerd/control/node"
	"github.com/routerd/routerd/control/presence"
	"github.com/routerd/routerd/control/probe"
	"github.com/routerd/routerd/control/rpc"
	"github.com/routerd/routerd/control/vrouter"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/kernel"
	"github.com/routerd/routerd/store"
)

// Config is what a [Server] asks.
type Config struct {
	Node, Version string
	Started       time.Time
	Datastore     string   // what the datastore is, for people
	RouteProtocol int      // of our routes in the kernel
	Sysctls       string   // where the kernel's settings are
	Dirs          []string // that the daemon writes to
	Conflist      cni.ConflistOptions
	Log           *slog.Logger
	Store         store.Store
	// Ask asks another host, which answers by [Server.Answer]; nil: the datastore does not
	// pass questions on.
	Ask func(ctx context.Context, node string, question []byte) ([]byte, error)
	// AskAll asks several, as *[etcd.Store] does; nil like Ask.
	AskAll func(ctx context.Context, nodes []string, question []byte, yield func(node string, answer []byte)) error
	// Service reads a Service of Kubernetes with its endpoints; nil: the datastore has none.
	Service func(context.Context, store.Key) (store.ServiceDetail, error)
	// Presences says which hosts' daemons are there; nil: it is not known.
	Presences gather.Presences

	Kernel   *kernel.Kernel
	Core     *vrouter.Core
	IPAM     *ipam.Allocator
	Agent    *node.Agent
	BGP      *bgp.Controller // nil: not enabled
	Attach   *attach.Attacher
	Presence *presence.Keeper
	Foreign  *foreign.Routes
	Policy   *PolicyServer // nil: switched off
	Probes   Probes

	// Snapshot returns objects of the cluster's copy, as *[cluster.Cluster] does.
	Snapshot func(wanted func(store.Key) bool) ([]*cluster.Change, error)
	// OthersKnown reports whether that has the endpoints of all hosts; nil: it always has.
	OthersKnown func() bool
	// TunnelKind is what the node's agent and IPAM call one tunnel.
	TunnelKind func(node.Tunnel) ipam.TunnelKind

	// What keeps a part from being as it should; nil errors: nothing.
	DatastoreError   func() error
	CertificateError func() error // of those by which the datastore is reached one ends soon
	JournalError     func() error
	PolicyError      func() error                 // the policy in the datastore is not enforced
	PolicyWaiting    func() error                 // workloads have no rules yet
	OccupiedError    func() error                 // what other networks' pods have is not known; nil: it does not count
	MTUError         func([]dataplane.Host) error // workloads are not at their MTU, or it cannot work
	Damage           func() journal.Damage        // of the journal
	WorkloadMTU      func() int                   // bytes; 0: not known yet
	CertificateEnd   func() time.Time             // when the first one ends; zero: there is none
}

// Probes answers what was measured of the underlay and of tunnels.
type Probes interface {
	Paths(ctx context.Context) (*apiv1.PathsResponse, error)
	Tunnels(ctx context.Context, retry []string, all bool) (*apiv1.TunnelsResponse, error)
	// Echoes asks now through every tunnel that is in use.
	Echoes(ctx context.Context) ([]probe.Echo, error)
	// Heard returns how long ago an echo of a peer came in by a device.
	Heard(device string, peer netip.Addr) (ago time.Duration, ok bool)
}

// Server implements [rpc.Operator]. It is safe for concurrent use.
type Server struct {
	*PolicyServer
	Probes

	cfg    Config
	checks *health.Log
	felix  foreign.Felix
	hosts  lastHosts
	// watching has room for those that watch for probes.
	watching chan struct{}
}

var (
	_ rpc.Operator = (*Server)(nil)
	_ rpc.Doctor   = (*Server)(nil)
)

// New returns a Server. The parts may start later.
func New(cfg Config) *Server {
	return &Server{PolicyServer: cfg.Policy, Probes: cfg.Probes, cfg: cfg, watching: make(chan struct{}, watchesAtOnce), checks: health.NewLog(time.Now, func(c health.Check) { logCondition(cfg.Log, c) })}
}

// logCondition says that a condition changed. Of sessions control/bgp says so itself.
func logCondition(log *slog.Logger, c health.Check) {
	switch { // at a start conditions are not met yet, so that is no cause for alarm
	case strings.HasPrefix(c.Name, peerCheck):
	case c.OK:
		log.Info("condition is met", "condition", c.Name)
	default:
		log.Info("condition is not met", "condition", c.Name, "reason", c.Reason)
	}
}

// StatusLine is what systemctl status shows.
func (s *Server) StatusLine() string {
	r := s.Report(context.Background())
	if !r.Ready.OK {
		return "not ready: " + r.Ready.Reason
	}
	up := len(r.Peers) - len(health.Failed(r.Peers))
	return fmt.Sprintf("ready; %d workloads, %d of %d BGP sessions up", len(s.cfg.Attach.Endpoints()), up, len(r.Peers))
}
