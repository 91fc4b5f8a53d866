package lab

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/version"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/atomicfile"
	"github.com/routerd/routerd/integration/lab/ns"
)

// podInterface is the name of a pod's device.
const podInterface = "eth0"

// attachAtOnce is how many pods of one call are attached at the same time:
// more than a runtime does, less than what would only queue up.
const attachAtOnce = 16

func podName(i int) string { return fmt.Sprintf("pod%d", i+1) }

// Pods returns the lab's pods by host, in the topology's order, then by name:
// pod2 before pod10.
func (l *Lab) Pods() ([]Pod, error) {
	s, err := readState(l.name)
	if err != nil {
		return nil, err
	}
	hosts := l.Hosts()
	slices.SortFunc(s.Pods, func(a, b Pod) int {
		return cmp.Or(
			cmp.Compare(slices.Index(hosts, a.Host), slices.Index(hosts, b.Host)),
			cmp.Compare(len(a.Name), len(b.Name)),
			cmp.Compare(a.Name, b.Name))
	})
	return s.Pods, nil
}

// Pod returns one pod.
func (l *Lab) Pod(host, name string) (Pod, error) {
	s, err := readState(l.name)
	if err != nil {
		return Pod{}, err
	}
	i := s.pod(host, name)
	if i < 0 {
		return Pod{}, fmt.Errorf("pod %s/%s: not in lab %s", host, name, l.name)
	}
	return s.Pods[i], nil
}

// AttachPod makes a pod, given as HOST/POD, and attaches it as a container
// runtime does: a namespace, then the CNI plugin's ADD. When the plugin refuses,
// nothing is left of the pod and the error is the plugin's, a *types.Error.
func (l *Lab) AttachPod(ctx context.Context, where string) (Pod, error) {
	pods, err := l.AttachPods(ctx, where)
	if err != nil {
		return Pod{}, err
	}
	return pods[0], nil
}

// AttachPods makes several pods at once, all or none.
func (l *Lab) AttachPods(ctx context.Context, where ...string) ([]Pod, error) {
	release, err := lockLab(ctx, l.name, false, false)
	if err != nil {
		return nil, err
	}
	defer release()
	return l.attachPods(ctx, l.attach, where...)
}

// AttachKubePod is AttachPod for a pod of Kubernetes, which the API has with this
// namespace and uid under the same name.
func (l *Lab) AttachKubePod(ctx context.Context, where, namespace, uid string) (Pod, error) {
	release, err := lockLab(ctx, l.name, false, false)
	if err != nil {
		return Pod{}, err
	}
	defer release()
	host, name := splitPod(where)
	p, err := l.newPod(host, name)
	if err != nil {
		return Pod{}, err
	}
	p.Namespace, p.UID = namespace, uid
	return l.attachNew(ctx, p)
}

func (l *Lab) attachPods(ctx context.Context, attach func(context.Context, string) (Pod, error), where ...string) ([]Pod, error) {
	pods := make([]Pod, len(where))
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(attachAtOnce)
	for i, w := range where {
		g.Go(func() (err error) {
			if pods[i], err = attach(gctx, w); err != nil {
				return fmt.Errorf("attach %s: %w", w, err)
			}
			return nil
		})
	}
	err := g.Wait()
	if err == nil {
		return pods, nil
	}
	undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoWithin)
	defer cancel()
	for i, p := range pods {
		if p.ContainerID != "" {
			if derr := l.detach(undo, where[i]); derr != nil {
				err = errors.Join(err, derr)
			}
		}
	}
	return nil, err
}

// attach makes one pod. A Pod is returned only when there is no error.
func (l *Lab) attach(ctx context.Context, where string) (Pod, error) {
	host, name := splitPod(where)
	p, err := l.newPod(host, name)
	if err != nil {
		return Pod{}, err
	}
	return l.attachNew(ctx, p)
}

func (l *Lab) attachNew(ctx context.Context, p Pod) (Pod, error) {
	host, name, where := p.Host, p.Name, p.String()
	network, err := l.Network(ctx, host)
	if err != nil {
		return Pod{}, err
	}
	if _, err := updateState(l.name, func(s *state) error {
		if s.pod(host, name) >= 0 {
			return errors.New("there is a pod of this name already")
		}
		if ns.Exists(l.Space(where)) {
			return errTaken(l.Space(where))
		}
		s.Pods = append(s.Pods, p)
		return nil
	}); err != nil {
		return Pod{}, err
	}
	if err := l.wire(ctx, network, &p); err != nil {
		undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoWithin)
		defer cancel()
		// As runtimes do after an ADD that went wrong. What DEL says then is of
		// no more use than what ADD said.
		_ = network.Del(undo, p)
		return Pod{}, errors.Join(err, l.forget(undo, p))
	}
	return p, nil
}

