package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/attach"
	"github.com/routerd/routerd/control/rpc"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/workload"
	"github.com/routerd/routerd/store"
)

// plugin is the path of the plugin, built as it is shipped.
func plugin(tb testing.TB) string {
	tb.Helper()
	path, err := build()
	if err != nil {
		tb.Fatal(err)
	}
	return path
}

var build = sync.OnceValues(func() (string, error) {
	path := filepath.Join(buildDir, "routerd-cni")
	cmd := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w -X main.version=test", "-o", path, ".")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build the plugin: %w\n%s", err, out)
	}
	return path, nil
})

var buildDir string

func TestMain(m *testing.M) {
	var err error
	if buildDir, err = os.MkdirTemp("", "routerd-cni-test"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code := m.Run()
	_ = os.RemoveAll(buildDir)
	os.Exit(code)
}

// daemon is a real server whose attacher does what the test says.
type daemon struct {
	socket string

	mu    sync.Mutex
	add   attach.AddRequest
	del   attach.DelRequest
	check attach.CheckRequest

	allocate attach.AllocateRequest
	valid    []attach.ID
	left     []attach.ID
	unlisted bool
	statuses int // how often STATUS came
	refusals int // how many of the first of these are answered by "not ready"
	err      error
	stall    bool          // it does not answer, not even when the caller's time is up
	over     chan struct{} // closed at the end of the test
}

func start(tb testing.TB) *daemon {
	tb.Helper()
	d := &daemon{socket: filepath.Join(tb.TempDir(), "run", "cni.sock")}
	d.serve(tb)
	return d
}

// serve serves on the socket until the test ends.
func (d *daemon) serve(tb testing.TB) {
	tb.Helper()
	d.over = make(chan struct{})
	l, err := rpc.Listen(d.socket)
	if err != nil {
		tb.Fatal(err)
	}
	log, server := slog.New(slog.DiscardHandler), rpc.NewCNIServer(d)
	s := grpc.NewServer(rpc.ServerOptions(log)...)
	apiv1.RegisterCNIServer(s, server)
	frames := rpc.NewFrames(l, server, log)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = s.Serve(frames)
	}()
	tb.Cleanup(func() { close(d.over); s.Stop(); <-done })
}

func (d *daemon) answer() error {
	d.mu.Lock()
	err, stall := d.err, d.stall
	d.mu.Unlock()
	if stall {
		<-d.over
	}
	return err
}

func (d *daemon) Add(_ context.Context, req attach.AddRequest) (attach.Result, error) {
	d.mu.Lock()
	d.add = req
	d.mu.Unlock()
	res := attach.Result{Device: "cali0123456789a", HostMAC: workload.HostMAC(), MAC: dataplane.MAC{2, 0, 0, 0, 0, 1}, MTU: 1450}
	if req.IPv4 {
		res.Addresses = append(res.Addresses, attach.Address{
			Addr: netip.MustParseAddr("192.168.0.7"), Gateway: netip.MustParseAddr("169.254.1.1"), Block: netip.MustParsePrefix("192.168.0.0/26"),
		})
	}
	if req.IPv6 {
		res.Addresses = append(res.Addresses, attach.Address{
			Addr: netip.MustParseAddr("fd00::7"), Gateway: netip.MustParseAddr("fe80::ecee:eeff:feee:eeee"), Block: netip.MustParsePrefix("fd00::/122"),
		})
	}
	return res, d.answer()
}

func (d *daemon) Del(_ context.Context, req attach.DelRequest) error {
	d.mu.Lock()
	d.del = req
	d.mu.Unlock()
	return d.answer()
}

func (d *daemon) Check(_ context.Context, req attach.CheckRequest) error {
	d.mu.Lock()
	d.check = req
	d.mu.Unlock()
	return d.answer()
}

func (d *daemon) Status(_ context.Context) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.statuses++
	if d.statuses <= d.refusals {
		return fmt.Errorf("starting: %w", attach.ErrNotReady)
	}
	return d.err
}

