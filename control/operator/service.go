package operator

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/bgp"
	"github.com/routerd/routerd/control/doctor"
	"github.com/routerd/routerd/control/service"
	"github.com/routerd/routerd/control/trace"
	"github.com/routerd/routerd/store"
)

// errNoServices says why there are no Services.
var errNoServices = errors.New("Kubernetes Services and EndpointSlices are known only with datastore.kind kubernetes or kubernetes.enabled: name a workload behind the Service")

// serviceWords are what an operator may write before the name of a Service, as with kubectl.
func serviceWords() []string { return []string{"service/", "svc/"} }

// toService is a packet to a Service.
type toService struct {
	detail store.ServiceDetail
	addr   netip.Addr // that the packet is for; of a headless one invalid
	port   store.ServicePort
	from   location
	// announcers are how nodes announce the address; empty where the packet begins inside of
	// the cluster, for there each host's proxy of Services takes it.
	announcers []bgp.Announcer
	unknown    []string
	// node is that whose port the packet is for, in place of an address of the Service.
	node location
}

// atNode reports whether the packet is for a port of a node.
func (t *toService) atNode() bool { return t.node.node != "" }

// destination finds what a packet is for: a Service, or an end.
func (s *Server) destination(ctx context.Context, find func(string) (location, error), word string) (*toService, location, error) {
	name := word
	for _, w := range serviceWords() {
		name = strings.TrimPrefix(name, w)
	}
	var to location
	err := store.ErrNotFound
	if name == word {
		if to, err = find(word); err == nil && (to.node != "" || to.iface != "") {
			return nil, to, nil
		}
	}
	addr, wrong := netip.ParseAddr(name)
	switch {
	case s.cfg.Service == nil && name != word:
		return nil, to, fmt.Errorf("%s: %w", word, errNoServices)
	case s.cfg.Service == nil && err != nil:
		return nil, to, fmt.Errorf("%w. %w", err, errNoServices)
	case s.cfg.Service == nil:
		return nil, to, nil
	case wrong != nil:
		namespace, short, ok := strings.Cut(name, "/")
		if !ok {
			namespace, short = "default", name
		}
		d, readErr := s.cfg.Service(ctx, store.ServiceKey(namespace, short))
		if errors.Is(readErr, store.ErrNotFound) {
			return nil, to, fmt.Errorf("there is no Service %s/%s, and %q is neither a workload nor a node", namespace, short, name)
		}
		return &toService{detail: d}, to, readErr
	}
	key, found, listErr := s.serviceAt(ctx, addr)
	switch {
	case listErr != nil:
		return nil, to, listErr
	case !found && name != word:
		return nil, to, fmt.Errorf("no Service has the address %s: see kubectl get services -A -o wide", addr)
	case !found:
		return nil, to, err
	}
	d, err := s.cfg.Service(ctx, key)
	return &toService{detail: d, addr: addr}, to, err
}

// serviceAt finds the Service that has an address.
func (s *Server) serviceAt(ctx context.Context, addr netip.Addr) (store.Key, bool, error) {
	list, err := listed(ctx, s.cfg.Store, store.KindService)
	if err != nil {
		return store.Key{}, false, err
	}
	for _, ev := range list {
		v, ok := ev.Object.Value.(*store.Service)
		if ok && slices.ContainsFunc(slices.Concat(v.ClusterIPs, v.ExternalIPs, v.LoadBalancerIPs), func(t string) bool {
			a, err := netip.ParseAddr(t)
			return err == nil && a.Unmap() == addr.Unmap()
		}) {
			return ev.Key, true, nil
		}
	}
	return store.Key{}, false, nil
}

// endpointsAtOnce bounds how many ways are followed at a time.
const endpointsAtOnce = 8

