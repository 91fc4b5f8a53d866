package operator

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/bgp"
	"github.com/routerd/routerd/control/bootid"
	"github.com/routerd/routerd/control/doctor"
	"github.com/routerd/routerd/control/doctor/gather"
	"github.com/routerd/routerd/dataplane/filter"
	"github.com/routerd/routerd/dataplane/netdev"
	"github.com/routerd/routerd/dataplane/nft"
	"github.com/routerd/routerd/store"
)

// What bounds the cost of [Server.Hosts]: however many ask, all hosts together are asked
// as often as loadEvery says, and hostsPerSecond of them a second at most.
const (
	loadEvery      = time.Second
	hostsPerSecond = 100
	// loadWithin is how long the hosts have for their answers.
	loadWithin = 3 * time.Second
	// shownOfHost bounds how many unmet conditions and sessions an answer lists.
	shownOfHost = 8
	// countedRules is up to how many rules the kernel is asked for their counters.
	countedRules = 5000
)

// lastHosts is the last answer of [Server.Hosts], which those share who ask soon after.
type lastHosts struct {
	mu     sync.Mutex // held while hosts are asked: who comes meanwhile has the answer too
	at     time.Time
	answer *apiv1.HostsResponse
}

// Hosts implements [rpc.Operator]. It asks every host whose daemon is there.
func (s *Server) Hosts(ctx context.Context) (*apiv1.HostsResponse, error) {
	l := &s.hosts
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.answer != nil && time.Since(l.at) < l.answer.GetNextAfter().AsDuration() {
		return l.answer, nil
	}
	r := s.askHosts(ctx)
	if err := ctx.Err(); err != nil {
		return nil, context.Cause(ctx) // it is nobody's answer
	}
	l.at, l.answer = time.Now(), r
	return r, nil
}

func (s *Server) askHosts(ctx context.Context) *apiv1.HostsResponse {
	out := &apiv1.HostsResponse{Node: s.cfg.Node}
	listing, done := context.WithTimeout(ctx, listWithin)
	defer done()
	c, err := gather.Members(listing, s.cfg.Store, s.cfg.Presences)
	if err != nil {
		out.Unknown = append(out.Unknown, fmt.Sprintf("other hosts: %v", err))
	}
	hosts, ask := s.members(c)
	hosts[s.cfg.Node] = s.load(ctx)
	if len(ask) > 0 {
		s.askLoads(ctx, hosts, ask)
	}
	for _, h := range hosts {
		out.Hosts = append(out.Hosts, h)
	}
	slices.SortFunc(out.Hosts, func(a, b *apiv1.HostLoad) int { return cmp.Compare(a.GetNode(), b.GetNode()) })
	out.NextAfter = durationpb.New(hostsAgain(len(out.Hosts)))
	return out
}

// hostsAgain returns after how long so many hosts are asked again.
func hostsAgain(hosts int) time.Duration {
	return max(loadEvery, time.Duration(hosts)*time.Second/hostsPerSecond)
}

// members sorts the other hosts into those that are asked and those that are not, with the
// reason.
func (s *Server) members(c doctor.Cluster) (hosts map[string]*apiv1.HostLoad, ask []string) {
	hosts = map[string]*apiv1.HostLoad{}
	for _, m := range c.Members {
		h := &apiv1.HostLoad{Node: m.Name}
		switch {
		case m.Name == s.cfg.Node:
			continue
		case len(m.Conditions) == 0 && !c.Present[m.Name]:
			h.Absent, h.Error = true, "it has published nothing: routerd has not run there"
		case c.Present != nil && !c.Present[m.Name]:
			h.Absent, h.Error = true, "its daemon is absent: it has stopped, the host is down, or it cannot reach the datastore"
		case s.cfg.AskAll == nil:
			h.Error = errAlone.Error()
		default:
			ask = append(ask, m.Name)
		}
		hosts[m.Name] = h
	}
	return hosts, ask
}

// askLoads asks hosts for their loads.
func (s *Server) askLoads(ctx context.Context, hosts map[string]*apiv1.HostLoad, ask []string) {
	s.askAll(ctx, loadWithin, ask, &apiv1.Question{Load: &apiv1.LoadRequest{}}, func(node string, a *apiv1.Answer, err error) {
		if err != nil {
			hosts[node].Error = err.Error()
			return
		}
		a.Load.Node = node // whatever it calls itself
		hosts[node] = a.GetLoad()
	})
}

// askAll asks hosts, and calls yield once for each: with its answer, or with why there is none.
func (s *Server) askAll(ctx context.Context, within time.Duration, ask []string, question *apiv1.Question, yield func(node string, a *apiv1.Answer, err error)) {
	ctx, cancel := context.WithTimeoutCause(ctx, within, fmt.Errorf("no answer within %v: its routerd is busy, or an older version", within))
	defer cancel()
	heard := map[string]bool{}
	q, err := proto.Marshal(question)
	if err == nil {
		err = s.cfg.AskAll(ctx, ask, q, func(node string, raw []byte) {
			heard[node] = true
			a := &apiv1.Answer{}
			err := proto.Unmarshal(raw, a)
			if err == nil {
				err = answered(question, a)
			}
			yield(node, a, err)
		})
	}
	if err == nil {
		return
	}
	for _, n := range ask {
		if !heard[n] {
			yield(n, nil, errors.New(status.Convert(err).Message()))
		}
	}
}

