package cluster

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"
)

// World is one cluster for all tests of a package: it takes a while to come up, so the
// first that wants it brings it up.
type World struct {
	Config Config // without a name and programs

	once    sync.Once
	cluster *Cluster
	err     error
}

// Main runs the tests contained, and returns the code to exit with.
func (w *World) Main(m *testing.M) (code int, err error) {
	name, code, err := Contain("rdkube")
	if name == "" || err != nil {
		return code, err
	}
	w.Config.Name = name
	code = m.Run()
	if w.cluster != nil {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		w.cluster.Close(ctx)
	}
	return code, nil
}

// Up returns the cluster.
func (w *World) Up(t *testing.T) *Cluster {
	t.Helper()
	w.once.Do(func() {
		w.err = errors.New("the cluster was not brought up: see the first test that wanted it")
		w.Config.Bin, w.Config.KubeBin = Programs(t)
		ctx, cancel := context.WithTimeout(t.Context(), 8*time.Minute)
		defer cancel()
		w.cluster, w.err = Up(ctx, w.Config)
		if w.err == nil {
			for _, part := range w.cluster.Times {
				t.Logf("%-40s %6.1f s", part.What, part.Time.Seconds())
			}
		}
	})
	if w.err != nil {
		t.Fatal(w.err)
	}
	return w.cluster
}

// Programs returns the directories of routerd's programs and of Kubernetes', for a
// package below integration/kube.
func Programs(t *testing.T) (bin, kubeBin string) {
	t.Helper()
	for _, d := range []struct {
		dir                              *string
		variable, usual, program, target string
	}{
		{&bin, "ROUTERD_BIN", "../../../bin", "routerd", "build"},
		{&kubeBin, "KUBE_BIN", "../../../.cache/kube", "kubelet", "kube-tools"},
	} {
		dir, err := filepath.Abs(cmp.Or(os.Getenv(d.variable), d.usual))
		if err == nil {
			_, err = os.Stat(filepath.Join(dir, d.program))
		}
		if err != nil {
			t.Fatalf("%v: run \"make %s\" first, or say by %s where the programs are", err, d.target, d.variable)
		}
		*d.dir = dir
	}
	return bin, kubeBin
}

// Flags adds those by which the configuration is chosen.
func (c *Config) Flags(f *flag.FlagSet) {
	f.IntVar(&c.Nodes, "nodes", c.Nodes, "how many nodes the cluster has")
	f.Func("datastore", "where Calico's resources are: v3 or v1 (definitions of projectcalico.org/v3 or crd.projectcalico.org/v1 in the API), etcd, or pod-cidr: as v3, with addresses of Nodes' pod CIDRs (default v3)", func(s string) error {
		c.Datastore = Datastore(s)
		_, err := c.Datastore.manifests()
		return err
	})
	f.StringVar(&c.Encapsulation, "encapsulation", "", "of the pools: Direct, VXLAN, VXLANCrossSubnet (default as in the manifests: VXLANCrossSubnet)")
	f.Func("families", "of nodes, pods and Services, the one that counts where one is asked for first: ipv4, or ipv4,ipv6, or ipv6,ipv4 (default ipv4)", func(s string) (err error) {
		c.Families, err = parseFamilies(s)
		return err
	})
	f.Func("runtime", "of the nodes' containers: containerd (Debian's) or containerd2 (of \"make kube-runtime\") (default containerd)", func(s string) error {
		c.Runtime = Runtime(s)
		return c.Runtime.check()
	})
	f.StringVar(&c.ProxyMode, "proxy", "", "mode of kube-proxy: nftables or iptables (default nftables)")
}
