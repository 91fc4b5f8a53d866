package cluster

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/routerd/routerd/control/journal"
	"github.com/routerd/routerd/store"
)

// fataler is what helpers need of *testing.T and *rapid.T.
type fataler interface {
	Helper()
	Fatal(args ...any)
	Errorf(format string, args ...any)
}

// onDisk returns a copy of node1 that is kept in a directory.
func onDisk(dir string) *Cluster {
	return New(Config{
		Node: "node1", Log: slog.New(slog.DiscardHandler), File: filepath.Join(dir, "cluster.journal"),
		PreviousFile: filepath.Join(dir, "policy.journal"), PreviousFiles: []string{filepath.Join(dir, "bgp.json")},
	})
}

// hears has a copy apply a batch.
func (c *Cluster) hears(synced bool, rev store.Revision, events ...store.Event) {
	c.apply(store.Batch{Events: events, Synced: synced, Revision: rev})
}

// onFile returns what is on disk: the names of the objects, and how they are, and
// nil where nothing counts.
func onFile(t fataler, dir string) map[string]string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(dir, "cluster.journal"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		t.Fatal(err)
	}
	copied, err := os.MkdirTemp("", "cluster")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(copied)
	if err := os.WriteFile(filepath.Join(copied, "cluster.journal"), b, 0o600); err != nil {
		t.Fatal(err)
	}
	return starts(t, copied, store.KindIPPool)
}

// starts returns what a follower of some kinds has at a start without the
// datastore: its pools, and nil where it has nothing from the disk.
func starts(t fataler, dir string, kinds ...store.Kind) map[string]string {
	t.Helper()
	c := onDisk(dir)
	f := c.Follow(kinds...)
	c.Load(f)
	defer func() {
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
	}()
	s, ok := f.take()
	if want := map[bool]Source{true: Disk, false: Unread}[ok]; c.Freshness().Source != want || s.Source != want || s.Synced != ok || f.FromDisk() != ok {
		t.Errorf("freshness %+v, step %+v", c.Freshness(), s)
	}
	if !ok {
		return nil
	}
	out := map[string]string{}
	for _, ch := range s.Changes {
		p, readable := ch.Value.(*Pool)
		switch {
		case ch.Err != nil:
			out[ch.Key.Name] = "unreadable"
		case readable:
			out[ch.Key.Name] = p.CIDR.String()
		default:
			out[ch.Key.Name] = "there"
		}
	}
	return out
}

func same(t fataler, what string, got, want map[string]string) {
	t.Helper()
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("%s (-want +got):\n%s", what, diff)
	}
}

func saves(t fataler, c *Cluster) {
	t.Helper()
	if err := c.Save(); err != nil {
		t.Fatal(err)
	}
}

// TestFromDisk: a reader begins with what the disk has, is shown what this host makes
// and not what an incomplete datastore says, and goes on by exact differences.
func TestFromDisk(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	c := onDisk(dir)
	c.hears(true, 5, pool("a", 1), pool("b", 2), pool("c", 3))
	saves(t, c)
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}

	c = onDisk(dir)
	kinds := []store.Kind{store.KindIPPool, store.KindWorkloadEndpoint, store.KindProfile}
	from, live, other := c.Follow(kinds...), c.Follow(kinds...), c.Follow(store.KindClusterInformation)
	c.Load(from, other) // which is not on disk
	step := func(f *Follower, source Source, synced bool, rev store.Revision, want ...string) {
		t.Helper()
		s, ok := f.take()
		var got []string
		for _, ch := range s.Changes {
			name := ch.Key.Name
			if ch.Deleted() {
				name = "-" + name
			}
			got = append(got, name)
		}
		if !ok || s.Source != source || s.Synced != synced || s.Revision != rev || fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("step %+v of %v, want %v of %v", s, got, source, want)
		}
	}
	step(from, Disk, true, 0, "a", "b", "c")
	if _, ok := live.take(); ok || other.FromDisk() {
		t.Error("others have something from the disk")
	}
	ep := container("x", "10.0.0.1")
	c.Announce(eventOf(t, ep, false))
	step(from, Disk, false, 0, ep.Name)
	step(live, Unread, false, 0, ep.Name)
	c.hears(false, 7, pool("a", 9), eventOf(t, container("old", "10.0.0.9"), false))
	step(from, Disk, false, 0, ep.Name) // whose change is hidden
	step(live, Unread, false, 7, "a", ep.Name)
	c.hears(false, 8, pool("d", 4))
	step(from, Disk, false, 0) // that the datastore speaks
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := from.Wait(ctx, 8); !errors.Is(err, context.Canceled) {
		t.Errorf("a reader that has nothing of the datastore's is said to be as far: %v", err)
	}
	c.hears(true, 9, pool("b", 2))
	step(from, Live, true, 9, "a", "d", "b", "-c")
	if from.FromDisk() || c.Freshness().Source != Live {
		t.Errorf("freshness %+v", c.Freshness())
	}
	c.hears(false, 10, pool("a", 1))
	step(from, Live, false, 10, "a")
	if err := from.Wait(t.Context(), 9); err != nil {
		t.Error(err)
	}
}

