package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"sync/atomic"
	"time"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	"golang.org/x/sync/errgroup"

	"github.com/routerd/routerd/control/enforce"
	"github.com/routerd/routerd/control/journal"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/conntrack"
	"github.com/routerd/routerd/dataplane/filter"
	"github.com/routerd/routerd/dataplane/nflog"
	"github.com/routerd/routerd/dataplane/nft"
	"github.com/routerd/routerd/store"
)

// The groups of nfnetlink_log that rules write to, out of the range that others
// take by habit (ulogd 0 and 1, Calico 1 to 4).
const (
	flowGroup uint16 = 7747
	logGroup  uint16 = 7748
)

// policies is what enforces network policy and translates addresses.
type policies struct {
	table        *nft.Table
	connections  *conntrack.Table
	enforcer     *enforce.Enforcer
	flows        *flows
	listener     *nflog.Listener       // nil: there is nothing to listen to
	memory       *journal.Journal      // nil: nothing is remembered
	unremembered error                 // why, in that case
	unrepaired   atomic.Pointer[error] // why another's change of the table stands; nil: none does
}

// newPolicy makes what enforces policy. A kernel that cannot do it is no reason
// to end: the host says so and attaches nothing. What is there stays as it is
// until the rules are computed.
func (d *router) newPolicy() error {
	if !d.cfg.Policy.Enabled {
		found, err := d.kernel.DeleteTable(nft.TableName, false)
		if err != nil {
			return fmt.Errorf("policy.enabled is false: %w", err)
		}
		if found {
			d.log.Warn("network policy is switched off; its nftables table was removed", "table", nft.TableName)
		}
		return forgetPolicy(d.cfg) // it would be old when policy is switched on
	}
	log := d.log.With("component", "policy")
	p := &policies{flows: newFlows()}
	d.policy = p
	var err error
	verdicts, logged := flowGroup, logGroup
	if p.listener, err = nflog.Open(flowGroup, logGroup); err != nil {
		// A rule that logs to a group that the kernel does not have is refused,
		// and with it all others.
		verdicts, logged = 0, 0
		p.flows.fail(err)
		log.Warn("verdicts cannot be listened to; routerctl flows shows none", "error", err)
	}
	p.table, err = nft.Open(nft.Config{Log: log, LogGroup: logged, FlowGroup: verdicts, LogRate: uint32(d.cfg.Policy.LogRate), OnRepair: p.repaired}) //nolint:gosec // checked by its validation
	if err == nil {
		p.connections, err = conntrack.Open()
	}
	if err != nil {
		d.noPolicy = fmt.Errorf("this kernel cannot enforce network policy: %w; load the modules nf_tables and nf_conntrack, or set policy.enabled: false", err)
		log.Error("network policy is not enforced, and no workload is attached", "error", d.noPolicy)
		return forgetPolicy(d.cfg) // it would be old when the kernel can
	}
	p.enforcer = enforce.New(enforce.Config{
		Node: d.name, AutoHostEndpoint: d.cfg.Policy.AutoHostEndpoints, HostPorts: hostPorts(d.cfg), Datastore: datastorePorts(d.cfg),
		Table: p.table, Connections: p.connections, Log: log,
		Memory: d.policyMemory(p), Recall: d.recallsPolicy(), Heard: d.policyHeard,
	})
	if p.enforcer.Status().Recalled {
		d.policyRemembered()
	}
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
		err := d.policy.enforcer.Run(ctx)
		if d.policy.enforcer.Remembered() {
			d.policyRemembered()
		}
		return err
	})
	g.Go(func() error { d.ownFelix(ctx); return nil })
	g.Go(func() error { d.listenFlows(ctx); return nil })
	return g.Wait()
}

// awaitRules returns what ADD waits for.
func (d *router) awaitRules() func(context.Context, string, []netip.Addr) error {
	if d.policy == nil || d.policy.enforcer == nil {
		return nil
	}
	return d.policy.enforcer.Wait
}

