package operator

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/doctor"
	"github.com/routerd/routerd/control/rib"
	"github.com/routerd/routerd/control/trace"
	"github.com/routerd/routerd/dataplane/filter"
	"github.com/routerd/routerd/store"
)

// askWithin is how long another host may take to answer a question, and lookWithin to say what
// becomes of a packet there: a trace names what is wrong within five seconds, also where a host
// on the way cannot be asked.
const (
	askWithin  = watchMost
	lookWithin = 1500 * time.Millisecond
)

// maxSize is the largest IP packet.
const maxSize = 65535

// Trace implements [rpc.Doctor]: it follows a packet over the hosts of both ends, and its
// answer back. Each host answers for itself.
func (s *Server) Trace(ctx context.Context, req *apiv1.TraceRequest) (*apiv1.TraceResponse, error) {
	find := s.finder(ctx)
	from, err := find(req.GetFrom())
	if err != nil {
		return nil, status.Errorf(codes.NotFound, "from: %v", err)
	}
	req, err = withPort(req)
	if err != nil {
		return nil, status.Errorf(codes.InvalidArgument, "to: %v", err)
	}
	svc, to, err := s.destination(ctx, find, req.GetTo())
	var unsure error
	if err == nil && svc == nil {
		svc, unsure = s.atNodePort(ctx, req, to)
	}
	switch {
	case err != nil:
		return nil, status.Errorf(codes.NotFound, "to: %v", err)
	case svc != nil:
		svc.from = from
		return s.traceService(ctx, req, find, svc)
	case req.GetEach():
		return nil, status.Errorf(codes.InvalidArgument, "each: %s is not a Service, so it has no endpoints", req.GetTo())
	}
	out, err := s.follow(ctx, req, from, to)
	if err == nil && unsure != nil {
		out.Unknown = append(out.Unknown, fmt.Sprintf("whether a Service has the node port %d: %v", req.GetPort(), unsure))
		trace.ToService(out, out.GetWays())
	}
	return out, err
}

// follow follows a packet from one end to another.
func (s *Server) follow(ctx context.Context, req *apiv1.TraceRequest, from, to location) (*apiv1.TraceResponse, error) {
	p, err := traced(req, from, to)
	switch {
	case err != nil:
		return nil, status.Error(codes.InvalidArgument, err.Error())
	case p.Src == p.Dst:
		return nil, status.Errorf(codes.InvalidArgument, "from and to are both %s: name two different ends", p.Src)
	case req.GetSize() > maxSize:
		return nil, status.Errorf(codes.InvalidArgument, "size %d: a packet has at most %d bytes", req.GetSize(), maxSize)
	}
	text := showPacket(p)
	if req.GetSize() > 0 {
		text += fmt.Sprintf(", %d bytes", req.GetSize())
	}
	if r := s.nobody(ctx, text, from, to, p); r != nil {
		return r, nil
	}
	if from.node == "" && to.node == "" {
		return nil, status.Error(codes.InvalidArgument, "neither end is a workload or a host of the cluster: the packet passes no host of the cluster")
	}
	var sent *probing
	if req.GetProbe() {
		if sent, err = s.prepareProbe(from, to, p); err != nil {
			return nil, err
		}
	}
	ask := func(h, other location, local, remote netip.Addr, answers bool) trace.Host {
		if h.node == "" {
			return trace.Host{}
		}
		a, err := s.lookAt(ctx, h.node, &apiv1.LookRequest{
			Local: local.String(), Remote: remote.String(), Peer: other.node, Answers: answers,
			Protocol: uint32(p.Protocol), SourcePort: uint32(p.SrcPort), Port: uint32(p.DstPort), IcmpType: uint32(p.ICMPType), Size: req.GetSize(),
		})
		if errors.Is(err, errAlone) {
			a = s.judgedThere(ctx, h.node, from, to, p)
		}
		return trace.Host{Node: h.node, Answer: a, Err: err}
	}
	var here, there trace.Host
	var both sync.WaitGroup
	both.Go(func() { here = ask(from, to, p.Src, p.Dst, false) })
	both.Go(func() { there = ask(to, from, p.Dst, p.Src, true) })
	var seen trace.ProbeFacts
	if sent != nil {
		both.Go(func() { seen = s.probe(ctx, sent) })
	}
	both.Wait()
	out := trace.Join(text, here, there)
	if sent != nil {
		trace.AddProbe(out, seen)
	}
	return out, nil
}