// TestOwnNode: a reader that wants no other host's Node gets none, from the disk or
// the datastore, and is as far as that all the same.
func TestOwnNode(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	node := func(name string) store.Event {
		n := &store.Node{}
		n.Name = name
		return eventOf(t, n, false)
	}
	c := onDisk(dir)
	c.hears(true, 5, node("node1"), node("node2"), node("node3"))
	saves(t, c)
	c = onDisk(dir)
	f := c.Follow(store.KindNode).OwnNode()
	c.Load(f)
	expect := func(want ...string) {
		t.Helper()
		s, _ := f.take()
		var got []string
		for _, ch := range s.Changes {
			got = append(got, ch.Key.Name)
		}
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("got %v, want %v", got, want)
		}
	}
	expect("node1")
	c.hears(true, 6, node("node1"), node("node2"))
	expect("node1")
	c.hears(false, 7, node("node2"))
	expect()
	if err := f.Wait(t.Context(), 7); err != nil {
		t.Error(err)
	}
}

// TestProfileOnDisk: a profile that this host makes for want of one is not shown
// where there is one on disk, unless the datastore has said otherwise.
func TestProfileOnDisk(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	p := v3.NewProfile()
	p.Name = "net1"
	profile := eventOf(t, p, false)
	c := onDisk(dir)
	c.hears(true, 5, profile)
	saves(t, c)
	c = onDisk(dir)
	f := c.Follow(store.KindProfile)
	c.Load(f)
	if s, _ := f.take(); len(s.Changes) != 1 {
		t.Errorf("from disk: %+v", s)
	}
	c.Announce(profile)
	if s, ok := f.take(); ok {
		t.Errorf("a profile takes the place of that on disk: %+v", s)
	}
	c.hears(false, 6, gone(profile))
	f.take()
	c.Announce(profile)
	if s, _ := f.take(); len(s.Changes) != 1 || !s.Changes[0].Own {
		t.Errorf("the profile is not shown: %+v", s)
	}
	c.hears(true, 7)
	if s, _ := f.take(); len(s.Changes) != 0 || !s.Synced {
		t.Errorf("the profile is gone: %+v", s)
	}
}

// TestFromDiskModel: whatever the disk has and in whatever pieces the datastore
// says what it has, a reader from the disk ends with the datastore's state, and the
// disk too.
func TestFromDiskModel(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		dir, err := os.MkdirTemp("", "cluster") //nolint:usetesting // rapid runs many cases in one test
		if err != nil {
			rt.Fatal(err)
		}
		defer os.RemoveAll(dir)
		c := onDisk(dir)
		r := reader{Follower: c.Follow(store.KindIPPool), have: map[store.Key]netip.Prefix{}}
		name := rapid.SampledFrom([]string{"a", "b", "c", "d"})
		want := map[string]string{}
		rev := store.Revision(0)
		synced := false
		say := func(rt *rapid.T, complete bool) {
			var events []store.Event
			for _, n := range rapid.SliceOfDistinct(name, func(s string) string { return s }).Draw(rt, "names") {
				i := rapid.IntRange(0, 3).Draw(rt, "value")
				if i == 0 {
					events = append(events, gone(pool(n, 1)))
					delete(want, n)
					continue
				}
				events = append(events, pool(n, i))
				want[n] = fmt.Sprintf("10.%d.0.0/16", i)
			}
			rev++
			c.hears(complete, rev, events...)
			synced = synced || complete
		}
		rt.Repeat(map[string]func(*rapid.T){
			"say":      func(rt *rapid.T) { say(rt, false) },
			"complete": func(rt *rapid.T) { say(rt, true) },
			"read":     func(*rapid.T) { r.read() },
			"save": func(rt *rapid.T) {
				if err := c.Save(); (err == nil) != synced {
					rt.Fatal(err)
				}
			},
			"restart": func(rt *rapid.T) {
				if synced {
					saves(rt, c)
				}
				if err := c.Close(); err != nil {
					rt.Fatal(err)
				}
				c = onDisk(dir)
				r = reader{Follower: c.Follow(store.KindIPPool), have: map[store.Key]netip.Prefix{}}
				c.Load(r.Follower)
				// The datastore goes on from where it was, and says all anew.
				want, synced = map[string]string{}, false
			},
			"": func(rt *rapid.T) {
				if !synced {
					return
				}
				for ok := true; ok; {
					_, ok = r.read()
				}
				got := map[string]string{}
				for k, p := range r.have {
					got[k.Name] = p.String()
				}
				same(rt, "the reader has", got, want)
			},
		})
		if synced {
			saves(rt, c)
			same(rt, "the disk has", onFile(rt, dir), want)
		}
	})
}

