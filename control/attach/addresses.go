package attach

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/routerd/routerd/control/ipam"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/workload"
	"github.com/routerd/routerd/store"
)

// IPAM gives addresses and takes them back; *[ipam.Allocator] does, and says what
// each method is for.
type IPAM interface {
	Take(parts ...ipam.Part) ([]ipam.Assignment, bool)
	AssignTogether(ctx context.Context, parts ...ipam.Part) ([][]ipam.Assignment, error)
	ReleaseHandleHere(ctx context.Context, handle string, keep ...netip.Addr) ([]netip.Addr, error)
	Confirm(ctx context.Context, cs ...ipam.Confirmation) []error
	Claim(handle string, addrs ...netip.Addr)
	CoolDown(handle string) error
	Unclaim(handle string, addrs ...netip.Addr)
	Ready() map[string]int
}

// refused reports whether an error is a refusal of an address: to ask for it
// again helps only when a resource has changed.
func refused(err error) bool {
	for _, refusal := range []error{
		ErrNoAddress, ipam.ErrNoPool, ipam.ErrExhausted, ipam.ErrBlockLimit, ipam.ErrTaken, ipam.ErrStrictAffinity, ipam.ErrNotHolder,
	} {
		if errors.Is(err, refusal) {
			return true
		}
	}
	return false
}

// unserviceable reports whether an error says that a request as it is cannot be
// served.
func unserviceable(err error) bool {
	return errors.Is(err, ErrInvalid) || errors.Is(err, ipam.ErrInvalidRequest) ||
		errors.Is(err, ipam.ErrUnknownPool) || errors.Is(err, ipam.ErrOutsidePools)
}

// heldByOther reports whether an error says that another has the address.
func heldByOther(err error) bool {
	return errors.Is(err, ipam.ErrTaken) && !errors.Is(err, ipam.ErrCooldown)
}

// addresses gets attachments their addresses and gives them back.
type addresses struct {
	node   string
	ipam   IPAM
	store  *datastore
	ledger *ledger
}

// part asks for an address of a family for an attachment.
func (x *addresses) part(r record, f dataplane.Family) ipam.Part {
	return ipam.Part{Request: ipam.Request{
		Family: f, Handle: handle(r.id()), Attributes: x.attributes(r), Use: ipam.Workload, Idempotent: true, Fresh: r.Reused,
	}}
}

// attributes are what IPAM keeps beside an attachment's addresses.
func (x *addresses) attributes(r record) map[string]string {
	out := map[string]string{ipam.AttrNode: x.node, ipam.AttrTimestamp: time.Now().UTC().Round(0).String()}
	if r.AddressesOnly {
		out[ipam.AttrType] = "ipamPlugin" // it has no endpoint
	}
	if r.Pod != "" {
		out[ipam.AttrNamespace], out[ipam.AttrPod] = r.Namespace, r.Pod
	}
	return out
}

// get returns an address for each part: out of the reserve, of which the
// datastore does not know yet whose they are, or by the datastore.
func (x *addresses) get(ctx context.Context, parts ...ipam.Part) (got []ipam.Assignment, reserve bool, err error) {
	if got, ok := x.ipam.Take(parts...); ok {
		return got, true, nil
	}
	lists, err := x.ipam.AssignTogether(ctx, parts...)
	for _, l := range lists {
		got = append(got, l[0])
	}
	return got, false, err
}

