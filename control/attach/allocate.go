package attach

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/workload"
)

// AllocateRequest asks for addresses alone: another plugin makes the
// interface.
type AllocateRequest struct {
	ID              ID
	Workload        Workload
	Node            string // the node that the request means; empty: whichever this is
	IPv4, IPv6      bool
	IPv4Pools       []string // names or CIDRs; empty: chosen by the pools' selectors
	IPv6Pools       []string
	Addresses       []netip.Addr // these, at most one of a family
	NamespaceLabels map[string]string

	// Link is the host's device behind which the container is, such as a
	// bridge: the host routes the addresses there. Empty: the other plugin sees
	// to it.
	Link string
	// Gateway keeps an address of each block for the host itself, to be the
	// gateway of the block's containers, and keeps the block's first and last
	// address from them, which on a shared link mean something else.
	Gateway bool
}

// Allocate gives addresses. A repeat returns the same. [Attacher.Del] and
// [Attacher.GC] take them back; until then they are a workload's, also across
// restarts, though nothing else is known of it.
func (a *Attacher) Allocate(ctx context.Context, req AllocateRequest) (Result, error) {
	if err := a.ready(); err != nil {
		return Result{}, err
	}
	add, err := a.completed(AddRequest{
		ID: req.ID, Workload: req.Workload, Node: req.Node, IPv4: req.IPv4, IPv6: req.IPv6,
		IPv4Pools: req.IPv4Pools, IPv6Pools: req.IPv6Pools, Addresses: req.Addresses, NamespaceLabels: req.NamespaceLabels,
	})
	if err != nil {
		return Result{}, err
	}
	switch {
	case req.ID.Network == "" || req.ID.ContainerID == "" || req.ID.Interface == "":
		return Result{}, fmt.Errorf("network name, container id and interface name are required: %w", ErrInvalid)
	case !req.IPv4 && !req.IPv6:
		return Result{}, fmt.Errorf("ipam.assign_ipv4 and ipam.assign_ipv6 are both off: a workload needs an address; set one to \"true\": %w", ErrInvalid)
	}
	if err := checkRequested(add); err != nil {
		return Result{}, err
	}
	unlock, old, known, err := a.lock(ctx, req.ID, req.Workload)
	if err != nil {
		return Result{}, err
	}
	defer unlock()
	if known && old.State == stateAttached {
		if !old.AddressesOnly {
			return Result{}, fmt.Errorf("%w: %w", errRole(old), ErrInvalid)
		}
		return old.result(), nil
	}
	r := recordOf(req.ID, req.Workload)
	r.State, r.Since = stateAdding, time.Now().UTC().Truncate(time.Millisecond)
	r.AddressesOnly, r.Device = true, req.Link
	if err := a.errNamesake(r); err != nil {
		return Result{}, err
	}
	if known && old.State == stateReleasing && a.behind() {
		if req.Gateway {
			err = a.release(ctx, old) // the datastore is asked anyway
		} else {
			r, err = a.succeed(ctx, r, old)
		}
		if err != nil {
			a.completeLater(old.id())
			return Result{}, fmt.Errorf("release what an earlier call left: %w", err)
		}
	}
	r, err = a.allocate(ctx, add, r, req.Gateway)
	if err != nil {
		return Result{}, errors.Join(err, a.undo(ctx, r, err))
	}
	return r.result(), nil
}

// allocate goes through the steps. It returns the record as far as it came.
func (a *Attacher) allocate(ctx context.Context, req AddRequest, r record, gateway bool) (record, error) {
	if err := a.save(r); err != nil {
		return r, err
	}
	if err := a.at("allocate intent"); err != nil {
		return r, err
	}
	var err error
	if gateway {
		r.Addresses, err = a.assignInside(ctx, req, r)
	} else if r, err = a.assignTo(ctx, req, r, record{}); err == nil {
		for i := range r.Addresses {
			r.Addresses[i].Gateway = netip.Addr{}
		}
	}
	if err != nil {
		return r, err
	}
	if err := a.vacant(ctx, r); err != nil {
		return r, err
	}
	if err := a.at("allocate address"); err != nil {
		return r, err
	}
	r.State = stateAttached
	if err := a.save(r); err != nil {
		return r, err
	}
	if err := a.cfg.Journal.Sync(); err != nil {
		return r, err
	}
	// The device may come into being after this call: the wish stays.
	a.cfg.Sink.Update(dataplane.SourceWorkload, r.wishes(a.cfg.Wire), nil)
	if r.Queued {
		a.writeLater()
	}
	return r, a.at("allocate done")
}

