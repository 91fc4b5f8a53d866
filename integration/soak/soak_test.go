package soak

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/integration/lab/bring"
	"github.com/routerd/routerd/integration/lab/ns"
	"github.com/routerd/routerd/store"
)

// labPrefix begins the names of this package's labs.
const labPrefix = "st"

// soakTime is how long the cluster lives here. `soak -for` lets it live for hours.
const soakTime = 20 * time.Second

// seed is what the short life here is made from: what another one finds is for
// `soak`, and its seed for a report.
const seed = 1

// TestSoak is a short life.
func TestSoak(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("network namespaces need root: run the tests with sudo")
	}
	binDir := bring.BinDir()
	if err := bring.RemoveOrphans(labPrefix); err != nil {
		t.Fatal(err)
	}
	l := bring.Up(t, 2*time.Minute, labPrefix, "soak", Topology(Modes()[0], 1, true), binDir)
	undo, err := SmallDisks(t.Context(), l, 1)
	if undo != nil {
		t.Cleanup(func() {
			if err := undo(); err != nil {
				t.Error(err)
			}
		})
	}
	if err != nil {
		t.Fatal(err)
	}
	report, err := Run(t.Context(), Options{Lab: l, BinDir: binDir, Seed: seed, For: soakTime, Modes: Modes(), Members: 1, Log: slog.New(slog.DiscardHandler)})
	t.Log(report)
	if err != nil {
		t.Fatal(err)
	}
}

// The same seed makes the same choices.
func TestPick(t *testing.T) {
	t.Parallel()
	life := func(seed uint64) (out []string) {
		rng := rand.New(rand.NewPCG(seed, 0))
		w := newWorld([]string{"a", "b", "c"}, 1, "b", Modes())
		for range 500 {
			m := pick(rng, w)
			out = append(out, m.name+" "+m.what)
			pretend(w, m)
			if len(out)%groupSize == 0 {
				w.down, w.stopped, w.isCut, w.full = map[string]bool{}, map[string]bool{}, map[string]bool{}, map[string]bool{}
			}
		}
		return out
	}
	first := life(7)
	if d := cmp.Diff(first, life(7)); d != "" {
		t.Errorf("the same seed, another life:\n%s", d)
	}
	for _, m := range first {
		if m == "kill b" || m == "restart b" {
			t.Errorf("%s: that daemon is to live as long as the run", m)
		}
	}
	if cmp.Equal(first, life(8)) {
		t.Error("another seed, the same life")
	}
	all := strings.Join(first, "\n")
	for _, name := range []string{"add", "del", "mode", "deny", "allow", "peer", "flap", "kill", "restart", "stop", "cut", "fill", "clock"} {
		if !strings.Contains("\n"+all, "\n"+name+" ") {
			t.Errorf("500 changes without %s", name)
		}
	}
}

// Where the datastore can be written, and for whom it is there.
func TestSpeaker(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name               string
		members            int
		down, stopped, cut string // hosts
		speaker, answersTo string
	}{
		{name: "one", members: 1, speaker: "a", answersTo: "abcd"},
		{name: "one, another is down", members: 1, down: "bcd", speaker: "a", answersTo: "abcd"},
		{name: "one, it is down", members: 1, down: "a", answersTo: "a"},
		{name: "one, it is cut off", members: 1, cut: "a", answersTo: "a"},
		{name: "three", members: 3, speaker: "a", answersTo: "abcd"},
		{name: "three, one is down", members: 3, down: "a", speaker: "b", answersTo: "abcd"},
		{name: "three, one is cut off", members: 3, cut: "b", speaker: "a", answersTo: "acd"},
		{name: "three, one is down, a client is cut off", members: 3, down: "a", cut: "d", speaker: "b", answersTo: "abc"},
		{name: "three, two are gone", members: 3, down: "a", stopped: "c", answersTo: "ac"},
		{name: "three, all are down", members: 3, down: "abc"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			w := newWorld([]string{"a", "b", "c", "d"}, tt.members, "", Modes())
			mark := func(set map[string]bool, hosts string) {
				for h := range strings.SplitSeq(hosts, "") {
					set[h] = true
				}
			}
			mark(w.down, tt.down)
			mark(w.stopped, tt.stopped)
			mark(w.isCut, tt.cut)
			answersTo := ""
			for _, h := range w.hosts {
				if w.answersTo(h) {
					answersTo += h
				}
			}
			if w.speaker() != tt.speaker || answersTo != tt.answersTo {
				t.Errorf("speaker %q, answers to %q, want %q and %q", w.speaker(), answersTo, tt.speaker, tt.answersTo)
			}
		})
	}
}

