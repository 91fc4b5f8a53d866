package attach

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"time"

	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/workload"
	"github.com/routerd/routerd/store"
)

// adopter takes over the workloads of which there is no record, and of which the datastore has the
// endpoints: those that Calico's CNI plugin attached to this host, whose wires carry no mark, and those
// that routerd did, whose wires carry one, before it lost its state directory or was given another.
// From then on they are attachments like any other.
type adopter struct {
	node      string
	network   string // see Config.Network
	ledger    *ledger
	locks     *locks
	host      *host
	addresses *addresses
	endpoints *endpoints
	store     *datastore
	mtus      *mtus
	steps     *runner
	retry     time.Duration
	log       *slog.Logger
}

// errNotAdopted says of an endpoint why its workload is none that can be taken over.
// Trying again would not help.
var errNotAdopted = errors.New("left as it is")

// run takes over what there is when the daemon starts. It returns when that is done: what
// comes later is this daemon's.
func (x *adopter) run(ctx context.Context) {
	backoff := async.Backoff{Min: x.retry, Max: maxRetry}
	failed := false
	for {
		err := x.all(ctx)
		if err == nil {
			return
		}
		if !failed && !errors.Is(err, ErrNotReady) && ctx.Err() == nil {
			failed = true
			x.log.Warn("not all workloads without a record were taken over; will try again", "error", err)
		}
		if backoff.Wait(ctx) != nil {
			return
		}
	}
}

// all takes over every workload that it can.
func (x *adopter) all(ctx context.Context) error {
	devices, err := x.candidates(ctx)
	if err != nil || len(devices) == 0 {
		return err
	}
	if err := x.store.held(); err != nil {
		return fmt.Errorf("take over the workloads of %d devices: %w", len(devices), err)
	}
	endpoints, err := x.list(ctx, store.KindWorkloadEndpoint)
	if err != nil {
		return err
	}
	blocks, err := x.list(ctx, store.KindIPAMBlock)
	if err != nil {
		return err
	}
	var errs []error
	adopted, unrecorded, strange := 0, 0, ""
	for _, o := range endpoints {
		w, ok := o.Value.(*store.WorkloadEndpoint)
		if !ok || w.Spec.Node != x.node {
			continue
		}
		alias, ok := devices[w.Spec.InterfaceName]
		if !ok {
			continue
		}
		delete(devices, w.Spec.InterfaceName)
		r, err := x.recordOf(o, w, blocks)
		if err == nil {
			err = x.adopt(ctx, r)
		}
		switch {
		case err == nil:
			if alias == "" {
				adopted++
			} else {
				unrecorded++
			}
			if x.network != "" && r.Network != x.network {
				strange = r.Network
			}
		case errors.Is(err, errNotAdopted) || errors.Is(err, workload.ErrDiffers):
			x.log.Warn("a workload without a record is not taken over; start it anew", "endpoint", o.Key, "device", w.Spec.InterfaceName, "error", err)
		default:
			errs = append(errs, fmt.Errorf("take over %s: %w", o.Key, err))
		}
	}
	for d := range devices {
		x.log.Warn("a device looks like a workload's, and the datastore has no endpoint for it; it is left as it is", "device", d)
	}
	if adopted > 0 {
		x.log.Info("workloads that Calico attached are taken over", "workloads", adopted)
	}
	if unrecorded > 0 {
		x.log.Warn("workloads of which stateDir has no record are taken over: was it another one before?", "workloads", unrecorded)
	}
	if strange != "" {
		x.log.Error("workloads that were taken over are of another network than the CNI configuration names, so their DEL will not find them: set cni.networkName to it",
			"network", strange, "configured", x.network)
	}
	return errors.Join(errs...)
}

// candidates returns the wires that are no attachment's, and that none is about to mark or to remove, with
// what marks each; empty: nothing does.
func (x *adopter) candidates(ctx context.Context) (map[string]string, error) {
	devices, err := x.host.Devices(ctx)
	if err != nil {
		return nil, err
	}
	of := make(map[string]state)
	for _, r := range x.ledger.snapshot() {
		of[r.Device] = r.State
	}
	out := make(map[string]string)
	for d, alias := range devices {
		if s, known := of[d]; !known || alias == "" && s == attachedStored { // adopted, and killed before it was marked
			out[d] = alias
		}
	}
	return out, nil
}

// list reads what the datastore has of a kind. What cannot be decoded is left out.
func (x *adopter) list(ctx context.Context, kind store.Kind) ([]store.Object, error) {
	ctx, cancel := x.store.context(ctx)
	defer cancel()
	objects, _, err := x.store.List(ctx, kind, "")
	if err != nil && !errors.Is(err, store.ErrDecode) {
		return nil, storeError("take over workloads: list "+string(kind), err)
	}
	return objects, nil
}

