package attach

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/workload/netnstest"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
)

// calicosPod is an endpoint as Calico's CNI plugin writes it, and calicosBlock the block
// of its addresses, as Calico's IPAM does.
const (
	calicosPod = `{"kind":"WorkloadEndpoint","apiVersion":"projectcalico.org/v3","metadata":{"name":"node--a-k8s-web--0-eth0","namespace":"ns1","uid":"ba499037-3f06-45d3-aa1b-fde5b999f36c","creationTimestamp":"2026-11-21T17:20:26Z",` +
		`"labels":{"app":"web","projectcalico.org/namespace":"ns1","projectcalico.org/orchestrator":"k8s","projectcalico.org/serviceaccount":"default"}},` +
		`"spec":{"orchestrator":"k8s","node":"node-a","containerID":"c0ffee","pod":"web-0","endpoint":"eth0","serviceAccountName":"default","ipNetworks":["192.168.64.5/32"],"ipNATs":[{"internalIP":"192.168.64.5","externalIP":"198.51.100.4"}],` +
		`"profiles":["kns.ns1","ksa.ns1.default"],"interfaceName":"caliabc48332923","mac":"fe:00:00:00:00:05","ports":[{"name":"http","protocol":"TCP","port":80,"hostPort":0,"hostIP":""}]}}`
	calicosBlock = `{"cidr":"192.168.64.4/30","affinity":"host:node-a","affinity_claim_time":"2026-11-21T17:20:25Z","allocations":[null,0,null,null],"unallocated":[0,2,3],` +
		`"attributes":[{"handle_id":"k8s-pod-network.c0ffee","secondary":{"node":"node-a","namespace":"ns1","pod":"web-0","timestamp":"2026-11-21 17:20:26.8948024 +0000 UTC"}}],` +
		`"sequenceNumber":1795282296903635739,"sequenceNumberForAllocation":{"1":1795282296903635738},"deleted":false}`
	calicosHandle = "k8s-pod-network.c0ffee"
)

// calico makes of the world a host that Calico's plugin attached a pod to, whose MTU is
// another one than routerd gives. It returns the request that the runtime would make.
func (w *world) calico(endpoint, block string, mounted bool) AddRequest {
	w.t.Helper()
	req := w.request(1)
	if mounted {
		req.Netns = netnstest.Mount(w.t, req.Netns)
	}
	req.ID = ID{Network: "k8s-pod-network", ContainerID: "c0ffee", Interface: "eth0"}
	req.Workload = Workload{Orchestrator: Kubernetes, Namespace: "ns1", Pod: "web-0"}
	r := recordOf(req.ID, req.Workload)
	r.Netns, r.MTU, r.MAC, r.Addresses = req.Netns, 1480, "fe:00:00:00:00:05", []Address{{Addr: netip.MustParseAddr("192.168.64.5")}}
	if strings.Contains(endpoint, "fd00:64::5") {
		r.Addresses = append(r.Addresses, Address{Addr: netip.MustParseAddr("fd00:64::5")})
	}
	if _, err := w.wire.Attach(w.t.Context(), r.spec()); err != nil {
		w.t.Fatal(err)
	}
	link, err := w.sink.netlink.LinkByName(r.Device)
	if err == nil {
		err = w.sink.netlink.LinkSetAlias(link, "")
	}
	if err == nil { // as Calico's plugin makes it
		err = w.sink.netlink.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Scope: netlink.SCOPE_LINK, Dst: &net.IPNet{IP: net.IP{192, 168, 64, 5}, Mask: net.CIDRMask(32, 32)}})
	}
	if err != nil {
		w.t.Fatal(err)
	}
	for key, raw := range map[store.Key]string{
		{Kind: store.KindWorkloadEndpoint, Namespace: "ns1", Name: "node--a-k8s-web--0-eth0"}: endpoint,
		store.BlockKey(netip.MustParsePrefix("192.168.64.4/30")):                              block,
	} {
		if raw != "" {
			w.write(key, raw)
		}
	}
	w.ipam.held[calicosHandle] = map[dataplane.Family]netip.Addr{dataplane.IPv4: netip.MustParseAddr("192.168.64.5")}
	return req
}

