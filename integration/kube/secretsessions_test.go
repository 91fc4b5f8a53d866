package kube_test

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab"
)

// birdPassword has the switch sign its sessions with a password from now on.
func (c *cluster) birdPassword(text string) {
	c.t.Helper()
	dir := filepath.Dir(lab.Socket(c.Name(), spine))
	file := filepath.Join(dir, "bird.conf")
	conf, err := os.ReadFile(file)
	if err != nil {
		c.t.Fatal(err)
	}
	conf = regexp.MustCompile(`(neighbor \S+ as \d+;)( password "[^"]*";)?`).ReplaceAll(conf, fmt.Appendf(nil, `$1 password %q;`, text))
	if err := os.WriteFile(file, conf, 0o600); err != nil {
		c.t.Fatal(err)
	}
	out, err := c.Output(c.t.Context(), spine, "birdc", "-s", filepath.Join(dir, "bird.ctl"), "configure")
	if err != nil || !strings.Contains(out, "Reconfigur") {
		c.t.Fatalf("%v: %s", err, out)
	}
}

// bgpPeer returns a peer of a host's.
func (c *cluster) bgpPeer(host, name string) (*apiv1.BGPPeer, error) {
	n, err := c.Node(c.t.Context(), host)
	if err != nil {
		return nil, err
	}
	for _, p := range n.GetPeers() {
		if p.GetName() == name {
			return p, nil
		}
	}
	return nil, fmt.Errorf("%s has no peer %s: %v", host, name, n.GetPeers())
}

// peerIs waits until a host's session is in a state that says something.
func (c *cluster) peerIs(what, host, name, state, info string) *apiv1.BGPPeer {
	c.t.Helper()
	var got *apiv1.BGPPeer
	await.Until(c.t, what, func() (err error) {
		got, err = c.bgpPeer(host, name)
		if err == nil && (got.GetState() != state || !strings.Contains(got.GetInfo(), info)) {
			err = fmt.Errorf("%s of %s: %v", name, host, got)
		}
		return err
	})
	return got
}

// TestSecretSessions: daemons with the rights of the manifests run sessions with passwords out of a Secret: with BIRD, and with each
// other. Without the Secret they are down, and say what is missing. When it holds other passwords, those of the mesh go on, with
// what is announced meanwhile; that with BIRD, which ends a session of its own whose password it is to change, is up again. A restart while
// the API is away has them up too.
func TestSecretSessions(t *testing.T) {
	top := lab.DefaultTopology(2)
	top.Pods, top.Spine.BGP = new(int), new(true)
	c := bringUp(t, "p", top)
	const node1, node2, tor1, tor2 = "node1", "node2", "spine-node1", "spine-node2"
	secret := func(args ...string) { kubectl(t, append([]string{"-n", "kube-system"}, args...)...) }

	c.birdPassword("switch")
	for _, name := range []string{tor1, tor2} {
		kubectl(t, "patch", "bgppeers.projectcalico.org", name, "--type=merge", "-p", `{"spec":{"password":{"secretKeyRef":{"name":"bgp-secrets","key":"tor"}}}}`)
	}
	kubectlWith(t, "{apiVersion: projectcalico.org/v3, kind: BGPConfiguration, metadata: {name: default}, spec: {nodeMeshPassword: {secretKeyRef: {name: bgp-secrets, key: mesh}}}}",
		"apply", "--server-side", "--force-conflicts", "-f", "-")
	c.peerIs("without the Secret", node1, tor1, "down", "bgp-secrets")
	c.peerIs("without the Secret", node1, node2, "down", "bgp-secrets")

	t.Cleanup(func() { secret("delete", "--ignore-not-found", "secret", "bgp-secrets") })
	secret("create", "secret", "generic", "bgp-secrets", "--from-literal=tor=switch", "--from-literal=mesh=ours")
	c.peerIs("with the password", node1, tor1, "up", "")
	c.peerIs("with the password", node2, tor2, "up", "")
	up := c.peerIs("with the password", node1, node2, "up", "").GetSince().AsTime()

	// inject has the first host announce a prefix, and waits until its peers have it.
	inject := func(prefix string) {
		t.Helper()
		if _, err := c.Output(t.Context(), node1, filepath.Join(abs(t, binDir(t)), "routerctl"), "--socket", lab.Socket(c.Name(), node1), "bgp", "inject", "add", prefix, "--owner", prefix, "--ttl", "1h"); err != nil {
			t.Fatal(err)
		}
		await.Until(t, "the other host hears of "+prefix, func() error {
			out, err := c.Output(t.Context(), node2, filepath.Join(abs(t, binDir(t)), "routerctl"), "--socket", lab.Socket(c.Name(), node2), "bgp", "received", node1)
			if err == nil && !strings.Contains(out, prefix) {
				err = fmt.Errorf("it has:\n%s", out)
			}
			return err
		})
		c.announced("the switch hears of it", prefix, node1)
	}
	inject("203.0.113.0/28")
	secret("patch", "secret", "bgp-secrets", "-p", `{"stringData":{"tor":"switch anew","mesh":"ours anew"}}`)
	c.birdPassword("switch anew")
	c.peerIs("with the other password", node2, tor2, "up", "")
	inject("203.0.113.16/28")
	for _, of := range [][2]string{{node1, node2}, {node2, node1}} {
		p := c.peerIs("the mesh", of[0], of[1], "up", "")
		if since := p.GetSince().AsTime(); since.After(up.Add(time.Second)) {
			t.Errorf("the session of %s with %s was up since %s, and is since %s", of[0], of[1], up, since)
		}
	}

	heal := c.forwards[node1].Cut()
	if err := c.Kill(t.Context(), node1, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := c.Start(t.Context(), node1); err != nil {
		t.Fatal(err)
	}
	c.peerIs("started while the API is away", node1, tor1, "up", "")
	c.peerIs("started while the API is away", node1, node2, "up", "")
	heal()
	forbidden(t)
}