// pretend has a change succeed in the world alone.
func pretend(w *world, m move) {
	switch m.name {
	case "add":
		in := byte(0)
		if w.second == poolEnabled && w.names%2 == 0 {
			in = secondPool().Addr().As4()[1]
		}
		w.pods[m.what] = []netip.Addr{netip.AddrFrom4([4]byte{10, in, byte(w.names >> 8), byte(w.names)})}
	case "del":
		delete(w.pods, m.what)
	case "mode":
		w.mode = store.Encapsulation(m.what)
	case "pool":
		w.second = poolState(strings.TrimPrefix(m.what, "deleted"))
	case "deny":
		w.denied = m.what
	case "allow":
		w.denied = ""
	case "kill":
		w.down[m.what] = true
	case "stop":
		w.stopped[m.what] = true
	case "cut":
		w.isCut[m.what] = true
	case "fill":
		w.full[m.what] = true
	}
}

// What ends the faults, and what is taken away in the end.
func TestMend(t *testing.T) {
	t.Parallel()
	w := newWorld([]string{"a", "b"}, 1, "", Modes())
	w.down["b"], w.isCut["a"], w.stopped["a"], w.full["b"] = true, true, true, true
	w.pods["a/"+stays], w.pods["a/p1"], w.denied, w.mode, w.second = nil, nil, "a/p1", store.Direct, poolEnabled
	show := func(ms []move) (out []string) {
		for _, m := range ms {
			out = append(out, fmt.Sprint(m.name, " ", m.what))
		}
		return out
	}
	if d := cmp.Diff([]string{"free b", "join a", "continue a", "start b"}, show(w.mend())); d != "" {
		t.Errorf("mend (-want +got):\n%s", d)
	}
	if d := cmp.Diff([]string{"allow a/p1", "mode VXLANCrossSubnet", "pool disabled", "del a/p1", "pool deleted"}, show(w.undo())); d != "" {
		t.Errorf("undo (-want +got):\n%s", d)
	}
	if d := cmp.Diff([]string{"restart a", "restart b"}, show(w.renew())); d != "" {
		t.Errorf("renew (-want +got):\n%s", d)
	}
}

func TestGrown(t *testing.T) {
	t.Parallel()
	b := Usage{Memory: 60 << 10, Heap: 20 << 10, Goroutines: 100, Descriptors: 40, Threads: 9, Devices: 4, Routes: 4, Rules: 200, Files: 6}
	for _, tt := range []struct {
		name string
		more Usage
		want string
	}{
		{"nothing", Usage{}, ""},
		{"a little", Usage{Memory: 10 << 10, Heap: 2 << 10, Goroutines: 4, Descriptors: 3, Threads: 2, Files: 1}, ""},
		{"memory", Usage{Memory: 17 << 10}, "KiB of memory"},
		{"heap", Usage{Heap: 11 << 10}, "KiB of heap"},
		{"goroutines", Usage{Goroutines: 21}, "a has 121 goroutines, and had 100"},
		{"descriptors", Usage{Descriptors: 13}, "a has 53 descriptors, and had 40"},
		{"threads", Usage{Threads: 9}, "threads"},
		{"a device", Usage{Devices: 1}, "devices"},
		{"routes", Usage{Routes: 2}, "routes"},
		{"a rule", Usage{Rules: 1}, "lines of rules"},
		{"files", Usage{Files: 7}, "files"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			m := tt.more
			base, end := map[string]Usage{"a": b}, map[string]Usage{"a": {
				Memory: b.Memory + m.Memory, Heap: b.Heap + m.Heap, Goroutines: b.Goroutines + m.Goroutines, Descriptors: b.Descriptors + m.Descriptors, Threads: b.Threads + m.Threads,
				Devices: b.Devices + m.Devices, Routes: b.Routes + m.Routes, Rules: b.Rules + m.Rules, Files: b.Files + m.Files,
			}}
			err := errors.Join(grown(base, end), left(base, end))
			if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
				t.Errorf("got %v, want %q", err, tt.want)
			}
		})
	}
}