// edgeTries bounds how often a container gets another address because its
// first was at the edge of a block.
const edgeTries = 4

// assignInside gives addresses that are not at the edge of their block, and
// keeps a gateway for each block.
func (a *Attacher) assignInside(ctx context.Context, req AddRequest, r record) ([]Address, error) {
	for range edgeTries {
		got, claims, err := a.assign(ctx, req, r)
		if len(claims) > 0 {
			// What is at the edge goes back through the datastore.
			err = errors.Join(a.settleClaims(ctx, r, claims), err)
		}
		if err != nil {
			return nil, err
		}
		edge := slices.IndexFunc(got, func(g Address) bool { return slices.Contains(edges(g.Block), g.Addr) })
		if edge < 0 {
			for i := range got {
				if got[i].Gateway, err = a.gateway(ctx, r, got[i].Block); err != nil {
					return got, err
				}
			}
			return got, nil
		}
		if len(req.Addresses) > 0 {
			return got, fmt.Errorf("address %s is the first or the last of its block %s, which a shared link cannot have; ask for another: %w",
				got[edge].Addr, got[edge].Block, ErrInvalid)
		}
		storeCtx, cancel := a.storeContext(ctx)
		err = a.cfg.IPAM.ReleaseHandle(storeCtx, handle(r.id()))
		cancel()
		if err != nil {
			return nil, storeError("release the address", err)
		}
		for _, e := range edges(got[edge].Block) {
			if err := a.reserve(ctx, r, e); err != nil && !errors.Is(err, ErrNoAddress) {
				return nil, err
			}
		}
	}
	return nil, fmt.Errorf("every address that was given is at the edge of its block: use pools with larger blocks (blockSize 29 or less), or set ipam.gateway: %w", ErrNoAddress)
}

// settleClaims has the datastore know at once of addresses out of the reserve.
func (a *Attacher) settleClaims(ctx context.Context, r record, claims []netip.Addr) error {
	ctx, cancel := a.storeContext(ctx)
	defer cancel()
	var cs []Confirmation
	for _, addr := range claims {
		cs = append(cs, Confirmation{Addr: addr, Handle: handle(r.id()), Attributes: a.assignRequest(r, dataplane.FamilyOf(addr)).Attributes})
	}
	if err := errors.Join(a.cfg.IPAM.Confirm(ctx, cs...)...); err != nil {
		return storeError("confirm addresses", err)
	}
	return nil
}

// edges are the addresses of a block that are no container's on a link where
// the block is a subnet: the network's own and IPv4's broadcast address (RFC
// 1122, section 3.2.1.3), IPv6's subnet-router anycast address (RFC 4291,
// section 2.6.1).
func edges(block netip.Prefix) []netip.Addr {
	first := block.Masked().Addr()
	if !first.Is4() {
		return []netip.Addr{first}
	}
	last := first.As4()
	for i := block.Bits(); i < 32; i++ {
		last[i/8] |= 0x80 >> (i % 8)
	}
	return []netip.Addr{first, netip.AddrFrom4(last)}
}

// gatewayTries bounds the search for a block's gateway: a block that other
// networks fill is a bad subnet anyway.
const gatewayTries = 16

