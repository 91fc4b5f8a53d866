package attach

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/control/ipam"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/workload"
	"github.com/routerd/routerd/dataplane/workload/netnstest"
	"github.com/routerd/routerd/store"
)

func TestAddCheckDel(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a := w.start()
	req := w.request(1)
	res := w.add(a, req)
	diff(t, "result", Result{
		Device: "cali00000000000", HostMAC: workload.HostMAC(), MAC: res.MAC, MTU: 1450,
		Addresses: []Address{{
			Addr:    netip.MustParseAddr("192.168.0.1"),
			Gateway: netip.MustParseAddr("169.254.1.1"),
			Block:   netip.MustParsePrefix("192.168.0.0/26"),
		}},
	}, res)
	diff(t, "wanted", []string{
		"route 192.168.0.1/32 dev cali00000000000 scope link",
		"sysctl net/ipv4/conf/cali00000000000/forwarding=1",
		"sysctl net/ipv4/conf/cali00000000000/proxy_arp=1",
		"sysctl net/ipv4/conf/cali00000000000/route_localnet=1",
		"sysctl net/ipv4/conf/cali00000000000/rp_filter=" + w.sysctl("net/ipv4/conf/default/rp_filter"),
		"sysctl net/ipv4/neigh/cali00000000000/proxy_delay=0",
		"sysctl net/ipv6/conf/cali00000000000/disable_ipv6=1",
	}, w.sink.wanted())

	e := w.endpoint("default", "node--a-cni-0000000000000001-eth0")
	diff(t, "endpoint", store.WorkloadEndpointSpec{
		Orchestrator: "cni", Node: "node-a", ContainerID: req.ID.ContainerID, Endpoint: "eth0",
		IPNetworks: []string{"192.168.0.1/32"}, Profiles: []string{"net1"},
		InterfaceName: "cali00000000000", MAC: res.MAC.String(),
	}, e.Spec)
	diff(t, "labels", map[string]string{store.LabelNamespace: "default", store.LabelOrchestrator: "cni"}, e.Labels)
	p, err := w.store.Get(t.Context(), store.ResourceKey(store.KindProfile, "net1"))
	if err != nil {
		t.Fatal(err)
	}
	if got := p.Value.(*v3.Profile).Spec; got.Ingress[0].Source.Selector != "has(net1)" || got.Egress[0].Action != v3.Allow {
		t.Errorf("profile: %+v", got)
	}
	diff(t, "handles", []string{"net1.0000000000000001"}, w.ipam.handles())

	w.check(a, req)
	diff(t, "repeated ADD", res, w.add(a, req))
	eps := a.Endpoints()
	if len(eps) != 1 || eps[0].Device != res.Device || eps[0].State != "attached" || eps[0].Since.IsZero() {
		t.Errorf("endpoints: %+v", eps)
	}

	w.del(a, req)
	w.expectClean()
	w.del(a, req)
	w.expectClean()
	if len(a.Endpoints()) != 0 {
		t.Errorf("endpoints after DEL: %+v", a.Endpoints())
	}
}

func TestKubernetesPod(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a := w.start()
	first := podRequest(w.request(1), "ns1", "web-0")
	res := w.add(a, first)
	if res.Device != "caliabc48332923" {
		t.Errorf("device %s is not named as Calico does", res.Device)
	}
	e := w.endpoint("ns1", "node--a-k8s-web--0-eth0")
	if e.Spec.Pod != "web-0" || e.Spec.ContainerID != first.ID.ContainerID {
		t.Errorf("endpoint: %+v", e.Spec)
	}
	if got := w.ipam.lastReq; got.Attributes["pod"] != "web-0" || got.Attributes["namespace"] != "ns1" || got.Attributes["node"] != "node-a" {
		t.Errorf("request to IPAM: %+v", got)
	}

	// The pod's container is made anew before the old one is detached.
	second := podRequest(w.request(2), "ns1", "web-0")
	w.add(a, second)
	w.check(a, second)
	w.del(a, first)
	w.check(a, second)
	if e := w.endpoint("ns1", "node--a-k8s-web--0-eth0"); e.Spec.ContainerID != second.ID.ContainerID {
		t.Errorf("the endpoint is of container %s", e.Spec.ContainerID)
	}
	diff(t, "handles", []string{"net1.0000000000000002"}, w.ipam.handles())
	if got := len(w.sink.wanted()); got != 7 {
		t.Errorf("%d wants, want those of one attachment: %v", got, w.sink.wanted())
	}
	w.del(a, second)
	w.expectClean()
}

