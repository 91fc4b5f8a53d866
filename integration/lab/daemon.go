package lab

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"sigs.k8s.io/yaml"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/integration/lab/ns"
	"github.com/routerd/routerd/store/embedded"
)

const (
	etcdPort    = 2379
	networkName = "routerd-lab" // of the CNI network
	configName  = "routerd.yaml"

	// How long a daemon may take, on a busy or an emulated machine, until its
	// host is ready and from SIGTERM to its end.
	readyWithin = 90 * time.Second
	stopWithin  = 5 * time.Second
)

// hostDir is the daemon's run directory; everything else of the host lies in
// it.
func hostDir(lab, host string) string { return filepath.Join(dir(lab), host) }

func stateDir(lab, host string) string { return filepath.Join(hostDir(lab, host), "state") }

func logFile(lab, host string) string { return filepath.Join(hostDir(lab, host), "routerd.log") }

// Socket returns the path of the socket on which a host's daemon answers
// operators.
func Socket(lab, host string) string { return filepath.Join(hostDir(lab, host), "routerd.sock") }

// clientPKI is the directory of what a host needs as a client of the lab's store: its
// own, or the first host's.
func clientPKI(lab string, t Topology, n Node) string {
	if t.Join {
		return filepath.Join(stateDir(lab, n.Name), "pki")
	}
	return firstPKI(lab, t)
}

// firstPKI is the directory of what the daemon of the first host makes for clients.
func firstPKI(lab string, t Topology) string {
	return filepath.Join(stateDir(lab, t.Nodes[0].Name), "etcd", "pki")
}

func storeAddress(t Topology) string {
	return netip.AddrPortFrom(t.Nodes[0].Addrs()[0], etcdPort).String()
}

// daemonConfig renders the configuration of a host's daemon. The first host
// runs the store.
func daemonConfig(lab, binDir string, t Topology, n Node) ([]byte, error) {
	datastore := map[string]any{}
	switch {
	case t.Kubeconfig != "":
		datastore["kind"], datastore["kubernetes"] = "kubernetes", map[string]any{"kubeconfig": t.Kubeconfig}
	case n.Name == t.Nodes[0].Name:
		datastore["embedded"] = map[string]any{"listen": storeAddress(t)}
	default:
		datastore["endpoints"] = []any{"https://" + storeAddress(t)}
		datastore["caFile"], datastore["certFile"], datastore["keyFile"] = embedded.ClientFiles(clientPKI(lab, t, n))
	}
	config := map[string]any{
		"nodeName":  n.Name,
		"stateDir":  stateDir(lab, n.Name),
		"runDir":    hostDir(lab, n.Name),
		"logLevel":  "info",
		"datastore": datastore,
		"address":   addressConfig(t.Underlay),
		"defaultPool": map[string]any{
			"cidr":          t.Pool.CIDR.String(),
			"encapsulation": string(t.Pool.Encapsulation),
			"blockSize":     t.Pool.BlockSize,
		},
		"bgp": map[string]any{"enabled": true},
		"cni": map[string]any{
			"networkName": networkName,
			"binDir":      binDir,
			"confDir":     filepath.Join(hostDir(lab, n.Name), "cni", "net.d"),
		},
	}
	if p := t.Pool6; p != nil {
		config = overlay(config, map[string]any{
			"defaultPool": map[string]any{
				"cidr6": p.CIDR.String(), "encapsulation6": string(p.Encapsulation), "blockSize6": p.BlockSize,
			},
			"cni": map[string]any{"assignIPv6": true},
		})
	}
	b, err := yaml.Marshal(overlay(config, n.Config))
	if err != nil {
		return nil, fmt.Errorf("write configuration of %s: %w", n.Name, err)
	}
	return b, nil
}

// overlay returns base with over laid on it: maps are merged, null removes, anything
// else replaces.
func overlay(base, over map[string]any) map[string]any {
	out := maps.Clone(base)
	for k, v := range over {
		if v == nil {
			delete(out, k)
			continue
		}
		b, ok1 := out[k].(map[string]any)
		o, ok2 := v.(map[string]any)
		if ok1 && ok2 {
			v = overlay(b, o)
		}
		out[k] = v
	}
	return out
}

