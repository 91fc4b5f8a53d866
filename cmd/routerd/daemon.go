package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/KimMachineGun/automemlimit/memlimit"
	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/control/attach"
	"github.com/routerd/routerd/control/bgp"
	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/control/config"
	"github.com/routerd/routerd/control/enforce"
	"github.com/routerd/routerd/control/events"
	"github.com/routerd/routerd/control/foreign"
	"github.com/routerd/routerd/control/health"
	"github.com/routerd/routerd/control/heap"
	"github.com/routerd/routerd/control/hostlocal"
	"github.com/routerd/routerd/control/hostlock"
	"github.com/routerd/routerd/control/ipam"
	"github.com/routerd/routerd/control/journal"
	"github.com/routerd/routerd/control/kubecontrollers"
	"github.com/routerd/routerd/control/kubesync"
	"github.com/routerd/routerd/control/lock"
	"github.com/routerd/routerd/control/member"
	"github.com/routerd/routerd/control/netpolicy"
	"github.com/routerd/routerd/control/node"
	"github.com/routerd/routerd/control/nodenetwork"
	"github.com/routerd/routerd/control/nodestatus"
	"github.com/routerd/routerd/control/operator"
	"github.com/routerd/routerd/control/presence"
	"github.com/routerd/routerd/control/probe"
	"github.com/routerd/routerd/control/publish"
	"github.com/routerd/routerd/control/renewal"
	"github.com/routerd/routerd/control/rollback"
	"github.com/routerd/routerd/control/rpc"
	"github.com/routerd/routerd/control/spans"
	"github.com/routerd/routerd/control/systemd"
	"github.com/routerd/routerd/control/ui"
	"github.com/routerd/routerd/control/vrouter"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/adjacent"
	"github.com/routerd/routerd/dataplane/felix"
	"github.com/routerd/routerd/dataplane/ipip"
	"github.com/routerd/routerd/dataplane/kernel"
	"github.com/routerd/routerd/dataplane/vxlan"
	"github.com/routerd/routerd/dataplane/workload"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/kube"
)

// router holds the daemon's parts. They are made in [newRouter], in the order in which
// they depend on each other, and run in [daemon.run].
type router struct {
	cfg     config.Config
	name    string
	said    *events.Log
	log     *slog.Logger // of the daemon as a whole, to the same log
	started time.Time

	member   *member.Membership // nil: the datastore is no etcd
	issuer   *member.Issuer     // with member
	store    datastore
	certs    *renewal.Certificates                  // nil: the datastore is no etcd
	renewals renewal.Records                        // with member
	renewer  *renewal.Renewer                       // nil: this host has no certificate of a client
	servers  []string                               // URLs of the datastore, if it is not this daemon's own
	names    func(store.Incarnation) presence.Store // who keeps the names of nodes
	hosts    bgp.Hosts                              // who is there; nil: the datastore cannot say it
	asks     questions                              // nil: the datastore does not pass questions on
	api      *kube.Store                            // Kubernetes' API; nil: this host does not know it
	inAPI    bool                                   // the datastore is api
	serveKV  func(grpc.ServiceRegistrar)            // what routerctl reads and writes resources by
	db       *lock.Store                            // the same for who writes what Calico has too
	// conditions is with api.
	conditions *conditions
	// cluster is this host's copy of what the store holds, and follow where each
	// part is in it.
	cluster *cluster.Cluster
	follow  followers

	kernel *kernel.Kernel
	core   *vrouter.Core
	ipam   *ipam.Allocator
	node   *node.Agent
	bgp    *bgp.Controller // nil: not enabled
	// adjacent is with bgp.
	adjacent *adjacent.Tracker
	// reflectors is with bgp.
	reflectors *bgp.Reflectors
	bgpKey     *bgp.ClusterKey
	wire       *workload.Wire
	attach     *attach.Attacher
	occupied   *occupied // nil: addresses are not those of the Node's pod CIDRs
	// restored is closed when the workloads of the previous run are taken over.
	restored chan struct{}
	// journal is what this host has promised and must know after the loss of power.
	journal *journal.Journal
	probe   *probe.Prober
	policy  *netpolicy.Policy
	// hostEndpoints are those that follow from Nodes.
	hostEndpoints *kubecontrollers.Keeper
	running       *kubecontrollers.StatusWriter

	presence *presence.Keeper

	leaving  atomic.Bool // the daemon is being stopped for good
	mtu      *attach.MTUFollower
	counters counters
	tracer   *spans.Tracer // nil: no traces are collected
	operator *operator.Server
}

