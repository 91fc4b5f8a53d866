package scenarios

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/integration/lab/ns"
	"github.com/routerd/routerd/integration/lab/traffic"
	"github.com/routerd/routerd/store"
)

// TestAttachAtOnce attaches 200 pods on one host at the same time, then 50 on
// each of four, and takes them away again.
func TestAttachAtOnce(t *testing.T) {
	beside(t)
	l := bringUp(t, "storm", topology(4, 0, lab.DefaultEncapsulation))
	for _, tt := range []struct {
		name    string
		hosts   []string
		perHost int
	}{
		{"one host", l.Hosts()[:1], 200},
		{"four hosts", l.Hosts(), 50},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var where []string
			for i := range tt.perHost {
				for _, h := range tt.hosts {
					where = append(where, fmt.Sprintf("%s/p%d", h, i+1))
				}
			}
			start := time.Now()
			pods := attachEach(t, l, where)
			t.Logf("%d ADDs in %.1f s", len(pods), time.Since(start).Seconds())
			unique(t, pods)
			if len(tt.hosts) > 1 {
				spotCheck(t, l, where)
			}
			start = time.Now()
			detachEach(t, l, where)
			t.Logf("%d DELs in %.1f s", len(pods), time.Since(start).Seconds())
			nothingAttached(t, l)
		})
	}
}