func TestSecondInterface(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a := w.start()
	req := w.request(1)
	other := req
	other.ID.Interface = "net1"
	w.add(a, req)
	// A second default route in one container: the kernel refuses none, the
	// last one wins; what matters here is that the two are told apart.
	w.add(a, other)
	diff(t, "handles", []string{"net1.0000000000000001", "net1.0000000000000001.net1"}, w.ipam.handles())
	w.del(a, other)
	diff(t, "handles", []string{"net1.0000000000000001"}, w.ipam.handles())
	w.del(a, req)
	w.expectClean()
}

func TestAddRefuses(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a := w.start()
	fifo := filepath.Join(t.TempDir(), "netns")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name   string
		change func(*AddRequest)
		want   error
		says   string
	}{
		{"no container", func(r *AddRequest) { r.ID.ContainerID = "" }, ErrInvalid, "container id"},
		{"pod CIDR", func(r *AddRequest) { r.PodCIDR = true }, ErrInvalid, "set ipam.usePodCIDR"},
		{"no namespace", func(r *AddRequest) { r.Netns = "" }, ErrInvalid, "network namespace is required"},
		{"FIFO", func(r *AddRequest) { r.Netns = fifo }, workload.ErrNoNamespace, "is not a namespace"},
		{"namespace gone", func(r *AddRequest) { r.Netns = "/run/netns/gone" }, workload.ErrNoNamespace, "/run/netns/gone"},
		{"MTU", func(r *AddRequest) { r.MTU = 67 }, ErrInvalid, "mtu 67: want 68 to 65535"},
		{"no family", func(r *AddRequest) { r.IPv4 = false }, ErrInvalid, "ipam.assign_ipv4"},
		{"IPv6 address asked for", func(r *AddRequest) { r.Addresses = []netip.Addr{netip.MustParseAddr("fd00::1")} }, ErrInvalid, "fd00::1 is requested, and ipam.assign_ipv6 is off"},
		{"IPv4 address asked for", func(r *AddRequest) {
			r.IPv4, r.IPv6, r.Addresses = false, true, []netip.Addr{netip.MustParseAddr("192.168.0.1")}
		}, ErrInvalid, "192.168.0.1 is requested, and ipam.assign_ipv4 is off"},
		{"two of a family", func(r *AddRequest) {
			r.Addresses = []netip.Addr{netip.MustParseAddr("192.168.0.1"), netip.MustParseAddr("192.168.0.2")}
		}, ErrInvalid, "one of a family"},
		{"IPv4 in IPv6", func(r *AddRequest) {
			r.IPv6, r.Addresses = true, []netip.Addr{netip.MustParseAddr("::ffff:192.168.0.1")}
		}, ErrInvalid, "plain"},
		{"network's name", func(r *AddRequest) { r.ID.Network = "My_Net" }, ErrInvalid, `network name "My_Net"`},
		{"container id", func(r *AddRequest) { r.ID.ContainerID = "abc-" }, ErrInvalid, "workload endpoint"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			req := w.request(7)
			tt.change(&req)
			_, err := a.Add(t.Context(), req)
			if !errors.Is(err, tt.want) || !strings.Contains(err.Error(), tt.says) {
				t.Errorf("got %v, want %v that says %q", err, tt.want, tt.says)
			}
			if left := w.leftovers(); len(left) > 0 {
				t.Errorf("left behind: %v", left)
			}
			// Whatever was wrong, the attachment can be made and released after it.
			good := w.request(7)
			w.add(a, good)
			w.del(a, good)
		})
	}
}

func TestRequestedAddress(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a := w.start()
	req := w.request(1)
	req.Addresses = []netip.Addr{netip.MustParseAddr("192.168.5.5")}
	if res := w.add(a, req); res.Addresses[0].Addr != req.Addresses[0] {
		t.Errorf("got %v", res.Addresses)
	}
	other := w.request(2)
	other.Addresses = req.Addresses
	if _, err := a.Add(t.Context(), other); !errors.Is(err, ipam.ErrTaken) {
		t.Errorf("the address of another container: %v", err)
	}
	w.del(a, req)
	w.expectClean()
}