// run makes the daemon and runs it until ctx ends or a part cannot go on.
func run(ctx context.Context, c config.Config, said *events.Log) (err error) {
	log := said.Logger()
	heap.Profiled(c.Health.Profiles)
	name, err := c.Name()
	if err != nil {
		return err
	}
	lock, err := hostlock.Dir(c.RunDir)
	if err != nil {
		return err
	}
	defer lock.Close()
	alone, err := hostlock.Namespace(ctx)
	if err != nil {
		return err
	}
	defer alone.Close()
	log.Info("starting", "version", version, "node", name, "run_dir", c.RunDir, "state_dir", c.StateDir)
	foreign.WarnOfCalico(felix.Running, log)
	heap.Limit(log, memlimit.FromCgroup)
	tracer, endTraces, err := spans.FromEnv(ctx, os.Getenv, spans.Config{Service: "routerd", Version: version, Node: name, Log: log.With("component", "traces")})
	if err != nil {
		return err
	}
	defer endTraces()
	d, err := newRouter(ctx, c, name, said, tracer)
	if d != nil {
		defer func() { err = errors.Join(err, d.close()) }()
	}
	if err != nil {
		return err
	}
	return d.run(ctx)
}

// deferBGP bounds for how long routes that BGP learned stay as the previous run
// left them. Sessions of a restarted daemon are back within about ten seconds.
const deferBGP = 30 * time.Second

