package lab

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc/backoff"

	"github.com/routerd/routerd/integration/lab/ns"
)

// Options says how to bring a lab up.
type Options struct {
	Name     string   // required
	Topology Topology // completed by Up
	BinDir   string   // where routerd and routerd-cni are; required

	// Replace takes down a lab of the same name first, even if it runs.
	Replace bool
	// NoPods leaves the pods of the topology out.
	NoPods bool
	// NoDaemons starts no daemon, and so leaves the pods out too: something else runs on
	// the hosts at first. [Lab.Start] starts one.
	NoDaemons bool
	// Later are hosts that have no daemon, and so no pods, until [Lab.Join] has them join
	// the first one.
	Later []string
	// Underlay is called when the hosts' namespaces are there and nothing runs in them
	// yet; optional.
	Underlay func(*Lab) error
	// Progress is told what happens next, one line each; optional. It is called
	// from one goroutine at a time.
	Progress func(string)
}

func (o Options) isLater(n Node) bool { return slices.Contains(o.Later, n.Name) }

// Lab is a lab that is up. Its methods are safe for concurrent use, also by
// several processes.
type Lab struct {
	name     string
	topology Topology
	binDir   string
}

// undoWithin is how long the removal of a lab may take once its caller has
// given up.
const undoWithin = 30 * time.Second

// Up makes a lab and returns when every host is ready and, unless NoPods or NoDaemons is
// set, every pod is attached. On an error, also when ctx ends, nothing is left
// of it.
func Up(ctx context.Context, o Options) (*Lab, error) {
	t, err := o.Topology.Complete()
	if err == nil {
		err = CheckLabName(o.Name)
	}
	if err != nil {
		return nil, fmt.Errorf("lab %s: %w", o.Name, err)
	}
	if os.Geteuid() != 0 {
		return nil, fmt.Errorf("lab %s: network namespaces need root: run it with sudo", o.Name)
	}
	if o.BinDir, err = filepath.Abs(o.BinDir); err != nil {
		return nil, fmt.Errorf("lab %s: %w", o.Name, err)
	}
	if err := checkBinaries(o.BinDir, t); err != nil {
		return nil, fmt.Errorf("lab %s: %w", o.Name, err)
	}
	if o.Progress == nil {
		o.Progress = func(string) {}
	}
	release, err := lockLab(ctx, o.Name, true, true)
	if err != nil {
		return nil, err
	}
	defer release()
	if err := clear(ctx, o); err != nil {
		return nil, err
	}
	l := &Lab{name: o.Name, topology: t, binDir: o.BinDir}
	if err := l.build(ctx, o); err != nil {
		undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoWithin)
		defer cancel()
		return nil, fmt.Errorf("lab %s: %w", o.Name, errors.Join(err, remove(undo, o.Name)))
	}
	return l, nil
}

