package kube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/store"
)

// leasePrefix begins the names of routerd's leases.
const leasePrefix = "routerd-"

// lease is a Lease of coordination.k8s.io/v1.
type lease struct {
	APIVersion string    `json:"apiVersion"`
	Kind       string    `json:"kind"`
	Metadata   ownMeta   `json:"metadata"`
	Spec       leaseSpec `json:"spec"`
}

// ownMeta is the metadata of an object that routerd makes for itself.
type ownMeta struct {
	Name            string `json:"name"`
	Namespace       string `json:"namespace"`
	ResourceVersion string `json:"resourceVersion,omitempty"`
}

type leaseSpec struct {
	HolderIdentity       string            `json:"holderIdentity"`
	LeaseDurationSeconds int               `json:"leaseDurationSeconds"`
	AcquireTime          *metav1.MicroTime `json:"acquireTime,omitempty"`
	RenewTime            *metav1.MicroTime `json:"renewTime,omitempty"`
	LeaseTransitions     int               `json:"leaseTransitions,omitempty"`
}

// candidate stands for one lease.
type candidate struct {
	s        *Store
	name, id string
	ttl      time.Duration

	seen  lease     // as it was read last
	since time.Time // since when it is like that, by the clock of this host
}

// Lead calls lead while this process is the one of the cluster that holds the Lease
// called name, of routerd's namespace, and waits for it otherwise. It does
// what etcd's does: when the holder dies, another follows within about twice ttl. Who
// waits goes by its own clock and by whether the Lease changes, so clocks need
// not agree. Those that do not hold it look at it about as often as it would end: no
// Lease is written but by its holder.
func (s *Store) Lead(ctx context.Context, name, id string, ttl time.Duration, lead func(context.Context)) {
	c := &candidate{s: s, name: leasePrefix + name, id: id, ttl: max(ttl, time.Second)}
	for ctx.Err() == nil {
		held, err := c.take(ctx)
		if ctx.Err() != nil {
			return
		}
		if held {
			c.hold(ctx, lead)
		} else if err != nil {
			s.log.Debug("the lease cannot be had; will try again", "lease", c.name, "error", err)
		}
		_ = async.Sleep(ctx, c.ttl/2+rand.N(c.ttl)) // the loop looks at ctx
	}
}

func (c *candidate) path() string {
	return "/apis/coordination.k8s.io/v1/namespaces/" + c.s.namespace + "/leases"
}

// take takes the lease if it is nobody's. It reports whether it is ours then.
func (c *candidate) take(ctx context.Context) (bool, error) {
	raw, err := c.s.call(ctx, request{method: http.MethodGet, path: c.path() + "/" + c.name})
	now := lease{APIVersion: "coordination.k8s.io/v1", Kind: "Lease", Metadata: ownMeta{Name: c.name, Namespace: c.s.namespace}}
	switch {
	case isCode(err, http.StatusNotFound):
		return c.write(ctx, now)
	case err != nil:
		return false, c.s.explain(ctx, err)
	}
	if err := json.Unmarshal(raw, &now); err != nil {
		return false, fmt.Errorf("lease %s: %w: %w", c.name, store.ErrDecode, err)
	}
	if now.Metadata.ResourceVersion != c.seen.Metadata.ResourceVersion {
		c.seen, c.since = now, time.Now()
	}
	holder, lasts := now.Spec.HolderIdentity, time.Duration(now.Spec.LeaseDurationSeconds)*time.Second
	if holder != "" && holder != c.id && time.Since(c.since) < lasts {
		return false, nil
	}
	return c.write(ctx, now)
}

// write makes the lease ours, on condition that it is as it was. It reports whether
// it is.
func (c *candidate) write(ctx context.Context, was lease) (bool, error) {
	now := metav1.NowMicro()
	next := was
	if was.Spec.HolderIdentity != c.id {
		next.Spec.AcquireTime = &now
		if was.Metadata.ResourceVersion != "" {
			next.Spec.LeaseTransitions++
		}
	}
	next.Spec.HolderIdentity, next.Spec.RenewTime = c.id, &now
	next.Spec.LeaseDurationSeconds = int(c.ttl / time.Second)
	err := c.put(ctx, next)
	if isCode(err, http.StatusConflict) {
		return false, nil // another was faster
	}
	return err == nil, c.s.explain(ctx, err)
}

func (c *candidate) put(ctx context.Context, l lease) error {
	body, err := json.Marshal(l)
	if err != nil {
		return err
	}
	r := request{method: http.MethodPut, path: c.path() + "/" + c.name, contentType: jsonType, body: body}
	if l.Metadata.ResourceVersion == "" {
		r.method, r.path = http.MethodPost, c.path()
	}
	raw, err := c.s.call(ctx, r)
	if err != nil {
		return err
	}
	c.since = time.Now()
	return json.Unmarshal(raw, &c.seen)
}

// hold runs lead, and renews the lease, until ctx ends or the lease is not ours any
// more: then lead is ended first. It gives the lease back if it can.
func (c *candidate) hold(ctx context.Context, lead func(context.Context)) {
	office, end := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		lead(office)
	}()
	err := c.renew(office, done)
	end()
	<-done
	if err != nil {
		c.s.log.Debug("lease lost; will stand again", "lease", c.name, "error", err)
		return
	}
	bye, cancel := context.WithTimeout(context.WithoutCancel(ctx), byeTimeout)
	defer cancel()
	l := c.seen
	l.Spec.HolderIdentity = ""
	_ = c.put(bye, l) // its end does the same, later
}

// byeTimeout bounds the farewell.
const byeTimeout = 2 * time.Second

// renew keeps the lease until ctx ends or done is closed. The error says why it
// is another's, or may be by now.
func (c *candidate) renew(ctx context.Context, done <-chan struct{}) error {
	kept := time.Now()
	tick := time.NewTicker(c.ttl / 4)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-done:
			return nil
		case <-tick.C:
		}
		try, cancel := context.WithDeadline(ctx, kept.Add(c.ttl*3/4))
		began := time.Now()
		ours, err := c.write(try, c.seen)
		if err == nil && !ours {
			ours, err = c.take(try) // somebody has written to it
		}
		cancel()
		switch {
		case ours:
			kept = began
		case ctx.Err() != nil:
			return nil
		case err == nil:
			return errors.New("it is another's")
		case time.Since(kept) >= c.ttl*3/4:
			return err
		}
	}
}
