package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	"golang.org/x/sync/errgroup"

	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/control/enforce"
	"github.com/routerd/routerd/control/flows"
	"github.com/routerd/routerd/control/operator"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/conntrack"
	"github.com/routerd/routerd/dataplane/nft"
	"github.com/routerd/routerd/store"
)

// policies is what enforces network policy and translates addresses.
type policies struct {
	table       *nft.Table
	connections *conntrack.Table
	offload     *nft.Offload // nil: it is switched off
	enforcer    *enforce.Enforcer
	flows       *flows.Log
	unrepaired  atomic.Pointer[error] // why another's change of the table stands; nil: none does
}

// newPolicy makes what enforces policy. A kernel that cannot do it is no reason
// to end: the host says so and attaches nothing. What is there stays as it is
// until the rules are computed.
func (d *router) newPolicy() error {
	if !d.cfg.Policy.Enabled || !d.cfg.Policy.Offload {
		if _, err := d.kernel.DeleteTable(nft.OffloadTable, false); err != nil {
			return fmt.Errorf("flows are not to be offloaded: %w", err)
		}
	}
	if !d.cfg.Policy.Enabled {
		found, err := d.kernel.DeleteTable(nft.TableName, false)
		if err != nil {
			return fmt.Errorf("policy.enabled is false: %w", err)
		}
		if found {
			d.log.Warn("network policy is switched off; its nftables table was removed", "table", nft.TableName)
		}
		d.mark.Clear()
		return nil
	}
	log := d.log.With("component", "policy")
	p := &policies{flows: flows.Open(log)}
	d.policy = p
	var err error
	verdicts, logged := p.flows.Groups()
	p.table, err = nft.Open(nft.Config{Log: log, LogGroup: logged, FlowGroup: verdicts, LogRate: uint32(d.cfg.Policy.LogRate), OnRepair: p.repaired}) //nolint:gosec // checked by its validation
	if err == nil {
		p.connections, err = conntrack.Open()
	}
	if err == nil && d.cfg.Policy.Offload {
		p.offload, err = nft.OpenOffload()
	}
	if err != nil {
		d.noPolicy = fmt.Errorf("this kernel cannot enforce network policy: %w; load the modules nf_tables and nf_conntrack, or set policy.enabled: false", err)
		log.Error("network policy is not enforced, and no workload is attached", "error", d.noPolicy)
		d.mark.Clear()
		return nil
	}
	var offload enforce.Offload
	if p.offload != nil {
		offload = p.offload
	}
	p.enforcer = enforce.New(enforce.Config{
		Node: d.name, AutoHostEndpoint: d.cfg.Policy.AutoHostEndpoints, HostPorts: hostPorts(d.cfg), Guarded: guardedPorts(d.cfg), Datastore: datastorePorts(d.servers),
		Table: p.table, Connections: p.connections, Offload: offload, Tracer: d.tracer, Log: log,
		TunnelsFromAnywhere: d.cfg.Policy.AllowTunnelsFromAnywhere,
		MaxConnections:      uint32(d.cfg.Policy.MaxConnectionsPerWorkload), //nolint:gosec // checked by its validation
		Heard:               d.mark.Clear,
	})
	return nil
}

// runPolicy runs what enforces policy.
func (d *router) runPolicy(ctx context.Context) error {
	if d.policy == nil || d.policy.enforcer == nil {
		<-ctx.Done()
		return ctx.Err()
	}
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return d.policy.table.Run(ctx) })
	g.Go(func() error {
		// Workloads that the datastore does not know yet are announced by then:
		// the first rules would take theirs away.
		select {
		case <-d.restored:
		case <-ctx.Done():
			return ctx.Err()
		}
		if err := d.follow.policy.CatchUp(ctx); err != nil {
			return err
		}
		err := d.policy.enforcer.Run(ctx)
		if d.cluster.Save() == nil { // it is asked last: the kernel gets no more rules
			d.mark.Set()
		}
		return err
	})
	g.Go(func() error { d.ownFelix(ctx); return nil })
	g.Go(func() error { d.policy.flows.Run(ctx); return nil })
	return g.Wait()
}

// awaitRules returns what ADD waits for.
func (d *router) awaitRules() func(context.Context, string, []netip.Addr) error {
	if d.policy == nil || d.policy.enforcer == nil {
		return nil
	}
	return d.policy.enforcer.Wait
}

// handleStore applies a step of the cluster's copy.
func (p *policies) handleStore(s cluster.Step) {
	if p != nil && p.enforcer != nil {
		p.enforcer.HandleStore(s)
	}
}

