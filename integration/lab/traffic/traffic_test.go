package traffic

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab/ns"
)

// wire makes two namespaces joined through a third that forwards: a is
// 10.0.1.2, b is 10.0.2.2, and the second wire takes 1000 bytes only.
func wire(t *testing.T, name string) (a, r, b string) {
	t.Helper()
	prefix := fmt.Sprintf("trf%d%s-", os.Getpid(), name)
	spaces := []string{prefix + "a", prefix + "r", prefix + "b"}
	for _, s := range spaces {
		if err := ns.Create(s); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := ns.Delete(s); err != nil {
				t.Error(err)
			}
		})
	}
	a, r, b = spaces[0], spaces[1], spaces[2]
	script := strings.NewReplacer("A", a, "R", r, "B", b).Replace(`
ip -n A link add eth0 type veth peer name left netns R
ip -n B link add eth0 mtu 1000 type veth peer name right mtu 1000 netns R
for n in A R B; do ip -n $n link set lo up; done
ip -n A addr add 10.0.1.2/24 dev eth0; ip -n A link set eth0 up
ip -n B addr add 10.0.2.2/24 dev eth0; ip -n B link set eth0 up
ip -n R addr add 10.0.1.1/24 dev left; ip -n R link set left up
ip -n R addr add 10.0.2.1/24 dev right; ip -n R link set right up
ip -n A route add default via 10.0.1.1
ip -n B route add default via 10.0.2.1
ip netns exec R sysctl -qw net.ipv4.ip_forward=1`)
	run(t, script)
	return a, r, b
}

func run(t *testing.T, script string) {
	t.Helper()
	if out, err := exec.Command("sh", "-ec", script).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
}

func addr(a, b, c, d byte) netip.Addr { return netip.AddrFrom4([4]byte{a, b, c, d}) }

func TestPing(t *testing.T) {
	t.Parallel()
	a, _, _ := wire(t, "ping")
	far, near := addr(10, 0, 2, 2), addr(10, 0, 1, 1)
	for _, tt := range []struct {
		name    string
		dst     netip.Addr
		o       Options
		wantTTL int // 0: no answer
		wantErr string
	}{
		{"neighbour", near, Options{}, 64, ""},
		{"through the router", far, Options{}, 63, ""},
		{"as large as the path takes", far, Options{Size: 1000, DF: true}, 63, ""},
		{"too large for the path", far, Options{Size: 1001, DF: true}, 0, "fragmentation needed, mtu 1000 (from 10.0.1.1)"},
		{"fragments", far, Options{Size: 4000}, 63, ""},
		{"TTL used up", far, Options{TTL: 1}, 0, "time to live exceeded (from 10.0.1.1)"},
		{"no such host", addr(10, 0, 9, 9), Options{}, 0, "network unreachable (from 10.0.1.1)"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			r, err := Ping(await.Context(t), a, tt.dst, tt.o)
			if err != nil {
				t.Fatal(err)
			}
			if r.OK != (tt.wantTTL != 0) || r.TTL != tt.wantTTL || r.Err != tt.wantErr {
				t.Errorf("got %+v, want TTL %d and error %q", r, tt.wantTTL, tt.wantErr)
			}
			if size := max(tt.o.Size, MinSize); r.OK && r.Size != size {
				t.Errorf("answer of %d bytes, want %d", r.Size, size)
			}
		})
	}
}

func TestPingWithoutAnswer(t *testing.T) {
	t.Parallel()
	a, _, b := wire(t, "mute")
	run(t, "ip netns exec "+b+" sysctl -qw net.ipv4.icmp_echo_ignore_all=1")
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	r, err := Ping(ctx, a, addr(10, 0, 2, 2), Options{})
	if err != nil || r.OK || r.Err != NoAnswer {
		t.Errorf("got %+v, %v; want no answer", r, err)
	}
}

func TestBadOptions(t *testing.T) {
	t.Parallel()
	for _, o := range []Options{{Size: 10}, {Size: 70000}, {TTL: -1}, {TTL: 256}} {
		if _, err := Ping(t.Context(), "nowhere", addr(10, 0, 0, 1), o); err == nil || strings.Contains(err.Error(), "nowhere") {
			t.Errorf("%+v: %v, want an error about the options", o, err)
		}
	}
	if _, err := Ping(t.Context(), "no-such-space", addr(10, 0, 0, 1), Options{}); err == nil || !strings.Contains(err.Error(), "no-such-space") {
		t.Errorf("got %v, want an error that names the namespace", err)
	}
	if _, err := StartFlow(t.Context(), "nowhere", addr(10, 0, 0, 1), 0, Options{}); err == nil {
		t.Error("a rate of 0 was accepted")
	}
}

func TestProbe(t *testing.T) {
	t.Parallel()
	a, _, _ := wire(t, "probe")
	targets := []netip.Addr{addr(10, 0, 1, 1), addr(10, 0, 2, 1), addr(10, 0, 2, 2)}
	got, err := Probe(await.Context(t), a, targets, Options{})
	if err != nil {
		t.Fatal(err)
	}
	for _, dst := range targets {
		if !got[dst].OK {
			t.Errorf("%s: %s", dst, got[dst])
		}
	}
	// One that answers does not make up for one that does not.
	targets = append(targets, addr(10, 0, 2, 9))
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	got, err = Probe(ctx, a, targets, Options{})
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != 4 || got[addr(10, 0, 2, 9)].OK || !got[addr(10, 0, 2, 2)].OK {
		t.Errorf("got %v", got)
	}
}

