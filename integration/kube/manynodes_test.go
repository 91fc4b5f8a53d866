package kube_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab"
)

var (
	manyNodes = flag.Int("nodes", 20, "how many Nodes beside its own TestManyNodes has")
	manyPods  = flag.Int("pods", 5, "how many pods each of these has")
	mesh      = flag.Bool("mesh", true, "whether the daemons have a BGP session with each Node of TestManyNodes, of which none but their own answers; beyond a hundred clusters have reflectors")
	profiles  = flag.String("profiles", "", "a directory for the profiles of memory that TestManyNodes takes of node1's daemon")
)

// manyDaemons is how many of a cluster's nodes are real in TestManyNodes, and manyResident how
// much the daemon of one may have resident at rest, in KiB: 90 MB, also with a thousand nodes
// of five pods.
const manyDaemons, manyResident = 3, 90_000_000 / 1024

// manyBlocks is what these nodes have their blocks of.
const manyBlocks = "10.128.0.0/10"

// many is a cluster of so many nodes, as kubelets and Calico write them.
type many struct {
	t           *testing.T
	nodes, pods int
}

func (m many) node(i int) string   { return fmt.Sprintf("many-%d", i) }
func (m many) pod(i, j int) string { return fmt.Sprintf("many-%d-%d", i, j) }
func (m many) address(i int) netip.Addr {
	return netip.AddrFrom4([4]byte{10, 65, byte(i >> 8), byte(i)})
}

// block is that of a node: 64 addresses, the first its tunnel's.
func (m many) block(i int) netip.Prefix {
	n := i * 64
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(128 + n>>16), byte(n >> 8), byte(n)}), 26)
}

func (m many) blockName(i int) string {
	return strings.NewReplacer(".", "-", "/", "-").Replace(m.block(i).String())
}

// of returns an address of a node's block.
func (m many) of(i, n int) string {
	a := m.block(i).Addr().As4()
	a[3] += byte(n)
	return netip.AddrFrom4(a).String()
}

const (
	nodesPath  = "/api/v1/nodes"
	podsPath   = "/api/v1/namespaces/default/pods"
	calicoPath = "/apis/projectcalico.org/v3/"
)