// TestLoadsNothing: a file that is not known to be complete, is another's, or was
// damaged is of no use.
func TestLoadsNothing(t *testing.T) {
	t.Parallel()
	key := pool("a", 1).Key.Path()
	raw := json.RawMessage(`{"kind":"IPPool","apiVersion":"projectcalico.org/v3","metadata":{"name":"a"},"spec":{"cidr":"10.1.0.0/16"}}`)
	mark := func(node string, kinds ...store.Kind) journal.Change {
		return journal.Change{Key: completeKey, Value: complete{Node: node, Kinds: kinds}}
	}
	for name, tc := range map[string]struct {
		entries []journal.Change
		then    func(t *testing.T, dir string)
		want    map[string]string
	}{
		"whole":         {entries: []journal.Change{{Key: key, Value: raw}, mark("node1", Saved()...)}, want: map[string]string{"a": "10.1.0.0/16"}},
		"fewer kinds":   {entries: []journal.Change{{Key: key, Value: raw}, mark("node1", store.KindIPPool)}, want: map[string]string{"a": "10.1.0.0/16"}},
		"other kinds":   {entries: []journal.Change{{Key: key, Value: raw}, mark("node1", store.KindNode)}},
		"empty":         {},
		"not whole":     {entries: []journal.Change{{Key: key, Value: raw}}},
		"unknown key":   {entries: []journal.Change{{Key: "/elsewhere", Value: raw}, mark("node1", Saved()...)}},
		"another's":     {entries: []journal.Change{{Key: key, Value: raw}, mark("node2", Saved()...)}},
		"no such mark":  {entries: []journal.Change{{Key: key, Value: raw}, {Key: completeKey, Value: 7}}},
		"unreadable":    {entries: []journal.Change{{Key: key, Value: 7}, mark("node1", Saved()...)}, want: map[string]string{"a": "unreadable"}},
		"a rollback":    {entries: []journal.Change{{Key: key, Value: raw}, mark("node1", Saved()...)}, then: func(t *testing.T, dir string) { write(t, filepath.Join(dir, "bgp.json"), "{}") }},
		"not a journal": {then: func(t *testing.T, dir string) { write(t, filepath.Join(dir, "cluster.journal"), "nonsense\n") }},
		"a directory": {then: func(t *testing.T, dir string) {
			if err := errors.Join(os.Remove(filepath.Join(dir, "cluster.journal")), os.MkdirAll(filepath.Join(dir, "cluster.journal", "x"), 0o700)); err != nil {
				t.Fatal(err)
			}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			j, err := journal.Open(filepath.Join(dir, "cluster.journal"), slog.New(slog.DiscardHandler))
			if err == nil {
				err = errors.Join(j.Apply(tc.entries...), j.Close())
			}
			if err != nil {
				t.Fatal(err)
			}
			if tc.then != nil {
				tc.then(t, dir)
			}
			same(t, "at the start", starts(t, dir, store.KindIPPool), tc.want)
		})
	}
}

