package policy

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	"github.com/projectcalico/api/pkg/lib/numorstring"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/dataplane/filter"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/selector"
)

// members are all endpoints and network sets of the cluster, and the sets that
// are made of them; or all Nodes, and theirs.
type members struct {
	ids   map[store.Key]itemID
	items []item // by id
	free  []itemID
	dirty map[itemID]struct{}

	inherited map[string]map[string]string // the labels that a profile gives its endpoints, by its name
	users     map[string][]itemID          // items by profile, sorted

	matcher *matcher
	byText  map[string]*selected // selectors in use, by canonical form
	byQuery []*selected          // by query
	sets    map[filter.SetID]*set
	changed map[*set]struct{} // to be reported
	gone    []filter.SetID    // likewise

	services services
}

// selected is a selector in use, with the sets that are made of what it
// matches.
type selected struct {
	sel   *selector.Selector
	query queryID
	sets  []*set
}

// item is one endpoint, network set or Node.
type item struct {
	key      store.Key
	own      map[string]string
	implied  []label
	profiles []string // whose labels it inherits
	content           // as it is in the sets
	next     content  // as it is to be
}

// content is what an item brings into sets.
type content struct {
	nets  []netip.Prefix
	ports []namedPort
}

type namedPort struct {
	name     string
	protocol uint8
	port     uint16
}

func (c *content) equal(o content) bool {
	return slices.Equal(c.nets, o.nets) && slices.Equal(c.ports, o.ports)
}

func (m *members) init() {
	m.ids = make(map[store.Key]itemID)
	m.dirty = make(map[itemID]struct{})
	m.inherited = make(map[string]map[string]string)
	m.users = make(map[string][]itemID)
	m.byText = make(map[string]*selected)
	m.sets = make(map[filter.SetID]*set)
	m.changed = make(map[*set]struct{})
	m.matcher = newMatcher(func(q queryID, id itemID, matches bool) {
		for _, s := range m.byQuery[q].sets {
			m.contribute(s, &m.items[id].content, matches)
		}
	})
}

// feed makes a set that is fed by hand.
func (m *members) feed(id filter.SetID) {
	s := newSet(filter.Set{ID: id, Type: filter.Nets, Origin: string(id)})
	s.refs = 1
	m.sets[id] = s
	m.changed[s] = struct{}{}
}

// contribute adds what an item brings to a set, or takes it away.
func (m *members) contribute(s *set, c *content, add bool) {
	apply := s.remove
	if add {
		apply = s.insert
	}
	touched := false
	if s.def.Type == filter.Nets {
		for _, p := range c.nets {
			apply(filter.Member{Prefix: p})
			touched = true
		}
	} else {
		for _, port := range c.ports {
			if port.protocol != s.protocol || !slices.Contains(s.names, port.name) {
				continue
			}
			for _, p := range c.nets {
				apply(filter.Member{Prefix: p, Protocol: port.protocol, Port: port.port})
				touched = true
			}
		}
	}
	if touched {
		m.changed[s] = struct{}{}
	}
}

// replace replaces what is given to a set that is fed by hand.
func (m *members) replace(id filter.SetID, was, now []netip.Prefix) {
	if slices.Equal(was, now) {
		return
	}
	s := m.sets[id]
	for _, p := range now { // first: what stays is not reported
		s.insert(filter.Member{Prefix: p})
	}
	for _, p := range was {
		s.remove(filter.Member{Prefix: p})
	}
	m.changed[s] = struct{}{}
}

