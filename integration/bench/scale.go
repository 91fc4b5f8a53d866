package bench

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/integration/lab/ns"
	"github.com/routerd/routerd/store"
)

// Scale says how large the cluster of the series is.
type Scale struct {
	Nodes  int           // the others, each with one block
	Colds  int           // cold starts; the median counts
	Single int           // nodes that come one at a time afterwards
	Settle time.Duration // from the last route to what stays
	Idle   time.Duration // how long nothing happens
}

const (
	scaleWriters = 64 // how many keys are on their way to etcd at once
	scalePool    = "172.16.0.0/12"
	scaleBlock   = 26
)

// scaleRun is a cluster of which one node is real: an etcd of its own process,
// which outlives the namespaces in which daemons run.
type scaleRun struct {
	programs Programs
	size     Scale
	dir      string
	etcd     *exec.Cmd
	client   *clientv3.Client
}

// MeasureScale measures the daemon in a cluster of many nodes, as Calico writes
// them to an external etcd: with VXLAN, and without BGP. There is no reference:
// of what may be installed nothing reads Calico's etcd.
func MeasureScale(ctx context.Context, p Programs, size Scale, progress func(string)) (rows []Row, err error) {
	r := &scaleRun{programs: p, size: size}
	defer func() { err = errors.Join(err, r.close()) }()
	if err := r.startEtcd(ctx); err != nil {
		return nil, err
	}
	row := func(what string, unit Unit, v float64) {
		rows = append(rows, Row{What: fmt.Sprintf("%d nodes: %s", size.Nodes, what), Unit: unit, Ours: v})
	}
	progress(fmt.Sprintf("scale: %d nodes come while the daemon runs", size.Nodes))
	g, err := r.growth(ctx, "grown")
	if err != nil {
		return nil, err
	}
	var colds []coldStart
	for i := range size.Colds {
		progress(fmt.Sprintf("scale: cold start %d of %d", i+1, size.Colds))
		c, err := r.coldStart(ctx, fmt.Sprintf("cold%d", i))
		if err != nil {
			return nil, err
		}
		colds = append(colds, c)
	}
	progress("scale: at rest, alone")
	alone, err := restAlone(ctx, p, 3*size.Settle)
	if err != nil {
		return nil, err
	}
	binary, err := os.Stat(filepath.Join(p.Dir, "routerd"))
	if err != nil {
		return nil, err
	}

	row("cold start to all routes", Milliseconds, median(colds, func(c coldStart) float64 { return ms(c.took) }))
	row("cold start, CPU", Milliseconds, median(colds, func(c coldStart) float64 { return ms(c.cpu) }))
	row("cold start, resident afterwards", MiB, median(colds, func(c coldStart) float64 { return c.resident }))
	row("cold start, peak memory", MiB, median(colds, func(c coldStart) float64 { return c.peak }))
	row("all written", Milliseconds, ms(g.written))
	row("all written, CPU of the daemon", Milliseconds, ms(g.cpu))
	row("all written, last write to last route", Milliseconds, ms(g.behind))
	row("one more, write to route, p50", Milliseconds, ms(Percentile(g.single, 50)))
	row("one more, write to route, p99", Milliseconds, ms(Percentile(g.single, 99)))
	row("idle, of one CPU", Percent, g.idle)
	rows = append(rows, Row{What: "alone, with its own etcd: resident at rest", Unit: MiB, Ours: alone},
		Row{What: "routerd on disk", Unit: MiB, Ours: float64(binary.Size()) / (1 << 20)})
	return rows, nil
}

func median[T any](list []T, of func(T) float64) float64 {
	vs := make([]float64, len(list))
	for i, v := range list {
		vs[i] = of(v)
	}
	slices.Sort(vs)
	return vs[len(vs)/2]
}

func (r *scaleRun) endpoint() string { return "unix://" + filepath.Join(r.dir, "client:1") }

