package bgp

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strconv"
	"time"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/control/service"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/selector"
)

// Kinds lists what a [View] follows of the cluster.
func Kinds() []store.Kind {
	return []store.Kind{
		store.KindNode, store.KindBGPPeer, store.KindBGPConfiguration,
		store.KindBGPFilter, store.KindIPPool, store.KindIPAMAffinity, store.KindIPAMBlock,
	}
}

// View is what the store says that concerns BGP. It keeps little of each
// block, so that a large cluster costs little memory. A View is not safe for
// concurrent use; the zero value is empty and ready.
type View struct {
	nodes      map[string]nodeFacts
	peers      map[string]peerSpec
	confs      map[string]confFacts
	filters    map[string]Filter
	pools      map[string]pool
	affinities map[string]map[netip.Prefix]bool // node → block → confirmed
	blocks     map[netip.Prefix]block
	borrowed   map[string]map[netip.Addr]bool // node → addresses of others' blocks that are assigned to it
	keys       Keyring                        // of this node
	synced     bool                           // the datastore's state is complete in it
	fromDisk   bool                           // what the disk has of it is

	hasServices bool // the datastore has Services of Kubernetes
	services    *service.Table
	cidrs       map[string][]string // of ServiceCIDRs
	damper      service.Damper
	held        map[netip.Addr]bool // addresses of Services that are not announced yet

	touched map[netip.Addr]bool // addresses of Services that may be announced otherwise than when they were last taken
	other   bool                // so may something else

	callers   []netip.Addr // who has connected from a BGPPeer's range, in the order in which they did
	leaving   bool         // the host is drained, whatever its Node says
	injection injection    // what others on the host may and do have it announce

	self     string      // Apply reports of blocks and affinities only what concerns this node; empty: all
	idx      *index      // nil: to be made
	reflects *reflection // likewise

	revision uint64          // counts the changes of nodes, peers, confs and filters, and of where they are from
	moved    map[string]bool // nodes that have changed after the revision since, after which nothing else has
	since    uint64
}

// peerSpec is a BGPPeer with what the API module's type lacks.
type peerSpec struct {
	v3.BGPPeerSpec
	keepalive time.Duration
	nodes     *selector.Selector // of nodeSelector; nil when it is empty or wrong
	wrong     string             // why nodeSelector cannot be read
	peerSel   *selector.Selector // of peerSelector; likewise
	wrongPeer string

	// What Calico's BGPPeer has no field for: annotations.
	maxPrefixes uint32
	holdTime    time.Duration
	staleTime   time.Duration
	device      string
	listen      store.ListenRange
	extended    bool
	bfd         store.BFD
	ao          []store.TCPAOKey
	wrongNote   string // why an annotation cannot be read
	linkNote    string // why those of the link or of a range make no sense
}

func specOf(p *v3.BGPPeer, raw []byte) (peerSpec, error) {
	s := peerSpec{BGPPeerSpec: p.Spec}
	var err error
	if s.keepalive, err = keepaliveTime(raw); err != nil {
		return peerSpec{}, err
	}
	if p.Spec.NodeSelector != "" {
		if s.nodes, err = selector.Parse(p.Spec.NodeSelector); err != nil {
			s.wrong = fmt.Sprintf("spec.nodeSelector: %v", err)
		}
	}
	if p.Spec.PeerSelector != "" {
		if s.peerSel, err = selector.Parse(p.Spec.PeerSelector); err != nil {
			s.wrongPeer = fmt.Sprintf("spec.peerSelector: %v", err)
		}
	}
	s.annotate(p.Annotations)
	return s, nil
}

// annotate reads our own settings of a peer.
func (s *peerSpec) annotate(notes map[string]string) {
	wrong := func(key, value, want string) {
		s.wrongNote = fmt.Sprintf("annotation %s is %q: want %s", key, value, want)
	}
	s.device = notes[store.AnnotationPeerInterface]
	s.extended = notes[store.AnnotationExtendedNextHop] == "true"
	s.listen = store.ListenRangeOf(notes)
	if err := cmp.Or(store.CheckPeerLink(notes, s.BGPPeerSpec), store.CheckListenRange(notes, s.BGPPeerSpec)); err != nil {
		s.linkNote = err.Error()
	}
	var err error
	if s.bfd, err = bfdOf(notes); err != nil {
		s.wrongNote = err.Error()
	}
	if s.ao, err = store.TCPAOOf(notes, s.BGPPeerSpec); err != nil {
		s.wrongNote = err.Error()
	}
	if v, ok := notes[store.AnnotationMaxPrefixes]; ok {
		n, err := strconv.ParseUint(v, 10, 32)
		if s.maxPrefixes = uint32(n); err != nil || n == 0 {
			wrong(store.AnnotationMaxPrefixes, v, "a number of prefixes from 1 on")
		}
	}
	for _, d := range []struct {
		key      string
		to       *time.Duration
		min, max time.Duration
		want     string
	}{
		{store.AnnotationHoldTime, &s.holdTime, 3 * time.Second, 65535 * time.Second, "a duration from 3s to 65535s (RFC 4271 section 4.2)"},
		{store.AnnotationStaleTime, &s.staleTime, time.Second, (1<<24 - 1) * time.Second, "a duration from 1s to 16777215s (RFC 9494 section 3)"},
	} {
		v, ok := notes[d.key]
		if !ok {
			continue
		}
		if *d.to, err = time.ParseDuration(v); err != nil || *d.to < d.min || *d.to > d.max {
			wrong(d.key, v, d.want)
		}
	}
}

