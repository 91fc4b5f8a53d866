package bgp

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/routerd/routerd/integration/await"
)

// frr is FRR's bgpd in the role of a switch: without zebra, with directories
// of its own.
type frr struct {
	*process
	t    testing.TB
	dir  string
	addr netip.Addr
}

// startFRR runs bgpd with a configuration.
func startFRR(t testing.TB, addr netip.Addr, conf string) *frr {
	t.Helper()
	const bgpd = "/usr/lib/frr/bgpd"
	if _, err := os.Stat(bgpd); err != nil {
		t.Fatal("FRR is needed: run `make deps`, which installs Debian's frr:", err)
	}
	dir := t.TempDir()
	f := &frr{t: t, dir: dir, addr: addr}
	file := filepath.Join(dir, "frr.conf")
	if err := os.WriteFile(file, []byte(conf), 0o644); err != nil {
		t.Fatal(err)
	}
	f.process = start(t, exec.Command(bgpd, "-f", file, "-i", filepath.Join(dir, "bgpd.pid"), "--vty_socket", dir,
		"-Z", "-S", "-P", "0", "-p", "179", "-l", addr.String(), "--log", "file:"+filepath.Join(dir, "log"), "--log-level", "informational"))
	poll(t, func() string { return "FRR answering: " + f.log.String() + f.logText() },
		func() bool { _, err := f.try("show version"); return err == nil })
	return f
}

func (f *frr) logText() string {
	b, err := os.ReadFile(filepath.Join(f.dir, "log"))
	if err != nil {
		return err.Error()
	}
	return string(b)
}

func (f *frr) try(cmds ...string) (string, error) {
	args := []string{"--vty_socket", f.dir, "-d", "bgpd"}
	for _, c := range cmds {
		args = append(args, "-c", c)
	}
	ctx, cancel := context.WithTimeout(context.Background(), await.Patience)
	defer cancel()
	out, err := exec.CommandContext(ctx, "vtysh", args...).CombinedOutput()
	return string(out), err
}

func (f *frr) vtysh(cmds ...string) string {
	f.t.Helper()
	out, err := f.try(cmds...)
	if err != nil {
		f.t.Fatalf("vtysh %q: %v: %s\n%s", cmds, err, out, f.logText())
	}
	return out
}

// configure changes the running configuration.
func (f *frr) configure(lines ...string) {
	f.t.Helper()
	f.vtysh(append([]string{"configure terminal"}, lines...)...)
}

func (f *frr) waitFor(says string, cmd string) string {
	f.t.Helper()
	out := ""
	poll(f.t, func() string { return fmt.Sprintf("FRR's %q saying %q; it says\n%s\n%s", cmd, says, out, f.logText()) },
		func() bool { out = f.vtysh(cmd); return strings.Contains(out, says) })
	return out
}

// without waits until a command's output lacks something.
func (f *frr) without(says string, cmd string) {
	f.t.Helper()
	out := ""
	poll(f.t, func() string { return fmt.Sprintf("FRR's %q without %q; it says\n%s", cmd, says, out) },
		func() bool { out = f.vtysh(cmd); return !strings.Contains(out, says) })
}

// frrConf is bgpd with one neighbour, extra lines for it, and networks.
func frrConf(self netip.Addr, asn uint32, peer netip.Addr, peerASN uint32, extra []string, networks ...string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "frr defaults datacenter\nrouter bgp %d\n bgp router-id %s\n no bgp ebgp-requires-policy\n no bgp network import-check\n", asn, routerIDOf(self))
	fmt.Fprintf(&b, " bgp graceful-restart\n neighbor %s remote-as %d\n neighbor %s update-source %s\n neighbor %s timers connect 1\n neighbor %s passive\n", peer, peerASN, peer, self, peer, peer)
	if asn != peerASN {
		fmt.Fprintf(&b, " neighbor %s ebgp-multihop\n", peer)
	}
	for _, l := range extra {
		fmt.Fprintf(&b, " %s\n", strings.ReplaceAll(l, "PEER", peer.String()))
	}
	family := "ipv4"
	if peer.Is6() {
		family = "ipv6"
	}
	fmt.Fprintf(&b, " address-family %s unicast\n  neighbor %s activate\n", family, peer)
	for _, n := range networks {
		fmt.Fprintf(&b, "  network %s\n", n)
	}
	b.WriteString(" exit-address-family\nexit\n")
	return b.String()
}

// routerIDOf makes an identifier of an address of either family.
func routerIDOf(a netip.Addr) netip.Addr {
	if a.Is4() {
		return a
	}
	b := a.As16()
	return netip.AddrFrom4([4]byte{10, 78, b[4], b[15]})
}

// TestFRRSwitch peers by eBGP with FRR as a top-of-rack switch.
func TestFRRSwitch(t *testing.T) {
	t.Parallel()
	h := hosts(t, 2)
	f := startFRR(t, h[1], frrConf(h[1], 4200000001, h[0], 4200000002, nil, "203.0.113.0/24", "0.0.0.0/0", "198.51.100.7/32"))
	r := newRun(t, SpeakerOptions{})
	c := testConfig(h[0], 4200000002, []string{"192.168.1.0/26", "192.168.9.5/32"}, tor(h[0], h[1], 4200000001))
	c.Tags = map[netip.Prefix]string{netip.MustParsePrefix("192.168.1.0/26"): "65000:100 65000:200:3"}
	r.apply(c)
	r.waitUp(h[1])
	if p := r.waitPath("203.0.113.0/24"); p.ASPath != "4200000001" || p.IBGP || p.NextHop != h[1] {
		t.Errorf("path %+v", p)
	}
	r.waitPath("198.51.100.7/32")
	poll(t, r.dump, func() bool { st := r.status(h[1]); return st.Accepted == 2 })
	f.waitFor("192.168.9.5/32", "show bgp ipv4 unicast")
	out := f.waitFor("65000:200:3", "show bgp ipv4 unicast 192.168.1.0/26")
	for _, says := range []string{"4200000002", "(" + h[0].String() + ")", "Community: 65000:100", "Large Community: 65000:200:3"} {
		if !strings.Contains(out, says) {
			t.Errorf("FRR has no %q in\n%s", says, out)
		}
	}
	c2 := c
	c2.Tags = nil
	r.apply(c2)
	f.without("Community", "show bgp ipv4 unicast 192.168.1.0/26")
}