// write writes an object to the datastore in its bytes.
func (w *world) write(key store.Key, raw string) {
	w.t.Helper()
	v, err := store.Decode(key, []byte(raw))
	if err == nil {
		_, err = w.store.Txn(w.t.Context(), store.Op{Action: store.Put, Object: store.Object{Key: key, Value: v}})
	}
	if err != nil {
		w.t.Fatal(err)
	}
}

// TestAdopt: a pod that Calico's plugin attached is an attachment like any other
// afterwards: its route is wanted, ADD, CHECK, GC and DEL know it, and its endpoint is
// what it was.
func TestAdopt(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	req := w.calico(calicosPod, calicosBlock, true)
	before := w.endpoint("ns1", "node--a-k8s-web--0-eth0")
	a := w.start()
	if err := a.adopter.all(t.Context()); err != nil {
		t.Fatal(err)
	}
	r, ok := a.ledger.get(req.ID)
	if !ok || r.State != attachedStored || r.Device != "caliabc48332923" || r.Netns != req.Netns || r.MTU != w.mtu.IPv4 || len(r.TriedMTUs) > 0 {
		t.Fatalf("record %+v, %v", r, ok)
	}
	if routes := strings.Join(w.sink.wanted(), "\n"); !strings.Contains(routes, "192.168.64.5/32") {
		t.Errorf("no route is wanted: %s", routes)
	}
	if !a.Uses(calicosHandle) {
		t.Error("its handle is not in use")
	}
	// What would be written of it is what is there.
	if _, err := a.endpoints.put(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(before, w.endpoint("ns1", "node--a-k8s-web--0-eth0")); d != "" {
		t.Errorf("the endpoint changed (-before +after):\n%s", d)
	}
	w.check(a, req)
	w.add(a, req)
	a = w.start()
	if err := a.adopter.all(t.Context()); err != nil {
		t.Fatal(err)
	}
	w.check(a, req)
	w.del(a, req)
	w.expectClean()
}

// TestAdoptKubernetes: the same where Kubernetes' API is the datastore: there the endpoint is
// the pod, by its annotations and as the API says what it is, and has no MAC address.
func TestAdoptKubernetes(t *testing.T) {
	t.Parallel()
	w := kubeWorld(t)
	req := w.calico(strings.Replace(calicosPod, `"mac":"fe:00:00:00:00:05",`, "", 1), calicosBlock, true)
	a := w.start()
	if err := a.adopter.all(t.Context()); err != nil {
		t.Fatal(err)
	}
	if r, _ := a.ledger.get(req.ID); r.State != attachedStored || r.MAC != "" {
		t.Errorf("record %+v", r)
	}
	w.check(a, req)
	// A node that is made anew has the pod's addresses written again.
	if !a.reclaimer.all(t.Context()) {
		t.Error("not all was written again")
	}
	w.del(a, req)
	w.expectClean()
}

// TestAdoptUnrecorded: so is a pod that routerd attached, and of which the state directory has no record: it
// was lost, or is another one than before. A wire that is another container's stays as it is.
func TestAdoptUnrecorded(t *testing.T) {
	t.Parallel()
	for container, adopted := range map[string]bool{"c0ffee": true, "c0ffea": false} {
		w := newWorld(t)
		var mu sync.Mutex
		var log strings.Builder
		w.cfg = func(c *Config) { c.Log = logTo(&mu, &log) }
		req := w.calico(calicosPod, calicosBlock, true)
		mark := ID{Network: req.ID.Network, ContainerID: container, Interface: req.ID.Interface}
		link, err := w.sink.netlink.LinkByName("caliabc48332923")
		if err == nil {
			err = w.sink.netlink.LinkSetAlias(link, mark.Alias())
		}
		if err != nil {
			t.Fatal(err)
		}
		a := w.start()
		if err := a.adopter.all(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got := a.ledger.state(req.ID) == attachedStored; got != adopted {
			t.Errorf("%s: adopted %t", container, got)
		}
		if says := map[bool]string{true: "stateDir has no record", false: "start it anew"}[adopted]; !strings.Contains(log.String(), says) {
			t.Errorf("%s: log: %s\nwant: %s", container, log.String(), says)
		}
		if !adopted {
			continue
		}
		w.check(a, req)
		w.del(a, req)
		w.expectClean()
	}
}

// TestAdoptAnotherNetwork: whose CNI configuration has another network's name is told.
func TestAdoptAnotherNetwork(t *testing.T) {
	t.Parallel()
	for network, told := range map[string]bool{"": false, "k8s-pod-network": false, "routerd": true} {
		w := newWorld(t)
		var mu sync.Mutex
		var log strings.Builder
		w.cfg = func(c *Config) { c.Network, c.Log = network, logTo(&mu, &log) }
		w.calico(calicosPod, calicosBlock, true)
		if err := w.start().adopter.all(t.Context()); err != nil {
			t.Fatal(err)
		}
		if strings.Contains(log.String(), "set cni.networkName") != told {
			t.Errorf("network %q: %s", network, log.String())
		}
	}
}

// TestAdoptIPv6: the host's end is the gateway of a pod of both families.
func TestAdoptIPv6(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	six := strings.Replace(calicosPod, `"192.168.64.5/32"`, `"192.168.64.5/32","fd00:64::5/128"`, 1)
	req := w.calico(six, calicosBlock, true)
	const block = `{"cidr":"fd00:64::4/126","affinity":"host:node-a","allocations":[null,0,null,null],"unallocated":[0,2,3],` +
		`"attributes":[{"handle_id":"k8s-pod-network.c0ffee","secondary":{"node":"node-a","namespace":"ns1","pod":"web-0"}}],"sequenceNumber":1,"sequenceNumberForAllocation":{"1":0},"deleted":false}`
	w.write(store.BlockKey(netip.MustParsePrefix("fd00:64::4/126")), block)
	w.ipam.held[calicosHandle][dataplane.IPv6] = netip.MustParseAddr("fd00:64::5")
	a := w.start()
	if err := a.adopter.all(t.Context()); err != nil {
		t.Fatal(err)
	}
	r, _ := a.ledger.get(req.ID)
	diff(t, "addresses", []string{"192.168.64.5", "fd00:64::5"}, []string{r.addrs()[0].String(), r.addrs()[1].String()})
	if routes := strings.Join(w.sink.wanted(), "\n"); !strings.Contains(routes, "fd00:64::5/128") {
		t.Errorf("no route is wanted: %s", routes)
	}
	w.check(a, req)
	w.del(a, req)
	w.expectClean()
}

// TestAdoptKilled: wherever the daemon is killed, the next one completes it, and whatever
// the runtime asks for then is carried out.
func TestAdoptKilled(t *testing.T) {
	t.Parallel()
	for _, step := range points("adopt", "claim", "mark wire", "adopt route", "adopt MTU", "hold back", "set wires", "note MTU", "let go") {
		for _, then := range []string{"nothing", "ADD", "DEL"} {
			t.Run(fmt.Sprintf("%s/%s", step, then), func(t *testing.T) {
				t.Parallel()
				w := newWorld(t)
				req := w.calico(calicosPod, calicosBlock, true)
				a := w.start()
				killAt(a, step)
				dies(t, func() { _ = a.adopter.all(t.Context()) })
				b := w.start()
				if then == "DEL" {
					w.del(b, req)
					w.expectClean()
					return
				}
				if err := b.adopter.all(t.Context()); err != nil {
					t.Fatal(err)
				}
				w.add(b, req)
				w.check(b, req)
				w.del(b, req)
				w.expectClean()
			})
		}
	}
}

// TestNotAdopted: what is not known to be a workload of this host stays as it is, and is
// named.
func TestNotAdopted(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		endpoint, block string
		says            string
	}{
		"no endpoint":       {"", calicosBlock, "no endpoint"},
		"another host's":    {strings.Replace(calicosPod, `"node":"node-a"`, `"node":"node-b"`, 1), calicosBlock, "no endpoint"},
		"another device":    {strings.Replace(calicosPod, "caliabc48332923", "caliabc48332924", 1), calicosBlock, "no endpoint"},
		"another container": {strings.Replace(calicosPod, "c0ffee", "c0ffea", 1), calicosBlock, `IPAM has 192.168.64.5 as that of handle \"k8s-pod-network.c0ffee\"`},
		"no block":          {calicosPod, "", `IPAM has 192.168.64.5 as that of handle \"\"`},
		"no container":      {strings.Replace(calicosPod, "c0ffee", "", 1), calicosBlock, "container"},
		"another interface": {strings.Replace(calicosPod, `"endpoint":"eth0"`, `"endpoint":"eth1"`, 1), calicosBlock, "eth1"},
		"another name":      {strings.Replace(calicosPod, `"pod":"web-0"`, `"pod":"web-1"`, 1), calicosBlock, "key"},
		"no address":        {strings.Replace(calicosPod, `"192.168.64.5/32"`, ``, 1), calicosBlock, "no address"},
		"a range":           {strings.Replace(calicosPod, `"192.168.64.5/32"`, `"192.168.64.4/30"`, 1), calicosBlock, "192.168.64.4/30"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			var mu sync.Mutex
			var log strings.Builder
			w.cfg = func(c *Config) { c.Log = logTo(&mu, &log) }
			w.calico(tt.endpoint, tt.block, true)
			a := w.start()
			if err := a.adopter.all(t.Context()); err != nil {
				t.Fatal(err)
			}
			if n := len(a.ledger.snapshot()); n != 0 {
				t.Errorf("%d records", n)
			}
			devices, err := w.wire.Devices(t.Context())
			if alias, ok := devices["caliabc48332923"]; err != nil || !ok || alias != "" {
				t.Errorf("devices %q, %v", devices, err)
			}
			if text := log.String(); !strings.Contains(text, tt.says) || !strings.Contains(text, "caliabc48332923") {
				t.Errorf("log: %s\nwant: %s", text, tt.says)
			}
		})
	}
}