func (d *daemon) GC(_ context.Context, network string, valid []attach.ID) (attach.Collected, error) {
	d.mu.Lock()
	d.valid = valid
	done := attach.Collected{
		Removed: []attach.ID{{Network: network, ContainerID: "stale", Interface: "eth0"}}, Left: d.left, Unlisted: d.unlisted,
	}
	d.mu.Unlock()
	return done, d.answer()
}

func (d *daemon) Allocate(_ context.Context, req attach.AllocateRequest) (attach.Result, error) {
	d.mu.Lock()
	d.allocate = req
	d.mu.Unlock()
	res := attach.Result{Addresses: []attach.Address{{Addr: netip.MustParseAddr("192.168.0.7"), Block: netip.MustParsePrefix("192.168.0.0/26")}}}
	if req.Gateway {
		res.Addresses[0].Gateway = netip.MustParseAddr("192.168.0.1")
	}
	return res, d.answer()
}

// invocation is one execution of the plugin.
type invocation struct {
	verb  string
	conf  map[string]any
	stdin string // instead of conf
	args  string
	env   map[string]string // changes; an empty value removes
}

func (d *daemon) conf(version string, extra map[string]any) map[string]any {
	c := map[string]any{
		"cniVersion": version, "name": "net1", "type": "routerd-cni", "socket": d.socket,
		"ipam": map[string]any{"type": "routerd-cni", "assign_ipv4": "true"},
	}
	maps.Copy(c, extra)
	return c
}

func run(tb testing.TB, in invocation) (stdout, stderr string, ok bool) {
	tb.Helper()
	env := map[string]string{
		"CNI_COMMAND": in.verb, "CNI_CONTAINERID": "0123456789abcdef", "CNI_NETNS": "/run/netns/pod1", "CNI_IFNAME": "eth0",
		"CNI_ARGS": in.args, "CNI_PATH": "/opt/cni/bin",
	}
	maps.Copy(env, in.env)
	cmd := exec.Command(plugin(tb))
	cmd.Env = []string{"PATH=/usr/bin"}
	for k, v := range env {
		if v != "" {
			cmd.Env = append(cmd.Env, k+"="+v)
		}
	}
	stdin := in.stdin
	if stdin == "" {
		b, err := json.Marshal(in.conf)
		if err != nil {
			tb.Fatal(err)
		}
		stdin = string(b)
	}
	cmd.Stdin = strings.NewReader(stdin)
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		tb.Fatal(err)
	}
	return out.String(), errOut.String(), err == nil
}

func succeed(tb testing.TB, in invocation) string {
	tb.Helper()
	out, errOut, ok := run(tb, in)
	if !ok {
		tb.Fatalf("%s: %s%s", in.verb, out, errOut)
	}
	return out
}

// refuse runs the plugin, which must fail with this code and message.
func refuse(t *testing.T, in invocation, code uint, says string) {
	t.Helper()
	out, errOut, ok := run(t, in)
	var e struct {
		CNIVersion string
		Code       uint
		Msg        string
		Details    string
	}
	if err := json.Unmarshal([]byte(out), &e); err != nil || ok {
		t.Fatalf("%s: no CNI error (%v): %s%s", in.verb, err, out, errOut)
	}
	if e.Code != code || !strings.Contains(e.Msg+" "+e.Details, says) || e.CNIVersion == "" {
		t.Errorf("%s: got %+v, want code %d that says %q", in.verb, e, code, says)
	}
}

func parse(t *testing.T, s string) any {
	t.Helper()
	var v any
	if err := json.Unmarshal([]byte(s), &v); err != nil {
		t.Fatalf("%v: %s", err, s)
	}
	return v
}

