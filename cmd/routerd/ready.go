package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"

	"github.com/routerd/routerd/control/attach"
	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/control/config"
	"github.com/routerd/routerd/control/ipam"
	"github.com/routerd/routerd/control/lock"
	"github.com/routerd/routerd/control/netpolicy"
	"github.com/routerd/routerd/control/node"
	"github.com/routerd/routerd/control/presence"
	"github.com/routerd/routerd/store"
)

// incarnationFile is what stateDir knows of the machine.
func incarnationFile(c config.Config) string { return filepath.Join(c.StateDir, "incarnation.json") }

// identify says who holds this host's name.
func identify(c config.Config) (store.Incarnation, error) {
	if err := os.MkdirAll(c.StateDir, 0o700); err != nil {
		return store.Incarnation{}, fmt.Errorf("make stateDir: %w", err)
	}
	id, err := presence.Load(incarnationFile(c))
	if err != nil {
		return store.Incarnation{}, err
	}
	return presence.Self(id)
}

// readiness is what must be so before workloads come and are written down.
type readiness struct {
	presence *presence.Keeper
	db       *lock.Store
	cluster  *cluster.Cluster
	ipam     *ipam.Allocator
	node     *node.Agent
	policy   *netpolicy.Policy
	attach   *attach.Attacher
	mtu      *attach.MTUFollower
	leaving  atomic.Bool // the daemon is being stopped for good
}

// err says why ADD cannot be served yet.
func (r *readiness) err() error {
	if err := r.presence.Refused(); err != nil {
		return err
	}
	ns := r.node.Status()
	switch {
	case r.db.Locked():
		return lock.ErrLocked
	case !ns.Registered && ns.Err != nil:
		return ns.Err
	// What is remembered of the reserve serves only where the datastore is away:
	// else it may know better whose the addresses are.
	case !ns.Registered && (r.cluster.Freshness().Err == nil || len(r.ipam.Ready()) == 0):
		return errors.New("this host is not registered in the datastore yet")
	case r.leaving.Load():
		return errors.New("this host's daemon is being stopped, so it takes no new workloads")
	case ns.Drain != "":
		return errors.New("this host is drained, so it takes no new workloads; routerctl node undrain has it take them again")
	}
	if err := r.policy.Unable(); err != nil {
		return err
	}
	if r.mtu.Smallest() == 0 && r.attach.ReachedMTU() == (attach.MTU{}) {
		return errors.New("the host's network is not known yet")
	}
	return nil
}

// mayWrite says why what workloads change must not be written to the datastore; nil:
// it may be.
func (r *readiness) mayWrite() error {
	if err := r.presence.MayWrite(); err != nil {
		return err
	}
	if r.db.Locked() {
		return lock.ErrLocked
	}
	return nil
}
