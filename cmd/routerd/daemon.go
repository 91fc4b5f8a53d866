package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"

	"github.com/KimMachineGun/automemlimit/memlimit"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/attach"
	"github.com/routerd/routerd/control/bgp"
	"github.com/routerd/routerd/control/config"
	"github.com/routerd/routerd/control/health"
	"github.com/routerd/routerd/control/ipam"
	"github.com/routerd/routerd/control/journal"
	"github.com/routerd/routerd/control/node"
	"github.com/routerd/routerd/control/policy"
	"github.com/routerd/routerd/control/presence"
	"github.com/routerd/routerd/control/rpc"
	"github.com/routerd/routerd/control/vrouter"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/adjacent"
	"github.com/routerd/routerd/dataplane/kernel"
	"github.com/routerd/routerd/dataplane/workload"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/embedded"
	"github.com/routerd/routerd/store/etcd"
)

// router holds the daemon's parts. They are made in [newRouter], in the order in which
// they depend on each other, and run in [daemon.run].
type router struct {
	cfg     config.Config
	name    string
	log     *slog.Logger
	started time.Time
	checks  *health.Log

	etcd   *embedded.Server // nil: external
	store  *etcd.Store
	kernel *kernel.Kernel
	core   *vrouter.Core
	ipam   *ipam.Allocator
	node   *node.Agent
	bgp    *bgp.Controller // nil: not enabled
	// adjacent is with bgp.
	adjacent *adjacent.Tracker
	wire     *workload.Wire
	attach   *attach.Attacher
	// restored is closed when the workloads of an earlier life are taken over.
	restored chan struct{}
	// journal is what this host has promised and must know after the loss of power.
	journal *journal.Journal
	reach   *reacher
	policy  *policies // nil: switched off

	presence *presence.Keeper
	refused  chan struct{}    // another machine has this host's name
	away     chan store.Batch // the datastore cannot be reached, or can again; before the parts follow it

	storeErr atomic.Pointer[error] // why the datastore cannot be reached; nil: it can
	mtuErr   atomic.Pointer[error] // why workloads are not at their MTU; nil: they are
	tunnels  *tunnels              // nil: probes are not enabled
	noPolicy error                 // why this kernel cannot enforce policy
	bgpFeed  chan store.Batch
	ipamFeed chan store.Batch
	counters counters
	foreign  foreign
	felix    felixRest
}

// run makes the daemon and runs it until ctx ends or a part cannot go on.
func run(ctx context.Context, c config.Config, log *slog.Logger) (err error) {
	name, err := c.Name()
	if err != nil {
		return err
	}
	lock, err := lockHost(c.RunDir)
	if err != nil {
		return err
	}
	defer lock.Close()
	alone, err := lockKernel(ctx)
	if err != nil {
		return err
	}
	defer alone.Close()
	log.Info("starting", "version", version, "node", name, "run_dir", c.RunDir, "state_dir", c.StateDir)
	limitMemory(log, memlimit.FromCgroup)
	d, err := newRouter(ctx, c, name, log)
	if d != nil {
		defer func() { err = errors.Join(err, d.close()) }()
	}
	if err != nil {
		return err
	}
	return d.run(ctx)
}

// deferBGP bounds for how long routes that BGP learned stay as an earlier life
// left them. Sessions of a restarted daemon are back within about ten seconds.
const deferBGP = 30 * time.Second

