package nft

import (
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/filter"
)

// stage is the way in which a chain's rules act, by where they stand.
type stage uint8

const (
	filterStage    stage = iota // accept or drop
	untrackedStage              // before connection tracking: accept also means not to track, and to mark
	preDNATStage                // before destination NAT: accept also means to mark
	stagedStage                 // count and log, decide nothing
	profileStage                // filterStage, where Pass goes on behind the chain
)

func (f stage) String() string {
	return [...]string{"f", "u", "d", "s", "p"}[f]
}

func (f stage) hook() filter.Hook {
	switch f {
	case untrackedStage:
		return filter.Untracked
	case preDNATStage:
		return filter.PreDNAT
	default:
		return filter.Normal
	}
}

// chainSource is what a shared chain is made from. Its name is a function of what
// it is about, not of what is in it: a changed policy changes its own chain and
// no other.
type chainSource interface {
	name() string
	comment() string
	// rules returns the chain's rules. It tells the writer what it looked at.
	rules(w *chainWriter)
}

// namedSource is a source with its name, which for most is a hash of what they are about.
type namedSource struct {
	chainSource
	id string
}

func named(s chainSource) namedSource { return namedSource{s, s.name()} }

func (s namedSource) name() string { return s.id }

// policySource is the rules of a policy in one direction.
type policySource struct {
	id    filter.PolicyID
	dir   filter.Direction
	stage stage
}

func short(d filter.Direction) string { return d.String()[:2] }

func (s policySource) name() string {
	kind := "policy"
	if s.stage == profileStage {
		kind = "profile"
	}
	return fmt.Sprintf("%s-%s%s-%s", kind, short(s.dir), s.stage, hashName(s.id.Kind+"\x00"+s.id.Namespace+"\x00"+s.id.Name))
}

func (s policySource) comment() string { return fmt.Sprintf("%s of %s", s.dir, s.id) }

func (s policySource) rules(w *chainWriter) { w.policy(s.id, s.dir, s.stage) }

// tierSource is a tier's policies in one direction.
type tierSource struct {
	tier  filter.Tier
	dir   filter.Direction
	stage stage
}

func (s tierSource) content() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%q %d %d", s.tier.Name, s.tier.End, s.stage)
	for _, p := range s.tier.Policies {
		fmt.Fprintf(&b, " %q %q %q %t", p.ID.Kind, p.ID.Namespace, p.ID.Name, p.Staged)
	}
	return b.String()
}

func (s tierSource) name() string {
	return fmt.Sprintf("tier-%s%s-%s", short(s.dir), s.stage, hashName(s.content()))
}

func (s tierSource) comment() string { return fmt.Sprintf("%s of tier %s", s.dir, s.tier.Name) }

// passes reports whether a policy of the tier has a rule that leaves it.
func (s tierSource) passes(w *chainWriter) bool {
	return slices.ContainsFunc(s.tier.Policies, func(ref filter.PolicyRef) bool {
		return !ref.Staged && w.passes(ref.ID, s.dir)
	})
}

// A policy that passes is written into the tier's own chain, where returning
// leaves the tier; others are jumped to. Where none passes, these are the path's rules.
func (s tierSource) rules(w *chainWriter) {
	for _, ref := range s.tier.Policies {
		f := s.stage
		if ref.Staged {
			f = stagedStage
		}
		switch {
		case len(w.read(ref.ID).Rules(s.dir)) == 0:
		case f != stagedStage && w.passes(ref.ID, s.dir):
			w.policy(ref.ID, s.dir, f)
		default:
			w.jump(policySource{ref.ID, s.dir, f})
		}
	}
	c := Counter{Direction: s.dir, Hook: s.stage.hook(), Rule: filter.NoRule, Action: s.tier.End, Tier: s.tier.Name, Reason: filter.ByTierEnd}
	if s.tier.Enforced() && s.tier.End != filter.Pass {
		w.act(new(matcher), c, s.stage)
	}
}

// pathSource is a path of an endpoint.
type pathSource struct {
	path  filter.Path
	dir   filter.Direction
	stage stage
	kind  pathKind
}