func write(t *testing.T, path, content string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

// TestDamagedFile: a flipped bit anywhere makes all of the file void, and a file that
// ends anywhere is the state before the last change or that after it.
func TestDamagedFile(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file := filepath.Join(dir, "cluster.journal")
	c := onDisk(dir)
	c.hears(true, 5, pool("a", 1), pool("b", 2))
	saves(t, c)
	first, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	before := map[string]string{"a": "10.1.0.0/16", "b": "10.2.0.0/16"}
	c.hears(false, 6, pool("a", 3), pool("c", 4), gone(pool("b", 2)))
	saves(t, c)
	whole, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	after := map[string]string{"a": "10.3.0.0/16", "c": "10.4.0.0/16"}
	if !bytes.HasPrefix(whole, first) {
		t.Fatal("the change was not appended")
	}
	for cut := range whole {
		copied := t.TempDir()
		write(t, filepath.Join(copied, "cluster.journal"), string(whole[:cut]))
		want := before
		switch {
		case cut < len(first)-1: // the end of a line may be what is missing
			want = nil
		case cut == len(whole)-1:
			want = after
		}
		if got := starts(t, copied, store.KindIPPool); !cmp.Equal(got, want) {
			t.Errorf("cut at %d of %d: %v, want %v", cut, len(whole), got, want)
		}
	}
	for at := 0; at < len(whole); at += 7 {
		copied := t.TempDir()
		bad := bytes.Clone(whole)
		bad[at] ^= 1
		write(t, filepath.Join(copied, "cluster.journal"), string(bad))
		// A last line without its end was never on the disk.
		want := map[bool]map[string]string{true: before}[at == len(whole)-1]
		if got := starts(t, copied, store.KindIPPool); !cmp.Equal(got, want) {
			t.Errorf("damaged at %d: %v, want %v", at, got, want)
		}
	}
}

// TestUpgrade: the version before's file of policy is read once, by those whose kinds
// it has; a rollback and another upgrade find what the other version knew last, or
// nothing. The states are those that a kill between two steps leaves.
func TestUpgrade(t *testing.T) {
	t.Parallel()
	policy := func(t *testing.T, dir, cidr string) {
		j, err := journal.Open(filepath.Join(dir, "policy.journal"), slog.New(slog.DiscardHandler))
		if err == nil {
			raw := json.RawMessage(`{"kind":"IPPool","apiVersion":"projectcalico.org/v3","metadata":{"name":"old"},"spec":{"cidr":"` + cidr + `"}}`)
			err = errors.Join(j.Put(pool("old", 1).Key.Path(), raw), j.Put(completeKey, true), j.Close())
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	upgraded := func(t *testing.T, dir string) {
		c := onDisk(dir)
		c.hears(true, 7, pool("new", 2))
		saves(t, c)
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
	}
	bgp := func(t *testing.T, dir string) { write(t, filepath.Join(dir, "bgp.json"), "{}") }
	old, current := map[string]string{"old": "10.1.0.0/16"}, map[string]string{"new": "10.2.0.0/16"}
	type step func(t *testing.T, dir string)
	for name, tc := range map[string]struct {
		steps       []step
		policy, all map[string]string
	}{
		"before": {[]step{bgp, func(t *testing.T, dir string) { policy(t, dir, "10.1.0.0/16") }}, old, nil},
		"started without the datastore": {[]step{bgp, func(t *testing.T, dir string) {
			policy(t, dir, "10.1.0.0/16")
			starts(t, dir, store.KindIPPool)
		}}, old, nil},
		"upgraded":                            {[]step{bgp, func(t *testing.T, dir string) { policy(t, dir, "10.1.0.0/16") }, upgraded}, current, current},
		"killed before the old file was gone": {[]step{upgraded, bgp}, nil, nil},
		"rolled back":                         {[]step{upgraded, func(t *testing.T, dir string) { policy(t, dir, "10.1.0.0/16") }}, old, nil},
		"rolled back with BGP":                {[]step{upgraded, bgp, func(t *testing.T, dir string) { policy(t, dir, "10.1.0.0/16") }}, old, nil},
		"rolled back, and never complete": {[]step{upgraded, func(t *testing.T, dir string) {
			j, err := journal.Open(filepath.Join(dir, "policy.journal"), slog.New(slog.DiscardHandler))
			if err = errors.Join(err, j.Close()); err != nil {
				t.Fatal(err)
			}
		}}, nil, nil},
		"rolled back and forth": {[]step{upgraded, bgp, func(t *testing.T, dir string) { policy(t, dir, "10.9.0.0/16") }, upgraded}, current, current},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			for _, s := range tc.steps {
				s(t, dir)
			}
			same(t, "of policy", starts(t, dir, savedForPolicy()...), tc.policy)
			same(t, "of all kinds", starts(t, dir, Saved()...), tc.all)
			if _, err := os.Stat(filepath.Join(dir, "policy.journal")); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("the file of the version before: %v", err)
			}
		})
	}
}

