package main

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/config"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/embedded"
)

// startStore runs a datastore at a socket until it is closed.
func startStore(t *testing.T, dir, socket string) *embedded.Server {
	t.Helper()
	s, err := embedded.Start(t.Context(), embedded.Config{Dir: dir, Socket: socket})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

// usesStore makes the host's daemon use the datastore at a socket.
func (h *host) usesStore(socket string) {
	h.config["datastore"] = map[string]any{"endpoints": []string{"unix://" + socket}, "dialTimeout": "1s"}
}

// TestDatastoreAway: without its datastore and without a reserve the daemon
// stays up and says why it cannot serve; when the datastore comes, or comes
// back, so does everything.
func TestDatastoreAway(t *testing.T) {
	t.Parallel()
	h := newHost(t, "10.1.0.11/24")
	h.config["ipam"] = map[string]any{"reserve": map[string]any{"min": 0}}
	socket := filepath.Join(h.dir, "ext.sock")
	h.usesStore(socket)
	r := h.start()
	r.when("the datastore's absence is told", func(n *apiv1.NodeResponse) error {
		c := conditionOf(n, "Datastore")
		if c.GetOk() || n.GetHealth().GetReady().GetOk() {
			return errors.New("all is well")
		}
		return errors.Join(mentions(c.GetReason(), socket), mentions(n.GetHealth().GetReady().GetReason(), "datastore"))
	})
	if code, out := h.routerd("health", "--live", "--config", h.writeConfig()); code != 0 {
		t.Errorf("without a datastore the daemon is not live: exit code %d, %s", code, out)
	}
	if code, out := h.routerd("health", "--config", h.writeConfig()); code != 1 || mentions(out, "not ready", "datastore") != nil {
		t.Errorf("health: exit code %d, %s", code, out)
	}
	await.Until(t, "the log names the endpoint", func() error {
		if len(r.log.lines("level=WARN", socket)) == 0 {
			return errors.New("it does not")
		}
		return nil
	})
	_, err := r.attach("early")
	if status.Code(err) != codes.Unavailable || mentions(err.Error(), "datastore") != nil {
		t.Errorf("ADD before the datastore was ever seen: %v", err)
	}

	dir := t.TempDir()
	s := startStore(t, dir, socket)
	r.ready()
	first, err := r.attach("first")
	if err != nil {
		t.Fatal(err)
	}

	// It goes away under a running workload.
	s.Close()
	r.when("the outage is told", func(n *apiv1.NodeResponse) error {
		if c := conditionOf(n, "Datastore"); c.GetOk() {
			return errors.New("the datastore is well")
		} else if err := mentions(c.GetReason(), socket); err != nil {
			return err
		}
		if c := n.GetHealth().GetReady(); !c.GetOk() {
			t.Fatalf("an outage of the datastore makes the host unready: %s", c.GetReason())
		}
		return nil
	})
	const deadline = 10 * time.Second
	begin := time.Now()
	_, err = r.attachWithin(deadline, "during")
	if status.Code(err) != codes.Unavailable || mentions(err.Error(), "datastore", socket) != nil {
		t.Errorf("ADD without a datastore: %v", err)
	}
	if d := time.Since(begin); d > deadline {
		t.Errorf("ADD took %s; its deadline was %s", d, deadline)
	}
	if err := h.lists("route", first.GetAddresses()[0].GetCidr()[:strings.Index(first.GetAddresses()[0].GetCidr(), "/")]); err != nil {
		t.Errorf("the workload's route: %v", err)
	}

	startStore(t, dir, socket)
	r.when("the datastore is back", func(n *apiv1.NodeResponse) error {
		if c := conditionOf(n, "Datastore"); !c.GetOk() {
			return errors.New(c.GetReason())
		}
		return nil
	})
	await.Until(t, "ADD works again", func() error {
		_, err := r.attach("after")
		return err
	})
}

// TestSameAddress: of two hosts with one address the second is refused, and
// says which the other is. It is served when the other is gone.
func TestSameAddress(t *testing.T) {
	t.Parallel()
	one, two := newHost(t, "10.1.0.11/24"), newHost(t, "10.1.0.11/24")
	socket := filepath.Join(one.dir, "ext.sock")
	startStore(t, t.TempDir(), socket)
	one.usesStore(socket)
	two.usesStore(socket)
	one.config["nodeName"], two.config["nodeName"] = "host-one", "host-two"
	first := one.start()
	first.ready()

	second := two.start()
	words := []string{"host-one", "host-two", "10.1.0.11", "address.ipv4", "routerctl delete node host-one"}
	second.when("the second is refused", func(n *apiv1.NodeResponse) error {
		if n.GetHealth().GetReady().GetOk() {
			t.Fatal("the second host with the address is ready")
		}
		return errors.Join(
			mentions(conditionOf(n, "Registered").GetReason(), words...),
			mentions(n.GetHealth().GetReady().GetReason(), words...),
		)
	})
	second.tells(1, append(words, "level=ERROR")...)
	if _, err := second.attach("pod"); status.Code(err) != codes.Unavailable || mentions(err.Error(), "host-one") != nil {
		t.Errorf("ADD on the refused host: %v", err)
	}
	first.ready()

	first.kill(syscall.SIGTERM)
	if err := store.Delete(t.Context(), two.store(socket), store.ResourceKey(store.KindNode, "host-one"), 0); err != nil {
		t.Fatal(err)
	}
	second.ready()
}

// TestRestartWhileDatastoreAway: a daemon that starts without its datastore
// leaves the kernel as it is; what was deleted meanwhile goes when the
// datastore is back, and nothing else is touched.
func TestRestartWhileDatastoreAway(t *testing.T) {
	t.Parallel()
	h := newHost(t, "10.1.0.11/24")
	h.quietIPv6()
	h.config["bgp"] = map[string]any{"enabled": false}
	socket, dir := filepath.Join(h.dir, "ext.sock"), t.TempDir()
	h.usesStore(socket)
	s := startStore(t, dir, socket)
	r := h.start()
	r.ready()
	c := h.store(socket)
	h.addNode(c, "node2", "10.1.0.12/24", "192.168.200.1", "192.168.200.0/26")
	h.addNode(c, "node3", "10.2.0.11/24", "192.168.201.1", "192.168.201.0/26")
	if _, err := r.attach("pod"); err != nil {
		t.Fatal(err)
	}
	await.Until(t, "routes to the peers", func() error {
		return errors.Join(h.lists("route", "192.168.200.0/26 nhid"), h.lists("route", "192.168.201.0/26 nhid"))
	})
	r.kill(syscall.SIGKILL)
	for _, key := range []store.Key{store.ResourceKey(store.KindNode, "node3"), store.BlockKey(netip.MustParsePrefix("192.168.201.0/26"))} {
		if err := store.Delete(t.Context(), c, key, 0); err != nil {
			t.Fatal(err)
		}
	}
	s.Close()
	m := h.monitor()

	r = h.start()
	r.when("the outage is told", func(n *apiv1.NodeResponse) error {
		return mentions(conditionOf(n, "Datastore").GetReason(), socket)
	})
	await.Until(t, "the workload is taken over", func() error {
		n, err := r.node()
		if err == nil && n.GetWorkloads() != 1 {
			err = fmt.Errorf("%d workloads", n.GetWorkloads())
		}
		return err
	})
	if got := m.changes(); len(got) > 0 {
		t.Errorf("a start without the datastore changed:\n%s", strings.Join(got, "\n"))
	}

	startStore(t, dir, socket)
	r.ready()
	await.Until(t, "node3's route goes", func() error {
		if strings.Contains(h.ip("route"), "192.168.201.0/26") || strings.Contains(h.ip("neigh show nud permanent"), "192.168.201.1") {
			return errors.New("it is there")
		}
		return nil
	})
	for _, change := range m.changes() {
		if !strings.Contains(change, "192.168.201.") && !strings.Contains(change, "10.2.0.11") {
			t.Errorf("the resync changed: %s", change)
		}
	}
}

// TestOwnNodeDeleted: somebody deletes the resource of a host that runs. It
// comes back, with its tunnel address, and the kernel never notices.
func TestOwnNodeDeleted(t *testing.T) {
	t.Parallel()
	h := newHost(t, "10.1.0.11/24")
	h.quietIPv6()
	r := h.start()
	n := r.ready()
	r.program()
	m := h.monitor()
	s := h.store("")
	key := store.ResourceKey(store.KindNode, "node1")
	if err := store.Delete(t.Context(), s, key, 0); err != nil {
		t.Fatal(err)
	}
	await.Until(t, "the resource is back", func() error {
		obj, err := s.Get(t.Context(), key)
		if err != nil {
			return err
		}
		got := obj.Value.(*store.Node)
		if got.Spec.BGP.IPv4Address != n.GetIpv4Address() || got.Spec.IPv4VXLANTunnelAddr != n.GetVxlanTunnelAddress() || len(got.Status.Conditions) == 0 {
			return fmt.Errorf("it is %+v, %+v", got.Spec, got.Status)
		}
		return nil
	})
	if got := m.changes(); len(got) > 0 {
		t.Errorf("the kernel was touched:\n%s", strings.Join(got, "\n"))
	}
	r.ready()
}

// TestOwnNodeGarbage: a host whose Node others overwrote with what is none goes on as it is, and
// registers anew, with the same tunnel address, while it runs and when it starts.
func TestOwnNodeGarbage(t *testing.T) {
	t.Parallel()
	h := newHost(t, "10.1.0.11/24")
	h.quietIPv6()
	socket := filepath.Join(h.dir, "ext.sock")
	startStore(t, t.TempDir(), socket)
	h.usesStore(socket)
	s := h.store(socket)
	raw, err := clientv3.New(clientv3.Config{Endpoints: []string{"unix://" + socket}, Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { raw.Close() })
	r := h.start()
	n := r.ready()
	r.programFrom(s)
	key := store.ResourceKey(store.KindNode, "node1")
	overwrite := func(with string) {
		t.Helper()
		if _, err := raw.Put(t.Context(), key.Path(), with); err != nil {
			t.Fatal(err)
		}
	}
	registered := func() {
		t.Helper()
		await.Until(t, "the Node is registered anew", func() error {
			obj, err := s.Get(t.Context(), key)
			if err != nil {
				return err
			}
			if got := obj.Value.(*store.Node); got.Spec.BGP.IPv4Address != n.GetIpv4Address() || got.Spec.IPv4VXLANTunnelAddr != n.GetVxlanTunnelAddress() {
				return fmt.Errorf("it is %+v", got.Spec)
			}
			return nil
		})
	}
	m := h.monitor()
	overwrite("{")
	registered()
	r.kill(syscall.SIGKILL)
	overwrite(`{"spec":{"bgp":7}}`)
	if _, err := s.Get(t.Context(), key); !errors.Is(err, store.ErrDecode) {
		t.Fatalf("no garbage: %v", err)
	}
	r = h.start()
	registered()
	r.ready()
	if got := m.changes(); len(got) > 0 {
		t.Errorf("the kernel was touched:\n%s", strings.Join(got, "\n"))
	}
}

// TestLockedDatastore: what calicoctl datastore migrate lock asks for is granted, and
// said. Nothing is written while it holds, also by a daemon that starts then; DEL is
// answered, and what it frees is freed afterwards.
func TestLockedDatastore(t *testing.T) {
	t.Parallel()
	for name, reserve := range map[string]map[string]any{"reserve": {}, "no reserve": {"min": 0, "max": 0}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			testLockedDatastore(t, reserve)
		})
	}
}