// TestAdoptUnreached: a workload whose namespace is mounted nowhere keeps the MTU that it
// has.
func TestAdoptUnreached(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	req := w.calico(calicosPod, calicosBlock, false)
	for range 2 {
		a := w.start()
		if err := a.adopter.all(t.Context()); err != nil {
			t.Fatal(err)
		}
		if r, _ := a.ledger.get(req.ID); r.State != attachedStored || r.MTU != 1480 {
			t.Errorf("record %+v", r)
		}
	}
	w.del(w.start(), req)
	w.expectClean()
}

// TestAdoptLater: a host that does not hold its name, or whose datastore is away, tries
// again.
func TestAdoptLater(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	var mu sync.Mutex
	refused := true
	w.cfg = func(c *Config) {
		c.Held = func() error {
			mu.Lock()
			defer mu.Unlock()
			if refused {
				return errors.New("another machine has the name")
			}
			return nil
		}
	}
	req := w.calico(calicosPod, calicosBlock, true)
	a := w.start()
	if err := a.adopter.all(t.Context()); !errors.Is(err, ErrNotReady) {
		t.Fatalf("%v, want ErrNotReady", err)
	}
	w.run(a)
	mu.Lock()
	refused = false
	mu.Unlock()
	await.True(t, "an attachment", func() bool { return a.ledger.state(req.ID) == attachedStored })
	// One that runs beside DEL leaves nothing of what is gone.
	w.del(a, req)
	if err := a.adopter.all(t.Context()); err != nil {
		t.Fatal(err)
	}
	w.expectClean()
}