// assign gets an address of each family that a request asks for, IPv4 first, and
// says which of them are the reserve's in the datastore.
func (x *addresses) assign(ctx context.Context, req AddRequest, r record) (out []Address, claims []netip.Addr, err error) {
	if len(req.Given) > 0 {
		for _, g := range req.Given {
			out = append(out, Address{Addr: g, Gateway: workload.Gateway(dataplane.FamilyOf(g))})
		}
		return out, nil, nil
	}
	ctx, cancel := x.store.context(ctx)
	defer cancel()
	var parts []ipam.Part
	add := func(f dataplane.Family, pools []string) {
		p := x.part(r, f)
		p.Pools, p.NamespaceLabels = pools, namespaceLabels(r, req.NamespaceLabels)
		for _, addr := range req.Addresses {
			if dataplane.FamilyOf(addr) == f {
				p.Addr = addr
			}
		}
		parts = append(parts, p)
	}
	if req.IPv4 {
		add(dataplane.IPv4, req.IPv4Pools)
	}
	if req.IPv6 {
		add(dataplane.IPv6, req.IPv6Pools)
	}
	got, reserve, err := x.get(ctx, parts...)
	if err != nil {
		return nil, nil, storeError("assign an address", err)
	}
	for i, p := range parts {
		addr := got[i].Addr
		if dataplane.FamilyOf(addr) != p.Family || p.Addr.IsValid() && addr != p.Addr {
			return nil, nil, fmt.Errorf("assign an address: the container has %s, but %s was requested: %w", addr, wanted(p), ErrNoAddress)
		}
		out = append(out, Address{Addr: addr, Gateway: workload.Gateway(p.Family), Block: got[i].Block})
		if reserve {
			claims = append(claims, addr)
		} else {
			x.ipam.Claim(handle(r.id()), addr)
		}
	}
	return out, claims, nil
}

func wanted(p ipam.Part) string {
	if p.Addr.IsValid() {
		return p.Addr.String()
	}
	return "an " + p.Family.String() + " address"
}

// namespaceLabels adds to what the configuration says of a namespace the labels
// that name it: Kubernetes' own and Calico's.
func namespaceLabels(r record, labels map[string]string) map[string]string {
	out := map[string]string{"kubernetes.io/metadata.name": r.Namespace, "projectcalico.org/name": r.Namespace}
	maps.Copy(out, labels)
	return out
}

// regain assigns a workload the addresses that it has once more.
func (x *addresses) regain(ctx context.Context, r record) error {
	if r.Given {
		return nil
	}
	ctx, cancel := x.store.context(ctx)
	defer cancel()
	for _, want := range r.Addresses {
		p := x.part(r, dataplane.FamilyOf(want.Addr))
		p.Addr, p.Again = want.Addr, true
		got, _, err := x.get(ctx, p)
		if err == nil && got[0].Addr != want.Addr {
			err = fmt.Errorf("its handle has %s: %w", got[0].Addr, ErrNoAddress)
		}
		if err != nil {
			return storeError(fmt.Sprintf("take address %s of %s again", want.Addr, handle(r.id())), err)
		}
	}
	return nil
}

// reserve assigns an address to the host itself.
func (x *addresses) reserve(ctx context.Context, handle string, addr netip.Addr) error {
	ctx, cancel := x.store.context(ctx)
	defer cancel()
	_, _, err := x.get(ctx, ipam.Part{Addr: addr, Request: ipam.Request{
		Handle: handle, Family: dataplane.FamilyOf(addr), Use: ipam.Workload, Idempotent: true,
		Attributes: map[string]string{ipam.AttrNode: x.node, ipam.AttrType: "gateway", ipam.AttrTimestamp: time.Now().UTC().Round(0).String()},
	}})
	if err != nil {
		return storeError("reserve "+addr.String()+" for the host", err)
	}
	return nil
}

// confirmations are an attachment's addresses out of the reserve, as they are to
// be written.
func (x *addresses) confirmations(r record, claims []netip.Addr) []ipam.Confirmation {
	var out []ipam.Confirmation
	for _, addr := range claims {
		out = append(out, ipam.Confirmation{Addr: addr, Handle: handle(r.id()), Attributes: x.attributes(r)})
	}
	return out
}

// confirmNow writes addresses out of the reserve to the datastore at once.
func (x *addresses) confirmNow(ctx context.Context, r record, claims []netip.Addr) error {
	ctx, cancel := x.store.context(ctx)
	defer cancel()
	if err := errors.Join(x.ipam.Confirm(ctx, x.confirmations(r, claims)...)...); err != nil {
		return storeError("confirm addresses", err)
	}
	return nil
}