// newRouter makes the parts. On error what was made so far is returned too,
// for the caller to close.
func newRouter(ctx context.Context, c config.Config, name string, said *events.Log, tracer *spans.Tracer) (*router, error) {
	log := said.Logger()
	d := &router{
		cfg: c, name: name, said: said, log: log, started: time.Now(),
		counters: newCounters(), tracer: tracer, restored: make(chan struct{}),
	}
	var err error
	// The kernel first: without its permission nothing else is of use.
	d.kernel, err = kernel.New(kernel.Config{
		Protocol: uint8(c.Dataplane.RouteProtocol), FullCheck: c.Dataplane.FullCheckInterval, Sysctls: c.Dataplane.SysctlDir, Log: log.With("component", "kernel"), Hooks: d.counters.hooks(),
	})
	if err != nil {
		return d, err
	}
	if err := d.openStore(ctx); err != nil {
		return d, err
	}
	d.cluster = cluster.New(cluster.Config{
		Store: d.store, Node: name, Version: kube.Conversion(), Log: log.With("component", "cluster"), Services: d.api != nil,
		File: clusterFile(c), PreviousFile: previousPolicyFile(c), PreviousFiles: []string{previousBGPFile(c)},
	})
	d.follow = follow(d.cluster, c.BGP.Enabled, d.api != nil, d.inAPI, c.UI.Listen != "")
	d.policy, err = netpolicy.Open(netpolicy.Config{
		Enabled: c.Policy.Enabled, Offload: c.Policy.Offload, LogRate: uint32(c.Policy.LogRate), //nolint:gosec // Validate has checked it
		Enforce: enforce.Config{
			Node: name, AutoHostEndpoint: c.Policy.AutoHostEndpoints, HostPorts: hostPorts(c), Guarded: guardedPorts(c), Datastore: datastorePorts(d.servers), Services: d.policyServices(),
			TunnelsFromAnywhere: c.Policy.AllowTunnelsFromAnywhere,
			MaxConnections:      uint32(c.Policy.MaxConnectionsPerWorkload), //nolint:gosec // Validate has checked it
			Tracer:              d.tracer,
			AskOthers:           func(asks bool) { d.cluster.AskOthers("policy", asks) },
		},
		DeleteTable: d.kernel.DeleteTable, Disk: d.cluster, Store: d.db, RunDir: c.RunDir, Log: log,
	})
	if err != nil {
		return d, err
	}
	d.hostEndpoints = kubecontrollers.NewKeeper(name, d.db, node.Virtual, log.With("component", "kubecontrollers"))
	d.running = kubecontrollers.NewStatusWriter(kubecontrollers.Running{
		API: d.inAPI, Mirrored: d.mirrors(),
		LeakGrace: func(k *v3.KubeControllersConfiguration) time.Duration { return leakGrace(c.IPAM.LeakGracePeriod, k) },
	}, d.db, log.With("component", "kubecontrollers"))
	d.loadCluster()
	var restarting bool
	if c.BGP.Enabled {
		if restarting, err = d.markBGP(); err != nil {
			return d, err
		}
	}
	cc := vrouter.Config{
		Node: name, Sink: d.kernel, Status: d.kernel.Status, Publish: true, WithoutBGP: !c.BGP.Enabled, UsePodCIDR: c.IPAM.UsePodCIDR, Tracer: d.tracer, Log: log.With("component", "vrouter"),
	}
	if restarting {
		cc.DeferBGP = deferBGP
	}
	d.core = vrouter.New(cc)
	if err := os.MkdirAll(c.WorkloadDir(), 0o700); err != nil {
		return d, fmt.Errorf("make directory for the journal: %w", err)
	}
	if d.journal, err = journal.Open(filepath.Join(c.WorkloadDir(), "journal"), log.With("component", "journal")); err != nil {
		return d, err
	}
	d.ipam = ipam.New(ipam.Config{
		Store: d.db, Node: name, Log: log.With("component", "ipam"), Unusable: func(pool string) string { return d.operator.UnusablePool(pool) }, // it is made last
		UsePodCIDR: c.IPAM.UsePodCIDR, Piecewise: d.inAPI,
		Reserve: ipam.ReserveConfig{Min: c.IPAM.Reserve.Min, Max: c.IPAM.Reserve.Max, Journal: d.journal},
	})
	if d.journal.Damage().Lines > 0 {
		// Among what was lost may be who has an address that is in the reserve by an
		// older line.
		d.doubtReserve()
	}
	if c.IPAM.UsePodCIDR {
		d.occupied = &occupied{store: hostlocal.Store(c.IPAM.HostLocalDir), ipam: d.ipam, log: log.With("component", "ipam")}
		d.occupied.read() // before the first address is given
	}
	d.node = node.New(node.Config{
		UsePodCIDR: c.IPAM.UsePodCIDR,
		Name:       name, Store: d.db, Tunnels: tunnelIPAM{d.ipam}, AwaitIPAM: d.follow.ipam.Wait, Log: log.With("component", "node"),
		Methods: addressMethods(c), DefaultPools: defaultPools(c), Conditions: func() []metav1.Condition { return d.operator.Conditions() }, // it is made last
	})
	var sign func(bgp.Keyring)
	if c.BGP.Enabled {
		sign = func(k bgp.Keyring) { d.bgp.SetKeys(k) } // it is made next
	}
	d.bgpKey = bgp.NewClusterKey(bgp.ClusterKeyConfig{Store: d.store, File: filepath.Join(c.StateDir, "bgp.key"), Use: sign, Publish: d.node.SetBGPKeys, Log: log})
	if c.BGP.Enabled {
		d.adjacent = adjacent.New(log.With("component", "adjacent"), func(links map[string]adjacent.Link) {
			out := make(map[string]bgp.Link, len(links))
			for name, l := range links {
				out[name] = bgp.Link(l)
			}
			d.bgp.SetAdjacent(out) // it is made next
		})
		var secrets bgp.Secrets
		if d.api != nil {
			secrets = d.api
		}
		d.bgp = bgp.New(bgp.Options{
			Devices: d.adjacent.Want, Secrets: secrets, SecretsFile: filepath.Join(c.StateDir, "bgp.secrets"),
			Log: log.With("component", "bgp"), Node: name, Restarting: restarting, SecretDir: c.BGP.SecretDir, PreviousFile: previousBGPFile(c),
			MayResume: func() bool { return d.presence.MayResume() }, // it is made later
			Answers:   func() bool { return d.presence.Epoch() != 0 },
			BFD:       bfdCommand, CallersFile: filepath.Join(c.RunDir, "bgp.callers"), KeysChanged: d.bgpKey.Changed,
			Services: d.api != nil,
			Inject: bgp.InjectOptions{
				Allow: c.BGP.Inject.Prefixes(), MaxRoutes: c.BGP.Inject.MaxRoutes, File: filepath.Join(c.RunDir, "bgp.injected"),
			},
			Handle: func(ctx context.Context, ch bgp.Changes) {
				// The only error is that ctx has ended.
				if err := d.core.Paths(ctx, pathUpdate(ch)); err != nil {
					log.Debug("paths not taken", "error", err)
				}
			},
		})
		d.bgpKey.Load()
		d.reflectors = bgp.NewReflectors(bgp.ReflectorsConfig{
			Node: name, Controller: d.bgp, Hosts: d.hosts, Lead: d.store.Lead, Publish: d.node.PublishReflection, Log: log,
		})
	}
	d.wire, err = workload.New(workload.Config{Sysctls: c.Dataplane.SysctlDir})
	if err != nil {
		return d, err
	}
	ac := attach.Config{
		Network: c.CNI.NetworkName,
		Node:    name, Dir: c.WorkloadDir(), Journal: d.journal, IPAM: d.ipam, Sink: d.kernel, Store: d.db, Wire: d.wire,
		Behind: c.IPAM.Reserve.Min > 0, Kubernetes: d.inAPI, UsePodCIDR: c.IPAM.UsePodCIDR, Ready: d.attachReady, Held: d.mayWrite,
		LingerConfirm: attach.LingerConfirm, LingerEnd: attach.LingerEnd, Rules: d.policy.Rules(), OwnWrites: d.cluster, Tracer: d.tracer, Log: log.With("component", "attach"),
	}
	if d.mirrors() {
		ac.Pods = d.api
	}
	if d.occupied != nil {
		ac.ReleaseOther = d.occupied.store.Release
	}
	if d.attach, err = attach.New(ac); err != nil {
		return d, err
	}
	d.mtu = attach.NewMTUFollower(d.core, d.attach, c.CNI.MTU, log)
	if err := d.newPresence(); err != nil {
		return d, err
	}
	if err := d.newProbe(ctx); err != nil {
		return d, err
	}
	oc := operator.Config{
		Node: name, Version: version, Started: d.started, Datastore: datastoreName(c), RouteProtocol: c.Dataplane.RouteProtocol,
		Sysctls: c.Dataplane.SysctlDir, Dirs: []string{c.StateDir, c.RunDir},
		Store: d.db, Conflist: conflistOptions(c), Log: log,
		Kernel: d.kernel, Core: d.core, IPAM: d.ipam, Agent: d.node, BGP: d.bgp, Attach: d.attach, Presence: d.presence,
		Foreign: foreign.NewRoutes(d.kernel.Status, log), Policy: d.policyServer(), Probes: d.probe, TunnelKind: tunnelKind, Snapshot: d.cluster.Snapshot, OthersKnown: func() bool { return d.cluster.Others().Complete },
		DatastoreError: d.datastoreError, CertificateError: func() error { return d.certs.Problem(time.Now()) }, CertificateEnd: d.certs.Expiry, JournalError: func() error { return attach.JournalError(d.journal) }, PolicyError: d.policy.Err, PolicyWaiting: d.policy.Waiting,
		MTUError: d.mtu.Err, Damage: d.journal.Damage, WorkloadMTU: d.mtu.Smallest,
	}
	if d.occupied != nil {
		oc.OccupiedError = d.occupied.err
	}
	d.asking(&oc)
	if d.api != nil {
		oc.Service = d.api.ServiceDetail
	}
	d.operator = operator.New(oc)
	return d, nil
}

