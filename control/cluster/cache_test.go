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
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
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
	from, live, other := c.Follow(kinds...), c.Follow(kinds...), c.Follow(store.KindCalicoNodeStatus)
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

// TestNearBlocks: of blocks and affinities a start without the datastore has those that concern
// this host, also where the disk has the others for a watch to go on from.
func TestNearBlocks(t *testing.T) {
	t.Parallel()
	for name, s := range map[string]store.Store{"kept apart": nil, "with those of others": resumer{}} {
		t.Run(name, func(t *testing.T) { t.Parallel(); nearBlocks(t, s) })
	}
}

// TestOthersBlocks: a reader that asks for them has from the disk also the blocks that do not
// concern this host, with what routes go by; and that alone is written of them where no watch
// goes on from the disk.
func TestOthersBlocks(t *testing.T) {
	t.Parallel()
	for name, s := range map[string]store.Store{"routes alone": nil, "whole": resumer{}} {
		t.Run(name, func(t *testing.T) { t.Parallel(); othersBlocks(t, s) })
	}
}

func othersBlocks(t *testing.T, s store.Store) {
	dir := t.TempDir()
	cidr := netip.MustParsePrefix("10.0.0.0/26")
	key := store.BlockKey(cidr)
	block := func(holder string, pods int) store.Event {
		b := &store.Block{CIDR: cidr.String(), Unallocated: []int{}, Affinity: new("host:" + holder), Allocations: make([]*int, 64)}
		for i, at := range []map[string]string{
			{store.AttrNode: "node3", store.AttrType: "vxlanTunnelAddress"},
			{store.AttrNode: "node4"},
			{store.AttrNode: holder},
		} {
			b.Allocations[2+i] = new(i)
			b.Attributes = append(b.Attributes, store.Attribute{HandleID: new("h"), Secondary: at})
		}
		for i := range pods {
			b.Allocations[10+i] = new(2)
		}
		return store.Event{Key: key, Object: store.Object{Key: key, Value: b}}
	}
	loads := func() (own, all []*Change) {
		t.Helper()
		c := onDisk(dir)
		one, other := c.Follow(store.KindIPAMBlock), c.Follow(store.KindIPAMBlock).OthersBlocks()
		c.Load(one, other)
		defer c.Close() //nolint:errcheck // it only read
		a, _ := one.take()
		b, _ := other.take()
		return a.Changes, b.Changes
	}
	c := New(Config{Node: "node1", Log: slog.New(slog.DiscardHandler), File: filepath.Join(dir, "cluster.journal"), Store: s})
	c.hears(true, 5, block("node2", 0))
	saves(t, c)
	own, all := loads()
	if len(own) != 0 || len(all) != 1 {
		t.Fatalf("%d blocks of this host and %d in all, want 0 and 1", len(own), len(all))
	}
	addr := func(s string) netip.Addr { return netip.MustParseAddr(s) }
	want := &Block{
		CIDR: cidr, Holder: "node2", Tunnels: []Assigned{{addr("10.0.0.2"), "node3"}},
		Borrowed: []Borrowed{{addr("10.0.0.2"), "node3"}, {addr("10.0.0.3"), "node4"}},
	}
	if diff := cmp.Diff(want, all[0].Value, cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{}), cmpopts.IgnoreFields(Block{}, "Size", "Used")); diff != "" {
		t.Errorf("the block of another (-want +got):\n%s", diff)
	}
	size := func() int64 {
		t.Helper()
		fi, err := os.Stat(filepath.Join(dir, "cluster.journal"))
		if err != nil {
			t.Fatal(err)
		}
		return fi.Size()
	}
	before := size()
	c.hears(false, 6, block("node2", 40)) // of whom another host's workloads are
	saves(t, c)
	if now := size(); now != before && s == nil {
		t.Errorf("%d bytes were written that no route goes by", now-before)
	}
	c.hears(false, 7, block("node1", 0))
	saves(t, c)
	if own, all = loads(); len(own) != 1 || len(all) != 1 || own[0].Value.(*Block).Used != 3 {
		t.Errorf("this host's own block: %v, %v", own, all)
	}
	c.hears(false, 8, block("node2", 0))
	saves(t, c)
	if own, all = loads(); len(own) != 0 || len(all) != 1 {
		t.Errorf("another's again: %v, %v", own, all)
	}
	c.hears(false, 9, gone(block("node2", 0)))
	saves(t, c)
	if own, all = loads(); len(own)+len(all) != 0 {
		t.Errorf("gone: %v, %v", own, all)
	}
}

func nearBlocks(t *testing.T, s store.Store) {
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
	c := New(Config{Node: "node1", Log: slog.New(slog.DiscardHandler), File: filepath.Join(dir, "cluster.journal"), Store: s})
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