func TestAdd(t *testing.T) {
	t.Parallel()
	d := start(t)
	const (
		interfaces = `[{"name":"cali0123456789a","mac":"ee:ee:ee:ee:ee:ee"},{"name":"eth0","mac":"02:00:00:00:00:01","sandbox":"/run/netns/pod1"}]`
		withMTU    = `[{"name":"cali0123456789a","mac":"ee:ee:ee:ee:ee:ee","mtu":1450},{"name":"eth0","mac":"02:00:00:00:00:01","mtu":1450,"sandbox":"/run/netns/pod1"}]`
		routes     = `[{"dst":"0.0.0.0/0","gw":"169.254.1.1"}]`
		oldIPs     = `[{"version":"4","interface":1,"address":"192.168.0.7/32"}]`
		newIPs     = `[{"interface":1,"address":"192.168.0.7/32"}]`
	)
	for version, want := range map[string]string{
		"0.3.1": `{"cniVersion":"0.3.1","interfaces":` + interfaces + `,"ips":` + oldIPs + `,"routes":` + routes + `,"dns":{}}`,
		"0.4.0": `{"cniVersion":"0.4.0","interfaces":` + interfaces + `,"ips":` + oldIPs + `,"routes":` + routes + `,"dns":{}}`,
		"1.0.0": `{"cniVersion":"1.0.0","interfaces":` + interfaces + `,"ips":` + newIPs + `,"routes":` + routes + `}`,
		"1.1.0": `{"cniVersion":"1.1.0","interfaces":` + withMTU + `,"ips":` + newIPs + `,"routes":` + routes + `}`,
	} {
		got := parse(t, succeed(t, invocation{verb: "ADD", conf: d.conf(version, nil)}))
		if diff := cmp.Diff(dropEmptyDNS(parse(t, want)), dropEmptyDNS(got)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", version, diff)
		}
	}
	if want := (attach.AddRequest{
		ID:       attach.ID{Network: "net1", ContainerID: "0123456789abcdef", Interface: "eth0"},
		Workload: attach.Workload{Orchestrator: "cni", Namespace: "default"},
		Netns:    "/run/netns/pod1", IPv4: true,
	}); !cmp.Equal(want, d.add, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })) {
		t.Errorf("request: %+v, want %+v", d.add, want)
	}

	succeed(t, invocation{
		verb: "ADD",
		conf: d.conf("1.0.0", map[string]any{
			"mtu":                1400,
			"ipam":               map[string]any{"type": "calico-ipam", "ipv4_pools": []string{"pool1"}},
			"container_settings": map[string]any{"allow_ip_forwarding": true},
		}),
		args: "IgnoreUnknown=1;K8S_POD_NAMESPACE=ns1;K8S_POD_NAME=web-0;IP=192.168.0.7;K8S_POD_UID=1;FOO=bar",
	})
	if want := (attach.AddRequest{
		ID:       attach.ID{Network: "net1", ContainerID: "0123456789abcdef", Interface: "eth0"},
		Workload: attach.Workload{Orchestrator: "k8s", Namespace: "ns1", Pod: "web-0"},
		Netns:    "/run/netns/pod1", IPv4: true, MTU: 1400, IPv4Pools: []string{"pool1"}, Forwarding: true, PodUID: "1",
		Addresses: []netip.Addr{netip.MustParseAddr("192.168.0.7")},
	}); !cmp.Equal(want, d.add, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })) {
		t.Errorf("request: %+v, want %+v", d.add, want)
	}

	// Without Kubernetes' API a pod's annotations come with the call.
	succeed(t, invocation{verb: "ADD", conf: d.conf("1.0.0", map[string]any{"runtimeConfig": map[string]any{"io.kubernetes.cri.pod-annotations": map[string]string{
		"cni.projectcalico.org/floatingIPs":           `["10.9.9.9"]`,
		"cni.projectcalico.org/allowedSourcePrefixes": `["10.8.1.0/16"]`,
	}}})})
	if want := (attach.AddRequest{
		ID:       attach.ID{Network: "net1", ContainerID: "0123456789abcdef", Interface: "eth0"},
		Workload: attach.Workload{Orchestrator: "cni", Namespace: "default"},
		Netns:    "/run/netns/pod1", IPv4: true,
		Floating: []netip.Addr{netip.MustParseAddr("10.9.9.9")}, Sources: []string{"10.8.0.0/16"},
	}); !cmp.Equal(want, d.add, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })) {
		t.Errorf("request: %+v, want %+v", d.add, want)
	}
}

