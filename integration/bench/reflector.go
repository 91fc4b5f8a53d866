package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/routerd/routerd/integration/lab/ns"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/etcd"
)

// Reflection is how many clients a route reflector serves, and how many
// prefixes each of them announces.
type Reflection struct {
	Clients, Prefixes int
}

// reflectWithin is how long one series may take.
const reflectWithin = 10 * time.Minute

// reflection is what a reflector took.
type reflection struct {
	took time.Duration // from the first announcement to the last client's last prefix
	cpu  time.Duration
	peak float64 // of its resident memory, MiB
	came int     // prefixes to all clients in time
	all  int     // that are to come
}

const (
	reflectorCluster = "244.0.0.1"
	clientsMAC       = "02:00:00:00:98:01"
)

func reflectorAddr() netip.Addr { return netip.AddrFrom4([4]byte{10, 98, 0, 1}) }

func clientAddr(i int) netip.Addr {
	return netip.AddrFrom4([4]byte{10, 98, byte(1 + i/200), byte(1 + i%200)})
}

// MeasureReflector lets clients of one reflector tell each other of their
// prefixes, through routerd, which puts the routes into its kernel too, and through BIRD.
func MeasureReflector(ctx context.Context, p Programs, series []Reflection, progress func(string)) ([]Row, error) {
	return measureReflector(ctx, "BGP reflector", "routerd", startRouterdReflector, p, series, progress)
}

// MeasureReflectorAlone is MeasureReflector for routerd's engine alone, without a kernel.
func MeasureReflectorAlone(ctx context.Context, p Programs, series []Reflection, progress func(string)) ([]Row, error) {
	return measureReflector(ctx, "BGP reflector alone", "the engine", startSpeaker, p, series, progress)
}

func measureReflector(ctx context.Context, title, name string, start func(context.Context, *convergenceSpace, Programs, int) ([]*os.Process, error), p Programs, series []Reflection, progress func(string)) ([]Row, error) {
	var rows []Row
	for _, size := range series {
		list := []receiver{
			{name, func(ctx context.Context, s *convergenceSpace) ([]*os.Process, error) {
				return start(ctx, s, p, size.Clients)
			}},
			{"BIRD", func(ctx context.Context, s *convergenceSpace) ([]*os.Process, error) {
				return startBIRDReflector(ctx, s, size.Clients)
			}},
		}
		var got [2]reflection
		for i, r := range list {
			progress(fmt.Sprintf("BGP: %s reflects %d × %d prefixes", r.name, size.Clients, size.Prefixes))
			var err error
			if got[i], err = reflect(ctx, r, size); err != nil {
				return nil, fmt.Errorf("%s reflects %d × %d prefixes: %w", r.name, size.Clients, size.Prefixes, err)
			}
			if got[i].came < got[i].all {
				progress(fmt.Sprintf("%s was not done after %v: %d of %d prefixes came", r.name, reflectWithin, got[i].came, got[i].all))
			}
		}
		row := func(what string, unit Unit, a, b float64) {
			rows = append(rows, Row{
				What: fmt.Sprintf("%s, %d × %d: %s", title, size.Clients, size.Prefixes, what), Against: list[1].name, Unit: unit, Ours: a, Reference: b,
			})
		}
		row("to the last client", Milliseconds, ms(got[0].took), ms(got[1].took))
		row("CPU", Milliseconds, ms(got[0].cpu), ms(got[1].cpu))
		row("peak memory", MiB, got[0].peak, got[1].peak)
	}
	return rows, nil
}

