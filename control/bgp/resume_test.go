package bgp

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/control/cluster/clustertest"
	"github.com/routerd/routerd/store"
)

// TestResumeOnlyIfItMay: a host whose name another machine has announces nothing
// of its previous run, and takes back what it announced while it could not know.
func TestResumeOnlyIfItMay(t *testing.T) {
	t.Parallel()
	h := hosts(t, 2)
	ctx := context.Background()
	other := newDaemon(t, "node2")
	other.send(testCluster(t, h))
	var may atomic.Bool
	c := New(Options{Log: testLog(t), Node: "node1", MayResume: may.Load})
	t.Cleanup(func() {
		if err := c.speaker.Stop(ctx, false); err != nil {
			t.Error(err)
		}
	})
	heard := func(want bool) {
		t.Helper()
		poll(t, func() string { return fmt.Sprintf("the route at the peer is %t: %v", !want, other.Status(ctx)) },
			func() bool { return other.has("192.168.1.0/26") == want })
	}
	// batch is what follow and drive do with one.
	batch := func(b store.Batch) {
		t.Helper()
		if !c.take(clustertest.Step("node1", b)) {
			t.Fatal("a batch before the first answer wakes nobody")
		}
		if !c.reconcile(ctx) {
			t.Fatal(c.Status(ctx).Err)
		}
	}
	silent := func() {
		t.Helper()
		if e, peers := c.speaker.states(); e != nil || len(peers) != 0 {
			t.Errorf("it speaks to %v", peers)
		}
		if err := c.Status(ctx).Err; !errors.Is(err, ErrNotSynced) || errors.Is(err, errPreviousRun) {
			t.Errorf("its status says %v", err)
		}
	}
	disk := clustertest.Step("node1", testCluster(t, h))
	disk.Source, disk.Synced = cluster.Disk, true
	if !c.take(disk) || !c.reconcile(ctx) {
		t.Fatal("the state on disk is not taken")
	}
	batch(store.Batch{Err: store.ErrUnavailable})
	silent() // it is too early
	c.mu.Lock()
	c.patient = false
	c.mu.Unlock()
	if !c.reconcile(ctx) {
		t.Error("it asks again and again")
	}
	silent()
	may.Store(true) // the datastore is away, and nobody is known to have the name
	batch(store.Batch{Err: store.ErrUnavailable})
	heard(true)
	may.Store(false) // it is back, and another has it
	batch(store.Batch{})
	silent()
	heard(false)
	may.Store(true)
	batch(store.Batch{Err: store.ErrUnavailable})
	heard(true)
}

// TestReadsOn: a datastore that answers and has not said all yet is waited for longer than one that says nothing, but
// not for longer than peers keep this host's routes.
func TestReadsOn(t *testing.T) {
	t.Parallel()
	peer := func(restart string) store.Batch {
		return store.Batch{Events: []store.Event{
			bgpNode(t, "node1", "192.0.2.1/24"), conf(t, "default", `{"nodeToNodeMeshEnabled":false}`),
			object(t, store.ResourceKey(store.KindBGPPeer, "tor"), `{"peerIP":"192.0.2.9","asNumber":64999`+restart+`}`),
		}}
	}
	for _, tt := range []struct {
		name    string
		answers bool
		disk    store.Batch
		outage  error
		waited  time.Duration
		want    bool
	}{
		{"it answers", true, peer(""), nil, storePatience, true},
		{"it answers, and takes too long", true, peer(""), nil, readPatience, false},
		{"it has not answered", false, peer(""), nil, storePatience, false},
		{"it answered, and is away", true, peer(""), store.ErrUnavailable, storePatience, false},
		{"peers keep routes for less", true, peer(`,"maxRestartTime":"10s"`), nil, storePatience, false},
		{"peers keep routes for long enough", true, peer(`,"maxRestartTime":"12s"`), nil, storePatience, true},
		{"nothing is on disk", true, store.Batch{}, nil, storePatience, true},
	} {
		c := New(Options{Log: testLog(t), Node: "node1", Answers: func() bool { return tt.answers }})
		disk := clustertest.Step("node1", tt.disk)
		disk.Source, disk.Synced = cluster.Disk, true
		c.take(disk)
		c.take(clustertest.Step("node1", store.Batch{Err: tt.outage}))
		if got := c.reads(tt.waited); got != tt.want {
			t.Errorf("%s: after %v: %v", tt.name, tt.waited, got)
		}
	}
}