// put applies an endpoint, a network set or a Node, or its deletion.
func (m *members) put(c *Calculator, key store.Key, v any) {
	id, known := m.ids[key]
	if v == nil {
		if known {
			m.remove(id)
		}
		return
	}
	if !known {
		if n := len(m.free); n > 0 {
			id, m.free = m.free[n-1], m.free[:n-1]
		} else {
			id = itemID(len(m.items)) //nolint:gosec // memory ends before 2³¹ endpoints
			m.items = append(m.items, item{})
		}
		m.ids[key] = id
	}
	it := &m.items[id]
	it.key = key
	old := it.profiles
	var bad string
	switch o := v.(type) {
	case *store.WorkloadEndpoint:
		it.own, it.implied, it.profiles = o.Labels, workloadLabels(key, &o.Spec), o.Spec.Profiles
		it.next, bad = workloadContent(&o.Spec)
	case *v3.HostEndpoint:
		it.own, it.implied, it.profiles = o.Labels, nil, o.Spec.Profiles
		it.next, bad = hostContent(&o.Spec)
	case *v3.NetworkSet:
		it.own, it.implied, it.profiles = o.Labels, []label{{store.LabelNamespace, key.Namespace}}, []string{store.PrefixNamespace + key.Namespace}
		it.next.ports = nil
		it.next.nets, bad = setNets(o.Spec.Nets)
	case *cluster.Node:
		it.own, it.implied, it.profiles = o.Labels, nil, nil
		it.next.nets = nil
		for _, a := range o.Hosts {
			it.next.nets = append(it.next.nets, netip.PrefixFrom(a, a.BitLen()))
		}
	case *v3.GlobalNetworkSet:
		it.own, it.implied, it.profiles = o.Labels, nil, nil
		it.next.ports = nil
		it.next.nets, bad = setNets(o.Spec.Nets)
	}
	if bad != "" {
		c.problems[key] = bad
	}
	m.use(id, old, it.profiles)
	m.dirty[id] = struct{}{}
}

// use keeps account of who inherits from a profile.
func (m *members) use(id itemID, old, profiles []string) {
	if slices.Equal(old, profiles) {
		return
	}
	for _, p := range old {
		if list := removeSorted(m.users[p], id); len(list) > 0 {
			m.users[p] = list
		} else {
			delete(m.users, p)
		}
	}
	for _, p := range profiles {
		if _, twice := slices.BinarySearch(m.users[p], id); !twice {
			m.users[p] = insertSorted(m.users[p], id)
		}
	}
}

func (m *members) remove(id itemID) {
	m.matcher.remove(id) // takes its content out of the sets
	it := &m.items[id]
	m.use(id, it.profiles, nil)
	delete(m.ids, it.key)
	delete(m.dirty, id)
	*it = item{}
	m.free = append(m.free, id)
}

// putProfile applies the labels that a profile gives its endpoints.
func (m *members) putProfile(name string, p *v3.Profile) {
	var inherited map[string]string
	if p != nil {
		inherited = p.Spec.LabelsToApply
	}
	if maps.Equal(m.inherited[name], inherited) {
		return
	}
	if inherited == nil {
		delete(m.inherited, name)
	} else {
		m.inherited[name] = inherited
	}
	for _, id := range m.users[name] {
		m.dirty[id] = struct{}{}
	}
}

// labelsOf gathers what selectors see of an item.
func (m *members) labelsOf(own map[string]string, implied []label, profiles []string) *labels {
	l := &labels{own: own, implied: implied}
	for _, p := range profiles {
		if inherited := m.inherited[p]; len(inherited) > 0 {
			l.inherited = append(l.inherited, inherited)
		}
	}
	return l
}

// settle brings what was applied into the sets.
func (m *members) settle() {
	for _, id := range sortedKeys(m.dirty, cmp.Compare[itemID]) {
		it := &m.items[id]
		if !it.equal(it.next) {
			for _, q := range m.matcher.matches(id) {
				for _, s := range m.byQuery[q].sets {
					m.contribute(s, &it.content, false)
				}
			}
			m.matcher.forget(id)
			it.content = it.next
		}
		m.matcher.put(id, m.labelsOf(it.own, it.implied, it.profiles))
	}
}

// acquire takes a set into use.
func (m *members) acquire(d setDef) {
	if s, ok := m.sets[d.ID]; ok {
		s.refs++
		return
	}
	s := newSet(d.Set)
	s.names, s.protocol, s.service, s.refs = d.names, d.protocol, d.service, 1
	m.sets[d.ID] = s
	m.changed[s] = struct{}{}
	if d.service != (serviceName{}) {
		m.services.use(s)
	}
	if d.sel == nil {
		return
	}
	text := d.sel.String()
	sd := m.byText[text]
	if sd != nil {
		m.matcher.each(sd.query, func(id itemID) { m.contribute(s, &m.items[id].content, true) })
	} else {
		q, found := m.matcher.add(d.sel)
		sd = &selected{sel: d.sel, query: q}
		m.byText[text] = sd
		for len(m.byQuery) <= int(q) {
			m.byQuery = append(m.byQuery, nil)
		}
		m.byQuery[q] = sd
		for _, id := range found {
			m.contribute(s, &m.items[id].content, true)
		}
	}
	s.sel = sd
	sd.sets = append(sd.sets, s)
}

