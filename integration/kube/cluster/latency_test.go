package cluster_test

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/kube/cluster"
)

var (
	readyPods   = flag.Int("ready-pods", 5, "how many pods TestPodsReady starts at once; 100 for the figures in docs/performance.md")
	readyRounds = flag.Int("ready-rounds", 1, "how often")
	addRounds   = flag.Int("add-rounds", 1, "how often TestAddLatency starts its pods with each plugin, in turns; 5 for the figures in docs/performance.md")
)

const (
	timedConflist = "/etc/cni/net.d/00-timed.conflist"
	timedPods     = 10

	// timed is a plugin that executes the one whose name its own has at the end, and
	// writes down how long that takes.
	timed = `#!/bin/sh
type=${0##*/timed-}
in=$(sed "s/timed-$type/$type/")
begin=$(date +%s%N)
printf %s "$in" | "/opt/cni/bin/$type"
code=$?
end=$(date +%s%N)
[ $code != 0 ] || echo "$CNI_COMMAND $type $((end - begin))" >>/var/lib/timed
exit $code
`
)

// TestAddLatency measures how long ADD takes, in the process of the plugin, under a
// kubelet that starts pods at once: routerd's beside that of ptp with host-local, which
// keeps addresses in files of the node and knows of no policy. It asserts that both
// work.
func TestAddLatency(t *testing.T) {
	c := world.Up(t)
	n := c.Nodes[0]
	must := func(stdin string, args ...string) string {
		t.Helper()
		cmd := n.Command(t.Context(), args...)
		cmd.Stdin = strings.NewReader(stdin)
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("%v: %v", args, err)
		}
		return string(out)
	}
	t.Cleanup(func() {
		if _, err := n.Output(context.WithoutCancel(t.Context()), "rm", "-f", timedConflist); err != nil {
			t.Error(err)
		}
	})
	var ours struct{ Plugins []map[string]any }
	if err := json.Unmarshal([]byte(must("", "cat", "/etc/cni/net.d/10-routerd.conflist")), &ours); err != nil || len(ours.Plugins) == 0 {
		t.Fatalf("routerd's conflist: %v", err)
	}
	must("", "cp", "/usr/lib/cni/ptp", "/usr/lib/cni/host-local", "/opt/cni/bin/")
	plugins := []map[string]any{
		{"type": "ptp", "ipam": map[string]any{"type": "host-local", "subnet": "10.200.0.0/24"}},
		ours.Plugins[0],
	}
	all := map[string][]time.Duration{}
	for i := range len(plugins) * *addRounds {
		plugin := plugins[i%len(plugins)]
		name := plugin["type"].(string)
		must(timed, "sh", "-c", "cat >/opt/cni/bin/timed-"+name+" && chmod 755 /opt/cni/bin/timed-"+name+" && rm -f /var/lib/timed")
		chained := maps.Clone(plugin)
		chained["type"] = "timed-" + name
		raw, err := json.Marshal(map[string]any{"cniVersion": "0.4.0", "name": "timed", "plugins": []any{chained}})
		if err != nil {
			t.Fatal(err)
		}
		must(string(raw), "sh", "-c", "cat >/etc/cni/net.d/timed.new && mv /etc/cni/net.d/timed.new "+timedConflist)
		all[name] = append(all[name], addTimes(t, c, n, name)...)
	}
	for _, plugin := range plugins {
		name := plugin["type"].(string)
		took := all[name]
		slices.Sort(took)
		t.Logf("ADD of %-12s %d pods at once, %d times: median %v, 9 of 10 within %v, the longest %v", name+",", timedPods, *addRounds,
			took[len(took)/2].Round(100*time.Microsecond), took[len(took)*9/10].Round(100*time.Microsecond), took[len(took)-1].Round(100*time.Microsecond))
	}
}

// TestPodsReady measures how long as many pods as -ready-pods says take until all are ready that are
// started on one node at once: on routerd's network, beside those that have the node's own, in turns. It asserts that
// they come to be.
func TestPodsReady(t *testing.T) {
	c := world.Up(t)
	took := map[bool][]time.Duration{} // by whether they have the node's network
	for range *readyRounds {
		for _, host := range []bool{true, false} {
			var pods strings.Builder
			for i := range *readyPods {
				fmt.Fprintf(&pods, "---\napiVersion: v1\nkind: Pod\nmetadata: {name: ready-%d, labels: {app: ready}}\nspec: {nodeName: %s, hostNetwork: %t, terminationGracePeriodSeconds: 0, automountServiceAccountToken: false, containers: [{name: c, image: %q, args: [pause]}]}\n",
					i, c.Nodes[0].Name, host, cluster.AgnhostImage)
			}
			begin := time.Now()
			apply(t, c, pods.String(), "apply", "-f", "-")
			kubectl(t, c, "wait", "--for=condition=Ready", "pod", "-l", "app=ready", "--timeout=600s")
			took[host] = append(took[host], time.Since(begin))
			kubectl(t, c, "delete", "pod", "-l", "app=ready", "--wait", "--now")
		}
	}
	t.Logf("%d pods at once on one node until all are ready: with the node's network %v, with routerd's %v; of the shortest %.2f", *readyPods,
		took[true], took[false], slices.Min(took[false]).Seconds()/slices.Min(took[true]).Seconds())
}

// addTimes starts pods on a node with the plugin that is in place there, and returns
// how long each ADD took.
func addTimes(t *testing.T, c *cluster.Cluster, n *cluster.Node, plugin string) (took []time.Duration) {
	t.Helper()
	var pods strings.Builder
	for i := range timedPods {
		fmt.Fprintf(&pods, "---\napiVersion: v1\nkind: Pod\nmetadata: {name: timed-%d, labels: {app: timed}}\nspec: {nodeName: %s, terminationGracePeriodSeconds: 0, containers: [{name: c, image: %q, args: [pause]}]}\n", i, n.Name, cluster.AgnhostImage)
	}
	// The runtime reads the directory when it is told that it changed, and says nothing: a
	// pod shows which plugin it uses.
	await.Until(t, "the runtime uses the plugin", func() error {
		apply(t, c, strings.Split(pods.String(), "---\n")[1], "apply", "-f", "-")
		kubectl(t, c, "wait", "--for=condition=Ready", "pod/timed-0", "--timeout=60s")
		apply(t, c, "", "delete", "pod", "timed-0", "--wait", "--now")
		out, err := n.Output(t.Context(), "cat", "/var/lib/timed")
		if err == nil && !strings.Contains(out, "ADD "+plugin+" ") {
			err = fmt.Errorf("what it did: %q", out)
		}
		return err
	})
	if _, err := n.Output(t.Context(), "rm", "/var/lib/timed"); err != nil {
		t.Fatal(err)
	}
	apply(t, c, pods.String(), "apply", "-f", "-")
	kubectl(t, c, "wait", "--for=condition=Ready", "pod", "-l", "app=timed", "--timeout=120s")
	kubectl(t, c, "delete", "pod", "-l", "app=timed", "--wait", "--now")
	out, err := n.Output(t.Context(), "cat", "/var/lib/timed")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(out) {
		var verb, name string
		var ns int64
		if _, err := fmt.Sscan(line, &verb, &name, &ns); err != nil {
			t.Fatal(err)
		}
		if verb == "ADD" && name == plugin {
			took = append(took, time.Duration(ns))
		}
	}
	if len(took) != timedPods {
		t.Fatalf("%d pods were attached by %s, want %d:\n%s", len(took), plugin, timedPods, out)
	}
	return took
}
