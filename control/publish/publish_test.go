package publish

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/control/encap"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/ipip"
	"github.com/routerd/routerd/dataplane/vxlan"
	"github.com/routerd/routerd/store"
)

// core is a core on a host with an address of IPv4 alone, which has one state to publish
// after another.
type core struct {
	started      chan struct{}
	publications chan store.NodeEncaps
	unsupported  []string
	published    chan store.Revision
}

func newCore(started bool) *core {
	c := &core{started: make(chan struct{}), publications: make(chan store.NodeEncaps), published: make(chan store.Revision)}
	if started {
		close(c.started)
	}
	return c
}

func (c *core) Started() <-chan struct{} { return c.started }

func (c *core) Host(_ context.Context, f dataplane.Family) (h dataplane.Host, err error) {
	if f == dataplane.IPv4 {
		h.Addr = netip.MustParsePrefix("10.1.0.11/24")
	}
	return h, nil
}

func (c *core) Unsupported(_ context.Context, list []encap.Unsupported) error {
	c.unsupported = nil
	for _, u := range list {
		c.unsupported = append(c.unsupported, fmt.Sprint(u.Driver, " ", u.Outer, " ", u.Err))
	}
	return nil
}

func (c *core) Publications(context.Context) <-chan store.NodeEncaps { return c.publications }

func (c *core) Published(ctx context.Context, rev store.Revision) error {
	select {
	case c.published <- rev:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// run starts a publisher on a kernel without ipip; asked counts what the kernel is asked for.
func run(t *testing.T, c *core, runDir string, publish func(store.NodeEncaps) (store.Revision, error), asked map[dataplane.LinkType]int) (stop func() error) {
	t.Helper()
	p := Publisher{
		Core: c, Tunnels: []dataplane.Driver{ipip.Driver{}, vxlan.Driver{}}, RunDir: runDir, Log: slog.New(slog.DiscardHandler),
		Publish: func(_ context.Context, e store.NodeEncaps) (store.Revision, error) { return publish(e) },
		Supports: func(_ context.Context, r dataplane.Requirement) error {
			asked[r.Link]++
			if r.Link == dataplane.LinkIPIP {
				return errors.New("no module ipip")
			}
			return nil
		},
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- p.Run(ctx) }()
	return func() error {
		cancel()
		return <-ended
	}
}

// TestPublish: what the core works out is published in turn, and the core learns at which
// revision. What the kernel supports it is asked once for a boot; what it lacks, at each start.
func TestPublish(t *testing.T) {
	t.Parallel()
	dir, asked := t.TempDir(), map[dataplane.LinkType]int{}
	for start := range 2 {
		c := newCore(true)
		var got []string
		rev := store.Revision(10)
		stop := run(t, c, dir, func(e store.NodeEncaps) (store.Revision, error) {
			got = append(got, e.Accepts...)
			rev++
			return rev, nil
		}, asked)
		for i, accepts := range []string{"direct", "vxlan"} {
			c.publications <- store.NodeEncaps{Accepts: []string{accepts}}
			if at := <-c.published; at != store.Revision(11+i) {
				t.Errorf("start %d: the core learns of revision %d", start, at)
			}
		}
		close(c.publications)
		if err := stop(); err != nil && !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		if d := cmp.Diff([]string{"direct", "vxlan"}, got); d != "" {
			t.Errorf("start %d: published (-want +got):\n%s", start, d)
		}
		if d := cmp.Diff([]string{"ipip IPv4 no module ipip"}, c.unsupported); d != "" {
			t.Errorf("start %d: not supported (-want +got):\n%s", start, d)
		}
	}
	if d := cmp.Diff(map[dataplane.LinkType]int{dataplane.LinkIPIP: 2, dataplane.LinkVXLAN: 1}, asked); d != "" {
		t.Errorf("the kernel was asked (-want +got):\n%s", d)
	}
	found, err := filepath.Glob(Marks(dir))
	if err != nil || len(found) != 1 {
		t.Errorf("%s matches %v, %v", Marks(dir), found, err)
	}
}

// TestPublishFails: a Node that cannot be written ends it, and so does its context while the
// core does not know its host yet. A run directory that takes no file does not.
func TestPublishFails(t *testing.T) {
	t.Parallel()
	refused := errors.New("refused")
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	c := newCore(true)
	stop := run(t, c, file, func(store.NodeEncaps) (store.Revision, error) { return 0, refused }, map[dataplane.LinkType]int{})
	c.publications <- store.NodeEncaps{}
	if err := stop(); !errors.Is(err, refused) {
		t.Errorf("ended with %v", err)
	}
	stop = run(t, newCore(false), file, func(store.NodeEncaps) (store.Revision, error) { return 0, nil }, map[dataplane.LinkType]int{})
	if err := stop(); !errors.Is(err, context.Canceled) {
		t.Errorf("ended with %v", err)
	}
}
