package etcd

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/routerd/routerd/store"
)

// rightsCheck is how often a watch that may not read some kinds asks whether it may by now.
const rightsCheck = 30 * time.Second

// withhold notes below which prefixes this user may not read, and returns what a batch says of
// that; nil: it may read all.
func (r *reader) withhold(denied []string) map[store.Kind]store.Withheld {
	var withheld map[store.Kind]store.Withheld
	was := r.denied
	r.denied = nil
	for _, k := range r.beside {
		prefix := store.PathPrefix(k, "")
		if !slices.Contains(denied, prefix) {
			r.known[k] = true
			if slices.Contains(was, k) {
				r.log.Info("this user of etcd may read a kind of object now", "kind", k)
			}
			continue
		}
		err := fmt.Errorf("permission denied: this user of etcd may not read %s: run configs/etcd/roles.sh again", prefix)
		if !slices.Contains(was, k) {
			r.log.Error("a kind of object is not followed; the others are", "kind", k, "error", err)
		}
		if withheld == nil {
			withheld = make(map[store.Kind]store.Withheld)
		}
		withheld[k] = store.Withheld{Err: err, Known: r.known[k]}
		r.denied = append(r.denied, k)
	}
	return withheld
}

// awaitRights ends a watch when some of what it may not read can be read.
func (r *reader) awaitRights(ctx context.Context, lost context.CancelCauseFunc) {
	for {
		timer := time.NewTimer(r.rightsCheck/2 + rand.N(r.rightsCheck))
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return
		}
		for _, k := range r.denied {
			call, cancel := context.WithTimeout(ctx, r.pageTimeout)
			_, err := r.client.Get(call, store.PathPrefix(k, ""), clientv3.WithPrefix(), clientv3.WithCountOnly())
			cancel()
			if err == nil {
				lost(errGranted)
				return
			}
		}
	}
}
