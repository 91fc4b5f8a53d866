package kube_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/routerd/routerd/control/presence"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/kube/convert"
)

// keep runs a keeper of node1's name, and returns it with the end of its run.
func keep(t *testing.T, file string, self store.Incarnation, doubts *atomic.Int64) (*presence.Keeper, func() error) {
	t.Helper()
	id, err := presence.Load(file)
	if err != nil {
		t.Fatal(err)
	}
	self.Instance, self.Epoch = id.Instance, id.Epoch
	s := dial(t, "", convert.V3)
	k := presence.New(presence.Config{
		Node: "node1", Store: s.Names(self), File: file, Self: self, Log: slog.New(slog.DiscardHandler),
		Doubt: func() { doubts.Add(1) }, Outage: func(error) {},
	})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- k.Run(ctx) }()
	end := func() error {
		cancel()
		err := <-done
		done <- err
		return err
	}
	t.Cleanup(func() { _ = end() })
	return k, end
}

func held(t *testing.T, k *presence.Keeper, what string) {
	t.Helper()
	select {
	case <-k.Held():
	case <-time.After(await.Patience):
		t.Fatalf("%s: the name is not held: %v", what, k.Refused())
	}
}

func nodeInfo(t *testing.T, boot, machine string) {
	t.Helper()
	patch := fmt.Sprintf(`{"status":{"nodeInfo":{"bootID":%q,"machineID":%q}}}`, boot, machine)
	if _, err := server.Do(t.Context(), http.MethodPatch, "/api/v1/nodes/node1/status", "application/merge-patch+json", []byte(patch)); err != nil {
		t.Fatal(err)
	}
}

// TestName follows a host's name through its lives: there is no lease of its own,
// the Node says who is there.
func TestName(t *testing.T) {
	open(t, convert.V3) // the cluster is this test's
	dir := t.TempDir()
	file := filepath.Join(dir, "incarnation")
	machine := store.Incarnation{BootID: "boot1", MachineID: "machine1", Process: "p1"}
	var doubts atomic.Int64

	// Without a Node there is no name; its kubelet makes it.
	k, end := keep(t, file, machine, &doubts)
	create(t, "/api/v1/nodes", `{"apiVersion":"v1","kind":"Node","metadata":{"name":"node1"}}`)
	nodeInfo(t, "boot1", "machine1")
	held(t, k, "a new host")
	if err := end(); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	doubts.Store(0)

	// In a container that is shown no machine id and keeps no state: the same host.
	inContainer := machine
	inContainer.MachineID, inContainer.Process = "", "p2"
	k, end = keep(t, filepath.Join(dir, "emptyDir"), inContainer, &doubts)
	held(t, k, "in a container")
	if k.Epoch() != 1 || k.Refused() != nil {
		t.Errorf("in a container: epoch %d, refused: %v", k.Epoch(), k.Refused())
	}
	_ = end()

	// Booted, before the kubelet says so.
	booted := machine
	booted.BootID, booted.Process = "boot2", "p3"
	k, end = keep(t, file, booted, &doubts)
	held(t, k, "booted")
	if k.Epoch() != 2 {
		t.Errorf("booted: epoch %d, want 2", k.Epoch())
	}
	nodeInfo(t, "boot2", "machine1")

	// Another machine with this name is refused while the kubelet is this one's.
	other := store.Incarnation{BootID: "boot9", MachineID: "machine9", Process: "p9"}
	stranger, endStranger := keep(t, filepath.Join(dir, "other"), other, &doubts)
	await.Until(t, "another machine is refused", func() error {
		if stranger.Refused() == nil {
			return errors.New("it is not")
		}
		return nil
	})
	_ = endStranger()

	// The Node deleted and made anew under the running daemon: another epoch.
	if _, err := server.Do(t.Context(), http.MethodDelete, "/api/v1/nodes/node1", "", nil); err != nil {
		t.Fatal(err)
	}
	if _, err := server.Do(t.Context(), http.MethodPost, "/api/v1/nodes", "application/json", []byte(`{"apiVersion":"v1","kind":"Node","metadata":{"name":"node1"}}`)); err != nil {
		t.Fatal(err)
	}
	await.Until(t, "an epoch of its own for the new Node", func() error {
		if k.Epoch() != 3 {
			return fmt.Errorf("epoch %d", k.Epoch())
		}
		return nil
	})
	_ = end()
}

// TestLead: one process at a time has an office; when it goes, another follows.
func TestLead(t *testing.T) {
	open(t, convert.V3)
	t.Cleanup(func() {
		_, err := server.Do(context.WithoutCancel(t.Context()), http.MethodDelete, "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases/routerd-office", "", nil)
		if err != nil {
			t.Error(err)
		}
	})
	var leads atomic.Int64
	var most atomic.Int64
	stand := func(id string) (leading <-chan struct{}, end func()) {
		s := dial(t, "", convert.V3)
		ctx, cancel := context.WithCancel(t.Context())
		is, done := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(done)
			s.Lead(ctx, "office", id, 2*time.Second, func(ctx context.Context) {
				most.Store(max(most.Load(), leads.Add(1)))
				close(is)
				<-ctx.Done()
				leads.Add(-1)
			})
		}()
		end = func() { cancel(); <-done }
		t.Cleanup(end)
		return is, end
	}
	await.Until(t, "the namespace", func() error {
		_, err := server.Do(t.Context(), http.MethodGet, "/api/v1/namespaces/kube-system", "", nil)
		return err
	})
	first, endFirst := stand("a")
	<-first
	second, _ := stand("b")
	select {
	case <-second:
		t.Fatal("two have one office")
	case <-time.After(5 * time.Second): // longer than the lease: the holder renews it
	}
	endFirst()
	select {
	case <-second:
	case <-time.After(await.Patience):
		t.Fatal("nobody follows")
	}
	if most.Load() != 1 {
		t.Errorf("%d had the office at once", most.Load())
	}
}