// TestAddFamilies: results of both families and of IPv6 alone, in every version,
// and CHECK with what the runtime remembers of them.
func TestAddFamilies(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		ipam     map[string]any
		oldIPs   string
		newIPs   string
		routes   string
		ipv4     bool
		pools    []string
		remember []string
	}{
		"dual stack": {
			map[string]any{"type": "calico-ipam", "assign_ipv6": "true", "ipv6_pools": []string{"pool6", "fd00::/64"}},
			`[{"version":"4","interface":1,"address":"192.168.0.7/32"},{"version":"6","interface":1,"address":"fd00::7/128"}]`,
			`[{"interface":1,"address":"192.168.0.7/32"},{"interface":1,"address":"fd00::7/128"}]`,
			`[{"dst":"0.0.0.0/0","gw":"169.254.1.1"},{"dst":"::/0","gw":"fe80::ecee:eeff:feee:eeee"}]`,
			true,
			[]string{"pool6", "fd00::/64"},
			[]string{"192.168.0.7", "fd00::7"},
		},
		"IPv6 alone": {
			map[string]any{"type": "calico-ipam", "assign_ipv4": "false", "assign_ipv6": true},
			`[{"version":"6","interface":1,"address":"fd00::7/128"}]`,
			`[{"interface":1,"address":"fd00::7/128"}]`,
			`[{"dst":"::/0","gw":"fe80::ecee:eeff:feee:eeee"}]`,
			false, nil,
			[]string{"fd00::7"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := start(t)
			for _, version := range []string{"0.3.1", "0.4.0", "1.0.0", "1.1.0"} {
				ips := tt.newIPs
				if version < "1" {
					ips = tt.oldIPs
				}
				out := succeed(t, invocation{verb: "ADD", conf: d.conf(version, map[string]any{"ipam": tt.ipam})})
				got, ok := parse(t, out).(map[string]any)
				if !ok {
					t.Fatalf("%s: %s", version, out)
				}
				if diff := cmp.Diff(map[string]any{"ips": parse(t, ips), "routes": parse(t, tt.routes)}, map[string]any{"ips": got["ips"], "routes": got["routes"]}); diff != "" {
					t.Errorf("%s (-want +got):\n%s", version, diff)
				}
				if d.add.IPv4 != tt.ipv4 || !d.add.IPv6 || !cmp.Equal(d.add.IPv6Pools, tt.pools) {
					t.Errorf("%s: request %+v", version, d.add)
				}
				if version == "0.3.1" {
					continue // it has no CHECK
				}
				succeed(t, invocation{verb: "CHECK", conf: d.conf(version, map[string]any{"ipam": tt.ipam, "prevResult": got})})
				var addrs []string
				for _, a := range d.check.Addresses {
					addrs = append(addrs, a.String())
				}
				if diff := cmp.Diff(tt.remember, addrs); diff != "" {
					t.Errorf("%s: CHECK compares (-want +got):\n%s", version, diff)
				}
			}
		})
	}
}

// dropEmptyDNS takes away what says nothing and differs between versions of the
// library.
func dropEmptyDNS(v any) any {
	m := v.(map[string]any)
	if dns, ok := m["dns"].(map[string]any); ok && len(dns) == 0 {
		delete(m, "dns")
	}
	return m
}

