package main

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/dataplane/workload/netnstest"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
)

// birdTOR is a top-of-rack switch: BIRD in a namespace, behind which is one address. A
// restart of the host is not waited for.
type birdTOR struct {
	*host
	ctl string
}

const torAddr, behindTOR = "10.1.0.1", "203.0.113.1"

// newBirdTOR starts a switch that holds its session for so many seconds, 3 at least,
// without a sign of life.
func newBirdTOR(t *testing.T, hold int) *birdTOR {
	t.Helper()
	s := &birdTOR{host: &host{t: t, ns: netnstest.New(t), dir: t.TempDir()}}
	s.ip("link set lo up")
	s.ip("addr add " + behindTOR + "/32 dev lo")
	if _, err := s.exec("sysctl", "-qw", "net.ipv4.ip_forward=1"); err != nil {
		t.Fatal(err)
	}
	conf := filepath.Join(s.dir, "bird.conf")
	s.ctl = filepath.Join(s.dir, "ctl")
	text := fmt.Sprintf(`router id `+torAddr+`;
protocol device { scan time 1; }
protocol direct { ipv4; interface "lo"; }
protocol kernel { ipv4 { import none; export where source = RTS_BGP; }; }
protocol bgp node1 {
	local `+torAddr+` as 64999;
	neighbor 10.1.0.11 as 64512;
	hold time %d;
	graceful restart off;
	connect retry time 1;
	error wait time 1, 1;
	ipv4 { import all; export all; };
}
`, hold)
	if err := os.WriteFile(conf, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	var out log
	cmd := exec.Command("/usr/sbin/bird", "-f", "-c", conf, "-s", s.ctl, "-P", filepath.Join(s.dir, "pid"))
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := s.ns.Do(cmd.Start); err != nil {
		t.Fatalf("start BIRD (run `make deps`, which installs Debian's bird2): %v", err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // it was killed
		if t.Failed() {
			t.Logf("BIRD says:\n%s", &out)
		}
	})
	return s
}

// plug plugs a host's wire into the switch.
func (s *birdTOR) plug(h *host) {
	s.t.Helper()
	h.ip("link set veth-wire netns " + s.ns.Path)
	s.ip("addr add " + torAddr + "/24 dev veth-wire")
	s.ip("link set veth-wire up")
}

// routes returns the switch's own routes to pods, as its kernel has them.
func (s *birdTOR) routes() string {
	s.t.Helper()
	return s.ip("route show proto bird")
}

// session says since when the switch has its session with the host, to some milliseconds, and
// how many routes came and went in it.
func (s *birdTOR) session() (since time.Time, routes string) {
	s.t.Helper()
	out, err := s.exec("birdc", "-s", s.ctl, "show", "protocols", "all", "node1")
	if err != nil {
		s.t.Fatal(err)
	}
	var lines []string
	for line := range strings.Lines(out) {
		if f := strings.Fields(line); len(f) > 5 && f[0] == "node1" {
			// BIRD counts it back from now each time, by two clocks.
			if since, err = time.Parse("15:04:05.000", f[4]); err != nil {
				s.t.Fatalf("since when the session is up: %v: %q", err, line)
			}
			lines = append(lines, strings.Join(slices.Delete(f, 4, 5), " "))
		}
		if strings.Contains(line, "updates:") || strings.Contains(line, "withdraws:") {
			lines = append(lines, strings.TrimSpace(line))
		}
	}
	return since, strings.Join(lines, "\n")
}

// lose deletes a device whose other end's namespace has ended. The kernel does so too, a moment
// later.
func (h *host) lose(device string) {
	h.t.Helper()
	out, err := h.exec("ip", "link", "del", device)
	if err != nil && !strings.Contains(out, "Cannot find device") && !strings.Contains(out, "No such device") {
		h.t.Fatal(err)
	}
}

// attachIn gives a new workload an interface, and returns its namespace.
func (r *running) attachIn(id string) (pod *host, addr netip.Addr, err error) {
	pod = &host{t: r.t, ns: netnstest.New(r.t)}
	got, err := r.cni.Add(await.Context(r.t), &apiv1.AddRequest{
		Attachment: &apiv1.Attachment{Network: "routerd", ContainerId: id, Ifname: "eth0"},
		Workload:   &apiv1.Workload{Orchestrator: "cni", Namespace: "default"},
		Netns:      pod.ns.Path, AssignIpv4: true,
	})
	if err != nil {
		return nil, addr, err
	}
	return pod, netip.MustParsePrefix(got.GetAddresses()[0].GetCidr()).Addr(), nil
}

// TestRebootBehindTOR: a host boots while its datastore is away, after its switch has
// given up on it. It comes up with its whole network: the session, the block that it
// announces, the switch's routes, and workloads that reach what is behind the switch.
func TestRebootBehindTOR(t *testing.T) {
	t.Parallel()
	h := newHost(t, "10.1.0.11/24")
	socket, dir := filepath.Join(h.dir, "ext.sock"), t.TempDir()
	h.usesStore(socket)
	h.config["defaultPool"] = map[string]any{"cidr": "none"}
	tor := newBirdTOR(t, 3) // the shortest that there is
	tor.plug(h)
	s := startStore(t, dir, socket)
	pool := store.New(store.KindIPPool).(*v3.IPPool) // plain, and not translated: answers come by the switch's route
	pool.Name, pool.Spec.CIDR = "pods", "192.168.0.0/16"
	if _, err := store.Create(t.Context(), h.store(socket), pool); err != nil {
		t.Fatal(err)
	}
	r := h.start()
	r.ready()
	peer := v3.NewBGPPeer()
	peer.Name, peer.Spec.PeerIP, peer.Spec.ASNumber = "tor", torAddr, 64999
	if _, err := store.Create(t.Context(), h.store(socket), peer); err != nil {
		t.Fatal(err)
	}
	whole := func(r *running, id string) netip.Addr {
		t.Helper()
		var pod *host
		var addr netip.Addr
		await.Until(t, "ADD", func() (err error) {
			pod, addr, err = r.attachIn(id)
			return err
		})
		await.Until(t, "the switch's route to the block, and the host's to what is behind the switch", func() error {
			return errors.Join(h.lists("route", behindTOR), mentions(tor.routes(), "192.168.", "via 10.1.0.11"))
		})
		await.Until(t, "the workload reaches what is behind the switch", func() error {
			_, err := pod.exec("ping", "-c1", "-W1", behindTOR)
			return err
		})
		return addr
	}
	whole(r, "before")
	await.Until(t, "what the daemon knows is on its disk", func() error {
		copied, err := os.ReadFile(filepath.Join(h.dir, "state", "cluster.journal"))
		if err != nil {
			return err
		}
		return mentions(string(copied), "ippools/pods", "nodes/node1", "bgppeers/tor", "/calico/ipam/v2/host/node1/")
	})
	await.Until(t, "its reserve is on its disk", func() error {
		if n := remembered(t, filepath.Join(h.dir, "state", "workloads", "journal")); n == 0 {
			return errors.New("no address")
		}
		return nil
	})

	// The power goes: nobody says goodbye, and what was in the kernel is no more.
	for _, c := range []string{
		"add table inet dark", "add chain inet dark in { type filter hook prerouting priority -500; policy drop; }",
	} {
		if _, err := tor.exec("nft", c); err != nil {
			t.Fatal(err)
		}
	}
	r.kill(syscall.SIGKILL)
	s.Close()
	h.ns.End()
	await.Until(t, "the switch gives up", func() error {
		if routes := tor.routes(); routes != "" {
			return fmt.Errorf("it has %s", routes)
		}
		return nil
	})
	if _, err := tor.exec("nft", "delete", "table", "inet", "dark"); err != nil {
		t.Fatal(err)
	}
	tor.lose("veth-wire")
	if err := os.RemoveAll(h.runDir()); err != nil {
		t.Fatal(err)
	}

	booted := newHost(t, "10.1.0.11/24")
	h.ns = booted.ns
	tor.plug(h)
	r = h.start()
	r.when("the datastore's absence is said", func(n *apiv1.NodeResponse) error {
		return mentions(conditionOf(n, "Datastore").GetReason(), socket)
	})
	second := whole(r, "after")
	if err := mentions(conditionOf(mustNode(r), "Datastore").GetReason(), socket); err != nil {
		t.Errorf("the datastore was there: %v", err)
	}

	startStore(t, dir, socket)
	r.ready()
	await.Until(t, "the datastore knows of the workload", func() error {
		held, _, err := holders(t, h.store(socket))
		if err == nil && held[second.String()] == "" {
			err = fmt.Errorf("held %v", held)
		}
		return err
	})
	whole(r, "last")
}

func mustNode(r *running) *apiv1.NodeResponse {
	r.t.Helper()
	n, err := r.node()
	if err != nil {
		r.t.Fatal(err)
	}
	return n
}
