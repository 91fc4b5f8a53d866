package kube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/kube/convert"
)

// Names keeps the names of nodes, as package presence asks for it. Who is there is
// what the kubelet says of the machine in the Node's status: nothing is renewed.
// Make one with [Store.Names].
type Names struct {
	s    *Store
	self store.Incarnation

	mu   sync.Mutex
	mark string // of the Node as it was read last

	net    Network // likewise
	hasNet bool

	internal []netip.Addr // likewise
}

// Names returns what keeps names for a process. Its boot id is that of the kernel,
// which no two machines share.
func (s *Store) Names(self store.Incarnation) *Names { return &Names{s: s, self: self} }

// named is what counts of a Node for its name.
type named struct {
	Metadata struct {
		UID             string            `json:"uid"`
		ResourceVersion string            `json:"resourceVersion"`
		Annotations     map[string]string `json:"annotations"`
	} `json:"metadata"`
	Status struct {
		Addresses []struct {
			Type    string `json:"type"`
			Address string `json:"address"`
		} `json:"addresses"`
		NodeInfo   machine            `json:"nodeInfo"`
		Conditions []networkCondition `json:"conditions"`
	} `json:"status"`
}

// machine is what a kubelet says of the machine that it runs on.
type machine struct {
	BootID    string `json:"bootID"`
	MachineID string `json:"machineID"`
}

// record is what the name's last holder wrote; nil: nothing that can be read.
func (n *named) record(node string) *store.Incarnation {
	v, err := store.Decode(store.IncarnationKey(node), []byte(n.Metadata.Annotations[convert.IncarnationAnnotation]))
	if err != nil {
		return nil
	}
	i, _ := v.(*store.Incarnation)
	return i
}

// judge says who has a name, for a process on some machine.
func (n *named) judge(node string, self store.Incarnation) store.NameState {
	st := store.NameState{Record: n.record(node), NodeCreated: lifeOf(n.Metadata.UID)}
	info := n.Status.NodeInfo
	if r := st.Record; r != nil && r.BootID == self.BootID {
		// It is this machine since its last boot. Its state directory may be another: that
		// of a container that keeps none.
		r.Instance = self.Instance
		if r.MachineID == "" {
			r.MachineID = self.MachineID
		}
	}
	switch {
	case info.BootID != "" && info.BootID != self.BootID && !n.rebooted(st.Record, self):
		st.Holder = &store.Incarnation{BootID: info.BootID, MachineID: info.MachineID, Instance: "unknown: it is the kubelet's machine"}
		for _, a := range n.Status.Addresses {
			switch a.Type {
			case "Hostname":
				st.Holder.Host = a.Address
			case "InternalIP":
				st.Holder.Addresses = append(st.Holder.Addresses, a.Address)
			}
		}
	case st.Record != nil && st.Record.BootID == self.BootID:
		holder := *st.Record
		st.Holder = &holder
	}
	return st
}

// rebooted reports whether the kubelet speaks of the machine before the last boot of
// self: it has not said yet that it has booted.
func (n *named) rebooted(record *store.Incarnation, self store.Incarnation) bool {
	if id := n.Status.NodeInfo.MachineID; id != "" && self.MachineID != "" {
		return id == self.MachineID
	}
	return record != nil && record.Instance == self.Instance
}

// lifeOf makes a number of a uid, which is all that tells one life of a Node from
// the next.
func lifeOf(uid string) store.Revision {
	if uid == "" {
		return 0
	}
	h := fnv.New64a()
	_, _ = io.WriteString(h, uid) // a hash takes anything
	return store.Revision(h.Sum64()>>1 | 1)
}

// internalIPs lists the addresses that the kubelet says the host has.
func (n *named) internalIPs() (list []netip.Addr) {
	for _, a := range n.Status.Addresses {
		if addr, err := netip.ParseAddr(a.Address); err == nil && a.Type == "InternalIP" {
			list = append(list, addr)
		}
	}
	return list
}

// read keeps what the Node says beside who has its name. The lock is held.
func (c *Names) read(n *named) {
	c.net, c.hasNet = n.network()
	c.internal = n.internalIPs()
}

// seen is what a name was at a revision.
type seen struct {
	node string // its resourceVersion; empty: there is none
	info machine
	mark string // changes when a name is to be looked at again
}

func (n *named) seen() seen {
	m, info := n.Metadata, n.Status.NodeInfo
	if m.UID == "" {
		return seen{}
	}
	return seen{m.ResourceVersion, info, m.UID + " " + info.BootID + " " + info.MachineID + " " + m.Annotations[convert.IncarnationAnnotation]}
}

func oneNode(node string) url.Values {
	return url.Values{"fieldSelector": {"metadata.name=" + node}}
}

// Name reads what there is of a node's name.
func (c *Names) Name(ctx context.Context, node string) (store.NameState, error) {
	raw, err := c.s.call(ctx, request{method: http.MethodGet, path: nodesPath, query: oneNode(node)})
	if err != nil {
		return store.NameState{}, fmt.Errorf("read who holds the name %s: %w", node, c.s.explain(ctx, err))
	}
	var list struct {
		Metadata struct {
			ResourceVersion string `json:"resourceVersion"`
		} `json:"metadata"`
		Items []named `json:"items"`
	}
	err = json.Unmarshal(raw, &list)
	var rev int64
	if err == nil {
		rev, err = strconv.ParseInt(list.Metadata.ResourceVersion, 10, 64)
	}
	if err != nil {
		return store.NameState{}, fmt.Errorf("read who holds the name %s: %w: %w", node, store.ErrUnavailable, err)
	}
	var n named
	if len(list.Items) > 0 {
		n = list.Items[0]
	}
	st, saw := n.judge(node, c.self), n.seen()
	st.Revision, st.Seen = store.Revision(rev), saw
	c.mu.Lock()
	c.mark = saw.mark
	c.read(&n)
	c.mu.Unlock()
	return st, nil
}

