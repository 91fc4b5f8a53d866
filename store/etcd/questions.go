package etcd

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
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
)

// Ask puts a question to a node, which answers by [Store.Questions], and returns the answer. Without one it returns when ctx
// ends, with its cause.
func (s *Store) Ask(ctx context.Context, node string, question []byte) ([]byte, error) {
	answer, err := s.ask(ctx, node, question)
	switch {
	case ctx.Err() != nil && answer == nil:
		return nil, fmt.Errorf("ask %s: %w", node, context.Cause(ctx))
	case err != nil:
		return nil, fmt.Errorf("ask %s: %w", node, s.explain(ctx, err))
	}
	return answer, nil
}

func (s *Store) ask(ctx context.Context, node string, question []byte) ([]byte, error) {
	lease, err := s.client.Grant(ctx, int64(questionTTL/time.Second))
	if err != nil {
		return nil, err
	}
	defer func() {
		bye, cancel := context.WithTimeout(context.WithoutCancel(ctx), resignTimeout)
		defer cancel()
		_, _ = s.client.Revoke(bye, lease.ID) // else its end does the same
	}()
	id := rand.Text()
	put, err := s.client.Put(ctx, askedRoot+node+"/"+id, string(question), clientv3.WithLease(lease.ID))
	if err != nil {
		return nil, err
	}
	watch, stop := context.WithCancel(clientv3.WithRequireLeader(ctx))
	defer stop()
	for changes := range s.client.Watch(watch, answeredRoot+id, clientv3.WithRev(put.Header.Revision+1)) {
		for _, e := range changes.Events {
			if e.Type == clientv3.EventTypePut {
				return append([]byte{}, e.Kv.Value...), nil
			}
		}
		if err := changes.Err(); err != nil {
			return nil, err
		}
	}
	return nil, errDisconnected
}

// Questions has answer answer what other hosts ask this node, a few at a time, until ctx ends. It returns when all are answered.
func (s *Store) Questions(ctx context.Context, node string, answer func(context.Context, []byte) []byte) {
	var running sync.WaitGroup
	defer running.Wait()
	room := make(chan struct{}, answersAtOnce)
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
				select {
				case room <- struct{}{}:
					defer func() { <-room }()
				case <-ctx.Done():
					return
				}
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
