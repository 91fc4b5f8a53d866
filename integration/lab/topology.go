package lab

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"regexp"
	"slices"

	"sigs.k8s.io/yaml"

	"github.com/routerd/routerd/store"
)

// Topology says what a lab consists of. Complete fills in what is left out.
type Topology struct {
	Racks []Rack `json:"racks,omitempty"` // default: rack1 10.1.0.0/24, rack2 10.2.0.0/24
	Nodes []Node `json:"nodes,omitempty"` // default: node1 and node2 in rack1, node3 in rack2
	Pods  *int   `json:"pods,omitempty"`  // per node; default 2
	Pool  Pool   `json:"pool,omitzero"`
	Pool6 *Pool  `json:"pool6,omitempty"` // of IPv6; with it pods have addresses of both families

	// Underlay says which addresses the racks and hosts have: ipv4, ipv6 or
	// dual. Default ipv4.
	Underlay Underlay `json:"underlay,omitempty"`

	// Kubeconfig is a file by which every host reaches the API of Kubernetes, which
	// is then the store. Nodes of the hosts' names have to be there. Default: the
	// first host runs the store.
	Kubeconfig string `json:"kubeconfig,omitempty"`

	// Join says whether the hosts beside the first join it with routerd join, as an
	// operator has them, and so have certificates of their own: those that become
	// members of the datastore need them. Default: they share the first host's.
	Join bool `json:"join,omitempty"`

	// APIGroup is that of the store's custom resources there. Default: as Calico's
	// clients choose.
	APIGroup string `json:"apiGroup,omitempty"`

	Spine Spine `json:"spine,omitzero"`
	MTU   int   `json:"mtu,omitempty"` // of the underlay, in bytes; default 1500
}

// Rack is one subnet of the underlay. The spine has its first address.
type Rack struct {
	Name  string       `json:"name"`
	CIDR  netip.Prefix `json:"cidr,omitzero"`
	CIDR6 netip.Prefix `json:"cidr6,omitzero"` // default: fd00:1::/64, fd00:2::/64, …
	MTU   int          `json:"mtu,omitempty"`  // of the spine's interface, in bytes; default: the topology's
	NAT   *NAT         `json:"nat,omitempty"`  // default: the spine routes to the rack as it is
}

// Gateway is the spine's address in the rack.
func (r Rack) Gateway() netip.Addr { return r.CIDR.Addr().Next() }

// Gateway6 is the spine's IPv6 address in the rack.
func (r Rack) Gateway6() netip.Addr { return r.CIDR6.Addr().Next() }

// Node is one host.
type Node struct {
	Name    string     `json:"name"`
	Rack    string     `json:"rack"`
	Address netip.Addr `json:"address,omitzero"` // default: .11, .12, … in the rack

	Address6 netip.Addr `json:"address6,omitzero"` // default: ::11, ::12, … in the rack

	Pods *int `json:"pods,omitempty"` // default: the topology's
	MTU  int  `json:"mtu,omitempty"`  // of the uplink, in bytes; default: the rack's

	// Config is laid over the daemon's configuration that the lab writes: maps
	// are merged, null removes, anything else replaces.
	Config map[string]any `json:"config,omitempty"`
}

// Pool is the default pool.
type Pool struct {
	CIDR          netip.Prefix        `json:"cidr,omitzero"`           // default 192.168.0.0/16
	Encapsulation store.Encapsulation `json:"encapsulation,omitempty"` // default VXLANCrossSubnet
	BlockSize     int                 `json:"blockSize,omitempty"`     // default 26
}

// Spine is the router between the racks.
type Spine struct {
	// BGP says whether the spine runs BIRD and peers with every node, as a
	// top-of-rack switch would. Default: when the pool is not encapsulated.
	BGP      *bool  `json:"bgp,omitempty"`
	ASNumber uint32 `json:"asNumber,omitempty"` // default 64999

	// ECMP has the spine share traffic, by flows, among the nodes with the best paths of a
	// prefix, and leave those that are about to go (GRACEFUL_SHUTDOWN, RFC 8326).
	ECMP bool `json:"ecmp,omitempty"`
}