// announceEndpoint tells what enforces policy of an endpoint of this host, or of
// its end, before the datastore does.
func (d *router) announceEndpoint(ev store.Event) {
	if d.policy != nil && d.policy.enforcer != nil {
		d.policy.enforcer.Announce(ev)
	}
}

func (d *router) endpointWritten(key store.Key, rev store.Revision) {
	if d.policy != nil && d.policy.enforcer != nil {
		d.policy.enforcer.Written(key, rev)
	}
}

func (d *router) endpointEnded(key store.Key, told bool) {
	if d.policy != nil && d.policy.enforcer != nil {
		d.policy.enforcer.Ended(key, told)
	}
}

// handleStore takes in a step of the watch.
func (p *policies) handleStore(b store.Batch) {
	if p != nil && p.enforcer != nil {
		p.enforcer.HandleStore(b)
	}
}

// handleUnderlay takes in this host's addresses.
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
	if p.listener != nil {
		if err := p.listener.Close(); !errors.Is(err, os.ErrClosed) {
			errs = append(errs, err)
		}
	}
	if p.memory != nil {
		errs = append(errs, p.memory.Close())
	}
	if p.connections != nil {
		errs = append(errs, p.connections.Close())
	}
	return errors.Join(errs...)
}

// ownFelix makes this host's FelixConfiguration if there is none, as
// calico/node does with etcd: workloads reach their own host.
func (d *router) ownFelix(ctx context.Context) {
	f := v3.NewFelixConfiguration()
	f.Name = "node." + d.name
	f.Spec.DefaultEndpointToHostAction = "Return"
	for pause := 100 * time.Millisecond; ; pause = min(2*pause, 10*time.Second) {
		attempt, cancel := context.WithTimeout(ctx, 10*time.Second)
		_, err := store.Create(attempt, d.store, f)
		cancel()
		if err == nil || errors.Is(err, store.ErrExists) {
			return
		}
		if errors.Is(err, store.ErrInvalid) {
			d.log.Error("this host's FelixConfiguration cannot be made", "name", f.Name, "error", err)
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
	}
}

// errRulesToCome says that no rules were written in this life of the daemon.
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
	case s.Recalled:
		return errors.New("the datastore has not been read since the start: the rules are by what was known before")
	case s.CutErr != nil:
		return fmt.Errorf("connections that the rules deny were not all cut: %w", s.CutErr)
	case s.KeepErr != nil || d.policy.unremembered != nil:
		return fmt.Errorf("policy is enforced but cannot be remembered: after a reboot without the datastore no workload is attached: %w", cmp.Or(s.KeepErr, d.policy.unremembered))
	case len(s.Problems) > 0:
		return fmt.Errorf("%d objects of policy cannot be used as they are, the first is %s: %s; see routerctl policy show", len(s.Problems), s.Problems[0].Key, s.Problems[0].Reason)
	}
	return nil
}

// counters reads the kernel's counters.
func (p *policies) counters() (counts, error) {
	list, err := p.table.Counters()
	if err != nil {
		return nil, err
	}
	out := make(counts, len(list))
	for _, c := range list {
		if c.Reason == filter.ByRule {
			out[ruleID{c.Policy, c.Direction, c.Hook, c.Rule, c.Staged}] = c
		}
	}
	return out, nil
}

// repaired takes note of what became of another's change of the table.
func (p *policies) repaired(r nft.Repair) {
	if r.Err == nil {
		p.unrepaired.Store(nil)
		return
	}
	p.unrepaired.Store(&r.Err)
}

// listenFlows keeps what rules log. Where it ends, nothing else is the worse for
// it.
func (d *router) listenFlows(ctx context.Context) {
	l := d.policy.listener
	if l == nil {
		return
	}
	d.policy.flows.listen(l)
	if err := l.Run(ctx, mostFlows, d.policy.flows.add); ctx.Err() == nil {
		d.policy.flows.fail(err)
		d.log.Warn("verdicts are not listened to any more; routerctl flows shows older ones", "error", err)
	}
}
