package cluster_test

import (
	"flag"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/kube"
	"github.com/routerd/routerd/integration/kube/cluster"
)

const rolledAddr = "172.17.0.8"

var rolledRate = flag.Int("requests", 1000, "how many requests a second the Service of TestRollingUpdate is asked")

// rolled has a pod on each node, which is there for a while after it was told to end. By the
// round, and by how many more pods than nodes there may be while they are replaced, and how many less.
const rolled = `
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: rolled}
spec:
  selector: {matchLabels: {app: rolled}}
  minReadySeconds: 4
  updateStrategy: {type: RollingUpdate, rollingUpdate: {maxSurge: %[2]d, maxUnavailable: %[3]d}}
  template:
    metadata: {labels: {app: rolled}, annotations: {round: "%[1]d"}}
    spec:
      containers:
      - name: c
        image: ` + cluster.AnswerImage + `
        lifecycle: {preStop: {sleep: {seconds: 6}}}
        readinessProbe: {httpGet: {path: /healthz, port: 8080}, periodSeconds: 1}
---
apiVersion: v1
kind: Service
metadata: {name: rolled}
spec: {type: LoadBalancer, externalTrafficPolicy: Local, ipFamilies: [IPv4], selector: {app: rolled}, ports: [{port: 80, targetPort: 8081, protocol: UDP}]}
`

// TestRollingUpdate: the pods of a Service with externalTrafficPolicy Local are replaced by Kubernetes' own controller, behind
// its own proxy, while a client outside asks its address by way of a switch with ECMP. No request is lost, whether a node
// has its next pod before the last one ends or is without one meanwhile.
func TestRollingUpdate(t *testing.T) {
	c := switched(t)
	before := asked(t, c)
	create(t, c, fmt.Sprintf(rolled, 0, 1, 0))
	apply(t, c, "", "patch", "service", "rolled", "--subresource=status", "--type=merge", "-p", `{"status":{"loadBalancer":{"ingress":[{"ip":"`+rolledAddr+`"}]}}}`)
	ready := func() {
		t.Helper()
		kubectl(t, c, "rollout", "status", "daemonset/rolled", "--timeout=180s")
		await.Until(t, "all nodes announce the address", func() error {
			nodes, err := c.Announcers(t.Context(), rolledAddr+"/32")
			if err == nil && len(nodes) != len(c.Nodes) {
				err = fmt.Errorf("it is announced by %q", nodes)
			}
			return err
		})
	}
	ready()
	r := kube.StartRequests(t.Context(), kube.RequestsConfig{
		To: netip.MustParseAddrPort(rolledAddr + ":80"), Rate: *rolledRate,
		In:   func(do func() error) error { return do() }, // this program is outside itself
		Ask:  func(uint64) []byte { return []byte("?") },
		Read: func(_ uint64, answer []byte) (string, error) { return string(answer), nil },
	})
	// answering waits until each of the pods that are there has answered.
	answering := func(what string) {
		t.Helper()
		pods := strings.Fields(kubectl(t, c, "get", "pods", "-l", "app=rolled", "-o", "jsonpath={.items[*].metadata.name}"))
		await.Until(t, what, func() error {
			for _, pod := range pods {
				if r.Answered(pod) < 50 {
					return fmt.Errorf("of %q %s has answered %d requests", pods, pod, r.Answered(pod))
				}
			}
			return nil
		})
	}
	answering("at first")
	for i, more := range []int{1, 0} {
		apply(t, c, fmt.Sprintf(rolled, i+1, more, 1-more), "apply", "-f", "-")
		ready()
		answering(fmt.Sprintf("replaced with %d more", more))
	}
	result, err := r.End()
	if err != nil {
		t.Fatal(err)
	}
	t.Log(result)
	if len(result.Lost) > 0 {
		t.Errorf("lost: %q", result.Lost[:min(len(result.Lost), 20)])
	}
	refusedSince(t, c, before)
}
