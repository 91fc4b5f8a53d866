package attach

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/workload"
	"github.com/routerd/routerd/store"
)

// The range of MTUs that the kernel takes for a veth (ETH_MIN_MTU,
// ETH_MAX_MTU), in bytes.
const (
	minMTU = 68
	maxMTU = 65535
)

// Add attaches a container: when it returns, the host routes to the container,
// the datastore knows it, or will ([Config.Behind]), and the rules that judge
// its packets are in force. A repeat returns the same result. What a failed
// call made is undone; what cannot be undone now, because the datastore is
// away, is undone later (see [Attacher.Run]).
func (a *Attacher) Add(ctx context.Context, req AddRequest) (Result, error) {
	if err := a.ready(); err != nil {
		return Result{}, err
	}
	req, err := a.completed(req)
	if err != nil {
		return Result{}, err
	}
	fresh, err := a.newRecord(req)
	if err != nil {
		return Result{}, err
	}
	unlock, old, known, err := a.lock(ctx, req.ID, req.Workload)
	if err != nil {
		return Result{}, err
	}
	defer unlock()

	repair := known && old.State == stateAttached
	if !repair {
		if err := a.errNamesake(fresh); err != nil {
			return Result{}, err
		}
	}
	if known && old.State == stateReleasing && a.behind() {
		if fresh, err = a.succeed(ctx, fresh, old); err != nil {
			a.completeLater(old.id())
			return Result{}, fmt.Errorf("release what an earlier call left: %w", err)
		}
		old, known = record{}, false
	}
	if repair && old.AddressesOnly {
		return Result{}, fmt.Errorf("%w: %w", errRole(old), ErrInvalid)
	}
	if repair {
		old.Netns = req.Netns
		if old.Lost == "" && a.intact(ctx, old) {
			return a.again(ctx, old)
		}
		a.log.Info("attachment is damaged; made whole", logID(req.ID)...)
		fresh.MTU, fresh.FixedMTU, fresh.Since = old.MTU, old.FixedMTU, old.Since
		if mtu := a.wantedMTU(old.families()); !old.FixedMTU && mtu != 0 {
			fresh.MTU = mtu
		}
	}
	if known {
		// Names made once stay: those of the device and of the endpoint.
		fresh.Device = old.Device
		fresh.Orchestrator, fresh.Namespace, fresh.Pod = old.Orchestrator, old.Namespace, old.Pod
	}
	done, err := a.add(ctx, req, fresh, old)
	if err == nil {
		return done.result(), nil
	}
	if repair {
		// The attachment is older than this call, which takes nothing from it.
		return Result{}, err
	}
	return Result{}, errors.Join(err, a.undo(ctx, done, err))
}

// newRecord checks a request and returns the record of what it asks for.
func (a *Attacher) newRecord(req AddRequest) (record, error) {
	mtu := req.MTU
	if mtu == 0 {
		mtu = a.wantedMTU(req.IPv4, req.IPv6)
	}
	switch {
	case req.ID.Network == "" || req.ID.ContainerID == "" || req.ID.Interface == "":
		return record{}, fmt.Errorf("network name, container id and interface name are required: %w", ErrInvalid)
	case req.Netns == "":
		return record{}, fmt.Errorf("path of the network namespace is required: %w", ErrInvalid)
	case !req.IPv4 && !req.IPv6:
		return record{}, fmt.Errorf("ipam.assign_ipv4 and ipam.assign_ipv6 are both off: a workload needs an address; set one to \"true\": %w", ErrInvalid)
	}
	if err := checkRequested(req); err != nil {
		return record{}, err
	}
	switch {
	case mtu == 0:
		return record{}, fmt.Errorf("the MTU of workloads is not known yet: %w", ErrNotReady)
	case mtu < minMTU || mtu > maxMTU:
		return record{}, fmt.Errorf("mtu %d: want %d to %d, or 0 for what the pools leave: %w", mtu, minMTU, maxMTU, ErrInvalid)
	}
	r := recordOf(req.ID, req.Workload)
	r.Netns, r.MTU, r.Forwarding, r.Given = req.Netns, mtu, req.Forwarding, len(req.Given) > 0
	if !req.MAC.IsZero() {
		r.MAC = req.MAC.String()
	}
	// A request that repeats the operator's number, as the configuration of the
	// plugin does that the daemon writes, is not one of its own.
	r.FixedMTU = req.MTU != 0 && req.MTU != a.operatorMTU()
	r.State, r.Since = stateAdding, time.Now().UTC().Truncate(time.Millisecond)
	return r, a.checkEndpoint(r)
}

