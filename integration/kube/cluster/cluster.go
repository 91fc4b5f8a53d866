// Package cluster brings a whole Kubernetes cluster up on this machine, from
// programs that `make kube-tools` builds: an API server with its etcd, controllers,
// a scheduler, and nodes that are namespaces with a containerd, a kubelet and a
// kube-proxy each. It runs in namespaces of its own ([Contain]), whose network is
// that of a router between racks of nodes and of the control plane; BIRD runs there
// as the top-of-rack switch that routers' peers are. Nothing of it is left when it
// has ended, however it did.
package cluster

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/integration/kube"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/embedded"
)

const (
	proxyToken = "kube-proxy"
	pauseImage = "localhost/pause:1"

	// AgnhostImage is the program of Kubernetes' own tests, under the name that these ask
	// for, with what they run in its pods beside it.
	AgnhostImage = "registry.k8s.io/e2e-test-images/agnhost:2.66.1"
	// AnswerImage is integration/kube/cmd/answer.
	AnswerImage  = "localhost/answer:1"
	routerdImage = "docker.io/library/routerd:latest"

	// The two sides of BGP's sessions.
	switchAS, nodeAS = 65000, 64512
)

func kubeletToken(node string) string { return "kubelet-of-" + node }

// Config says what cluster to bring up.
type Config struct {
	Name      string // which [Contain] gave
	Nodes     int
	Bin       string  // of routerd, routerctl and routerd-cni
	KubeBin   string  // of Kubernetes' programs
	Manifests string  // the directory configs/kubernetes
	ProxyMode string  // of kube-proxy; nftables if empty
	Runtime   Runtime // Containerd1 if empty
	DNS       bool    // with CoreDNS, from KubeBin

	Trust     kube.Trust // of the API server at first, whose files have to stay
	Datastore Datastore  // V3 if empty
	// Encapsulation is that of the pools (`defaultPool.encapsulation`); as in the manifests if
	// empty. With Direct the switch knows from the start where pods are.
	Encapsulation string
	// CNIVersion is cni.version; as in the manifests if empty, which runtimes of any age can use.
	CNIVersion string
	// Families are those of nodes, pods and Services; of both the first is what a Service or
	// a pod has where one address is asked for. IPv4 alone if empty.
	Families []dataplane.Family

	// Definitions are files with definitions of resources that are there before routerd comes.
	Definitions []string
	// Images are names under which the nodes have the image of [AgnhostImage] too, with
	// a layer more.
	Images map[string][]ImageFile
}

// Cluster is a running cluster. Make one with [Up].
type Cluster struct {
	*kube.Server

	Nodes []*Node
	// Times is how long what Up did took, in order.
	Times []Took

	conf        Config
	runtime     runtimeOf
	families    []family
	dir         string
	etcd        *embedded.Server // nil: Calico's resources are in the API
	switched    bool             // the switch runs
	controllers []*program
	config      string // the administrator's kubeconfig
}

// Took is how long a part of [Up] took.
type Took struct {
	What string
	Time time.Duration
}

// Up brings a cluster up with routerd as its network, by its manifests, and returns
// when all nodes are ready. ctx bounds that.
func Up(ctx context.Context, conf Config) (_ *Cluster, err error) {
	conf.ProxyMode, conf.Datastore, conf.Runtime = cmp.Or(conf.ProxyMode, "nftables"), cmp.Or(conf.Datastore, V3), cmp.Or(conf.Runtime, Containerd1)
	if len(conf.Families) == 0 {
		conf.Families = []dataplane.Family{dataplane.IPv4}
	}
	c := &Cluster{conf: conf, dir: Dir(conf.Name)}
	c.runtime = c.runtimeOf()
	for _, f := range conf.Families {
		c.families = append(c.families, familyOf(f))
	}
	defer func() {
		if err != nil {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
			defer cancel()
			c.Close(ctx)
		}
	}()
	if conf.Name == "" {
		return nil, errors.New("bring a cluster up: no name: it runs contained only")
	}
	if err := os.MkdirAll(c.dir, 0o755); err != nil {
		return nil, err
	}
	for _, part := range []struct {
		what string
		do   func(context.Context) error
	}{
		{"the router", c.router},
		{"images", c.writeImages},
		{"the API server", c.startServer},
		{"etcd", c.startEtcd},
		{"the controllers and the scheduler", c.startControllers},
		{"nodes", c.startNodes},
		{"routerd is applied", c.install},
		{"all nodes are ready", c.nodesReady},
		{"routes of the router", c.routes},
		{"DNS", c.startDNS},
	} {
		begin := time.Now()
		if err := part.do(ctx); err != nil {
			return nil, fmt.Errorf("bring a cluster up: %s: %w", part.what, err)
		}
		c.Times = append(c.Times, Took{part.what, time.Since(begin)})
	}
	return c, nil
}