const nodesPath = "/api/v1/nodes"

func nodePath(node string) string { return nodesPath + "/" + url.PathEscape(node) }

// Claim takes a name, on condition that its Node is as it was seen. A Node is made
// by its kubelet: without one there is no name to be had.
func (c *Names) Claim(ctx context.Context, node string, state store.NameState, as store.Incarnation, _ time.Duration) (store.Hold, error) {
	saw, _ := state.Seen.(seen)
	if saw.node == "" {
		return nil, fmt.Errorf("take the name %s: %w: there is no Node %s: its kubelet makes it; where the kubelet has another name for this host, set nodeName to that", node, store.ErrUnavailable, node)
	}
	if as.MachineID == "" && saw.info.BootID == as.BootID {
		as.MachineID = saw.info.MachineID // a container may not be shown it
	}
	raw, err := store.Encode(store.IncarnationKey(node), &as, nil)
	if err != nil {
		return nil, fmt.Errorf("take the name %s: %w", node, err)
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{
		"resourceVersion": saw.node, "annotations": map[string]string{convert.IncarnationAnnotation: string(raw)},
	}})
	if err != nil {
		return nil, fmt.Errorf("take the name %s: %w", node, err)
	}
	_, err = c.s.patchStatus(ctx, false, nodePath(node), patchType, patch)
	switch {
	case isCode(err, http.StatusConflict), isCode(err, http.StatusNotFound):
		return nil, fmt.Errorf("take the name %s: %w", node, store.ErrConflict)
	case err != nil:
		return nil, fmt.Errorf("take the name %s: %w", node, c.s.explain(ctx, err))
	}
	return hold{}, nil
}

// hold is a name that is held by what is written: it does not end by itself.
type hold struct{}

func (hold) Lost() <-chan struct{} { return nil }
func (hold) Forget()               {}

// Rest waits before another try of what the API could not serve.
func (c *Names) Rest(ctx context.Context, failures int) {
	_ = pause(ctx, nil, min(failures, 16)) // the caller looks at ctx
}

// WatchName gives a sign when who holds a name may have changed since a revision,
// and when that cannot be followed from there any more. It lasts until ctx ends.
func (c *Names) WatchName(ctx context.Context, node string, since store.Revision) <-chan struct{} {
	out := async.NewSignal()
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	if c.s.ctx.Err() != nil {
		return out
	}
	ctx, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(c.s.ctx, cancel)
	c.s.watches.Go(func() {
		defer stop()
		defer cancel()
		f := follower{s: c.s, path: nodesPath, query: oneNode(node), at: since}
		f.run(ctx, c.news, out.Set)
	})
	return out
}

// news reports whether an event changes who may hold the name: a Node is written
// often.
func (c *Names) news(e event) bool {
	var n named
	if e.Type != "DELETED" && json.Unmarshal(e.Object, &n) != nil {
		return false
	}
	mark := n.seen().mark
	c.mu.Lock()
	defer c.mu.Unlock()
	changed := mark != c.mark
	c.mark = mark
	was := c.internal
	c.read(&n)
	return changed || !slices.Equal(was, c.internal)
}

// Follow keeps what [Names.Network] returns as the Node says it, and tells which addresses the
// kubelet says the host has, until ctx ends, whose error it returns: for a host whose name is
// kept elsewhere. Who keeps it by the API sees to that anyway. Of a Node that is gone what was
// told last holds.
func (c *Names) Follow(ctx context.Context, node string, tell func(internal []netip.Addr)) error {
	for failures := 0; ctx.Err() == nil; {
		state, err := c.Name(ctx, node)
		if err != nil {
			failures++
			c.Rest(ctx, failures)
			continue
		}
		failures = 0
		c.mu.Lock()
		internal := c.internal
		c.mu.Unlock()
		if len(internal) > 0 {
			tell(internal)
		}
		watch, end := context.WithCancel(ctx)
		select {
		case <-c.WatchName(watch, node, state.Revision):
		case <-ctx.Done():
		}
		end()
	}
	return ctx.Err()
}

// follower follows the one object that a selector is for.
type follower struct {
	s     *Store
	path  string
	query url.Values
	at    store.Revision
}

// run reports changes for which counts says so, and gives up with a report when
// the history is gone.
func (f *follower) run(ctx context.Context, counts func(event) bool, report func()) {
	for failures := 0; ctx.Err() == nil; {
		began := time.Now()
		err := f.once(ctx, counts, report)
		var st *statusError
		if errors.As(err, &st) && (st.code == http.StatusGone || st.code == http.StatusGatewayTimeout) {
			report()
			return
		}
		if failures++; err == nil || time.Since(began) > settled {
			failures = 0
		}
		if pause(ctx, err, failures) != nil {
			return
		}
	}
}

func (f *follower) once(ctx context.Context, counts func(event) bool, report func()) error {
	query := maps.Clone(f.query)
	query.Set("resourceVersion", strconv.FormatInt(int64(f.at), 10))
	return f.s.events(ctx, f.path, query, watchTime+rand.N(watchTime), func(context.Context) {}, func(e event) error {
		var head struct {
			Metadata struct {
				ResourceVersion string `json:"resourceVersion"`
			} `json:"metadata"`
		}
		if err := json.Unmarshal(e.Object, &head); err != nil {
			return err
		}
		if n, err := strconv.ParseInt(head.Metadata.ResourceVersion, 10, 64); err == nil {
			f.at = max(f.at, store.Revision(n))
		}
		if e.Type != "BOOKMARK" && counts(e) {
			report()
		}
		return nil
	})
}
