package kube_test

import (
	"context"
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/integration/lab/ns"
)

const spine = "spine"

// bird asks the top-of-rack switch for the paths of a prefix.
func (c *cluster) bird(prefix string) string {
	c.t.Helper()
	r, err := c.Exec(c.t.Context(), spine, "birdc", "-s", filepath.Join(filepath.Dir(lab.Socket(c.Name(), spine)), "bird.ctl"), "show", "route", prefix, "all")
	if err != nil {
		c.t.Fatal(err)
	}
	return r.Stdout // with "Network not found" birdc fails
}

// announced waits until the switch has a prefix of exactly these nodes, of those with a
// minus in front as about to go.
func (c *cluster) announced(what, prefix string, nodes ...string) {
	c.t.Helper()
	want := map[string]bool{}
	for _, n := range nodes {
		name, leaving := strings.CutPrefix(n, "-")
		want[name] = leaving
	}
	await.Until(c.t, what, func() error {
		got := map[string]bool{}
		on := ""
		out := c.bird(prefix)
		for line := range strings.Lines(out) {
			if _, after, ok := strings.Cut(line, "[to_"); ok {
				on, _, _ = strings.Cut(after, "_")
				got[on] = false
			}
			if strings.Contains(line, "BGP.community") && strings.Contains(line, "(65535,0)") {
				got[on] = true
			}
		}
		if fmt.Sprint(got) != fmt.Sprint(want) {
			return fmt.Errorf("%s of %v, want %v:\n%s", prefix, got, want, out)
		}
		return nil
	})
}

// routeEvent is when the switch's kernel began, or ceased, to have a route.
type routeEvent struct {
	at   time.Time
	gone bool
}

// routeLog is what became of routes of the switch.
type routeLog struct {
	mu     sync.Mutex
	events []routeEvent
}

// last returns the last event; there is none before the first.
func (l *routeLog) last() (e routeEvent, n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if n = len(l.events); n > 0 {
		e = l.events[n-1]
	}
	return e, n
}

// gone returns how often a route went.
func (l *routeLog) gone() (n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, e := range l.events {
		if e.gone {
			n++
		}
	}
	return n
}

// watchRoute follows the routes of the switch's kernel to a prefix, and inside of it,
// until the test ends.
func (c *cluster) watchRoute(prefix string) *routeLog {
	c.t.Helper()
	want := netip.MustParsePrefix(prefix)
	space, err := netns.GetFromPath(ns.Path(c.Space(spine)))
	if err != nil {
		c.t.Fatal(err)
	}
	defer space.Close()
	done, routes := make(chan struct{}), make(chan netlink.RouteUpdate, 256)
	var closing atomic.Bool
	if err := netlink.RouteSubscribeWithOptions(routes, done, netlink.RouteSubscribeOptions{
		Namespace: &space, ReceiveBufferSize: 32 << 20, ReceiveBufferForceSize: true,
		ErrorCallback: func(err error) {
			if !closing.Load() {
				c.t.Error(err)
			}
		},
	}); err != nil {
		c.t.Fatal(err)
	}
	log := &routeLog{}
	var reading sync.WaitGroup
	reading.Go(func() {
		for u := range routes {
			if u.Dst == nil {
				continue
			}
			ones, _ := u.Dst.Mask.Size()
			if a, ok := netip.AddrFromSlice(u.Dst.IP); !ok || ones < want.Bits() || !want.Contains(a.Unmap()) {
				continue
			}
			log.mu.Lock()
			log.events = append(log.events, routeEvent{time.Now(), u.Type == unix.RTM_DELROUTE})
			log.mu.Unlock()
		}
	})
	c.t.Cleanup(func() {
		closing.Store(true)
		close(done)
		reading.Wait()
	})
	return log
}

// traced holds what a trace from node1 to a Service says.
func (c *cluster) traced(what, from, to string, says ...string) {
	c.t.Helper()
	if !strings.Contains(to, ":") {
		to += ":80"
	}
	c.traceSays(what, []string{"--from", from, "--to", to}, says...)
}

func (c *cluster) traceSays(what string, args []string, says ...string) {
	c.t.Helper()
	r, err := c.Exec(c.t.Context(), "node1", append([]string{filepath.Join(abs(c.t, binDir(c.t)), "routerctl"), "--socket", lab.Socket(c.Name(), "node1"), "trace"}, args...)...)
	if err != nil {
		c.t.Fatal(err)
	}
	for _, s := range says {
		if !regexp.MustCompile(s).MatchString(r.Stdout + r.Stderr) {
			c.t.Errorf("%s: the trace does not say %q:\n%s%s", what, s, r.Stdout, r.Stderr)
		}
	}
}

const slicesPath = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices"

// endpointSlice is a slice of the Service "web": of the nodes that have endpoints, which
// are ready or, with a minus in front, terminate and serve yet.
func endpointSlice(nodes ...string) string {
	var l []string
	for _, n := range nodes {
		name, leaving := strings.CutPrefix(n, "-")
		l = append(l, endpoint(name, "10.1.0.1"+name[len(name)-1:], leaving))
	}
	return sliceOf(l)
}

