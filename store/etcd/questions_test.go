package etcd_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store/embedded"
	"github.com/routerd/routerd/store/etcd"
)

// TestQuestions: hosts that ask each other have the answers to their own questions, and nothing of it stays in the datastore.
func TestQuestions(t *testing.T) {
	t.Parallel()
	server := start(t, embedded.Config{})
	s := open(t, etcd.Config{Endpoints: []string{server.Endpoint()}})
	ctx, cancel := context.WithCancel(await.Context(t))
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	for _, node := range []string{"node1", "node10"} {
		wg.Go(func() {
			s.Questions(ctx, node, func(_ context.Context, q []byte) []byte { return fmt.Appendf(nil, "%s of %s", q, node) })
		})
	}
	var asking sync.WaitGroup
	for i := range 20 {
		for _, node := range []string{"node1", "node10"} {
			asking.Go(func() {
				q := fmt.Sprint("question ", i)
				if got, err := s.Ask(ctx, node, []byte(q)); err != nil || string(got) != q+" of "+node {
					t.Errorf("%q, error %v", got, err)
				}
			})
		}
	}
	asking.Wait()
	c, err := clientv3.New(clientv3.Config{Endpoints: []string{server.Endpoint()}})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	resp, err := c.Get(ctx, "/routerd/", clientv3.WithPrefix())
	if err != nil || len(resp.Kvs) > 0 {
		t.Errorf("left: %v, error %v", resp.Kvs, err)
	}
}

// TestAskNobody: where nobody answers, the end of the wait says why.
func TestAskNobody(t *testing.T) {
	t.Parallel()
	server := start(t, embedded.Config{})
	s := open(t, etcd.Config{Endpoints: []string{server.Endpoint()}})
	ctx, cancel := context.WithTimeoutCause(t.Context(), 100*time.Millisecond, errors.New("no answer in time"))
	defer cancel()
	if got, err := s.Ask(ctx, "node2", []byte("?")); err == nil || !strings.Contains(err.Error(), "ask node2: no answer in time") {
		t.Errorf("%q, error %v", got, err)
	}
}

// TestAskAll: more hosts than fit into a transaction, by their number or by what they are asked, answer, each for itself; those that do not are left when the wait ends.
func TestAskAll(t *testing.T) {
	t.Parallel()
	server := start(t, embedded.Config{})
	s := open(t, etcd.Config{Endpoints: []string{server.Endpoint()}})
	ctx, cancel := context.WithCancel(await.Context(t))
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	var nodes []string
	want := map[string]string{}
	for i := range 150 {
		node := fmt.Sprint("node", i)
		nodes, want[node] = append(nodes, node), "I am "+node
		wg.Go(func() {
			s.Questions(ctx, node, func(context.Context, []byte) []byte { return []byte("I am " + node) })
		})
	}
	got := map[string]string{}
	take := func(node string, answer []byte) { got[node] = string(answer) }
	for _, question := range []string{"?", strings.Repeat("?", 20<<10)} {
		clear(got)
		if err := s.AskAll(ctx, nodes, []byte(question), take); err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("%d bytes (-want +got)\n%s", len(question), d)
		}
	}
	clear(got)
	short, end := context.WithTimeoutCause(ctx, time.Second, errors.New("no answer in time"))
	defer end()
	if err := s.AskAll(short, []string{"nobody", "node7"}, []byte("?"), take); err == nil || err.Error() != "no answer in time" || got["node7"] == "" {
		t.Errorf("with one that is not there: %v, error %v", got, err)
	}
	if err := s.AskAll(ctx, nil, []byte("?"), take); err != nil {
		t.Errorf("of nobody: %v", err)
	}
}