// startEtcd runs a server whose files are in memory: what a disk takes is not
// the daemon's.
func (r *scaleRun) startEtcd(ctx context.Context) (err error) {
	if r.dir, err = os.MkdirTemp("/dev/shm", "rdscale-"); err != nil {
		return err
	}
	out, err := os.Create(filepath.Join(r.dir, "etcd.log"))
	if err != nil {
		return err
	}
	defer out.Close()
	// Sockets in its directory: etcd 3.4 wants their names to look like a port.
	const clients, peers = "unix://client:1", "unix://peer:1"
	r.etcd = exec.Command("etcd", "--name", "scale", "--data-dir", "data", "--quota-backend-bytes", "2147483648",
		"--listen-client-urls", clients, "--advertise-client-urls", clients,
		"--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers, "--initial-cluster", "scale="+peers)
	r.etcd.Dir = r.dir
	r.etcd.Stdout, r.etcd.Stderr = out, out
	if err := r.etcd.Start(); err != nil {
		r.etcd = nil
		return fmt.Errorf("start etcd: %w", err)
	}
	if r.client, err = clientv3.New(clientv3.Config{Endpoints: []string{r.endpoint()}, DialTimeout: 5 * time.Second, Logger: zap.NewNop()}); err != nil {
		return err
	}
	err = untilWithin(ctx, 20*time.Second, "etcd answers", func() (bool, error) {
		attempt, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		_, err := r.client.Get(attempt, "none")
		return err == nil, ctx.Err()
	})
	if err != nil {
		said, _ := os.ReadFile(out.Name())
		return fmt.Errorf("%w: %s", err, said)
	}
	return r.put(ctx, store.ResourceKey(store.KindIPPool, "scale").Path(), fmt.Sprintf(`{"kind":"IPPool","apiVersion":"projectcalico.org/v3",`+
		`"metadata":{"name":"scale","uid":"0c7b0d33-6d2e-4a3b-9d1f-000000000000","creationTimestamp":"2026-11-21T17:20:26Z"},`+
		`"spec":{"cidr":%q,"vxlanMode":"Always","ipipMode":"Never","natOutgoing":true,"blockSize":%d,"nodeSelector":"all()",`+
		`"allowedUses":["Workload","Tunnel"],"assignmentMode":"Automatic"}}`, scalePool, scaleBlock))
}

func (r *scaleRun) close() error {
	var errs []error
	if r.client != nil {
		errs = append(errs, r.client.Close())
	}
	if r.etcd != nil {
		errs = append(errs, r.etcd.Process.Kill())
		_ = r.etcd.Wait() // it was killed
	}
	if r.dir != "" {
		errs = append(errs, os.RemoveAll(r.dir))
	}
	return errors.Join(errs...)
}

func (r *scaleRun) put(ctx context.Context, path, value string) error {
	if _, err := r.client.Put(ctx, path, value); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}

// scaleNode is one of the others, with what Calico 3.34 stores of it in etcd.
type scaleNode struct {
	i     int
	name  string
	block netip.Prefix
}

func newScaleNode(i int) scaleNode {
	first := netip.MustParsePrefix(scalePool).Addr().As4()
	var b [4]byte
	binary.BigEndian.PutUint32(b[:], binary.BigEndian.Uint32(first[:])+uint32(i)<<(32-scaleBlock))
	return scaleNode{i: i, name: fmt.Sprintf("ip-10-100-%d-%d.compute.internal", i/250, 1+i%250), block: netip.PrefixFrom(netip.AddrFrom4(b), scaleBlock)}
}

// address is where the node is on the underlay.
func (n scaleNode) address() netip.Addr {
	return netip.AddrFrom4([4]byte{10, 100, byte(n.i / 250), byte(1 + n.i%250)})
}

// keys are the Node, and the block of which it has the first address for its
// tunnel: paths and values in turn, in the order in which Calico writes them.
func (n scaleNode) keys() [][2]string {
	tunnel := n.block.Addr()
	mac := fmt.Sprintf("66:%02x:%02x:a7:3c:1d", n.i>>8, n.i&0xff)
	labels := fmt.Sprintf(`"beta.kubernetes.io/arch":"amd64","beta.kubernetes.io/os":"linux","kubernetes.io/arch":"amd64","kubernetes.io/hostname":%q,`+
		`"kubernetes.io/os":"linux","node.kubernetes.io/instance-type":"m5.xlarge","topology.kubernetes.io/region":"eu-central-1","topology.kubernetes.io/zone":"eu-central-1%c"`,
		n.name, 'a'+rune(n.i%3))
	node := fmt.Sprintf(`{"kind":"Node","apiVersion":"projectcalico.org/v3","metadata":{"name":%[1]q,"uid":"ba499037-3f06-45d3-aa1b-%012[2]x","creationTimestamp":"2026-11-21T17:20:26Z",`+
		`"labels":{%[3]s},"annotations":{"projectcalico.org/kube-labels":%[4]q}},`+
		`"spec":{"bgp":{"ipv4Address":"%[5]s/16"},"ipv4VXLANTunnelAddr":%[6]q,"vxlanTunnelMACAddr":%[7]q,"orchRefs":[{"nodeName":%[1]q,"orchestrator":"k8s"}],`+
		`"addresses":[{"address":"%[5]s/16","type":"CalicoNodeIP"},{"address":"%[5]s","type":"InternalIP"}]},"status":{}}`,
		n.name, n.i, labels, "{"+labels+"}", n.address(), tunnel, mac)
	size := 1 << (32 - scaleBlock)
	free := make([]string, 0, size-1)
	for o := 1; o < size; o++ {
		free = append(free, fmt.Sprint(o))
	}
	const sequence = 1795282296903635738
	block := fmt.Sprintf(`{"cidr":%[1]q,"affinity":"host:%[2]s","affinity_claim_time":"2026-11-21T17:31:37Z","allocations":[0%[3]s],"unallocated":[%[4]s],`+
		`"attributes":[{"handle_id":"vxlan-tunnel-addr-%[2]s","secondary":{"node":%[2]q,"type":"vxlanTunnelAddress"}}],`+
		`"sequenceNumber":%[5]d,"sequenceNumberForAllocation":{"0":%[6]d},"deleted":false}`,
		n.block, n.name, strings.Repeat(",null", size-1), strings.Join(free, ","), sequence+1, sequence)
	return [][2]string{
		{store.ResourceKey(store.KindNode, n.name).Path(), node},
		{store.AffinityKey(n.name, n.block).Path(), `{"state":"confirmed","deleted":false}`},
		{store.BlockKey(n.block).Path(), block},
	}
}

// daemon runs routerd in a fresh namespace, as a node of the cluster, and says
// when it began.
func (r *scaleRun) daemon(ctx context.Context, name string) (s *convergenceSpace, p *os.Process, began time.Time, err error) {
	if s, err = newConvergenceSpace(ctx, "rdscale"); err != nil {
		return nil, nil, began, err
	}
	defer func() {
		if err != nil {
			err = s.end(ctx, err)
		}
	}()
	// The others are behind a router.
	if err := ns.Do(s.rx, func() error { return ip(ctx, "route", "add", "default", "via", torAddr(0).String()) }); err != nil {
		return s, nil, began, err
	}
	began = time.Now()
	p, err = s.startDaemon(r.programs, fmt.Sprintf("nodeName: %s\ndatastore: {endpoints: [%q]}\nbgp: {enabled: false}\n", name, r.endpoint()))
	return s, p, began, err
}

// growth is what the daemon takes while the cluster grows.
type growth struct {
	written time.Duration // from the first write to the last
	behind  time.Duration // from the last write to the last route
	cpu     time.Duration // of the daemon, for all of it
	single  []time.Duration
	idle    float64 // percent of one CPU
}

// growth writes all nodes while a daemon runs, then some one by one.
func (r *scaleRun) growth(ctx context.Context, name string) (g growth, err error) {
	s, p, _, err := r.daemon(ctx, name)
	if err != nil {
		return g, err
	}
	defer func() { err = r.end(ctx, s, name, err) }()
	err = until(ctx, "the host is registered", func() (bool, error) {
		got, err := r.client.Get(ctx, store.ResourceKey(store.KindNode, name).Path())
		return err == nil && len(got.Kvs) > 0 && strings.Contains(string(got.Kvs[0].Value), "ipv4VXLANTunnelAddr"), err
	})
	if err != nil {
		return g, err
	}
	pause(ctx, time.Second) // what a start takes is measured by itself
	base, err := s.routesInKernel()
	if err != nil {
		return g, err
	}
	profiled, before, start := s.profile(ctx, "nodes come"), cpuTime([]*os.Process{p}), time.Now()
	_, err = Each(ctx, r.size.Nodes, scaleWriters, func(ctx context.Context, i int) error {
		for _, kv := range newScaleNode(i).keys() {
			if err := r.put(ctx, kv[0], kv[1]); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return g, err
	}
	g.written = time.Since(start)
	if err := s.untilRoutes(ctx, base+r.size.Nodes); err != nil {
		return g, err
	}
	g.behind = time.Since(start) - g.written
	pause(ctx, r.size.Settle) // what is left for afterwards is for them too
	g.cpu = cpuTime([]*os.Process{p}) - before
	if err := profiled(); err != nil {
		return g, err
	}
	profiled = s.profile(ctx, "one more")
	if g.single, err = r.oneByOne(ctx, s); err != nil {
		return g, err
	}
	if err := profiled(); err != nil {
		return g, err
	}
	pause(ctx, r.size.Settle)
	profiled = s.profile(ctx, "idle")
	before, start = cpuTime([]*os.Process{p}), time.Now()
	pause(ctx, r.size.Idle)
	g.idle = 100 * float64(cpuTime([]*os.Process{p})-before) / float64(time.Since(start))
	return g, profiled()
}

// oneByOne adds nodes at a pace at which none disturbs the next, and returns how
// long each took from before its writes to the kernel's notice of its route.
func (r *scaleRun) oneByOne(ctx context.Context, s *convergenceSpace) ([]time.Duration, error) {
	done := make(chan struct{})
	defer close(done)
	space, err := netns.GetFromPath(ns.Path(s.rx))
	if err != nil {
		return nil, err
	}
	defer space.Close()
	routes := make(chan netlink.RouteUpdate, 1024)
	if err := netlink.RouteSubscribeWithOptions(routes, done, netlink.RouteSubscribeOptions{Namespace: &space}); err != nil {
		return nil, fmt.Errorf("follow the kernel's routes: %w", err)
	}
	took := make([]time.Duration, 0, r.size.Single)
	for i := range r.size.Single {
		n := newScaleNode(r.size.Nodes + i)
		var ops []clientv3.Op
		for _, kv := range n.keys() {
			ops = append(ops, clientv3.OpPut(kv[0], kv[1]))
		}
		start := time.Now()
		if _, err := r.client.Txn(ctx).Then(ops...).Commit(); err != nil {
			return nil, fmt.Errorf("write %s: %w", n.name, err)
		}
		d, err := awaitRoute(ctx, routes, n.block, start)
		if err != nil {
			return nil, err
		}
		took = append(took, d)
		pause(ctx, 40*time.Millisecond+time.Duration(i%17)*time.Millisecond)
	}
	return took, nil
}

func awaitRoute(ctx context.Context, routes <-chan netlink.RouteUpdate, want netip.Prefix, start time.Time) (time.Duration, error) {
	late := time.NewTimer(10 * time.Second)
	defer late.Stop()
	for {
		select {
		case u, ok := <-routes:
			if !ok {
				return 0, errors.New("the kernel's notices of routes ended")
			}
			if u.Type == unix.RTM_NEWROUTE && u.Dst != nil && u.Dst.String() == want.String() {
				return time.Since(start), nil
			}
		case <-late.C:
			return 0, fmt.Errorf("no route to %s within 10s", want)
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
}

// coldStart is what a daemon takes that finds the cluster as it is.
type coldStart struct {
	took           time.Duration // from its start to all routes, neighbours and forwarding entries
	cpu            time.Duration // up to then
	resident, peak float64       // MiB
}

// coldStart lets a new host join.
func (r *scaleRun) coldStart(ctx context.Context, name string) (c coldStart, err error) {
	s, p, start, err := r.daemon(ctx, name)
	if err != nil {
		return c, err
	}
	defer func() { err = r.end(ctx, s, name, err) }()
	profiled := s.profile(ctx, name)
	others := r.size.Nodes + r.size.Single
	if err := s.untilRoutes(ctx, others); err != nil {
		return c, err
	}
	if err := s.untilNeighbours(ctx, others); err != nil {
		return c, err
	}
	c.took, c.cpu = time.Since(start), cpuTime([]*os.Process{p})
	if err := profiled(); err != nil {
		return c, err
	}
	pause(ctx, r.size.Settle)
	c.resident, c.peak = memoryOf(p.Pid, "VmRSS:"), peakMemory(p)
	return c, nil
}

// end ends a host of this name and has the cluster forget it: the next one has
// its address.
func (r *scaleRun) end(ctx context.Context, s *convergenceSpace, name string, err error) error {
	err = s.end(ctx, err)
	_, gone := r.client.Delete(context.WithoutCancel(ctx), store.ResourceKey(store.KindNode, name).Path())
	return errors.Join(err, gone)
}

// end closes the space, and adds what its programs said to an error.
func (s *convergenceSpace) end(ctx context.Context, err error) error {
	if err != nil {
		err = fmt.Errorf("%w\n%s", err, s.logs())
	}
	return errors.Join(err, s.close(ctx))
}

// untilRoutes waits until the kernel has that many routes.
func (s *convergenceSpace) untilRoutes(ctx context.Context, want int) error {
	n := 0
	err := until(ctx, "all routes", func() (_ bool, err error) {
		n, err = s.routesInKernel()
		return n >= want, err
	})
	if err != nil {
		return fmt.Errorf("%w: the kernel has %d routes, and %d are awaited", err, n, want)
	}
	return nil
}

// untilNeighbours waits until the kernel knows that many tunnel ends: their
// addresses on the link and where on the underlay these are.
func (s *convergenceSpace) untilNeighbours(ctx context.Context, want int) error {
	for _, family := range []int{unix.AF_INET, unix.AF_BRIDGE} {
		n := 0
		err := until(ctx, "all neighbours", func() (bool, error) {
			err := ns.Do(s.rx, func() error {
				list, err := netlink.NeighList(0, family)
				n = len(list)
				return err
			})
			return n >= want, err
		})
		if err != nil {
			return fmt.Errorf("%w: the kernel has %d of family %d, and %d are awaited", err, n, family, want)
		}
	}
	return nil
}

// restAlone returns what is resident of a daemon with its own etcd and nothing
// to do.
func restAlone(ctx context.Context, programs Programs, settle time.Duration) (mib float64, err error) {
	s, err := newConvergenceSpace(ctx, "rdscale")
	if err != nil {
		return 0, err
	}
	defer func() { err = s.end(ctx, err) }()
	p, err := s.startDaemon(programs, "nodeName: alone\n")
	if err != nil {
		return 0, err
	}
	if err := s.applyUntilTaken(ctx, programs.Dir, "apiVersion: projectcalico.org/v3\nkind: BGPConfiguration\nmetadata: {name: default}\nspec: {}\n"); err != nil {
		return 0, err
	}
	profiled := s.profile(ctx, "alone")
	pause(ctx, settle)
	if err := profiled(); err != nil {
		return 0, err
	}
	return memoryOf(p.Pid, "VmRSS:"), nil
}