func testLockedDatastore(t *testing.T, reserve map[string]any) {
	h := newHost(t, "10.1.0.11/24")
	socket := filepath.Join(h.dir, "ext.sock")
	startStore(t, t.TempDir(), socket)
	h.usesStore(socket)
	h.config["ipam"] = map[string]any{"reserve": reserve}
	r := h.start()
	r.ready()
	s := h.store(socket)
	info := store.ResourceKey(store.KindClusterInformation, store.DefaultName)
	lock := func(locked bool) {
		t.Helper()
		_, err := store.Modify(t.Context(), s, info, func(cur store.Object) (any, error) {
			ci := store.Clone(cur.Value).(*v3.ClusterInformation)
			unlocked := !locked
			ci.Spec.DatastoreReady = &unlocked
			return ci, nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, pod := range []string{"early", "late"} {
		if _, err := r.attach(pod); err != nil {
			t.Fatal(err)
		}
	}
	await.Until(t, "both endpoints are written", func() error {
		_, endpoints, err := holders(t, s)
		if err == nil && len(endpoints) != 2 {
			err = fmt.Errorf("there are %v", endpoints)
		}
		return err
	})
	before := contents(t, s)
	await.Until(t, "the reserve is filled, and the conditions are on the Node", func() error {
		<-time.After(200 * time.Millisecond) // nobody tells that there is nothing more to write
		obj, err := s.Get(t.Context(), store.ResourceKey(store.KindNode, "node1"))
		if err != nil {
			return err
		}
		conditions := obj.Value.(*store.Node).Status.Conditions
		if i := slices.IndexFunc(conditions, func(c metav1.Condition) bool { return c.Status != metav1.ConditionTrue }); i >= 0 || len(conditions) == 0 {
			return fmt.Errorf("conditions: %v", conditions)
		}
		was := before
		before = contents(t, s)
		if diff := cmp.Diff(was, before); diff != "" {
			return errors.New(diff)
		}
		return nil
	})
	lock(true)
	r.when("the lock is told", func(n *apiv1.NodeResponse) error {
		return mentions(conditionOf(n, "Datastore").GetReason(), "datastoreReady: false")
	})
	if _, err := r.attach("pod"); status.Code(err) != codes.Unavailable || mentions(err.Error(), "locked") != nil {
		t.Errorf("ADD with the datastore locked: %v", err)
	}
	if err := r.detach("early"); err != nil {
		t.Errorf("DEL with the datastore locked: %v", err)
	}
	// Who deletes ClusterInformation has unlocked nothing.
	was, err := s.Get(t.Context(), info)
	if err != nil {
		t.Fatal(err)
	}
	if err := store.Delete(t.Context(), s, info, 0); err != nil {
		t.Fatal(err)
	}
	await.Until(t, "ClusterInformation is put back", func() error {
		is, err := s.Get(t.Context(), info)
		if err == nil {
			if diff := cmp.Diff(string(was.Raw), string(is.Raw)); diff != "" {
				t.Errorf("ClusterInformation (-before +put back):\n%s", diff)
			}
		}
		return err
	})
	r.when("the lock is told after it is back", func(n *apiv1.NodeResponse) error {
		return mentions(conditionOf(n, "Datastore").GetReason(), "datastoreReady: false")
	})
	if _, err := r.attach("pod"); status.Code(err) != codes.Unavailable || mentions(err.Error(), "locked") != nil {
		t.Errorf("ADD with the datastore locked and ClusterInformation put back: %v", err)
	}
	r.kill(syscall.SIGTERM)
	r = h.start()
	r.when("the lock is told again", func(n *apiv1.NodeResponse) error {
		return mentions(conditionOf(n, "Datastore").GetReason(), "datastoreReady: false")
	})
	if err := r.detach("late"); err != nil {
		t.Errorf("DEL with the datastore locked, after a restart: %v", err)
	}
	if diff := cmp.Diff(before, contents(t, s)); diff != "" {
		t.Errorf("written while the datastore was locked (-before +after):\n%s", diff)
	}
	lock(false)
	await.Until(t, "ADD after the lock", func() error {
		_, err := r.attach("pod")
		return err
	})
	await.Until(t, "what DEL freed is free", func() error {
		held, endpoints, err := holders(t, s)
		if err == nil && len(endpoints) != 1 {
			err = fmt.Errorf("there are %v", endpoints)
		}
		for addr, holder := range held {
			if strings.Contains(holder, "early") || strings.Contains(holder, "late") {
				err = fmt.Errorf("%s holds %s", holder, addr)
			}
		}
		return err
	})
}

// TestDeletedWhileDown: a ClusterInformation that somebody deletes while no daemon runs is put
// back as it was, and no other one is made.
func TestDeletedWhileDown(t *testing.T) {
	t.Parallel()
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
		t.Run(sig.String(), func(t *testing.T) {
			t.Parallel()
			h := newHost(t, "10.1.0.11/24")
			socket := filepath.Join(h.dir, "ext.sock")
			startStore(t, t.TempDir(), socket)
			h.usesStore(socket)
			r := h.start()
			r.ready()
			if _, err := r.attach("pod"); err != nil {
				t.Fatal(err)
			}
			s := h.store(socket)
			info := store.ResourceKey(store.KindClusterInformation, store.DefaultName)
			was, err := s.Get(t.Context(), info)
			if err != nil {
				t.Fatal(err)
			}
			await.Until(t, "the host's copy of it is on the disk", func() error {
				text, err := os.ReadFile(clusterFile(config.Config{StateDir: filepath.Join(h.dir, "state")}))
				if err == nil {
					err = mentions(string(text), "clusterGUID")
				}
				return err
			})
			r.kill(sig)
			if err := store.Delete(t.Context(), s, info, 0); err != nil {
				t.Fatal(err)
			}
			r = h.start()
			r.ready()
			await.Until(t, "ClusterInformation is there", func() error {
				is, err := s.Get(t.Context(), info)
				if err == nil {
					if diff := cmp.Diff(string(was.Raw), string(is.Raw)); diff != "" {
						t.Errorf("ClusterInformation (-before +put back):\n%s", diff)
					}
				}
				return err
			})
		})
	}
}

// TestLockedWhileDown: a daemon that had no lock when it ended writes nothing before it
// knows of the one that there is now.
func TestLockedWhileDown(t *testing.T) {
	t.Parallel()
	h := newHost(t, "10.1.0.11/24")
	dir, socket := t.TempDir(), filepath.Join(h.dir, "ext.sock")
	server := startStore(t, dir, socket)
	h.usesStore(socket)
	r := h.start()
	r.ready()
	if _, err := r.attach("pod"); err != nil {
		t.Fatal(err)
	}
	s := h.store(socket)
	await.Until(t, "the endpoint is written", func() error {
		_, endpoints, err := holders(t, s)
		if err == nil && len(endpoints) != 1 {
			err = fmt.Errorf("there are %v", endpoints)
		}
		return err
	})
	server.Close()
	r.when("the datastore is away", func(n *apiv1.NodeResponse) error {
		if conditionOf(n, "Datastore").GetOk() {
			return errors.New("it is there")
		}
		return nil
	})
	if err := r.detach("pod"); err != nil {
		t.Fatal(err)
	}
	r.kill(syscall.SIGKILL)
	startStore(t, dir, socket)
	info := store.ResourceKey(store.KindClusterInformation, store.DefaultName)
	lock := func(locked bool) {
		t.Helper()
		_, err := store.Modify(t.Context(), s, info, func(cur store.Object) (any, error) {
			ci := store.Clone(cur.Value).(*v3.ClusterInformation)
			unlocked := !locked
			ci.Spec.DatastoreReady = &unlocked
			return ci, nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	await.Until(t, "the datastore is there again", func() error {
		_, err := s.Get(t.Context(), info)
		return err
	})
	lock(true)
	before := contents(t, s)
	r = h.start()
	r.when("the lock is told", func(n *apiv1.NodeResponse) error {
		return mentions(conditionOf(n, "Datastore").GetReason(), "datastoreReady: false")
	})
	if diff := cmp.Diff(before, contents(t, s)); diff != "" {
		t.Errorf("written while the datastore was locked (-before +after):\n%s", diff)
	}
	lock(false)
	await.Until(t, "what DEL freed is free", func() error {
		held, endpoints, err := holders(t, s)
		if err == nil && len(held)+len(endpoints) > 0 {
			err = fmt.Errorf("held %v, endpoints %v", held, endpoints)
		}
		return err
	})
}

// contents lists the revision of all that Calico's tools know, but for the lock itself.
func contents(t *testing.T, s store.Store) map[string]store.Revision {
	t.Helper()
	out := map[string]store.Revision{}
	for _, k := range append(store.Kinds(), store.KindIPAMBlock, store.KindIPAMAffinity, store.KindIPAMHandle) {
		if k == store.KindClusterInformation {
			continue
		}
		list, _, err := s.List(t.Context(), k, "")
		if err != nil {
			t.Fatal(err)
		}
		for _, o := range list {
			out[o.Key.Path()] = o.Revision
		}
	}
	return out
}
