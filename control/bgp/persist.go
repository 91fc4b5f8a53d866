package bgp

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"time"

	"github.com/routerd/routerd/control/atomicfile"
)

// storePatience is how long a starting daemon waits for the datastore before
// it goes by the configuration of its previous run: well below the time for which
// peers keep the routes of a speaker that restarts.
const storePatience = 5 * time.Second

// savedVersion is the form of the saved file; another one is not read.
const savedVersion = 1

// saved is the file: the last configuration that the datastore led to.
// Passwords are not in it, only their references.
type saved struct {
	Version int
	Config  Config
}

// save writes a configuration in one step, so that a crash leaves the old file
// or the new one.
func save(file string, c Config) error {
	b, err := json.Marshal(saved{savedVersion, c})
	if err != nil {
		return fmt.Errorf("save the bgp configuration: %w", err)
	}
	if old, err := os.ReadFile(file); err == nil && bytes.Equal(old, b) {
		return nil
	}
	if err := atomicfile.Write(file, b, 0o600); err != nil {
		return fmt.Errorf("save the bgp configuration: %w", err)
	}
	return nil
}

// load reads what save wrote for this node.
func load(file, node string) (Config, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return Config{}, err
	}
	var s saved
	if err := json.Unmarshal(b, &s); err != nil {
		return Config{}, fmt.Errorf("%s: %w", file, err)
	}
	switch {
	case s.Version != savedVersion:
		return Config{}, fmt.Errorf("%s: version %d of the file is not known", file, s.Version)
	case s.Config.Node != node:
		return Config{}, fmt.Errorf("%s: it is of node %s", file, s.Config.Node)
	}
	return s.Config, nil
}

// keep saves what the datastore led to.
func (c *Controller) keep(cfg Config) {
	if c.opts.StateFile == "" {
		return
	}
	cfg.Links = nil
	if err := save(c.opts.StateFile, cfg); err != nil {
		c.log.Warn("bgp configuration not kept for a start without the datastore", "error", err)
	}
}

// resume runs with the configuration of the previous run while the datastore has
// said nothing, and as long as this host may. It reports whether there is nothing to try again.
func (c *Controller) resume(ctx context.Context) bool {
	c.mu.Lock()
	synced, links, again := c.view.synced, c.links, errors.Is(c.err, errLastLife)
	c.mu.Unlock()
	if synced || c.opts.StateFile == "" {
		return true
	}
	if c.opts.MayResume != nil && !c.opts.MayResume() {
		return !again || c.giveUp(ctx)
	}
	cfg, err := load(c.opts.StateFile, c.opts.Node)
	if err != nil {
		if !errors.Is(err, fs.ErrNotExist) {
			c.log.Warn("bgp configuration of the last life not usable", "error", err)
		}
		return true
	}
	cfg.Links = links
	if !again {
		c.log.Warn("bgp runs with the configuration of its previous run: the datastore has not been read yet")
	}
	err = c.speaker.Apply(ctx, c.secrets(ctx, c.onLinks(cfg)))
	c.mu.Lock()
	c.asn, c.routerID = cfg.ASN, cfg.RouterID
	c.mu.Unlock()
	c.setErr(errors.Join(errLastLife, err))
	return err == nil
}

// giveUp ends what resume began, for another has this node's name: peers are
// told that nothing is to be had from here.
func (c *Controller) giveUp(ctx context.Context) bool {
	if err := c.speaker.Withdraw(ctx); err != nil {
		c.setErr(errors.Join(errLastLife, err))
		return false
	}
	c.log.Warn("bgp does not run with the configuration of its last life any more: this host does not hold its name")
	c.mu.Lock()
	c.asn, c.routerID = 0, netip.Addr{}
	c.mu.Unlock()
	c.setErr(ErrNotSynced)
	return true
}

// errLastLife is shown while the speaker runs by the saved configuration.
var errLastLife = fmt.Errorf("%w: BGP runs with the configuration of the daemon's last life", ErrNotSynced)
