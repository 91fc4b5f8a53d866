package attach

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/workload"
)

// Wire makes wires; *[workload.Wire] does.
type Wire interface {
	Attach(ctx context.Context, spec workload.Spec) (workload.End, error)
	Detach(ctx context.Context, device string, owner workload.Owner) error
	Verify(ctx context.Context, spec workload.Spec, mac dataplane.MAC) error
	SetMTU(ctx context.Context, spec workload.Spec, ours ...int) error
	VerifyRoute(ctx context.Context, device string, addr netip.Addr) error
	Devices(ctx context.Context) (map[string]string, error)
	HostSysctls(device string, addrs []netip.Addr) []dataplane.Sysctl
	Inspect(ctx context.Context, device string, owner workload.Owner) (workload.Found, error)
	Mark(ctx context.Context, device string, owner workload.Owner) error
}

// host is the kernel's side of attachments: their wires, and what the host needs
// to route to them.
type host struct {
	Wire
	sink   dataplane.Sink
	ledger *ledger
}

// show hands over what the host should have for attachments.
func (h *host) show(rs ...record) dataplane.Revision { return h.replace(nil, rs...) }

// replace is show that also takes away what nothing wants any more.
func (h *host) replace(del []dataplane.Key, rs ...record) dataplane.Revision {
	var put []dataplane.Object
	for _, r := range rs {
		put = append(put, r.want(h.Wire)...)
	}
	return h.sink.Update(dataplane.SourceWorkload, put, del)
}

// wait waits until the kernel has what was handed over.
func (h *host) wait(ctx context.Context, rev dataplane.Revision) error {
	if err := h.sink.Wait(ctx, rev); err != nil {
		return fmt.Errorf("program the host's route: %w", err)
	}
	return nil
}

// restore hands over all that the host should have.
func (h *host) restore(rs []record) {
	var want []dataplane.Object
	for _, r := range rs {
		want = append(want, r.want(h.Wire)...)
	}
	h.sink.Replace(dataplane.SourceWorkload, want)
	h.sink.Synced(dataplane.SourceWorkload)
}

// withdraw takes away what the host needs no more without an attachment.
func (h *host) withdraw(r record) {
	gone := keysOf(r.want(h.Wire))
	if h.ledger.taken(r) {
		gone = slices.DeleteFunc(gone, func(k dataplane.Key) bool { return k.Kind() == dataplane.KindSysctl })
	}
	h.replace(gone)
}

// withdrawRoutes takes away the routes to an attachment.
func (h *host) withdrawRoutes(r record) {
	h.replace(slices.DeleteFunc(keysOf(r.want(h.Wire)), func(k dataplane.Key) bool { return k.Kind() != dataplane.KindRoute }))
}

// detach removes the wire of an attachment, and what the host's kernel has for
// it. The caller has the attachment's locks, and the address is still the
// attachment's.
func (h *host) detach(ctx context.Context, r record) error {
	if !r.AddressesOnly {
		if err := h.Detach(ctx, r.Device, r.id()); err != nil {
			return fmt.Errorf("remove the wire: %w", err)
		}
	}
	h.withdraw(r)
	// Once the address is released it may be another container's, whose route a
	// repeated call must not withdraw.
	h.ledger.note(r.id(), wireGone, func(have *record) { have.Addresses = nil })
	return nil
}
