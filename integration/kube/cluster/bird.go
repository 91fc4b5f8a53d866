package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
)

// StartSwitch starts BIRD on the router as the nodes' top-of-rack switch, which learns
// from all of them and puts what it learns into its kernel, and has all nodes peer with
// it. It shares traffic by flows, and leaves nodes that are about to go (RFC 8326). Where pods' packets are in no tunnel it tells the nodes of one rack where those of
// others are. If it runs already nothing happens.
func (c *Cluster) StartSwitch(ctx context.Context) error {
	if c.switched {
		return nil
	}
	c.switched = true
	bird := "bird"
	if _, err := exec.LookPath(bird); err != nil {
		bird = "/usr/sbin/bird"
	}
	var conf, peers strings.Builder
	fmt.Fprintf(&conf, "log stderr all;\nrouter id %s;\nprotocol device {}\n", familyOf(dataplane.IPv4).controlPlane)
	for _, f := range c.families {
		if err := os.WriteFile("/proc/sys/net/"+f.hashing, []byte("1"), 0o644); err != nil {
			return err
		}
		export := "none"
		if c.conf.Encapsulation == string(store.Direct) {
			export = "where net ~ [ " + f.pods + "+ ]"
		}
		fmt.Fprintf(&conf, "protocol kernel { merge paths on; %s { import none; export where source = RTS_BGP; }; }\n", f.bird())
		for _, n := range c.Nodes {
			fmt.Fprintf(&conf, "protocol bgp %s_%s { local %s as %d; neighbor %s as %d; connect delay time 1; connect retry time 2; error wait time 1, 4; %[2]s { import filter { if (65535, 0) ~ bgp_community then bgp_local_pref = 0; accept; }; export %[7]s; }; }\n",
				n.Name, f.bird(), f.host(n.Rack, 1), switchAS, n.addr(f), nodeAS, export)
		}
		for rack := 1; rack <= c.racks(); rack++ {
			// Those of other racks are of the same AS.
			fmt.Fprintf(&peers, "---\napiVersion: projectcalico.org/v3\nkind: BGPPeer\nmetadata: {name: rack%d-%s}\nspec: {nodeSelector: \"topology.kubernetes.io/zone == 'rack%[1]d'\", peerIP: %[3]q, asNumber: %d, numAllowedLocalASNumbers: 1}\n",
				rack, f.bird(), f.host(rack, 1).String(), switchAS)
		}
	}
	file := filepath.Join(c.dir, "bird.conf")
	if err := os.WriteFile(file, []byte(conf.String()), 0o600); err != nil {
		return err
	}
	p, err := start(filepath.Join(c.dir, "bird.log"), exec.Command(bird, "-f", "-c", file, "-s", c.birdSocket()))
	if err != nil {
		return err
	}
	c.controllers = append(c.controllers, p)
	err = poll(ctx, "BIRD answers", func() error {
		_, err := c.Bird(ctx, "show", "status")
		return err
	}, p)
	if err != nil {
		return err
	}
	return c.Apply(ctx, peers.String())
}

func (c *Cluster) birdSocket() string { return filepath.Join(c.dir, "bird.ctl") }

// Bird asks the switch.
func (c *Cluster) Bird(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, "birdc", append([]string{"-s", c.birdSocket()}, args...)...)
	if errors.Is(cmd.Err, exec.ErrNotFound) {
		cmd = exec.CommandContext(ctx, "/usr/sbin/birdc", cmd.Args[1:]...)
	}
	return output(cmd)
}

// Announcers returns the nodes that announce exactly this prefix to the switch.
func (c *Cluster) Announcers(ctx context.Context, prefix string) ([]string, error) {
	out, err := c.Bird(ctx, "show", "route", prefix, "all")
	if err != nil && !strings.Contains(out, "Network not found") {
		return nil, err
	}
	var nodes []string
	for _, n := range c.Nodes {
		if strings.Contains(out, "["+n.Name+"_") {
			nodes = append(nodes, n.Name)
		}
	}
	return nodes, nil
}