type pathKind uint8

const (
	workloadPath pathKind = iota
	hostPath              // with failsafe ports
	forwardPath
)

func (s pathSource) content() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d %d %d", s.path.Default, s.stage, s.kind)
	for _, t := range s.path.Tiers {
		b.WriteString(" " + tierSource{t, s.dir, s.stage}.content())
	}
	for _, id := range s.path.Profiles {
		fmt.Fprintf(&b, " %q", id.Name)
	}
	return b.String()
}

func (s pathSource) name() string {
	kind := [...]string{"workload", "host", "forward"}[s.kind]
	return fmt.Sprintf("%s-%s%s-%s", kind, short(s.dir), s.stage, hashName(s.content()))
}

func (s pathSource) comment() string { return "" }

func (s pathSource) rules(w *chainWriter) {
	w.preamble(s)
	for _, t := range s.path.Tiers {
		tier := tierSource{t, s.dir, s.stage}
		switch {
		case len(t.Policies) == 0:
		case tier.passes(w):
			w.jump(tier)
		default:
			tier.rules(w) // a chain less for each packet to enter, and for the kernel to validate
		}
	}
	for _, id := range s.path.Profiles {
		if len(w.read(id).Rules(s.dir)) > 0 {
			w.jump(policySource{id, s.dir, profileStage})
		}
	}
	if s.path.Default != filter.Pass {
		c := Counter{Direction: s.dir, Hook: s.stage.hook(), Rule: filter.NoRule, Action: s.path.Default, Reason: filter.ByPathEnd}
		w.act(new(matcher), c, s.stage)
	}
}

// idle reports whether a path leaves everything to what comes after it.
func (s pathSource) idle() bool {
	return len(s.path.Tiers) == 0 && len(s.path.Profiles) == 0 && s.path.Default != filter.Deny
}

// chainWriter writes one chain.
type chainWriter struct {
	w        *desired
	out      []rule
	jumps    []chainSource
	literals []string
	reads    []filter.PolicyID
	uses     []filter.SetID
}

// setOf is of names.
func (c *chainWriter) setOf(id filter.SetID, f dataplane.Family) (string, filter.SetType) {
	if !slices.Contains(c.uses, id) {
		c.uses = append(c.uses, id)
	}
	return c.w.setName(id, f), c.w.kindOf(id)
}

// literal is of names.
func (c *chainWriter) literal(prefix string, s *set) string {
	name := literalName(prefix, s)
	if !slices.Contains(c.literals, name) {
		c.literals = append(c.literals, name)
		c.w.acquireLiteral(name, s)
	}
	return name
}

func (c *chainWriter) add(m *matcher, n Counter) { c.put(m, n, logsAll) }

func (c *chainWriter) put(m *matcher, n Counter, l logging) {
	r := newRule(m.B, n)
	r.logging = l
	c.out = append(c.out, r)
}

func (c *chainWriter) jump(s chainSource) {
	to := named(s)
	c.jumps = append(c.jumps, to)
	m := new(matcher)
	m.do(unix.NFT_JUMP, to.id)
	c.add(m, Counter{})
}

// read returns a policy, and has the chain written anew when it changes.
func (c *chainWriter) read(id filter.PolicyID) filter.Policy {
	if !slices.Contains(c.reads, id) {
		c.reads = append(c.reads, id)
	}
	return c.w.policies[id]
}

func (c *chainWriter) passes(id filter.PolicyID, d filter.Direction) bool {
	return slices.ContainsFunc(c.read(id).Rules(d), func(r filter.Rule) bool { return r.Action == filter.Pass })
}

// policy writes the rules of a policy.
func (c *chainWriter) policy(id filter.PolicyID, d filter.Direction, f stage) {
	for i, r := range c.read(id).Rules(d) {
		n := Counter{Policy: id, Direction: d, Hook: f.hook(), Rule: i, Staged: f == stagedStage, Action: r.Action, Reason: filter.ByRule}
		for _, m := range alternatives(&r, c) {
			c.act(m, n, f)
		}
	}
}

