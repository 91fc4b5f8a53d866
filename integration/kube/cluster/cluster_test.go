package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/kube"
	"github.com/routerd/routerd/integration/kube/cluster"
)

// kubectl runs kubectl as the administrator.
func kubectl(t *testing.T, c *cluster.Cluster, args ...string) string {
	t.Helper()
	return apply(t, c, "", args...)
}

// apply is kubectl with something to read.
func apply(t *testing.T, c *cluster.Cluster, stdin string, args ...string) string {
	t.Helper()
	out, err := c.Kubectl(context.WithoutCancel(t.Context()), stdin, args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// create applies objects that go with the test.
func create(t *testing.T, c *cluster.Cluster, objects string) {
	t.Helper()
	t.Cleanup(func() { apply(t, c, objects, "delete", "--ignore-not-found", "--wait", "-f", "-") })
	apply(t, c, objects, "apply", "-f", "-")
}

// asked is what daemons have asked the API for.
func asked(t *testing.T, c *cluster.Cluster) map[kube.Asked]int {
	t.Helper()
	asked, err := c.Audit()
	if err != nil {
		t.Fatal(err)
	}
	return asked
}

// refused fails the test if a daemon asked the API for what its rights do not allow.
func refused(t *testing.T, c *cluster.Cluster) {
	t.Helper()
	refusedSince(t, c, nil)
}

// refusedSince is refused, of what was asked for after before.
func refusedSince(t *testing.T, c *cluster.Cluster, before map[kube.Asked]int) {
	t.Helper()
	for a, n := range asked(t, c) {
		if n -= before[a]; n == 0 {
			continue
		}
		if a.Refused() {
			t.Errorf("%d times refused: %+v", n, a)
		}
	}
}

// daemons returns the status of every process of routerd in /proc.
func daemons(t *testing.T) (statuses []string) {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/status")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		if raw, err := os.ReadFile(f); err == nil && strings.HasPrefix(string(raw), "Name:\trouterd\n") {
			statuses = append(statuses, string(raw))
		}
	}
	return statuses
}

// smallResident is what a daemon may have resident on a small cluster, in kB as in /proc.
const smallResident = 60_000_000 / 1024

// resident returns what each daemon has resident, in kB.
func resident(t *testing.T) (list []int) {
	t.Helper()
	for _, status := range daemons(t) {
		_, rest, found := strings.Cut(status, "\nVmRSS:")
		f := strings.Fields(rest)
		if !found || len(f) == 0 {
			t.Fatalf("a status without VmRSS:\n%s", status)
		}
		n, err := strconv.Atoi(f[0])
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, n)
	}
	return list
}

// TestDaemonSet: the daemons that the manifests bring up are not privileged, have the
// capabilities that are listed there and no more, were refused nothing, say on the
// Nodes that the network is there, and come to rest with little memory.
func TestDaemonSet(t *testing.T) {
	c := world.Up(t)
	all := daemons(t)
	if len(all) != len(c.Nodes) {
		t.Errorf("there are %d daemons on %d nodes", len(all), len(c.Nodes))
	}
	for _, status := range all {
		// NET_BIND_SERVICE, NET_ADMIN, NET_RAW, SYS_PTRACE, SYS_ADMIN; seccomp with a filter.
		for _, want := range []string{"\nCapEff:\t0000000000283400\n", "\nNoNewPrivs:\t1\n", "\nSeccomp:\t2\n"} {
			if !strings.Contains(status, want) {
				t.Errorf("a daemon's status lacks %q:\n%s", want, status)
			}
		}
	}
	await.Until(t, "every Node has its network", func() error {
		out := kubectl(t, c, "get", "nodes", "-o", `jsonpath={range .items[*]}{range .status.conditions[?(@.type=="NetworkUnavailable")]}{.status} {.reason}{end} {.spec.taints}{"\n"}{end}`)
		if want := strings.Repeat("False RouterdIsUp \n", len(c.Nodes)); out != want {
			return fmt.Errorf("conditions and taints are:\n%s", out)
		}
		return nil
	})
	out := kubectl(t, c, "-n", "kube-system", "exec", "daemonset/routerd", "--", "routerctl", "get", "nodes")
	if got := strings.Count(out, "node"); got < len(c.Nodes) {
		t.Errorf("routerctl in the container knows these nodes:\n%s", out)
	}
	await.Until(t, "daemons have little resident", func() error {
		if most := slices.Max(resident(t)); most > smallResident {
			return fmt.Errorf("one has %d kB, want at most %d", most, smallResident)
		}
		return nil
	})
	t.Logf("resident: %d kB", resident(t))
	// What daemons ask for is apart from what others do.
	const dispatched = `apiserver_flowcontrol_dispatched_requests_total{flow_schema="routerd",priority_level="routerd"} `
	if metrics := kubectl(t, c, "get", "--raw", "/metrics"); !regexp.MustCompile(`(?m)^` + regexp.QuoteMeta(dispatched) + `[1-9]`).MatchString(metrics) {
		t.Errorf("the API server says no %s", dispatched)
	}
	refused(t, c)
}