// TestNearBlocks: of blocks and affinities the disk has those that concern this host.
func TestNearBlocks(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	block := func(cidr, holder, borrower string) store.Event {
		b := &store.Block{CIDR: cidr, Unallocated: []int{}, Affinity: new("host:" + holder), Allocations: make([]*int, 64)}
		if borrower != "" {
			b.Allocations[3] = new(int)
			b.Attributes = []store.Attribute{{Secondary: map[string]string{"node": borrower}}}
		}
		key := store.BlockKey(netip.MustParsePrefix(cidr))
		return store.Event{Key: key, Object: store.Object{Key: key, Value: b}}
	}
	affinity := func(node, cidr string) store.Event {
		key := store.AffinityKey(node, netip.MustParsePrefix(cidr))
		return store.Event{Key: key, Object: store.Object{Key: key, Value: &store.Affinity{State: "confirmed"}}}
	}
	has := func(want ...string) {
		t.Helper()
		all := map[string]string{}
		for _, name := range want {
			all[name] = "there"
		}
		same(t, "on disk", starts(t, dir, store.KindIPAMBlock, store.KindIPAMAffinity), all)
	}
	c := onDisk(dir)
	c.hears(true, 5,
		block("10.0.0.0/26", "node1", ""), block("10.0.0.64/26", "node2", ""), block("10.0.0.128/26", "node2", "node1"),
		block("10.0.1.0/26", "node2", ""), affinity("node1", "10.0.1.0/26"), affinity("node2", "10.0.0.64/26"))
	saves(t, c)
	has("10.0.0.0/26", "10.0.0.128/26", "10.0.1.0/26")
	unreadable := store.Event{Key: block("10.0.0.0/26", "", "").Key, Object: store.Object{Raw: []byte("{")}, Err: store.ErrDecode}
	c.hears(false, 6, unreadable, block("10.0.0.64/26", "node1", ""), block("10.0.0.128/26", "node2", ""),
		gone(affinity("node1", "10.0.1.0/26")), block("10.0.1.0/26", "node2", ""))
	saves(t, c)
	has("10.0.0.0/26", "10.0.0.64/26")
	c.hears(false, 7, gone(block("10.0.0.0/26", "", "")))
	saves(t, c)
	has("10.0.0.64/26")
}

// TestSavesUnreadable: what cannot be read keeps what was saved of it; where nothing
// was, it is saved as unreadable, and not left out.
func TestSavesUnreadable(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	bad := func(name string) store.Event {
		key := pool(name, 1).Key
		return store.Event{Key: key, Object: store.Object{Key: key, Raw: []byte("{")}, Err: store.ErrDecode}
	}
	c := onDisk(dir)
	c.hears(true, 5, pool("known", 1), pool("later", 1))
	c.hears(false, 6, bad("known"), bad("never"))
	saves(t, c)
	c.hears(false, 7, bad("later"))
	saves(t, c)
	want := map[string]string{"known": "10.1.0.0/16", "later": "10.1.0.0/16", "never": "unreadable"}
	same(t, "on disk", onFile(t, dir), want)
	c.hears(false, 8, gone(pool("later", 1)))
	c.hears(false, 9, bad("later"))
	saves(t, c)
	want["later"] = "unreadable"
	same(t, "on disk", onFile(t, dir), want)
}