// An address that comes to life late is found: requests are repeated.
func TestProbeWaits(t *testing.T) {
	t.Parallel()
	a, _, b := wire(t, "late")
	late := addr(10, 0, 2, 7)
	done := make(chan error, 1)
	go func() {
		got, err := Probe(await.Context(t), a, []netip.Addr{late}, Options{})
		if err == nil && !got[late].OK {
			err = errors.New(got[late].Err)
		}
		done <- err
	}()
	run(t, "ip -n "+b+" addr add 10.0.2.7/24 dev eth0")
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func TestFlowCountsEveryPacket(t *testing.T) {
	t.Parallel()
	a, r, _ := wire(t, "flow")
	f, err := StartFlow(t.Context(), a, addr(10, 0, 2, 2), 1000, Options{})
	if err != nil {
		t.Fatal(err)
	}
	if err := f.WaitReceived(await.Context(t), 200); err != nil {
		t.Error(err)
	}
	if rep := f.Report(); rep.SendErrors != 0 || rep.Duplicates != 0 {
		t.Errorf("on a quiet wire: %s", rep)
	}
	// Cut the wire, then mend it: the loss is seen, and only that.
	run(t, "ip -n "+r+" link set right down")
	cut := f.Report().Sent
	await.True(t, "requests on the cut wire", func() bool { return f.Report().Sent >= cut+100 })
	run(t, "ip -n "+r+" link set right up")
	if err := f.WaitReceived(await.Context(t), f.Report().Received+100); err != nil {
		t.Error(err)
	}
	rep := f.Stop()
	if rep.Lost() < 50 || rep.Received < 300 || rep.Lost()+rep.Received != rep.Sent+rep.SendErrors {
		t.Errorf("after a cut: %s", rep)
	}
	if rep.FirstLost == 0 || rep.LastLost < rep.FirstLost || rep.LongestGap == 0 {
		t.Errorf("the loss has no time: %+v", rep)
	}
}

func TestFlowWithoutLoss(t *testing.T) {
	t.Parallel()
	a, _, _ := wire(t, "clean")
	f, err := StartFlow(t.Context(), a, addr(10, 0, 2, 2), 500, Options{Size: 1000, DF: true})
	if err != nil {
		t.Fatal(err)
	}
	if err := f.WaitReceived(await.Context(t), 250); err != nil {
		t.Error(err)
	}
	if rep := f.Stop(); rep.Lost() != 0 || rep.Duplicates != 0 || rep.Complaints != 0 || rep.Sent < 250 {
		t.Errorf("got %s", rep)
	}
}

// Every answer that is counted twice is a duplicate, never another's.
func TestNote(t *testing.T) {
	t.Parallel()
	f := &Flow{start: time.Now(), sentAt: make([]time.Duration, 3), answered: make([]bool, 3)}
	f.report.Sent = 3
	for _, m := range []message{{seq: 0}, {seq: 2}, {seq: 2}, {seq: 7}, {err: "host unreachable", from: addr(10, 0, 0, 1)}} {
		f.note(m)
	}
	rep := f.Report()
	if rep.Received != 2 || rep.Duplicates != 1 || rep.Complaints != 1 || rep.Lost() != 1 {
		t.Errorf("got %+v", rep)
	}
	if !strings.Contains(rep.String(), "1 lost") || !strings.Contains(rep.String(), "host unreachable (from 10.0.0.1)") {
		t.Errorf("got %s", rep)
	}
}

func TestParseRefusesOthers(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		c := &conn{id: 7, secret: rapid.Uint64().Draw(t, "secret"), size: MinSize}
		seq := rapid.Uint64().Draw(t, "seq")
		body := c.request(seq)
		body[0] = typeEchoReply
		body[2], body[3] = 0, 0
		sum := checksum(body)
		body[2], body[3] = byte(sum>>8), byte(sum)
		packet := append([]byte{0x45, 0, 0, 0, 0, 0, 0, 0, 61, 1, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2}, body...)
		m, ok := c.parse(packet)
		if !ok || m.seq != seq || m.ttl != 61 || m.dst != addr(10, 0, 0, 1) {
			t.Fatalf("own answer read as %+v, %v", m, ok)
		}
		// Any one byte of the message changed makes it nobody's.
		i := rapid.IntRange(ipv4HeaderLen, len(packet)-1).Draw(t, "byte")
		packet[i] ^= byte(rapid.IntRange(1, 255).Draw(t, "change"))
		if m, ok := c.parse(packet); ok && m.err == "" {
			t.Fatalf("changed byte %d, read as %+v", i, m)
		}
		if _, ok := c.parse(packet[:rapid.IntRange(0, len(packet)-1).Draw(t, "cut")]); ok {
			t.Fatal("a message cut short was read")
		}
	})
}
