package kube_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/kube"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/integration/lab/ns"
)

const (
	serviceAddr = "172.17.0.7"
	requestRate = 1000 // a second
)

// startRequests asks the Service's address, a thousand times a second, from a namespace behind
// the switch.
func (c *cluster) startRequests() *kube.Requests {
	c.t.Helper()
	space, spineSpace := c.Space("client"), c.Space(spine)
	if err := ns.Create(space); err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() {
		if err := ns.Delete(space); err != nil {
			c.t.Error(err)
		}
	})
	for _, args := range []string{
		"link add eth0 type veth peer name client netns " + spineSpace,
		"addr add 198.51.100.7/24 dev eth0", "link set eth0 up", "link set lo up",
		"-n " + spineSpace + " addr add 198.51.100.1/24 dev client", "-n " + spineSpace + " link set client up",
		"route add default via 198.51.100.1",
	} {
		c.runIn(space, "", "ip", strings.Fields(args)...)
	}
	// A device drops what is sent until the kernel has taken note of its carrier, which on a busy
	// machine is late: that is the client's, and not what is counted.
	await.Until(c.t, "the client reaches the switch", func() error {
		return ns.Do(space, func() error { return exec.CommandContext(c.t.Context(), "ping", "-c1", "-W1", "198.51.100.1").Run() })
	})

	return kube.StartRequests(c.t.Context(), kube.RequestsConfig{
		To: netip.AddrPortFrom(netip.MustParseAddr(serviceAddr), 80), Rate: requestRate,
		In:  func(do func() error) error { return ns.Do(space, do) },
		Ask: func(n uint64) []byte { return binary.BigEndian.AppendUint64(nil, n) },
		Read: func(n uint64, answer []byte) (string, error) {
			if len(answer) < 8 || binary.BigEndian.Uint64(answer) != n {
				return "", fmt.Errorf("an answer to something else: %x", answer)
			}
			return string(answer[8:]), nil
		},
	})
}

// runIn runs a command in a namespace.
func (c *cluster) runIn(space, stdin, name string, args ...string) {
	c.t.Helper()
	var out []byte
	err := ns.Do(space, func() (err error) {
		cmd := exec.CommandContext(c.t.Context(), name, args...)
		cmd.Stdin = strings.NewReader(stdin)
		out, err = cmd.CombinedOutput()
		return err
	})
	if err != nil {
		c.t.Fatalf("%s %v: %v: %s", name, args, err, out)
	}
}

// serve answers requests in a pod, by its name, until the pod's process ends.
func (c *cluster) serve(where string) (end func()) {
	c.t.Helper()
	var conn *net.UDPConn
	err := ns.Do(c.Space(where), func() (err error) {
		conn, err = net.ListenUDP("udp4", &net.UDPAddr{Port: 80})
		return err
	})
	if err != nil {
		c.t.Fatal(err)
	}
	// What comes while this program has no processor waits.
	raw, err := conn.SyscallConn()
	if err == nil {
		var set error
		err = errors.Join(raw.Control(func(fd uintptr) { set = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 16<<20) }), set)
	}
	if err != nil {
		c.t.Fatal(err)
	}
	var serving sync.WaitGroup
	serving.Go(func() {
		buf := make([]byte, 100)
		for {
			n, from, err := conn.ReadFromUDPAddrPort(buf)
			if err != nil {
				if !errors.Is(err, net.ErrClosed) {
					c.t.Error(err)
				}
				return
			}
			if _, err := conn.WriteToUDPAddrPort(append(buf[:n], where...), from); err != nil && !errors.Is(err, syscall.EPERM) {
				c.t.Error(err)
			}
		}
	})
	end = func() {
		conn.Close()
		serving.Wait()
	}
	c.t.Cleanup(end)
	return end
}

// proxy has a node send what comes for the Service to one pod, as kube-proxy does for
// new connections; tracked ones go on.
func (c *cluster) proxy(node string, to netip.Addr) {
	c.t.Helper()
	rules := fmt.Sprintf("add table ip proxy\nadd chain ip proxy pre { type nat hook prerouting priority dstnat; }\nflush chain ip proxy pre\n"+
		"add rule ip proxy pre ip daddr %s udp dport 80 dnat to %s\n", serviceAddr, to)
	c.runIn(c.Space(node), rules, "nft", "-f", "-")
}

// nextHops returns the nodes among which the switch's kernel shares what is for the Service.
func (c *cluster) nextHops() (nodes []string) {
	c.t.Helper()
	out, err := c.Output(c.t.Context(), spine, "ip", "route", "show", serviceAddr+"/32")
	if err != nil {
		c.t.Fatal(err)
	}
	words := strings.Fields(out)
	for _, n := range c.Hosts() {
		a, err := c.Addr(n)
		if err != nil {
			c.t.Fatal(err)
		}
		if slices.Contains(words, a.String()) {
			nodes = append(nodes, n)
		}
	}
	return nodes
}

