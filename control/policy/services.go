package policy

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/routerd/routerd/dataplane/filter"
	"github.com/routerd/routerd/store"
)

// ServiceKinds lists the kinds that [Calculator.HandleStore] looks at besides [Kinds], where the
// datastore has them: see [Config].
func ServiceKinds() []store.Kind { return []store.Kind{store.KindEndpointSlice} }

// Services says what a datastore tells of the Services of Kubernetes, which rules may name.
type Services uint8

// What it tells.
const (
	NoServices      Services = iota // nothing
	AllServices                     // all: a Service without an EndpointSlice has no endpoints
	BroughtServices                 // what a host brought there: it may not have come yet
)

// serviceName is the key of a Service or of an EndpointSlice.
type serviceName struct{ namespace, name string }

func (n serviceName) String() string { return n.namespace + "/" + n.name }

func compareNames(a, b serviceName) int {
	return cmp.Or(cmp.Compare(a.namespace, b.namespace), cmp.Compare(a.name, b.name))
}

// services are the EndpointSlices of the cluster, the sets that rules which name a Service have, and
// of which of these Services the endpoints are not known.
type services struct {
	tells Services
	lacks bool // nothing is known of any slice

	slices map[serviceName]*slice                     // by their own keys
	of     map[serviceName][]*slice                   // the same by Service
	broken map[serviceName]struct{}                   // slices of which it is not known what they say
	sets   map[serviceName][]*set                     // in use
	users  map[serviceName]map[filter.PolicyID]string // the policies that name a Service, and why its endpoints were not known as each was compiled; "": they were
	named  map[filter.PolicyID][]serviceName          // the same by policy
	doubt  map[serviceName]struct{}                   // Services that are named and may have become known, or ceased to be
}

// slice is an EndpointSlice, as rules are about it.
type slice struct {
	name    serviceName // its own
	service serviceName
	told    bool // who the endpoints are
	addrs   []netip.Addr
	ports   []slicePort
}

type slicePort struct {
	protocol uint8
	port     uint16
}

func (s *services) init(tells Services) {
	s.tells = tells
	s.slices = make(map[serviceName]*slice)
	s.of = make(map[serviceName][]*slice)
	s.broken = make(map[serviceName]struct{})
	s.sets = make(map[serviceName][]*set)
	s.users = make(map[serviceName]map[filter.PolicyID]string)
	s.named = make(map[filter.PolicyID][]serviceName)
	s.doubt = make(map[serviceName]struct{})
}

// setLacks notes whether nothing is known of any slice.
func (s *services) setLacks(lacks bool) {
	if s.lacks == lacks {
		return
	}
	s.lacks = lacks
	for n := range s.users {
		s.doubt[n] = struct{}{}
	}
}

// doubts has it looked again whether the endpoints of a Service are known, if a policy names it.
func (s *services) doubts(n serviceName) {
	if _, named := s.users[n]; named {
		s.doubt[n] = struct{}{}
	}
}

// breaks notes that a slice cannot be read. One of which something was known stays as it was;
// of which Service another one is nobody knows.
func (s *services) breaks(key store.Key) {
	n := serviceName{key.Namespace, key.Name}
	if _, known := s.slices[n]; known {
		return
	}
	s.broken[n] = struct{}{}
	s.doubtsIn(key.Namespace)
}

func (s *services) doubtsIn(namespace string) {
	for n := range s.users {
		if n.namespace == namespace {
			s.doubt[n] = struct{}{}
		}
	}
}

// unknown says why the endpoints of a Service are not known; "": they are.
func (s *services) unknown(n serviceName) string {
	switch {
	case s.tells == NoServices:
		return "EndpointSlices are known only where datastore.kind is kubernetes, or kubernetes.enabled is set"
	case s.lacks:
		return "the datastore has not told of EndpointSlices"
	case s.tells == BroughtServices && len(s.of[n]) == 0:
		return "the datastore has no EndpointSlice of it"
	}
	if of := slices.SortedFunc(maps.Keys(s.broken), compareNames); len(of) > 0 {
		if i := slices.IndexFunc(of, func(b serviceName) bool { return b.namespace == n.namespace }); i >= 0 {
			return fmt.Sprintf("EndpointSlice %s cannot be read, which may be of it", of[i])
		}
	}
	for _, sl := range s.of[n] {
		if !sl.told {
			return fmt.Sprintf("EndpointSlice %s does not say who they are: an earlier version of routerd wrote it", sl.name)
		}
	}
	return ""
}

