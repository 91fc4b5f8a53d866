package scenarios

import (
	"bufio"
	"errors"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/store"
)

// TestUnconfirmed changes how pods' packets are carried and does not confirm it: the change is undone, in the kernel too,
// although the operator's shell was killed and so was every daemon, that which runs the datastore included. One that is
// confirmed stands. What a plan says of sessions the daemon says of all nodes.
func TestUnconfirmed(t *testing.T) {
	beside(t)
	l := bringUp(t, "confirm", topology(2, 1, store.Direct))
	tunnelled := func() bool {
		return strings.Contains(output(t, l, "node2", "ip", "route", "show", "proto", "77"), "dev vxlan.calico")
	}
	if tunnelled() {
		t.Fatal("there is a tunnel before the change")
	}
	mesh := "apiVersion: projectcalico.org/v3\nkind: BGPConfiguration\nmetadata: {name: default}\nspec: {nodeToNodeMeshEnabled: false}\n"
	planned := routerctl(t, l, "node2", mesh, "plan", "-f", "-")
	if strings.Count(planned, "(node-to-node mesh) ends") != 2 {
		t.Errorf("plan:\n%s", planned)
	}
	t.Log(planned)
	dir, err := filepath.Abs(binDir(t))
	if err != nil {
		t.Fatal(err)
	}
	operator := exec.Command("sh", "-c", filepath.Join(dir, "routerctl")+` "$@" && exec sleep 1000`, "sh", "--socket", lab.Socket(l.Name(), "node2"),
		"patch", "ippool", defaultPool, "-p", `{"spec": {"vxlanMode": "Always"}}`, "--confirm", "1h")
	out, err := operator.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := operator.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = operator.Process.Kill() })
	said, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	_, change, ok := strings.Cut(strings.TrimSpace(said), "routerctl confirm ")
	if !ok {
		t.Fatalf("routerctl says %q", said)
	}
	poll(t, "the change is in the kernel", func() string {
		if !tunnelled() {
			return "no tunnel"
		}
		return ""
	})
	// The hour is over when the daemons are back. Those that run count it from when they heard of the change.
	s, err := l.Store(t.Context(), "node1")
	if err != nil {
		t.Fatal(err)
	}
	_, err = store.Modify(t.Context(), s, store.UnconfirmedKey(change), func(cur store.Object) (any, error) {
		u, ok := cur.Value.(*store.Unconfirmed)
		if !ok {
			return nil, errors.New("the change does not wait to be confirmed")
		}
		c := *u
		c.Time = c.Time.Add(-2 * time.Hour)
		return &c, nil
	})
	if err := errors.Join(err, s.Close()); err != nil {
		t.Fatal(err)
	}
	if err := operator.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = operator.Wait() // it was killed
	for _, h := range l.Hosts() {
		if err := l.Kill(await.Context(t), h, unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
	}
	for _, h := range l.Hosts() {
		if err := l.Restart(await.Context(t), h); err != nil {
			t.Fatal(err)
		}
	}
	poll(t, "nobody confirmed it, and it is undone", func() string {
		if tunnelled() {
			return "packets go through the tunnel"
		}
		history, err := tryRouterctl(t, l, "node1", "", "history", change)
		if err != nil {
			return err.Error()
		}
		if !strings.Contains(history, "undone by routerd@node") {
			return history
		}
		return ""
	})
	if _, err := tryRouterctl(t, l, "node2", "", "confirm", change); err == nil || !strings.Contains(err.Error(), "it is undone, by routerd@node") {
		t.Errorf("confirmed afterwards: %v", err)
	}

	routerctl(t, l, "node2", "", "patch", "ippool", defaultPool, "-p", `{"spec": {"vxlanMode": "Always"}}`, "--confirm", "1h")
	routerctl(t, l, "node1", "", "confirm")
	s = openStore(t, l)
	if list, _, err := s.List(await.Context(t), store.KindUnconfirmed, ""); err != nil || len(list) != 0 {
		t.Errorf("still to be confirmed: %v, %v", list, err)
	}
	if history := routerctl(t, l, "node1", "", "history"); !strings.Contains(history, " confirmed ") {
		t.Errorf("history:\n%s", history)
	}
	if _, err := s.Get(await.Context(t), store.ChangeKey(change)); errors.Is(err, store.ErrNotFound) {
		t.Error("the first change is forgotten")
	}
}