// What is to be saved of several events of one object is what its readers go by.
func TestUnsavedThen(t *testing.T) {
	t.Parallel()
	good, better := store.Event{Object: store.Object{Value: 1}}, store.Event{Object: store.Object{Value: 2}}
	ended, bad := store.Event{}, store.Event{Err: store.ErrDecode}
	for name, c := range map[string]struct {
		events []store.Event
		want   unsaved
	}{
		"the last wins":                   {[]store.Event{good, better}, unsaved{event: better}},
		"unreadable leaves what was":      {[]store.Event{good, bad}, unsaved{event: good}},
		"unreadable at first":             {[]store.Event{bad, bad}, unsaved{event: bad}},
		"readable again":                  {[]store.Event{bad, good}, unsaved{event: good}},
		"unreadable and another":          {[]store.Event{good, ended, bad}, unsaved{bad, true}},
		"unreadable, another, still":      {[]store.Event{ended, bad, bad}, unsaved{bad, true}},
		"ended":                           {[]store.Event{good, ended}, unsaved{event: ended}},
		"another that can be read":        {[]store.Event{ended, bad, good}, unsaved{good, true}},
		"another that cannot any more be": {[]store.Event{ended, bad, good, bad}, unsaved{good, true}},
	} {
		got := unsaved{event: c.events[0]}
		for _, ev := range c.events[1:] {
			got = got.then(unsaved{event: ev})
		}
		if got.fresh != c.want.fresh || got.event.Object.Value != c.want.event.Object.Value || !errors.Is(got.event.Err, c.want.event.Err) {
			t.Errorf("%s: got %+v, want %+v", name, got, c.want)
		}
	}
}

// disk is a small one that can be full.
type disk struct {
	t   *testing.T
	dir string
}

func newDisk(t *testing.T) disk {
	t.Helper()
	d := disk{t, t.TempDir()}
	if err := unix.Mount("tmpfs", d.dir, "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(d.dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	d.room(1 << 20)
	return d
}

// room sets how large it is.
func (d disk) room(size int) {
	d.t.Helper()
	if err := unix.Mount("tmpfs", d.dir, "tmpfs", unix.MS_REMOUNT, fmt.Sprint("size=", size)); err != nil {
		d.t.Fatal(err)
	}
}

// large is a pool that takes two pages.
func large(name string, n int) store.Event {
	ev := pool(name, n)
	ev.Object.Value.(*v3.IPPool).Annotations = map[string]string{"x": strings.Repeat("x", 2*os.Getpagesize())}
	return ev
}

// run keeps a copy on a disk until the function that is returned is called.
func (d disk) run(ctx context.Context) (c *Cluster, watch chan<- store.Batch, end func()) {
	batches := make(chan store.Batch)
	c = onDisk(d.dir)
	c.cfg.Store = watched{batches: batches}
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = c.Run(ctx)
	}()
	return c, batches, func() {
		cancel()
		<-done
		_ = c.Close()
	}
}

// watched is a datastore that says what a test has it say.
type watched struct {
	store.Store
	batches <-chan store.Batch
}

func (w watched) Watch(ctx context.Context, _ ...store.Kind) <-chan store.Batch {
	out := make(chan store.Batch)
	go func() {
		defer close(out)
		for {
			select {
			case b := <-w.batches:
				out <- b
			case <-ctx.Done():
				return
			}
		}
	}()
	return out
}

func wait(d time.Duration) {
	time.Sleep(d) //nolint:forbidigo // virtual time
	synctest.Wait()
}

// TestSavesLater: what a full disk refuses is not saved by halves: nothing counts of
// what is there, and the error says so, until it can be written whole. No change
// tries before its time, and a daemon that ends meanwhile leaves nothing to go by.
func TestSavesLater(t *testing.T) {
	t.Parallel()
	d := newDisk(t)
	synctest.Test(t, func(t *testing.T) {
		c, watch, end := d.run(t.Context())
		watch <- store.Batch{Synced: true, Revision: 1, Events: []store.Event{large("a", 1)}}
		wait(time.Minute)
		same(t, "at first", onFile(t, d.dir), map[string]string{"a": "10.1.0.0/16"})
		d.room(4 * os.Getpagesize())
		watch <- store.Batch{Revision: 2, Events: []store.Event{large("b", 2)}}
		wait(2 * time.Second)
		if _, err := os.Stat(filepath.Join(d.dir, "cluster.journal")); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("the file without the newest object: %v", err)
		}
		if err := c.SaveErr(); !errors.Is(err, unix.ENOSPC) {
			t.Errorf("the error is %v", err)
		}
		before := c.cache.file.Flushes()
		d.room(1 << 20)
		for i := range 100 {
			watch <- store.Batch{Revision: store.Revision(3 + i), Events: []store.Event{large("c", 3)}}
		}
		synctest.Wait()
		if n := c.cache.file.Flushes(); n != before {
			t.Errorf("%d writes at once", n-before)
		}
		c.cache.mu.Lock()
		n := len(c.cache.pending)
		c.cache.mu.Unlock()
		if n != 2 {
			t.Errorf("%d objects wait for the disk, want 2", n)
		}
		wait(saveRetry)
		want := map[string]string{"a": "10.1.0.0/16", "b": "10.2.0.0/16", "c": "10.3.0.0/16"}
		if same(t, "with room again", onFile(t, d.dir), want); c.SaveErr() != nil {
			t.Errorf("the error is %v", c.SaveErr())
		}
		d.room(8 * os.Getpagesize())
		watch <- store.Batch{Revision: 200, Events: []store.Event{large("d", 4)}}
		wait(2 * time.Second)
		if err := c.Save(); err == nil {
			t.Error("it says that all is saved")
		}
		d.room(1 << 20)
		c.cache.mu.Lock()
		c.cache.synced = false // the end has no room yet
		c.cache.mu.Unlock()
		end()
		same(t, "after the end", onFile(t, d.dir), nil)
	})
}