// listWithin is how long the datastore may take to say what there is.
const listWithin = 2 * time.Second

// finder returns what finds the ends that a user names, by the datastore or, while that is
// away, by what this host knows.
func (s *Server) finder(ctx context.Context) func(word string) (location, error) {
	call, cancel := context.WithTimeout(ctx, listWithin)
	defer cancel()
	objects, err := listed(call, s.cfg.Store, store.KindWorkloadEndpoint, store.KindNode)
	if err == nil {
		return func(word string) (location, error) { return locate(objects, s.cfg.Node, word) }
	}
	return func(word string) (location, error) {
		addr, wrong := netip.ParseAddr(word)
		if wrong != nil {
			return location{}, fmt.Errorf("%q: cannot look up the name in the datastore; give an address: %w", word, err)
		}
		return s.locateAlone(ctx, addr)
	}
}

// locateAlone finds an address by what this host knows: its workloads, its own addresses,
// and whose routes lead there.
func (s *Server) locateAlone(ctx context.Context, addr netip.Addr) (location, error) {
	out := location{name: addr.String(), addrs: []netip.Addr{addr}}
	for _, w := range s.cfg.Attach.Endpoints() {
		if slices.Contains(w.Addresses, addr) {
			out.node, out.iface, out.name = s.cfg.Node, w.Device, workloadName(w)
			return out, nil
		}
	}
	cands, err := s.cfg.Core.Explain(ctx, netip.PrefixFrom(addr, addr.BitLen()))
	if err != nil {
		return out, err
	}
	for _, h := range s.view(ctx, s.sessions()).hosts {
		if h.Addr.Addr() == addr {
			out.node = s.cfg.Node
		}
	}
	for _, c := range cands {
		if c.Source == rib.SourceStore && c.Prefix.Contains(addr) {
			out.node = c.Peer
		}
	}
	return out, nil
}

// traced makes the packet that is followed: unless the request says otherwise TCP to a
// port, or an echo request.
func traced(req *apiv1.TraceRequest, from, to location) (filter.Packet, error) {
	r := &apiv1.PolicyExplainRequest{Protocol: req.GetProtocol(), Port: req.GetPort(), SourcePort: req.GetSourcePort()}
	switch {
	case r.GetProtocol() == "" && r.GetPort() > 0:
		r.Protocol = "tcp"
	case r.GetProtocol() == "" || r.GetProtocol() == "icmp":
		r.Protocol, r.IcmpType = "icmp", 8 // echo requests: RFC 792, RFC 4443
		if p, err := packetOf(r, from, to); err == nil {
			return p, nil
		}
		r.Protocol, r.IcmpType = "icmpv6", 128
	case r.GetProtocol() == "icmpv6":
		r.IcmpType = 128
	}
	return packetOf(r, from, to)
}

// judgedThere is what is known of a host that cannot be asked: what its rules say, by what
// the datastore has now; nil: not even that.
func (s *Server) judgedThere(ctx context.Context, node string, from, to location, p filter.Packet) *apiv1.LookResponse {
	if s.PolicyServer.able() != nil {
		return nil
	}
	call, cancel := context.WithTimeout(ctx, listWithin)
	defer cancel()
	objects, err := s.clusterObjects(call)
	if err != nil {
		return nil
	}
	rules, err := s.rulesOf(call, objects, node)
	if err != nil {
		return nil
	}
	return trace.Judged(node, from.node == node, *verdictOf(rules, flowAt(node, from, to, p)))
}