// confirm writes the addresses out of the reserve of attachments to the
// datastore, but for those that have an error already, and notes the errors.
func (x *addresses) confirm(ctx context.Context, rs []record, errs []error) {
	var cs []ipam.Confirmation
	var of []int // index in rs of each of cs
	for i, r := range rs {
		if r.State.unassigned() {
			continue // later
		}
		more := x.confirmations(r, r.Claims)
		cs, of = append(cs, more...), append(of, slices.Repeat([]int{i}, len(more))...)
	}
	if len(cs) == 0 {
		return
	}
	for i, err := range x.ipam.Confirm(ctx, cs...) {
		if err != nil && errs[of[i]] == nil {
			errs[of[i]] = storeError("confirm addresses", err)
		}
	}
}

func (x *addresses) releaseHandle(ctx context.Context, handle string, keep ...netip.Addr) error {
	_, err := x.ipam.ReleaseHandleHere(ctx, handle, keep...)
	return err
}

// releaseAll releases all addresses of an attachment's handle.
func (x *addresses) releaseAll(ctx context.Context, r record) error {
	ctx, cancel := x.store.context(ctx)
	defer cancel()
	if err := x.releaseHandle(ctx, handle(r.id())); err != nil {
		return storeError("release the address", err)
	}
	return nil
}

// releaseFormer releases what the handle of an attachment has of an earlier
// container.
func (x *addresses) releaseFormer(ctx context.Context, r record) error {
	if _, shared := x.ledger.namesake(r.id()); shared {
		return nil
	}
	if err := x.releaseHandle(ctx, handle(r.id()), r.addrs()...); err != nil {
		return storeError("release the address of an earlier container of this name", err)
	}
	former := slices.DeleteFunc(slices.Clone(r.Former), func(f netip.Addr) bool { return slices.Contains(r.addrs(), f) })
	if len(former) > 0 {
		x.ipam.Unclaim(handle(r.id()), former...)
	}
	return nil
}

// forget removes the record of an attachment. Only then may its addresses be given
// again: a record that came back would claim them.
func (x *addresses) forget(id ID) error {
	_, shared := x.ledger.namesake(id)
	if !shared {
		if err := x.ipam.CoolDown(handle(id)); err != nil {
			return err
		}
	}
	if err := x.ledger.remove(id); err != nil {
		return err
	}
	if !shared {
		x.ipam.Unclaim(handle(id))
	}
	return nil
}

// foreign says who else holds an address of an attachment in the datastore; nil:
// no other.
func (x *addresses) foreign(ctx context.Context, r record) (cause, err error) {
	ctx, cancel := x.store.context(ctx)
	defer cancel()
	for _, addr := range r.Addresses {
		obj, err := x.store.Get(ctx, store.BlockKey(addr.Block))
		switch {
		case errors.Is(err, store.ErrNotFound), errors.Is(err, store.ErrDecode):
			continue
		case err != nil:
			return nil, storeError("read block "+addr.Block.String(), err)
		}
		b, ok := obj.Value.(*store.Block)
		if !ok {
			continue
		}
		if holder := holderOf(b, addr); holder != "" && holder != handle(r.id()) {
			return fmt.Errorf("%s is held by %s: %w", addr.Addr, holder, ipam.ErrTaken), nil
		}
	}
	return nil, nil
}

// holderOf returns the handle of who holds an address of a block for something
// that runs; empty: it is free.
func holderOf(b *store.Block, want Address) string {
	n, ok := b.Ordinal(want.Addr)
	if !ok {
		return ""
	}
	at := b.Attribute(n)
	if at == nil || at.HandleID == nil || at.ReleasedAt != nil || at.Secondary[ipam.AttrType] == ipam.AttrTypeReserve {
		return ""
	}
	return *at.HandleID
}
