package neighbour

import (
	"context"
	"net"
	"net/netip"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/workload/netnstest"
	"github.com/routerd/routerd/integration/await"
)

func run(t *testing.T, n *netnstest.Netns, command string) {
	t.Helper()
	err := n.Do(func() error {
		f := strings.Fields(command)
		out, err := exec.Command(f[0], f[1:]...).CombinedOutput()
		if err != nil {
			t.Errorf("%s: %v\n%s", command, err, out)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// world is two hosts on one wire, and an Asker on the first.
type world struct {
	t      *testing.T
	a, b   *netnstest.Netns
	asker  *Asker
	index  int
	events chan Event
}

func newWorld(t *testing.T) *world {
	w := &world{t: t, a: netnstest.New(t), b: netnstest.New(t), events: make(chan Event, 1000)}
	run(t, w.a, "ip link add eth0 type veth peer name eth0 netns "+w.b.Path)
	for i, n := range []*netnstest.Netns{w.a, w.b} {
		last := string(rune('1' + i))
		run(t, n, "ip link set lo up")
		run(t, n, "ip link set eth0 up")
		run(t, n, "ip addr add 10.9.0."+last+"/24 dev eth0")
		run(t, n, "ip addr add fd00:9::"+last+"/64 dev eth0 nodad")
	}
	// Fast, so that the test need not wait for the usual three seconds.
	for _, f := range []string{"ipv4", "ipv6"} {
		run(t, w.a, "sysctl -qw net."+f+".neigh.eth0.retrans_time_ms=50")
	}
	err := w.a.Do(func() (err error) {
		link, err := net.InterfaceByName("eth0")
		if err != nil {
			return err
		}
		w.index = link.Index
		w.asker, err = Open()
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- w.asker.Run(ctx, func(e Event) { w.events <- e }) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; ctx.Err() == nil {
			t.Errorf("Run: %v", err)
		}
	})
	return w
}

// expect asks until the answer comes.
func (w *world) expect(addr string, want dataplane.Answer) Event {
	w.t.Helper()
	a := netip.MustParseAddr(addr)
	deadline := time.After(await.Patience)
	for {
		if err := w.asker.Ask(w.index, a); err != nil {
			w.t.Fatal(err)
		}
		again := time.After(time.Second)
	events:
		for {
			select {
			case e := <-w.events:
				if e.Addr == a && e.LinkIndex == w.index && e.Answer == want {
					return e
				}
			case <-again:
				break events
			case <-deadline:
				w.t.Fatalf("no event says %s of %s", want, addr)
			}
		}
	}
}

func TestNeighbours(t *testing.T) {
	t.Parallel()
	for _, f := range []struct{ name, there, away string }{
		{"IPv4", "10.9.0.2", "10.9.0.3"},
		{"IPv6", "fd00:9::2", "fd00:9::3"},
		// An address outside the device's subnets is asked for all the same.
		{"IPv4 elsewhere", "", "192.0.2.1"},
	} {
		t.Run(f.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			w.expect(f.away, dataplane.No)
			if f.there == "" {
				return
			}
			known := w.expect(f.there, dataplane.Yes)
			// It goes away: the kernel is told to ask at once.
			run(t, w.b, "ip link set eth0 arp off")
			run(t, w.b, "ip addr flush dev eth0")
			if err := w.asker.Probe(w.index, netip.MustParseAddr(f.there), known.MAC); err != nil {
				t.Fatal(err)
			}
			w.expect(f.there, dataplane.No)
		})
	}
}

// An entry that somebody made by hand is told as that: to ask would undo it.
func TestFixed(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	run(t, w.a, "ip neigh replace 10.9.0.9 lladdr 02:00:00:00:00:99 nud permanent dev eth0")
	deadline := time.After(await.Patience)
	for {
		select {
		case e := <-w.events:
			if e.Addr != netip.MustParseAddr("10.9.0.9") {
				continue
			}
			if !e.Fixed || e.Answer != dataplane.Yes {
				t.Errorf("got %+v", e)
			}
			return
		case <-deadline:
			t.Fatal("nothing was told of it")
		}
	}
}

// What the kernel knows already is told first.
func TestRunTellsWhatIsKnown(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.expect("10.9.0.2", dataplane.Yes)
	var second *Asker
	if err := w.a.Do(func() (err error) { second, err = Open(); return err }); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), await.Patience)
	defer cancel()
	told := false
	_ = second.Run(ctx, func(e Event) {
		if e.Addr.String() == "10.9.0.2" && e.Answer == dataplane.Yes {
			told = true
			cancel()
		}
	})
	if !told {
		t.Error("10.9.0.2 was not told")
	}
}

// TestListBesideRun: who hears events may ask before the next one is heard.
func TestListBesideRun(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.expect("10.9.0.2", dataplane.Yes)
	var second *Asker
	if err := w.a.Do(func() (err error) { second, err = Open(); return err }); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	heard, listed, ended := make(chan struct{}), make(chan error, 1), make(chan struct{})
	go func() {
		defer close(ended)
		once := false
		_ = second.Run(ctx, func(Event) {
			if once {
				return
			}
			once = true
			close(heard)
			<-ctx.Done() // who hears it is busy
		})
	}()
	<-heard
	go func() { listed <- second.List(func(Event) {}) }()
	select {
	case <-ended:
		t.Error("Run ended")
	case err := <-listed:
		if err != nil {
			t.Error(err)
		}
	case <-await.Context(t).Done():
		t.Error("List waits for who hears the events")
	}
	cancel()
	<-ended
}

// FuzzEventOf: whatever the kernel says, nothing panics.
func FuzzEventOf(f *testing.F) {
	f.Add([]byte{2, 0, 0, 0, 2, 0, 0, 0, 2, 0, 0, 1, 8, 0, 1, 0, 10, 9, 0, 2, 10, 0, 2, 0, 1, 2, 3, 4, 5, 6, 0, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		e, ok := eventOf(unix.RTM_NEWNEIGH, b)
		if ok && !e.Addr.IsValid() {
			t.Errorf("an event without an address: %+v", e)
		}
	})
}

func TestAskErrors(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	if err := w.asker.Ask(9999, netip.MustParseAddr("10.9.0.2")); err == nil || !strings.Contains(err.Error(), "10.9.0.2") {
		t.Errorf("Ask on a device that is not there: %v", err)
	}
}
