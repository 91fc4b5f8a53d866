package main

import (
	"context"
	"os"
	"path/filepath"

	"github.com/routerd/routerd/control/atomicfile"
	"github.com/routerd/routerd/control/attach"
	"github.com/routerd/routerd/control/bgp"
	"github.com/routerd/routerd/control/bootid"
	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/control/config"
	"github.com/routerd/routerd/control/ipam"
	"github.com/routerd/routerd/control/kubecontrollers"
	"github.com/routerd/routerd/control/lock"
	"github.com/routerd/routerd/control/netpolicy"
	"github.com/routerd/routerd/control/node"
	"github.com/routerd/routerd/control/nodestatus"
	"github.com/routerd/routerd/control/policy"
	"github.com/routerd/routerd/control/ui"
	"github.com/routerd/routerd/control/vrouter"
	"github.com/routerd/routerd/store"
)

// followers are the parts' places in the changes of the cluster, each at its own
// pace. A part that does not run has none: its changes would pile up.
type followers struct {
	core, ipam, bgp, probe, attach, pods, policy, node, lock, status, controllers, hosts, network, page *cluster.Follower
}

// follow makes the followers: api says that the datastore has what Kubernetes' API says, and
// kubernetes that it is that API.
func follow(c *cluster.Cluster, speaksBGP, api, kubernetes, page bool) followers {
	f := followers{
		core: c.Follow(vrouter.Kinds()...).OthersBlocks(), ipam: c.Follow(ipam.Kinds()...).OwnNode(),
		probe: c.Follow(store.KindNode), node: c.Follow(node.Kinds()...),
		attach: c.Follow(attach.Kinds()...), policy: followPolicy(c, api), lock: c.Follow(lock.Kinds()...),
		status: c.Follow(nodestatus.Kinds()...), controllers: c.Follow(store.KindKubeControllersConfiguration),
		hosts: c.Follow(kubecontrollers.Kinds()...).Waive(store.KindKubeControllersConfiguration),
	}
	if speaksBGP {
		var services []store.Kind
		if api {
			services = bgp.ServiceKinds()
		}
		f.bgp = c.Follow(append(bgp.Kinds(), services...)...).Waive(services...)
	}
	if api {
		f.network = c.Follow(store.KindNode)
	}
	if kubernetes {
		f.pods = c.Follow(attach.PodKinds()...)
	} else if api { // what pods ask for the API says, and their namespaces the datastore
		f.pods = c.Follow(store.KindProfile)
	}
	if page {
		f.page = c.Follow(ui.Kinds()...)
	}
	return f
}

// clusterFile is where the copy of the cluster is kept on disk.
func clusterFile(c config.Config) string { return filepath.Join(c.StateDir, "cluster.journal") }

// podsFile is where what the API says of this host's pods is kept, where that is not the datastore.
func podsFile(c config.Config) string { return filepath.Join(c.StateDir, "pods.journal") }

// previousPolicyFile is where the version before kept what concerns policy.
func previousPolicyFile(c config.Config) string { return filepath.Join(c.StateDir, "policy.journal") }

// previousBGPFile is where the version before kept the last configuration of BGP.
func previousBGPFile(c config.Config) string { return filepath.Join(c.StateDir, "bgp.json") }

// load has those start with what the disk has of the cluster that may go by it
// while the datastore does not answer.
func load(d daemon, c *cluster.Cluster, f followers, p *netpolicy.Policy) {
	readers := []*cluster.Follower{f.lock, f.ipam} // which gives what its journal has
	if f.bgp != nil {
		readers = append(readers, f.bgp) // which asks before it speaks by it
	}
	if p.MayFollowDisk() {
		readers = append(readers, f.policy)
		if f.pods != nil {
			readers = append(readers, f.pods) // whose labels those rules go by
		}
	}
	// After a boot the kernel has nothing that would be left as it is until the datastore
	// answers: what is on disk is more.
	if booted(d) {
		readers = append(readers, f.core)
	}
	c.Load(readers...)
	if f.policy.FromDisk() {
		p.FollowsDisk()
	}
}

// bootMark is the file that says in which boot of the host the daemon has run.
func bootMark(runDir string) string { return filepath.Join(runDir, "booted") }

// booted reports whether this is the daemon's first start since the host booted.
func booted(d daemon) bool {
	boot, err := bootid.Read()
	if err != nil {
		d.log.Warn("it is not known whether the host has booted; the kernel is left as it is until the datastore answers", "error", err)
		return false
	}
	if mark, err := os.ReadFile(bootMark(d.RunDir)); err == nil && string(mark) == boot {
		return false
	}
	if err := atomicfile.Write(bootMark(d.RunDir), []byte(boot), 0o600); err != nil {
		d.log.Warn("that the daemon has started since the host booted is not noted", "error", err)
	}
	return true
}

// followPolicy follows what policy is about: api says that the datastore has Services, which rules name.
func followPolicy(c *cluster.Cluster, api bool) *cluster.Follower {
	kinds, waived := policy.Kinds(), []store.Kind{store.KindKubeControllersConfiguration}
	if api {
		kinds, waived = append(kinds, policy.ServiceKinds()...), append(waived, policy.ServiceKinds()...)
	}
	return c.Follow(kinds...).Waive(waived...)
}

// each has a part apply what a follower brings.
func each(f *cluster.Follower, apply func(cluster.Step)) func(context.Context) error {
	return func(ctx context.Context) error {
		for s := range f.Steps(ctx) {
			apply(s)
		}
		return ctx.Err()
	}
}
