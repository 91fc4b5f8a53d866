// Package netpolicy is network policy on this host as a part of the daemon: it opens what
// the kernel offers for it, runs what enforces it and translates addresses, and says
// whether that is as the datastore has it.
package netpolicy

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
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
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/conntrack"
	"github.com/routerd/routerd/dataplane/nft"
	"github.com/routerd/routerd/store"
)

// Config is what a [Policy] needs.
type Config struct {
	Enabled bool
	Offload bool   // established flows go through a flowtable
	LogRate uint32 // of packets that rules log, per second

	// Enforce says what is enforced beside the datastore's policy; its tables, Log and Heard
	// are filled in.
	Enforce enforce.Config
	// DeleteTable deletes a table of nftables, or only looks whether there is one.
	DeleteTable func(name string, look bool) (found bool, err error)
	Disk        Disk
	Store       store.Store
	RunDir      string
	Log         *slog.Logger // of the daemon as a whole
}

// Disk is the copy of the cluster that outlives the boot, as *[cluster.Cluster] is.
type Disk interface {
	Save() error
	SaveErr() error
}

// Policy is network policy on this host. Where it is switched off, or where this kernel
// cannot do it, there is no Enforcer.
type Policy struct {
	cfg  Config
	log  *slog.Logger
	mark enforce.Mark

	Enforcer    *enforce.Enforcer
	Table       *nft.Table
	Connections *conntrack.Table
	Flows       *flows.Log // nil: switched off

	offload    *nft.Offload // nil: switched off
	unable     error
	unrepaired atomic.Pointer[error] // why another's change of the table stands; nil: none does
}

// MarkFile is the file of [enforce.Mark] in a run directory.
func MarkFile(runDir string) string { return filepath.Join(runDir, "policy.remembered") }

// Open makes what enforces policy. A kernel that cannot do it is no reason to end: the host
// says so and attaches nothing ([Policy.Unable]). What is in the kernel stays as it is
// until the rules are computed, unless policy is switched off.
func Open(c Config) (*Policy, error) {
	log := c.Log.With("component", "policy")
	p := &Policy{cfg: c, log: log, mark: enforce.Mark{File: MarkFile(c.RunDir), Log: log}}
	if !c.Enabled || !c.Offload {
		if _, err := c.DeleteTable(nft.OffloadTable, false); err != nil {
			return p, fmt.Errorf("flows are not to be offloaded: %w", err)
		}
	}
	if !c.Enabled {
		found, err := c.DeleteTable(nft.TableName, false)
		if err != nil {
			return p, fmt.Errorf("policy.enabled is false: %w", err)
		}
		if found {
			c.Log.Warn("network policy is switched off; its nftables table was removed", "table", nft.TableName)
		}
		p.mark.Clear()
		return p, nil
	}
	p.Flows = flows.Open(log)
	if err := p.openKernel(); err != nil {
		p.unable = fmt.Errorf("this kernel cannot enforce network policy: %w; load the modules nf_tables and nf_conntrack, or set policy.enabled: false", err)
		log.Error("network policy is not enforced, and no workload is attached", "error", p.unable)
		p.mark.Clear()
		return p, nil
	}
	ec := c.Enforce
	ec.Table, ec.Connections, ec.Log, ec.Heard = p.Table, p.Connections, log, p.mark.Clear
	if p.offload != nil {
		ec.Offload = p.offload
	}
	p.Enforcer = enforce.New(ec)
	return p, nil
}

func (p *Policy) openKernel() (err error) {
	verdicts, logged := p.Flows.Groups()
	p.Table, err = nft.Open(nft.Config{Log: p.log, LogGroup: logged, FlowGroup: verdicts, LogRate: p.cfg.LogRate, OnRepair: p.repaired})
	if err == nil {
		p.Connections, err = conntrack.Open()
	}
	if err == nil && p.cfg.Offload {
		p.offload, err = nft.OpenOffload()
	}
	return err
}

// repaired notes what became of another's change of the table.
func (p *Policy) repaired(r nft.Repair) {
	if r.Err == nil {
		p.unrepaired.Store(nil)
		return
	}
	p.unrepaired.Store(&r.Err)
}

// Unable says why this kernel cannot enforce policy; nil: it can, or policy is switched off.
func (p *Policy) Unable() error { return p.unable }

// Run enforces policy until ctx ends. restored is closed when the workloads of the previous
// run are known: the first rules would take away those of workloads that the datastore does
// not know yet. caughtUp returns when all is applied that the datastore said by then.
func (p *Policy) Run(ctx context.Context, restored <-chan struct{}, caughtUp func(context.Context) error) error {
	if p.Enforcer == nil {
		<-ctx.Done()
		return ctx.Err()
	}
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return p.Table.Run(ctx) })
	g.Go(func() error {
		select {
		case <-restored:
		case <-ctx.Done():
			return ctx.Err()
		}
		if err := caughtUp(ctx); err != nil {
			return err
		}
		err := p.Enforcer.Run(ctx)
		if p.cfg.Disk.Save() == nil { // it is asked last: the kernel gets no more rules
			p.mark.Set()
		}
		return err
	})
	g.Go(func() error { p.ownFelix(ctx); return nil })
	g.Go(func() error { p.Flows.Run(ctx); return nil })
	return g.Wait()
}

