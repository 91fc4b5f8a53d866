// Package top compares what the hosts of a cluster have counted at two moments, and lays out what `routerctl top` shows of it. It does no I/O.
package top

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	apiv1 "github.com/routerd/routerd/control/api/v1"
)

// The states of hosts, the worst first.
const (
	Absent   = "absent"    // its daemon is absent
	NoAnswer = "no answer" // it was asked in vain
	NotReady = "not ready"
	Impaired = "impaired" // ready, and a condition does not hold or a session is not up
	Ready    = "ready"
)

func states() []string { return []string{Absent, NoAnswer, NotReady, Impaired, Ready} }

// The kinds of devices whose traffic is shown.
const (
	Uplink   = "uplink"
	Tunnel   = "tunnel"
	Workload = "workload"
)

// Devices lists the kinds in the order in which they are shown.
func Devices() []string { return []string{Uplink, Tunnel, Workload} }

// View is the cluster at a moment.
type View struct {
	Node    string   `json:"node"` // who was asked
	Hosts   []Host   `json:"hosts"`
	Unknown []string `json:"unknown,omitempty"` // what could not be looked at, and why
}

// Host is one host. What is nil is not known: rates before the second moment, or where the counters began anew.
type Host struct {
	Node           string           `json:"node"`
	State          string           `json:"state"`
	Reasons        []string         `json:"reasons,omitempty"` // why it is not ready, the first few
	Version        string           `json:"version,omitempty"`
	Sessions       Sessions         `json:"sessions"`
	Workloads      uint32           `json:"workloads"`
	AddressesInUse uint32           `json:"addressesInUse"`
	Addresses      uint32           `json:"addresses"`
	Seconds        float64          `json:"seconds"` // between the two moments
	Rates          map[string]Rates `json:"rates,omitempty"`
	Dropped        *float64         `json:"droppedPackets"` // a second, by all devices
	Denied         *float64         `json:"deniedPackets"`  // a second, by rules
	CPU            *float64         `json:"cpuPercent"`     // of one processor, that the daemon uses
	Memory         uint64           `json:"memoryBytes"`    // of the daemon
}

// Sessions are a host's BGP sessions.
type Sessions struct {
	Up    uint32    `json:"up"`
	Total uint32    `json:"total"`
	Down  []Session `json:"down,omitempty"` // the first few
}

// Session is one that is not up.
type Session struct {
	Peer    string `json:"peer"`
	Address string `json:"address"`
	Info    string `json:"info"`
}

// Rates are what devices of one kind carry in a second.
type Rates struct {
	ReceivedBits    float64 `json:"receivedBits"`
	SentBits        float64 `json:"sentBits"`
	ReceivedPackets float64 `json:"receivedPackets"`
	SentPackets     float64 `json:"sentPackets"`
	Dropped         float64 `json:"droppedPackets"`
	Errors          float64 `json:"errors"`
}

// Compare makes a view of the newer of two answers; was may be nil.
func Compare(was, is *apiv1.HostsResponse) View {
	before := map[string]*apiv1.HostLoad{}
	for _, h := range was.GetHosts() {
		before[h.GetNode()] = h
	}
	v := View{Node: is.GetNode(), Hosts: []Host{}, Unknown: is.GetUnknown()}
	for _, h := range is.GetHosts() {
		v.Hosts = append(v.Hosts, hostOf(before[h.GetNode()], h))
	}
	return v
}

func hostOf(was, is *apiv1.HostLoad) Host {
	h := Host{
		Node: is.GetNode(), Version: is.GetVersion(), Workloads: is.GetWorkloads(), AddressesInUse: is.GetAddressesInUse(), Addresses: is.GetAddresses(),
		Memory: is.GetMemory(), Sessions: Sessions{Up: is.GetSessionsUp(), Total: is.GetSessions()},
	}
	for _, p := range is.GetDown() {
		h.Sessions.Down = append(h.Sessions.Down, Session{Peer: p.GetName(), Address: p.GetAddress(), Info: p.GetInfo()})
	}
	h.State, h.Reasons = stateOf(is)
	h.addRates(was, is)
	return h
}

func stateOf(is *apiv1.HostLoad) (state string, reasons []string) {
	if is.GetError() != "" {
		if is.GetAbsent() {
			return Absent, []string{is.GetError()}
		}
		return NoAnswer, []string{is.GetError()}
	}
	for _, c := range is.GetUnmet() {
		reasons = append(reasons, c.GetName()+": "+c.GetReason())
	}
	if n := int(is.GetUnmetTotal()) - len(is.GetUnmet()); n > 0 {
		reasons = append(reasons, fmt.Sprintf("and %d more conditions", n))
	}
	for _, p := range is.GetDown() {
		reasons = append(reasons, fmt.Sprintf("session with %s %s: %s", p.GetName(), p.GetAddress(), p.GetInfo()))
	}
	if n := int(is.GetSessions()) - int(is.GetSessionsUp()) - len(is.GetDown()); n > 0 {
		reasons = append(reasons, fmt.Sprintf("and %d more sessions", n))
	}
	switch {
	case !is.GetReady():
		return NotReady, reasons
	case len(reasons) > 0:
		return Impaired, reasons
	}
	return Ready, nil
}