// AddPod takes a pod into the lab that something else attached, or is about to: its
// namespace, which may not be there yet, goes with the lab.
func (l *Lab) AddPod(p Pod) error {
	if _, ok := l.topology.node(p.Host); !ok {
		return fmt.Errorf("host %s: not in lab %s; want one of %v", p.Host, l.name, l.Hosts())
	}
	_, err := updateState(l.name, func(s *state) error {
		if s.pod(p.Host, p.Name) >= 0 {
			return errors.New("there is a pod of this name already")
		}
		s.Pods = append(s.Pods, p)
		return nil
	})
	return err
}

func (l *Lab) newPod(host, name string) (Pod, error) {
	if _, ok := l.topology.node(host); !ok {
		return Pod{}, fmt.Errorf("host %s: not in lab %s; want one of %v", host, l.name, l.Hosts())
	}
	if err := checkName(name); err != nil {
		return Pod{}, fmt.Errorf("pod: %w (give the pod as HOST/POD)", err)
	}
	var id [4]byte
	_, _ = rand.Read(id[:]) // never fails
	return Pod{Host: host, Name: name, ContainerID: name + "-" + hex.EncodeToString(id[:])}, nil
}

// wire makes the pod's namespace, attaches it and records its addresses.
func (l *Lab) wire(ctx context.Context, network *Network, p *Pod) error {
	if err := createSpace(l.Space(p.String())); err != nil {
		return err
	}
	r, err := network.Add(ctx, *p)
	if err != nil {
		return err
	}
	for _, ip := range r.IPs {
		a, ok := netip.AddrFromSlice(ip.Address.IP)
		if !ok {
			return fmt.Errorf("result of ADD: address %v cannot be read", ip.Address)
		}
		p.Addrs = append(p.Addrs, a.Unmap())
	}
	if len(p.Addrs) == 0 {
		return errors.New("result of ADD: no address")
	}
	if p.MTU, err = linkMTU(l.Space(p.String()), podInterface); err != nil {
		return err
	}
	_, err = updateState(l.name, func(s *state) error {
		i := s.pod(p.Host, p.Name)
		if i < 0 {
			return fmt.Errorf("pod %s was removed meanwhile", p)
		}
		s.Pods[i] = *p
		return nil
	})
	return err
}

func linkMTU(space, dev string) (int, error) {
	s, err := openSpace(space)
	if err != nil {
		return 0, err
	}
	defer s.close()
	link, err := s.h.LinkByName(dev)
	if err != nil {
		return 0, fmt.Errorf("find %s in %s: %w", dev, space, err)
	}
	return link.Attrs().MTU, nil
}

// DetachPod takes a pod, given as HOST/POD, away as a runtime does: the CNI
// plugin's DEL, then the namespace. When DEL fails, the pod stays recorded, so
// that it can be tried again.
func (l *Lab) DetachPod(ctx context.Context, where string) error { return l.DetachPods(ctx, where) }

// DetachPods takes several pods away at once. One that fails does not keep the
// others.
func (l *Lab) DetachPods(ctx context.Context, where ...string) error {
	release, err := lockLab(ctx, l.name, false, false)
	if err != nil {
		return err
	}
	defer release()
	errs := make([]error, len(where))
	var g errgroup.Group
	g.SetLimit(attachAtOnce)
	for i, w := range where {
		g.Go(func() error { errs[i] = l.detach(ctx, w); return nil })
	}
	_ = g.Wait() // the errors are in errs
	return errors.Join(errs...)
}

func (l *Lab) detach(ctx context.Context, where string) error {
	host, name := splitPod(where)
	p, err := l.Pod(host, name)
	if err != nil {
		return err
	}
	network, err := l.Network(ctx, host)
	if err == nil {
		err = network.Del(ctx, p)
	}
	if err != nil {
		return fmt.Errorf("detach %s: %w", where, err)
	}
	return l.forget(ctx, p)
}

// forget removes the pod's namespace with whatever runs in it, and its record.
func (l *Lab) forget(ctx context.Context, p Pod) error {
	space := l.Space(p.String())
	if err := errors.Join(ns.KillAll(ctx, space), ns.Delete(space)); err != nil {
		return err
	}
	_, err := updateState(l.name, func(s *state) error {
		s.Pods = slices.DeleteFunc(s.Pods, func(q Pod) bool { return q.ContainerID == p.ContainerID })
		return nil
	})
	return err
}

// Network is a host's CNI network, used as a container runtime uses it. The
// plugin runs in the host's namespace. Methods are safe for concurrent use.
type Network struct {
	lab  *Lab
	list *libcni.NetworkConfigList
	cni  *libcni.CNIConfig
}