// nodeFacts is what BGP needs of a Node; its status, say, is not.
type nodeFacts struct {
	bgp     bool         // it has spec.bgp
	addr    netip.Prefix // its IPv4 address with the subnet's length; invalid: none
	addr6   netip.Prefix // likewise IPv6
	asn     uint32       // 0: the global one
	cluster string       // routeReflectorClusterID
	ours    bool         // it runs routerd
	keys    string       // which of the cluster's keys it has
	labels  map[string]string
	drain   store.Drain
	away    bool // it counts as gone, where the datastore is Kubernetes' API

	reflection store.NodeReflection
}

func factsOf(n *cluster.Node) (nodeFacts, error) {
	f := nodeFacts{
		bgp: n.BGP, addr: n.Addr.IPv4, addr6: n.Addr.IPv6, asn: n.ASN, cluster: n.ClusterID, ours: n.Encaps.Published, keys: n.BGPKeys,
		labels: n.Labels, drain: n.Drain, away: n.Away, reflection: n.Reflection,
	}
	return f, n.AddrErr
}

// addrs lists the node's addresses, IPv4 first.
func (f nodeFacts) addrs() []netip.Addr {
	var out []netip.Addr
	for _, p := range []netip.Prefix{f.addr, f.addr6} {
		if p.IsValid() {
			out = append(out, p.Addr())
		}
	}
	return out
}

type pool struct {
	cidr     netip.Prefix
	noExport bool
}

// block is what BGP needs of an IPAM block.
type block struct {
	holder   string             // node that holds it; empty: none
	borrowed []cluster.Borrowed // in order
}

// Synced reports whether the present state of the store is complete in v.
func (v *View) Synced() bool { return v.synced }

// Apply applies a step and reports whether anything that [Desired] looks at
// changed. What cannot be decoded or makes no sense leaves the last good value
// in place and is reported in the error, which names the keys; the rest of the
// step counts.
func (v *View) Apply(s cluster.Step) (changed bool, err error) {
	v.init()
	var errs []error
	for _, e := range s.Changes {
		if e.Err != nil {
			errs = append(errs, fmt.Errorf("%s: keep what was known: %w", e.Key, e.Err))
			continue
		}
		c, err := v.event(e)
		changed = changed || c
		v.other = v.other || c && e.Key.Kind != store.KindService && e.Key.Kind != store.KindEndpointSlice
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: keep what was known: %w", e.Key, err))
		}
	}
	switch disk := s.Source == cluster.Disk; {
	case !s.Synced:
	case disk && !v.fromDisk:
		v.fromDisk, v.other, changed = true, true, true
		v.sessionsChanged()
	case !disk && !v.synced:
		v.synced, v.fromDisk, v.other, changed = true, false, true, true
		v.sessionsChanged()
	}
	return changed, errors.Join(errs...)
}

func (v *View) init() {
	if v.nodes != nil {
		return
	}
	v.nodes = map[string]nodeFacts{}
	v.peers = map[string]peerSpec{}
	v.confs = map[string]confFacts{}
	v.filters = map[string]Filter{}
	v.pools = map[string]pool{}
	v.affinities = map[string]map[netip.Prefix]bool{}
	v.blocks = map[netip.Prefix]block{}
	v.borrowed = map[string]map[netip.Addr]bool{}
	v.services, v.cidrs = service.NewTable(v.self), map[string][]string{}
}

func (v *View) event(e *cluster.Change) (bool, error) {
	was := v.nodes[e.Key.Name] // where it is of a Node
	changed, err := v.take(e)
	if !changed {
		return false, err
	}
	switch e.Key.Kind {
	case store.KindNode:
		v.nodeChanged(e.Key.Name, was)
	case store.KindBGPPeer:
		v.idx = nil
		v.sessionsChanged()
	case store.KindBGPConfiguration, store.KindBGPFilter:
		v.sessionsChanged()
	}
	return true, err
}