// A damaged attachment is made whole by a repeated ADD, with the same address.
func TestAddRepairs(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a := w.start()
	req := w.request(1)
	first := w.add(a, req)
	if err := w.wire.Detach(t.Context(), first.Device, req.ID); err != nil {
		t.Fatal(err)
	}
	// A repair that fails keeps what the container has.
	w.ipam.set(fmt.Errorf("etcd: %w", store.ErrUnavailable), false)
	if _, err := a.Add(t.Context(), req); !errors.Is(err, store.ErrUnavailable) {
		t.Errorf("got %v", err)
	}
	w.ipam.set(nil, false)
	second := w.add(a, req)
	first.MAC = second.MAC
	diff(t, "result", first, second)
	w.check(a, req)
	w.del(a, req)
	w.expectClean()
}

func TestCheckNamesDifferences(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a := w.start()
	req := w.request(1)
	res := w.add(a, req)
	good := CheckRequest{
		ID: req.ID, Netns: req.Netns, Device: res.Device, MAC: strings.ToUpper(res.MAC.String()),
		Addresses: []netip.Addr{res.Addresses[0].Addr},
	}
	for _, tt := range []struct {
		name   string
		change func(*CheckRequest)
		want   error
		says   string
	}{
		{"nothing", func(*CheckRequest) {}, nil, ""},
		{"unknown container", func(r *CheckRequest) { r.ID.ContainerID = "other" }, ErrUnknown, "container other"},
		{"device", func(r *CheckRequest) { r.Device = "cali1" }, workload.ErrDiffers, "the host's interface in prevResult is cali1"},
		{"MAC", func(r *CheckRequest) { r.MAC = "02:00:00:00:00:01" }, workload.ErrDiffers, "MAC address"},
		{"address", func(r *CheckRequest) { r.Addresses[0] = netip.MustParseAddr("10.0.0.1") }, workload.ErrDiffers, "[10.0.0.1]"},
		{"namespace", func(r *CheckRequest) { r.Netns = netnstest.New(t).Path }, workload.ErrDiffers, "is not connected"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := good
			c.Addresses = slices.Clone(good.Addresses)
			tt.change(&c)
			err := a.Check(t.Context(), c)
			if !errors.Is(err, tt.want) || (tt.want != nil && !strings.Contains(err.Error(), tt.says)) {
				t.Errorf("got %v, want %v that says %q", err, tt.want, tt.says)
			}
		})
	}
	w.sink.remove(dataplane.RouteKey{Prefix: netip.MustParsePrefix("192.168.0.1/32"), Table: dataplane.MainTable})
	if err := a.Check(t.Context(), good); !errors.Is(err, workload.ErrDiffers) || !strings.Contains(err.Error(), "the host's route to 192.168.0.1") {
		t.Errorf("host's route gone: %v", err)
	}
}

func TestStatus(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	var reason error
	w.cfg = func(c *Config) { c.Ready = func() error { return reason } }
	a := w.create()
	expect := func(want error, says string) {
		t.Helper()
		err := a.Status(t.Context())
		if !errors.Is(err, want) || (err != nil && !strings.Contains(err.Error(), says)) {
			t.Errorf("got %v, want %v that says %q", err, want, says)
		}
	}
	expect(ErrNotReady, "starting")
	if _, err := a.Add(t.Context(), w.request(1)); !errors.Is(err, ErrNotReady) {
		t.Errorf("ADD before Restore: %v", err)
	}
	if err := a.Del(t.Context(), delOf(w.request(1))); !errors.Is(err, ErrNotReady) {
		t.Errorf("DEL before Restore: %v", err)
	}
	if err := a.Restore(t.Context()); err != nil {
		t.Fatal(err)
	}
	expect(ErrNotReady, "create an IPPool")
	pool := v3.NewIPPool()
	pool.Name, pool.Spec.CIDR = "pool1", "192.168.0.0/16"
	store.SetDefaults(pool)
	if _, err := store.Create(t.Context(), w.store, pool); err != nil {
		t.Fatal(err)
	}
	expect(nil, "")
	reason = errors.New("the dataplane is not programmed")
	expect(ErrNotReady, "the dataplane is not programmed")
	reason = nil
	w.store.Fail(errors.New("connection refused"))
	expect(store.ErrUnavailable, "datastore unavailable")
}

func TestManyAtOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a := w.start()
	const n = 200
	reqs := make([]AddRequest, n)
	for i := range reqs {
		reqs[i] = w.request(i)
		reqs[i].ID.ContainerID = fmt.Sprintf("c%d", i)
	}
	results := make([]Result, n)
	start := time.Now()
	var wg sync.WaitGroup
	for i, req := range reqs {
		wg.Go(func() {
			var err error
			if results[i], err = a.Add(t.Context(), req); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	t.Logf("%d ADDs: %v", n, time.Since(start))
	seen := make(map[netip.Addr]bool)
	for i, r := range results {
		if len(r.Addresses) != 1 || seen[r.Addresses[0].Addr] {
			t.Fatalf("ADD %d: addresses %v, none or a duplicate", i, r.Addresses)
		}
		seen[r.Addresses[0].Addr] = true
	}
	// Twice at once for each container: one of the two finds nothing.
	start = time.Now()
	for _, req := range reqs {
		for range 2 {
			wg.Go(func() {
				if err := a.Del(t.Context(), delOf(req)); err != nil {
					t.Error(err)
				}
			})
		}
	}
	wg.Wait()
	t.Logf("%d DELs, twice: %v", n, time.Since(start))
	w.expectClean()
}

// ADD and DEL of one container at once end as if one had come after the other.
func TestAddAndDelAtOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a := w.start()
	req := w.request(1)
	var wg sync.WaitGroup
	for range 10 {
		wg.Go(func() {
			if _, err := a.Add(t.Context(), req); err != nil {
				t.Error(err)
			}
		})
		wg.Go(func() {
			if err := a.Del(t.Context(), delOf(req)); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	w.del(a, req)
	w.expectClean()
}

func TestRestore(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a := w.start()
	running, rebooted := w.request(1), w.request(2)
	rebooted.ID.ContainerID = "rebooted"
	first := w.add(a, running)
	res := w.add(a, rebooted)
	if err := w.wire.Detach(t.Context(), res.Device, rebooted.ID); err != nil {
		t.Fatal(err)
	}
	if err := w.journal.Put(recordPrefix+"lie", map[string]int{"version": 1}); err != nil {
		t.Fatal(err)
	}

	w.sink.synced = false
	b := w.start()
	if !w.sink.synced {
		t.Error("the sink was not told that the desired state is complete")
	}
	for _, want := range w.sink.wanted() {
		if strings.Contains(want, res.Device) {
			t.Errorf("wish for a device that is gone: %s", want)
		}
	}
	if len(w.sink.wanted()) != 7 {
		t.Errorf("wants: %v", w.sink.wanted())
	}
	w.check(b, running)
	diff(t, "repeated ADD after the restart", first, w.add(b, running))
	if len(b.Endpoints()) != 2 {
		t.Errorf("endpoints: %+v", b.Endpoints())
	}
	w.del(b, running)
	w.del(b, rebooted)
	bad := badPrefix + recordPrefix + "lie"
	if _, ok := w.journal.Entries()[bad]; !ok {
		t.Error("a record that cannot be read was not put aside")
	}
	if err := w.journal.Delete(bad); err != nil {
		t.Fatal(err)
	}
	w.expectClean()
}

// The records of an earlier version, a file each, are taken over once.
func TestRecordFilesAreTakenOver(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a := w.start()
	req := w.request(1)
	res := w.add(a, req)
	for key, value := range w.journal.Entries() {
		if err := errors.Join(os.WriteFile(filepath.Join(w.dir, "0123.json"), value, 0o600), w.journal.Delete(key)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(w.dir, "lie.json"), []byte(`{"version":1`), 0o600); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		a = w.start()
		w.check(a, req)
		diff(t, "repeated ADD", res, w.add(a, req))
	}
	files, err := filepath.Glob(filepath.Join(w.dir, "*.json*"))
	if err != nil {
		t.Fatal(err)
	}
	diff(t, "files", []string{filepath.Join(w.dir, "lie.json"+badSuffix)}, files)
	w.del(a, req)
	w.expectClean()
}

func TestParseRecordRefuses(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ name, json, says string }{
		{"not JSON", "x", "invalid character"},
		{"version", `{"version":2}`, "version 2"},
		{"names", `{"version":1,"state":"attached"}`, "is missing"},
		{"state", `{"version":1,"network":"n","containerID":"c","interface":"eth0","device":"cali1","state":"x"}`, `state "x"`},
		{"address", `{"version":1,"network":"n","containerID":"c","interface":"eth0","device":"cali1","state":"attached","addresses":[{"addr":""}]}`, "address is empty"},
	} {
		if _, err := parseRecord([]byte(tt.json)); err == nil || !strings.Contains(err.Error(), tt.says) {
			t.Errorf("%s: got %v, want %q", tt.name, err, tt.says)
		}
	}
}

func TestGC(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a := w.start()
	keep, stale, pod, lost, foreign := w.request(1), w.request(2), podRequest(w.request(3), "ns1", "p"), w.request(4), w.request(5)
	stale.ID.ContainerID, lost.ID.ContainerID, foreign.ID.ContainerID = "stale", "lost", "foreign"
	foreign.ID.Network = "net2"
	for _, r := range []AddRequest{keep, stale, pod, lost, foreign} {
		w.add(a, r)
	}
	// The record of one is lost: its device and its endpoint still tell of it.
	if err := a.addresses.forget(lost.ID); err != nil {
		t.Fatal(err)
	}
	done, err := a.GC(t.Context(), "net1", []ID{{ContainerID: keep.ID.ContainerID, Interface: "eth0"}})
	if err != nil {
		t.Fatal(err)
	}
	diff(t, "GC", Collected{Removed: []ID{pod.ID, lost.ID, stale.ID}}, done)
	w.check(a, keep)
	w.check(a, foreign)
	diff(t, "handles", []string{"net1." + keep.ID.ContainerID, "net2.foreign"}, w.ipam.handles())
	if _, err := a.GC(t.Context(), "net1", nil); err != nil {
		t.Fatal(err)
	}
	if _, err := a.GC(t.Context(), "net2", nil); err != nil {
		t.Fatal(err)
	}
	w.sink.Replace(dataplane.SourceWorkload, nil) // the wish of the lost record
	for k := range w.sink.kernel {
		w.sink.remove(k)
	}
	w.expectClean()
}

// GC removes what it can and says what is left, also when it fails.
func TestGCFails(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	wire := &blindWire{Wire: w.wire}
	w.cfg = func(c *Config) { c.Wire = wire }
	if done, err := w.create().GC(t.Context(), "net1", nil); !errors.Is(err, ErrNotReady) || !done.Unlisted {
		t.Errorf("GC of a daemon that has read no record yet: %+v, %v", done, err)
	}
	a := w.start()
	good, bad := w.numbered(1), w.numbered(2)
	gc := func(when, says string, want Collected) {
		t.Helper()
		done, err := a.GC(t.Context(), "net1", nil)
		if (err == nil) != (says == "") || !strings.Contains(fmt.Sprint(err), says) {
			t.Errorf("GC %s: %v, want %q", when, err, says)
		}
		diff(t, "GC "+when, want, done)
	}
	w.add(a, good)
	w.add(a, bad)
	w.ipam.refuse(handle(bad.ID), errors.New("broken"))
	gc("while one fails", "container c2, interface eth0: release the address: broken", Collected{Removed: []ID{good.ID}, Left: []ID{bad.ID}})
	w.ipam.refuse(handle(bad.ID), nil)
	w.add(a, good)
	w.away(true)
	gc("while the datastore is away", store.ErrUnavailable.Error(), Collected{Left: []ID{good.ID, bad.ID}})
	w.away(false)
	wire.blind.Store(true)
	gc("while devices cannot be listed", "dump interrupted", Collected{Removed: []ID{good.ID, bad.ID}, Unlisted: true})
	wire.blind.Store(false)
	gc("of nothing", "", Collected{})
	w.expectClean()
}

// GC leaves alone what another call works on.
func TestGCSparesBusy(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a := w.start()
	req := w.request(1)
	inAdd, goOn := make(chan struct{}), make(chan struct{})
	watch(a, func(point string) {
		if point == "after wire" {
			close(inAdd)
			<-goOn
		}
	})
	added := make(chan error, 1)
	go func() {
		_, err := a.Add(t.Context(), req)
		added <- err
	}()
	<-inAdd
	done, err := a.GC(t.Context(), "net1", nil)
	if err != nil {
		t.Errorf("GC during ADD: %v", err)
	}
	diff(t, "GC during ADD", Collected{Left: []ID{req.ID}}, done)
	close(goOn)
	if err := <-added; err != nil {
		t.Fatal(err)
	}
	w.check(a, req)
}

func TestWaitingForLockGivesUp(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a := w.start()
	req := w.request(1)
	free, err := a.locks.keys.lock(t.Context(), attachmentLock(req.ID))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := a.Add(ctx, req); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	free()
	w.add(a, req)
	if n := len(a.locks.keys.locks); n != 0 {
		t.Errorf("%d locks are kept", n)
	}
}