// newRouter makes the parts. On error what was made so far is returned too,
// for the caller to close.
func newRouter(ctx context.Context, c config.Config, name string, log *slog.Logger) (*router, error) {
	d := &router{
		cfg: c, name: name, log: log, started: time.Now(), checks: health.NewLog(time.Now),
		bgpFeed: make(chan store.Batch), ipamFeed: make(chan store.Batch), counters: newCounters(),
		restored: make(chan struct{}), away: make(chan store.Batch, 1),
	}
	var err error
	// The kernel first: without its permission nothing else is of use.
	d.kernel, err = kernel.New(kernel.Config{
		Protocol: uint8(c.Dataplane.RouteProtocol), FullCheck: c.Dataplane.FullCheckInterval, Log: log.With("component", "kernel"), Hooks: d.counters.hooks(),
	})
	if err != nil {
		return d, err
	}
	if err := d.openStore(ctx); err != nil {
		return d, err
	}
	if err := d.newPolicy(); err != nil {
		return d, err
	}
	var restarting bool
	if c.BGP.Enabled {
		if restarting, err = d.markBGP(); err != nil {
			return d, err
		}
	}
	cc := vrouter.Config{
		Node: name, Sink: d.kernel, Status: d.kernel.Status, Publish: true, WithoutBGP: !c.BGP.Enabled, Log: log.With("component", "vrouter"),
	}
	if restarting {
		cc.DeferBGP = deferBGP
	}
	d.core = vrouter.New(cc)
	if d.tunnels, err = d.newTunnels(); err != nil {
		return d, err
	}
	if err := d.openJournal(); err != nil {
		return d, err
	}
	d.ipam = ipam.New(ipam.Config{
		Store: d.store, Node: name, Log: log.With("component", "ipam"), Unusable: d.unusablePool,
		Reserve: ipam.ReserveConfig{Min: c.IPAM.Reserve.Min, Max: c.IPAM.Reserve.Max, Journal: d.journal},
	})
	d.node = node.New(node.Config{
		Name: name, Store: d.store, Tunnels: tunnelIPAM{d.ipam}, Log: log.With("component", "node"),
		Methods: addressMethods(c), DefaultPools: defaultPools(c), Conditions: d.conditions,
	})
	if c.BGP.Enabled {
		d.adjacent = d.newAdjacent()
		d.bgp = bgp.New(bgp.Options{
			Devices: d.adjacent.Want,
			Log:     log.With("component", "bgp"), Node: name, Restarting: restarting, SecretDir: c.BGP.SecretDir, StateFile: filepath.Join(c.StateDir, "bgp.json"),
			MayResume: func() bool { return d.presence.MayResume() }, // it is made later
			Handle: func(ctx context.Context, ch bgp.Changes) {
				// The only error is that ctx has ended.
				if err := d.core.Paths(ctx, pathUpdate(ch)); err != nil {
					log.Debug("paths not taken", "error", err)
				}
			},
		})
	}
	d.wire, err = workload.New(workload.Config{})
	if err != nil {
		return d, err
	}
	d.attach, err = attach.New(attach.Config{
		Node: name, Dir: c.WorkloadDir(), Journal: d.journal, IPAM: workloadIPAM{d.ipam}, Sink: d.kernel, Store: d.store, Wire: d.wire,
		Behind: c.IPAM.Reserve.Min > 0, Ready: d.attachReady, Held: d.nameHeld,
		Rules: d.awaitRules(), Announce: d.announceEndpoint, Written: d.endpointWritten, Ended: d.endpointEnded, Log: log.With("component", "attach"),
	})
	if err != nil {
		return d, err
	}
	if err := d.newPresence(); err != nil {
		return d, err
	}
	d.reach, err = d.newReach(ctx)
	return d, err
}

// openStore starts the embedded datastore if no other is configured, and makes
// the client.
func (d *router) openStore(ctx context.Context) error {
	ds := d.cfg.Datastore
	ec := etcd.Config{
		Endpoints: ds.Endpoints, CAFile: ds.CAFile, CertFile: ds.CertFile, KeyFile: ds.KeyFile,
		Username: ds.Username, DialTimeout: ds.DialTimeout, Logger: d.log.With("component", "store"),
	}
	if len(ds.Endpoints) == 0 {
		var listen netip.AddrPort
		if ds.Embedded.Listen != "" {
			listen = netip.MustParseAddrPort(ds.Embedded.Listen) // Validate has parsed it
		}
		var err error
		d.etcd, err = embedded.Start(ctx, embedded.Config{
			Dir: d.cfg.EtcdDir(), PKIDir: d.cfg.PKIDir(), Socket: d.cfg.EtcdSocket(), Listen: listen,
			Hosts: ds.Embedded.Hosts, Name: d.name, Logger: d.log.With("component", "etcd"),
		})
		if err != nil {
			return fmt.Errorf("start the embedded datastore: %w", err)
		}
		ec.Endpoints = []string{d.etcd.Endpoint()}
	}
	var err error
	if ec.Password, err = ds.Password(); err != nil {
		return err
	}
	d.store, err = etcd.Open(ctx, ec)
	return err
}

// startMark is the file that says that BGP was started since the host booted.
func startMark(runDir string) string { return filepath.Join(runDir, "bgp.started") }

