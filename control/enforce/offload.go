package enforce

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/filter"
)

// Offload takes established flows out of the way of rules; package dataplane/nft does.
type Offload interface {
	// Set says by which devices packets come that are looked up; none: no flow is
	// offloaded. Its error is [errors.ErrUnsupported] where the kernel cannot.
	Set([]filter.Device) error
	// Forget has all flows take the way of rules again.
	Forget() error
}

// offloadPause is the time between two changes of the devices whose flows are offloaded:
// flows of a workload that has just come take the way of rules meanwhile.
const offloadPause = 500 * time.Millisecond

// offloadLoop keeps up with devices and endpoints.
func (e *Enforcer) offloadLoop(ctx context.Context) {
	if e.cfg.Offload == nil {
		return
	}
	backoff := async.Backoff{Min: offloadPause, Max: maxRetry}
	tries := 0
	for {
		select {
		case <-ctx.Done():
			return
		case <-e.offload:
		}
		for {
			err := e.setOffload()
			if err == nil {
				break
			}
			if errors.Is(err, errors.ErrUnsupported) {
				e.log.Info("established flows are not offloaded", "reason", err)
				return
			}
			// The first time it may be a device that has just gone, of which a notice comes.
			if tries++; tries == 2 {
				e.log.Warn("established flows are not offloaded; will try again", "error", err)
			}
			if backoff.Wait(ctx) != nil {
				return
			}
		}
		tries = 0
		backoff.Reset()
		if async.Sleep(ctx, offloadPause) != nil {
			return
		}
	}
}

// setOffload brings the devices up to date.
func (e *Enforcer) setOffload() error {
	e.offloading.Lock()
	defer e.offloading.Unlock()
	e.mu.Lock()
	underlay := e.underlay
	e.mu.Unlock()
	var list []filter.Device
	e.View(func(r *filter.Ruleset) { list = offloadDevices(r, underlay) })
	return e.cfg.Offload.Set(list)
}

// recalls says which offloaded flows a step concerns, for rules about every packet do not
// see them: all, before it is in force, where it has a policy that comes before
// connection tracking, limits or a code point; and those that are to be judged by the sources of a workload from
// which it takes some. r is what was before the step.
func recalls(r *filter.Ruleset, d *filter.Delta) (hold, forget bool) {
	for i := range d.PutEndpoints {
		now := &d.PutEndpoints[i]
		hold = hold || everyPacket(now)
		forget = forget || slices.ContainsFunc(r.Endpoints[now.Interface].Sources, func(p netip.Prefix) bool { return !slices.Contains(now.Sources, p) })
	}
	return hold, forget
}

// hold takes the devices out by which no flow may be offloaded any more.
func (e *Enforcer) hold() error {
	if e.cfg.Offload == nil {
		return nil
	}
	if err := e.setOffload(); err != nil && !errors.Is(err, errors.ErrUnsupported) {
		return fmt.Errorf("remove offloaded flows: %w", err)
	}
	return nil
}

// forget has all flows take the way of rules again. What fails is owed to the next look
// at the connections.
func (e *Enforcer) forget() error {
	if e.cfg.Offload == nil {
		return nil
	}
	err := e.cfg.Offload.Forget()
	e.mu.Lock()
	e.owed = err != nil
	e.mu.Unlock()
	if err != nil {
		return fmt.Errorf("remove offloaded flows: %w", err)
	}
	return nil
}

// offloadKinds are the types of devices whose flows are offloaded, beside physical ones
// (IFLA_INFO_KIND): others may do more with a packet than to send it.
func offloadKinds() []string {
	return []string{"", "veth", "bond", "team", "vlan", "bridge", "macvlan", "vxlan", "ipip", "ip6tnl"}
}

// offloadDevices lists the devices by which packets of workloads' flows come: workloads'
// own, and those with an address or a route of this host's. Policies before connection
// tracking, limits and code points are about every packet, so where there is one, there are no devices.
func offloadDevices(r *filter.Ruleset, u dataplane.Underlay) []filter.Device {
	workloads := false
	for _, e := range r.Endpoints {
		if everyPacket(&e) {
			return nil
		}
		workloads = workloads || !e.Host
	}
	if !workloads {
		return nil
	}
	ways := make(map[string]bool)
	for _, a := range u.Addresses {
		if !a.LinkScope {
			ways[a.Link] = true
		}
	}
	for _, route := range u.Routes {
		if !route.Prefix.Addr().IsLinkLocalUnicast() && !route.Prefix.Addr().IsMulticast() {
			ways[route.Link] = true
		}
	}
	var list []filter.Device
	for _, l := range u.Links {
		e, ok := r.Endpoints[l.Name]
		workload := ok && !e.Host
		if !l.Loopback && slices.Contains(offloadKinds(), l.Type) && (workload || ways[l.Name]) {
			list = append(list, filter.Device{Name: l.Name, Index: l.Index, Workload: workload})
		}
	}
	return list
}

// everyPacket reports whether an endpoint has policies that come before connection
// tracking, limits or a code point: these are about every packet.
func everyPacket(e *filter.Endpoint) bool {
	return len(e.UntrackedIngress.Tiers)+len(e.UntrackedEgress.Tiers) > 0 || e.Limits != (filter.Limits{}) || e.DSCP.Set
}
