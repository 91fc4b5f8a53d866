package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"github.com/KimMachineGun/automemlimit/memlimit"
	"golang.org/x/sync/errgroup"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/routerd/routerd/control/attach"
	"github.com/routerd/routerd/control/bgp"
	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/control/cnifiles"
	"github.com/routerd/routerd/control/config"
	"github.com/routerd/routerd/control/enforce"
	"github.com/routerd/routerd/control/events"
	"github.com/routerd/routerd/control/foreign"
	"github.com/routerd/routerd/control/heap"
	"github.com/routerd/routerd/control/hostlocal"
	"github.com/routerd/routerd/control/hostlock"
	"github.com/routerd/routerd/control/ipam"
	"github.com/routerd/routerd/control/journal"
	"github.com/routerd/routerd/control/kubecontrollers"
	"github.com/routerd/routerd/control/kubesync"
	"github.com/routerd/routerd/control/netpolicy"
	"github.com/routerd/routerd/control/node"
	"github.com/routerd/routerd/control/nodenetwork"
	"github.com/routerd/routerd/control/nodestatus"
	"github.com/routerd/routerd/control/operator"
	"github.com/routerd/routerd/control/presence"
	"github.com/routerd/routerd/control/probe"
	"github.com/routerd/routerd/control/publish"
	"github.com/routerd/routerd/control/rollback"
	"github.com/routerd/routerd/control/spans"
	"github.com/routerd/routerd/control/vrouter"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/adjacent"
	"github.com/routerd/routerd/dataplane/felix"
	"github.com/routerd/routerd/dataplane/ipip"
	"github.com/routerd/routerd/dataplane/kernel"
	"github.com/routerd/routerd/dataplane/vxlan"
	"github.com/routerd/routerd/dataplane/workload"
	"github.com/routerd/routerd/store/kube"
)

// daemon is what every part of it is made with.
type daemon struct {
	config.Config
	name   string
	said   *events.Log
	log    *slog.Logger  // of the daemon as a whole, to the same log
	tracer *spans.Tracer // nil: no traces are collected
}

// of returns the log of a component.
func (d daemon) of(component string) *slog.Logger { return d.log.With("component", component) }

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
	var p parts
	defer func() {
		err = errors.Join(err, p.close())
		log.Info("stopped; the kernel is left as it is")
	}()
	if err := build(ctx, daemon{c, name, said, log, tracer}, &p); err != nil {
		return err
	}
	return p.run(ctx)
}

// deferBGP bounds for how long routes that BGP learned stay as the previous run
// left them. Sessions of a restarted daemon are back within about ten seconds.
const deferBGP = 30 * time.Second