// join has the host join the first one. It has the configuration of its daemon but for
// what routerd join is to find out.
func (l *Lab) join(ctx context.Context, n Node) error {
	first := l.topology.Nodes[0].Name
	token, err := l.Output(ctx, first, filepath.Join(l.binDir, "routerctl"), "--socket", Socket(l.name, first), "cluster", "token", "-o", "token")
	if err != nil {
		return err
	}
	n.Config = maps.Clone(n.Config)
	if n.Config == nil {
		n.Config = map[string]any{}
	}
	n.Config["datastore"] = nil
	path, err := l.configure(n)
	if err != nil {
		return err
	}
	_, err = l.Output(ctx, n.Name, filepath.Join(l.binDir, "routerd"), "join", "--config", path, "--token", strings.TrimSpace(token), "--no-start")
	return err
}

// Join has one of [Options.Later] join the first host, and returns when it is ready.
func (l *Lab) Join(ctx context.Context, host string) error {
	release, err := lockLab(ctx, l.name, false, false)
	if err != nil {
		return err
	}
	defer release()
	n, ok := l.topology.node(host)
	if !ok || !l.topology.Join {
		return fmt.Errorf("join %s: no host of lab %s that joins; hosts: %v", host, l.name, l.Hosts())
	}
	if err := l.join(ctx, n); err != nil {
		return fmt.Errorf("join %s: %w", host, err)
	}
	if err := l.startDaemon(n); err != nil {
		return err
	}
	return l.WaitReady(ctx, host)
}

// configure makes the directories of the host's daemon and writes its configuration.
func (l *Lab) configure(n Node) (path string, err error) {
	d := hostDir(l.name, n.Name)
	for _, sub := range []string{d, stateDir(l.name, n.Name), filepath.Join(d, "cni", "net.d"), filepath.Join(d, "cni", "cache")} {
		if err := os.MkdirAll(sub, 0o700); err != nil {
			return "", fmt.Errorf("configure routerd on %s: %w", n.Name, err)
		}
	}
	conf, err := daemonConfig(l.name, l.binDir, l.topology, n)
	if err != nil {
		return "", err
	}
	path = filepath.Join(d, configName)
	if err := os.WriteFile(path, conf, 0o600); err != nil {
		return "", fmt.Errorf("configure routerd on %s: %w", n.Name, err)
	}
	return path, nil
}

// startDaemon starts the host's daemon, which must not run.
func (l *Lab) startDaemon(n Node) error {
	path, err := l.configure(n)
	if err != nil {
		return err
	}
	p, err := startDetached(l.Space(n.Name), logFile(l.name, n.Name), filepath.Join(l.binDir, "routerd"), "run", "--config", path)
	if err != nil {
		return fmt.Errorf("host %s: start routerd: %w", n.Name, err)
	}
	_, err = updateState(l.name, func(s *state) error { s.Daemons[n.Name] = p; return nil })
	return err
}

// Daemon returns the process of the host's daemon as it was last started. It
// may have ended since.
func (l *Lab) Daemon(host string) (ns.Process, error) {
	s, err := readState(l.name)
	if err != nil {
		return ns.Process{}, err
	}
	p, ok := s.Daemons[host]
	if !ok {
		return ns.Process{}, fmt.Errorf("host %s: no daemon was started; hosts of lab %s: %v", host, l.name, l.Hosts())
	}
	return p, nil
}

// Kill sends a signal to the host's daemon and, if the signal is one that ends
// it, waits until it has ended.
func (l *Lab) Kill(ctx context.Context, host string, sig unix.Signal) error {
	p, err := l.Daemon(host)
	if err != nil {
		return err
	}
	if err := p.Signal(sig); err != nil {
		return fmt.Errorf("kill routerd on %s: %w", host, err)
	}
	switch sig {
	case unix.SIGKILL, unix.SIGTERM, unix.SIGINT, unix.SIGQUIT, unix.SIGABRT:
		if err := p.Wait(ctx); err != nil {
			return fmt.Errorf("kill routerd on %s: %w", host, err)
		}
	}
	return nil
}

// Restart starts the host's daemon again, whatever became of it, and returns
// when the host is ready. One that runs is asked to end first.
func (l *Lab) Restart(ctx context.Context, host string) error {
	if err := l.Start(ctx, host); err != nil {
		return err
	}
	return l.WaitReady(ctx, host)
}

// Start is Restart that does not wait until the host is ready.
func (l *Lab) Start(ctx context.Context, host string) error {
	release, err := lockLab(ctx, l.name, false, false)
	if err != nil {
		return err
	}
	defer release()
	n, ok := l.topology.node(host)
	if !ok {
		return fmt.Errorf("restart %s: no such host; want one of %v", host, l.Hosts())
	}
	s, err := readState(l.name)
	if err != nil {
		return err
	}
	if p, ran := s.Daemons[host]; ran {
		if err := stopProcess(ctx, p, stopWithin); err != nil {
			return fmt.Errorf("restart %s: %w", host, err)
		}
	}
	return l.startDaemon(n)
}