// markBGP reports whether this is not the first start since the host booted:
// only then do peers hold routes for us to confirm (RFC 4724, section 4.1).
func (d *router) markBGP() (restarting bool, err error) {
	f, err := os.OpenFile(startMark(d.cfg.RunDir), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if errors.Is(err, fs.ErrExist) {
		return true, nil
	}
	if err != nil {
		return false, fmt.Errorf("mark the start of BGP: %w", err)
	}
	return false, f.Close()
}

func (d *router) close() error {
	var errs []error
	if d.wire != nil {
		d.wire.Close()
	}
	if d.store != nil {
		errs = append(errs, d.store.Close())
	}
	if d.etcd != nil {
		d.etcd.Close()
	}
	if d.journal != nil {
		errs = append(errs, d.journal.Close())
	}
	errs = append(errs, d.policy.close())
	if d.kernel != nil {
		errs = append(errs, d.kernel.Close())
	}
	d.log.Info("stopped; the kernel is left as it is")
	return errors.Join(errs...)
}

// run runs every part. The first that ends stops the others.
func (d *router) run(ctx context.Context) error {
	operator, err := rpc.Listen(d.cfg.OperatorSocket())
	if err != nil {
		return err
	}
	plugin, err := rpc.Listen(d.cfg.CNISocket())
	if err != nil {
		return errors.Join(err, operator.Close())
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
	part("kernel writer", d.kernel.Run)
	part("core", d.core.Run)
	part("ipam", func(ctx context.Context) error { return d.ipam.Run(ctx, d.ipamFeed) })
	part("node", d.node.Run)
	part("underlay", d.followUnderlay)
	part("presence", d.runPresence)
	part("store", d.followStore)
	part("bootstrap", d.bootstrap)
	part("reach", d.runReach)
	part("policy", d.runPolicy)
	part("live change", d.followForms)
	if d.tunnels != nil {
		part("probes", func(ctx context.Context) error { return d.tunnels.run(ctx, d.core, d.store) })
	}
	part("workloads", d.runAttach)
	part("collector", d.runCollector)
	if d.bgp != nil {
		part("neighbours", d.runAdjacent)
		part("bgp", func(ctx context.Context) error { return d.bgp.Run(ctx, d.bgpFeed) })
	}
	if d.etcd != nil {
		part("embedded datastore", d.watchEtcd)
	}
	part("operator socket", func(ctx context.Context) error {
		return serve(ctx, operator, rpc.ServerOptions(d.log), func(s *grpc.Server) {
			apiv1.RegisterOperatorServer(s, rpc.NewOperatorServer(d))
			apiv1.RegisterBGPServer(s, d.bgpServer())
			d.store.RegisterKV(s)
		})
	})
	part("cni socket", func(ctx context.Context) error {
		return serve(ctx, plugin, rpc.ServerOptions(d.log), func(s *grpc.Server) { apiv1.RegisterCNIServer(s, rpc.NewCNIServer(d.attach)) })
	})
	if d.cfg.Health.Listen != "" {
		part("health endpoint", func(ctx context.Context) error {
			h := health.Handler(d.liveCheck, d.report, d.metrics())
			if d.cfg.Health.Profiles {
				h = health.WithProfiles(h)
			}
			return health.Serve(ctx, d.cfg.Health.Listen, h, d.log)
		})
	}
	part("systemd", func(ctx context.Context) error {
		notifySystemd(ctx, d.log, d.live, d.statusLine)
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

// watchEtcd ends the daemon when the datastore it runs ends by itself: a new
// start is what helps then.
func (d *router) watchEtcd(ctx context.Context) error {
	select {
	case err := <-d.etcd.Err():
		return err
	case <-ctx.Done():
		return nil
	}
}

// followUnderlay hands snapshots of the network around the host to those who
// decide by them.
func (d *router) followUnderlay(ctx context.Context) error {
	for u := range d.kernel.Underlay(ctx) {
		d.node.HandleUnderlay(u)
		d.tunnels.HandleUnderlay(u)
		d.policy.handleUnderlay(u)
		if err := d.core.Underlay(ctx, u); err != nil {
			return err
		}
		d.followForeign(ctx, u)
		if d.bgp != nil {
			d.bgp.SetLinks(subnets(u))
			d.adjacent.HandleUnderlay(u)
		}
	}
	return nil
}

// watched lists the kinds that some part wants to see.
func watched() []store.Kind {
	var kinds []store.Kind
	seen := map[store.Kind]bool{}
	for _, list := range [][]store.Kind{vrouter.Kinds(), node.Kinds(), bgp.Kinds(), ipam.Kinds(), attach.Kinds(), policy.Kinds()} {
		for _, k := range list {
			if !seen[k] {
				seen[k] = true
				kinds = append(kinds, k)
			}
		}
	}
	return kinds
}

// followStore hands the one ordered watch to all parts, once this host holds its
// name: a part that has not seen the datastore's state neither writes, nor
// announces, nor sweeps.
func (d *router) followStore(ctx context.Context) error {
	if err := d.awaitName(ctx); err != nil {
		return err
	}
	for b := range d.store.Watch(ctx, watched()...) {
		if err := d.hand(ctx, b); err != nil {
			return err
		}
	}
	return ctx.Err()
}

// hand hands a batch to every part, before the next.
func (d *router) hand(ctx context.Context, b store.Batch) error {
	if b.Err != nil {
		d.storeErr.Store(&b.Err)
		d.log.Warn("datastore cannot be reached; what runs keeps running", "error", b.Err)
	} else if d.storeErr.Swap(nil) != nil {
		d.log.Info("datastore is back")
	}
	if err := d.core.Store(ctx, b); err != nil {
		return err
	}
	// The empty batch is taken when the one before it has been worked in:
	// the node's agent, which comes last, asks IPAM for addresses by what
	// it has seen, and IPAM must have seen it too.
	if err := send(ctx, d.ipamFeed, b, store.Batch{}); err != nil {
		return err
	}
	if d.bgp != nil {
		if err := send(ctx, d.bgpFeed, b); err != nil {
			return err
		}
	}
	d.tunnels.HandleStore(b)
	// What it announces must not hide what policy heard from the datastore.
	d.attach.HandleStore(b)
	d.policy.handleStore(b)
	d.attach.AnnounceAgain(b)
	d.reach.HandleStore(b)
	d.node.HandleStore(b)
	return nil
}

func send(ctx context.Context, feed chan<- store.Batch, batches ...store.Batch) error {
	for _, b := range batches {
		select {
		case feed <- b:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// bootstrap makes what every cluster has, once the datastore answers.
func (d *router) bootstrap(ctx context.Context) error {
	for pause := 100 * time.Millisecond; ; pause = min(2*pause, 10*time.Second) {
		attempt, cancel := context.WithTimeout(ctx, 10*time.Second)
		err := store.Bootstrap(attempt, d.store)
		cancel()
		if err == nil {
			return nil
		}
		d.log.Debug("bootstrap; will try again", "error", err)
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(pause):
		}
	}
}

// runAttach takes over the workloads of an earlier life and completes what was
// cut short.
func (d *router) runAttach(ctx context.Context) error {
	if err := d.attach.Restore(ctx); err != nil {
		return err
	}
	close(d.restored)
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { d.attach.Run(ctx); return nil })
	g.Go(func() error { return d.followMTU(ctx) })
	return g.Wait()
}

// errLocked says that an operator locked the datastore.
var errLocked = errors.New("the datastore is locked: ClusterInformation default has datastoreReady: false, " +
	"as \"calicoctl datastore migrate lock\" sets it; unlock it when the migration is over")

// attachReady says why ADD cannot be served yet.
func (d *router) attachReady() error {
	if err := d.presence.Refused(); err != nil {
		return err
	}
	ns := d.node.Status()
	switch {
	case ns.Locked:
		return errLocked
	case !ns.Registered && ns.Err != nil:
		return ns.Err
	// What is remembered of the reserve serves only where the datastore is away:
	// else it may know better whose the addresses are.
	case !ns.Registered && (d.storeErr.Load() == nil || len(d.ipam.Ready()) == 0):
		return errors.New("this host is not registered in the datastore yet")
	}
	if d.noPolicy != nil {
		return d.noPolicy
	}
	if d.workloadMTU() == 0 && d.attach.ReachedMTU() == (attach.MTU{}) {
		return errors.New("the host's network is not known yet")
	}
	return nil
}

func (d *router) datastoreError() error {
	if d.node.Status().Locked {
		return errLocked
	}
	if p := d.storeErr.Load(); p != nil {
		return *p
	}
	return nil
}

func (d *router) datastoreName() string {
	if d.etcd == nil {
		return strings.Join(d.cfg.Datastore.Endpoints, ",")
	}
	if d.cfg.Datastore.Embedded.Listen != "" {
		return "embedded, serving https://" + d.cfg.Datastore.Embedded.Listen
	}
	return "embedded"
}

// statusLine is what systemctl status shows.
func (d *router) statusLine() string {
	r := d.report(context.Background())
	if !r.Ready.OK {
		return "not ready: " + r.Ready.Reason
	}
	up := len(r.Peers) - len(health.Failed(r.Peers))
	return fmt.Sprintf("ready; %d workloads, %d of %d BGP sessions up", len(d.attach.Endpoints()), up, len(r.Peers))
}

var (
	_ rpc.Operator   = (*router)(nil)
	_ dataplane.Sink = (*kernel.Kernel)(nil)
	_ attach.IPAM    = workloadIPAM{}
	_ node.Tunnels   = tunnelIPAM{}
)