// What a topology that says nothing consists of.
const (
	DefaultNodes         = 3
	DefaultPods          = 2
	DefaultEncapsulation = store.VXLANCrossSubnet

	defaultMTU     = 1500
	defaultBlock   = 26
	defaultSpineAS = 64999
	nodeASNumber   = 64512 // what routerd uses when nothing else is said
	firstNode      = 11    // last byte of a rack's first node
	firstNode6     = 0x11  // the same of its IPv6 address
	spineName      = "spine"
)

// DefaultTopology returns the topology with n nodes: node1 and node2 in the
// first rack, node3 in the second, further ones alternate between the racks,
// beginning with the first.
func DefaultTopology(n int) Topology {
	t := Topology{Racks: defaultRacks()}
	for i := range n {
		rack := t.Racks[0].Name
		if i >= 2 && i%2 == 0 {
			rack = t.Racks[1].Name
		}
		t.Nodes = append(t.Nodes, Node{Name: fmt.Sprintf("node%d", i+1), Rack: rack})
	}
	return t
}

func defaultRacks() []Rack {
	return []Rack{
		{Name: "rack1", CIDR: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 1, 0, 0}), 24)},
		{Name: "rack2", CIDR: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 2, 0, 0}), 24)},
	}
}

// LoadTopology reads a topology from a YAML file. Unknown fields are an error.
func LoadTopology(path string) (Topology, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return Topology{}, fmt.Errorf("read topology: %w", err)
	}
	var t Topology
	if err := yaml.UnmarshalStrict(b, &t); err != nil {
		return Topology{}, fmt.Errorf("read topology %s: %w", path, err)
	}
	return t, nil
}

// Complete returns the topology with everything filled in, or what is wrong
// with it: all faults, each naming its field.
func (t Topology) Complete() (Topology, error) {
	t.Racks, t.Nodes = slices.Clone(t.Racks), slices.Clone(t.Nodes)
	t.defaults()
	if err := errors.Join(t.checkPool(), t.checkRacks(), t.checkNodes(), t.checkIPv6(), t.checkNAT()); err != nil {
		return Topology{}, err
	}
	return t, nil
}

func (t *Topology) defaults() {
	if len(t.Racks) == 0 {
		t.Racks = defaultRacks()
	}
	if len(t.Nodes) == 0 {
		t.Nodes = DefaultTopology(DefaultNodes).Nodes
	}
	setDefault(&t.MTU, defaultMTU)
	setDefault(&t.Pool.CIDR, netip.PrefixFrom(netip.AddrFrom4([4]byte{192, 168, 0, 0}), 16))
	setDefault(&t.Pool.Encapsulation, DefaultEncapsulation)
	setDefault(&t.Pool.BlockSize, defaultBlock)
	setDefault(&t.Spine.ASNumber, defaultSpineAS)
	setDefault(&t.Pods, new(DefaultPods))
	setDefault(&t.Underlay, UnderlayIPv4)
	t.defaultPool6()
	setDefault(&t.Spine.BGP, new(t.Pool.Encapsulation == store.Direct || t.Pool6 != nil && t.Pool6.Encapsulation == store.Direct))

	for i := range t.Racks {
		setDefault(&t.Racks[i].MTU, t.MTU)
	}
	t.defaultCIDRs()
	t.defaultNAT()
	taken := make(map[netip.Addr]bool)
	for _, n := range t.Nodes {
		taken[n.Address], taken[n.Address6] = true, true
	}
	for i := range t.Nodes {
		n := &t.Nodes[i]
		setDefault(&n.Pods, t.Pods)
		rack, ok := t.rack(n.Rack)
		setDefault(&n.MTU, rack.MTU)
		if !ok {
			continue
		}
		if !n.Address.IsValid() && rack.CIDR.Addr().Is4() {
			n.Address = freeAddress(rack.CIDR, firstNode, taken)
		}
		if !n.Address6.IsValid() && rack.CIDR6.Addr().Is6() {
			n.Address6 = freeAddress(rack.CIDR6, firstNode6, taken)
		}
	}
}