// act ends a rule: counts, logs, and does what the action is in this form. What
// is beyond the bound of the log has a rule of its own before, which does the
// same in silence.
func (c *chainWriter) act(m *matcher, n Counter, f stage) {
	rate := c.w.cfg.LogRate
	if n.Action == filter.Log {
		m.counter()
		logs := logsAll
		if f != stagedStage {
			if rate != 0 {
				m.rate(rate, false)
				m.counter()
				logs = logsSome
			}
			m.log(c.w.settings.LogPrefix+": ", c.w.cfg.LogGroup)
		}
		c.put(m, n, logs)
		return
	}
	group := c.w.cfg.FlowGroup
	if group != 0 && rate != 0 && meetsEvery(n.Action, f) {
		silent := m.clone()
		silent.rate(rate, true)
		silent.counter()
		c.end(silent, n.Action, f)
		c.put(silent, n, logsNone)
	}
	m.counter()
	if group != 0 {
		m.log(n.logPrefix(), group)
	}
	c.end(m, n.Action, f)
	c.put(m, n, logsAll)
}

// meetsEvery reports whether a rule can meet every packet of a flow: unless the
// flow is tracked and allowed, each of its packets is a first one.
func meetsEvery(a filter.Action, f stage) bool {
	return a != filter.Allow || f == untrackedStage || f == stagedStage
}

// end does what an action is in a form.
func (c *chainWriter) end(m *matcher, a filter.Action, f stage) {
	switch {
	case f == stagedStage, a == filter.Pass:
		m.do(unix.NFT_RETURN, "")
	case a == filter.Deny:
		m.deny(c.w.settings.Reject && f.hook() == filter.Normal)
	default:
		switch f {
		case untrackedStage:
			m.notrack()
			m.setMark(c.w.cfg.Mark, true)
		case preDNATStage:
			m.setMark(c.w.cfg.Mark, true)
		default:
		}
		m.do(nfAccept, "")
	}
}

// preamble writes what comes before the tiers.
func (c *chainWriter) preamble(s pathSource) {
	if s.kind == hostPath {
		c.jump(failsafeSource{s.dir, s.stage == untrackedStage})
	}
	if s.stage == filterStage && !c.w.settings.AllowInvalid {
		m := new(matcher)
		m.state(stateInvalid)
		// Connection tracking checks UDP-Lite's checksum as if it were UDP's and
		// finds every packet invalid (nf_conntrack_proto_udp.c), unless
		// net.netfilter.nf_conntrack_checksum is 0. Rules still judge it.
		m.protocol(unix.IPPROTO_UDPLITE, true)
		m.counter()
		m.do(nfDrop, "")
		c.add(m, Counter{Direction: s.dir, Rule: filter.NoRule, Reason: ByInvalid})
	}
	if s.kind != workloadPath || s.dir != filter.Egress {
		return
	}
	for _, t := range c.w.settings.WorkloadTunnel() {
		m := new(matcher)
		m.tunnel(t)
		m.counter()
		m.do(nfDrop, "")
		c.add(m, Counter{Direction: s.dir, Rule: filter.NoRule, Reason: filter.ByTunnel})
	}
	if c.w.members[filter.TunnelSources] == nil {
		return
	}
	// Decided here, on the workload's own host: elsewhere its packets may come with
	// this host's address.
	for _, t := range c.w.settings.Guarded {
		for _, f := range dataplane.Families() {
			m := new(matcher)
			m.family(f)
			m.tunnel(t)
			m.member(destination, filter.TunnelSources, false, f, c)
			m.counter()
			m.do(nfDrop, "")
			c.add(m, Counter{Direction: s.dir, Rule: filter.NoRule, Reason: filter.ByGuard})
		}
	}
}

// ByInvalid is the reason for what connection tracking finds invalid.
const ByInvalid filter.Reason = "invalid to connection tracking"

// tunnel matches packets of a tunnel, or for a port: the port first, as in
// [matcher.portFirst].
func (m *matcher) tunnel(t filter.Tunnel) {
	if t.Port != 0 {
		m.port(destination, filter.PortRange{Low: t.Port, High: t.Port}, false)
	}
	m.protocol(t.Protocol, false)
}
