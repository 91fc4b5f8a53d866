package main

import (
	"context"
	"os"
	"path/filepath"

	"github.com/routerd/routerd/control/encap"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/ipip"
	"github.com/routerd/routerd/dataplane/vxlan"
)

// followEncaps publishes which encapsulations this host accepts and sends, as the
// core works them out, and lets the core know when they are in the datastore.
func (d *router) followEncaps(ctx context.Context) error {
	select {
	case <-d.core.Started():
	case <-ctx.Done():
		return ctx.Err()
	}
	if err := d.tellUnsupported(ctx); err != nil {
		return err
	}
	for f := range d.core.Publications(ctx) {
		rev, err := d.node.PublishEncaps(ctx, f)
		if err != nil {
			return err
		}
		d.log.Info("published which packets this host takes in", "accepts", f.Accepts, "uses", f.Uses, "sends", f.Sends)
		if err := d.core.Published(ctx, rev); err != nil {
			return err
		}
	}
	return ctx.Err()
}

// tellUnsupported finds out which tunnels this kernel has no devices for,
// before a pool asks for them: a change that would end there is then refused at
// once.
func (d *router) tellUnsupported(ctx context.Context) error {
	var missing []encap.Unsupported
	for _, f := range dataplane.Families() {
		h, err := d.core.Host(ctx, f)
		if err != nil {
			return err
		}
		if !h.Addr.IsValid() {
			continue
		}
		for _, dr := range []dataplane.Driver{ipip.Driver{}, vxlan.Driver{}} {
			for _, r := range dr.Requires(f) {
				if err := d.supports(ctx, r); err != nil {
					missing = append(missing, encap.Unsupported{Driver: dr.Name(), Outer: f, Err: err})
				}
			}
		}
	}
	return d.core.Unsupported(ctx, missing)
}

// supports is [kernel.Kernel.Supports], asked once for what there is until the
// host boots again: a restart makes no devices, not even for a moment.
func (d *router) supports(ctx context.Context, r dataplane.Requirement) error {
	mark := filepath.Join(d.cfg.RunDir, "supports."+string(r.Link))
	if _, err := os.Stat(mark); err == nil {
		return nil
	}
	if err := d.kernel.Supports(ctx, r); err != nil {
		return err
	}
	if err := os.WriteFile(mark, nil, 0o600); err != nil {
		d.log.Warn("what the kernel supports is not noted and will be asked again", "error", err)
	}
	return nil
}