// newReflectorSpace are the reflector's namespace and that of all clients, at
// the ends of one wire.
func newReflectorSpace(ctx context.Context, clients int) (s *convergenceSpace, err error) {
	dir, err := os.MkdirTemp("", "routerd-bench-")
	if err != nil {
		return nil, err
	}
	prefix := fmt.Sprintf("rdrefl%d-%s-", os.Getpid(), strings.TrimPrefix(filepath.Base(dir), "routerd-bench-"))
	s = &convergenceSpace{dir: dir, rx: prefix + "rr", tors: [2]string{prefix + "clients", ""}}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.close(ctx))
		}
	}()
	for _, name := range s.spaces() {
		if err := ns.Create(name); err != nil {
			return s, err
		}
	}
	err = ns.Do(s.rx, func() error {
		return errors.Join(ip(ctx, "link", "set", "lo", "up"),
			ip(ctx, "link", "add", "tor1", "type", "veth", "peer", "name", "rx0", "netns", ns.Path(s.tors[0])),
			ip(ctx, "addr", "add", netip.PrefixFrom(reflectorAddr(), 16).String(), "dev", "tor1"), ip(ctx, "link", "set", "tor1", "up"))
	})
	if err == nil {
		err = s.knowNeighbours(ctx, clients)
	}
	if err != nil {
		return s, err
	}
	return s, ns.Do(s.tors[0], func() error {
		errs := []error{ip(ctx, "link", "set", "lo", "up"), ip(ctx, "link", "set", "rx0", "address", clientsMAC, "up")}
		for i := range clients {
			errs = append(errs, ip(ctx, "addr", "add", netip.PrefixFrom(clientAddr(i), 16).String(), "dev", "rx0"))
		}
		return errors.Join(errs...)
	})
}

// knowNeighbours has the reflector know each client's MAC address for good: what ARP finds counts in one
// table of the machine, whose 1,024 entries (gc_thresh3) are for everybody on it.
func (s *convergenceSpace) knowNeighbours(ctx context.Context, clients int) error {
	var b strings.Builder
	for i := range clients {
		fmt.Fprintf(&b, "neigh replace %s lladdr %s nud permanent dev tor1\n", clientAddr(i), clientsMAC)
	}
	return ipBatch(ctx, s.rx, b.String())
}

// reflect measures one reflector.
func reflect(ctx context.Context, r receiver, size Reflection) (out reflection, err error) {
	s, err := newReflectorSpace(ctx, size.Clients)
	if err != nil {
		return out, err
	}
	defer func() { err = s.end(ctx, err) }()
	procs, err := r.start(ctx, s)
	if err != nil {
		return out, err
	}
	clients, err := s.connect(ctx, size)
	defer func() { err = errors.Join(err, closeAll(clients)) }()
	if err != nil {
		return out, err
	}
	before, start := cpuTime(procs), time.Now()
	all := routePrefixes(size.Clients * size.Prefixes)
	want := (size.Clients - 1) * size.Prefixes
	var g errgroup.Group
	for i, c := range clients {
		if err := c.conn.SetReadDeadline(start.Add(reflectWithin)); err != nil {
			return out, err
		}
		g.Go(func() error { return c.announce(all[i*size.Prefixes : (i+1)*size.Prefixes]) })
		g.Go(func() error { return c.count(want) })
	}
	profiled := s.profile(ctx, fmt.Sprintf("%d clients with %d prefixes", size.Clients, size.Prefixes))
	err = g.Wait()
	if errors.Is(err, os.ErrDeadlineExceeded) {
		err = nil // it shows in the share
	}
	out.took, out.cpu = time.Since(start), cpuTime(procs)-before
	out.peak = peakMemory(procs...)
	err = errors.Join(err, profiled())
	for _, c := range clients {
		out.came, out.all = out.came+c.n, out.all+want
	}
	return out, err
}

// connect brings all sessions up.
func (s *convergenceSpace) connect(ctx context.Context, size Reflection) ([]*bgpClient, error) {
	clients := make([]*bgpClient, size.Clients)
	var g errgroup.Group
	for i := range clients {
		g.Go(func() error {
			var last error
			err := until(ctx, "the session of "+clientAddr(i).String(), func() (bool, error) {
				clients[i], last = dialBGP(ctx, s.tors[0], clientAddr(i), reflectorAddr(), rxASN, size.Clients*size.Prefixes)
				return last == nil, ctx.Err()
			})
			if err != nil {
				return fmt.Errorf("%w: %w", err, last)
			}
			return nil
		})
	}
	return clients, g.Wait()
}