// load says how this host is and what it has counted.
func (s *Server) load(ctx context.Context) *apiv1.HostLoad {
	sessions := s.sessions()
	v := s.view(ctx, sessions)
	rep := s.reportOf(v)
	out := &apiv1.HostLoad{Node: s.cfg.Node, Version: s.cfg.Version, Ready: rep.Live.OK && rep.Ready.OK, Workloads: uint32(len(s.cfg.Attach.Endpoints()))}
	for _, c := range append(rep.Conditions, rep.Live) {
		if c.OK {
			continue
		}
		out.UnmetTotal++
		if len(out.GetUnmet()) < shownOfHost {
			out.Unmet = append(out.Unmet, checkProto(c))
		}
	}
	addSessions(sessions, out)
	for _, b := range s.blocks() {
		out.AddressesInUse += uint32(b.GetInUse()) //nolint:gosec // of a block
		out.Addresses += uint32(b.GetSize())       //nolint:gosec // of a block
	}
	uplinks := map[string]bool{}
	for _, a := range v.node.Addresses {
		uplinks[a.Link] = true
	}
	addCounters(out, uplinks)
	out.Denied, out.DenialsCounted = s.denied()
	return out
}

func addSessions(st bgp.Status, out *apiv1.HostLoad) {
	for _, p := range peersOf(st) {
		out.Sessions++
		if p.up {
			out.SessionsUp++
		} else if len(out.GetDown()) < shownOfHost {
			out.Down = append(out.Down, p.proto)
		}
	}
}

// addCounters adds what the kernel has counted, and when. What cannot be read is left out.
func addCounters(out *apiv1.HostLoad, uplinks map[string]bool) {
	all, _ := netdev.Read()
	var now unix.Timespec
	if unix.ClockGettime(unix.CLOCK_BOOTTIME, &now) == nil {
		out.Up = durationpb.New(time.Duration(now.Nano()))
	}
	out.Boot, _ = bootid.Read()
	out.Traffic = trafficOf(all, uplinks)
	var used unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &used) == nil {
		out.Cpu = durationpb.New(time.Duration(used.Utime.Nano() + used.Stime.Nano()))
	}
	b, err := os.ReadFile("/proc/self/statm")
	if f := strings.Fields(string(b)); err == nil && len(f) > 1 { // size, resident: in pages (proc_pid_statm(5))
		pages, _ := strconv.ParseUint(f[1], 10, 64)
		out.Memory = pages * uint64(os.Getpagesize()) //nolint:gosec // it is positive
	}
}

// The kinds of devices whose counters are added up.
const (
	devicesUplink   = "uplink"
	devicesTunnel   = "tunnel"
	devicesWorkload = "workload"
)

// trafficOf adds the counters of devices up by their kinds.
func trafficOf(all map[string]netdev.Counters, uplinks map[string]bool) []*apiv1.Traffic {
	sums := map[string]netdev.Counters{}
	for name, d := range all {
		kind := ""
		switch {
		case uplinks[name]:
			kind = devicesUplink
		case strings.HasPrefix(name, store.WorkloadInterfacePrefix):
			kind = devicesWorkload
		case name == "tunl0", name == "tunl6.calico", strings.HasPrefix(name, "vxlan") && strings.Contains(name, ".calico"):
			kind = devicesTunnel
		default:
			continue
		}
		sum := sums[kind]
		sum.Add(d)
		sums[kind] = sum
	}
	var out []*apiv1.Traffic
	for _, kind := range []string{devicesUplink, devicesTunnel, devicesWorkload} {
		if d, ok := sums[kind]; ok {
			out = append(out, &apiv1.Traffic{
				Devices: kind, ReceivedBytes: d.ReceivedBytes, SentBytes: d.SentBytes, ReceivedPackets: d.ReceivedPackets, SentPackets: d.SentPackets,
				Dropped: d.Dropped, Errors: d.Errors,
			})
		}
	}
	return out
}

// denied counts the first packets of connections that rules denied. The kernel is not asked
// where it has so many rules that the answer would cost much.
func (s *Server) denied() (sum uint64, known bool) {
	p := s.PolicyServer
	if p.able() != nil || p.cfg.Table.Status().Rules > countedRules {
		return 0, false
	}
	list, err := p.cfg.Table.Counters()
	if err != nil {
		return 0, false
	}
	for _, k := range list {
		if k.Reason != nft.ByNAT && !k.Staged && k.Action == filter.Deny {
			sum += k.Packets
		}
	}
	return sum, true
}