// handleUnderlay applies this host's addresses.
func (p *policies) handleUnderlay(u dataplane.Underlay) {
	if p != nil && p.enforcer != nil {
		p.enforcer.HandleUnderlay(u)
	}
}

// close lets go of the sockets; the rules stay in force.
func (p *policies) close() error {
	if p == nil {
		return nil
	}
	var errs []error
	if p.table != nil {
		// Its Run closes it too, where it got that far.
		if err := p.table.Close(); !errors.Is(err, os.ErrClosed) {
			errs = append(errs, err)
		}
	}
	errs = append(errs, p.flows.Close())
	if p.connections != nil {
		errs = append(errs, p.connections.Close())
	}
	if p.offload != nil {
		errs = append(errs, p.offload.Close())
	}
	return errors.Join(errs...)
}

// ownFelix makes this host's FelixConfiguration if there is none, as
// calico/node does with etcd: workloads reach their own host.
func (d *router) ownFelix(ctx context.Context) {
	f := v3.NewFelixConfiguration()
	f.Name = "node." + d.name
	f.Spec.DefaultEndpointToHostAction = "Return"
	// Its error is that ctx has ended.
	_ = async.Retry(ctx, firstWrites(), func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		_, err := store.Create(ctx, d.db, f)
		switch {
		case errors.Is(err, store.ErrExists):
			return nil
		case errors.Is(err, store.ErrInvalid):
			d.log.Error("this host's FelixConfiguration cannot be made", "name", f.Name, "error", err)
			return nil
		}
		return err
	})
}

// errRulesToCome says that no rules were written since the daemon started.
var errRulesToCome = errors.New("waiting for the policy rules to be in the kernel")

// policyWaiting says what keeps workloads from having rules.
func (d *router) policyWaiting() error {
	switch {
	case d.policy == nil:
		return nil
	case d.noPolicy != nil:
		return d.noPolicy
	}
	if s := d.policy.enforcer.Status(); !s.InForce {
		if s.Err != nil {
			return s.Err
		}
		return errRulesToCome
	}
	return nil
}

// policyError says why policy is not enforced as the datastore has it.
func (d *router) policyError() error {
	if d.policy == nil {
		return nil // switched off
	}
	if d.noPolicy != nil {
		return d.noPolicy
	}
	// The table itself is not asked: it answers after what it is doing, and a
	// kernel that loads modules takes its time.
	s := d.policy.enforcer.Status()
	switch unrepaired := d.policy.unrepaired.Load(); {
	case unrepaired != nil:
		return fmt.Errorf("another program changed the nftables table, and it could not be put right: %w", *unrepaired)
	case s.Err != nil:
		return s.Err
	case !s.InForce:
		return errRulesToCome
	case s.FromDisk:
		return errors.New("the datastore has not been read since the start: the rules are by what was known before")
	case s.CutErr != nil:
		return fmt.Errorf("connections that the rules deny were not all cut: %w", s.CutErr)
	case d.cluster.SaveErr() != nil:
		return fmt.Errorf("policy is enforced but not kept on disk: after a reboot without the datastore no workload is attached: %w", d.cluster.SaveErr())
	case len(s.Problems) > 0:
		return fmt.Errorf("%d objects of policy cannot be used as they are, the first is %s: %s; see routerctl policy show", len(s.Problems), s.Problems[0].Key, s.Problems[0].Reason)
	}
	return nil
}

// repaired takes note of what became of another's change of the table.
func (p *policies) repaired(r nft.Repair) {
	if r.Err == nil {
		p.unrepaired.Store(nil)
		return
	}
	p.unrepaired.Store(&r.Err)
}

// policyServer returns what answers an operator about policy; nil: it is switched
// off.
func (d *router) policyServer() *operator.PolicyServer {
	p := d.policy
	if p == nil {
		return nil
	}
	return operator.NewPolicyServer(operator.PolicyConfig{
		Node: d.name, AutoHostEndpoints: d.cfg.Policy.AutoHostEndpoints, Store: d.db, Workloads: d.attach.Endpoints,
		Unable: d.noPolicy, Flows: p.flows, Enforcer: p.enforcer, Table: p.table, Connections: p.connections, State: d.policyError,
	})
}

// policyMark is the file of [enforce.Mark].
func policyMark(runDir string) string { return filepath.Join(runDir, "policy.remembered") }

// loadsPolicy reports whether the rules may follow the state on disk: where the kernel has
// none of ours, as after a boot, or none that are newer.
func (d *router) loadsPolicy() bool {
	return d.policy != nil && d.noPolicy == nil && d.mark.Allows(func() (bool, error) { return d.kernel.DeleteTable(nft.TableName, true) })
}