// freeAddress takes the first address of a prefix, from the one with this
// number on, that is not taken.
func freeAddress(p netip.Prefix, from int, taken map[netip.Addr]bool) netip.Addr {
	a := p.Masked().Addr()
	for range from {
		a = a.Next()
	}
	for taken[a] {
		a = a.Next()
	}
	taken[a] = true
	return a
}

func setDefault[T comparable](v *T, d T) {
	var zero T
	if *v == zero {
		*v = d
	}
}

func (t Topology) rack(name string) (Rack, bool) {
	i := slices.IndexFunc(t.Racks, func(r Rack) bool { return r.Name == name })
	if i < 0 {
		return Rack{}, false
	}
	return t.Racks[i], true
}

func (t Topology) node(name string) (Node, bool) {
	i := slices.IndexFunc(t.Nodes, func(n Node) bool { return n.Name == name })
	if i < 0 {
		return Node{}, false
	}
	return t.Nodes[i], true
}

func (t Topology) checkPool() error {
	var errs []error
	if _, err := store.ParseEncapsulation(string(t.Pool.Encapsulation)); err != nil {
		errs = append(errs, fmt.Errorf("pool.encapsulation: %w", err))
	}
	if c := t.Pool.CIDR; !c.Addr().Is4() || c != c.Masked() {
		errs = append(errs, fmt.Errorf("pool.cidr %s: want an IPv4 prefix without host bits, such as 192.168.0.0/16", c))
	}
	if t.Pool.BlockSize < 20 || t.Pool.BlockSize > 32 || t.Pool.BlockSize < t.Pool.CIDR.Bits() {
		errs = append(errs, fmt.Errorf("pool.blockSize %d: want 20 to 32, and not shorter than the pool's own prefix", t.Pool.BlockSize))
	}
	errs = append(errs, checkMTU("mtu", t.MTU))
	if *t.Pods < 0 {
		errs = append(errs, fmt.Errorf("pods %d: want 0 or more", *t.Pods))
	}
	return errors.Join(errs...)
}

func checkMTU(field string, mtu int) error {
	if mtu < 576 || mtu > 65535 {
		return fmt.Errorf("%s %d: want 576 to 65535 bytes", field, mtu)
	}
	return nil
}

func (t Topology) checkRacks() error {
	var errs []error
	for i, r := range t.Racks {
		at := fmt.Sprintf("racks[%d] (%s)", i, r.Name)
		if err := checkName(r.Name); err != nil {
			errs = append(errs, fmt.Errorf("racks[%d].name: %w", i, err))
		}
		errs = append(errs, checkMTU(at+".mtu", r.MTU))
		if !t.Underlay.has4() {
			continue
		}
		if !r.CIDR.Addr().Is4() || r.CIDR != r.CIDR.Masked() || r.CIDR.Bits() > 28 {
			errs = append(errs, fmt.Errorf("%s.cidr %s: want an IPv4 prefix without host bits, /28 or shorter", at, r.CIDR))
			continue
		}
		if r.CIDR.Overlaps(t.Pool.CIDR) {
			errs = append(errs, fmt.Errorf("%s.cidr %s overlaps pool.cidr %s: choose another", at, r.CIDR, t.Pool.CIDR))
		}
		for j, o := range t.Racks[:i] {
			if o.Name == r.Name {
				errs = append(errs, fmt.Errorf("%s.name is also that of racks[%d]", at, j))
			}
			if o.CIDR.Overlaps(r.CIDR) {
				errs = append(errs, fmt.Errorf("%s.cidr %s overlaps that of racks[%d], %s", at, r.CIDR, j, o.CIDR))
			}
		}
	}
	return errors.Join(errs...)
}