// startMark is the file that says that BGP was started since the host booted.
func startMark(runDir string) string { return filepath.Join(runDir, "bgp.started") }

// markBGP reports whether this is not the first start since the host booted, or Calico
// ran before it: only then do peers hold routes for us to confirm (RFC 4724, section 4.1).
func (d *router) markBGP() (restarting bool, err error) {
	f, err := os.OpenFile(startMark(d.cfg.RunDir), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if errors.Is(err, fs.ErrExist) {
		return true, nil
	}
	if err != nil {
		return false, fmt.Errorf("mark the start of BGP: %w", err)
	}
	if restarting, err = felix.Forwards(); err != nil {
		d.log.Warn("it is not known whether Calico ran here; peers are not told that the host forwards as before", "error", err)
	}
	if restarting {
		d.log.Info("Calico's routes are on this host: its BGP peers are asked to keep what they have of it")
	}
	return restarting, f.Close()
}

func (d *router) close() error {
	var errs []error
	if d.wire != nil {
		d.wire.Close()
	}
	if d.store != nil {
		errs = append(errs, d.store.Close())
	}
	if d.mirrors() {
		errs = append(errs, d.api.Close())
	}
	if d.member != nil {
		d.member.Close()
	}
	if d.journal != nil {
		errs = append(errs, d.journal.Close())
	}
	if d.cluster != nil {
		errs = append(errs, d.cluster.Close())
	}
	errs = append(errs, d.policy.Close())
	if d.kernel != nil {
		errs = append(errs, d.kernel.Close())
	}
	d.log.Info("stopped; the kernel is left as it is")
	return errors.Join(errs...)
}

// run runs every part. The first that ends stops the others, and so does the end of stop, once the host has left.
func (d *router) run(stop context.Context) error {
	ctx, cancel := context.WithCancel(context.WithoutCancel(stop))
	defer cancel()
	operator, err := rpc.Listen(d.cfg.OperatorSocket())
	if err != nil {
		return err
	}
	plugin, err := rpc.Listen(d.cfg.CNISocket())
	if err != nil {
		return errors.Join(err, operator.Close())
	}
	page, err := d.newPage()
	if err != nil {
		return errors.Join(err, operator.Close(), plugin.Close())
	}
	g, ctx := errgroup.WithContext(ctx)
	part := func(name string, f func(context.Context) error) {
		g.Go(func() error {
			if err := f(ctx); err != nil && !errors.Is(err, context.Canceled) {
				return fmt.Errorf("%s: %w", name, err)
			}
			return nil
		})
	}
	part("stop", func(ctx context.Context) error {
		select {
		case <-stop.Done():
			d.leave(ctx)
			d.attach.Settle(ctx)
			cancel()
		case <-ctx.Done():
		}
		return nil
	})
	part("kernel writer", d.kernel.Run)
	part("core", d.core.Run)
	part("ipam", func(ctx context.Context) error { return d.ipam.Run(ctx, d.follow.ipam) })
	part("node", d.node.Run)
	part("underlay", d.followUnderlay)
	if d.occupied != nil {
		part("addresses of other networks", d.occupied.run)
	}
	// What the previous run had may be in doubt when the name is held.
	part("presence", after(d.restored, d.presence.Run))
	// A part that has not seen the datastore's state neither writes, nor announces, nor sweeps.
	part("cluster", after(d.presence.Held(), d.cluster.Run))
	part("core follows", func(ctx context.Context) error { return d.follow.core.Each(ctx, d.core.Store) })
	part("lock follows", each(d.follow.lock, d.db.HandleStore))
	part("lock", d.db.Run)
	reporter := nodestatus.New(d.name, d.db, d.operator, d.log.With("component", "nodestatus"))
	part("status follows", each(d.follow.status, reporter.HandleStore))
	part("status", reporter.Run)
	part("host endpoints follow", each(d.follow.hosts, d.hostEndpoints.HandleStore))
	part("host endpoints", after(d.presence.Held(), d.hostEndpoints.Run))
	if !d.inAPI { // the Kubernetes datastore has no changes to confirm
		part("changes to confirm", rollback.Keeper{Node: d.name, Store: d.store, Log: d.log.With("component", "rollback")}.Run)
	}
	part("node follows", each(d.follow.node, d.node.HandleStore))
	part("probes follow", each(d.follow.probe, d.probe.HandleStore))
	part("workloads follow", each(d.follow.attach, d.attach.HandleStore))
	if d.follow.pods != nil {
		part("pods follow", each(d.follow.pods, d.attach.HandlePods))
	}
	part("policy follows", each(d.follow.policy, d.policy.HandleStore))
	if d.asks != nil {
		part("questions of other hosts", after(d.presence.Held(), func(ctx context.Context) error {
			d.asks.Questions(ctx, d.name, d.operator.Answer)
			return nil
		}))
	}
	part("bootstrap", d.bootstrap)
	part("bgp key", d.bgpKey.Run)
	part("probes", d.probe.Run)
	part("policy", func(ctx context.Context) error { return d.policy.Run(ctx, d.restored, d.follow.policy.CatchUp) })
	part("live change", publish.Publisher{
		Core: d.core, Publish: d.node.PublishEncaps, Tunnels: []dataplane.Driver{ipip.Driver{}, vxlan.Driver{}}, Supports: d.kernel.Supports, RunDir: d.cfg.RunDir, Log: d.log,
	}.Run)
	part("workloads", d.runAttach)
	part("collector", after(d.presence.Held(), d.runCollector))
	if d.cfg.CNI.Manage {
		part("cni files", after(d.restored, d.keepCNI))
	}
	if d.api != nil {
		own := nodenetwork.Own{Node: d.name, Pod: d.api.InPod(), API: d.api, Said: d.conditions.names.Network, Obstacle: d.networkObstacle, Log: d.log}
		part("network condition", after(d.presence.Held(), own.Run))
		part("network follows", each(d.follow.network, d.conditions.others.HandleStore))
	}
	if d.mirrors() {
		part("own Node", func(ctx context.Context) error { return d.conditions.names.Follow(ctx, d.name, d.node.SetInternalIPs) })
		part("conditions of other Nodes", after(d.presence.Held(), d.lookAtOthers))
		part("own pods", kubesync.Pods{API: d.api, Node: d.name, File: podsFile(d.cfg), Handle: d.attach.HandlePods, Log: d.log.With("component", "kubesync")}.Run)
		part("Kubernetes", after(d.presence.Held(), d.followKubernetes))
	}
	if d.bgp != nil {
		part("neighbours", d.adjacent.Run)
		part("reflectors", after(d.presence.Held(), d.reflectors.Run))
		part("bgp", func(ctx context.Context) error { return d.bgp.Run(ctx, d.follow.bgp) })
	}
	if d.member != nil {
		part("embedded datastore", d.member.Watch)
		part("new hosts", d.issuer.Run)
		part("certificates of others", d.signCertificates)
	}
	if d.member != nil && d.member.Ours() {
		part("datastore's members", d.member.Follow)
		part("membership", d.member.RunAgent)
	}
	if d.renewer != nil {
		part("certificate", d.renewer.Run)
	}
	part("operator socket", func(ctx context.Context) error {
		return serve(ctx, operator, rpc.ServerOptions(d.log), func(s *grpc.Server) {
			apiv1.RegisterOperatorServer(s, rpc.NewOperatorServer(d.operator))
			apiv1.RegisterBGPServer(s, d.bgpServer())
			apiv1.RegisterEventsServer(s, rpc.NewEventsServer(d.said))
			apiv1.RegisterDoctorServer(s, rpc.NewDoctorServer(d.operator))
			apiv1.RegisterClusterServer(s, member.NewService(d.issuer, noTokens))
			apiv1.RegisterUIServer(s, page)
			d.serveKV(s)
		})
	})
	part("cni socket", func(ctx context.Context) error {
		cni := rpc.NewCNIServer(rpc.Traced(d.attach, d.tracer))
		return serve(ctx, rpc.NewFrames(plugin, cni, d.log), rpc.ServerOptions(d.log), func(s *grpc.Server) { apiv1.RegisterCNIServer(s, cni) })
	})
	if d.cfg.Health.Listen != "" {
		part("health endpoint", func(ctx context.Context) error {
			h := health.Handler(d.operator.LiveCheck, d.operator.Report, d.operator.Metrics(append(d.counters.collectors(), probe.NewCollector(d.probe), newWatches(d.api))...))
			if d.cfg.Health.Profiles {
				h = health.WithProfiles(h)
			}
			return health.Serve(ctx, d.cfg.Health.Listen, h, d.log)
		})
	}
	if page.On() {
		d.cluster.AskOthers("page", true) // which shows what concerns any of them
		part("page follows", each(d.follow.page, page.HandleStore))
		part("page", page.Run)
	}
	part("memory", func(ctx context.Context) error {
		heap.Pace(ctx)
		heap.Release(ctx, d.log)
		return nil
	})
	part("systemd", func(ctx context.Context) error {
		systemd.Notify(ctx, d.log, d.operator.Live, d.operator.StatusLine)
		return nil
	})
	return g.Wait()
}

// serve serves until ctx ends, then lets calls in progress finish for a
// moment.
func serve(ctx context.Context, lis net.Listener, opts []grpc.ServerOption, register func(*grpc.Server)) error {
	s := grpc.NewServer(opts...)
	register(s)
	done := make(chan error, 1)
	go func() { done <- s.Serve(lis) }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
	}
	force := time.AfterFunc(2*time.Second, s.Stop)
	s.GracefulStop()
	force.Stop()
	return <-done
}

