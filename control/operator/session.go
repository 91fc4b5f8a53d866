package operator

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/filter"
	"github.com/routerd/routerd/dataplane/survey"
	"github.com/routerd/routerd/store"
)

// Session implements [rpc.Operator]. A connection to an address that this host does not have is
// another's, such as that of an operator whose lab this host is in.
func (s *Server) Session(ctx context.Context, events []store.Event, client, host netip.AddrPort) (string, error) {
	u, _ := s.cfg.Agent.Underlay()
	if !slices.ContainsFunc(u.Addresses, func(a dataplane.UnderlayAddress) bool { return a.Prefix.Addr() == host.Addr() }) {
		return "", nil
	}
	changes := s.decoded(events)
	if why := taken(changes, cidrs(s.view(ctx, s.sessions()).pools), client.Addr()); why != "" {
		return why, nil
	}
	if s.PolicyServer == nil || s.able() != nil {
		return "", nil // nothing is denied here
	}
	rules, step, err := s.foreseenRules(ctx, changes)
	if err != nil || rules == nil {
		return "", err
	}
	asker, err := survey.Open()
	if err != nil {
		return "", err
	}
	defer asker.Close()
	hop, err := asker.Ask(survey.Packet{To: client.Addr()}) // its packets come in by where those to it leave
	if err != nil {
		return "", fmt.Errorf("look up the device towards %s: %w", client.Addr(), err)
	}
	return denied(rules, &step, filter.Flow{In: hop.Device, Packet: filter.Packet{
		Src: client.Addr(), Dst: host.Addr(), Protocol: unix.IPPROTO_TCP, SrcPort: client.Port(), DstPort: host.Port(),
	}})
}

// taken says which pool a change makes around an address that lies in none now: hosts take blocks of it,
// and routes to these lead away from the machine that has the address.
func taken(changes []*cluster.Change, pools []netip.Prefix, addr netip.Addr) string {
	contains := func(p netip.Prefix) bool { return p.Contains(addr) }
	if slices.ContainsFunc(pools, contains) {
		return ""
	}
	for _, ch := range changes {
		if p, ok := ch.Value.(*cluster.Pool); ok && contains(p.CIDR) {
			return fmt.Sprintf("%s lies in %s of pool %s", addr, p.CIDR, p.Name)
		}
	}
	return ""
}

// denied says by which rule a step ends a flow that the rules before it allow.
func denied(rules *filter.Ruleset, step *filter.Delta, f filter.Flow) (string, error) {
	if !rules.Judge(f).Allowed {
		return "", nil // it is there all the same
	}
	if err := rules.Apply(step); err != nil {
		return "", fmt.Errorf("apply the change to this host's rules: %w", err)
	}
	v := rules.Judge(f)
	if v.Allowed {
		return "", nil
	}
	steps := showSteps(rules, v)
	last := steps[len(steps)-1]
	if last.GetPolicy() == "" {
		return fmt.Sprintf("denied at %s: %s", last.GetEndpoint(), last.GetReason()), nil
	}
	return fmt.Sprintf("denied at %s by %s rule %d: %s", last.GetEndpoint(), last.GetPolicy(), last.GetRule(), last.GetMatch()), nil
}
