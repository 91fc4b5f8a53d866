// Package publish brings to the other hosts which encapsulations this one accepts and
// sends: from the core, which works them out, to the host's Node, and back to the core
// when the datastore has them.
package publish

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/routerd/routerd/control/encap"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
)

// Core is what a [Publisher] asks of the core, as *[vrouter.Core] does.
type Core interface {
	// Started is closed when the core knows this host and its pools.
	Started() <-chan struct{}
	Host(ctx context.Context, f dataplane.Family) (dataplane.Host, error)
	Unsupported(ctx context.Context, list []encap.Unsupported) error
	Publications(ctx context.Context) <-chan store.NodeEncaps
	Published(ctx context.Context, rev store.Revision) error
}

// Publisher publishes until it is stopped. All fields are required.
type Publisher struct {
	Core    Core
	Publish func(context.Context, store.NodeEncaps) (store.Revision, error) // writes the host's Node
	// Tunnels are the drivers whose devices the kernel may lack, and Supports asks it for
	// what one requires: it makes a device and removes it.
	Tunnels  []dataplane.Driver
	Supports func(context.Context, dataplane.Requirement) error
	RunDir   string // keeps what the kernel supports, until the host boots
	Log      *slog.Logger
}

// Run publishes what the core works out until ctx ends.
func (p Publisher) Run(ctx context.Context) error {
	select {
	case <-p.Core.Started():
	case <-ctx.Done():
		return ctx.Err()
	}
	if err := p.unsupported(ctx); err != nil {
		return err
	}
	for e := range p.Core.Publications(ctx) {
		rev, err := p.Publish(ctx, e)
		if err != nil {
			return err
		}
		p.Log.Info("published which packets this host takes in", "accepts", e.Accepts, "uses", e.Uses, "sends", e.Sends, "stays", e.Stays, "refuses", e.Refuses)
		if err := p.Core.Published(ctx, rev); err != nil {
			return err
		}
	}
	return ctx.Err()
}

// unsupported finds out which tunnels this kernel has no devices for, before a pool asks
// for them: a change that would end there is then refused at once.
func (p Publisher) unsupported(ctx context.Context) error {
	var missing []encap.Unsupported
	for _, f := range dataplane.Families() {
		h, err := p.Core.Host(ctx, f)
		if err != nil {
			return err
		}
		if !h.Addr.IsValid() {
			continue
		}
		for _, dr := range p.Tunnels {
			for _, r := range dr.Requires(f) {
				if err := p.supports(ctx, r); err != nil {
					missing = append(missing, encap.Unsupported{Driver: dr.Name(), Outer: f, Err: err})
				}
			}
		}
	}
	return p.Core.Unsupported(ctx, missing)
}

// marks begins the names of the files that say what the kernel supports.
const marks = "supports."

// Marks is the pattern of the files that a run directory may have of a [Publisher].
func Marks(runDir string) string { return filepath.Join(runDir, marks+"*") }

// supports asks the kernel once for what there is until the host boots again: a restart
// makes no devices, not even for a moment.
func (p Publisher) supports(ctx context.Context, r dataplane.Requirement) error {
	mark := filepath.Join(p.RunDir, marks+string(r.Link))
	if _, err := os.Stat(mark); err == nil {
		return nil
	}
	if err := p.Supports(ctx, r); err != nil {
		return err
	}
	if err := os.WriteFile(mark, nil, 0o600); err != nil {
		p.Log.Warn("what the kernel supports is not noted and will be asked again", "error", err)
	}
	return nil
}