func TestOtherVerbs(t *testing.T) {
	t.Parallel()
	d := start(t)
	for _, version := range []string{"0.3.1", "0.4.0", "1.0.0", "1.1.0"} {
		// Also with the namespace gone.
		for _, netns := range []string{"/run/netns/pod1", ""} {
			out := succeed(t, invocation{verb: "DEL", conf: d.conf(version, nil), env: map[string]string{"CNI_NETNS": netns}})
			if out != "" {
				t.Errorf("DEL printed %q", out)
			}
		}
		if d.del.ID.ContainerID != "0123456789abcdef" || d.del.ID.Network != "net1" {
			t.Errorf("DEL asked for %+v", d.del)
		}
		if version == "0.3.1" {
			continue
		}
		prev := parse(t, succeed(t, invocation{verb: "ADD", conf: d.conf(version, nil)}))
		succeed(t, invocation{verb: "CHECK", conf: d.conf(version, map[string]any{"prevResult": prev})})
		want := attach.CheckRequest{
			ID:    attach.ID{Network: "net1", ContainerID: "0123456789abcdef", Interface: "eth0"},
			Netns: "/run/netns/pod1", Device: "cali0123456789a", MAC: "02:00:00:00:00:01",
			Addresses: []netip.Addr{netip.MustParseAddr("192.168.0.7")},
		}
		if diff := cmp.Diff(want, d.check, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
			t.Errorf("CHECK %s (-want +got):\n%s", version, diff)
		}
	}
	succeed(t, invocation{verb: "STATUS", conf: d.conf("1.1.0", nil)})
	_, stderr, ok := run(t, invocation{verb: "GC", conf: d.conf("1.1.0", map[string]any{
		"log_level":                 "info",
		"cni.dev/valid-attachments": []map[string]string{{"containerID": "c1", "ifname": "eth0"}},
	})})
	if !ok || !strings.Contains(stderr, "container=stale") {
		t.Errorf("GC: %v %s", ok, stderr)
	}
	if diff := cmp.Diff([]attach.ID{{Network: "net1", ContainerID: "c1", Interface: "eth0"}}, d.valid); diff != "" {
		t.Errorf("GC (-want +got):\n%s", diff)
	}
	version := parse(t, succeed(t, invocation{verb: "VERSION", stdin: "{}"})).(map[string]any)
	if diff := cmp.Diff([]any{"0.3.1", "0.4.0", "1.0.0", "1.1.0"}, version["supportedVersions"]); diff != "" {
		t.Errorf("VERSION (-want +got):\n%s", diff)
	}
	if _, stderr, ok := run(t, invocation{stdin: "{}"}); !ok || !strings.Contains(stderr, "routerd-cni test") {
		t.Errorf("without a verb: %v %s", ok, stderr)
	}
}

func TestRefuses(t *testing.T) {
	t.Parallel()
	d := start(t)
	for _, tt := range []struct {
		name string
		in   invocation
		code uint
		says string
	}{
		{"version from the future", invocation{verb: "ADD", conf: d.conf("2.0.0", nil)}, 1, "2.0.0"},
		{"version too old", invocation{verb: "ADD", conf: d.conf("0.2.0", nil)}, 1, "0.2.0"},
		{"CHECK before it existed", invocation{verb: "CHECK", conf: d.conf("0.3.1", nil)}, 1, "CHECK"},
		{"STATUS before it existed", invocation{verb: "STATUS", conf: d.conf("1.0.0", nil)}, 1, "STATUS"},
		{"GC before it existed", invocation{verb: "GC", conf: d.conf("1.0.0", nil)}, 1, "GC"},
		{"malformed JSON", invocation{verb: "ADD", stdin: `{"cniVersion": "1.0.0", "name": `}, 6, "unexpected end"},
		{"wrong type", invocation{verb: "ADD", conf: d.conf("1.0.0", map[string]any{"mtu": "big"})}, 6, "field mtu"},
		{"wrong value", invocation{verb: "ADD", conf: d.conf("1.0.0", map[string]any{"mtu": 1})}, 7, "field mtu: 1"},
		{"no name", invocation{verb: "ADD", conf: d.conf("1.0.0", map[string]any{"name": ""})}, 7, "missing network name"},
		{"CNI_ARGS", invocation{verb: "ADD", conf: d.conf("1.0.0", nil), args: "FOO=bar"}, 4, `CNI_ARGS "FOO=bar"`},
		{"half a pod", invocation{verb: "ADD", conf: d.conf("1.0.0", nil), args: "K8S_POD_NAMESPACE=n"}, 4, "without K8S_POD_NAME"},
		{"no container", invocation{verb: "ADD", conf: d.conf("1.0.0", nil), env: map[string]string{"CNI_CONTAINERID": ""}}, 4, "CNI_CONTAINERID"},
		{"container's name", invocation{verb: "ADD", conf: d.conf("1.0.0", nil), env: map[string]string{"CNI_CONTAINERID": "../x"}}, 4, "invalid characters"},
		{"verb", invocation{verb: "MAKE", conf: d.conf("1.0.0", nil)}, 4, "MAKE"},
		{"CHECK without a result", invocation{verb: "CHECK", conf: d.conf("1.0.0", nil)}, 7, "prevResult: missing"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			refuse(t, tt.in, tt.code, tt.says)
		})
	}
}