// gateway returns the address of a block that the host keeps for itself.
func (a *Attacher) gateway(ctx context.Context, r record, block netip.Prefix) (netip.Addr, error) {
	a.mu.Lock()
	have := a.kept[r.Network].Addresses
	a.mu.Unlock()
	if i := slices.IndexFunc(have, block.Contains); i >= 0 {
		return have[i], a.noteKept(r, have[i])
	}
	outside := edges(block)
	addr := outside[0]
	var err error
	for range gatewayTries {
		if addr = addr.Next(); !block.Contains(addr) || slices.Contains(outside, addr) {
			break
		}
		if err = a.reserve(ctx, r, addr); err == nil {
			return addr, a.noteKept(r, addr)
		} else if !errors.Is(err, ErrNoAddress) {
			return addr, err
		}
	}
	return netip.Addr{}, fmt.Errorf("block %s has no address left to be the gateway of network %s: use pools with larger blocks, or set ipam.gateway: %w", block, r.Network, ErrNoAddress)
}

// gatewayHandle names what the host keeps for a network whose containers
// another plugin connects.
func (a *Attacher) gatewayHandle(network string) string {
	return "routerd-gateway-" + a.cfg.Node + "." + network
}

// reserve assigns an address to the host itself, for a network.
func (a *Attacher) reserve(ctx context.Context, r record, addr netip.Addr) error {
	ctx, cancel := a.storeContext(ctx)
	defer cancel()
	_, err := a.cfg.IPAM.Assign(ctx, AssignRequest{
		Handle: a.gatewayHandle(r.Network), Family: dataplane.FamilyOf(addr), Address: addr,
		Attributes: map[string]string{"node": a.cfg.Node, "type": "gateway", "timestamp": time.Now().UTC().Round(0).String()},
	})
	if err != nil {
		return storeError("reserve "+addr.String()+" for the host", err)
	}
	return nil
}

// there reports whether what the record says still is on this host, of which
// devices lists the wires. Of a wire that another plugin made nothing is seen.
func (r record) there(devices map[string]string) bool {
	return r.AddressesOnly || devices[r.Device] == r.id().Alias()
}

// linkRoutes lead to a container that another plugin connected.
func (r record) linkRoutes() []dataplane.Object {
	if r.Device == "" {
		return nil
	}
	var out []dataplane.Object
	for _, a := range r.Addresses {
		out = append(out, dataplane.Route{Prefix: netip.PrefixFrom(a.Addr, a.Addr.BitLen()), Table: dataplane.MainTable, Link: r.Device})
	}
	return out
}

// errRole says that a container's interface was made in the other way.
func errRole(r record) error {
	made := "with its interface by routerd-cni as the network plugin"
	if r.AddressesOnly {
		made = "with addresses alone, by routerd-cni as the IPAM plugin of another"
	}
	return fmt.Errorf("container %s, interface %s in network %s was attached %s; detach it first: %w", r.ContainerID, r.Interface, r.Network, made, workload.ErrDiffers)
}

// completed derives from a request what it does not say itself.
func (a *Attacher) completed(req AddRequest) (AddRequest, error) {
	if req.Node != "" && req.Node != a.cfg.Node {
		return req, fmt.Errorf("the configuration's nodename is %q, and this host is %q: leave nodename out, or correct it: %w", req.Node, a.cfg.Node, ErrInvalid)
	}
	if len(req.Given) == 0 {
		return req, nil
	}
	req.IPv4, req.IPv6, req.Addresses = false, false, nil
	for _, g := range req.Given {
		if !g.IsValid() || g.Is4In6() || g.Zone() != "" {
			return req, fmt.Errorf("given address %q is not a plain IPv4 or IPv6 address: %w", g, ErrInvalid)
		}
		req.IPv4 = req.IPv4 || g.Is4()
		req.IPv6 = req.IPv6 || g.Is6()
	}
	return req, nil
}

// namespaceLabels adds to what the configuration says of a namespace the labels
// that name it: Kubernetes' own and Calico's.
func namespaceLabels(r record, labels map[string]string) map[string]string {
	out := map[string]string{"kubernetes.io/metadata.name": r.Namespace, "projectcalico.org/name": r.Namespace}
	maps.Copy(out, labels)
	return out
}