func (v *View) take(e *cluster.Change) (bool, error) {
	switch e.Key.Kind {
	case store.KindNode:
		return set(v.nodes, e, factsOf)
	case store.KindBGPPeer:
		return set(v.peers, e, func(p *v3.BGPPeer) (peerSpec, error) {
			return specOf(p, e.Object.Raw)
		})
	case store.KindBGPConfiguration:
		changed, err := set(v.confs, e, func(c *v3.BGPConfiguration) (confFacts, error) { return confOf(c, e.Object.Raw) })
		return v.rangesChanged() || changed, err
	case store.KindBGPFilter:
		return set(v.filters, e, func(*v3.BGPFilter) (Filter, error) { return parseFilter(e.Object.Raw) })
	case store.KindIPPool:
		return set(v.pools, e, func(p *cluster.Pool) (pool, error) { return pool{cidr: p.CIDR, noExport: p.Hidden}, p.Err })
	case store.KindIPAMAffinity:
		return v.affinity(e)
	case store.KindIPAMBlock:
		return v.block(e)
	case store.KindService, store.KindEndpointSlice, store.KindServiceCIDR:
		return v.service(e)
	}
	return false, nil // a kind that the daemon's one watch has for others
}

// set puts what make has of an event's object in m under the object's name, or
// takes it out when the object is gone.
func set[T any, V any](m map[string]V, e *cluster.Change, makeV func(T) (V, error)) (bool, error) {
	if e.Deleted() {
		_, had := m[e.Key.Name]
		delete(m, e.Key.Name)
		return had, nil
	}
	obj, ok := e.Value.(T)
	if !ok {
		return false, fmt.Errorf("value is a %T", e.Value)
	}
	val, err := makeV(obj)
	if err != nil {
		return false, err
	}
	if was, had := m[e.Key.Name]; had && reflect.DeepEqual(was, val) {
		return false, nil
	}
	m[e.Key.Name] = val
	return true, nil
}

// keepaliveTime reads spec.keepaliveTime, which the API module's type lacks.
func keepaliveTime(raw []byte) (time.Duration, error) {
	if len(raw) == 0 {
		return 0, nil
	}
	var o struct {
		Spec struct {
			KeepaliveTime string `json:"keepaliveTime"`
		} `json:"spec"`
	}
	if err := json.Unmarshal(raw, &o); err != nil {
		return 0, fmt.Errorf("spec.keepaliveTime: want a duration such as 20s: %w", err)
	}
	if o.Spec.KeepaliveTime == "" {
		return 0, nil
	}
	d, err := time.ParseDuration(o.Spec.KeepaliveTime)
	if err != nil {
		return 0, fmt.Errorf("spec.keepaliveTime %q: want a duration such as 20s", o.Spec.KeepaliveTime)
	}
	return d, nil
}

func (v *View) affinity(e *cluster.Change) (bool, error) {
	cidr, node := e.Key.CIDR(), e.Key.Namespace
	if !cidr.IsValid() {
		return false, errors.New("the key names no CIDR")
	}
	confirmed := false
	if !e.Deleted() {
		a, ok := e.Value.(*store.Affinity)
		if !ok {
			return false, fmt.Errorf("value is a %T", e.Value)
		}
		confirmed = a.Confirmed() && !a.Deleted
	}
	was := v.affinities[node][cidr]
	switch {
	case confirmed == was:
		return false, nil
	case confirmed && v.affinities[node] == nil:
		v.affinities[node] = map[netip.Prefix]bool{cidr: true}
	case confirmed:
		v.affinities[node][cidr] = true
	default:
		delete(v.affinities[node], cidr)
	}
	return v.self == "" || v.self == node, nil
}

func (v *View) block(e *cluster.Change) (bool, error) {
	cidr := e.Key.CIDR()
	if !cidr.IsValid() {
		return false, errors.New("the key names no CIDR")
	}
	was, had := v.blocks[cidr]
	if e.Deleted() {
		delete(v.blocks, cidr)
		v.lend(was, block{})
		return had && v.concerns(cidr, was, block{}), nil
	}
	b, ok := e.Value.(*cluster.Block)
	if !ok {
		return false, fmt.Errorf("value is a %T", e.Value)
	}
	now := block{b.Holder, b.Borrowed}
	if had && was.holder == now.holder && slices.Equal(was.borrowed, now.borrowed) {
		return false, nil
	}
	v.blocks[cidr] = now
	v.lend(was, now)
	return v.concerns(cidr, was, now), nil
}