// checkRequested checks the addresses that a request names.
func checkRequested(req AddRequest) error {
	seen := map[dataplane.Family]netip.Addr{}
	for _, a := range req.Addresses {
		f := dataplane.FamilyOf(a)
		switch other, dup := seen[f]; {
		case !a.IsValid() || a.Is4In6() || a.Zone() != "":
			return fmt.Errorf("requested address %q is not a plain IPv4 or IPv6 address: %w", a, ErrInvalid)
		case dup:
			return fmt.Errorf("addresses %s and %s are requested; a container gets one of a family: %w", other, a, ErrInvalid)
		case f == dataplane.IPv4 && !req.IPv4:
			return fmt.Errorf("address %s is requested, and ipam.assign_ipv4 is off; set it to \"true\": %w", a, ErrInvalid)
		case f == dataplane.IPv6 && !req.IPv6:
			return fmt.Errorf("address %s is requested, and ipam.assign_ipv6 is off; set it to \"true\": %w", a, ErrInvalid)
		}
		seen[f] = a
	}
	return nil
}

// recordOf derives what is known of an attachment from its names alone.
func recordOf(id ID, w Workload) record {
	if w.Orchestrator == "" {
		w.Orchestrator = CNI
	}
	if w.Namespace == "" {
		w.Namespace = store.DefaultName
	}
	namespace := ""
	if w.Orchestrator == Kubernetes {
		namespace = w.Namespace
	} else {
		w.Pod = ""
	}
	return record{
		Network: id.Network, ContainerID: id.ContainerID, Interface: id.Interface,
		Orchestrator: w.Orchestrator, Namespace: w.Namespace, Pod: w.Pod,
		Device: workload.DeviceName(id, namespace, w.Pod),
	}
}

// lock takes the locks of the attachment and of what it shares with others,
// always in this order, and returns its record.
func (a *Attacher) lock(ctx context.Context, id ID, w Workload) (unlock func(), r record, known bool, err error) {
	return a.lockBy(ctx, id, w, a.locks.lock)
}

// lockBy is lock with a way of taking each lock.
func (a *Attacher) lockBy(ctx context.Context, id ID, w Workload, take func(context.Context, string) (func(), error)) (unlock func(), r record, known bool, err error) {
	free, err := take(ctx, attachmentLock(id))
	if err != nil {
		return nil, record{}, false, fmt.Errorf("wait for another call about the container: %w", err)
	}
	r, known = a.record(id)
	if !known {
		r = recordOf(id, w)
	}
	freeShared, err := take(ctx, a.sharedLock(r))
	if err != nil {
		free()
		return nil, record{}, false, fmt.Errorf("wait for another call about device %s: %w", r.Device, err)
	}
	if known {
		// Whoever took the device over changed the record.
		r, known = a.record(id)
	}
	return func() { freeShared(); free() }, r, known, nil
}

// sharedLock names the lock of what an attachment shares with others. Two have
// one device's name when a pod's container is made anew. Of addresses alone the
// device is another plugin's, such as a bridge that all containers have, and
// they share only a gateway that goes with the last of them.
func (a *Attacher) sharedLock(r record) string {
	if !r.AddressesOnly {
		return "device " + r.Device
	}
	a.mu.Lock()
	k, known := a.kept[r.Network]
	a.mu.Unlock()
	if known && !k.Linked {
		return "gateway " + r.Network
	}
	return "addresses " + r.Network + "/" + r.ContainerID + "/" + r.Interface
}

// attachmentLock names the lock of an attachment: one for all that have its
// handle.
func attachmentLock(id ID) string { return "attachment " + handle(id) }

// intact reports whether a complete attachment is still as it was made.
func (a *Attacher) intact(ctx context.Context, r record) bool {
	err := a.cfg.Wire.Verify(ctx, r.spec(), r.mac())
	if err != nil {
		a.log.Debug("attachment differs", append(logID(r.id()), "error", err)...)
	}
	return err == nil
}

// again returns the result of an attachment that is complete.
func (a *Attacher) again(ctx context.Context, r record) (Result, error) {
	rev := a.cfg.Sink.Update(dataplane.SourceWorkload, r.wishes(a.cfg.Wire), nil)
	if err := a.cfg.Sink.Wait(ctx, rev); err != nil {
		return Result{}, fmt.Errorf("program the host's route: %w", err)
	}
	if err := a.awaitRules(ctx, r); err != nil {
		return Result{}, err
	}
	return r.result(), nil
}