// followUnderlay hands snapshots of the network around the host to those who
// decide by them.
func (d *router) followUnderlay(ctx context.Context) error {
	for u := range d.kernel.Underlay(ctx) {
		if d.occupied != nil {
			d.ipam.SetOccupied("the host", node.HostAddresses(u))
		}
		d.node.HandleUnderlay(u)
		d.probe.HandleUnderlay(u)
		d.policy.HandleUnderlay(u)
		d.hostEndpoints.HandleUnderlay(u)
		if err := d.core.Underlay(ctx, u); err != nil {
			return err
		}
		d.operator.HandleUnderlay(ctx, u)
		if d.bgp != nil {
			d.bgp.SetLinks(subnets(u))
			d.adjacent.HandleUnderlay(u)
		}
	}
	return nil
}

// after has a part wait for what comes first.
func after(first <-chan struct{}, run func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error {
		select {
		case <-first:
			return run(ctx)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// followers are the parts' places in the changes of the cluster, each at its own
// pace. A part that does not run has none: its changes would pile up.
type followers struct {
	core, ipam, bgp, probe, attach, pods, policy, node, lock, status, controllers, hosts, network, page *cluster.Follower
}

// follow makes the followers: api says that the datastore has what Kubernetes' API says, and
// kubernetes that it is that API.
func follow(c *cluster.Cluster, speaksBGP, api, kubernetes, page bool) followers {
	f := followers{
		core: c.Follow(vrouter.Kinds()...).OthersBlocks(), ipam: c.Follow(ipam.Kinds()...).OwnNode(),
		probe: c.Follow(store.KindNode), node: c.Follow(node.Kinds()...),
		attach: c.Follow(attach.Kinds()...), policy: followPolicy(c, api), lock: c.Follow(lock.Kinds()...),
		status: c.Follow(nodestatus.Kinds()...), controllers: c.Follow(store.KindKubeControllersConfiguration),
		hosts: c.Follow(kubecontrollers.Kinds()...).Waive(store.KindKubeControllersConfiguration),
	}
	if speaksBGP {
		var services []store.Kind
		if api {
			services = bgp.ServiceKinds()
		}
		f.bgp = c.Follow(append(bgp.Kinds(), services...)...).Waive(services...)
	}
	if api {
		f.network = c.Follow(store.KindNode)
	}
	if kubernetes {
		f.pods = c.Follow(attach.PodKinds()...)
	} else if api { // what pods ask for the API says, and their namespaces the datastore
		f.pods = c.Follow(store.KindProfile)
	}
	if page {
		f.page = c.Follow(ui.Kinds()...)
	}
	return f
}

// clusterFile is where the copy of the cluster is kept on disk.
func clusterFile(c config.Config) string { return filepath.Join(c.StateDir, "cluster.journal") }

// podsFile is where what the API says of this host's pods is kept, where that is not the datastore.
func podsFile(c config.Config) string { return filepath.Join(c.StateDir, "pods.journal") }

// previousPolicyFile is where the version before kept what concerns policy.
func previousPolicyFile(c config.Config) string { return filepath.Join(c.StateDir, "policy.journal") }

// previousBGPFile is where the version before kept the last configuration of BGP.
func previousBGPFile(c config.Config) string { return filepath.Join(c.StateDir, "bgp.json") }

// loadCluster has those start with what the disk has of the cluster that may go by it
// while the datastore does not answer.
func (d *router) loadCluster() {
	readers := []*cluster.Follower{d.follow.lock, d.follow.ipam} // which gives what its journal has
	if d.follow.bgp != nil {
		readers = append(readers, d.follow.bgp) // which asks before it speaks by it
	}
	if d.policy.MayFollowDisk() {
		readers = append(readers, d.follow.policy)
		if d.follow.pods != nil {
			readers = append(readers, d.follow.pods) // whose labels those rules go by
		}
	}
	// After a boot the kernel has nothing that would be left as it is until the datastore
	// answers: what is on disk is more.
	if d.booted() {
		readers = append(readers, d.follow.core)
	}
	d.cluster.Load(readers...)
	if d.follow.policy.FromDisk() {
		d.policy.FollowsDisk()
	}
}

// each has a part apply what a follower brings.
func each(f *cluster.Follower, apply func(cluster.Step)) func(context.Context) error {
	return func(ctx context.Context) error {
		for s := range f.Steps(ctx) {
			apply(s)
		}
		return ctx.Err()
	}
}

// bootstrap makes what every cluster has, once the datastore answers.
func (d *router) bootstrap(ctx context.Context) error {
	return async.Retry(ctx, firstWrites(), func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		had, err := d.had(ctx)
		if err == nil {
			err = store.Bootstrap(ctx, d.store, had...)
		}
		if err != nil {
			d.log.Debug("bootstrap; will try again", "error", err)
			return err
		}
		d.bgpKey.Made()
		return nil
	})
}

// had returns the ClusterInformation that this host knows of a cluster in which its Node
// is: then somebody has deleted it if it is not there, while the host was down perhaps.
// A datastore without the Node is another one, or empty.
func (d *router) had(ctx context.Context) ([]store.Object, error) {
	last, err := d.db.Last(ctx)
	if err != nil || last.Value == nil {
		return nil, err
	}
	switch _, err := d.store.Get(ctx, store.ResourceKey(store.KindNode, d.name)); {
	case errors.Is(err, store.ErrNotFound):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("look for this host's Node: %w", err)
	}
	return []store.Object{last}, nil
}

// firstWrites is the back-off of what a start writes to the datastore.
func firstWrites() async.Backoff {
	return async.Backoff{Min: 100 * time.Millisecond, Max: 10 * time.Second}
}

// runAttach takes over the workloads of the previous run and completes what was
// cut short.
func (d *router) runAttach(ctx context.Context) error {
	if err := d.attach.Restore(ctx); err != nil {
		return err
	}
	close(d.restored)
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { d.attach.Run(ctx); return nil })
	g.Go(func() error { return d.mtu.Run(ctx) })
	return g.Wait()
}

// attachReady says why ADD cannot be served yet.
func (d *router) attachReady() error {
	if err := d.presence.Refused(); err != nil {
		return err
	}
	ns := d.node.Status()
	switch {
	case d.db.Locked():
		return lock.ErrLocked
	case !ns.Registered && ns.Err != nil:
		return ns.Err
	// What is remembered of the reserve serves only where the datastore is away:
	// else it may know better whose the addresses are.
	case !ns.Registered && (d.cluster.Freshness().Err == nil || len(d.ipam.Ready()) == 0):
		return errors.New("this host is not registered in the datastore yet")
	case d.leaving.Load():
		return errors.New("this host's daemon is being stopped, so it takes no new workloads")
	case ns.Drain != "":
		return errors.New("this host is drained, so it takes no new workloads; routerctl node undrain has it take them again")
	}
	if err := d.policy.Unable(); err != nil {
		return err
	}
	if d.mtu.Smallest() == 0 && d.attach.ReachedMTU() == (attach.MTU{}) {
		return errors.New("the host's network is not known yet")
	}
	return nil
}

func (d *router) datastoreError() error {
	fresh := d.cluster.Freshness()
	var full error
	if d.member != nil {
		full = d.member.Err()
	}
	return cmp.Or(d.db.Err(), full, fresh.Err, fresh.Withheld)
}

// policyServer returns what answers an operator about policy; nil: it is switched off.
func (d *router) policyServer() *operator.PolicyServer {
	if !d.cfg.Policy.Enabled {
		return nil
	}
	p := d.policy
	return operator.NewPolicyServer(operator.PolicyConfig{
		Node: d.name, AutoHostEndpoints: d.cfg.Policy.AutoHostEndpoints, Services: d.policyServices(), Store: d.db, Workloads: d.attach.Endpoints,
		Unable: p.Unable(), Flows: p.Flows, Enforcer: p.Enforcer, Table: p.Table, Connections: p.Connections, State: p.Err,
	})
}

// bgpServer returns the service behind `routerctl bgp`.
func (d *router) bgpServer() apiv1.BGPServer {
	if d.bgp == nil {
		return rpc.NewBGPServer(nil)
	}
	return rpc.NewBGPServer(operator.Speaker{BGP: d.reflectors.Service(), Server: d.operator})
}

// subnets lists the subnets of each device.
func subnets(u dataplane.Underlay) map[string][]netip.Prefix {
	out := map[string][]netip.Prefix{}
	for _, a := range u.Addresses {
		out[a.Link] = append(out[a.Link], a.Prefix.Masked())
	}
	return out
}

var (
	_ dataplane.Sink = (*kernel.Kernel)(nil)
	_ attach.IPAM    = (*ipam.Allocator)(nil)
	_ node.Tunnels   = tunnelIPAM{}
)