// traceService follows a packet to a Service: to the endpoint that it may be sent to, or to
// each of them.
func (s *Server) traceService(ctx context.Context, req *apiv1.TraceRequest, find func(string) (location, error), t *toService) (*apiv1.TraceResponse, error) {
	if req.GetEach() && req.GetProbe() {
		return nil, status.Error(codes.InvalidArgument, "probe: a probe is one packet to one endpoint: leave out --each")
	}
	if err := t.complete(req); err != nil {
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	client := t.client()
	if client.Outside && !t.atNode() {
		s.announced(t)
	}
	entries := t.entries(client)
	var choice service.Choice
	for _, node := range entries {
		client.Node, client.Zone = node, s.zone(ctx, node)
		if choice = service.Choose(t.detail, t.addrOrFamily(), t.port, client); len(choice.Chosen()) > 0 {
			break
		}
	}
	out := &apiv1.TraceResponse{Packet: t.packet(), Verdict: trace.Whole, Service: t.proto(client, choice), Unknown: t.unknown}
	if f := t.fault(client, choice, len(entries) > 0); f != nil {
		out.Verdict, out.Fault = trace.Broken, f.Proto()
		return out, nil
	}
	from := t.from
	if !choice.Source { // the proxy puts its node's address in place of the client's
		var err error
		if from, err = find(client.Node); err != nil {
			return nil, status.Errorf(codes.NotFound, "the node at which the packet enters the cluster: %v", err)
		}
	} else if t.atNode() && from.node != t.node.node {
		from.node, from.iface, from.apart = "", "", from.node != "" // it comes from the network to that node
	}
	var sent *serviceProbe
	if req.GetProbe() && !t.detail.Headless {
		var err error
		if sent, err = s.prepareServiceProbe(req, find, t, client.Node, choice); err != nil {
			return nil, err
		}
	}
	chosen := slices.DeleteFunc(choice.Chosen(), func(e service.Candidate) bool {
		return slices.Contains(from.addrs, e.Addr) // it is the client: the packet goes out and in again by one device
	})
	if !req.GetEach() {
		chosen = chosen[:min(len(chosen), 1)]
	}
	ways := make([]*apiv1.TraceResponse, len(chosen))
	var all errgroup.Group
	all.SetLimit(endpointsAtOnce)
	for i, e := range chosen {
		out.Service.Endpoints[slices.IndexFunc(choice.Of, func(c service.Candidate) bool { return c.Addr == e.Addr })].Followed = true
		all.Go(func() error {
			to, err := find(e.Addr.String())
			if err != nil {
				return status.Errorf(codes.NotFound, "endpoint %s: %v", e.Addr, err)
			}
			sub := &apiv1.TraceRequest{Protocol: strings.ToLower(t.port.Protocol), Port: uint32(e.Port), SourcePort: req.GetSourcePort(), Size: req.GetSize(), Probe: req.GetProbe() && sent == nil}
			ways[i], err = s.follow(ctx, sub, from, to)
			return err
		})
	}
	var seen trace.ServiceProbeFacts
	if sent != nil {
		seen = s.probeService(ctx, sent)
	}
	if err := all.Wait(); err != nil {
		return nil, err
	}
	if len(ways) == 0 {
		out.Unknown = append(out.Unknown, fmt.Sprintf("the path to an endpoint: the only one is %s itself", from.name))
	}
	if t.atNode() && t.from.node != "" && t.from.node != t.node.node {
		way, err := s.toNodePort(ctx, req, t)
		if err != nil {
			return nil, err
		}
		ways = append([]*apiv1.TraceResponse{way}, ways...)
	}
	trace.ToService(out, ways)
	if sent != nil {
		trace.AddServiceProbe(out, seen)
	}
	return out, nil
}

// client is who sends the packet, as the proxy of Services sees it that takes it. A packet to a port of another node is taken
// there, as one from outside.
func (t *toService) client() service.Client {
	if t.atNode() {
		return service.Client{Node: t.node.node, Outside: t.from.node != t.node.node}
	}
	return service.Client{Node: t.from.node, Outside: t.from.node == ""}
}

// toNodePort follows the packet from its host to the node whose port it is for. What the rules of that node say of packets to
// itself does not concern one that the proxy of Services sends on.
func (s *Server) toNodePort(ctx context.Context, req *apiv1.TraceRequest, t *toService) (*apiv1.TraceResponse, error) {
	to := location{name: t.node.name, addrs: t.node.addrs}
	sub := &apiv1.TraceRequest{Protocol: strings.ToLower(t.port.Protocol), Port: uint32(t.port.NodePort), SourcePort: req.GetSourcePort(), Size: req.GetSize()}
	return s.follow(ctx, sub, t.from, to)
}

// complete finds the address and the port that the packet is for.
func (t *toService) complete(req *apiv1.TraceRequest) (err error) {
	d := t.detail
	if d.ExternalName != "" {
		return fmt.Errorf("Service %s/%s has no endpoints: its name is an alias of %s (type ExternalName)", d.Key.Namespace, d.Key.Name, d.ExternalName)
	}
	if req.GetPort() > 65535 || req.GetSize() > maxSize {
		return errors.New("a port is at most 65535, and a packet has at most 65535 bytes")
	}
	if t.atNode() {
		return t.completeAtNode(req)
	}
	if t.port, err = service.PortOf(d, req.GetProtocol(), uint16(req.GetPort())); err != nil || t.addr.IsValid() || d.Headless {
		return err
	}
	for _, text := range d.ClusterIPs {
		a, err := netip.ParseAddr(text)
		if err == nil && t.from.hasFamilyOf(a) {
			t.addr = a
			return nil
		}
	}
	return fmt.Errorf("%s and Service %s/%s have no addresses of one family", t.from.name, d.Key.Namespace, d.Key.Name)
}

// completeAtNode finds the node's address and the Service's port.
func (t *toService) completeAtNode(req *apiv1.TraceRequest) error {
	name := t.detail.Key.Namespace + "/" + t.detail.Key.Name
	var ok bool
	if t.port, ok = service.NodePortOf(t.detail, req.GetProtocol(), uint16(req.GetPort())); !ok { //nolint:gosec // it was looked at
		return fmt.Errorf("Service %s no longer has node port %d", name, req.GetPort())
	}
	i := slices.IndexFunc(t.node.addrs, func(a netip.Addr) bool { // the proxy serves the families of the Service
		return t.from.hasFamilyOf(a) && slices.ContainsFunc(t.detail.ClusterIPs, func(ip string) bool { return strings.Contains(ip, ":") != a.Is4() })
	})
	if i < 0 {
		return fmt.Errorf("%s, %s and Service %s have no addresses of one family", t.from.name, t.node.name, name)
	}
	t.addr = t.node.addrs[i]
	return nil
}

// addrOrFamily is the address that the packet is for; of a headless Service one of the
// family that its client has.
func (t *toService) addrOrFamily() netip.Addr {
	if t.addr.IsValid() || len(t.from.addrs) == 0 {
		return t.addr
	}
	return t.from.addrs[0]
}

func (t *toService) packet() string {
	src := "?"
	if i := slices.IndexFunc(t.from.addrs, func(a netip.Addr) bool { return a.Is4() == t.addrOrFamily().Is4() }); i >= 0 {
		src = t.from.addrs[i].String()
	}
	dst := t.detail.Key.Namespace + "/" + t.detail.Key.Name
	if t.addr.IsValid() {
		dst = t.addr.String()
	}
	if t.atNode() {
		return fmt.Sprintf("%s %s → %s port %d (node port of Service %s/%s)", strings.ToLower(t.port.Protocol), src, dst, t.port.NodePort, t.detail.Key.Namespace, t.detail.Key.Name)
	}
	return fmt.Sprintf("%s %s → %s port %d (Service %s/%s)", strings.ToLower(t.port.Protocol), src, dst, t.port.Port, t.detail.Key.Namespace, t.detail.Key.Name)
}

// announced finds out how nodes announce the address.
func (s *Server) announced(t *toService) {
	err := errors.New("BGP is disabled on this host")
	if s.cfg.BGP != nil {
		t.announcers, err = s.cfg.BGP.Announcers(t.detail.Key, t.addr)
	}
	if err != nil {
		t.unknown = append(t.unknown, fmt.Sprintf("who announces %s: %v", t.addr, err))
	}
}

// entries lists the nodes whose proxies of Services may take the packet: the client's own,
// or those that announce the address, by itself before by a range (the longest prefix
// wins), and before those that are about to go. Where that is not known they are those with
// endpoints.
func (t *toService) entries(c service.Client) []string {
	if !c.Outside || t.atNode() {
		return []string{c.Node}
	}
	var out []string
	if len(t.unknown) > 0 || t.detail.Headless {
		for _, e := range t.detail.Endpoints {
			out = append(out, e.Node)
		}
		return out
	}
	best := 0
	for _, a := range t.announcers {
		best = max(best, a.Prefix.Bits())
	}
	for _, leaving := range []bool{false, true} {
		for _, a := range t.announcers {
			if a.Prefix.IsValid() && a.Prefix.Bits() == best && a.Leaving == leaving {
				out = append(out, a.Node)
			}
		}
	}
	return out
}

// zone returns the zone of a node, for the hints of endpoints.
func (s *Server) zone(ctx context.Context, node string) string {
	o, err := s.cfg.Store.Get(ctx, store.ResourceKey(store.KindNode, node))
	if err != nil {
		return "" // hints do not count then
	}
	if n, ok := o.Value.(*store.Node); ok {
		return n.Labels[store.LabelZone]
	}
	return ""
}

func (t *toService) proto(c service.Client, choice service.Choice) *apiv1.TracedService {
	out := &apiv1.TracedService{
		Name: t.detail.Key.Namespace + "/" + t.detail.Key.Name, Port: uint32(t.port.Port), Protocol: strings.ToLower(t.port.Protocol), Policy: choice.Policy,
	}
	if t.addr.IsValid() {
		out.Address = t.addr.String()
	}
	if t.atNode() {
		out.NodePort = uint32(t.port.NodePort)
	}
	if c.Outside {
		out.Enters = c.Node
	}
	for _, e := range choice.Of {
		out.Endpoints = append(out.Endpoints, &apiv1.TracedService_Endpoint{Address: e.Addr.String(), Port: uint32(e.Port), Node: e.Node, Pod: e.Pod, Not: e.Not})
	}
	for _, a := range t.announcers {
		x := &apiv1.TracedService_Announcer{Node: a.Node, Leaving: a.Leaving, Reason: a.Why}
		if a.Prefix.IsValid() {
			x.Prefix = a.Prefix.String()
		}
		out.Announcers = append(out.Announcers, x)
	}
	return out
}

// fault returns what is wrong before the packet is on its way to an endpoint; nil: nothing.
func (t *toService) fault(c service.Client, choice service.Choice, entered bool) *doctor.Finding {
	d := t.detail
	name := d.Key.Namespace + "/" + d.Key.Name
	f := &doctor.Finding{Severity: doctor.Critical, Node: c.Node, Object: name}
	look := fmt.Sprintf("kubectl get endpointslices -n %s -l kubernetes.io/service-name=%s -o yaml", d.Key.Namespace, d.Key.Name)
	pods := look
	if d.Selector != "" {
		pods = fmt.Sprintf("kubectl get pods -n %s -l %s -o wide", d.Key.Namespace, d.Selector)
	}
	serves := slices.ContainsFunc(choice.Of, func(e service.Candidate) bool { return e.Ready || e.Serving && e.Terminating })
	all := t.detail.Endpoints
	switch {
	case entered && len(choice.Chosen()) > 0:
		return nil
	case len(all) == 0:
		f.Check, f.What, f.Cure = "no-endpoints", fmt.Sprintf("Service %s has no endpoints", name), pods
		f.Cause = "it has no selector, and no EndpointSlice exists for it"
		if d.Selector != "" {
			f.Cause = "no pod with an address has the labels " + d.Selector
		}
	case !slices.ContainsFunc(all, func(e store.ServiceEndpoint) bool { return e.Ready || e.Serving && e.Terminating }):
		f.Check, f.What, f.Cure = "no-endpoints", fmt.Sprintf("none of the %d endpoints of Service %s is ready: %s", len(all), name, named(all)), pods
		f.Cause = "their pods are not ready: their readiness probes fail, or they have not started"
	case c.Outside && !entered:
		f.Check, f.What = "not-announced", fmt.Sprintf("no node announces %s of Service %s: %s", t.addr, name, t.reasons())
		f.Cause = "routers outside have no route for it by BGP"
		f.Cure = "routerctl get bgpconfiguration default -o yaml # and routerctl bgp advertised on a node"
	case !choiceOfPorts(choice):
		f.Check, f.What, f.Cure = "no-port", fmt.Sprintf("no endpoint of Service %s has the port %q", name, t.port.Name), pods
		f.Cause = "targetPort names a port that no container of its pods has"
	case choice.Local && serves:
		field := "internalTrafficPolicy"
		if strings.HasPrefix(choice.Policy, "external") {
			field = "externalTrafficPolicy"
		}
		f.Check, f.What = "no-local-endpoints", fmt.Sprintf("Service %s has no ready endpoint on %s, and %s", name, cmp.Or(c.Node, "that node"), choice.Policy)
		f.Cause = "the Service proxy on that node drops packets to it"
		f.Cure = fmt.Sprintf(`kubectl patch service -n %s %s -p '{"spec":{%q:"Cluster"}}' # or run a pod of it on every node`, d.Key.Namespace, d.Key.Name, field)
	default:
		f.Check, f.What, f.Cure = "no-endpoints", fmt.Sprintf("Service %s has no endpoint of the family of %s that is ready", name, t.addrOrFamily()), look
		f.Cause = "its ready endpoints have addresses of the other family"
	}
	return f
}

func choiceOfPorts(c service.Choice) bool {
	return len(c.Of) == 0 || slices.ContainsFunc(c.Of, func(e service.Candidate) bool { return e.Port != 0 })
}

// namedMost bounds how many things a sentence names.
const namedMost = 5

// someOf joins names, the first few.
func someOf(list []string) string {
	out := strings.Join(list[:min(len(list), namedMost)], ", ")
	if more := len(list) - namedMost; more > 0 {
		out += fmt.Sprintf(" and %d more", more)
	}
	return out
}

// named names endpoints.
func named(list []store.ServiceEndpoint) string {
	var out []string
	for _, e := range list[:min(len(list), namedMost)] {
		text := e.Addr.String()
		if e.Pod != "" {
			text += " (" + e.Pod + ")"
		}
		out = append(out, text)
	}
	if len(list) > namedMost {
		out = append(out, "…")
	}
	return strings.Join(out, ", ")
}

// reasons says why nodes do not announce the address, each reason once.
func (t *toService) reasons() string {
	var why []string
	nodes := map[string][]string{}
	for _, a := range t.announcers {
		if nodes[a.Why] == nil {
			why = append(why, a.Why)
		}
		nodes[a.Why] = append(nodes[a.Why], a.Node)
	}
	for i, w := range why {
		l := nodes[w]
		who := someOf(l)
		why[i] = fmt.Sprintf("%s (%s)", w, who)
	}
	return cmp.Or(strings.Join(why, "; "), "the datastore has no nodes")
}