// recordOf returns the record of an endpoint that Calico's plugin wrote. Which network it
// is of its handle says.
func (x *adopter) recordOf(o store.Object, w *store.WorkloadEndpoint, blocks []store.Object) (record, error) {
	if w.Spec.ContainerID == "" || w.Spec.Endpoint != podInterface {
		return record{}, fmt.Errorf("it is of container %q, interface %q: %w", w.Spec.ContainerID, w.Spec.Endpoint, errNotAdopted)
	}
	var addrs []Address
	network := ""
	for _, text := range w.Spec.IPNetworks {
		p, err := netip.ParsePrefix(text)
		if err != nil || !p.IsSingleIP() {
			return record{}, fmt.Errorf("its address %q is none: %w", text, errNotAdopted)
		}
		a, holder := whose(p.Addr(), blocks)
		name, ok := strings.CutSuffix(holder, "."+w.Spec.ContainerID)
		if !ok || name == "" || network != "" && name != network {
			return record{}, fmt.Errorf("IPAM has %s as that of handle %q, want NETWORK.%s: %w", p.Addr(), holder, w.Spec.ContainerID, errNotAdopted)
		}
		network, addrs = name, append(addrs, a)
	}
	if len(addrs) == 0 {
		return record{}, fmt.Errorf("it has no address: %w", errNotAdopted)
	}
	r := recordOf(ID{Network: network, ContainerID: w.Spec.ContainerID, Interface: w.Spec.Endpoint},
		Workload{Orchestrator: w.Spec.Orchestrator, Namespace: w.Namespace, Pod: w.Spec.Pod})
	r.Device, r.MAC, r.Addresses, r.Endpoint, r.More = w.Spec.InterfaceName, w.Spec.MAC, addrs, o.Revision, moreOf(w)
	r.Since = w.CreationTimestamp.Time
	if _, key, err := x.endpoints.of(r); err != nil || key != o.Key {
		return record{}, fmt.Errorf("its key is not what its content makes, %s: %w", key, errNotAdopted)
	}
	return r, nil
}

// whose finds an address among all blocks, and the handle that has it.
func whose(addr netip.Addr, blocks []store.Object) (Address, string) {
	for _, o := range blocks {
		b, ok := o.Value.(*store.Block)
		if !ok || !b.Prefix().Contains(addr) {
			continue
		}
		a := Address{Addr: addr, Gateway: workload.Gateway(dataplane.FamilyOf(addr)), Block: b.Prefix()}
		return a, holderOf(b, a)
	}
	return Address{}, ""
}

// moreOf returns what an endpoint says beside names and addresses.
func moreOf(w *store.WorkloadEndpoint) *more {
	m := &more{
		UID: w.UID, Labels: w.Labels, Profiles: w.Spec.Profiles, ServiceAccount: w.Spec.ServiceAccountName, Ports: w.Spec.Ports,
		Sources: w.Spec.AllowSpoofedSourcePrefixes, QoSControls: w.Spec.QoSControls,
	}
	for _, n := range w.Spec.IPNATs {
		if a, err := netip.ParseAddr(n.ExternalIP); err == nil {
			m.Floating = append(m.Floating, a)
		}
	}
	return m
}

// adopt makes an attachment of a wire that is there. Cut short anywhere it can be
// repeated: the record comes first, and the mark says that there is one.
func (x *adopter) adopt(ctx context.Context, r record) error {
	l, err := x.locks.lock(ctx, r.id(), r.workload())
	if err != nil {
		return err
	}
	defer l.unlock()
	if l.known && l.State != attachedStored || x.ledger.taken(r) {
		return nil // another call was faster
	}
	if l.known {
		r = l.record // as it was written before a kill
	} else if r, err = x.record(ctx, r); err != nil {
		return err
	}
	return x.steps.run(ctx,
		step{"mark wire", func(ctx context.Context) error { return x.host.Mark(ctx, r.Device, r.id()) }},
		step{"adopt route", func(context.Context) error { x.host.show(r); return nil }},
		step{"adopt MTU", func(ctx context.Context) error { return x.resize(ctx, r) }},
	)
}

// record writes down that there is an attachment.
func (x *adopter) record(ctx context.Context, r record) (record, error) {
	wire, err := x.host.Inspect(ctx, r.Device, r.id())
	if err != nil {
		return r, err
	}
	// The end inside cannot be changed where it cannot be reached.
	r.Netns, r.MTU, r.FixedMTU = wire.Netns, wire.MTU, wire.Netns == ""
	if x.wantedMTU(r) != r.MTU {
		r.TriedMTUs = []int{r.MTU} // as of one that is being changed: see mtuState.apply
	}
	err = x.steps.run(ctx,
		step{"adopt", func(context.Context) (err error) { r, err = x.ledger.save(r, adopted); return err }},
		step{"claim", func(context.Context) error { x.addresses.ipam.Claim(handle(r.id()), r.addrs()...); return nil }},
	)
	return r, err
}

// resize brings a workload to the MTU of workloads. What is set from here on sees the
// record.
func (x *adopter) resize(ctx context.Context, r record) error {
	if x.wantedMTU(r) == r.MTU && len(r.TriedMTUs) == 0 {
		return nil
	}
	if _, err := x.mtus.change(ctx, []locked{{record: r, known: true}}); err != nil {
		return err
	}
	_, err := x.ledger.advance(r, none)
	return err
}

func (x *adopter) wantedMTU(r record) int {
	v4, v6 := r.families()
	return x.mtus.current(r, v4, v6)
}