// TestSavesLittle: changes that follow each other closely wait for the disk once a
// second, a start that finds all as it was writes nothing, and nothing is written
// of what is not to be kept.
func TestSavesLittle(t *testing.T) {
	t.Parallel()
	d := disk{t, t.TempDir()}
	synctest.Test(t, func(t *testing.T) {
		c, watch, end := d.run(t.Context())
		watch <- store.Batch{Synced: true, Revision: 1, Events: []store.Event{pool("a", 1)}}
		wait(time.Minute)
		before := c.cache.file.Flushes()
		r := v3.NewClusterInformation()
		r.Name = "default"
		for range 20 {
			watch <- store.Batch{Revision: 2, Events: []store.Event{eventOf(t, r, false)}}
			wait(100 * time.Millisecond)
		}
		if n := c.cache.file.Flushes() - before; n != 0 {
			t.Errorf("%d flushes for an object that is not kept", n)
		}
		for i := range 20 {
			watch <- store.Batch{Revision: 3, Events: []store.Event{pool("a", i)}}
			wait(100 * time.Millisecond)
		}
		if n := c.cache.file.Flushes() - before; n < 1 || n > 3 {
			t.Errorf("%d flushes in two seconds", n)
		}
		end() // writes what is left
		want := map[string]string{"a": "10.19.0.0/16"}
		same(t, "after the end", onFile(t, d.dir), want)

		c, watch, end = d.run(t.Context())
		if err := c.Save(); !errors.Is(err, errUnread) {
			t.Errorf("before the datastore has said anything: %v", err)
		}
		watch <- store.Batch{Synced: true, Revision: 4, Events: []store.Event{pool("a", 19)}}
		synctest.Wait()
		if err := c.Save(); err != nil || c.cache.file.Flushes() != 0 {
			t.Errorf("%d flushes of what is there, error %v", c.cache.file.Flushes(), err)
		}
		end()
	})
}

// resumer is a datastore of which only the watch is asked.
type resumer struct {
	store.Store
	from chan store.Known
}

func (r resumer) WatchFrom(_ context.Context, k store.Known, _ ...store.Kind) <-chan store.Batch {
	r.from <- k
	ch := make(chan store.Batch)
	close(ch)
	return ch
}

func (r resumer) Watch(ctx context.Context, kinds ...store.Kind) <-chan store.Batch {
	return r.WatchFrom(ctx, store.Known{}, kinds...)
}