// router makes the network between the nodes out of the namespace that this runs in.
func (c *Cluster) router(ctx context.Context) error {
	if err := ip(ctx, "link set lo up"); err != nil {
		return err
	}
	for rack := 1; rack <= c.racks(); rack++ {
		name := fmt.Sprintf("rack%d", rack)
		if err := ip(ctx, "link add "+name+" type bridge", "link set "+name+" up"); err != nil {
			return err
		}
	}
	for _, f := range c.families {
		if err := os.WriteFile("/proc/sys/net/"+f.forwarding, []byte("1"), 0o644); err != nil {
			return err
		}
		if err := ip(ctx, "addr add "+f.controlPlane.String()+" dev lo"); err != nil {
			return err
		}
		for rack := 1; rack <= c.racks(); rack++ {
			if err := ip(ctx, "addr add "+f.added(rack, 1, fmt.Sprintf("rack%d", rack))); err != nil {
				return err
			}
		}
	}
	return nil
}

func (c *Cluster) racks() int { return rackOf(c.conf.Nodes - 1) }

// routes has the router know where pods are, if something needs it: packets between racks
// that are in no tunnel, and IPv6, which no node translates on its way out.
func (c *Cluster) routes(ctx context.Context) error {
	if c.conf.Encapsulation != string(store.Direct) && !slices.Contains(c.conf.Families, dataplane.IPv6) {
		return nil
	}
	return c.StartSwitch(ctx)
}

// rackOf is the rack of the i-th node: two are in each.
func rackOf(i int) int { return 1 + i/2 }

// writeImages makes the archive of the images that the nodes import.
func (c *Cluster) writeImages(ctx context.Context) error {
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		return err
	}
	agnhost, err := agnhostFiles(ctx, filepath.Join(c.conf.KubeBin, "agnhost"), busybox)
	if err != nil {
		return err
	}
	testImage := func(name string, layers ...[]ImageFile) Image {
		return Image{Name: name, Layers: layers, Entrypoint: []string{"/agnhost"}, Cmd: []string{"pause"}, Env: []string{"PATH=/bin:/"}}
	}
	images := []Image{
		{Name: pauseImage, Layers: [][]ImageFile{{{Path: "bin/busybox", Source: busybox}}}, Entrypoint: []string{"/bin/busybox", "sleep", "2147483647"}},
		c.routerdImage(routerdImage, filepath.Join(c.conf.Bin, "routerd")),
		testImage(AgnhostImage, agnhost),
		{Name: AnswerImage, Layers: [][]ImageFile{{{Path: "answer", Source: filepath.Join(c.conf.Bin, "answer")}}}, Entrypoint: []string{"/answer"}},
	}
	for name, files := range c.conf.Images {
		images = append(images, testImage(name, agnhost, files))
	}
	if c.conf.DNS {
		images = append(images, Image{Name: dnsImage, Layers: [][]ImageFile{c.dnsFiles()}, Entrypoint: []string{"/coredns"}})
	}
	f, err := os.Create(c.images())
	if err != nil {
		return err
	}
	return errors.Join(WriteImages(f, images), f.Close())
}

// routerdImage is routerd's as configs/image/Containerfile has it, with a program of the daemon.
func (c *Cluster) routerdImage(name, daemon string) Image {
	files := []ImageFile{{Path: "usr/local/bin/routerd", Source: daemon}}
	for _, p := range []string{"routerctl", "routerd-cni"} {
		files = append(files, ImageFile{Path: "usr/local/bin/" + p, Source: filepath.Join(c.conf.Bin, p)})
	}
	return Image{Name: name, Layers: [][]ImageFile{files}, Entrypoint: []string{"routerd"}, Cmd: []string{"run"}, Env: []string{"PATH=/usr/local/bin"}}
}

// AddRouterd puts an image of routerd with another program of the daemon on all nodes.
func (c *Cluster) AddRouterd(ctx context.Context, name, daemon string) error {
	archive := filepath.Join(c.dir, "added.tar")
	f, err := os.Create(archive)
	if err != nil {
		return err
	}
	if err := errors.Join(WriteImages(f, []Image{c.routerdImage(name, daemon)}), f.Close()); err != nil {
		return err
	}
	for _, n := range c.Nodes {
		if err := n.importImages(ctx, archive); err != nil {
			return err
		}
	}
	return os.Remove(archive)
}

// images is the archive of the images.
func (c *Cluster) images() string { return filepath.Join(c.dir, "images.tar") }

func (c *Cluster) startServer(ctx context.Context) (err error) {
	users := []kube.User{{Token: proxyToken, Name: "system:kube-proxy", Group: "system:authenticated"}}
	for i := range c.conf.Nodes {
		n := &Node{Name: fmt.Sprintf("node%d", i+1), Rack: rackOf(i), number: i + 1, c: c}
		n.dir = filepath.Join(c.dir, n.Name)
		c.Nodes = append(c.Nodes, n)
		if n.Name != kube.Node { // which the server has anyway
			users = append(users, kube.User{Token: kubeletToken(n.Name), Name: "system:node:" + n.Name, Group: "system:nodes"})
		}
	}
	c.Server, err = kube.Start(ctx, kube.ServerConfig{
		Dir: c.dir, Bin: c.conf.KubeBin, Advertise: c.families[0].controlPlane, Users: users, Trust: c.conf.Trust,
		Flags: []string{"--service-cluster-ip-range=" + c.each(func(f family) string { return f.services })},
	})
	if err != nil {
		return err
	}
	c.config, err = c.Kubeconfig("", kube.Token)
	return err
}

