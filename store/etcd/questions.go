package etcd

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/sync/semaphore"
)

// What hosts ask each other is below questionRoot: each question by the node that it is for, and its answer beside it. Both hang
// on one lease, so nothing is left of who asked and died.
const (
	questionRoot = "/routerd/v1/questions/"
	askedRoot    = questionRoot + "asked/"    // NODE/ID
	answeredRoot = questionRoot + "answered/" // ID
)

const (
	// questionTTL is how long a question waits for its answer at most.
	questionTTL = 15 * time.Second
	// answersAtOnce is how many questions a host answers at a time.
	answersAtOnce = 4
	// questionsAtOnce is how many questions one transaction asks; etcd takes 128 operations unless told otherwise.
	questionsAtOnce = 100
	// askedAtOnce is how many bytes of questions one transaction has; etcd takes 1.5 MiB.
	askedAtOnce = 1 << 20
)

// Ask puts a question to a node, which answers by [Store.Questions], and returns the answer. Without one it returns when ctx
// ends, with its cause.
func (s *Store) Ask(ctx context.Context, node string, question []byte) (answer []byte, err error) {
	err = s.AskAll(ctx, []string{node}, question, func(_ string, said []byte) { answer = said })
	if err != nil {
		return nil, fmt.Errorf("ask %s: %w", node, err)
	}
	return answer, nil
}

// AskAll puts a question to nodes and calls yield with each answer as it comes, from one goroutine. It returns when all have
// answered; when ctx ends before, with its cause. It costs one lease, one watch, and of each node two keys.
func (s *Store) AskAll(ctx context.Context, nodes []string, question []byte, yield func(node string, answer []byte)) error {
	if len(nodes) == 0 {
		return nil
	}
	left, err := s.askAll(ctx, nodes, question, yield)
	switch {
	case left == 0:
		return nil
	case ctx.Err() != nil:
		return context.Cause(ctx)
	}
	return s.explain(ctx, err)
}

// askAll returns how many nodes have not answered.
func (s *Store) askAll(ctx context.Context, nodes []string, question []byte, yield func(node string, answer []byte)) (left int, err error) {
	waiting := make(map[string]string, len(nodes)) // by the answer's key
	group := rand.Text()
	put := make([]clientv3.Op, 0, len(nodes))
	lease, err := s.client.Grant(ctx, int64(questionTTL/time.Second))
	if err != nil {
		return len(nodes), err
	}
	defer func() {
		bye, cancel := context.WithTimeout(context.WithoutCancel(ctx), resignTimeout)
		defer cancel()
		_, _ = s.client.Revoke(bye, lease.ID) // else its end does the same
	}()
	for i, node := range nodes {
		id := group + "." + strconv.Itoa(i)
		waiting[answeredRoot+id] = node
		put = append(put, clientv3.OpPut(askedRoot+node+"/"+id, string(question), clientv3.WithLease(lease.ID)))
	}
	var from int64
	for ops := range slices.Chunk(put, max(1, min(questionsAtOnce, askedAtOnce/max(1, len(question))))) {
		r, err := s.client.Txn(ctx).Then(ops...).Commit()
		if err != nil {
			return len(waiting), err
		}
		if from == 0 {
			from = r.Header.Revision + 1
		}
	}
	watch, stop := context.WithCancel(clientv3.WithRequireLeader(ctx))
	defer stop()
	for changes := range s.client.Watch(watch, answeredRoot+group+".", clientv3.WithPrefix(), clientv3.WithRev(from)) {
		for _, e := range changes.Events {
			node, ok := waiting[string(e.Kv.Key)]
			if !ok || e.Type != clientv3.EventTypePut {
				continue
			}
			delete(waiting, string(e.Kv.Key))
			yield(node, append([]byte{}, e.Kv.Value...))
		}
		if len(waiting) == 0 {
			return 0, nil
		}
		if err := changes.Err(); err != nil {
			return len(waiting), err
		}
	}
	return len(waiting), errDisconnected
}

// Questions has answer answer what other hosts ask this node, a few at a time, until ctx ends. It returns when all are answered.
func (s *Store) Questions(ctx context.Context, node string, answer func(context.Context, []byte) []byte) {
	var running sync.WaitGroup
	defer running.Wait()
	room := semaphore.NewWeighted(answersAtOnce)
	taken := map[string]bool{}
	s.members(ctx, askedRoot+node+"/", func(list []*mvccpb.KeyValue) {
		there := make(map[string]bool, len(list))
		for _, kv := range list {
			id := strings.TrimPrefix(string(kv.Key), askedRoot+node+"/")
			there[id] = true
			if taken[id] {
				continue
			}
			running.Go(func() {
				if room.Acquire(ctx, 1) != nil {
					return
				}
				defer room.Release(1)
				call, cancel := context.WithTimeoutCause(ctx, questionTTL, errors.New("nobody waits for the answer any more"))
				defer cancel()
				said := answer(call, kv.Value)
				if _, err := s.client.Put(call, answeredRoot+id, string(said), clientv3.WithLease(clientv3.LeaseID(kv.Lease))); err != nil {
					s.log.Debug("a question of another host is not answered", "id", id, "error", s.explain(call, err))
				}
			})
		}
		taken = there
	})
}