func (t Topology) checkNodes() error {
	var errs []error
	spaces := make(map[string]string) // namespace without the lab's name → whose it is
	for _, r := range t.routers() {
		spaces[r] = "rack " + r
	}
	for i, n := range t.Nodes {
		at := fmt.Sprintf("nodes[%d] (%s)", i, n.Name)
		errs = append(errs, t.checkNode(i, n, at)...)
		for _, s := range append([]string{n.Name}, podSpaces(n)...) {
			if other, ok := spaces[s]; ok {
				errs = append(errs, fmt.Errorf("%s needs the namespace name -%s, which %s has: rename one", at, s, other))
				break
			}
			spaces[s] = at
		}
	}
	return errors.Join(errs...)
}

func podSpaces(n Node) []string {
	var s []string
	for i := range max(*n.Pods, 0) {
		s = append(s, n.Name+"-"+podName(i))
	}
	return s
}

func (t Topology) checkNode(i int, n Node, at string) []error {
	var errs []error
	if err := checkName(n.Name); err != nil {
		errs = append(errs, fmt.Errorf("nodes[%d].name: %w", i, err))
	}
	if _, ok := t.rack(n.Name); ok || n.Name == spineName {
		errs = append(errs, fmt.Errorf("%s.name: the name of a rack or of the spine; choose another", at))
	}
	if *n.Pods < 0 {
		errs = append(errs, fmt.Errorf("%s.pods %d: want 0 or more", at, *n.Pods))
	}
	if n.MTU != 0 { // 0: of a rack that does not exist, which is said below
		errs = append(errs, checkMTU(at+".mtu", n.MTU))
	}
	rack, ok := t.rack(n.Rack)
	if !ok {
		var names []string
		for _, r := range t.Racks {
			names = append(names, r.Name)
		}
		return append(errs, fmt.Errorf("%s.rack %q: want one of %v", at, n.Rack, names))
	}
	if !t.Underlay.has4() {
		return errs
	}
	if !rack.CIDR.Contains(n.Address) || n.Address == rack.CIDR.Addr() || n.Address == rack.Gateway() || n.Address == lastAddr(rack.CIDR) {
		errs = append(errs, fmt.Errorf("%s.address %s: want a host address of %s other than the spine's, %s", at, n.Address, rack.CIDR, rack.Gateway()))
	}
	for j, o := range t.Nodes[:i] {
		if o.Address == n.Address && n.Address.IsValid() {
			errs = append(errs, fmt.Errorf("%s.address %s is also that of nodes[%d] (%s)", at, n.Address, j, o.Name))
		}
	}
	return errs
}

// lastAddr is the broadcast address of an IPv4 prefix.
func lastAddr(p netip.Prefix) netip.Addr {
	if !p.Addr().Is4() {
		return netip.Addr{}
	}
	b := p.Masked().Addr().As4()
	for bit := p.Bits(); bit < 32; bit++ {
		b[bit/8] |= 0x80 >> (bit % 8)
	}
	return netip.AddrFrom4(b)
}

// nameRE leaves out what cannot stand in the name of a device, a namespace, a
// node and a directory alike.
var nameRE = regexp.MustCompile(`^[a-z]([a-z0-9-]*[a-z0-9])?$`)

const (
	maxName    = 15 // bytes in the name of a network device
	maxLabName = 30 // bytes; sockets' paths, limited to 107, hold the lab's and the host's name
)

// checkName checks the name of a rack, a node or a pod.
func checkName(s string) error {
	if !nameRE.MatchString(s) || len(s) > maxName {
		return fmt.Errorf("name %q: want a lower case letter, then letters, digits and dashes, at most %d in all", s, maxName)
	}
	if s == "lo" {
		return fmt.Errorf("name %q: reserved for the loopback device", s)
	}
	return nil
}

// CheckLabName checks the name of a lab.
func CheckLabName(s string) error {
	if !nameRE.MatchString(s) || len(s) > maxLabName {
		return fmt.Errorf("lab name %q: want a lower case letter, then letters, digits and dashes, at most %d in all", s, maxLabName)
	}
	return nil
}