func TestDaemonSaysNo(t *testing.T) {
	t.Parallel()
	d := start(t)
	prev := map[string]any{"prevResult": map[string]any{"cniVersion": "1.1.0"}}
	for _, tt := range []struct {
		verb string
		err  error
		code uint
		says string
	}{
		{"ADD", fmt.Errorf("assign an address: %w: connection refused", store.ErrUnavailable), 11, "datastore unavailable: connection refused"},
		{"DEL", fmt.Errorf("release the address: %w", store.ErrUnavailable), 11, "datastore unavailable"},
		{"STATUS", fmt.Errorf("no pool: %w", attach.ErrNotReady), 50, "no pool: not ready"},
		{"ADD", attach.ErrNoAddress, 11, "no address available"},
		{"ADD", fmt.Errorf("mtu 1: %w", attach.ErrInvalid), 7, "mtu 1"},
		{"ADD", workload.ErrNoNamespace, 8, "no such network namespace"},
		{"ADD", workload.ErrClash, 999, "in the way"},
		{"CHECK", attach.ErrUnknown, 3, "unknown attachment"},
		{"CHECK", fmt.Errorf("device is down: %w", workload.ErrDiffers), 999, "device is down"},
		{"GC", errors.New("container c1: 100 % broken, größer"), 999, "container c1: 100 % broken, größer"},
	} {
		d.mu.Lock()
		d.err = tt.err
		d.mu.Unlock()
		conf := d.conf("1.1.0", prev)
		conf["status_timeout_seconds"] = 1
		refuse(t, invocation{verb: tt.verb, conf: conf}, tt.code, tt.says)
	}
}

func TestDaemonAbsent(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	stale := filepath.Join(dir, "stale.sock")
	l, err := rpc.Listen(stale)
	if err != nil {
		t.Fatal(err)
	}
	kept := filepath.Join(dir, "kept.sock")
	if err := os.Link(stale, kept); err != nil {
		t.Fatal(err)
	}
	_ = l.Close()
	for socket, says := range map[string]string{
		filepath.Join(dir, "none.sock"): "no such file or directory",
		kept:                            "connection refused",
	} {
		d := &daemon{socket: socket}
		for verb, code := range map[string]uint{"ADD": 11, "DEL": 11, "STATUS": 50} {
			in := invocation{verb: verb, conf: d.conf("1.1.0", map[string]any{"status_timeout_seconds": 1})}
			refuse(t, in, code, socket)
			refuse(t, in, code, says)
			refuse(t, in, code, "systemctl status routerd")
		}
	}
}