// endpoint is one that is ready or, leaving, terminates and serves yet.
func endpoint(node, addr string, leaving bool) string {
	return fmt.Sprintf(`{"addresses":[%q],"nodeName":%q,"conditions":{"ready":%v,"serving":true,"terminating":%v}}`, addr, node, !leaving, leaving)
}

// sliceOf is a slice of the Service "web".
func sliceOf(endpoints []string) string {
	return `{"apiVersion":"discovery.k8s.io/v1","kind":"EndpointSlice","metadata":{"name":"web-1","labels":{"kubernetes.io/service-name":"web"}},` +
		`"addressType":"IPv4","ports":[{"port":80}],"endpoints":[` + strings.Join(endpoints, ",") + `]}`
}

// endpoints writes the slice, and says when it asked for that.
func (c *cluster) endpoints(nodes ...string) time.Time {
	c.t.Helper()
	return c.patchSlice(endpointSlice(nodes...))
}

// patchSlice writes the slice of the Service "web", and says when it asked for that.
func (c *cluster) patchSlice(text string) time.Time {
	c.t.Helper()
	asked := time.Now()
	if _, err := server.Do(c.t.Context(), http.MethodPatch, slicesPath+"/web-1", "application/merge-patch+json", []byte(text)); err != nil {
		c.t.Fatal(err)
	}
	return asked
}

const mapsPath = "/api/v1/namespaces/default/configmaps"

// write writes the ConfigMap "busy", which concerns no host, ten times a second until ctx ends.
func (c *cluster) write(ctx context.Context) {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for n := 0; ; n++ {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		if _, err := server.Do(ctx, http.MethodPatch, mapsPath+"/busy", "application/merge-patch+json", fmt.Appendf(nil, `{"data":{"n":"%d"}}`, n)); err != nil && ctx.Err() == nil {
			c.t.Error(err)
			return
		}
	}
}

// serviceRanges is what the clusters of TestServices announce.
const serviceRanges = `
apiVersion: projectcalico.org/v3
kind: BGPConfiguration
metadata: {name: default, annotations: {routerd.io/announceServiceCIDRs: "true"}}
spec: {serviceExternalIPs: [{cidr: 172.16.0.0/24}], serviceLoadBalancerIPs: [{cidr: 172.17.0.0/24}]}
`