// Client returns a connection to the host's daemon, for apiv1.Operator and
// etcd's KV service. The caller closes it.
func (l *Lab) Client(host string) (*grpc.ClientConn, error) {
	if _, ok := l.topology.node(host); !ok {
		return nil, fmt.Errorf("host %s: not in lab %s; want one of %v", host, l.name, l.Hosts())
	}
	c, err := grpc.NewClient("unix://"+Socket(l.name, host),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		// The default of up to two minutes between attempts is for networks.
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: fastBackoff(), MinConnectTimeout: time.Second}))
	if err != nil {
		return nil, fmt.Errorf("connect to routerd on %s: %w", host, err)
	}
	return c, nil
}

// Node asks the host's daemon about itself.
func (l *Lab) Node(ctx context.Context, host string) (*apiv1.NodeResponse, error) {
	c, err := l.Client(host)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	r, err := apiv1.NewOperatorClient(c).Node(ctx, &apiv1.NodeRequest{})
	if err != nil {
		return nil, fmt.Errorf("ask routerd on %s: %w", host, err)
	}
	return r, nil
}

// WaitReady waits until the host's own dataplane is programmed. When its
// daemon ends or takes too long, the error holds the reason it last gave and
// the last lines of its log.
func (l *Lab) WaitReady(ctx context.Context, host string) error {
	ctx, cancel := context.WithTimeout(ctx, readyWithin)
	defer cancel()
	p, err := l.Daemon(host)
	if err != nil {
		return err
	}
	c, err := l.Client(host)
	if err != nil {
		return err
	}
	defer c.Close()
	op := apiv1.NewOperatorClient(c)
	reason := "it does not answer"
	for {
		r, err := op.Node(ctx, &apiv1.NodeRequest{})
		switch {
		case err == nil && r.GetHealth().GetReady().GetOk():
			return nil
		case err == nil:
			reason = r.GetHealth().GetReady().GetReason()
		case ctx.Err() == nil:
			reason = err.Error()
		}
		if !p.Alive() {
			return fmt.Errorf("host %s: routerd ended; the last lines of its log:\n%s", host, l.LogTail(host, 15))
		}
		if err := pause(ctx, 25*time.Millisecond); err != nil {
			return fmt.Errorf("host %s is not ready: %s: %w; the last lines of its log:\n%s", host, reason, err, l.LogTail(host, 15))
		}
	}
}

// LogTail returns the last lines of the daemon's log, or of that of the spine's BGP
// speaker.
func (l *Lab) LogTail(host string, lines int) string {
	file := logFile(l.name, host)
	if host == spineName {
		file = l.spineFile("bird.log")
	}
	return tail(file, lines)
}

// tail returns the last lines of a file.
func tail(file string, lines int) string {
	b, err := os.ReadFile(file)
	if err != nil {
		return "(" + err.Error() + ")"
	}
	all := bytes.Split(bytes.TrimSpace(b), []byte("\n"))
	all = all[max(0, len(all)-lines):]
	return string(bytes.Join(all, []byte("\n")))
}

// Env returns what etcd's and Calico's clients need in their environment to
// reach the lab's store from the first host: NAME=VALUE.
func (l *Lab) Env() []string {
	ca, cert, key := embedded.ClientFiles(firstPKI(l.name, l.topology))
	return []string{
		"ETCD_ENDPOINTS=https://" + storeAddress(l.topology),
		"ETCD_CA_CERT_FILE=" + ca,
		"ETCD_CERT_FILE=" + cert,
		"ETCD_KEY_FILE=" + key,
	}
}

// checkBinaries says which of the programs that a lab runs are missing.
func checkBinaries(binDir string, t Topology) error {
	var errs []error
	for _, b := range []string{"routerd", "routerd-cni"} {
		if _, err := os.Stat(filepath.Join(binDir, b)); err != nil {
			errs = append(errs, fmt.Errorf("find %s: %w: run \"make build\", or say where it is", b, err))
		}
	}
	if *t.Spine.BGP {
		if _, err := findBird(); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// splitPod splits HOST/POD.
func splitPod(where string) (host, pod string) {
	host, pod, _ = strings.Cut(where, "/")
	return host, pod
}
