package bgp

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"time"
)

// storePatience is how long a starting daemon waits for the datastore before
// it goes by what its previous run knew: well below the time for which peers keep
// the routes of a speaker that restarts.
const storePatience = 5 * time.Second

// readPatience is how long it waits at most while the datastore answers and has not said all yet: what the disk has
// may be a second older than what was advertised last, and peers would lose what is new with the End-of-RIB.
const readPatience = 20 * time.Second

// reads reports whether the datastore is still to be waited for, storePatience having passed: it answers, and peers
// keep this host's routes for long enough.
func (c *Controller) reads(waited time.Duration) bool {
	if c.opts.Answers == nil || !c.opts.Answers() {
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.view.synced || c.store != nil {
		return false
	}
	limit := readPatience
	if cfg, err := c.memo.desired(&c.view, c.opts.Node); err == nil {
		for _, p := range cfg.Peers {
			if p.wanted() && p.RestartTime > 0 {
				limit = min(limit, p.RestartTime/2)
			}
		}
	}
	return waited < limit
}

// resume runs with a configuration that follows from the state on disk, or err
// where there is none, while the datastore has said nothing, and as long as this
// host may. It reports whether there is nothing to try again.
func (c *Controller) resume(ctx context.Context, cfg Config, err error) bool {
	c.mu.Lock()
	links, again, patient := c.links, errors.Is(c.err, errPreviousRun), c.patient
	c.mu.Unlock()
	if patient && !again {
		c.setErr(ErrNotSynced)
		return true
	}
	if c.opts.MayResume != nil && !c.opts.MayResume() {
		return !again || c.giveUp(ctx)
	}
	if errors.Is(err, ErrNotSynced) {
		cfg, err = loadPrevious(c.opts.PreviousFile, c.opts.Node)
	}
	if err != nil {
		if !errors.Is(err, ErrNotSynced) {
			c.log.Warn("bgp cannot run with the configuration of its previous run", "error", err)
		}
		c.setErr(ErrNotSynced)
		return true
	}
	cfg.Links = links
	if !again {
		c.log.Warn("bgp runs with the configuration of its previous run: the datastore has not been read yet")
	}
	cfg, err = c.apply(ctx, cfg)
	c.mu.Lock()
	c.asn, c.routerID = cfg.ASN, cfg.RouterID
	c.mu.Unlock()
	c.setErr(errors.Join(errPreviousRun, err))
	return err == nil
}

// loadPrevious reads a node's configuration as the version before saved it.
func loadPrevious(file, node string) (Config, error) {
	if file == "" {
		return Config{}, ErrNotSynced
	}
	b, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return Config{}, ErrNotSynced
	}
	if err != nil {
		return Config{}, err
	}
	var s struct {
		Version int
		Config  Config
	}
	if err := json.Unmarshal(b, &s); err != nil {
		return Config{}, fmt.Errorf("%s: %w", file, err)
	}
	switch {
	case s.Version != 1:
		return Config{}, fmt.Errorf("%s: version %d of the file is not known", file, s.Version)
	case s.Config.Node != node:
		return Config{}, fmt.Errorf("%s: it is of node %s", file, s.Config.Node)
	}
	return s.Config, nil
}

// giveUp ends what resume began, for another has this node's name: peers are
// notified that nothing is to be had from here.
func (c *Controller) giveUp(ctx context.Context) bool {
	if err := c.speaker.Withdraw(ctx); err != nil {
		c.setErr(errors.Join(errPreviousRun, err))
		return false
	}
	c.log.Warn("bgp no longer runs with the configuration of its previous run: this host does not hold its name")
	c.mu.Lock()
	c.asn, c.routerID = 0, netip.Addr{}
	c.mu.Unlock()
	c.setErr(ErrNotSynced)
	return true
}

// errPreviousRun is shown while the speaker runs by what the previous run knew.
var errPreviousRun = fmt.Errorf("%w: BGP runs with the configuration of the daemon's previous run", ErrNotSynced)