// addRates compares counters by the host's own clock. Those that went backwards began anew, and say nothing.
func (h *Host) addRates(was, is *apiv1.HostLoad) {
	took := is.GetUp().AsDuration() - was.GetUp().AsDuration()
	if was.GetUp() == nil || is.GetUp() == nil || was.GetBoot() != is.GetBoot() || took <= 0 {
		return
	}
	h.Seconds = took.Seconds()
	per := func(a, b uint64) float64 { return float64(b-a) / took.Seconds() }
	before := map[string]*apiv1.Traffic{}
	for _, t := range was.GetTraffic() {
		before[t.GetDevices()] = t
	}
	for _, b := range is.GetTraffic() {
		a := before[b.GetDevices()]
		if a == nil || backwards(a, b) {
			continue
		}
		r := Rates{
			ReceivedBits: 8 * per(a.GetReceivedBytes(), b.GetReceivedBytes()), SentBits: 8 * per(a.GetSentBytes(), b.GetSentBytes()),
			ReceivedPackets: per(a.GetReceivedPackets(), b.GetReceivedPackets()), SentPackets: per(a.GetSentPackets(), b.GetSentPackets()),
			Dropped: per(a.GetDropped(), b.GetDropped()), Errors: per(a.GetErrors(), b.GetErrors()),
		}
		if h.Rates == nil {
			h.Rates, h.Dropped = map[string]Rates{}, new(float64)
		}
		h.Rates[b.GetDevices()] = r
		*h.Dropped += r.Dropped
	}
	if was.GetDenialsCounted() && is.GetDenialsCounted() && is.GetDenied() >= was.GetDenied() {
		n := per(was.GetDenied(), is.GetDenied())
		h.Denied = &n
	}
	if used := is.GetCpu().AsDuration() - was.GetCpu().AsDuration(); used >= 0 { // else the daemon was started anew
		n := 100 * used.Seconds() / took.Seconds()
		h.CPU = &n
	}
}

func backwards(a, b *apiv1.Traffic) bool {
	return b.GetReceivedBytes() < a.GetReceivedBytes() || b.GetSentBytes() < a.GetSentBytes() ||
		b.GetReceivedPackets() < a.GetReceivedPackets() || b.GetSentPackets() < a.GetSentPackets() ||
		b.GetDropped() < a.GetDropped() || b.GetErrors() < a.GetErrors()
}

// Same reports whether two answers are of one moment: who asks again too soon gets the last one.
func Same(was, is *apiv1.HostsResponse) bool {
	own := func(r *apiv1.HostsResponse) *apiv1.HostLoad {
		i := slices.IndexFunc(r.GetHosts(), func(h *apiv1.HostLoad) bool { return h.GetNode() == r.GetNode() })
		if i < 0 {
			return nil
		}
		return r.GetHosts()[i]
	}
	return was != nil && own(was).GetUp().AsDuration() == own(is).GetUp().AsDuration()
}

// Orders are the names of what hosts can be sorted by.
func Orders() []string {
	return []string{"host", "state", "sessions", "pods", "rx", "tx", "pps", "drops", "denied", "cpu", "mem"}
}

// Sort sorts hosts by one of [Orders]: names and states as they come, numbers with the largest first, unknown ones last.
// Hosts that are equal are in the order of their names.
func Sort(hosts []Host, order, devices string, reverse bool) {
	number := numberOf(order, devices)
	slices.SortStableFunc(hosts, func(a, b Host) int {
		c := 0
		switch order {
		case "host":
			c = cmp.Compare(a.Node, b.Node)
		case "state":
			c = cmp.Compare(slices.Index(states(), a.State), slices.Index(states(), b.State))
		default:
			c = cmp.Compare(number(b), number(a))
		}
		if reverse {
			c = -c
		}
		return cmp.Or(c, cmp.Compare(a.Node, b.Node))
	})
}

// numberOf returns what gives a host's number in an order; of one that is not known it is negative.
func numberOf(order, devices string) func(Host) float64 {
	known := func(p *float64) float64 {
		if p == nil {
			return -1
		}
		return *p
	}
	rate := func(h Host, of func(Rates) float64) float64 {
		r, ok := h.Rates[devices]
		if !ok {
			return -1
		}
		return of(r)
	}
	switch order {
	case "sessions": // those with the most that are not up
		return func(h Host) float64 { return float64(h.Sessions.Total) - float64(h.Sessions.Up) }
	case "pods":
		return func(h Host) float64 { return float64(h.Workloads) }
	case "rx":
		return func(h Host) float64 { return rate(h, func(r Rates) float64 { return r.ReceivedBits }) }
	case "tx":
		return func(h Host) float64 { return rate(h, func(r Rates) float64 { return r.SentBits }) }
	case "pps":
		return func(h Host) float64 { return rate(h, Rates.packets) }
	case "drops":
		return func(h Host) float64 { return known(h.Dropped) }
	case "denied":
		return func(h Host) float64 { return known(h.Denied) }
	case "cpu":
		return func(h Host) float64 { return known(h.CPU) }
	}
	return func(h Host) float64 { return float64(h.Memory) }
}

func (r Rates) packets() float64 { return r.ReceivedPackets + r.SentPackets }

// Pause is how long to wait after an answer: as long as the user wants, and until the hosts are asked anew.
func Pause(want time.Duration, r *apiv1.HostsResponse) time.Duration {
	return max(want, r.GetNextAfter().AsDuration())
}