// clear removes what is left of a lab of this name. One that runs is an error
// unless it is to be replaced.
func clear(ctx context.Context, o Options) error {
	s, err := readState(o.Name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil && s.Complete && !o.Replace {
		for _, p := range s.Daemons {
			if p.Alive() {
				return fmt.Errorf("lab %s is up: take it down first, or choose another name", o.Name)
			}
		}
	}
	// Half made, all dead, or not even readable.
	o.Progress("removing what was left of lab " + o.Name)
	if err := removeContents(ctx, o.Name); err != nil {
		return fmt.Errorf("lab %s: remove what was left of it: %w", o.Name, err)
	}
	return nil
}

func (l *Lab) build(ctx context.Context, o Options) error {
	s := &state{Name: l.name, Topology: l.topology, BinDir: l.binDir, Created: time.Now(), Daemons: map[string]ns.Process{}}
	// Before the state names them as ours: what it names, a removal removes.
	for _, sp := range s.namespaces() {
		if ns.Exists(sp) {
			return errTaken(sp)
		}
	}
	if err := writeState(s); err != nil {
		return err
	}
	o.Progress(fmt.Sprintf("building the underlay: %d racks, %d hosts", len(l.topology.Racks), len(l.topology.Nodes)))
	if err := buildUnderlay(ctx, l.name, l.topology); err != nil {
		return err
	}
	if err := l.nameProtocols(); err != nil {
		return err
	}
	if o.Underlay != nil {
		if err := o.Underlay(l); err != nil {
			return err
		}
	}
	if *l.topology.Spine.BGP {
		o.Progress("starting the spine's BGP speaker")
		if err := l.startBird(); err != nil {
			return err
		}
	}
	if o.NoDaemons {
		_, err := updateState(l.name, func(s *state) error { s.Complete = true; return nil })
		return err
	}
	if err := l.startHosts(ctx, o); err != nil {
		return err
	}
	if l.topology.Kubeconfig == "" {
		if err := l.openNetwork(ctx); err != nil {
			return err
		}
	}
	if *l.topology.Spine.BGP {
		o.Progress("adding the spine as a BGP peer of every host")
		if err := l.addSpinePeers(ctx); err != nil {
			return err
		}
	}
	if !o.NoPods {
		if err := l.attachAll(ctx, o); err != nil {
			return err
		}
	}
	_, err := updateState(l.name, func(s *state) error { s.Complete = true; return nil })
	return err
}

// errTaken says that a namespace is foreign.
func errTaken(space string) error {
	return fmt.Errorf("network namespace %s exists and is not this lab's: remove it with \"ip netns delete %s\" or choose another name", space, space)
}

// startHosts starts the first host, which runs the store, then the others at
// once.
func (l *Lab) startHosts(ctx context.Context, o Options) error {
	first, others := l.topology.Nodes[0], slices.DeleteFunc(slices.Clone(l.topology.Nodes[1:]), o.isLater)
	o.Progress("starting routerd on " + first.Name)
	if err := l.startDaemon(first); err != nil {
		return err
	}
	if err := l.WaitReady(ctx, first.Name); err != nil {
		return err
	}
	if len(others) == 0 {
		return nil
	}
	o.Progress(fmt.Sprintf("starting routerd on %d more hosts", len(others)))
	errs := make([]error, len(others))
	g, all := errgroup.WithContext(ctx)
	for i, n := range others {
		g.Go(func() error {
			if l.topology.Join {
				errs[i] = l.join(all, n)
			}
			if errs[i] == nil {
				errs[i] = l.startDaemon(n)
			}
			if errs[i] == nil {
				errs[i] = l.WaitReady(all, n.Name)
			}
			return errs[i]
		})
	}
	err := g.Wait()
	if ctx.Err() != nil {
		// The caller's time ran out: each host says what it waited for.
		return errors.Join(errs...)
	}
	return err
}

func (l *Lab) attachAll(ctx context.Context, o Options) error {
	var pods []string
	for _, n := range slices.DeleteFunc(slices.Clone(l.topology.Nodes), o.isLater) {
		for i := range *n.Pods {
			pods = append(pods, n.Name+"/"+podName(i))
		}
	}
	if len(pods) == 0 {
		return nil
	}
	o.Progress(fmt.Sprintf("attaching %d pods", len(pods)))
	_, err := l.attachPods(ctx, l.attachPatiently, pods...)
	return err
}

// attachPatiently attaches a pod as runtimes do: a daemon that has no time, or
// no answer of its datastore yet, says so, and they come again.
func (l *Lab) attachPatiently(ctx context.Context, where string) (Pod, error) {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		p, err := l.attach(ctx, where)
		var refused *types.Error
		if !errors.As(err, &refused) || refused.Code != types.ErrTryAgainLater {
			return p, err
		}
		select {
		case <-ctx.Done():
			return Pod{}, err
		case <-tick.C:
		}
	}
}

// Open returns a lab that is up. It matches [fs.ErrNotExist] when there is
// none of this name.
func Open(name string) (*Lab, error) {
	if err := CheckLabName(name); err != nil {
		return nil, err
	}
	s, err := readState(name)
	if errors.Is(err, fs.ErrNotExist) {
		labs, _ := List()
		return nil, fmt.Errorf("lab %s: %w; labs of this machine: %v", name, fs.ErrNotExist, labs)
	}
	if err != nil {
		return nil, err
	}
	return &Lab{name: name, topology: s.Topology, binDir: s.BinDir}, nil
}

// Down removes the lab: every process, namespace and file of it.
func (l *Lab) Down(ctx context.Context) error { return Down(ctx, l.name) }

// Down removes the lab of this name, or what was left of it by a process that
// was killed. A lab that does not exist is not an error.
func Down(ctx context.Context, name string) error {
	if err := CheckLabName(name); err != nil {
		return err
	}
	if _, err := os.Stat(dir(name)); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	release, err := lockLab(ctx, name, true, true)
	if err != nil {
		return err
	}
	defer release()
	if err := remove(ctx, name); err != nil {
		return fmt.Errorf("lab %s: %w", name, err)
	}
	return nil
}