// ownFelix makes this host's FelixConfiguration if there is none, as calico/node does with
// etcd: workloads reach their own host.
func (p *Policy) ownFelix(ctx context.Context) {
	f := v3.NewFelixConfiguration()
	f.Name = "node." + p.cfg.Enforce.Node
	f.Spec.DefaultEndpointToHostAction = "Return"
	// Its error is that ctx has ended.
	_ = async.Retry(ctx, async.Backoff{Min: 100 * time.Millisecond, Max: 10 * time.Second}, func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		_, err := store.Create(ctx, p.cfg.Store, f)
		switch {
		case errors.Is(err, store.ErrExists):
			return nil
		case errors.Is(err, store.ErrInvalid):
			p.cfg.Log.Error("this host's FelixConfiguration cannot be made", "name", f.Name, "error", err)
			return nil
		}
		return err
	})
}

// Rules returns what ADD waits for; nil: nothing.
func (p *Policy) Rules() func(context.Context, string, []netip.Addr) error {
	if p.Enforcer == nil {
		return nil
	}
	return p.Enforcer.Wait
}

// Sources returns what is to know from where packets of a node come; nil: nothing is.
func (p *Policy) Sources() func(node string, addrs []netip.Addr) {
	if p.Enforcer == nil {
		return nil
	}
	return p.Enforcer.SetSources
}

// HandleStore applies a step of the cluster's copy.
func (p *Policy) HandleStore(s cluster.Step) {
	if p.Enforcer != nil {
		p.Enforcer.HandleStore(s)
	}
}

// HandleUnderlay applies this host's addresses.
func (p *Policy) HandleUnderlay(u dataplane.Underlay) {
	if p.Enforcer != nil {
		p.Enforcer.HandleUnderlay(u)
	}
}

// MayFollowDisk reports whether the rules may follow the state on disk: where the kernel
// has none of ours, as after a boot, or none that are newer.
func (p *Policy) MayFollowDisk() bool {
	return p.Enforcer != nil && p.mark.Allows(func() (bool, error) { return p.cfg.DeleteTable(nft.TableName, true) })
}

// FollowsDisk notes that the rules are to be those of the state on disk.
func (p *Policy) FollowsDisk() { p.mark.Set() }

// Waiting says what keeps workloads from having rules.
func (p *Policy) Waiting() error {
	switch {
	case p.unable != nil:
		return p.unable
	case p.Enforcer == nil:
		return nil
	}
	s := p.Enforcer.Status()
	switch {
	case s.InForce:
		return nil
	case s.Err != nil:
		return s.Err
	}
	return errRulesToCome
}

// Err says why policy is not enforced as the datastore has it.
func (p *Policy) Err() error {
	switch {
	case p.unable != nil:
		return p.unable
	case p.Enforcer == nil:
		return nil
	}
	// The table itself is not asked: it answers after what it is doing, and a kernel that
	// loads modules takes its time.
	var unrepaired error
	if err := p.unrepaired.Load(); err != nil {
		unrepaired = *err
	}
	return condition(p.Enforcer.Status(), unrepaired, p.cfg.Disk.SaveErr())
}

// errRulesToCome says that no rules were written since the daemon started.
var errRulesToCome = errors.New("waiting for the policy rules to be in the kernel")

// heldLong is for how long rules may wait for the workloads of other hosts before that is worth a
// condition: they are asked for when the first policy comes that selects.
const heldLong = 10 * time.Second

// condition says first what concerns packets most.
func condition(s enforce.Status, unrepaired, unsaved error) error {
	switch {
	case unrepaired != nil:
		return fmt.Errorf("another program changed the nftables table, and it could not be put right: %w", unrepaired)
	case s.Err != nil:
		return s.Err
	case !s.InForce:
		return errRulesToCome
	case s.FromDisk:
		return errors.New("the datastore has not been read since the start: the rules are by what was known before")
	case s.Held > heldLong:
		return fmt.Errorf("rules of policies that select by labels are those from before since %v: the datastore has not told of all workloads of other hosts", s.Held.Round(time.Second))
	case s.CutErr != nil:
		return fmt.Errorf("connections that the rules deny were not all cut: %w", s.CutErr)
	case unsaved != nil:
		return fmt.Errorf("policy is enforced but not kept on disk: after a reboot without the datastore no workload is attached: %w", unsaved)
	case len(s.Problems) > 0:
		return fmt.Errorf("%d objects of policy cannot be used as they are, the first is %s: %s; see routerctl policy show", len(s.Problems), s.Problems[0].Key, s.Problems[0].Reason)
	}
	return nil
}

// Problems says why objects of policy are not carried out as they stand; false: not all are known.
func (p *Policy) Problems() (map[store.Key]string, bool) {
	if p.Enforcer == nil {
		return nil, false
	}
	s := p.Enforcer.Status()
	problems := make(map[store.Key]string, len(s.Problems))
	for _, is := range s.Problems {
		if before, twice := problems[is.Key]; twice {
			is.Reason = before + "; " + is.Reason
		}
		problems[is.Key] = is.Reason
	}
	return problems, s.InForce && !s.FromDisk
}

// Close lets go of the sockets; the rules stay in force.
func (p *Policy) Close() error {
	if p == nil {
		return nil
	}
	var errs []error
	if p.Table != nil {
		// Its Run closes it too, where it got that far.
		if err := p.Table.Close(); !errors.Is(err, os.ErrClosed) {
			errs = append(errs, err)
		}
	}
	if p.Flows != nil {
		errs = append(errs, p.Flows.Close())
	}
	if p.Connections != nil {
		errs = append(errs, p.Connections.Close())
	}
	if p.offload != nil {
		errs = append(errs, p.offload.Close())
	}
	return errors.Join(errs...)
}