// add goes through the steps. It returns the record as far as it came. Of a
// complete attachment that is made whole, old is the record; it stays on disk
// until the new one is complete.
func (a *Attacher) add(ctx context.Context, req AddRequest, r, old record) (record, error) {
	repair := old.State == stateAttached
	if err := a.at("start"); err != nil {
		return r, err
	}
	if !repair {
		if err := a.save(r); err != nil {
			return r, err
		}
		// One that was set since the request was read did not see the record, and
		// one that is set from now on does.
		if mtu := a.wantedMTU(req.IPv4, req.IPv6); !r.FixedMTU && mtu != 0 {
			r.MTU = mtu
		}
	}
	if err := a.at("intent"); err != nil {
		return r, err
	}
	var err error
	if r, err = a.assignTo(ctx, req, r, old); err != nil {
		return r, err
	}
	if err := a.vacant(ctx, r); err != nil {
		return r, err
	}
	if err := a.at("address"); err != nil {
		return r, err
	}
	if !repair {
		if err := a.save(r); err != nil {
			return r, err
		}
	}
	if err := a.at("record"); err != nil {
		return r, err
	}
	// Its rules, the disk and the wire take about as long as each other. A device
	// that an earlier container of the pod still has keeps its rules until then.
	early := r.Queued && !repair && !a.taken(r)
	if early {
		a.announce(r, true)
	}
	flushed := make(chan error, 1)
	go func() { flushed <- a.cfg.Journal.Sync() }()
	end, err := a.cfg.Wire.Attach(ctx, r.spec())
	if flushErr := <-flushed; err == nil && flushErr != nil {
		return r, flushErr
	}
	if err != nil {
		return r, fmt.Errorf("connect the container: %w", err)
	}
	r.MAC = end.MAC.String()
	if err := a.at("wire"); err != nil {
		return r, err
	}
	if err := a.program(ctx, r, old); err != nil {
		return r, err
	}
	if err := a.at("routes"); err != nil {
		return r, err
	}
	switch {
	case early:
	case r.Queued:
		a.announce(r, true)
	default:
		if err := a.writeEndpoint(ctx, &r); err != nil {
			return r, err
		}
	}
	if err := a.at("endpoint"); err != nil {
		return r, err
	}
	if err := a.awaitRules(ctx, r); err != nil {
		return r, err
	}
	if err := a.at("rules"); err != nil {
		return r, err
	}
	r.State = stateAttached
	if err := a.save(r); err != nil {
		return r, err
	}
	if err := a.at("done"); err != nil {
		return r, err
	}
	if r.Queued {
		a.writeLater()
	}
	return r, nil
}

func (a *Attacher) writeEndpoint(ctx context.Context, r *record) error {
	ctx, cancel := a.storeContext(ctx)
	defer cancel()
	rev, err := a.putEndpoint(ctx, *r)
	if err != nil {
		return storeError("write the workload endpoint", err)
	}
	r.Endpoint = rev
	return nil
}

// assignTo gets the addresses of an attachment and notes what the datastore is
// to be told of them. An attachment that is made whole, old, has its own.
func (a *Attacher) assignTo(ctx context.Context, req AddRequest, r, old record) (record, error) {
	if old.State == stateAttached {
		// It may be told of this one just now; to tell it again does no harm.
		r.Queued, r.Claims, r.Endpoint = old.Queued || a.behind(), old.Claims, old.Endpoint
		r.Stale, r.Former = old.Stale, old.Former
		if r.Queued && old.Lost == "" && sameFamilies(req, old) {
			r.Addresses = old.Addresses
			return r, nil
		}
	}
	a.mu.Lock()
	touched := a.touched[r.id()]
	a.touched[r.id()] = true
	a.mu.Unlock()
	got, claims, err := a.assign(ctx, req, r)
	if err != nil {
		return r, err
	}
	r.Addresses = got
	if old.State == stateAttached {
		r.Queued = r.Queued || len(claims) > 0
		r.Claims = append(slices.Clone(r.Claims), slices.DeleteFunc(claims, func(c netip.Addr) bool { return slices.Contains(r.Claims, c) })...)
	} else {
		r.Queued, r.Claims = a.behind() || len(claims) > 0, claims
		a.mu.Lock()
		a.touched[r.id()] = touched || len(claims) < len(got)
		a.mu.Unlock()
	}
	return r, nil
}