// shared waits until the switch shares traffic among exactly these nodes.
func (c *cluster) shared(what string, nodes ...string) {
	c.t.Helper()
	await.Until(c.t, what, func() error {
		if got := c.nextHops(); !slices.Equal(got, nodes) {
			return fmt.Errorf("the switch sends to %v, want %v", got, nodes)
		}
		return nil
	})
}

// TestRollingUpdate: the endpoints of a Service with externalTrafficPolicy Local are replaced
// one after the other while a client behind a switch with ECMP makes 1,000 requests a second.
// None is lost: an endpoint that terminates is left by the switch while it serves yet, and its
// address is withdrawn when it has gone. A request is one packet and its answer: of a
// connection, a switch that shares anew can move what is left to a node that knows nothing of it.
func TestRollingUpdate(t *testing.T) {
	pods := 0
	top := lab.DefaultTopology(3)
	top.Pods, top.Spine = &pods, lab.Spine{BGP: new(true), ECMP: true}
	c := bringUp(t, "r", top)
	kubectlWith(t, "{apiVersion: projectcalico.org/v3, kind: BGPConfiguration, metadata: {name: default}, spec: {serviceLoadBalancerIPs: [{cidr: 172.17.0.0/24}]}}",
		"apply", "--server-side", "--force-conflicts", "-f", "-")
	const services = "/api/v1/namespaces/default/services"
	create(t, services, `{"apiVersion":"v1","kind":"Service","metadata":{"name":"web"},"spec":{"type":"LoadBalancer","externalTrafficPolicy":"Local","ports":[{"port":80,"protocol":"UDP"}]}}`)
	if _, err := server.Do(t.Context(), http.MethodPatch, services+"/web/status", "application/merge-patch+json", []byte(`{"status":{"loadBalancer":{"ingress":[{"ip":"`+serviceAddr+`"}]}}}`)); err != nil {
		t.Fatal(err)
	}

	// slice is what the controller of EndpointSlices writes, with addresses in order.
	ends := map[string]string{}
	slice := func() string {
		var l []string
		for _, where := range slices.Sorted(maps.Keys(ends)) {
			l = append(l, ends[where])
		}
		return sliceOf(l)
	}
	addrs, stops := map[string]netip.Addr{}, map[string]func(){}
	// start brings a pod up, and has its node send to it.
	start := func(where string) {
		node, _, _ := strings.Cut(where, "/")
		addrs[where] = c.run(where).Addrs[0]
		stops[where] = c.serve(where)
		c.proxy(node, addrs[where])
		ends[where] = endpoint(node, addrs[where].String(), false)
	}
	terminate := func(where string) {
		node, _, _ := strings.Cut(where, "/")
		ends[where] = endpoint(node, addrs[where].String(), true)
		c.patchSlice(slice())
	}
	stop := func(where string) {
		stops[where]()
		if err := c.DetachPod(t.Context(), where); err != nil {
			t.Fatal(err)
		}
		delete(ends, where)
	}

	hosts := c.Hosts()
	for _, node := range hosts {
		start(node + "/old-" + node)
	}
	create(t, slicesPath, slice())
	c.announced("all nodes have an endpoint", serviceAddr+"/32", hosts...)
	c.shared("all have a share", hosts...)
	r := c.startRequests()
	// answers waits until an endpoint has answered a hundred.
	answers := func(endpoint string) {
		t.Helper()
		await.True(t, endpoint+" answers requests", func() bool { return r.Answered(endpoint) >= 100 })
	}
	for _, node := range hosts {
		answers(node + "/old-" + node)
	}
	for _, node := range hosts {
		was, now := node+"/old-"+node, node+"/new-"+node
		others := slices.DeleteFunc(slices.Clone(hosts), func(n string) bool { return n == node })
		terminate(was)
		c.announced("it is about to go", serviceAddr+"/32", append([]string{"-" + node}, others...)...)
		c.shared("the switch leaves it", others...)
		stop(was)
		c.announced("it is announced until the API says that it has gone", serviceAddr+"/32", append([]string{"-" + node}, others...)...)
		c.patchSlice(slice())
		c.announced("it has gone", serviceAddr+"/32", others...)
		start(now)
		c.patchSlice(slice())
		c.announced("the next one is there", serviceAddr+"/32", hosts...)
		c.shared("it has its share", hosts...)
		answers(now)
	}

	// Where the next one is ready before, nothing is about to go.
	log := c.watchRoute(serviceAddr + "/32")
	const was, now = "node1/new-node1", "node1/newer-node1"
	start(now)
	terminate(was)
	answers(now)
	stop(was)
	c.patchSlice(slice())
	c.announced("the node has the next one", serviceAddr+"/32", hosts...)
	result, err := r.End()
	if err != nil {
		t.Fatal(err)
	}
	if _, n := log.last(); n > 0 {
		t.Errorf("the switch's route changed %d times though the node always had an endpoint that was ready", n)
	}
	t.Log(result)
	if len(result.Lost) > 0 {
		t.Errorf("lost: %q", result.Lost[:min(len(result.Lost), 20)])
	}
	forbidden(t)
}