// attachEach makes a call of its own for each pod, all at once.
func attachEach(t *testing.T, l *lab.Lab, where []string) []lab.Pod {
	t.Helper()
	ctx := within(t, 3*time.Minute)
	pods, errs := make([]lab.Pod, len(where)), make([]error, len(where))
	var wg sync.WaitGroup
	for i, w := range where {
		wg.Go(func() { pods[i], errs[i] = l.AttachPod(ctx, w) })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	return pods
}

func detachEach(t *testing.T, l *lab.Lab, where []string) {
	t.Helper()
	ctx := within(t, 3*time.Minute)
	errs := make([]error, len(where))
	var wg sync.WaitGroup
	for i, w := range where {
		wg.Go(func() { errs[i] = l.DetachPod(ctx, w) })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Error(err)
	}
}

func unique(t *testing.T, pods []lab.Pod) {
	t.Helper()
	seen := make(map[netip.Addr]string)
	for _, p := range pods {
		for _, a := range p.Addrs {
			if other := seen[a]; other != "" {
				t.Errorf("%s and %s have the address %s", other, p, a)
			}
			seen[a] = p.String()
		}
	}
	if len(seen) != len(pods) {
		t.Errorf("%d addresses for %d pods", len(seen), len(pods))
	}
}

// spotCheck pings between the first and the last pods of all hosts.
func spotCheck(t *testing.T, l *lab.Lab, where []string) {
	t.Helper()
	n := len(l.Hosts())
	places := append(append([]string{}, where[:n]...), where[len(where)-n:]...)
	m, err := l.Reachability(await.Context(t), places, traffic.Options{})
	if err != nil || !m.OK() {
		t.Errorf("%v: %v", err, m.Failures())
	}
}

// nothingAttached checks that neither the store nor the kernel knows any pod.
func nothingAttached(t *testing.T, l *lab.Lab) {
	t.Helper()
	for _, h := range l.Hosts() {
		poll(t, "leftovers on "+h, func() string {
			// Devices may go some time after the DEL that cut their wire.
			links := output(t, l, h, "ip", "-br", "link")
			routes := output(t, l, h, "ip", "route", "show", "scope", "link", "proto", "routerd")
			if strings.Contains("\n"+links, "\ncali") || routes != "" {
				return links + routes
			}
			return ""
		})
	}
	ctx := await.Context(t)
	s := openStore(t, l)
	// The hosts tell the store some time after they have answered.
	poll(t, "leftovers in the store", func() string {
		left, err := allocated(ctx, s)
		if err != nil {
			return err.Error()
		}
		return strings.Join(left, "\n")
	})
}

// allocated lists what the store holds for workloads.
func allocated(ctx context.Context, s store.Store) ([]string, error) {
	var left []string
	weps, _, err := s.List(ctx, store.KindWorkloadEndpoint, "")
	if err != nil {
		return nil, err
	}
	for _, o := range weps {
		left = append(left, o.Key.String())
	}
	blocks, _, err := s.List(ctx, store.KindIPAMBlock, "")
	if err != nil {
		return nil, err
	}
	for _, o := range blocks {
		b, ok := o.Value.(*store.Block)
		if !ok {
			return nil, fmt.Errorf("%s holds %T", o.Key, o.Value)
		}
		for i, a := range b.Allocations {
			if a != nil && !isHosts(b.Attributes[*a].HandleID) {
				left = append(left, fmt.Sprintf("block %s: address %d is allocated to %+v", b.CIDR, i, b.Attributes[*a]))
			}
		}
	}
	handles, _, err := s.List(ctx, store.KindIPAMHandle, "")
	if err != nil {
		return nil, err
	}
	for _, o := range handles {
		if name := o.Key.Name; !isHosts(&name) {
			left = append(left, fmt.Sprintf("handle %s: %s", name, o.Raw))
		}
	}
	return left, nil
}

// isHosts reports whether a handle is a host's own: of a tunnel, or of what it
// holds ready for workloads.
func isHosts(handle *string) bool {
	return handle != nil && (strings.Contains(*handle, "-tunnel-addr-") || strings.HasPrefix(*handle, "routerd-reserve-"))
}

// TestStoreOutage stops the daemon that runs the store, under load.
func TestStoreOutage(t *testing.T) {
	beside(t)
	l := bringUp(t, "outage", topology(3, 2, lab.DefaultEncapsulation))
	reach(t, l, traffic.Options{})
	flows, stop := startFlows(t, l, [2]string{"node2/pod1", "node3/pod1"}, [2]string{"node1/pod1", "node3/pod2"}, [2]string{"node2/pod2", "node1/pod2"})
	if err := l.Kill(await.Context(t), "node1", unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	for i := range 2 {
		start := time.Now()
		// Not by the lab's own deadline: the plugin's must be enough.
		// Out of the host's reserve.
		if _, err := l.AttachPod(await.Context(t), fmt.Sprintf("node2/early%d", i)); err != nil {
			t.Errorf("ADD without the store: %v", err)
		}
		t.Logf("ADD without the store took %.2f s", time.Since(start).Seconds())
	}
	waitFlows(t, flows, time.Minute)
	if err := l.Restart(await.Context(t), "node1"); err != nil {
		t.Fatal(err)
	}
	for i, h := range []string{"node1", "node2", "node3"} {
		where := fmt.Sprintf("%s/again%d", h, i)
		poll(t, "ADD on "+h+" with the store back", func() string {
			if _, err := l.AttachPod(await.Context(t), where); err != nil {
				return err.Error()
			}
			return ""
		})
	}
	stop()
	reach(t, l, traffic.Options{})
	pods, err := l.Pods()
	if err != nil {
		t.Fatal(err)
	}
	unique(t, pods)
	var where []string
	for _, p := range pods {
		where = append(where, p.String())
	}
	detachEach(t, l, where)
	nothingAttached(t, l)
}

// TestDel takes pods away in every order that a runtime may come up with.
func TestDel(t *testing.T) {
	beside(t)
	l := bringUp(t, "del", topology(2, 0, lab.DefaultEncapsulation))
	for _, tt := range []struct {
		name   string
		before func(*testing.T, lab.Pod)
	}{
		{"in place", func(*testing.T, lab.Pod) {}},
		{"namespace gone", func(t *testing.T, p lab.Pod) {
			if err := ns.Delete(l.Space(p.String())); err != nil {
				t.Error(err)
			}
		}},
		{"daemon restarted", func(t *testing.T, p lab.Pod) {
			if err := l.Restart(await.Context(t), p.Host); err != nil {
				t.Error(err)
			}
		}},
		{"namespace gone and daemon killed", func(t *testing.T, p lab.Pod) {
			if err := l.Kill(await.Context(t), p.Host, unix.SIGKILL); err != nil {
				t.Error(err)
			}
			if err := ns.Delete(l.Space(p.String())); err != nil {
				t.Error(err)
			}
			if err := l.Restart(await.Context(t), p.Host); err != nil {
				t.Error(err)
			}
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ctx := await.Context(t)
			p, err := l.AttachPod(ctx, "node2/victim")
			if err != nil {
				t.Fatal(err)
			}
			network, err := l.Network(ctx, "node2")
			if err != nil {
				t.Fatal(err)
			}
			if err := network.Check(ctx, p); err != nil {
				t.Errorf("CHECK: %v", err)
			}
			tt.before(t, p)
			for i := range 2 {
				if err := network.Del(ctx, p); err != nil {
					t.Errorf("DEL, call %d: %v", i+1, err)
				}
			}
			if err := l.DetachPod(ctx, "node2/victim"); err != nil {
				t.Errorf("third DEL: %v", err)
			}
			nothingAttached(t, l)
		})
	}
}

// TestEnv reaches the store with Debian's etcdctl by what the lab says, from
// the first host's namespace.
func TestEnv(t *testing.T) {
	beside(t)
	l := bringUp(t, "env", topology(1, 1, lab.DefaultEncapsulation))
	vars := make(map[string]string)
	for _, v := range l.Env() {
		name, value, _ := strings.Cut(v, "=")
		vars[name] = value
	}
	out := output(t, l, "node1", "env", "ETCDCTL_API=3", "etcdctl", "--endpoints", vars["ETCD_ENDPOINTS"],
		"--cacert", vars["ETCD_CA_CERT_FILE"], "--cert", vars["ETCD_CERT_FILE"], "--key", vars["ETCD_KEY_FILE"],
		"get", "/calico/resources/v3/projectcalico.org/nodes/node1", "--print-value-only")
	var node store.Node
	if err := json.Unmarshal([]byte(out), &node); err != nil {
		t.Fatalf("%v: %q", err, out)
	}
	if node.Name != "node1" || node.Spec.BGP == nil || node.Spec.BGP.IPv4Address != "10.1.0.11/24" {
		t.Errorf("the Node in the store: %s", out)
	}
	// Without the certificate the store is shut.
	r, err := l.Exec(await.Context(t), "node1", "env", "ETCDCTL_API=3", "etcdctl", "--endpoints", vars["ETCD_ENDPOINTS"],
		"--cacert", vars["ETCD_CA_CERT_FILE"], "--command-timeout", "3s", "get", "/calico/")
	if err != nil || r.Code == 0 {
		t.Errorf("without a certificate: %+v, %v; want a refusal", r, err)
	}
}

// TestTwoLabs runs two labs with the same hosts and the same pool beside each
// other.
func TestTwoLabs(t *testing.T) {
	beside(t)
	a := bringUp(t, "two-a", topology(2, 1, lab.DefaultEncapsulation))
	b := bringUp(t, "two-b", topology(2, 1, store.Direct))
	reach(t, a, traffic.Options{})
	reach(t, b, traffic.Options{})
	if err := a.Down(await.Context(t)); err != nil {
		t.Error(err)
	}
	reach(t, b, traffic.Options{})
}