// sameFamilies reports whether a request could have got the addresses that an
// attachment has.
func sameFamilies(req AddRequest, r record) bool {
	v4, v6 := r.families()
	return v4 == req.IPv4 && v6 == req.IPv6 && len(req.Given) == 0 &&
		!slices.ContainsFunc(req.Addresses, func(want netip.Addr) bool { return !slices.Contains(r.addrs(), want) })
}

// assign gets an address of each family that the request asks for, IPv4 first,
// and says which of them are the reserve's in the datastore.
func (a *Attacher) assign(ctx context.Context, req AddRequest, r record) (out []Address, claims []netip.Addr, err error) {
	if len(req.Given) > 0 {
		for _, g := range req.Given {
			out = append(out, Address{Addr: g, Gateway: workload.Gateway(dataplane.FamilyOf(g))})
		}
		return out, nil, nil
	}
	ctx, cancel := a.storeContext(ctx)
	defer cancel()
	var reqs []AssignRequest
	add := func(f dataplane.Family, pools []string) {
		ar := a.assignRequest(r, f)
		ar.Pools, ar.Labels = pools, namespaceLabels(r, req.NamespaceLabels)
		for _, addr := range req.Addresses {
			if dataplane.FamilyOf(addr) == f {
				ar.Address = addr
			}
		}
		reqs = append(reqs, ar)
	}
	if req.IPv4 {
		add(dataplane.IPv4, req.IPv4Pools)
	}
	if req.IPv6 {
		add(dataplane.IPv6, req.IPv6Pools)
	}
	got, err := a.cfg.IPAM.Assign(ctx, reqs...)
	if err != nil {
		return nil, nil, storeError("assign an address", err)
	}
	for i, ar := range reqs {
		if dataplane.FamilyOf(got[i].Addr) != ar.Family || ar.Address.IsValid() && got[i].Addr != ar.Address {
			return nil, nil, fmt.Errorf("assign an address: the container has %s, asked for was %s: %w", got[i].Addr, wanted(ar), ErrNoAddress)
		}
		out = append(out, Address{Addr: got[i].Addr, Gateway: workload.Gateway(ar.Family), Block: got[i].Block})
		if got[i].Reserved {
			claims = append(claims, got[i].Addr)
		}
	}
	return out, claims, nil
}

func wanted(r AssignRequest) string {
	if r.Address.IsValid() {
		return r.Address.String()
	}
	return "an " + r.Family.String() + " address"
}

// program hands the host's side to the kernel's owner and waits for it. What
// an earlier container of the same pod wished of the device goes in the same
// step, and so does what old wished.
func (a *Attacher) program(ctx context.Context, r, old record) error {
	var del []dataplane.Key
	if old.State == stateAttached {
		del = keysOf(old.wishes(a.cfg.Wire))
	}
	for _, other := range a.others(r) {
		id := other.id()
		del = append(del, keysOf(other.wishes(a.cfg.Wire))...)
		other.State, other.Addresses = stateReleasing, nil
		if err := a.save(other); err != nil {
			return err
		}
		a.log.Info("device taken over from an earlier container of the pod",
			append(logID(id), "device", r.Device, "next", r.ContainerID)...)
		a.completeLater(id)
	}
	rev := a.cfg.Sink.Update(dataplane.SourceWorkload, r.wishes(a.cfg.Wire), del)
	if err := a.cfg.Sink.Wait(ctx, rev); err != nil {
		return fmt.Errorf("program the host's route: %w", err)
	}
	return nil
}

// undo takes back what a failed ADD made. The error says what it could not.
func (a *Attacher) undo(ctx context.Context, r record, cause error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	a.announce(r, false)
	if errors.Is(cause, store.ErrUnavailable) || a.behind() && !a.localOnly(r) {
		// Asking a datastore that is away costs the caller time and gains nothing.
		r.State = stateReleasing
		err := errors.Join(a.save(r), a.cut(ctx, r))
		a.completeLater(r.id())
		if err != nil {
			return fmt.Errorf("undo: %w", err)
		}
		return nil
	}
	if err := a.release(ctx, r); err != nil {
		a.completeLater(r.id())
		return fmt.Errorf("undo: %w", err)
	}
	return nil
}

func logID(id ID) []any {
	return []any{"network", id.Network, "container", id.ContainerID, "interface", id.Interface}
}