// put applies an EndpointSlice, or its deletion. What it costs follows its endpoints, where a rule
// in force names the Service.
func (s *services) put(m *members, key store.Key, o *store.EndpointSlice) {
	n := serviceName{key.Namespace, key.Name}
	if _, was := s.broken[n]; was {
		delete(s.broken, n)
		s.doubtsIn(key.Namespace)
	}
	was := s.slices[n]
	now := sliceOf(n, o)
	if now != nil {
		s.slices[n] = now
		s.of[now.service] = append(s.of[now.service], now)
		s.contribute(m, now, true) // first: what stays is not reported
		s.doubts(now.service)
	} else {
		delete(s.slices, n)
	}
	if was == nil {
		return
	}
	s.contribute(m, was, false)
	s.of[was.service] = slices.DeleteFunc(s.of[was.service], func(sl *slice) bool { return sl == was })
	if len(s.of[was.service]) == 0 {
		delete(s.of, was.service)
	}
	s.doubts(was.service)
}

// sliceOf returns what rules are about; nil: nothing.
func sliceOf(name serviceName, o *store.EndpointSlice) *slice {
	if o == nil || o.Service == "" {
		return nil
	}
	out := &slice{name: name, service: serviceName{name.namespace, o.Service}}
	if o.Endpoints == nil {
		return out
	}
	out.told, out.addrs = true, o.Endpoints.Addrs
	if n := len(o.Endpoints.Ports); n > 0 {
		out.ports = make([]slicePort, 0, n)
	}
	for _, p := range o.Endpoints.Ports {
		out.ports = append(out.ports, slicePort{portProtocol(p.Protocol), p.Port})
	}
	return out
}

// portProtocol is the number of a port's protocol: TCP, unless it is one of the others, as in Felix.
func portProtocol(name string) uint8 {
	switch name {
	case "UDP":
		return protoUDP
	case "SCTP":
		return protoSCTP
	}
	return protoTCP
}

// contribute adds the endpoints of a slice to the sets of its Service, or takes them away.
func (s *services) contribute(m *members, sl *slice, add bool) {
	for _, set := range s.sets[sl.service] {
		sl.contribute(set, add)
		m.changed[set] = struct{}{}
	}
}

func (sl *slice) contribute(to *set, add bool) {
	apply := to.remove
	if add {
		apply = to.insert
	}
	for _, a := range sl.addrs {
		p := netip.PrefixFrom(a, a.BitLen())
		if to.def.Type == filter.Nets {
			apply(filter.Member{Prefix: p})
			continue
		}
		for _, port := range sl.ports {
			apply(filter.Member{Prefix: p, Protocol: port.protocol, Port: port.port})
		}
	}
}

// use fills a set that comes into use, and keeps it up to date.
func (s *services) use(to *set) {
	s.sets[to.service] = append(s.sets[to.service], to)
	for _, sl := range s.of[to.service] {
		sl.contribute(to, true)
	}
}

// leave lets go of a set.
func (s *services) leave(of *set) {
	list := slices.DeleteFunc(s.sets[of.service], func(o *set) bool { return o == of })
	if s.sets[of.service] = list; len(list) == 0 {
		delete(s.sets, of.service)
	}
}

// name notes which Services a policy names, as it was compiled.
func (s *services) name(id filter.PolicyID, names []serviceName) {
	for _, n := range s.named[id] {
		if delete(s.users[n], id); len(s.users[n]) == 0 {
			delete(s.users, n)
			delete(s.doubt, n)
		}
	}
	delete(s.named, id)
	if len(names) == 0 {
		return
	}
	s.named[id] = names
	for _, n := range names {
		if s.users[n] == nil {
			s.users[n] = make(map[filter.PolicyID]string, 1)
		}
		s.users[n][id] = s.unknown(n)
	}
}

// settle returns the policies that are to be compiled anew, in order: they name a Service whose
// endpoints have become known, or have ceased to be.
func (s *services) settle() []filter.PolicyID {
	again := make(map[filter.PolicyID]bool)
	for n := range s.doubt {
		now := s.unknown(n)
		for id, was := range s.users[n] {
			if was != now {
				again[id] = true
			}
		}
	}
	clear(s.doubt)
	return slices.SortedFunc(maps.Keys(again), filter.PolicyID.Compare)
}

// Services lists the Services that rules name, in order.
func (c *Calculator) Services() []store.Key {
	var keys []store.Key
	for _, n := range slices.SortedFunc(maps.Keys(c.members.services.users), compareNames) {
		keys = append(keys, store.ServiceKey(n.namespace, n.name))
	}
	return keys
}