// TestServices: a top-of-rack switch learns addresses of Services from where their
// endpoints are, is told when these are about to go and when they have gone, and hears of
// no restart.
func TestServices(t *testing.T) {
	topology := func() lab.Topology {
		top := lab.DefaultTopology(2)
		top.Pods, top.Spine.BGP = new(int), new(true)
		return top
	}
	t.Run("API", func(t *testing.T) {
		c := bringUp(t, "s", topology())
		kubectlWith(t, serviceRanges, "apply", "--server-side", "--force-conflicts", "-f", "-")
		c.announcesServices()
	})
	t.Run("etcd", func(t *testing.T) {
		c := bringUpEtcd(t, "se", topology())
		file := filepath.Join(t.TempDir(), "ranges.yaml")
		if err := os.WriteFile(file, []byte(serviceRanges), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Output(t.Context(), "node1", filepath.Join(abs(t, binDir(t)), "routerctl"), "--socket", lab.Socket(c.Name(), "node1"), "apply", "-f", file); err != nil {
			t.Fatal(err)
		}
		c.announcesServices()
	})
}

func (c *cluster) announcesServices() {
	t := c.t
	t.Helper()
	const services = "/api/v1/namespaces/default/services"
	create(t, services, `{"apiVersion":"v1","kind":"Service","metadata":{"name":"web"},"spec":{"type":"LoadBalancer","clusterIP":"10.96.7.7","externalIPs":["172.16.0.7"],`+
		`"externalTrafficPolicy":"Local","ports":[{"port":80,"nodePort":30080}]}}`)
	if _, err := server.Do(t.Context(), http.MethodPatch, services+"/web/status", "application/merge-patch+json", []byte(`{"status":{"loadBalancer":{"ingress":[{"ip":"172.17.0.7"}]}}}`)); err != nil {
		t.Fatal(err)
	}
	for _, all := range []string{"10.96.0.0/16", "172.16.0.0/24", "172.17.0.0/24"} {
		c.announced("every node announces a range", all, "node1", "node2")
	}
	c.announced("nobody has an endpoint", "172.17.0.7/32")
	c.traced("nobody has an endpoint", "198.51.100.7", "172.17.0.7", "no-endpoints +Service default/web has no endpoints")
	log := c.watchRoute("172.17.0.7/32")
	create(t, slicesPath, endpointSlice("node1"))
	single := []string{"10.96.7.7/32", "172.16.0.7/32", "172.17.0.7/32"}
	for _, p := range single {
		c.announced("the node with an endpoint announces its address", p, "node1")
	}
	out, err := c.Output(t.Context(), "node1", filepath.Join(abs(t, binDir(t)), "routerctl"), "--socket", lab.Socket(c.Name(), "node1"), "bgp", "advertised", "spine-node1", "172.17.0.7/32")
	if err != nil || !strings.Contains(out, "this host for Service default/web") {
		t.Errorf("what is advertised does not name the Service: %v\n%s", err, out)
	}
	c.traced("from outside to the node that announces it", "198.51.100.7", "172.17.0.7", "there: tcp 198.51.100.7:0 → 10.1.0.11:80", "node1 +172.17.0.7/32, the packet comes in here", "10.1.0.11:80 +- +node1 +followed")
	c.traced("from a node, by name", "node2", "service/default/web", "internalTrafficPolicy is Cluster", "10.1.0.11:80 +- +node1 +followed")
	c.traced("from outside to a node's port", "198.51.100.7", "node1:30080", `tcp 198.51.100.7 → 10.1.0.11 port 30080 \(node port of Service default/web\)`, "externalTrafficPolicy is Local", "port 30080 of node1: the packet comes in here", "10.1.0.11:80 +- +node1 +followed", "there: tcp 198.51.100.7:0 → 10.1.0.11:80")
	c.traced("to that of a node without endpoints", "node1", "node2:30080", "broken +node2 +no-local-endpoints", "its EndpointSlice|it is on node1, and externalTrafficPolicy is Local")
	c.traced("a port of nodes that no Service has", "node1", "node2:30081", "there: tcp 10.1.0.11:0 → 10.1.0.12:30081")
	c.traceSays("no proxy of Services runs here", []string{"--from", "host", "--to", "service/default/web", "--probe"}, "broken +node1 +not-translated +nothing on node1 translates 10.96.7.7:80 to an endpoint", `node1 +packet +out +eth0 +\d+ +10.1.0.11 +10.96.7.7:80`)
	c.traced("no such Service", "node1", "service/default/none", "there is no Service default/none")
	c.endpoints("node1", "node2")
	c.announced("two have endpoints", "172.17.0.7/32", "node1", "node2")
	c.endpoints("-node1", "node2")
	c.announced("one is about to go", "172.17.0.7/32", "-node1", "node2")
	c.endpoints("node2")
	c.announced("one has gone", "172.17.0.7/32", "node2")

	// A restart of the daemon changes nothing: neither what the switch has, nor what it
	// is told to do with it. That the API has nothing new to tell is found out as well while
	// nothing is written as while much is.
	create(t, mapsPath, `{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"busy"}}`)
	for _, busy := range []bool{false, true} {
		ctx, quiet := context.WithCancel(t.Context())
		var writing sync.WaitGroup
		if busy {
			writing.Go(func() { c.write(ctx) })
		}
		if err := c.Kill(t.Context(), "node2", unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		if err := c.Restart(t.Context(), "node2"); err != nil {
			t.Fatal(err)
		}
		await.Until(t, "the session is up again, and all was told", func() error {
			out, err := c.Output(t.Context(), "node2", filepath.Join(abs(t, binDir(t)), "routerctl"), "--socket", lab.Socket(c.Name(), "node2"), "bgp", "advertised", "spine-node2", "172.17.0.7/32")
			if err == nil && !strings.Contains(out, "Service default/web") {
				err = fmt.Errorf("it advertises:\n%s", out)
			}
			return err
		})
		c.announced("it is there after the restart", "172.17.0.7/32", "node2")
		if n := log.gone(); n > 0 {
			t.Errorf("busy %t: the switch lost the route %d times while there was an endpoint", busy, n)
		}
		quiet()
		writing.Wait()
	}

	// The last endpoint terminates, and ends: not before that is the address withdrawn,
	// and then at once.
	var quickest time.Duration
	await.Until(t, "a withdrawal within 100 ms", func() error {
		c.endpoints("-node2")
		c.announced("the last one is about to go", "172.17.0.7/32", "-node2")
		e, n := log.last()
		if e.gone {
			t.Fatal("the route went while its endpoint still served")
		}
		ended := c.endpoints()
		await.True(t, "the address is withdrawn", func() bool {
			now, m := log.last()
			return m > n && now.gone
		})
		e, _ = log.last()
		took := e.at.Sub(ended)
		c.endpoints("node2")
		c.announced("back", "172.17.0.7/32", "node2")
		if took > 100*time.Millisecond {
			return fmt.Errorf("it took %v", took)
		}
		quickest = took
		return nil
	})
	t.Logf("withdrawn %v after the API was asked to take the endpoint out", quickest)

	// A node that is not for load balancers announces nothing of it.
	kubectl(t, "label", "node", "node2", "node.kubernetes.io/exclude-from-external-load-balancers=true")
	c.announced("it is excluded", "172.17.0.7/32")
	c.announced("from the ranges too", "172.17.0.0/24", "node1")
	forbidden(t)
}

func abs(t *testing.T, path string) string {
	t.Helper()
	path, err := filepath.Abs(path)
	if err != nil {
		t.Fatal(err)
	}
	return path
}
