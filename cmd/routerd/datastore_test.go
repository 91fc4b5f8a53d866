package main

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/store/embedded"
)

// startStore runs a datastore at a socket until the test ends.
func startStore(t *testing.T, socket string) *embedded.Server {
	t.Helper()
	s, err := embedded.Start(t.Context(), embedded.Config{Dir: t.TempDir(), Socket: socket})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

// usesStore makes the host's daemon use the datastore at a socket.
func (h *host) usesStore(socket string) {
	h.config["datastore"] = map[string]any{"endpoints": []string{"unix://" + socket}, "dialTimeout": "1s"}
}

// TestDatastoreAway: without its datastore the daemon stays up and says why it
// cannot serve; when the datastore comes, or comes back, so does everything.
func TestDatastoreAway(t *testing.T) {
	t.Parallel()
	h := newHost(t, "10.1.0.11/24")
	socket := filepath.Join(h.dir, "ext.sock")
	h.usesStore(socket)
	r := h.start()
	r.when("the datastore's absence is told", func(n *apiv1.NodeResponse) error {
		c := conditionOf(n, "Datastore")
		if c.GetOk() || n.GetHealth().GetReady().GetOk() {
			return errors.New("all is well")
		}
		return errors.Join(mentions(c.GetReason(), socket), mentions(n.GetHealth().GetReady().GetReason(), "datastore"))
	})
	if code, out := h.routerd("health", "--live", "--config", h.writeConfig()); code != 0 {
		t.Errorf("without a datastore the daemon is not live: exit code %d, %s", code, out)
	}
	if code, out := h.routerd("health", "--config", h.writeConfig()); code != 1 || mentions(out, "not ready", "datastore") != nil {
		t.Errorf("health: exit code %d, %s", code, out)
	}
	if l := r.log.lines("level=WARN", socket); len(l) == 0 {
		t.Error("the log does not name the endpoint")
	}
	_, err := r.attach("early")
	if status.Code(err) != codes.Unavailable || mentions(err.Error(), "datastore") != nil {
		t.Errorf("ADD before the datastore was ever seen: %v", err)
	}

	dir := t.TempDir()
	open := func() *embedded.Server {
		t.Helper()
		s, err := embedded.Start(t.Context(), embedded.Config{Dir: dir, Socket: socket})
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	s := open()
	defer func() { s.Close() }()
	r.ready()
	first, err := r.attach("first")
	if err != nil {
		t.Fatal(err)
	}

	// It goes away under a running workload.
	s.Close()
	r.when("the outage is told", func(n *apiv1.NodeResponse) error {
		if c := conditionOf(n, "Datastore"); c.GetOk() {
			return errors.New("the datastore is well")
		} else if err := mentions(c.GetReason(), socket); err != nil {
			return err
		}
		if c := n.GetHealth().GetReady(); !c.GetOk() {
			t.Fatalf("an outage of the datastore makes the host unready: %s", c.GetReason())
		}
		return nil
	})
	begin := time.Now()
	_, err = r.attach("during")
	if status.Code(err) != codes.Unavailable || mentions(err.Error(), "datastore", socket) != nil {
		t.Errorf("ADD without a datastore: %v", err)
	}
	if d := time.Since(begin); d > 10*time.Second {
		t.Errorf("ADD took %s; its deadline was 10s", d)
	}
	if err := h.lists("route", first.GetAddresses()[0].GetCidr()[:strings.Index(first.GetAddresses()[0].GetCidr(), "/")]); err != nil {
		t.Errorf("the workload's route: %v", err)
	}

	s = open()
	r.when("the datastore is back", func(n *apiv1.NodeResponse) error {
		if c := conditionOf(n, "Datastore"); !c.GetOk() {
			return errors.New(c.GetReason())
		}
		return nil
	})
	eventually(t, "ADD works again", func() error {
		_, err := r.attach("after")
		return err
	})
}

// TestSameAddress: of two hosts with one address the second is refused, and
// says which the other is. It is served when the other is gone.
func TestSameAddress(t *testing.T) {
	t.Parallel()
	one, two := newHost(t, "10.1.0.11/24"), newHost(t, "10.1.0.11/24")
	socket := filepath.Join(one.dir, "ext.sock")
	startStore(t, socket)
	one.usesStore(socket)
	two.usesStore(socket)
	one.config["nodeName"], two.config["nodeName"] = "host-one", "host-two"
	first := one.start()
	first.ready()

	second := two.start()
	words := []string{"host-one", "host-two", "10.1.0.11", "address.ipv4", "routerctl delete node host-one"}
	second.when("the second is refused", func(n *apiv1.NodeResponse) error {
		if n.GetHealth().GetReady().GetOk() {
			t.Fatal("the second host with the address is ready")
		}
		return errors.Join(
			mentions(conditionOf(n, "Registered").GetReason(), words...),
			mentions(n.GetHealth().GetReady().GetReason(), words...),
		)
	})
	eventually(t, "the second host's log", func() error {
		if l := second.log.lines(append(words, "level=ERROR")...); len(l) != 1 {
			return fmt.Errorf("%d lines say so", len(l))
		}
		return nil
	})
	if _, err := second.attach("pod"); status.Code(err) != codes.Unavailable || mentions(err.Error(), "host-one") != nil {
		t.Errorf("ADD on the refused host: %v", err)
	}
	first.ready()
}