// closeAll closes the clients that were connected.
func closeAll(clients []*bgpClient) error {
	var errs []error
	for _, c := range clients {
		if c != nil {
			errs = append(errs, c.close())
		}
	}
	return errors.Join(errs...)
}

// startRouterdReflector runs the daemon as a reflector of these clients, for
// prefixes that are all inside a pool.
func startRouterdReflector(ctx context.Context, s *convergenceSpace, programs Programs, clients int) ([]*os.Process, error) {
	p, err := s.startDaemon(programs, "nodeName: bench\n")
	if err != nil {
		return nil, err
	}
	// A node that becomes a reflector ends its sessions, so there are none yet.
	pool := "apiVersion: projectcalico.org/v3\nkind: IPPool\nmetadata: {name: reflected}\nspec: {cidr: 20.0.0.0/8, disabled: true}\n"
	if err := s.applyUntilTaken(ctx, programs.Dir, pool); err != nil {
		return nil, err
	}
	st, err := etcd.Open(ctx, etcd.Config{Endpoints: []string{"unix://" + s.socket()}})
	if err != nil {
		return nil, err
	}
	defer st.Close()
	var last error
	err = until(ctx, "the node is a reflector", func() (bool, error) {
		_, last = store.Modify(ctx, st, store.ResourceKey(store.KindNode, "bench"), func(cur store.Object) (any, error) {
			n, ok := store.Clone(cur.Value).(*store.Node)
			if !ok || n.Spec.BGP == nil {
				return nil, errors.New("the node is not registered yet")
			}
			n.Spec.BGP.RouteReflectorClusterID = reflectorCluster
			return n, nil
		})
		return last == nil, ctx.Err()
	})
	if err != nil {
		return nil, fmt.Errorf("%w: %w", err, last)
	}
	var m bytes.Buffer
	for i := range clients {
		fmt.Fprintf(&m, "apiVersion: projectcalico.org/v3\nkind: BGPPeer\nmetadata: {name: client%d}\nspec: {peerIP: %s, asNumber: %d}\n---\n", i, clientAddr(i), rxASN)
	}
	return []*os.Process{p}, s.applyUntilTaken(ctx, programs.Dir, m.String())
}

// startBIRDReflector runs BIRD as a reflector of these clients.
func startBIRDReflector(ctx context.Context, s *convergenceSpace, clients int) ([]*os.Process, error) {
	var b bytes.Buffer
	for i := range clients {
		fmt.Fprintf(&b, "protocol bgp client%d { local %s as %d; neighbor %s as %d; rr client; rr cluster id %s; passive; ipv4 { import all; export all; }; }\n",
			i, reflectorAddr(), rxASN, clientAddr(i), rxASN, reflectorCluster)
	}
	return startBIRDWithoutKernel(ctx, s, b.String())
}

// startBIRDWithoutKernel runs BIRD with some protocols.
func startBIRDWithoutKernel(ctx context.Context, s *convergenceSpace, protocols string) ([]*os.Process, error) {
	conf, err := s.file("rr.conf", fmt.Sprintf("router id %s;\nprotocol device {}\n%s", reflectorAddr(), protocols))
	if err != nil {
		return nil, err
	}
	control := filepath.Join(s.dir, "rr.ctl")
	p, err := s.run(s.rx, "bird", "-f", "-c", conf, "-s", control, "-P", filepath.Join(s.dir, "rr.pid"))
	if err != nil {
		return nil, err
	}
	return []*os.Process{p}, until(ctx, "BIRD answers", func() (bool, error) {
		return exec.CommandContext(ctx, "birdc", "-s", control, "show", "status").Run() == nil, ctx.Err()
	})
}