// make writes all of a node.
func (m many) make(i int) error {
	node := m.node(i)
	images := make([]string, 0, 50)
	for n := range 50 {
		images = append(images, fmt.Sprintf(`{"names":["registry.example/team/program-%d@sha256:%064d","registry.example/team/program-%[1]d:v1.%[1]d"],"sizeBytes":%d}`, n, n, 10_000_000+n))
	}
	ready := func(kind string) string {
		return fmt.Sprintf(`{"type":%q,"status":"False","reason":"KubeletHasSufficient","message":"kubelet has what it needs","lastHeartbeatTime":"2026-01-01T00:00:00Z","lastTransitionTime":"2026-01-01T00:00:00Z"}`, kind)
	}
	w := writer{t: m.t}
	w.post(nodesPath, `{"apiVersion":"v1","kind":"Node","metadata":{"name":%q,"labels":{"kubernetes.io/hostname":%[1]q,"kubernetes.io/os":"linux","kubernetes.io/arch":"amd64","topology.kubernetes.io/zone":"zone-%d"},`+
		`"annotations":{"projectcalico.org/IPv4Address":"%s/24","projectcalico.org/IPv4VXLANTunnelAddr":%q,"projectcalico.org/VXLANTunnelMACAddr":"66:00:00:00:%02x:%02x"}},"spec":{}}`,
		node, i%3, m.address(i), m.of(i, 0), i>>8, i&255)
	w.patch(nodesPath+"/"+node+"/status", `{"status":{"addresses":[{"type":"InternalIP","address":%q},{"type":"Hostname","address":%q}],"nodeInfo":{"bootID":"b","machineID":"m","kubeletVersion":"v1.37.2","osImage":"Debian","kernelVersion":"6.1"},`+
		`"conditions":[%s],"capacity":{"cpu":"8","memory":"32Gi","pods":"110"},"images":[%s]}}`,
		m.address(i), node, strings.Join([]string{ready("MemoryPressure"), ready("DiskPressure"), ready("PIDPressure"), ready("Ready")}, ","), strings.Join(images, ","))
	allocations, unallocated, attributes := []string{"0"}, []string{}, []string{fmt.Sprintf(`{"handle_id":"vxlan-tunnel-addr-%s","secondary":{"node":%[1]q,"type":"vxlanTunnelAddress"}}`, node)}
	for n := 1; n < 64; n++ {
		if n > m.pods {
			allocations, unallocated = append(allocations, "null"), append(unallocated, strconv.Itoa(n))
			continue
		}
		allocations = append(allocations, strconv.Itoa(n))
		attributes = append(attributes, fmt.Sprintf(`{"handle_id":"k8s-pod-network.%064d","secondary":{"namespace":"default","node":%q,"pod":%q,"timestamp":"2026-01-01 00:00:00 +0000 UTC"}}`, n, node, m.pod(i, n-1)))
	}
	w.post(calicoPath+"blockaffinities", `{"apiVersion":"projectcalico.org/v3","kind":"BlockAffinity","metadata":{"name":"%s-%s"},"spec":{"cidr":%q,"node":%[1]q,"state":"confirmed","type":"host"}}`, node, m.blockName(i), m.block(i))
	w.post(calicoPath+"ipamblocks", `{"apiVersion":"projectcalico.org/v3","kind":"IPAMBlock","metadata":{"name":%q},"spec":{"cidr":%q,"affinity":"host:%s","allocations":[%s],"unallocated":[%s],"attributes":[%s],"strictAffinity":false,"sequenceNumber":1}}`,
		m.blockName(i), m.block(i), node, strings.Join(allocations, ","), strings.Join(unallocated, ","), strings.Join(attributes, ","))
	for j := range m.pods {
		name, ip := m.pod(i, j), m.of(i, j+1)
		container := `{"name":%q,"image":"registry.example/team/program-%d:v1","ports":[{"name":"http","containerPort":8080}],"env":[{"name":"A","value":"some value"},{"name":"B","value":"another value"}],"resources":{"requests":{"cpu":"100m","memory":"64Mi"}}}`
		w.post(podsPath, `{"apiVersion":"v1","kind":"Pod","metadata":{"name":%q,"labels":{"app":"program-%d","pod-template-hash":"6c8b449b8f","team":"team-%d"}},"spec":{"nodeName":%q,"automountServiceAccountToken":false,"containers":[%s,%s]}}`,
			name, j, i%10, node, fmt.Sprintf(container, "main", j), fmt.Sprintf(container, "sidecar", j+100))
		w.patch(podsPath+"/"+name+"/status", `{"metadata":{"annotations":{"cni.projectcalico.org/podIP":"%s/32","cni.projectcalico.org/podIPs":"%[1]s/32","cni.projectcalico.org/containerID":"%064d"}}}`, ip, j)
		w.patch(podsPath+"/"+name+"/status", `{"status":{"phase":"Running","podIP":%q,"podIPs":[{"ip":%[1]q}],"hostIP":%q,"conditions":[%s],"containerStatuses":[{"name":"main","image":"registry.example/team/program:v1","imageID":"sha256:%064d","ready":true,"restartCount":0,"state":{"running":{"startedAt":"2026-01-01T00:00:00Z"}}}]}}`,
			ip, m.address(i), strings.Join([]string{ready("Initialized"), ready("Ready"), ready("ContainersReady"), ready("PodScheduled")}, ","), j)
	}
	return w.err
}