// A daemon is compared with itself, not with the one before it.
func TestSame(t *testing.T) {
	t.Parallel()
	usage := func(pid int) Usage { return Usage{process: ns.Process{PID: pid}} }
	first := map[string]Usage{"a": usage(1), "b": usage(2)}
	got := same(first, map[string]Usage{"a": usage(1), "b": usage(3)})
	if _, is := got["a"]; !is || len(got) != 1 {
		t.Errorf("%v, want that of a alone", got)
	}
}

// Each change is followed by another question, and none by one that a fault excuses.
func TestPair(t *testing.T) {
	t.Parallel()
	w := newWorld([]string{"a", "b", "c", "d"}, 1, "", Modes())
	w.rested = []string{"a/p", "a/q", "b/denied", "b/leaving", "b/gone", "b/p", "c/down", "d/cut"}
	for _, p := range append([]string{"a/new"}, w.rested...) {
		w.pods[p] = nil
	}
	delete(w.pods, "b/gone")
	w.denied, w.leaving["b/leaving"], w.down["c"], w.isCut["d"] = "b/denied", true, true, true
	got := map[string]bool{}
	for n := range 20 {
		from, to, ok := w.pair(n)
		if !ok {
			t.Fatal("no pair")
		}
		got[from+" "+to] = true
	}
	want := map[string]bool{"a/p a/q": true, "a/p b/p": true, "a/q a/p": true, "a/q b/p": true, "b/p a/p": true, "b/p a/q": true}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	w.stopped["a"] = true
	if from, to, ok := w.pair(0); ok {
		t.Errorf("%s and %s are asked, with one pod left", from, to)
	}
}

func TestMultiplied(t *testing.T) {
	t.Parallel()
	base := map[store.Kind]int{store.KindWorkloadEndpoint: 3, store.KindIPAMHandle: 9, store.KindIPAMBlock: 3, store.KindIPAMAffinity: 3}
	for kind, may := range map[store.Kind]int{store.KindWorkloadEndpoint: 3, store.KindIPAMHandle: 9, store.KindIPAMBlock: 6, store.KindIPAMAffinity: 6} {
		end := maps.Clone(base)
		if end[kind] = may; multiplied(base, end, 3) != nil {
			t.Errorf("%d of %s are said to be too many", may, kind)
		}
		if end[kind]++; multiplied(base, end, 3) == nil {
			t.Errorf("%d of %s are not said to be too many", may+1, kind)
		}
	}
}

func TestResidentKiB(t *testing.T) {
	t.Parallel()
	if n, err := anonymousKiB("Name:\trouterd\nVmRSS:\t  70000 kB\nRssAnon:\t   62132 kB\n"); n != 62132 || err != nil {
		t.Errorf("got %d, %v", n, err)
	}
	if _, err := anonymousKiB("Name:\tx\n"); err == nil {
		t.Error("no RssAnon, no error")
	}
}

func TestLasting(t *testing.T) {
	t.Parallel()
	const listing = `table inet routerd {
	set discovery {
		typeof iifname
		size 65536
		flags dynamic,timeout
		timeout 1m
		elements = { "cali1" limit rate over 4/second burst 5 packets,
			     "cali2" limit rate over 4/second burst 5 packets }
	}

	set hosts {
		type ipv4_addr
		elements = { 10.1.0.11, 10.1.0.12,
			     10.2.0.11 }
	}
}
`
	want := `table inet routerd {
	set discovery {
		typeof iifname
		size 65536
		flags dynamic,timeout
		timeout 1m
	}

	set hosts {
		type ipv4_addr
10.1.0.11
10.1.0.12
10.2.0.11
	}
}
`
	if diff := cmp.Diff(want, lasting(listing)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
