package cluster_test

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/kube/cluster"
	"github.com/routerd/routerd/store"
)

// becomeCalico makes of what routerd left in a node's kernel and on its disk what Calico has there: pods' and
// blocks' routes with its protocols, devices without an alias, its conflist, and nothing that is routerd's alone.
// Packets flow meanwhile.
const becomeCalico = `set -eu
for f in -4 -6; do
	ip $f route show proto 77 | sed -e 's/ nhid [0-9]*//' -e 's/ metric [0-9]*//' -e 's/ pref [a-z]*//' >/run/routes$f
	while read -r r; do ip $f route add $r proto 99 metric 4096; done </run/routes$f
done
ip nexthop flush proto 77 >/dev/null # of both families, and their routes
for f in -4 -6; do
	ip $f route flush proto 77
	while read -r r; do
		case $r in
		blackhole*) ip $f route add $r proto 80 ;;
		*) ip $f route add $r ;;
		esac
	done </run/routes$f
	rm /run/routes$f
	ip $f route flush proto 99
done
for d in $(ip -o link | sed -n -e 's/^[0-9]*: \(cali[^:@]*\)[:@].*/\1/p' -e 's/^[0-9]*: \(vxlan[^:@]*calico\)[:@].*/\1/p'); do
	ip link set dev $d alias ''
done
for t in routerd routerd-flows; do
	nft delete table inet $t 2>/dev/null || true
done
rm -rf /run/routerd /var/lib/routerd
cd /etc/cni/net.d
sed -e 's/"routerd-cni"/"calico"/' 10-routerd.conflist >10-calico.conflist
rm 10-routerd.conflist
`

// TestCalicoBecomesDaemonSet: a node as Calico leaves it, with a pod that its kubelet runs, is taken over by the
// DaemonSet. The pod keeps its address and its network, and the kubelet can end it.
func TestCalicoBecomesDaemonSet(t *testing.T) {
	c := world.Up(t)
	n := c.Nodes[len(c.Nodes)-1]
	s := &hostService{t: t, c: c, n: n}
	before := asked(t, c)
	create(t, c, upgraded)
	kubectl(t, c, "rollout", "status", "daemonset/upgraded", "--timeout=90s")
	t.Cleanup(func() {
		kubectl(t, c, "label", "node", n.Name, "routerd.io/daemon-")
		kubectl(t, c, "uncordon", n.Name)
		kubectl(t, c, "-n", "kube-system", "rollout", "status", "daemonset/routerd", "--timeout=120s")
	})
	kubectl(t, c, "cordon", n.Name)
	s.pods(false)
	s.on("sh", "-c", becomeCalico)
	forgetRouterd(t, c, n)

	requests, addrs := ask(t, c)
	old := addrs[len(addrs)-1]
	s.on("mv", "/etc/cni/net.d/10-calico.conflist", "/root/")
	s.pods(true)
	kubectl(t, c, "uncordon", n.Name)
	s.says("RouterdIsUp")
	if out := kubectl(t, c, "-n", "kube-system", "logs", s.pod()); !strings.Contains(out, `msg="workloads that Calico attached are taken over"`) || strings.Contains(out, "start it anew") {
		t.Errorf("the daemon says\n%s", out)
	}
	await.Until(t, "the pod's route is routerd's", func() error {
		if out := s.on("ip", "route", "show", old, "proto", "77"); !strings.Contains(out, "cali") {
			return errors.New(s.on("ip", "route"))
		}
		return nil
	})
	requests.answered("after the takeover")
	requests.end()

	kubectl(t, c, "delete", "daemonset", "upgraded")
	s.endsClean(old)
	create(t, c, s.podAfter())
	kubectl(t, c, "wait", "--for=condition=Ready", "pod/after", "--timeout=60s")
	refusedSince(t, c, before)
}

// forgetRouterd takes from a Node and from IPAM's records in the API what no daemon but routerd's writes there.
func forgetRouterd(t *testing.T, c *cluster.Cluster, n *cluster.Node) {
	t.Helper()
	var node struct {
		Metadata struct{ Annotations map[string]string }
	}
	if err := json.Unmarshal([]byte(kubectl(t, c, "get", "node", n.Name, "-o", "json")), &node); err != nil {
		t.Fatal(err)
	}
	args := []string{"annotate", "node", n.Name}
	for key := range node.Metadata.Annotations {
		if strings.HasPrefix(key, "routerd.io/") || key == "projectcalico.org/annotations" {
			args = append(args, key+"-")
		}
	}
	if len(args) == 3 {
		t.Fatalf("nothing of routerd's is on the Node: %v", node.Metadata.Annotations)
	}
	kubectl(t, c, args...)
	apply(t, c, "", "patch", "node", n.Name, "--subresource=status", "--type=strategic", "-p",
		`{"status":{"conditions":[{"type":"NetworkUnavailable","status":"False","reason":"CalicoIsUp","message":"Calico is running on this node"}]}}`)
	var handles struct {
		Items []struct {
			Metadata struct {
				Name        string
				Annotations map[string]string
			}
		}
	}
	if err := json.Unmarshal([]byte(kubectl(t, c, "get", "ipamhandles", "-o", "json")), &handles); err != nil {
		t.Fatal(err)
	}
	for _, h := range handles.Items {
		if h.Metadata.Annotations[store.AnnotationHandleNode] == n.Name {
			kubectl(t, c, "annotate", "ipamhandle", h.Metadata.Name, store.AnnotationHandleNode+"-")
		}
	}
	if _, err := c.Kubectl(context.WithoutCancel(t.Context()), "", "delete", "ipamhandles", "routerd-reserve-"+n.Name); err != nil {
		t.Fatal(err)
	}
}
