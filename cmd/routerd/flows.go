package main

import (
	"context"
	"net"
	"slices"
	"strings"
	"sync"

	"google.golang.org/protobuf/types/known/timestamppb"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/dataplane/filter"
	"github.com/routerd/routerd/dataplane/nflog"
	"github.com/routerd/routerd/dataplane/nft"
)

// keptFlows is how many verdicts are remembered: a few minutes of a busy host's
// new connections, in less than a megabyte.
const keptFlows = 4096

// mostFlows is how many verdicts are taken in a second, for what rules log
// together: a flood of new connections that are allowed, or of many rules.
const mostFlows = 4096

// flows remembers recent verdicts. It is safe for concurrent use.
type flows struct {
	mu       sync.Mutex
	ring     []nflog.Packet
	next     int // where the next one goes, once the ring is full
	listener *nflog.Listener
	err      error
	seen     map[string]uint64 // by action
}

func newFlows() *flows { return &flows{seen: make(map[string]uint64)} }

func (f *flows) listen(l *nflog.Listener) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.listener, f.err = l, nil
}

func (f *flows) fail(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.err = err
}

func (f *flows) add(p nflog.Packet) {
	f.mu.Lock()
	defer f.mu.Unlock()
	v := parseVerdict(p)
	f.seen[v.action]++
	if len(f.ring) < keptFlows {
		f.ring = append(f.ring, p)
		return
	}
	f.ring[f.next] = p
	f.next = (f.next + 1) % keptFlows
}

// all returns what is remembered, oldest first.
func (f *flows) all() (list []nflog.Packet, missed uint64, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.listener != nil {
		missed = f.listener.Missed()
	}
	return slices.Concat(f.ring[f.next:], f.ring[:f.next]), missed, f.err
}

// verdict is what the prefix of a logged packet says.
type verdict struct {
	action string // Allow, Deny, Pass or Log
	by     string
	dir    string
	staged bool
}

// parseVerdict reads the prefix that a rule gives to what it logs: a letter for
// the action, and whose rule it is.
func parseVerdict(p nflog.Packet) verdict {
	letter, by, ok := strings.Cut(p.Prefix, "|")
	if !ok || p.Group == logGroup {
		return verdict{action: filter.Log.String(), by: p.Prefix}
	}
	v := verdict{action: letter, by: by}
	for _, a := range []filter.Action{filter.Allow, filter.Deny, filter.Pass, filter.Log} {
		if strings.HasPrefix(a.String(), letter) {
			v.action = a.String()
		}
	}
	by, v.staged = strings.CutPrefix(by, "staged ")
	for _, d := range []filter.Direction{filter.Ingress, filter.Egress} {
		if rest, ok := strings.CutPrefix(by, d.String()); ok {
			by, v.dir = strings.TrimLeft(rest, ": "), d.String()
		}
	}
	if rule, policy, ok := strings.Cut(by, ": "); ok && policy != "" && strings.Trim(rule, "0123456789") == "" {
		by = policy + " rule " + rule
	}
	v.by = by
	return v
}

// Flows answers [rpc.Operator].
func (d *router) Flows(_ context.Context, req *apiv1.FlowsRequest) (*apiv1.FlowsResponse, error) {
	if d.policy == nil {
		return nil, errPolicyOff
	}
	list, missed, err := d.policy.flows.all()
	out := &apiv1.FlowsResponse{Missed: missed}
	if d.policy.table != nil {
		if counters, err := d.policy.table.Counters(); err == nil {
			out.Unlogged = unlogged(counters)
		}
	}
	if err == nil {
		err = d.noPolicy
	}
	if err != nil {
		out.State = err.Error()
	}
	device := deviceNames()
	wanted := d.interfacesOf(req.GetEndpoint())
	for _, p := range list {
		v := parseVerdict(p)
		in, outDev := device(p.In), device(p.Out)
		if req.GetDenied() && v.action != filter.Deny.String() || wanted != nil && !wanted[in] && !wanted[outDev] {
			continue
		}
		out.Flows = append(out.Flows, &apiv1.FlowRecord{
			Time: timestamppb.New(p.Time), Action: v.action, By: v.by, Direction: v.dir, Staged: v.staged,
			Source: p.Src.String(), Destination: p.Dst.String(), Protocol: filter.ProtocolName(p.Protocol),
			SourcePort: uint32(p.SrcPort), DestinationPort: uint32(p.DstPort), In: in, Out: outDev,
		})
	}
	if n := int(req.GetLimit()); n > 0 && len(out.Flows) > n {
		out.Flows = out.Flows[len(out.Flows)-n:]
	}
	return out, nil
}

// unlogged adds up what rules judged without logging it.
func unlogged(list []nft.Counter) (n uint64) {
	for _, c := range list {
		n += c.Unlogged
	}
	return n
}

// interfacesOf returns the interfaces that a user means by a word; nil: all.
func (d *router) interfacesOf(word string) map[string]bool {
	if word == "" || d.noPolicy != nil {
		return nil
	}
	attached := d.attach.Endpoints()
	wanted := make(map[string]bool)
	d.policy.enforcer.View(func(r *filter.Ruleset) {
		for name, e := range r.Endpoints {
			if names(e, attached, word) {
				wanted[name] = true
			}
		}
	})
	return wanted
}

// deviceNames returns what finds the names of this host's devices.
func deviceNames() func(index int) string {
	names := make(map[int]string)
	if list, err := net.Interfaces(); err == nil {
		for _, i := range list {
			names[i.Index] = i.Name
		}
	}
	return func(index int) string { return names[index] }
}
