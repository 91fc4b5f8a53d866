package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/url"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/kube/convert"
)

// Namespace is where routerd's own objects are.
func (s *Store) Namespace() string { return s.namespace }

// FollowSecret tells what the Secret of a name in routerd's namespace holds, first as it is and then after each change,
// until ctx ends or the store is closed. Where there is no such Secret the error matches [store.ErrNotFound]; any other says
// why it cannot be read now, and what was told before may hold. The rights that it needs are those to list and watch this one
// Secret (resourceNames).
func (s *Store) FollowSecret(ctx context.Context, name string, tell func(data map[string][]byte, err error)) {
	if wrong := validation.IsDNS1123Subdomain(name); len(wrong) > 0 {
		tell(nil, fmt.Errorf("%w: no Secret can have the name %q: %s", store.ErrInvalid, name, wrong[0]))
		return
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(s.ctx, cancel)()
	w := secretWatch{s: s, name: name, tell: tell}
	for failures := 0; ctx.Err() == nil; failures++ {
		began := time.Now()
		err := w.follow(ctx)
		if ctx.Err() != nil {
			return
		}
		if time.Since(began) > settled {
			failures = 0
		}
		if err != nil {
			w.at = "" // it is asked for anew
			if !isCode(err, http.StatusGone) {
				tell(nil, s.explain(ctx, err))
			}
		}
		if failures == 0 {
			continue
		}
		wait := pauseAfter(err, failures-1)
		if isCode(err, http.StatusForbidden) { // until somebody gives the right; each node asks
			wait = max(wait, min(definitionPause, retryMin<<min(failures, 10)))
		}
		if async.Sleep(ctx, wait) != nil {
			return
		}
	}
}

// secretWatch follows one Secret.
type secretWatch struct {
	s    *Store
	name string
	tell func(map[string][]byte, error)
	at   string // the resourceVersion up to which all was told; empty: the Secret is to be read
}

// namedSecret is what is read of a Secret.
type namedSecret struct {
	Metadata metav1.ListMeta   `json:"metadata"`
	Data     map[string][]byte `json:"data"`
}

// follow reads the Secret if that is needed, and then each change, until the watch ends. By its name in a selector alone can it be
// watched with a right that names it.
func (w *secretWatch) follow(ctx context.Context) error {
	path, only := convert.Secrets(convert.V3).Resource.Path(w.s.namespace), "metadata.name="+w.name
	if w.at == "" {
		raw, err := w.s.call(ctx, request{method: http.MethodGet, path: path, query: url.Values{"fieldSelector": {only}, "limit": {"1"}}})
		if err != nil {
			return err
		}
		var l struct {
			Metadata metav1.ListMeta `json:"metadata"`
			Items    []namedSecret   `json:"items"`
		}
		if err := json.Unmarshal(raw, &l); err != nil {
			return fmt.Errorf("list of Secret %s: %w", w.name, decodeError(err))
		}
		if len(l.Items) == 0 {
			w.gone()
		} else {
			w.tell(l.Items[0].Data, nil)
		}
		w.at = l.Metadata.ResourceVersion
	}
	query := url.Values{"fieldSelector": {only}, "resourceVersion": {w.at}}
	return w.s.events(ctx, path, query, watchTime+rand.N(watchTime), func(context.Context) {}, func(e event) error {
		var o namedSecret
		if err := json.Unmarshal(e.Object, &o); err != nil {
			return fmt.Errorf("watch of Secret %s: %w", w.name, decodeError(err))
		}
		switch w.at = o.Metadata.ResourceVersion; e.Type {
		case "ADDED", "MODIFIED":
			w.tell(o.Data, nil)
		case "DELETED":
			w.gone()
		}
		return nil
	})
}

func (w *secretWatch) gone() {
	w.tell(nil, fmt.Errorf("%w: there is no Secret %s in the namespace %s", store.ErrNotFound, w.name, w.s.namespace))
}

// decodeError says that a Secret is not as it should be, without what package json says of it, which may show a part.
func decodeError(error) error { return fmt.Errorf("%w: it is no Secret of v1", store.ErrDecode) }
