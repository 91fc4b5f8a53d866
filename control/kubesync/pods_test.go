package kubesync

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
)

// told is an API that says some batches of pods, and then nothing more until it is left.
type told []store.Batch

func (b told) WatchPods(ctx context.Context, _ string) <-chan store.Batch {
	ch := make(chan store.Batch)
	go func() {
		defer close(ch)
		for _, batch := range b {
			ch <- batch
		}
		<-ctx.Done()
	}()
	return ch
}

// TestPodsOnDisk: what the API said of pods a later run knows before it is heard from; what that
// does not say any more goes when all was told, and what it cannot say stays.
func TestPodsOnDisk(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "pods.journal")
	says := func(names ...string) (events []store.Event) {
		for _, n := range names {
			name, unreadable := strings.CutSuffix(n, "?")
			name, gone := strings.CutSuffix(name, "-")
			w := endpoint(name, map[string]string{"app": name})
			e := store.Event{Key: keyOf(t, w)}
			switch {
			case unreadable:
				e.Err = errors.New("unreadable")
			case !gone:
				raw, err := store.Encode(e.Key, w, nil)
				if err != nil {
					t.Fatal(err)
				}
				e.Object = store.Object{Key: e.Key, Value: w, Raw: raw, Revision: 1}
			}
			events = append(events, e)
		}
		return events
	}
	for _, run := range []struct {
		what    string
		batches []store.Batch
		want    string // what is known after each step, that of the disk first
	}{
		{"the first", []store.Batch{{Synced: true, Events: says("a", "b", "c")}}, "|a b c"},
		{"the API is away", nil, "a b c"},
		{"one is gone, of one nothing can be said", []store.Batch{{Events: says("a")}, {Synced: true, Events: says("c?")}, {Events: says("d")}}, "a b c|a b c|a c|a c d"},
		{"one goes", []store.Batch{{Synced: true, Events: says("a", "c", "d")}, {Events: says("a-")}}, "a c d|a c d|c d"},
		{"after that", nil, "c d"},
	} {
		known := map[string]bool{}
		var steps []string
		ctx, cancel := context.WithCancel(await.Context(t))
		err := Pods{API: told(run.batches), Node: "n1", File: file, Log: slog.New(slog.DiscardHandler), Handle: func(s cluster.Step) {
			for _, c := range s.Changes {
				switch w, _ := c.Value.(*store.WorkloadEndpoint); {
				case c.Err != nil:
				case w == nil:
					delete(known, c.Key.Name)
				case w.Labels["app"] == "":
					t.Errorf("%s: %s has no labels", run.what, c.Key)
				default:
					known[c.Key.Name] = true
				}
			}
			var names []string
			for _, n := range slices.Sorted(maps.Keys(known)) {
				names = append(names, strings.Split(n, "-k8s-")[1][:1])
			}
			if steps = append(steps, strings.Join(names, " ")); len(steps) == len(run.batches)+1 {
				cancel()
			}
		}}.Run(ctx)
		if !errors.Is(err, context.Canceled) {
			t.Errorf("%s: %v", run.what, err)
		}
		if got := strings.Join(steps, "|"); got != run.want {
			t.Errorf("%s: known %q, want %q", run.what, got, run.want)
		}
	}
}