// serviceRanges is what the cluster announces of Services.
const serviceRanges = `
apiVersion: projectcalico.org/v3
kind: BGPConfiguration
metadata: {name: default}
spec: {serviceLoadBalancerIPs: [{cidr: 172.17.0.0/24}, {cidr: "fd00:172:17::/64"}]}
`

// balancer is an address of those ranges and of the family that a Service has first, and what
// addresses of the lab's hosts begin with there.
func balancer() (addr netip.Addr, hosts string) {
	if f := world.Config.Families; len(f) > 0 && f[0] == dataplane.IPv6 {
		return netip.MustParseAddr("fd00:172:17::7"), "[fd00:10:199:"
	}
	return netip.MustParseAddr("172.17.0.7"), "10.199."
}

// switched returns the cluster with a switch that its nodes announce addresses of Services to.
func switched(t *testing.T) *cluster.Cluster {
	t.Helper()
	c := world.Up(t)
	if err := c.StartSwitch(await.Context(t)); err != nil {
		t.Fatal(err)
	}
	if err := c.Apply(t.Context(), serviceRanges); err != nil {
		t.Fatal(err)
	}
	return c
}

const web = `
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: web}
spec:
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      terminationGracePeriodSeconds: 0
      containers:
      - name: c
        image: ` + cluster.AgnhostImage + `
        args: [netexec, --http-port=8080, --udp-port=8081]
        readinessProbe: {httpGet: {path: /healthz, port: 8080}, periodSeconds: 1}
---
apiVersion: v1
kind: Service
metadata: {name: web}
spec: {type: LoadBalancer, externalTrafficPolicy: Local, selector: {app: web}, ports: [{port: 80, targetPort: 8080}]}
---
apiVersion: v1
kind: Namespace
metadata: {name: other}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: client, namespace: other}
spec:
  selector: {matchLabels: {app: client}}
  template:
    metadata: {labels: {app: client}}
    spec:
      terminationGracePeriodSeconds: 0
      containers: [{name: c, image: ` + cluster.AgnhostImage + `, args: [pause]}]
`

const onlyWeb = `
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: only-web}
spec:
  podSelector: {matchLabels: {app: web}}
  policyTypes: [Ingress]
  ingress: [{from: [{podSelector: {matchLabels: {app: web}}}], ports: [{port: 8080}]}]
`

// source is who asks: its name, how a shell is run there, and where agnhost is.
type source struct {
	name    string
	shell   func(script string) *exec.Cmd
	agnhost string
}

// target is who is asked: its name, and its address with a port.
type target struct{ name, at string }

// table asks every target from every source, all at once, and returns who answered.
func table(t *testing.T, sources []source, targets []target) (rows map[string]string, text string) {
	t.Helper()
	outs := make([]string, len(sources))
	done := make(chan error, len(sources))
	for i, from := range sources {
		script := ""
		for i, to := range targets {
			script += fmt.Sprintf("(%s connect --timeout=3s %s >/dev/null 2>&1 && echo %d yes || echo %[3]d -) & ", from.agnhost, to.at, i)
		}
		script += "wait"
		go func() {
			raw, err := from.shell(script).Output()
			outs[i] = string(raw)
			if err != nil {
				err = fmt.Errorf("ask from %s: %w", from.name, err)
			}
			done <- err
		}()
	}
	for range sources {
		if err := <-done; err != nil {
			t.Fatal(err)
		}
	}
	rows = map[string]string{}
	text = "| from \\ to |"
	for _, to := range targets {
		text += " " + to.name + " |"
	}
	for i, from := range sources {
		text += "\n| " + from.name + " |"
		row := ""
		for j := range targets {
			answer := "-"
			if strings.Contains("\n"+outs[i], fmt.Sprintf("\n%d yes\n", j)) {
				answer = "yes"
			}
			row += " " + answer
			text += " " + answer + " |"
		}
		rows[from.name] = strings.TrimSpace(row)
	}
	return rows, text
}