// remove removes a lab; the caller has the exclusive lock.
func remove(ctx context.Context, name string) error {
	if err := removeContents(ctx, name); err != nil {
		return err
	}
	if err := os.RemoveAll(dir(name)); err != nil {
		return fmt.Errorf("remove files: %w", err)
	}
	// The last lab takes the root with it.
	_ = os.Remove(Root)
	return nil
}

// removeContents removes everything but the directory itself and so keeps the
// lock. The state goes last: until then a second attempt finds everything.
func removeContents(ctx context.Context, name string) error {
	s, err := readState(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // nothing was made yet
	}
	if err != nil {
		return err
	}
	spaces := s.namespaces()
	if err := ns.KillAll(ctx, spaces...); err != nil {
		return err
	}
	g, _ := errgroup.WithContext(ctx)
	for _, sp := range spaces {
		g.Go(func() error { return ns.Delete(sp) })
	}
	if err := g.Wait(); err != nil {
		return err
	}
	for _, sp := range spaces {
		if err := removeEtc(name, sp); err != nil {
			return err
		}
	}
	entries, err := os.ReadDir(dir(name))
	if err != nil {
		return fmt.Errorf("remove files: %w", err)
	}
	for _, e := range entries {
		if e.Name() == stateFile {
			continue
		}
		if err := os.RemoveAll(filepath.Join(dir(name), e.Name())); err != nil {
			return fmt.Errorf("remove files: %w", err)
		}
	}
	if err := os.Remove(filepath.Join(dir(name), stateFile)); err != nil {
		return fmt.Errorf("remove files: %w", err)
	}
	return nil
}

// Name returns the lab's name.
func (l *Lab) Name() string { return l.name }

// Topology returns what the lab consists of, complete.
func (l *Lab) Topology() Topology { return l.topology }

// Hosts returns the hosts' names in the topology's order.
func (l *Lab) Hosts() []string {
	var names []string
	for _, n := range l.topology.Nodes {
		names = append(names, n.Name)
	}
	return names
}

// Space returns the namespace of HOST, HOST/POD or "spine".
func (l *Lab) Space(where string) string {
	host, pod := splitPod(where)
	if pod == "" {
		return l.name + "-" + host
	}
	return l.name + "-" + host + "-" + pod
}

// Addr returns the address of HOST or HOST/POD: the IPv4 one, if it has both.
func (l *Lab) Addr(where string) (netip.Addr, error) {
	addrs, err := l.Addrs(where)
	if err != nil {
		return netip.Addr{}, err
	}
	return addrs[0], nil
}

// HostStatus is what can be said of a host from outside and by its daemon.
type HostStatus struct {
	Name   string       `json:"name"`
	Rack   string       `json:"rack"`
	Addrs  []netip.Addr `json:"addrs"`
	PID    int          `json:"pid"` // of the daemon; 0: it does not run
	Ready  bool         `json:"ready"`
	Reason string       `json:"reason,omitempty"` // why not ready
	Pods   []Pod        `json:"pods"`
}

// Status returns the lab's hosts, in the topology's order.
func (l *Lab) Status(ctx context.Context) ([]HostStatus, error) {
	s, err := readState(l.name)
	if err != nil {
		return nil, err
	}
	pods, err := l.Pods()
	if err != nil {
		return nil, err
	}
	out := make([]HostStatus, len(l.topology.Nodes))
	g, ctx := errgroup.WithContext(ctx)
	for i, n := range l.topology.Nodes {
		h := &out[i]
		*h = HostStatus{Name: n.Name, Rack: n.Rack, Addrs: n.Addrs(), Reason: "routerd does not run"}
		for _, p := range pods {
			if p.Host == n.Name {
				h.Pods = append(h.Pods, p)
			}
		}
		p := s.Daemons[n.Name]
		if !p.Alive() {
			continue
		}
		h.PID = p.PID
		g.Go(func() error {
			r, err := l.Node(ctx, n.Name)
			if err != nil {
				h.Reason = err.Error()
				return nil
			}
			h.Ready, h.Reason = r.GetHealth().GetReady().GetOk(), r.GetHealth().GetReady().GetReason()
			return nil
		})
	}
	return out, g.Wait()
}

func fastBackoff() backoff.Config {
	return backoff.Config{BaseDelay: 20 * time.Millisecond, Multiplier: 1.5, Jitter: 0.2, MaxDelay: 500 * time.Millisecond}
}