// TestGoesOn: a start has the watch go on from what the disk has: whole kinds with
// their revisions, and how far the watch was. Another version of the program reads
// anew.
func TestGoesOn(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	open := func(version string) (*Cluster, resumer) {
		r := resumer{from: make(chan store.Known, 1)}
		return New(Config{Node: "node1", Log: slog.New(slog.DiscardHandler), File: filepath.Join(dir, "cluster.journal"), Store: r, Version: version}), r
	}
	hears := func(c *Cluster, rev store.Revision, events ...store.Event) {
		c.apply(store.Batch{Events: events, Synced: true, Revision: rev, Places: map[string]store.Revision{"pools": rev, "cluster": 1}})
	}
	resumes := func(version string) store.Known {
		c, r := open(version)
		defer c.Close() //nolint:errcheck // it only read
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_ = c.Run(ctx)
		return <-r.from
	}
	c, _ := open("1")
	a, b := pool("a", 5), pool("b", 6)
	a.Object.Revision, b.Object.Revision = 5, 6
	hears(c, 6, a, b)
	if err := c.Save(); err != nil {
		t.Fatal(err)
	}
	hears(c, 9) // nothing but that it went on
	c.apply(store.Batch{Err: errors.New("away")})
	if _, err := c.cache.saveAll(); err != nil {
		t.Fatal(err)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	k := resumes("1")
	if diff := cmp.Diff(map[string]store.Revision{"pools": 9, "cluster": 1}, k.Places); diff != "" {
		t.Errorf("places (-want +got):\n%s", diff)
	}
	have := map[string]store.Revision{}
	for _, o := range k.Objects {
		have[o.Key.Name] = o.Revision
		if _, err := store.Decode(o.Key, o.Raw); err != nil {
			t.Error(err)
		}
	}
	if diff := cmp.Diff(map[string]store.Revision{"a": 5, "b": 6}, have); diff != "" {
		t.Errorf("objects (-want +got):\n%s", diff)
	}
	for _, kind := range []store.Kind{store.KindIPAMBlock, store.KindIPAMAffinity} {
		if slices.Contains(k.Kinds, kind) {
			t.Errorf("%s is not whole on disk", kind)
		}
	}
	if k := resumes("2"); k.Places != nil {
		t.Errorf("another version goes on from %+v", k)
	}
	same(t, "a start without the datastore", starts(t, dir, store.KindIPPool), map[string]string{"a": "10.5.0.0/16", "b": "10.6.0.0/16"})
}

// withServices is onDisk where the datastore has Services.
func withServices(dir string) *Cluster {
	return New(Config{Node: "node1", Log: slog.New(slog.DiscardHandler), File: filepath.Join(dir, "cluster.journal"), Services: true})
}

func service(name string, rev store.Revision) store.Event {
	key := store.ServiceKey("ns", name)
	return store.Event{Key: key, Object: store.Object{Key: key, Revision: rev, Value: &store.Service{ClusterIPs: []string{"10.96.0.1"}}}}
}

// TestWaived: a reader that can do without some kinds begins with the disk's state though
// it has none of them, as after an upgrade, and with the datastore's though that does
// not tell them; the disk has them from when they are told.
func TestWaived(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	before := onDisk(dir)
	before.hears(true, 7, pool("a", 1))
	saves(t, before)
	if err := before.Close(); err != nil {
		t.Fatal(err)
	}
	names := func(s Step) map[string]bool {
		out := map[string]bool{}
		for _, ch := range s.Changes {
			out[ch.Key.Name] = !ch.Deleted()
		}
		return out
	}
	kinds := []store.Kind{store.KindIPPool, store.KindService}
	start := func(want map[string]bool) (c *Cluster, waives *Follower) {
		t.Helper()
		c = withServices(dir)
		needs, waives := c.Follow(kinds...), c.Follow(kinds...).Waive(store.KindService)
		c.Load(needs, waives)
		step, _ := waives.take()
		if diff := cmp.Diff(want, names(step)); diff != "" || !step.Synced || step.Source != Disk {
			t.Errorf("from disk: synced %v, %v (-want +got):\n%s", step.Synced, step.Source, diff)
		}
		if step, ok := needs.take(); ok != want["web"] {
			t.Errorf("who needs the kind has from disk: %+v", step)
		}
		return c, waives
	}
	c, waives := start(map[string]bool{"a": true})
	unknown := map[store.Kind]store.Withheld{store.KindService: {Err: errors.New("the role lacks the right")}}
	c.apply(store.Batch{Events: []store.Event{pool("a", 1)}, Revision: 9, Synced: true, Withheld: unknown})
	if step, _ := waives.take(); !step.Synced || step.Source != Live {
		t.Errorf("without the right: %+v", step)
	}
	saves(t, c)
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}

	c, _ = start(map[string]bool{"a": true})
	c.apply(store.Batch{Events: []store.Event{pool("a", 1)}, Revision: 9, Synced: true, Withheld: unknown})
	saves(t, c)
	c.apply(store.Batch{Revision: 10, Synced: true})
	saves(t, c) // there are none, which is to be known too
	if got, err := c.cache.complete(); err != nil || !slices.Contains(got, store.KindService) {
		t.Errorf("the disk has %v, %v", got, err)
	}
	c.apply(store.Batch{Events: []store.Event{service("web", 11)}, Revision: 11})
	saves(t, c)
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	c, _ = start(map[string]bool{"a": true, "web": true})
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
}