// probed sends a packet from the client to a Service and to a port of another node, and finds where the proxy of Services, which
// translates it, has sent it.
func probed(t *testing.T, c *cluster.Cluster, serviceIP string) {
	t.Helper()
	here := kubectl(t, c, "-n", "other", "get", "pods", "-l", "app=client", "-o", "jsonpath={.items[0].spec.nodeName}")
	client := kubectl(t, c, "-n", "other", "get", "pods", "-l", "app=client", "-o", "jsonpath={.items[0].metadata.name}")
	daemon := kubectl(t, c, "-n", "kube-system", "get", "pods", "-l", "app.kubernetes.io/name=routerd", "--field-selector", "spec.nodeName="+here, "-o", "jsonpath={.items[0].metadata.name}")
	port := kubectl(t, c, "get", "service", "web", "-o", "jsonpath={.spec.ports[0].nodePort}")
	there := c.Nodes[0].Name
	if there == here {
		there = c.Nodes[1].Name
	}
	const addr = `[0-9a-f:.\[\]]+`
	for _, tt := range []struct {
		to, sent  string
		elsewhere bool // what happens there is not seen
	}{
		{to: "service/default/web", sent: regexp.QuoteMeta(netip.AddrPortFrom(netip.MustParseAddr(serviceIP), 80).String())},
		{to: here + ":" + port, sent: addr + `:` + port},
		{to: there + ":" + port, sent: addr + `:` + port, elsewhere: world.Config.Datastore != cluster.Etcd}, // hosts whose datastore is the API do not ask each other
	} {
		await.Until(t, "a packet to "+tt.to, func() error {
			out, err := c.Kubectl(t.Context(), "", "-n", "kube-system", "exec", daemon, "--", "routerctl", "trace", "--from", "other/"+client, "--to", tt.to, "--probe")
			if err != nil { // the exit code, as the way is unknown
				out += err.Error()
			}
			endpoint, result := addr+`:8080`, `it arrived at `+addr+`:8080 \(default/web-\w+\), and its answer came back`
			if tt.elsewhere {
				endpoint, result = tt.sent, "it arrived, and its answer came back"
			}
			for _, want := range []string{
				`(?m)^ *probe: ` + result + `$`,
				`(?m)^ *` + here + ` +packet +in +cali\w+ +\d+ +[0-9a-f:.]+ +` + tt.sent + `$`,
				` +packet +out +\S+ +\d+ +[0-9a-f:.]+ +` + endpoint + `\n`,
				`(?m)^ *` + here + ` +answer +out +cali\w+ +\d+ +` + tt.sent + ` +[0-9a-f:.]+$`,
			} {
				if !regexp.MustCompile(want).MatchString(out) {
					return fmt.Errorf("no %q in\n%s", want, out)
				}
			}
			return nil
		})
	}
}

// within reports whether an address is in one of some prefixes.
func within(addr string, prefixes []string) bool {
	a, err := netip.ParseAddr(addr)
	return err == nil && slices.ContainsFunc(prefixes, func(s string) bool {
		p, err := netip.ParsePrefix(s)
		return err == nil && p.Contains(a)
	})
}

