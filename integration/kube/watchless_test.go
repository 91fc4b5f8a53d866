package kube_test

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/kube"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/integration/lab/ns"
)

// podRequests says how often the daemons asked for pods until now: for those of their node ("own"), of all
// other nodes ("others") and of all ("all"), with "whole" where for all that there are. Watches are counted
// when they end.
func podRequests(t *testing.T) map[string]int {
	t.Helper()
	audit, err := server.Audit()
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]int{}
	for a, n := range audit {
		if a.Resource != "pods" || a.Verb != "watch" && a.Verb != "list" || a.Code != http.StatusOK || a.Verb == "list" && !a.Whole {
			continue
		}
		out[requestName(a)] += n
	}
	return out
}

func requestName(a kube.Asked) string {
	of := a.Of
	if of == "" {
		of = "all"
	}
	if a.Whole {
		of += " whole"
	}
	return a.Verb + " " + of
}

func less(all, before map[string]int) map[string]int {
	out := map[string]int{}
	for k, n := range all {
		if n -= before[k]; n > 0 {
			out[k] = n
		}
	}
	return out
}

// metrics returns what a host shows.
func (c *cluster) metrics(host string) string {
	c.t.Helper()
	var text []byte
	err := ns.Do(c.Space(host), func() error {
		conn, err := net.Dial("tcp", metricsAddress)
		if err != nil {
			return err
		}
		defer conn.Close()
		if _, err := io.WriteString(conn, "GET /metrics HTTP/1.0\r\n\r\n"); err != nil {
			return err
		}
		text, err = io.ReadAll(conn)
		return err
	})
	if err != nil {
		c.t.Fatal(err)
	}
	return string(text)
}

// TestWatchesLittle: a daemon follows the pods of its node, and those of others once a policy that is
// in force on its host selects pods: then a pod that such a policy lets nobody but some pods elsewhere in to
// is reached by these and by no others. Started again it goes on with both, and reads neither anew.
func TestWatchesLittle(t *testing.T) {
	none := 0
	top := lab.DefaultTopology(2)
	top.Pods = &none
	began := podRequests(t)
	c := bringUp(t, "w", top)
	for _, where := range []string{"node1/web", "node2/client", "node2/other"} {
		c.run(where)
	}
	c.reach("without a policy", "node2/other", "node1/web", false)
	watches := func(host string) string {
		t.Helper()
		text := c.metrics(host)
		var out []string
		for line := range strings.Lines(text) {
			if rest, ok := strings.CutPrefix(line, `routerd_kubernetes_watches_open{watch="pods`); ok {
				out = append(out, strings.TrimSpace(strings.NewReplacer(`"`, "", "}", "").Replace(rest)))
			}
		}
		slices.Sort(out)
		return strings.Join(out, ", ")
	}
	follows := func(what, host, want string) {
		t.Helper()
		await.Until(t, what, func() error {
			if got := watches(host); got != want {
				return fmt.Errorf("%s has the watches %q, want %q", host, got, want)
			}
			return nil
		})
	}
	own := func(host string) string { return "with spec.nodeName=" + host + " 1" }
	both := func(host string) string { return "with spec.nodeName!=" + host + ",spec.nodeName!= 1, " + own(host) }
	follows("without a policy", "node1", own("node1"))
	follows("without a policy", "node2", own("node2"))

	create(t, "/apis/networking.k8s.io/v1/namespaces/default/networkpolicies", `{"apiVersion":"networking.k8s.io/v1","kind":"NetworkPolicy","metadata":{"name":"web"},"spec":{"podSelector":{"matchLabels":{"app":"web"}},"ingress":[{"from":[{"podSelector":{"matchLabels":{"app":"client"}}}]}]}}`)
	c.reach("a pod that the policy denies", "node2/other", "node1/web", true)
	c.reach("a pod that it allows", "node2/client", "node1/web", false)
	follows("a policy selects pods", "node1", both("node1"))
	follows("it is for none of this host", "node2", own("node2"))

	// A rule that denies whom it selects is in force with all of them.
	create(t, "/apis/projectcalico.org/v3/globalnetworkpolicies", `{"apiVersion":"projectcalico.org/v3","kind":"GlobalNetworkPolicy","metadata":{"name":"deny"},"spec":{"selector":"app == 'other'","ingress":[{"action":"Deny","source":{"selector":"app == 'web'"}},{"action":"Allow"}]}}`)
	c.reach("whom a rule denies by its labels", "node1/web", "node2/other", true)
	c.reach("whom it does not", "node1", "node2/other", false)
	follows("a rule selects pods", "node2", both("node2"))

	c.stop(c.Hosts()...)
	asked := podRequests(t)
	if got := less(asked, began); got["watch all"]+got["watch all whole"] > 0 {
		t.Errorf("all pods were watched: %v", got)
	}
	for _, host := range c.Hosts() {
		if err := c.Restart(t.Context(), host); err != nil {
			t.Fatal(err)
		}
	}
	for _, host := range c.Hosts() {
		if err := c.WaitReady(t.Context(), host); err != nil {
			t.Fatal(err)
		}
		follows("after a restart", host, both(host))
	}
	c.run("node2/client2")
	c.reach("a pod that the policy denies, after a restart", "node2/client2", "node1/web", true)
	c.reach("a pod that it allows, after a restart", "node2/client", "node1/web", false)
	c.stop(c.Hosts()...)
	got := less(podRequests(t), asked)
	t.Logf("after the restart pods were asked for: %v", got)
	for what := range got {
		if strings.HasPrefix(what, "watch") && strings.HasSuffix(what, "whole") {
			t.Errorf("the restart asked for %s: %v", what, got)
		}
	}
	if got["watch own"] == 0 || got["watch others"] == 0 {
		t.Errorf("the restart asked for %v, want both to go on", got)
	}
	forbidden(t)
}
