package kernel

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/internal/nl"
	"github.com/routerd/routerd/integration/await"
)

// named waits until the log says that somebody else changed an object.
func (r *running) named(object string) {
	r.t.Helper()
	await.Until(r.t, "the log names "+object, func() error {
		for line := range strings.Lines(r.log.String()) {
			if strings.Contains(line, `msg="changed by somebody else, `) && strings.Contains(line, `object="`+object+`"`) {
				return nil
			}
		}
		return errors.New("not yet")
	})
}

// TestStrayBeforeTheSweep adds an address before every source has said all that
// it wants. It stays until then, for it may be wanted yet; but who comes later
// reads when it came, and that it went.
func TestStrayBeforeTheSweep(t *testing.T) {
	t.Parallel()
	var count repairs
	l := newLab(t)
	l.wire("up0", "up1", "10.0.0.1/24")
	l.run("ip route add 172.16.0.0/16 via 10.0.0.9 proto 77") // of an earlier life
	k := l.start(count.hook)
	k.Synced(dataplane.SourceWorkload)
	k.put(host()...)
	k.ready()
	l.run("ip addr add 203.0.113.5/32 dev vxlan.calico", "ip addr add 203.0.113.6/32 dev vxlan.calico")
	k.named("address 203.0.113.5/32 dev vxlan.calico")
	k.named("address 203.0.113.6/32 dev vxlan.calico")
	l.run("ip addr del 203.0.113.6/32 dev vxlan.calico") // by whom it was added
	k.caughtUp()
	l.shows("ip -4 -br addr show dev vxlan.calico", "vxlan.calico UNKNOWN 192.168.0.1/32 203.0.113.5/32")
	if n := len(count.sorted()); n != 0 {
		t.Errorf("%d repairs before the sweep", n)
	}
	k.Synced(dataplane.SourceCore)
	l.shows("ip -4 -br addr show dev vxlan.calico", "vxlan.calico UNKNOWN 192.168.0.1/32")
	l.shows("ip route show 172.16.0.0/16", "")
	k.caughtUp()
	log := k.log.String()
	if n := strings.Count(log, `msg="put back" object="address 203.0.113.5/32 dev vxlan.calico" was=absent`); n != 1 || len(count.sorted()) != 1 {
		t.Errorf("%d lines and %d counts of one repair", n, len(count.sorted()))
	}
	if strings.Contains(log, `object="route 172.16.0.0/16`) {
		t.Error("what an earlier life left is taken for a change by somebody else")
	}
}

// TestStrayGoesWithItsDevice adds an address to a device and deletes the device
// at once: both may be over before either is looked at.
func TestStrayGoesWithItsDevice(t *testing.T) {
	t.Parallel()
	l, k := newHost(t)
	k.put(host()...)
	k.ready()
	file := filepath.Join(t.TempDir(), "batch")
	for i := range 30 {
		// Another one at each turn, so that none is damped.
		name := fmt.Sprintf("vxlan.calico-%d", 10+i)
		k.put(dataplane.Link{Name: name, Type: dataplane.LinkVXLAN, VNI: uint32(100 + i), Port: 4789, Local: addr("10.0.0.1"), Parent: "up0"})
		stray := fmt.Sprintf("203.0.113.%d/32 dev %s", i+1, name)
		if err := os.WriteFile(file, []byte("addr add "+stray+"\nlink del "+name+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		l.run("ip -batch " + file)
		k.named("address " + stray)
		k.named("link " + name)
	}
}

// following calls then after each batch that the kernel answered.
type following struct {
	transport
	then func(*nl.Batch)
}

func (f *following) Batch(b *nl.Batch, answer func(int, nl.Message)) (map[int]error, error) {
	errs, err := f.transport.Batch(b, answer)
	f.then(b)
	return errs, err
}

// TestStrayOnANewDevice adds an address to a device of ours between the
// kernel's making it and the writer's first look at it.
func TestStrayOnANewDevice(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.wire("up0", "up1", "10.0.0.1/24")
	added := false
	k := l.start(through(func(inner transport) transport {
		return &following{transport: inner, then: func(b *nl.Batch) {
			for m := range nl.Messages(b.B) {
				if m.Type == unix.RTM_NEWLINK && !added {
					added = true
					l.run("ip addr add 203.0.113.7/32 dev vxlan.calico")
				}
			}
		}}
	}))
	k.synced()
	k.put(host()...)
	k.named("address 203.0.113.7/32 dev vxlan.calico")
	l.shows("ip -4 -br addr show dev vxlan.calico", "vxlan.calico UNKNOWN 192.168.0.1/32")
}
