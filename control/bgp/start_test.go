package bgp

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/routerd/routerd/store"
)

// save writes a configuration as the version before did.
func save(file string, c Config) error {
	b, err := json.Marshal(map[string]any{"Version": 1, "Config": c})
	if err != nil {
		return err
	}
	return os.WriteFile(file, b, 0o600)
}

// TestPreviousFile: every scenario's configuration comes back as it was, without a
// password.
func TestPreviousFile(t *testing.T) {
	t.Parallel()
	for name, events := range scenarios(t) {
		file := filepath.Join(t.TempDir(), "bgp.json")
		want, err := Desired(view(t, events...), "node1")
		if err != nil {
			t.Fatal(err)
		}
		withPassword := withSecrets(want, func(SecretRef) (Password, error) { return Password{"geheim"}, nil }, nil)
		if err := save(file, withPassword); err != nil {
			t.Fatal(err)
		}
		if b, err := os.ReadFile(file); err != nil || strings.Contains(string(b), "geheim") {
			t.Errorf("%s: the file shows the password, or %v", name, err)
		}
		got, err := loadPrevious(file, "node1")
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, got, cmp.Comparer(func(a, b netip.Addr) bool { return a == b }), cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }),
			cmpopts.EquateComparable(Peer{}, store.BMP{}), cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("%s (-saved +loaded):\n%s", name, diff)
		}
	}
}

func TestLoadRefuses(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "bgp.json")
	for text, says := range map[string]string{
		"": "unexpected end", "{": "unexpected end", `{"Version":99}`: "version 99", `{"Version":1,"Config":{"Node":"other"}}`: "node other",
	} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := loadPrevious(file, "node1"); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%q: error %v, want one that says %q", text, err, says)
		}
	}
}

// TestStartWithoutStore: a daemon whose datastore is away at its start speaks
// BGP as in its previous run, and goes on by the datastore when that is back: by the
// state on disk, and after an upgrade by the file of the version before.
func TestStartWithoutStore(t *testing.T) {
	t.Parallel()
	h := hosts(t, 2)
	f := startFRRAs(t, remote{self: h[1], asn: 64999, peer: h[0], peerASN: 64512, routes: []string{"203.0.113.0/24"}})
	dir := t.TempDir()
	file, previous := filepath.Join(dir, "cluster.journal"), filepath.Join(dir, "bgp.json")
	batch := store.Batch{Synced: true, Events: []store.Event{
		bgpNode(t, "node1", h[0].String()+"/24"), conf(t, "default", `{"bindMode":"NodeIP"}`),
		peer(t, "tor", `{"peerIP":"`+h[1].String()+`","asNumber":64999}`), ippool(t, "p", `{"cidr":"192.168.0.0/16"}`),
		affinity(t, "node1", "192.168.1.0/26", "confirmed"),
	}}
	if cfg, err := Desired(view(t, batch.Events...), "node1"); err != nil {
		t.Fatal(err)
	} else if err := save(previous, cfg); err != nil {
		t.Fatal(err)
	}
	up := func(d *daemon) {
		t.Helper()
		poll(t, func() string { return d.peer("tor").Info }, func() bool { return d.peer("tor").State == StateUp })
	}
	first := newDaemonOn(t, file, Options{Node: "node1", PreviousFile: previous})
	up(first)
	f.waitRoute("192.168.1.0/26")
	first.send(batch)
	first.waitErr("")
	first.stop()
	if err := os.Remove(previous); err != nil {
		t.Fatal(err)
	}

	second := newDaemonOn(t, file, Options{Node: "node1", PreviousFile: previous, Restarting: true})
	up(second)
	f.waitRoute("192.168.1.0/26")
	if err := second.Status(context.Background()).Err; !errors.Is(err, errPreviousRun) {
		t.Errorf("status says %v", err)
	}
	poll(t, func() string { return "the switch's route" }, func() bool { return second.has("203.0.113.0/24") })
	since := f.uptime()
	batch.Events = append(batch.Events, affinity(t, "node1", "192.168.1.64/26", "confirmed"))
	second.send(batch)
	second.waitErr("")
	f.waitRoute("192.168.1.64/26")
	if now := f.uptime(); now != since {
		t.Errorf("the session was up since %s, and is since %s", since, now)
	}
}

// TestTriesAgainPatiently: that the datastore is not waited for any longer does not
// end the attempts at what failed.
func TestTriesAgainPatiently(t *testing.T) {
	t.Parallel()
	h := hosts(t, 1)
	l, err := net.Listen("tcp4", netip.AddrPortFrom(h[0], DefaultPort).String())
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	d := newDaemon(t, "node1")
	d.send(store.Batch{Synced: true, Events: []store.Event{bgpNode(t, "node1", h[0].String()+"/24"), conf(t, "default", `{"bindMode":"NodeIP"}`)}})
	poll(t, func() string { return "the daemon is as patient as at its start" }, func() bool {
		d.Controller.mu.Lock()
		defer d.Controller.mu.Unlock()
		return !d.patient && d.err != nil && !errors.Is(d.err, ErrNotSynced)
	})
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	d.waitErr("")
}

// TestResumeTriesAgain: what fails while the configuration of the previous run
// holds is tried again, whatever wakes the controller in between.
func TestResumeTriesAgain(t *testing.T) {
	t.Parallel()
	h := hosts(t, 1)
	l, err := net.Listen("tcp4", netip.AddrPortFrom(h[0], DefaultPort).String())
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	file := filepath.Join(t.TempDir(), "bgp.json")
	cfg := testConfig(h[0], 64512, nil)
	if err := save(file, cfg); err != nil {
		t.Fatal(err)
	}
	ctx := context.Background()
	c := New(Options{Log: testLog(t), Node: cfg.Node, PreviousFile: file})
	c.patient = false
	t.Cleanup(func() {
		if err := c.speaker.Stop(ctx, false); err != nil {
			t.Error(err)
		}
	})
	for range 2 {
		if c.reconcile(ctx) {
			t.Fatal("nothing is to be tried again while the port is taken")
		}
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	// A process that another test starts has a copy of the listener until it
	// executes its program.
	poll(t, func() string { return fmt.Sprintf("not as configured with the port free: %v", c.Status(ctx).Err) },
		func() bool { return c.reconcile(ctx) })
}
