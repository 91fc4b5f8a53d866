// Package doctor says what is wrong with a host's network and which command mends it.
//
// Its checks are pure: each takes the [Facts] that others gathered and returns
// findings. What is well gives none, so that an empty list means something.
package doctor

import (
	"cmp"
	"net/netip"
	"slices"
	"time"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/survey"
)

// Severity says how bad a finding is.
type Severity string

// The severities, the worst first.
const (
	// Critical is what packets are lost by now, or what keeps the host from serving.
	Critical Severity = "critical"
	// Warning is what will be, or may be for some packets.
	Warning Severity = "warning"
)

// Finding is one thing that is wrong.
type Finding struct {
	Severity Severity
	Check    string // what found it: a name that stays the same
	Node     string // where: the host,
	Device   string // its device,
	Object   string // a session, route, pool, workload, file …,
	Field    string // and the setting that is wrong
	What     string // what is wrong, in words
	Cause    string // why, as far as it is known
	Cure     string // the command that mends it
}

// Proto returns a finding as the API has it.
func (f Finding) Proto() *apiv1.Finding {
	return &apiv1.Finding{
		Severity: string(f.Severity), Check: f.Check, Node: f.Node, Device: f.Device, Object: f.Object, Field: f.Field,
		What: f.What, Cause: f.Cause, Cure: f.Cure,
	}
}

// Facts is what is known of a host.
type Facts struct {
	Now     time.Time
	Node    *apiv1.NodeResponse
	Uplinks []dataplane.UnderlayLink
	Missing []netip.Prefix // that this host is registered with, and no device has
	Host    survey.Host
	Pools   []netip.Prefix
	Nodes   map[netip.Addr]string // other hosts by their addresses on the underlay
	Foreign []Foreign
	Ways    []Way
	Lost    []Lost
	Felix   []string // what Calico's agent left in the packet filter, for people
	Calico  []string // Calico's programs that run on this host, for people
	Paths   []*apiv1.Path
	Echoes  []Echo
	Claims  []Claim
	Barred  []Barred
	Silent  map[netip.Addr]string // BGP peers' addresses for which nobody answers, neither this host's kernel nor the doctor, by the device
	Pods    []Pod
	Failed  []*apiv1.ObjectStatus // objects that the kernel does not take
	Disks   []Disk
	Hidden  []Hidden
	Clocks  []Clock // of other hosts
}

// Foreign is a route of another program that takes packets from one of ours.
type Foreign struct{ Theirs, Ours string } // as ip(8) takes them

// Way is what the kernel said of a packet, and where it should go.
type Way struct {
	Packet survey.Packet
	Node   string     // to or from which host it is
	Want   []string   // the devices by which it may leave
	Via    netip.Addr // the gateway by which it is to; invalid: whichever
	Hop    survey.Hop
	Err    error
}

// Lost is a block of another host to which there is no route.
type Lost struct {
	Prefix  netip.Prefix
	Node    string
	Reason  string   // why what the datastore says cannot be used
	Refused []string // why import filters reject what BGP peers announce of it
	Gone    bool     // the datastore has no such node any more
}

// Hidden is a block of this host of which a BGP peer is not told.
type Hidden struct {
	Prefix netip.Prefix
	Peer   string
	Addr   netip.Addr // of the peer
	Filter string     // the BGPFilter
	Reason string     // which of its rules
}

// wrong reports whether the packet goes elsewhere, or nowhere.
func (w Way) wrong() bool {
	return w.Err != nil || !slices.Contains(w.Want, w.Hop.Device) || w.Via.IsValid() && w.Hop.Gateway.IsValid() && w.Hop.Gateway != w.Via
}

// Known is what another host said, if it did.
type Known string

// What is known.
const (
	NotKnown Known = ""
	Yes      Known = "yes"
	No       Known = "no"
)

// Echo is what a few packets found of a tunnel that is in use.
type Echo struct {
	Node, Encap, Device string
	Addr                netip.Addr // of the peer on the underlay
	Answered            bool
	Heard               Known // the peer's word: whether this host's packets get there
	Offload             bool  // packets whose checksum is left to the device are lost
	Full, Size          int   // bytes: of a packet that fits the device, and of the largest that got there
}

// Claim is an address for which several machines answer.
type Claim struct {
	Device string
	Addr   netip.Addr
	MACs   []dataplane.MAC // of the machines; of this host's own addresses the others only
}

// Barred is a host, or another BGP peer, whose packets come in by a device that drops them because their answers leave by another.
type Barred struct {
	Node   string
	Addr   netip.Addr // of it on the underlay
	Device string
	By     string     // whose rp_filter makes the device strict: its own, or that of "all"
	Back   survey.Hop // the way back
}

// Pod is a workload of this host that is not as it was attached.
type Pod struct {
	Name, Device string
	Err          error
}

// Disk is a file system that the daemon writes to.
type Disk struct {
	Dir        string
	Free, Size uint64 // bytes
	Files      uint64 // free inodes; meaningless where Inodes is zero
	Inodes     uint64
}

// check looks for one kind of trouble.
type check func(Facts) []Finding

// checks lists all, those that find causes before those that find what comes of them:
// among findings of one severity the first is to name the cause.
func checks() []check {
	return []check{
		calico, conditions, uplinks, missing, disks, claims, felix, foreignRoutes, foreignRules, pods, fixedNeighbours, chains, conntrack, neighbourTables, pathMTU, barred,
		sessions, pools, hidden, lost, echoes, ways, objects, clocks,
	}
}

// Examine returns what is wrong, the worst first.
func Examine(f Facts) []Finding {
	var all []Finding
	for _, c := range checks() {
		all = append(all, c(f)...)
	}
	for i := range all {
		all[i].Node = cmp.Or(all[i].Node, f.Node.GetName())
	}
	Sort(all)
	return all
}

// Sort puts the worst first and leaves the order otherwise.
func Sort(list []Finding) {
	slices.SortStableFunc(list, func(a, b Finding) int { return CompareSeverity(a.Severity, b.Severity) })
}

// CompareSeverity orders severities, the worst first.
func CompareSeverity(a, b Severity) int {
	rank := func(s Severity) int {
		if s == Critical {
			return 0
		}
		return 1
	}
	return cmp.Compare(rank(a), rank(b))
}
