package main

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/journal"
	"github.com/routerd/routerd/control/netpolicy"
	"github.com/routerd/routerd/control/policy"
	"github.com/routerd/routerd/dataplane/nft"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
)

// denies reports whether the kernel's rules name what a policy of the test denies.
func (h *host) denies(what string) error {
	out, err := h.exec("nft", "list", "table", "inet", nft.TableName)
	if err == nil && !strings.Contains(out, what) {
		err = fmt.Errorf("the kernel's rules do not name %s", what)
	}
	return err
}

// TestOldDisk: without the datastore a state on disk that may be older than the
// kernel's rules does not take their place. One that is as new, after an orderly
// end, lets workloads start. So does the file of the version before after an upgrade.
func TestOldDisk(t *testing.T) {
	t.Parallel()
	h := newHost(t, "10.1.0.11/24")
	h.config["bgp"] = map[string]any{"enabled": false}
	h.config["ipam"] = map[string]any{"reserve": map[string]any{"min": 8, "max": 8}}
	socket, dir := filepath.Join(h.dir, "ext.sock"), t.TempDir()
	h.usesStore(socket)
	s := startStore(t, dir, socket)
	r := h.start()
	r.ready()
	if _, err := r.attach("before"); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(h.dir, "state", "cluster.journal")
	var old []byte
	await.Until(t, "the datastore's state is on disk", func() (err error) {
		if old, err = os.ReadFile(file); err == nil && !strings.Contains(string(old), `"complete"`) {
			err = errors.New("it is not complete")
		}
		return err
	})
	const denied = "203.0.113.77"
	deny := v3.NewGlobalNetworkPolicy()
	deny.Name = "deny"
	deny.Spec = v3.GlobalNetworkPolicySpec{Selector: "all()", Ingress: []v3.Rule{{Action: v3.Deny, Source: v3.EntityRule{Nets: []string{denied + "/32"}}}, {Action: v3.Allow}}}
	c := h.store(socket)
	if _, err := store.Create(t.Context(), c, deny); err != nil {
		t.Fatal(err)
	}
	await.Until(t, "the policy is in the kernel", func() error { return h.denies(denied) })
	r.kill(syscall.SIGKILL)
	s.Close()
	if err := os.WriteFile(file, old, 0o600); err != nil { // as a full disk would have left it
		t.Fatal(err)
	}

	r = h.start()
	r.when("the rules that are there hold", func(n *apiv1.NodeResponse) error {
		if n.GetWorkloads() != 1 {
			return fmt.Errorf("%d workloads are taken over", n.GetWorkloads())
		}
		return errors.Join(h.denies(denied), mentions(conditionOf(n, "Policy").GetReason(), "waiting for the policy rules"))
	})
	s = startStore(t, dir, socket)
	r.ready()
	await.Until(t, "the datastore's policy is in force, and there is a reserve", func() error {
		n, err := r.node()
		if err != nil {
			return err
		}
		handle, err := c.Get(t.Context(), store.HandleKey(store.ReserveHandle("node1")))
		if err != nil {
			return err
		}
		held := 0
		for _, in := range handle.Value.(*store.Handle).Block {
			held += in
		}
		if held == 0 {
			return errors.New("there is none")
		}
		if check := conditionOf(n, "Policy"); !check.GetOk() {
			return errors.New(check.GetReason())
		}
		return h.denies(denied)
	})
	if _, err := os.Stat(netpolicy.MarkFile(h.runDir())); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a daemon that may know more than the disk has the mark: %v", err)
	}
	r.kill(syscall.SIGTERM)
	s.Close()

	r = h.start()
	await.Until(t, "ADD without the datastore", func() error {
		_, err := r.attach("after")
		return err
	})
	if err := h.denies(denied); err != nil {
		t.Error(err)
	}
	r.kill(syscall.SIGTERM)

	// The version before ran last, and the datastore is still away.
	asVersionBefore(t, filepath.Dir(file))
	r = h.start()
	r.when("the rules are by the version before's file", func(n *apiv1.NodeResponse) error {
		return mentions(conditionOf(n, "Policy").GetReason(), "by what was known before")
	})
	if err := h.denies(denied); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(filepath.Join(filepath.Dir(file), "policy.journal")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the version before's file: %v", err)
	}
}

// asVersionBefore leaves a state directory as the version before would have: with a
// file for policy alone.
func asVersionBefore(t *testing.T, dir string) {
	t.Helper()
	current := filepath.Join(dir, "cluster.journal")
	log := slog.New(slog.DiscardHandler)
	have, err := journal.Open(current, log)
	if err != nil {
		t.Fatal(err)
	}
	old, err := journal.Open(filepath.Join(dir, "policy.journal"), log)
	if err != nil {
		t.Fatal(err)
	}
	changes := []journal.Change{{Key: "complete", Value: true}}
	for path, value := range have.Entries() {
		if key, ok := store.ParsePath(path); ok && slices.Contains(policy.Kinds(), key.Kind) {
			changes = append(changes, journal.Change{Key: path, Value: value})
		}
	}
	if err := errors.Join(old.Apply(changes...), old.Close(), have.Close(), os.Remove(current)); err != nil {
		t.Fatal(err)
	}
}