// remove deletes all of a node.
func (m many) remove(i int) error {
	paths := []string{nodesPath + "/" + m.node(i), calicoPath + "ipamblocks/" + m.blockName(i), calicoPath + "blockaffinities/" + m.node(i) + "-" + m.blockName(i)}
	for j := range m.pods {
		paths = append(paths, podsPath+"/"+m.pod(i, j)+"?gracePeriodSeconds=0")
	}
	var errs []error
	for _, path := range paths {
		_, err := server.Do(context.WithoutCancel(m.t.Context()), http.MethodDelete, path, "", nil)
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// writer writes until something fails.
type writer struct {
	t   *testing.T
	err error
}

func (w *writer) do(method, path, contentType, format string, args []any) {
	if w.err != nil {
		return
	}
	// A server that is busy may be late with the Lease by which it admits the status of a Node;
	// kubelets try again too.
	for range 5 {
		_, w.err = server.Do(w.t.Context(), method, path, contentType, fmt.Appendf(nil, format, args...))
		if w.err == nil || !strings.Contains(w.err.Error(), "failed to configure binding") {
			return
		}
	}
}

func (w *writer) post(path, format string, args ...any) {
	w.do(http.MethodPost, path, "application/json", format, args)
}

func (w *writer) patch(path, format string, args ...any) {
	w.do(http.MethodPatch, path, "application/strategic-merge-patch+json", format, args)
}

// load is what a phase cost the API server and a daemon.
type load struct {
	c              *cluster
	what           string
	begin          time.Time
	server, daemon used
	sent           map[string]float64
}

// begin begins a phase; the daemon may be one that has not started.
func (c *cluster) begin(what string, daemon used) *load {
	c.t.Helper()
	return &load{c: c, what: what, begin: time.Now(), server: usedBy(c.t, server.PID()), daemon: daemon, sent: c.sent()}
}

// end reports the phase, once the daemon rests, which is to have no more than manyResident then.
func (l *load) end() {
	l.c.t.Helper()
	l.c.rests()
	api, daemon := usedBy(l.c.t, server.PID()), l.c.used("node1")
	l.profile()
	if daemon.resident > manyResident {
		l.c.t.Errorf("%s: the daemon has %d KiB resident at rest, want at most %d", l.what, daemon.resident, manyResident)
	}
	api.cpu -= l.server.cpu
	daemon.cpu -= l.daemon.cpu
	var sent []string
	for resource, n := range l.c.sent() {
		if n -= l.sent[resource]; n > 1e5 {
			sent = append(sent, fmt.Sprintf("%s %.1f MB", resource, n/1e6))
		}
	}
	slices.Sort(sent)
	l.c.t.Logf("%s, %.0f s:\n  API server %v\n  daemon     %v\n  watches were sent %s", l.what, time.Since(l.begin).Seconds(), api, daemon, strings.Join(sent, ", "))
}

// profile keeps what the daemon's memory is used for, if it is asked for.
func (l *load) profile() {
	l.c.t.Helper()
	if *profiles == "" {
		return
	}
	for _, kind := range []string{"heap", "goroutine"} {
		out, err := l.c.Output(l.c.t.Context(), "node1", "curl", "-sSf", "http://"+metricsAddress+"/debug/pprof/"+kind)
		if err == nil {
			err = os.WriteFile(filepath.Join(*profiles, strings.ReplaceAll(l.what, " ", "-")+"."+kind), []byte(out), 0o600)
		}
		if err != nil {
			l.c.t.Error(err)
		}
	}
}

// sent is how many bytes of events the server has sent to watches, by resource.
func (c *cluster) sent() map[string]float64 {
	c.t.Helper()
	text, err := server.Do(c.t.Context(), http.MethodGet, "/metrics", "", nil)
	if err != nil {
		c.t.Fatal(err)
	}
	out := map[string]float64{}
	for line := range strings.Lines(string(text)) {
		rest, ok := strings.CutPrefix(line, "apiserver_watch_events_sizes_sum{")
		labels, value, _ := strings.Cut(rest, "} ")
		_, resource, _ := strings.Cut(labels, `resource="`)
		resource, _, found := strings.Cut(resource, `"`)
		if !ok || !found {
			continue
		}
		n, err := strconv.ParseFloat(strings.TrimSpace(value), 64)
		if err != nil {
			c.t.Fatal(err)
		}
		out[resource] += n
	}
	return out
}

// rests waits until the daemon of node1 takes little of a processor, and what a burst left
// has gone back to the host.
func (c *cluster) rests() {
	c.t.Helper()
	const window, share = 13 * time.Second, 0.1
	since, was := time.Now(), c.used("node1")
	await.Until(c.t, "the daemon rests", func() error {
		took := time.Since(since)
		if took < window {
			return fmt.Errorf("not looked at for %v", window)
		}
		now := c.used("node1")
		if used := (now.cpu - was.cpu).Seconds() / took.Seconds(); used > share {
			since, was = time.Now(), now
			return fmt.Errorf("it takes %.2f of a processor", used)
		}
		return nil
	})
}

// routes waits until every host has a route to each of n blocks.
func (c *cluster) routes(n int) {
	c.t.Helper()
	for _, host := range c.Hosts() {
		await.Until(c.t, fmt.Sprintf("%s has %d routes", host, n), func() error {
			out, err := c.Output(c.t.Context(), host, "ip", "route", "show", "root", manyBlocks)
			if got := strings.Count(out, "\n"); err == nil && got != n {
				err = fmt.Errorf("it has %d", got)
			}
			return err
		})
	}
}

// asked is what daemons asked for since an earlier answer, and which of that were lists of all and
// watches that begin with the whole state.
func (c *cluster) asked(before map[string]int) (all map[string]int, since, whole []string) {
	c.t.Helper()
	audit, err := server.Audit()
	if err != nil {
		c.t.Fatal(err)
	}
	all = map[string]int{}
	for a, n := range audit {
		what := a.Verb + " " + a.Resource
		switch {
		case a.Whole && a.Verb == "watch" && a.Code == http.StatusOK:
			what = "all " + a.Resource
		case a.Whole && a.Code == http.StatusOK: // by the one host that looks for leaks of the cluster
			what = "list all " + a.Resource
		}
		all[what] += n
	}
	for _, what := range slices.Sorted(maps.Keys(all)) {
		if n := all[what] - before[what]; n > 0 {
			since = append(since, fmt.Sprintf("%s %d", what, n))
			if strings.HasPrefix(what, "all ") || strings.HasPrefix(what, "list all ") {
				whole = append(whole, what)
			}
		}
	}
	return all, since, whole
}

// stop ends the daemons of hosts, so that what they watched is in the audit log.
func (c *cluster) stop(hosts ...string) {
	c.t.Helper()
	ended := func() (n int) {
		audit, err := server.Audit()
		if err != nil {
			c.t.Fatal(err)
		}
		for a, times := range audit {
			if a.Verb == "watch" {
				n += times
			}
		}
		return n
	}
	last, since := ended(), time.Now()
	before := last
	for _, host := range hosts {
		if err := c.Kill(c.t.Context(), host, unix.SIGTERM); err != nil {
			c.t.Fatal(err)
		}
	}
	await.Until(c.t, "the watches that ended are in the audit log", func() error {
		if n := ended(); n == before || n != last {
			last, since = n, time.Now()
		}
		if last == before || time.Since(since) < time.Second {
			return fmt.Errorf("%d ended of late", last-before)
		}
		return nil
	})
}

// TestManyNodes: daemons in a cluster of as many Nodes and pods beside as -nodes and -pods say, all
// of which a policy selects that is in force here; what that costs one of them and the API server is in
// the log, and what it has resident is bounded. All started again at once ask for the whole state of nothing.
func TestManyNodes(t *testing.T) {
	none := 0
	top := lab.DefaultTopology(manyDaemons)
	top.Pods = &none
	c := bringUp(t, "z", top)
	m := many{t, *manyNodes, *manyPods}
	kubectlWith(t, `
apiVersion: projectcalico.org/v3
kind: IPPool
metadata: {name: many}
spec: {cidr: `+manyBlocks+`, vxlanMode: Always, blockSize: 26, nodeSelector: has(none)}
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: many, namespace: default}
spec: {podSelector: {}, ingress: [{from: [{namespaceSelector: {}}]}]}
`, "apply", "--server-side", "-f", "-")
	t.Cleanup(func() { kubectl(t, "delete", "networkpolicy/many") })
	if !*mesh {
		kubectlWith(t, "{apiVersion: projectcalico.org/v3, kind: BGPConfiguration, metadata: {name: default}, spec: {nodeToNodeMeshEnabled: false}}", "apply", "--server-side", "--force-conflicts", "-f", "-")
	}
	c.run("node1/web")
	l := c.begin("alone", c.used("node1"))
	l.end()

	t.Cleanup(func() { inParallel(t, m.nodes, m.remove) })
	l = c.begin(fmt.Sprintf("%d Nodes with %d pods each are written", m.nodes, m.pods), c.used("node1"))
	inParallel(t, m.nodes, m.make)
	t.Logf("all were written in %v", time.Since(l.begin))
	c.routes(m.nodes)
	l.end()

	c.stop(c.Hosts()...)
	asked, until, _ := c.asked(nil)
	t.Logf("%d daemons asked until then for %s", manyDaemons, strings.Join(until, ", "))
	start := func(what string) (whole []string) {
		t.Helper()
		l := c.begin(what, used{})
		for _, host := range c.Hosts() {
			if err := c.Restart(t.Context(), host); err != nil {
				t.Fatal(err)
			}
		}
		for _, host := range c.Hosts() {
			if err := c.WaitReady(t.Context(), host); err != nil {
				t.Fatal(err)
			}
		}
		t.Logf("all are ready after %v", time.Since(l.begin))
		c.routes(m.nodes)
		l.end()
		c.stop(c.Hosts()...)
		var since []string
		asked, since, whole = c.asked(asked)
		t.Logf("they asked for %s", strings.Join(since, ", "))
		return whole
	}
	if whole := start("all started again"); len(whole) > 0 {
		t.Errorf("they asked for %v", whole)
	}
	if err := os.Remove(filepath.Join(filepath.Dir(lab.Socket(c.Name(), "node1")), "state", "cluster.journal")); err != nil {
		t.Fatal(err)
	}
	start("all started, one with nothing on the disk")
	forbidden(t)
}