// release gives a set back; the last one takes it away.
func (m *members) release(id filter.SetID) {
	s := m.sets[id]
	if s.refs--; s.refs > 0 {
		return
	}
	delete(m.sets, id)
	delete(m.changed, s)
	if !s.fresh {
		m.gone = append(m.gone, id)
	}
	if s.service != (serviceName{}) {
		m.services.leave(s)
	}
	if s.sel == nil {
		return
	}
	s.sel.sets = slices.DeleteFunc(s.sel.sets, func(o *set) bool { return o == s })
	if len(s.sel.sets) == 0 {
		m.matcher.drop(s.sel.query)
		m.byQuery[s.sel.query] = nil
		delete(m.byText, s.sel.sel.String())
	}
}

// emit reports the sets and members that came and went. With hold those that selectors make
// stay as they are.
func (m *members) emit(hold bool) (put []filter.Set, changes []filter.MemberChange, del []filter.SetID) {
	byID := func(a, b *set) int { return cmp.Compare(a.def.ID, b.def.ID) }
	for _, s := range sortedKeys(m.changed, byID) {
		if hold && s.sel != nil && !s.fresh {
			m.changed[s] = struct{}{}
			continue
		}
		if s.fresh {
			put = append(put, s.def)
		}
		if c := s.take(); len(c.Add)+len(c.Del) > 0 {
			changes = append(changes, c)
		}
	}
	del, m.gone = m.gone, nil
	slices.Sort(del)
	return put, changes, del
}

// published adds the sets as they were reported to a ruleset.
func (m *members) published(r *filter.Ruleset) {
	for id, s := range m.sets {
		if s.fresh {
			continue
		}
		r.Sets[id] = s.def
		r.Members[id] = make(map[filter.Member]struct{}, len(s.count))
		for _, m := range s.visible() {
			r.Members[id][m] = struct{}{}
		}
		for m, come := range s.pending {
			if come {
				delete(r.Members[id], m)
			} else {
				r.Members[id][m] = struct{}{}
			}
		}
	}
}

func workloadLabels(key store.Key, s *store.WorkloadEndpointSpec) []label {
	l := []label{{store.LabelNamespace, key.Namespace}, {store.LabelOrchestrator, s.Orchestrator}}
	if s.ServiceAccountName != "" {
		l = append(l, label{store.LabelServiceAccount, s.ServiceAccountName})
	}
	return l
}

func workloadContent(s *store.WorkloadEndpointSpec) (content, string) {
	var c content
	var bad string
	for _, n := range s.IPNetworks {
		if p, ok := parseNet(n); ok && p.IsSingleIP() {
			c.nets = append(c.nets, p)
		} else {
			bad = "spec.ipNetworks: " + n + " is not one address; it is left out"
		}
	}
	for _, p := range s.Ports {
		c.addPort(p.Name, p.Protocol, p.Port)
	}
	return c, bad
}

func hostContent(s *v3.HostEndpointSpec) (content, string) {
	var c content
	var bad string
	for _, n := range s.ExpectedIPs {
		if a, ok := parseAddr(n); ok {
			c.nets = append(c.nets, netip.PrefixFrom(a, a.BitLen()))
		} else {
			bad = "spec.expectedIPs: " + n + " is no address; it is left out"
		}
	}
	for _, p := range s.Ports {
		c.addPort(p.Name, p.Protocol, p.Port)
	}
	return c, bad
}

func (c *content) addPort(name string, protocol numorstring.Protocol, port uint16) {
	if n, err := protocolOf(&protocol); err == nil && name != "" {
		c.ports = append(c.ports, namedPort{name, n, port})
	}
}

func setNets(list []string) (nets []netip.Prefix, bad string) {
	for _, n := range list {
		if p, ok := parseNet(n); ok {
			nets = append(nets, p)
		} else {
			bad = "spec.nets: " + n + " is no CIDR and no address; it is left out"
		}
	}
	return nets, bad
}

func compareKeys(a, b store.Key) int {
	return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
}