// nobody answers where an end is an address of a pool that no workload has; nil: it is
// none.
func (s *Server) nobody(ctx context.Context, text string, from, to location, p filter.Packet) *apiv1.TraceResponse {
	pools := cidrs(s.view(ctx, s.sessions()).pools)
	for _, end := range []struct {
		at   location
		addr netip.Addr
	}{{from, p.Src}, {to, p.Dst}} {
		if end.at.node != "" || end.at.apart || !slices.ContainsFunc(pools, func(c netip.Prefix) bool { return c.Contains(end.addr) }) {
			continue
		}
		return &apiv1.TraceResponse{Packet: text, Verdict: trace.Broken, Fault: doctor.Finding{
			Severity: doctor.Critical, Check: "nobody", Object: end.addr.String(),
			What:  fmt.Sprintf("%s is an address of a pool, but no workload of the cluster has it", end.addr),
			Cause: "the workload no longer exists, or its address has changed", Cure: "routerctl ipam show --ip=" + end.addr.String(),
		}.Proto()}
	}
	return nil
}

// lookAt asks a host what becomes of a packet there.
func (s *Server) lookAt(ctx context.Context, node string, req *apiv1.LookRequest) (*apiv1.LookResponse, error) {
	within := lookWithin + 500*time.Millisecond
	ctx, cancel := context.WithTimeoutCause(ctx, within, noAnswer(within))
	defer cancel()
	a, err := s.ask(ctx, node, &apiv1.Question{Look: req})
	return a.GetLook(), err
}

// ask has a host, or this one itself, answer a question.
func (s *Server) ask(ctx context.Context, node string, question *apiv1.Question) (*apiv1.Answer, error) {
	if node == s.cfg.Node {
		return s.answer(ctx, question)
	}
	if s.cfg.Ask == nil {
		return nil, fmt.Errorf("%w: ask on %s too", errAlone, node)
	}
	q, err := proto.Marshal(question)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, askWithin, noAnswer(askWithin))
	defer cancel()
	raw, err := s.cfg.Ask(ctx, node, q)
	if err != nil {
		return nil, err
	}
	a := &apiv1.Answer{}
	if err := proto.Unmarshal(raw, a); err != nil {
		return nil, fmt.Errorf("read the answer: %w", err)
	}
	if err := answered(question, a); err != nil {
		return nil, err
	}
	return a, nil
}

func noAnswer(within time.Duration) error {
	return fmt.Errorf("no answer within %v: its routerd is not running, cannot reach the datastore, or is an older version", within)
}

// answered says why an answer is none to the question.
func answered(q *apiv1.Question, a *apiv1.Answer) error {
	said := q.GetLook() == nil || a.GetLook() != nil
	said = said && (q.GetLoad() == nil || a.GetLoad() != nil)
	said = said && (q.GetWatch() == nil || a.GetWatch() != nil)
	said = said && (q.GetPlan() == nil || a.GetPlan() != nil)
	said = said && (q.GetClock() == nil || a.GetClock().GetTime() != nil)
	said = said && (q.GetHeard() == nil || a.GetHeard() != nil)
	switch {
	case a.GetError() == errOtherVersion.Error() || a.GetError() == "" && !said:
		return errItsVersion
	case a.GetError() != "":
		return errors.New(a.GetError())
	}
	return nil
}

// answer answers a question.
func (s *Server) answer(ctx context.Context, q *apiv1.Question) (a *apiv1.Answer, err error) {
	a = &apiv1.Answer{}
	switch {
	case q.GetLook() != nil:
		a.Look, err = s.Look(ctx, q.GetLook())
	case q.GetLoad() != nil:
		a.Load = s.load(ctx)
	case q.GetWatch() != nil:
		a.Watch, err = s.watch(ctx, q.GetWatch())
	case q.GetPlan() != nil:
		a.Plan, err = s.hostPlan(ctx, q.GetPlan())
	case q.GetClock() != nil:
		a.Clock = &apiv1.ClockResponse{Time: timestamppb.Now()}
	case q.GetHeard() != nil:
		a.Heard, err = s.heard(q.GetHeard())
	default:
		err = errOtherVersion
	}
	return a, err
}

// Answer answers a question of another host.
func (s *Server) Answer(ctx context.Context, raw []byte) []byte {
	q, a := &apiv1.Question{}, &apiv1.Answer{}
	err := proto.Unmarshal(raw, q)
	if err == nil {
		a, err = s.answer(ctx, q)
	}
	if err != nil {
		a.Error = status.Convert(err).Message()
	}
	out, err := proto.Marshal(a)
	if err != nil {
		return nil // an empty Answer
	}
	return out
}