// TestReach: pods of every node, Services, hosts and who is outside of the cluster reach
// each other, and a NetworkPolicy leaves what it allows. A load balancer's address is
// announced to the switch by the nodes that have an endpoint, with the client's address
// kept.
func TestReach(t *testing.T) {
	c := switched(t)
	create(t, c, web)
	balancer, hosts := balancer()
	announced := netip.PrefixFrom(balancer, balancer.BitLen()).String()
	apply(t, c, "", "patch", "service", "web", "--subresource=status", "--type=merge", "-p", fmt.Sprintf(`{"status":{"loadBalancer":{"ingress":[{"ip":%q}]}}}`, balancer))
	kubectl(t, c, "rollout", "status", "daemonset/web", "--timeout=90s")
	kubectl(t, c, "-n", "other", "rollout", "status", "deployment/client", "--timeout=90s")

	_, kubeBin := cluster.Programs(t)
	agnhost := filepath.Join(kubeBin, "agnhost")
	sources, targets := []source{}, []target{}
	families := max(1, len(world.Config.Families))
	inPod := func(namespace, name string) func(string) *exec.Cmd {
		return func(script string) *exec.Cmd {
			return c.KubectlCommand(t.Context(), "-n", namespace, "exec", name, "--", "sh", "-c", script)
		}
	}
	for line := range strings.Lines(kubectl(t, c, "get", "pods", "-l", "app=web", "--sort-by=.spec.nodeName", "-o", `jsonpath={range .items[*]}{.metadata.name} {.spec.nodeName} {.status.podIPs[*].ip}{"\n"}{end}`)) {
		f := strings.Fields(line)
		sources = append(sources, source{"web on " + f[1], inPod("default", f[0]), "/agnhost"})
		if len(f) != 2+families {
			t.Fatalf("a pod and its node and addresses: %q; want %d addresses", f, families)
		}
		for _, addr := range f[2:] {
			if cidrs := strings.Fields(kubectl(t, c, "get", "node", f[1], "-o", "jsonpath={.spec.podCIDRs[*]}")); world.Config.Datastore == cluster.PodCIDR && !within(addr, cidrs) {
				t.Errorf("the pod on %s has %s, which is in none of %q", f[1], addr, cidrs)
			}
			await.Until(t, "the datastore knows whose "+addr+" is", func() error {
				out, err := c.Routerctl(t.Context(), "ipam", "show", "--ip="+addr).CombinedOutput()
				if err == nil && !strings.Contains(string(out), f[0]) {
					err = errors.New("that of another")
				}
				if err != nil {
					return fmt.Errorf("it is to be that of %s: %w: %s", f[0], err, out)
				}
				return nil
			})
		}
		for i, addr := range f[2:] { // first all of one family, then all of the next
			targets = slices.Insert(targets, len(sources)-1+i*len(sources), target{fmt.Sprintf("web on %s, %s", f[1], addr), net.JoinHostPort(addr, "8080")})
		}
	}
	serviceIP := kubectl(t, c, "get", "service", "web", "-o", "jsonpath={.spec.clusterIP}")
	targets = append(targets, target{"Service", net.JoinHostPort(serviceIP, "80")}, target{"load balancer", net.JoinHostPort(balancer.String(), "80")})
	sources = append(sources, source{"client in other", inPod("other", "deployment/client"), "/agnhost"},
		source{"node1", func(script string) *exec.Cmd { return c.Nodes[0].Command(t.Context(), "sh", "-c", script) }, agnhost},
		source{"outside", func(script string) *exec.Cmd { return exec.CommandContext(t.Context(), "sh", "-c", script) }, agnhost})

	n := len(c.Nodes) * families
	yes := func(count int) string { return strings.TrimSpace(strings.Repeat("yes ", count)) }
	no := func(count int) string { return strings.TrimSpace(strings.Repeat("- ", count)) }
	// expect waits until each row begins as wanted.
	expect := func(what string, want map[string]string) {
		t.Helper()
		last := ""
		await.Until(t, what, func() error {
			rows, text := table(t, sources, targets)
			last = text
			for from, row := range want {
				if !strings.HasPrefix(rows[from], row) {
					return fmt.Errorf("from %s: %s; want %s:\n%s", from, rows[from], row, text)
				}
			}
			return nil
		})
		t.Logf("%s:\n%s", what, last)
	}
	probed(t, c, serviceIP)
	everybody := map[string]string{"client in other": yes(n + 2), "node1": yes(n + 2)}
	for _, s := range sources[:len(c.Nodes)] {
		everybody[s.name] = yes(n + 2)
	}
	// The range of Services is announced by nobody here: a client outside has the load
	// balancer's address.
	everybody["outside"] = strings.TrimSpace(yes(n) + " - yes")
	expect("without policy", everybody)

	await.Until(t, "all nodes announce the address: each has an endpoint", func() error {
		nodes, err := c.Announcers(t.Context(), announced)
		if err == nil && len(nodes) != len(c.Nodes) {
			err = fmt.Errorf("it is announced by %q", nodes)
		}
		return err
	})
	// This program is outside itself.
	client := http.Client{Transport: &http.Transport{}, Timeout: 5 * time.Second}
	resp, err := client.Get("http://" + net.JoinHostPort(balancer.String(), "80") + "/clientip")
	if err != nil {
		t.Fatal(err)
	}
	seen, err := io.ReadAll(resp.Body)
	if err = errors.Join(err, resp.Body.Close()); err != nil || !strings.HasPrefix(string(seen), hosts) {
		t.Errorf("the endpoint sees the client as %q, %v", seen, err)
	}
	kubectl(t, c, "label", "node", "node1", "node.kubernetes.io/exclude-from-external-load-balancers=true")
	await.Until(t, "an excluded node announces it no more", func() error {
		nodes, err := c.Announcers(t.Context(), announced)
		if err == nil && (len(nodes) != len(c.Nodes)-1 || slices.Contains(nodes, "node1")) {
			err = fmt.Errorf("it is announced by %q", nodes)
		}
		return err
	})
	kubectl(t, c, "label", "node", "node1", "node.kubernetes.io/exclude-from-external-load-balancers-")

	create(t, c, onlyWeb)
	isolated := map[string]string{
		"client in other": no(n + 2),
		"outside":         no(n + 2),
		// The host's own traffic to its own pods is the kubelet's probes, among others.
		"node1": strings.TrimSpace(strings.Repeat("yes "+no(len(c.Nodes)-1)+" ", families)),
	}
	for _, s := range sources[:len(c.Nodes)] {
		isolated[s.name] = yes(n + 1) // as the load balancer's client a pod is masqueraded
	}
	expect("with a NetworkPolicy", isolated)
	kubectl(t, c, "rollout", "status", "daemonset/web", "--timeout=30s") // the probes pass
	refused(t, c)
}
