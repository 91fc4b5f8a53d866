package cluster

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store/embedded"
)

// Datastore is where Calico's resources are.
type Datastore string

// In the API, by the definitions of one of its groups, or in an etcd.
const (
	V3   Datastore = "v3"   // projectcalico.org/v3, and routerd brings them
	V1   Datastore = "v1"   // crd.projectcalico.org/v1, which are there before routerd comes
	Etcd Datastore = "etcd" // etcd in which the API has no part

	// As V3, where pods have addresses of what Kubernetes gave their Nodes.
	PodCIDR Datastore = "pod-cidr"
)

// manifests is the directory below configs/kubernetes that is for it.
func (d Datastore) manifests() (string, error) {
	dir := map[Datastore]string{V3: "new-cluster", V1: "beside-calico", Etcd: "etcd", PodCIDR: "pod-cidr"}[d]
	if dir == "" {
		return "", fmt.Errorf("datastore %q: want v3, v1, etcd or pod-cidr", d)
	}
	return dir, nil
}

// edit is what a user of the manifests changes in them.
type edit struct{ from, to string }

// edits are those of routerd's configuration that this cluster wants.
func (c *Cluster) edits() (list []edit) {
	if c.conf.Datastore == Etcd {
		list = append(list, edit{"https://etcd.example:2379", c.EtcdURL()})
	}
	if c.conf.Datastore == PodCIDR {
		list = append(list, edit{"cidr: 10.244.0.0/16", "cidr: " + familyOf(dataplane.IPv4).pods})
	}
	if slices.Contains(c.conf.Families, dataplane.IPv6) {
		// What they have for this as comments.
		list = append(list, edit{"# cidr6: fd00:10:244::/48", "cidr6: " + familyOf(dataplane.IPv6).pods}, edit{"# encapsulation6:", "encapsulation6:"}, edit{"# assignIPv6:", "assignIPv6:"})
		if c.conf.Datastore == Etcd {
			list = append(list, edit{"# ipv6: first-found", "ipv6: first-found"})
		}
	}
	if c.conf.CNIVersion != "" {
		list = append(list, edit{"      manage: true\n", "      manage: true\n      version: " + c.conf.CNIVersion + "\n"})
	}
	if c.conf.Encapsulation != "" {
		list = append(list, edit{"encapsulation: VXLANCrossSubnet", "encapsulation: " + c.conf.Encapsulation}, edit{"encapsulation6: VXLANCrossSubnet", "encapsulation6: " + c.conf.Encapsulation})
	}
	return list
}

// edited returns manifests with changes, each of which is to have something to change.
func edited(manifests string, edits []edit) (string, error) {
	for _, e := range edits {
		if !strings.Contains(manifests, e.from) {
			return "", fmt.Errorf("the manifests have no %q", e.from)
		}
		manifests = strings.ReplaceAll(manifests, e.from, e.to)
	}
	return manifests, nil
}

// startEtcd starts the etcd that Calico's resources are in, if they are in one.
func (c *Cluster) startEtcd(ctx context.Context) (err error) {
	if c.conf.Datastore != Etcd {
		return nil
	}
	dir := filepath.Join(c.dir, "datastore")
	c.etcd, err = embedded.Start(ctx, embedded.Config{
		Dir: filepath.Join(dir, "etcd"), Socket: filepath.Join(dir, "etcd.sock"),
		Listen: netip.AddrPortFrom(c.families[0].controlPlane, 0),
	})
	return err
}

// EtcdURL is where the etcd is that Calico's resources are in.
func (c *Cluster) EtcdURL() string { return "https://" + c.etcd.Listen().String() }

// EtcdFiles are what a client of that etcd wants, by the names that the Secret routerd-etcd has.
func (c *Cluster) EtcdFiles() map[string]string {
	ca, cert, key := embedded.ClientFiles(c.etcd.PKIDir())
	return map[string]string{"ca.crt": ca, "tls.crt": cert, "tls.key": key}
}

// install applies routerd's manifests as a user does, with what has to be there before.
func (c *Cluster) install(ctx context.Context) error {
	dir, err := c.conf.Datastore.manifests()
	if err != nil {
		return err
	}
	definitions := slices.Clone(c.conf.Definitions)
	if c.conf.Datastore == V1 {
		definitions = append(definitions, filepath.Join(c.conf.Manifests, "crds", "crd.projectcalico.org.yaml"))
	}
	for _, file := range definitions {
		if _, err := c.Kubectl(ctx, "", "apply", "--server-side", "-f", file); err != nil {
			return err
		}
		if _, err := c.Kubectl(ctx, "", "wait", "--for=condition=Established", "--timeout=2m", "-f", file); err != nil {
			return err
		}
	}
	if c.conf.Datastore == Etcd {
		args := []string{"-n", "kube-system", "create", "secret", "generic", "routerd-etcd"}
		for name, file := range c.EtcdFiles() {
			args = append(args, "--from-file="+name+"="+file)
		}
		if _, err := c.Kubectl(ctx, "", args...); err != nil {
			return err
		}
	}
	text, err := c.Kubectl(ctx, "", "kustomize", filepath.Join(c.conf.Manifests, dir))
	if err != nil {
		return err
	}
	if text, err = edited(text, c.edits()); err != nil {
		return err
	}
	_, err = c.Kubectl(ctx, text, "apply", "--server-side", "-f", "-")
	return err
}

// Apply has routerctl write resources of Calico's, wherever the cluster keeps them.
func (c *Cluster) Apply(ctx context.Context, resources string) error {
	cmd := c.Routerctl(ctx, "apply", "-f", "-")
	cmd.Stdin = strings.NewReader(resources)
	_, err := output(cmd)
	return err
}

// Routerctl is routerctl as the administrator, away from any daemon.
func (c *Cluster) Routerctl(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, filepath.Join(c.conf.Bin, "routerctl"), args...)
	cmd.Env = []string{"HOME=" + c.dir, "PATH=" + os.Getenv("PATH")}
	if c.conf.Datastore == Etcd {
		files := c.EtcdFiles()
		cmd.Env = append(cmd.Env, "ETCD_ENDPOINTS="+c.EtcdURL(), "ETCD_CA_CERT_FILE="+files["ca.crt"], "ETCD_CERT_FILE="+files["tls.crt"], "ETCD_KEY_FILE="+files["tls.key"])
	} else {
		cmd.Env = append(cmd.Env, "DATASTORE_TYPE=kubernetes", "KUBECONFIG="+c.config)
	}
	return cmd
}
