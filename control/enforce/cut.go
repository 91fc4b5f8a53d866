package enforce

import (
	"context"
	"errors"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/dataplane/conntrack"
	"github.com/routerd/routerd/dataplane/filter"
)

// touched returns the interfaces whose packets a step may have judged
// otherwise: r is what was before it.
func touched(r *filter.Ruleset, d *filter.Delta) map[string]bool {
	names := make(map[string]bool)
	if d.Settings != nil {
		for name := range r.Endpoints {
			names[name] = true
		}
	}
	for _, e := range d.PutEndpoints {
		names[e.Interface] = true
	}
	sets := make(map[filter.SetID]bool, len(d.Members))
	for _, c := range d.Members {
		sets[c.Set] = true
	}
	policies := make(map[filter.PolicyID]bool)
	for _, p := range d.PutPolicies {
		policies[p.ID] = true
	}
	if len(sets) > 0 {
		for id, p := range r.Policies {
			if refersTo(p, sets) {
				policies[id] = true
			}
		}
	}
	if len(policies) == 0 {
		return names
	}
	for name, e := range r.Endpoints {
		if !names[name] && e.NamesAny(policies) {
			names[name] = true
		}
	}
	return names
}

// left returns the addresses of workloads that a step removes or that it may
// take addresses from: r is what was before it. What a workload may only pretend
// is another program's and stays so.
func left(r *filter.Ruleset, d *filter.Delta) []netip.Addr {
	var list []netip.Addr
	add := func(name string) {
		e := r.Endpoints[name] // of a new one nothing
		for _, p := range e.Sources[:e.Own] {
			if p.IsSingleIP() {
				list = append(list, p.Addr())
			}
		}
	}
	for _, name := range d.DelEndpoints {
		add(name)
	}
	for _, e := range d.PutEndpoints {
		add(e.Interface)
	}
	return list
}

// refersTo reports whether a rule of the policy names one of the sets.
func refersTo(p filter.Policy, sets map[filter.SetID]bool) bool {
	for _, rules := range [][]filter.Rule{p.Ingress, p.Egress} {
		for i := range rules {
			for _, id := range rules[i].Sets() {
				if sets[id] {
					return true
				}
			}
		}
	}
	return false
}

// restFor is the pause after a look at the table of connections, in times of
// what the look took: it grows with the table and not with what changes. One
// that takes no longer than a 25th of [Config.CutPause] so takes less than a
// twentieth of a processor while containers come one after the other.
const restFor = 24

// lookLater is how long the table of connections is left alone after a change,
// as part of [Config.CutPause]: a look is work of the kernel that nothing
// interrupts, and whoever made the change, such as an ADD, waits for others than
// the connections that were there before.
const lookLater = 5

// cutLoop looks at the table of connections after changes.
func (e *Enforcer) cutLoop(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-e.cut:
		}
		if async.Sleep(ctx, e.cfg.CutPause/lookLater) != nil {
			return
		}
		start := time.Now()
		rest := e.cfg.CutPause
		if e.cutOnce(ctx) == nil {
			rest = min(restFor*time.Since(start), rest)
		}
		if async.Sleep(ctx, rest) != nil {
			return
		}
	}
}

// cutOnce cuts the connections of changed endpoints that the rules deny now,
// and renews those that were cut and are allowed again. Those of workloads that
// are no more are cut whatever the rules say, where no caller waits for it: who is
// given such an address later would else receive what the former one was allowed.
func (e *Enforcer) cutOnce(ctx context.Context) error {
	e.mu.Lock()
	changed, gone, own, owed := e.changed, e.gone, e.own, e.owed
	e.changed, e.gone = make(map[string]bool), make(map[netip.Addr]bool)
	e.mu.Unlock()
	if len(changed)+len(gone) == 0 && !owed {
		return nil
	}
	j := e.judgeOf(changed, gone, own)
	cut, renewed, err := e.cfg.Connections.Judge(ctx, j.addresses(), j.verdict)
	if cut > 0 || owed {
		err = errors.Join(err, e.forget()) // the mark is for rules
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	e.note(func(s *Status) {
		if err != nil && s.CutErr == nil {
			e.log.Error("not all connections that the rules now deny were deleted; the next change of the rules tries again", "error", err)
		}
		s.Cut += uint64(cut)
		s.CutErr = err
	})
	if err != nil {
		e.mu.Lock()
		for name := range changed {
			e.changed[name] = true
		}
		maps.Copy(e.gone, gone)
		e.mu.Unlock()
		e.cut.Set()
	}
	if cut+renewed > 0 {
		e.log.Info("connections judged anew", "cut", cut, "allowed_again", renewed)
	}
	return err
}

// judge says what becomes of connections.
type judge struct {
	e       *Enforcer
	changed map[string]bool
	gone    map[netip.Addr]bool // no workload here has them any more
	own     map[netip.Addr]bool
	locals  map[netip.Addr]string // addresses of workloads here → interface
}

func (e *Enforcer) judgeOf(changed map[string]bool, gone, own map[netip.Addr]bool) *judge {
	j := &judge{e: e, changed: changed, gone: gone, own: own, locals: make(map[netip.Addr]string)}
	e.View(func(r *filter.Ruleset) {
		for name, ep := range r.Endpoints {
			if ep.Host {
				continue
			}
			for _, p := range ep.Sources {
				if p.IsSingleIP() {
					j.locals[p.Addr()] = name
				}
			}
		}
	})
	maps.DeleteFunc(gone, func(a netip.Addr, _ bool) bool { return own[a] || j.locals[a] != "" })
	return j
}

// addresses lists those of the changed workloads and those that no workload has
// any more: no other connections are to be looked at. That includes a workload's that has just come. Its address can have been another's,
// here or on another host, and a connection to that one would reach it unjudged.
func (j *judge) addresses() []netip.Addr {
	list := slices.AppendSeq(make([]netip.Addr, 0, len(j.gone)), maps.Keys(j.gone))
	for a, name := range j.locals {
		if j.changed[name] {
			list = append(list, a)
		}
	}
	return list
}

// verdict judges a connection as its first packet would be now. What no changed
// workload takes part in is left as it is. Host endpoints are left out: the table
// does not tell the interface that the packet came in by, and some of their rules
// are for the packet before its destination was translated.
func (j *judge) verdict(f conntrack.Flow) conntrack.Verdict {
	if j.gone[f.Orig.Src] || j.gone[f.Reply.Src] {
		return conntrack.Cut
	}
	// The forwarding hooks see a packet after the destination is translated and
	// before the source is.
	in, out := j.side(f.Orig.Src), j.side(f.Reply.Src)
	if !j.changed[in] && !j.changed[out] {
		return conntrack.Keep
	}
	allowed := true
	j.e.View(func(r *filter.Ruleset) {
		allowed = r.Judge(filter.Flow{In: in, Out: out, Packet: filter.Packet{
			Src: f.Orig.Src, Dst: f.Reply.Src, Protocol: f.Protocol, SrcPort: f.Orig.SrcPort, DstPort: f.Reply.SrcPort,
			ICMPType: f.ICMPType, ICMPCode: f.ICMPCode,
		}}).Allowed
	})
	if allowed {
		return conntrack.Renew
	}
	return conntrack.Cut
}

// side returns the interface that an address is behind; "" is the host itself,
// and [filter.Elsewhere] what is beyond.
func (j *judge) side(a netip.Addr) string {
	if name, ok := j.locals[a]; ok {
		return name
	}
	if j.own[a] {
		return ""
	}
	return filter.Elsewhere
}