// STATUS waits for a daemon that is started again: the node would not be ready for as long, and its pods no endpoints of
// their Services.
func TestStatusOverRestart(t *testing.T) {
	t.Parallel()
	socket := filepath.Join(t.TempDir(), "cni.sock")
	dying, err := new(net.ListenConfig).Listen(t.Context(), "unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		d := &daemon{socket: socket}
		if out, errOut, ok := run(t, invocation{verb: "STATUS", conf: d.conf("1.1.0", nil)}); !ok {
			t.Errorf("STATUS: %s%s", out, errOut)
		}
	}()
	conn, err := dying.Accept()
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(conn.Close(), dying.Close()); err != nil {
		t.Fatal(err)
	}
	next := &daemon{socket: socket, refusals: 2}
	next.serve(t)
	<-done
	next.mu.Lock()
	defer next.mu.Unlock()
	if next.statuses < 3 {
		t.Errorf("the next daemon was asked %d times", next.statuses)
	}
}

// The daemon takes the call and does not answer in time, or dies with it.
func TestDaemonStalls(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.stall = true
	began := time.Now()
	refuse(t, invocation{verb: "ADD", conf: d.conf("1.0.0", map[string]any{"add_timeout_seconds": 1})}, 11, "within 1s: the datastore may be unavailable")
	refuse(t, invocation{verb: "DEL", conf: d.conf("1.0.0", map[string]any{"del_timeout_seconds": 1})}, 11, "within 1s")
	if took := time.Since(began); took < 2*time.Second {
		t.Errorf("both gave up after %v", took)
	}
}

// What answers is not routerd.
func TestStranger(t *testing.T) {
	t.Parallel()
	for name, greeting := range map[string]string{"silent": "", "web server": "HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			socket := filepath.Join(t.TempDir(), "x.sock")
			l, err := rpc.Listen(socket)
			if err != nil {
				t.Fatal(err)
			}
			done := make(chan struct{})
			go func() {
				defer close(done)
				for {
					c, err := l.Accept()
					if err != nil {
						return
					}
					_, _ = c.Write([]byte(greeting))
					_ = c.Close()
				}
			}()
			defer func() { _ = l.Close(); <-done }()
			d := &daemon{socket: socket}
			refuse(t, invocation{verb: "ADD", conf: d.conf("1.0.0", nil)}, 11, socket)
		})
	}
}

// The plugin is executed for every container: what it links is initialised
// every time.
func TestDependencies(t *testing.T) {
	t.Parallel()
	out, err := exec.Command("go", "list", "-deps", ".").CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for dep := range strings.Lines(string(out)) {
		dep = strings.TrimSpace(dep)
		for forbidden, why := range map[string]string{
			"github.com/osrg/gobgp":                "BGP is the daemon's",
			"go.etcd.io/":                          "only the daemon speaks to the datastore",
			"github.com/projectcalico/":            "the plugin knows no resources",
			"k8s.io/":                              "the plugin knows no resources",
			"sigs.k8s.io/":                         "the plugin knows no resources",
			"github.com/spf13/":                    "a plugin has neither flags nor configuration files",
			"github.com/vishvananda/netlink":       "only the daemon touches the network",
			"github.com/mdlayher/":                 "only the daemon touches the network",
			"google.golang.org/":                   "gRPC's initialisation takes longer than the call",
			"net/http":                             "its initialisation takes longer than the call",
			"crypto/tls":                           "its initialisation takes longer than the call",
			"github.com/prometheus/":               "metrics are the daemon's",
			"github.com/routerd/routerd/store":     "only the daemon speaks to the datastore",
			"github.com/routerd/routerd/dataplane": "only the daemon touches the network",
		} {
			if strings.HasPrefix(dep, forbidden) {
				t.Errorf("the plugin links %s: %s", dep, why)
			}
		}
	}
}

func BenchmarkAdd(b *testing.B) {
	d := start(b)
	in := invocation{verb: "ADD", conf: d.conf("1.0.0", nil)}
	succeed(b, in)
	for b.Loop() {
		succeed(b, in)
	}
}

func BenchmarkVersion(b *testing.B) {
	in := invocation{verb: "VERSION", stdin: "{}"}
	succeed(b, in)
	for b.Loop() {
		succeed(b, in)
	}
}