// kubeconfig returns the text of one, for who has a token.
func (c *Cluster) kubeconfig(token string) string { return c.KubeconfigText("", token) }

func (c *Cluster) startControllers(context.Context) error {
	cidrs := []string{"--allocate-node-cidrs=false"}
	if c.conf.Datastore == PodCIDR {
		cidrs = []string{"--allocate-node-cidrs=true", "--cluster-cidr=" + c.each(func(f family) string { return f.pods })}
	}
	for name, flags := range map[string][]string{
		"kube-controller-manager": append(cidrs, "--service-account-private-key-file="+c.AccountsKey(), "--root-ca-file="+c.CAFile, "--controllers=*,-kube-apiserver-serving-clustertrustbundle-publisher-controller"),
		"kube-scheduler":          nil,
	} {
		args := append([]string{"--kubeconfig=" + c.config, "--leader-elect=false", "--bind-address=127.0.0.1"}, flags...)
		p, err := start(filepath.Join(c.dir, name+".log"), exec.Command(filepath.Join(c.conf.KubeBin, name), args...))
		if err != nil {
			return err
		}
		c.controllers = append(c.controllers, p)
	}
	return nil
}

// RestartClients starts all anew that ask the API server and look for its authority
// every few minutes only, or once: the controllers, which tell pods of it, kubelets and
// kube-proxies. Pods stay.
func (c *Cluster) RestartClients(ctx context.Context) error {
	for _, p := range c.controllers {
		p.stop(ctx)
	}
	c.controllers = nil
	if err := c.startControllers(ctx); err != nil {
		return err
	}
	for _, n := range c.Nodes {
		n.proxy.stop(ctx)
		n.kubelet.stop(ctx)
		if err := errors.Join(n.StartProxy(), n.StartKubelet()); err != nil {
			return err
		}
	}
	return nil
}

func (c *Cluster) startNodes(ctx context.Context) error {
	errs := make([]error, len(c.Nodes))
	var starting sync.WaitGroup
	for i, n := range c.Nodes {
		starting.Go(func() { errs[i] = c.startNode(ctx, n) })
	}
	starting.Wait()
	return errors.Join(errs...)
}

// nodesReady waits until all nodes are there and ready, and the daemons are.
func (c *Cluster) nodesReady(ctx context.Context) error {
	var programs []*program
	for _, n := range c.Nodes {
		programs = append(programs, n.kubelet, n.runtime, n.proxy)
	}
	return poll(ctx, "ready", func() error {
		out, err := c.Kubectl(ctx, "", "get", "nodes", "-o", `jsonpath={range .items[*]}{.metadata.name} {range .status.conditions[?(@.type=="Ready")]}{.status} {.message}{end}{"\n"}{end}`)
		if err != nil {
			return err
		}
		if n := strings.Count(out, " True "); n != len(c.Nodes) {
			return fmt.Errorf("%d of %d nodes are ready:\n%s", n, len(c.Nodes), out)
		}
		out, err = c.Kubectl(ctx, "", "-n", "kube-system", "get", "daemonset", "routerd", "-o", "jsonpath={.status.numberReady}")
		if err == nil && out != fmt.Sprint(len(c.Nodes)) {
			err = fmt.Errorf("%s of %d daemons are ready", out, len(c.Nodes))
		}
		return err
	}, programs...)
}

// Kubectl runs kubectl as the administrator, with something to read, and returns what
// it printed.
func (c *Cluster) Kubectl(ctx context.Context, stdin string, args ...string) (string, error) {
	cmd := c.KubectlCommand(ctx, args...)
	cmd.Stdin = strings.NewReader(stdin)
	return output(cmd)
}

// KubectlCommand is kubectl as the administrator.
func (c *Cluster) KubectlCommand(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, filepath.Join(c.conf.KubeBin, "kubectl"), append([]string{"--kubeconfig", c.config}, args...)...)
	cmd.Env = []string{"HOME=" + c.dir, "PATH=" + os.Getenv("PATH")}
	return cmd
}

// Close ends the cluster. What is left of it goes with the namespaces of [Contain].
func (c *Cluster) Close(ctx context.Context) {
	for _, n := range c.Nodes {
		n.stop(ctx)
	}
	for _, p := range c.controllers {
		p.stop(ctx)
	}
	if c.Server != nil {
		c.Server.Close()
	}
	if c.etcd != nil {
		c.etcd.Close()
	}
}