// Network returns the CNI network of a host. The configuration is what the
// host's daemon gave when it was first asked: a runtime reads it from a file,
// which is there also while the daemon is not.
func (l *Lab) Network(ctx context.Context, host string) (*Network, error) {
	path := filepath.Join(hostDir(l.name, host), "cni", "net.d", "10-"+networkName+".conflist")
	list, err := libcni.NetworkConfFromFile(path)
	if err != nil {
		list, err = l.fetchNetwork(ctx, host, path)
	}
	if err != nil {
		return nil, fmt.Errorf("CNI configuration of %s: %w", host, err)
	}
	cache := filepath.Join(hostDir(l.name, host), "cni", "cache")
	return &Network{l, list, libcni.NewCNIConfigWithCacheDir([]string{l.binDir}, cache, spaceExec{l.Space(host)})}, nil
}

func (l *Lab) fetchNetwork(ctx context.Context, host, path string) (*libcni.NetworkConfigList, error) {
	c, err := l.Client(host)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	r, err := apiv1.NewOperatorClient(c).CNIConfig(ctx, &apiv1.CNIConfigRequest{}, grpc.WaitForReady(true))
	if err != nil {
		return nil, err
	}
	list, err := libcni.NetworkConfFromBytes([]byte(r.GetConflist()))
	if err != nil {
		return nil, err
	}
	return list, atomicfile.Write(path, []byte(r.GetConflist()), 0o644)
}

func (n *Network) runtime(p Pod) *libcni.RuntimeConf {
	rt := &libcni.RuntimeConf{ContainerID: p.ContainerID, NetNS: ns.Path(n.lab.Space(p.String())), IfName: podInterface}
	if p.Namespace != "" {
		rt.Args = [][2]string{
			{"IgnoreUnknown", "1"},
			{"K8S_POD_NAMESPACE", p.Namespace},
			{"K8S_POD_NAME", p.Name},
			{"K8S_POD_INFRA_CONTAINER_ID", p.ContainerID},
			{"K8S_POD_UID", p.UID},
		}
	}
	return rt
}

// Add runs the plugin's ADD. The pod's namespace must exist.
func (n *Network) Add(ctx context.Context, p Pod) (*types100.Result, error) {
	r, err := n.cni.AddNetworkList(ctx, n.list, n.runtime(p))
	if err != nil {
		return nil, err
	}
	result, err := types100.NewResultFromResult(r)
	if err != nil {
		return nil, fmt.Errorf("result of ADD: %w", err)
	}
	return result, nil
}

// Check runs the plugin's CHECK against the result of ADD.
func (n *Network) Check(ctx context.Context, p Pod) error {
	return n.cni.CheckNetworkList(ctx, n.list, n.runtime(p))
}

// Del runs the plugin's DEL. The pod's namespace may be gone.
func (n *Network) Del(ctx context.Context, p Pod) error {
	return n.cni.DelNetworkList(ctx, n.list, n.runtime(p))
}

// Status runs the plugin's STATUS.
func (n *Network) Status(ctx context.Context) error {
	return n.cni.GetStatusNetworkList(ctx, n.list)
}

// spaceExec runs CNI plugins in a host's namespace: see libcni's invoke.Exec.
type spaceExec struct{ space string }

var _ invoke.Exec = spaceExec{}

// ExecPlugin runs the plugin and returns what it printed; its error is what the
// plugin printed as a CNI error.
func (e spaceExec) ExecPlugin(ctx context.Context, path string, stdin []byte, environ []string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, path)
	var stdout, stderr bytes.Buffer
	cmd.Env, cmd.Stdin, cmd.Stdout, cmd.Stderr = environ, bytes.NewReader(stdin), &stdout, &stderr
	endsSoon(cmd)
	err := ns.Start(e.space, cmd)
	if err == nil {
		err = cmd.Wait()
	}
	if err == nil {
		return stdout.Bytes(), nil
	}
	if ctx.Err() != nil {
		return nil, fmt.Errorf("run %s: %w", filepath.Base(path), ctx.Err())
	}
	cniErr := new(types.Error)
	if json.Unmarshal(stdout.Bytes(), cniErr) == nil && cniErr.Msg != "" {
		return nil, cniErr
	}
	return nil, fmt.Errorf("run %s: %w: %s%s", filepath.Base(path), err, stdout.String(), strings.TrimSpace(stderr.String()))
}

// FindInPath implements [invoke.Exec].
func (e spaceExec) FindInPath(plugin string, paths []string) (string, error) {
	return invoke.FindInPath(plugin, paths)
}

// Decode implements [invoke.Exec].
func (e spaceExec) Decode(b []byte) (version.PluginInfo, error) {
	return (&version.PluginDecoder{}).Decode(b)
}