// build makes the parts in the order in which they depend on each other.
func build(ctx context.Context, d daemon, p *parts) error {
	c := d.Config
	started := time.Now()
	// Of these others ask before they are made, by calls that come once all run.
	var (
		agent   *node.Agent
		speaker *bgp.Controller // nil: not enabled
		op      *operator.Server
	)

	// The kernel first: without its permission nothing else is of use.
	counted := newCounters()
	k, err := kernel.New(kernel.Config{
		Protocol: uint8(c.Dataplane.RouteProtocol), FullCheck: c.Dataplane.FullCheckInterval, Sysctls: c.Dataplane.SysctlDir, Log: d.of("kernel"), Hooks: counted.hooks(),
	})
	if err != nil {
		return err
	}
	p.closes(k.Close)
	p.runs("kernel writer", k.Run)

	self, err := identify(c)
	if err != nil {
		return err
	}
	ds, err := openDatastore(ctx, d, p, self, func() (netip.Addr, error) { return ownAddress(agent) })
	if err != nil {
		return err
	}
	p.runs("lock", ds.db.Run)

	known := cluster.New(cluster.Config{
		Store: ds.store, Node: d.name, Version: kube.Conversion(), Log: d.of("cluster"), Services: ds.api != nil,
		File: clusterFile(c), PreviousFile: previousPolicyFile(c), PreviousFiles: []string{previousBGPFile(c)},
	})
	p.closes(known.Close)
	f := follow(known, c.BGP.Enabled, ds.api != nil, ds.inAPI(), c.UI.Listen != "")
	p.runs("lock follows", each(f.lock, ds.db.HandleStore))

	policy, err := netpolicy.Open(netpolicy.Config{
		Enabled: c.Policy.Enabled, Offload: c.Policy.Offload, LogRate: uint32(c.Policy.LogRate), //nolint:gosec // Validate has checked it
		Enforce: enforce.Config{
			Node: d.name, AutoHostEndpoint: c.Policy.AutoHostEndpoints, HostPorts: hostPorts(c), Guarded: guardedPorts(c), Datastore: datastorePorts(ds.servers), Services: ds.services(),
			TunnelsFromAnywhere: c.Policy.AllowTunnelsFromAnywhere,
			MaxConnections:      uint32(c.Policy.MaxConnectionsPerWorkload), //nolint:gosec // Validate has checked it
			Tracer:              d.tracer,
			AskOthers:           func(asks bool) { known.AskOthers("policy", asks) },
		},
		DeleteTable: k.DeleteTable, Disk: known, Store: ds.db, RunDir: c.RunDir, Log: d.log,
	})
	if err != nil {
		return err
	}
	p.closes(policy.Close)
	restored := make(chan struct{}) // closed when the workloads of the previous run are taken over
	p.runs("policy follows", each(f.policy, policy.HandleStore))
	p.runs("policy", func(ctx context.Context) error { return policy.Run(ctx, restored, f.policy.CatchUp) })
	load(d, known, f, policy)

	var restarting bool
	cc := vrouter.Config{
		Node: d.name, Sink: k, Status: k.Status, Publish: true, WithoutBGP: !c.BGP.Enabled, UsePodCIDR: c.IPAM.UsePodCIDR, Tracer: d.tracer, Log: d.of("vrouter"),
	}
	if c.BGP.Enabled {
		if restarting, err = markBGP(d); err != nil {
			return err
		}
		if restarting {
			cc.DeferBGP = deferBGP
		}
	}
	core := vrouter.New(cc)
	p.runs("core", core.Run)
	p.runs("core follows", func(ctx context.Context) error { return f.core.Each(ctx, core.Store) })

	// What this host has promised and must know after the loss of power.
	if err := os.MkdirAll(c.WorkloadDir(), 0o700); err != nil {
		return fmt.Errorf("make directory for the journal: %w", err)
	}
	promised, err := journal.Open(filepath.Join(c.WorkloadDir(), "journal"), d.of("journal"))
	if err != nil {
		return err
	}
	p.closes(promised.Close)

	addresses := ipam.New(ipam.Config{
		Store: ds.db, Node: d.name, Log: d.of("ipam"), Unusable: func(pool string) string { return op.UnusablePool(pool) },
		UsePodCIDR: c.IPAM.UsePodCIDR, Piecewise: ds.inAPI(),
		Reserve: ipam.ReserveConfig{Min: c.IPAM.Reserve.Min, Max: c.IPAM.Reserve.Max, Journal: promised},
	})
	// doubtReserve says that what the previous run had of the reserve may be another's by now.
	doubtReserve := func() {
		if err := addresses.Doubt(); err != nil {
			d.log.Warn("the reserve of the previous run is still in the journal; this run does not use it", "error", err)
		}
	}
	if promised.Damage().Lines > 0 {
		// Among what was lost may be who has an address that is in the reserve by an
		// older line.
		doubtReserve()
	}
	var others *hostlocal.Occupied // nil: addresses are not those of the Node's pod CIDRs
	if c.IPAM.UsePodCIDR {
		others = hostlocal.NewOccupied(hostlocal.Store(c.IPAM.HostLocalDir), addresses, d.of("ipam"))
		others.Read() // before the first address is given
		p.runs("addresses of other networks", others.Run)
	}
	p.runs("ipam", func(ctx context.Context) error { return addresses.Run(ctx, f.ipam) })

	agent = node.New(node.Config{
		UsePodCIDR: c.IPAM.UsePodCIDR,
		Name:       d.name, Store: ds.db, Tunnels: tunnelIPAM{addresses}, AwaitIPAM: f.ipam.Wait, Log: d.of("node"),
		Methods: addressMethods(c), DefaultPools: defaultPools(c), Conditions: func() []metav1.Condition { return op.Conditions() },
	})
	p.runs("node", agent.Run)
	p.runs("node follows", each(f.node, agent.HandleStore))
	p.runs("live change", publish.Publisher{
		Core: core, Publish: agent.PublishEncaps, Tunnels: []dataplane.Driver{ipip.Driver{}, vxlan.Driver{}}, Supports: k.Supports, RunDir: c.RunDir, Log: d.log,
	}.Run)

	wire, err := workload.New(workload.Config{Sysctls: c.Dataplane.SysctlDir})
	if err != nil {
		return err
	}
	p.closes(func() error { wire.Close(); return nil })
	ready := &readiness{db: ds.db, cluster: known, ipam: addresses, node: agent, policy: policy}
	ac := attach.Config{
		Network: c.CNI.NetworkName,
		Node:    d.name, Dir: c.WorkloadDir(), Journal: promised, IPAM: addresses, Sink: k, Store: ds.db, Wire: wire,
		Behind: c.IPAM.Reserve.Min > 0, Kubernetes: ds.inAPI(), UsePodCIDR: c.IPAM.UsePodCIDR, Ready: ready.err, Held: ready.mayWrite,
		LingerConfirm: attach.LingerConfirm, LingerEnd: attach.LingerEnd, Rules: policy.Rules(), OwnWrites: known, Tracer: d.tracer, Log: d.of("attach"),
	}
	if ds.mirrors() {
		ac.Pods = ds.api
	}
	if others != nil {
		ac.ReleaseOther = hostlocal.Store(c.IPAM.HostLocalDir).Release
	}
	attacher, err := attach.New(ac)
	if err != nil {
		return err
	}
	mtu := attach.NewMTUFollower(core, attacher, c.CNI.MTU, d.log)
	ready.attach, ready.mtu = attacher, mtu
	p.runs("workloads", func(ctx context.Context) error {
		// First those of the previous run, and what was cut short.
		if err := attacher.Restore(ctx); err != nil {
			return err
		}
		close(restored)
		g, ctx := errgroup.WithContext(ctx)
		g.Go(func() error { attacher.Run(ctx); return nil })
		g.Go(func() error { return mtu.Run(ctx) })
		return g.Wait()
	})
	p.runs("workloads follow", each(f.attach, attacher.HandleStore))
	if f.pods != nil {
		p.runs("pods follow", each(f.pods, attacher.HandlePods))
	}

	holder := presence.New(presence.Config{
		Node: d.name, Store: ds.names, File: incarnationFile(c), Self: self,
		Disown: attacher.Disown, Verified: attacher.Verified, Fence: attacher.FenceForeign, Outage: known.SetOutage,
		Doubt: func() {
			doubtReserve()
			attacher.Doubt()
		},
		Log: d.of("presence"),
	})
	ready.presence = holder
	held := holder.Held()
	// What the previous run had may be in doubt when the name is held.
	p.runs("presence", after(restored, holder.Run))
	// A part that has not seen the datastore's state neither writes, nor announces, nor sweeps.
	p.runs("cluster", after(held, known.Run))

	var sign func(bgp.Keyring)
	if c.BGP.Enabled {
		sign = func(k bgp.Keyring) { speaker.SetKeys(k) }
	}
	key := bgp.NewClusterKey(bgp.ClusterKeyConfig{Store: ds.store, File: filepath.Join(c.StateDir, "bgp.key"), Use: sign, Publish: agent.SetBGPKeys, Log: d.log})
	p.runs("bgp key", key.Run)
	var neighbours *adjacent.Tracker // with speaker
	var reflectors *bgp.Reflectors   // with speaker
	if c.BGP.Enabled {
		neighbours = adjacent.New(d.of("adjacent"), func(links map[string]adjacent.Link) {
			out := make(map[string]bgp.Link, len(links))
			for name, l := range links {
				out[name] = bgp.Link(l)
			}
			speaker.SetAdjacent(out)
		})
		var secrets bgp.Secrets
		if ds.api != nil {
			secrets = ds.api
		}
		speaker = bgp.New(bgp.Options{
			Devices: neighbours.Want, Secrets: secrets, SecretsFile: filepath.Join(c.StateDir, "bgp.secrets"),
			Log: d.of("bgp"), Node: d.name, Restarting: restarting, SecretDir: c.BGP.SecretDir, PreviousFile: previousBGPFile(c),
			MayResume: holder.MayResume, Answers: func() bool { return holder.Epoch() != 0 },
			BFD: bfdCommand, CallersFile: filepath.Join(c.RunDir, "bgp.callers"), KeysChanged: key.Changed,
			Services: ds.api != nil,
			Inject: bgp.InjectOptions{
				Allow: c.BGP.Inject.Prefixes(), MaxRoutes: c.BGP.Inject.MaxRoutes, File: filepath.Join(c.RunDir, "bgp.injected"),
			},
			Handle: func(ctx context.Context, ch bgp.Changes) {
				// The only error is that ctx has ended.
				if err := core.Paths(ctx, pathUpdate(ch)); err != nil {
					d.log.Debug("paths not taken", "error", err)
				}
			},
		})
		key.Load()
		reflectors = bgp.NewReflectors(bgp.ReflectorsConfig{
			Node: d.name, Controller: speaker, Hosts: ds.hosts, Lead: ds.store.Lead, Publish: agent.PublishReflection, Log: d.log,
		})
		p.runs("neighbours", neighbours.Run)
		p.runs("reflectors", after(held, reflectors.Run))
		p.runs("bgp", func(ctx context.Context) error { return speaker.Run(ctx, f.bgp) })
	}

	prober, err := newProber(ctx, d, probe.Config{Store: ds.db, Core: core, Underlay: probe.UnderlayConfig{Sources: policy.Sources()}, Tunnel: probe.TunnelConfig{Sink: k}})
	if err != nil {
		return err
	}
	p.runs("probes", prober.Run)
	p.runs("probes follow", each(f.probe, prober.HandleStore))

	hostEndpoints := kubecontrollers.NewKeeper(d.name, ds.db, node.Virtual, d.of("kubecontrollers")) // those that follow from Nodes
	p.runs("host endpoints follow", each(f.hosts, hostEndpoints.HandleStore))
	p.runs("host endpoints", after(held, hostEndpoints.Run))

	oc := operator.Config{
		Node: d.name, Version: version, Started: started, Datastore: datastoreName(c), RouteProtocol: c.Dataplane.RouteProtocol,
		Sysctls: c.Dataplane.SysctlDir, Dirs: []string{c.StateDir, c.RunDir},
		Store: ds.db, Conflist: conflistOptions(c), Log: d.log,
		Kernel: k, Core: core, IPAM: addresses, Agent: agent, BGP: speaker, Attach: attacher, Presence: holder,
		Foreign: foreign.NewRoutes(k.Status, d.log), Probes: prober, TunnelKind: tunnelKind, Snapshot: known.Snapshot, OthersKnown: func() bool { return known.Others().Complete },
		DatastoreError: func() error {
			fresh := known.Freshness()
			return cmp.Or(ds.db.Err(), ds.full(), fresh.Err, fresh.Withheld)
		},
		CertificateError: func() error { return ds.certs.Problem(time.Now()) }, CertificateEnd: ds.certs.Expiry, JournalError: func() error { return attach.JournalError(promised) }, PolicyError: policy.Err, PolicyWaiting: policy.Waiting,
		MTUError: mtu.Err, Damage: promised.Damage, WorkloadMTU: mtu.Smallest,
	}
	if c.Policy.Enabled {
		oc.Policy = operator.NewPolicyServer(operator.PolicyConfig{
			Node: d.name, AutoHostEndpoints: c.Policy.AutoHostEndpoints, Services: ds.services(), Store: ds.db, Workloads: attacher.Endpoints,
			Unable: policy.Unable(), Flows: policy.Flows, Enforcer: policy.Enforcer, Table: policy.Table, Connections: policy.Connections, State: policy.Err,
		})
	}
	if others != nil {
		oc.OccupiedError = others.Err
	}
	if ds.etcd != nil { // by which hosts ask each other, and which says who is there
		oc.Ask, oc.AskAll, oc.Presences = ds.etcd.Ask, ds.etcd.AskAll, ds.etcd
	}
	if ds.api != nil {
		oc.Service = ds.api.ServiceDetail
	}
	op = operator.New(oc)
	if ds.etcd != nil {
		p.runs("questions of other hosts", after(held, endless(func(ctx context.Context) { ds.etcd.Questions(ctx, d.name, op.Answer) })))
	}
	reporter := nodestatus.New(d.name, ds.db, op, d.of("nodestatus"))
	p.runs("status follows", each(f.status, reporter.HandleStore))
	p.runs("status", reporter.Run)

	p.runs("bootstrap", func(ctx context.Context) error { return ds.bootstrap(ctx, d, key.Made) })
	if !ds.inAPI() { // the Kubernetes datastore has no changes to confirm
		p.runs("changes to confirm", rollback.Keeper{Node: d.name, Store: ds.store, Log: d.of("rollback")}.Run)
	}
	forOthers := func(ctx context.Context) { ds.tellForOthers(ctx, d, policy) }
	p.runs("collector", after(held, duties{
		daemon: d, ds: ds, addresses: hostAddresses{addresses, attacher, d.name}, endpoints: hostEndpoints, follows: f.controllers, forOthers: forOthers,
	}.run))
	if c.CNI.Manage {
		files, err := installOptions(c)
		if err != nil {
			return err
		}
		k := cnifiles.Keeper{Files: files, Ready: ready.err, Log: d.log}
		p.runs("cni files", after(restored, k.Run))
	}
	if ds.api != nil {
		own := nodenetwork.Own{Node: d.name, Pod: ds.api.InPod(), API: ds.api, Said: ds.nodes.Network, Obstacle: func(ctx context.Context) error {
			if err := ready.err(); err != nil {
				return err
			}
			if r := op.Report(ctx).Ready; !r.OK {
				return errors.New(r.Reason)
			}
			return nil
		}, Log: d.log}
		p.runs("network condition", after(held, own.Run))
		p.runs("network follows", each(f.network, ds.networks.HandleStore))
	}
	if ds.mirrors() {
		p.runs("own Node", func(ctx context.Context) error { return ds.nodes.Follow(ctx, d.name, agent.SetInternalIPs) })
		p.runs("conditions of other Nodes", after(held, endless(func(ctx context.Context) { ds.api.Lead(ctx, collectorLease, d.name, collectorTTL, forOthers) })))
		p.runs("own pods", kubesync.Pods{API: ds.api, Node: d.name, File: podsFile(c), Handle: attacher.HandlePods, Log: d.of("kubesync")}.Run)
		p.runs("Kubernetes", after(held, endless(func(ctx context.Context) {
			ds.store.Lead(ctx, syncLease, d.name, syncTTL, func(ctx context.Context) { kubesync.New(ds.api, ds.db, d.of("kubesync")).Run(ctx) })
		})))
	}
	p.runs("underlay", func(ctx context.Context) error {
		for u := range k.Underlay(ctx) {
			if others != nil {
				addresses.SetOccupied("the host", node.HostAddresses(u))
			}
			agent.HandleUnderlay(u)
			prober.HandleUnderlay(u)
			policy.HandleUnderlay(u)
			hostEndpoints.HandleUnderlay(u)
			if err := core.Underlay(ctx, u); err != nil {
				return err
			}
			op.HandleUnderlay(ctx, u)
			if speaker != nil {
				speaker.SetLinks(subnets(u))
				neighbours.HandleUnderlay(u)
			}
		}
		return nil
	})
	end := leaver{daemon: d, bgp: speaker, agent: agent, api: ds.api, delivered: op.Delivered, leaving: &ready.leaving}
	p.leave = func(ctx context.Context) {
		end.leave(ctx)
		attacher.Settle(ctx)
	}
	return services{
		daemon: d, op: op, bgp: speaker, reflectors: reflectors, ds: ds, attach: attacher, cluster: known, page: f.page,
		collectors: append(counted.collectors(), probe.NewCollector(prober), newWatches(ds.api)),
	}.open(p)
}

// startMark is the file that says that BGP was started since the host booted.
func startMark(runDir string) string { return filepath.Join(runDir, "bgp.started") }

// markBGP reports whether this is not the first start since the host booted, or Calico
// ran before it: only then do peers hold routes for us to confirm (RFC 4724, section 4.1).
func markBGP(d daemon) (restarting bool, err error) {
	f, err := os.OpenFile(startMark(d.RunDir), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
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
