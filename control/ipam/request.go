package ipam

import (
	"fmt"
	"maps"
	"net/netip"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
)

// Keys of an address's attributes, as Calico writes them.
const (
	AttrNode      = store.AttrNode // the node that uses the address
	AttrPod       = "pod"          // Kubernetes pod
	AttrNamespace = "namespace"    // Kubernetes namespace
	AttrTimestamp = "timestamp"    // when it was given: time.Time.UTC().String()
	AttrType      = store.AttrType // what a tunnel's address is for
)

// Use is what an address is for. Pools list the uses that they allow.
type Use string

// The uses that pools know.
const (
	Workload     = Use(v3.IPPoolAllowedUseWorkload)
	Tunnel       = Use(v3.IPPoolAllowedUseTunnel)
	LoadBalancer = Use(v3.IPPoolAllowedUseLoadBalancer)
)

// Request asks for addresses of one family.
type Request struct {
	Family dataplane.Family

	// Count is how many; 0 means 1. It is all or nothing.
	Count int

	// Handle names the addresses together. Required. Calico's form for a
	// container is "<network>.<container id>".
	Handle string

	// Attributes are stored with the addresses. The node's name is added when
	// missing.
	Attributes map[string]string

	// Pools restricts the search to these, by name or CIDR; new blocks are
	// sought in this order. Their selectors and their assignment mode are then
	// not asked. Empty: every pool whose selectors match, in the order of their
	// names.
	Pools []string

	// Use is what the addresses are for; empty: Workload. [Allocator.AssignAddr]
	// checks it only when it is set.
	Use Use

	// NamespaceLabels are the labels of the workload's Kubernetes namespace,
	// for pools that choose by them.
	NamespaceLabels map[string]string

	// MaxBlocks lowers the number of blocks that the node may hold in these
	// pools; 0: as configured.
	MaxBlocks int

	// Idempotent counts addresses of the family that the handle holds
	// already, unless their "node" attribute names another node than this
	// request's: they are returned, and only what is missing is assigned. With
	// it a request may be repeated when its outcome is unknown.
	Idempotent bool

	// Again says that the handle's workload lives with the address that
	// [Allocator.AssignAddr] is to give: it was given before, and the datastore
	// may have been made to forget it. Whether the pool would give it to a workload
	// that is new, and whether affinity is strict, does not count then.
	Again bool

	// Fresh has [Allocator.Take] give an address also to a handle that holds some:
	// they are left of an earlier workload of the same name and on their way back.
	Fresh bool

	// tunnel restricts the search to pools of this encapsulation.
	tunnel *TunnelKind
}

// Assignment is an address that a handle holds.
type Assignment struct {
	Addr     netip.Addr
	Block    netip.Prefix
	Pool     string // name; empty when no pool contains the block any more
	Handle   string
	Sequence uint64 // distinguishes this assignment of the address from later ones
}

// Claim names an address to be released.
type Claim struct {
	Addr     netip.Addr
	Handle   string // when set, the address must be held by it
	Sequence uint64 // when set, the address must not have been given anew since
}

// check completes a request or says what is wrong with it.
func (r *Request) check() error {
	switch {
	case r.Family != dataplane.IPv4 && r.Family != dataplane.IPv6:
		return fmt.Errorf("%w: family is %d, not IPv4 or IPv6", ErrInvalidRequest, uint8(r.Family))
	case r.Count < 0:
		return fmt.Errorf("%w: count is %d, less than 0", ErrInvalidRequest, r.Count)
	case r.Handle == "":
		return fmt.Errorf("%w: handle is empty; every address needs one, so that it can be released", ErrInvalidRequest)
	case r.MaxBlocks < 0:
		return fmt.Errorf("%w: maximum of blocks is %d, less than 0", ErrInvalidRequest, r.MaxBlocks)
	}
	if r.Count == 0 {
		r.Count = 1
	}
	return nil
}

// attribute returns what is stored with the addresses.
func (r *Request) attribute(node string) store.Attribute {
	secondary := make(map[string]string, len(r.Attributes)+1)
	secondary[AttrNode] = node
	maps.Copy(secondary, r.Attributes)
	handle := r.Handle
	return store.Attribute{HandleID: &handle, Secondary: secondary}
}
