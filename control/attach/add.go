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
)

// AddRequest is what ADD asks for.
type AddRequest struct {
	ID         ID
	Workload   Workload
	Netns      string // path of the container's network namespace
	MTU        int    // bytes; 0: what Attacher.SetMTU said last
	IPv4       bool   // give an IPv4 address
	IPv6       bool
	IPv4Pools  []string      // names or CIDRs; empty: chosen by the pools' selectors
	IPv6Pools  []string      // likewise
	Addresses  []netip.Addr  // these, at most one of a family; the others: any
	Forwarding bool          // leave IP forwarding on inside the container
	MAC        dataplane.MAC // of the container's end; zero: the kernel's choice

	// PodUID is that of the pod; empty: the runtime does not say it.
	PodUID string
	// Sources are further prefixes that the workload may send from, where the
	// configuration of the cluster lets workloads do so at all; Floating are
	// addresses that are translated to its own, of the same family.
	Sources  []string
	Floating []netip.Addr

	// PodCIDR says that the configuration wants addresses of the Node's pod CIDRs.
	PodCIDR bool

	// Node is the node that the request means; empty: whichever this is.
	Node string
	// NamespaceLabels are those of the workload's namespace, for pools that
	// choose by them.
	NamespaceLabels map[string]string
	// Given are addresses that another IPAM gave and takes back. Then none is
	// assigned, and IPv4, IPv6, pools and Addresses do not count.
	Given []netip.Addr
}

// Address is an address of an attachment.
type Address struct {
	Addr    netip.Addr   `json:"addr"`
	Gateway netip.Addr   `json:"gateway"` // what the container's default route names
	Block   netip.Prefix `json:"block"`   // the IPAM block that Addr is from
}

// Result is what ADD made.
type Result struct {
	Device    string // on the host
	HostMAC   dataplane.MAC
	MAC       dataplane.MAC // inside the container
	MTU       int           // bytes
	Addresses []Address
}

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
	if err := a.errNotServing(); err != nil {
		return Result{}, err
	}
	req, said, err := a.completed(ctx, req)
	if err != nil {
		return Result{}, err
	}
	r, err := a.newRecord(req, said)
	if err != nil {
		return Result{}, err
	}
	l, err := a.locks.lock(ctx, req.ID, req.Workload)
	if err != nil {
		return Result{}, err
	}
	defer l.unlock()
	old := l.record
	if old.State.attached() {
		return a.addAgain(ctx, req, r, old)
	}
	if r, l.known, err = a.follow(ctx, r, old, l.known); err != nil {
		return Result{}, err
	}
	if l.known {
		// Names made once stay: those of the device and of the endpoint.
		r.Device = old.Device
		r.Orchestrator, r.Namespace, r.Pod = old.Orchestrator, old.Namespace, old.Pod
	}
	x := &addition{Attacher: a, req: req, r: r, inherits: l.known || r.Reused}
	if err := x.run(ctx); err != nil {
		return Result{}, errors.Join(err, a.releaser.undo(ctx, x.r, err))
	}
	return x.r.result(), nil
}

// addAgain is Add of an attachment that is complete, old: nothing is done, or what
// is missing of it is made whole. A failure takes nothing from it.
func (a *Attacher) addAgain(ctx context.Context, req AddRequest, r, old record) (Result, error) {
	if old.AddressesOnly {
		return Result{}, fmt.Errorf("%w: %w", errRole(old), ErrInvalid)
	}
	old.Netns = req.Netns
	if old.State != attachedFenced && a.intact(ctx, old) {
		if err := a.host.wait(ctx, a.host.show(old)); err != nil {
			return Result{}, err
		}
		return old.result(), a.awaitRules(ctx, old)
	}
	a.log.Info("attachment is damaged; made whole", logID(req.ID)...)
	r.MTU, r.FixedMTU, r.Since = old.MTU, old.FixedMTU, old.Since
	v4, v6 := old.families()
	r.MTU = a.mtus.current(r, v4, v6)
	r.Device = old.Device
	r.Orchestrator, r.Namespace, r.Pod = old.Orchestrator, old.Namespace, old.Pod
	x := &addition{Attacher: a, req: req, r: r, old: &old, inherits: true}
	if err := x.run(ctx); err != nil {
		return Result{}, err
	}
	return x.r.result(), nil
}

// follow prepares for an attachment of which there may be an earlier one, that is
// on its way out or was cut short. It reports whether the new one takes its record
// over as it is.
func (a *Attacher) follow(ctx context.Context, r, old record, known bool) (record, bool, error) {
	if err := a.ledger.errNamesake(r); err != nil {
		return r, false, err
	}
	if !known || !old.State.leaving() || !a.behind() {
		return r, known, nil
	}
	r, err := a.releaser.succeed(ctx, r, old)
	if err != nil {
		a.schedule.failed(old.id())
		return r, false, fmt.Errorf("release what an earlier call left: %w", err)
	}
	return r, false, nil
}

// completed derives from a request what it does not say itself, and what the
// endpoint is to say.
func (a *Attacher) completed(ctx context.Context, req AddRequest) (AddRequest, *more, error) {
	if req.Node != "" && req.Node != a.node {
		return req, nil, fmt.Errorf("the configuration's nodename is %q, and this host is %q: leave nodename out, or correct it: %w", req.Node, a.node, ErrInvalid)
	}
	if req.PodCIDR && !a.usePodCIDR {
		return req, nil, fmt.Errorf("the configuration's ipam.subnet is usePodCidr, and the daemon gives addresses of pools: set ipam.usePodCIDR in routerd.yaml on every host, or take ipam.subnet out: %w", ErrInvalid)
	}
	req, said, err := a.pods.complete(ctx, req)
	if err != nil || len(req.Given) == 0 {
		return req, said, err
	}
	req.IPv4, req.IPv6, req.Addresses = false, false, nil
	for _, g := range req.Given {
		if !g.IsValid() || g.Is4In6() || g.Zone() != "" {
			return req, nil, fmt.Errorf("given address %q is not a plain IPv4 or IPv6 address: %w", g, ErrInvalid)
		}
		req.IPv4 = req.IPv4 || g.Is4()
		req.IPv6 = req.IPv6 || g.Is6()
	}
	return req, said, nil
}

// newRecord checks a request and returns the record of what it asks for.
func (a *Attacher) newRecord(req AddRequest, said *more) (record, error) {
	mtu := req.MTU
	if mtu == 0 {
		mtu = a.mtus.wanted(req.IPv4, req.IPv6)
	}
	if err := checkNames(req.ID); err != nil {
		return record{}, err
	}
	if req.Netns == "" {
		return record{}, fmt.Errorf("path of the network namespace is required: %w", ErrInvalid)
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
	r.Since = time.Now().UTC().Truncate(time.Millisecond)
	r.Netns, r.MTU, r.Forwarding, r.Given = req.Netns, mtu, req.Forwarding, len(req.Given) > 0
	r.Named, r.More = len(req.Addresses) > 0, said
	if !req.MAC.IsZero() {
		r.MAC = req.MAC.String()
	}
	// A request that repeats the operator's number, as the configuration of the
	// plugin does that the daemon writes, is not one of its own.
	r.FixedMTU = req.MTU != 0 && req.MTU != a.mtus.operator()
	return r, a.endpoints.check(r)
}

func checkNames(id ID) error {
	if id.Network == "" || id.ContainerID == "" || id.Interface == "" {
		return fmt.Errorf("network name, container id and interface name are required: %w", ErrInvalid)
	}
	return nil
}

// checkRequested checks the families and the addresses that a request names.
func checkRequested(req AddRequest) error {
	if !req.IPv4 && !req.IPv6 {
		return fmt.Errorf("ipam.assign_ipv4 and ipam.assign_ipv6 are both off: a workload needs an address; set one to \"true\": %w", ErrInvalid)
	}
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

// intact reports whether a complete attachment is still as it was made.
func (a *Attacher) intact(ctx context.Context, r record) bool {
	err := a.host.Verify(ctx, r.spec(), r.mac())
	if err != nil {
		a.log.Debug("attachment differs", append(logID(r.id()), "error", err)...)
	}
	return err == nil
}

// addition is an ADD under way.
type addition struct {
	*Attacher
	req      AddRequest
	r        record  // as far as it came
	old      *record // a complete attachment that is made whole; it stays on disk until the new one is complete
	inherits bool    // the datastore may know of an earlier attachment of these names
	later    bool    // the datastore is written after the answer
	shown    bool    // the endpoint was announced
}

// run makes an attachment, step by step.
func (x *addition) run(ctx context.Context) error {
	err := x.steps.run(ctx,
		step{"intent", x.intent},
		step{"address", x.address},
		step{"vacant", func(ctx context.Context) error { return x.reclaimer.vacant(ctx, x.r) }},
		step{"record", x.record},
		step{"wire", x.wire},
		step{"route", x.route},
		step{"endpoint", x.endpoint},
		step{"rules", func(ctx context.Context) error { return x.awaitRules(ctx, x.r) }},
		step{"done", x.done},
	)
	if err == nil && x.later {
		x.work.Set()
	}
	return err
}

// intent writes down that there is to be an attachment.
func (x *addition) intent(context.Context) (err error) {
	if x.old != nil {
		return nil
	}
	if err := x.ledger.room(); err != nil {
		return err
	}
	if x.r, err = x.ledger.save(x.r, begun); err != nil || x.r.AddressesOnly {
		return err
	}
	// An MTU that was set since the request was read did not see the record, and one
	// that is set from now on does.
	x.r.MTU = x.mtus.current(x.r, x.req.IPv4, x.req.IPv6)
	return nil
}

// address gets the addresses, and notes what the datastore is to be written of
// them. An attachment that is made whole has its own.
func (x *addition) address(ctx context.Context) error {
	if x.old != nil {
		// It may be flushed just now; to flush it again does no harm.
		x.r.Claims, x.r.Endpoint, x.r.Reused, x.r.Former = x.old.Claims, x.old.Endpoint, x.old.Reused, x.old.Former
		x.later = x.old.State.pending() || x.behind()
	}
	x.ledger.note(x.r.id(), asked, nil)
	if x.old != nil && x.later && x.old.State != attachedFenced && sameFamilies(x.req, *x.old) {
		x.r.Addresses = x.old.Addresses
		return nil
	}
	got, claims, err := x.addresses.assign(ctx, x.req, x.r)
	if refused(err) && x.releaser.hurry(ctx, x.r) {
		got, claims, err = x.addresses.assign(ctx, x.req, x.r)
	}
	if err != nil {
		return err
	}
	x.r.Addresses = got
	x.later = x.later || x.behind() || len(claims) > 0
	x.r.Claims = append(slices.Clone(x.r.Claims), slices.DeleteFunc(slices.Clone(claims), func(c netip.Addr) bool { return slices.Contains(x.r.Claims, c) })...)
	if !x.inherits && len(claims) > 0 && len(claims) == len(got) {
		x.ledger.note(x.r.id(), reserved, nil)
	}
	return nil
}

// sameFamilies reports whether a request could have got the addresses that an
// attachment has.
func sameFamilies(req AddRequest, r record) bool {
	v4, v6 := r.families()
	return v4 == req.IPv4 && v6 == req.IPv6 && len(req.Given) == 0 &&
		!slices.ContainsFunc(req.Addresses, func(want netip.Addr) bool { return !slices.Contains(r.addrs(), want) })
}

// record writes down the addresses.
func (x *addition) record(context.Context) (err error) {
	if x.old == nil {
		x.r, err = x.ledger.save(x.r, none)
	}
	return err
}

// wire connects the container. Its rules, the disk and the wire take about as
// long as each other. A device that an earlier container of the pod still has
// keeps its rules until then.
func (x *addition) wire(ctx context.Context) error {
	if x.later && x.old == nil && !x.ledger.taken(x.r) {
		x.own.announce(x.r)
		x.shown = true
	}
	flushed := make(chan error, 1)
	go func() { flushed <- x.ledger.sync() }()
	end, err := x.host.Attach(ctx, x.r.spec())
	if flushErr := <-flushed; err == nil && flushErr != nil {
		return flushErr
	}
	if err != nil {
		return fmt.Errorf("connect the container: %w", err)
	}
	x.r.MAC = end.MAC.String()
	return nil
}

// route hands the host's side to the kernel's owner and waits for it. What an
// earlier container of the same pod wanted of the device goes in the same step,
// and so does what the attachment wanted before it was made whole.
func (x *addition) route(ctx context.Context) error {
	earlier, err := x.releaser.takeOver(x.r)
	if err != nil {
		return err
	}
	if x.old != nil {
		earlier = append(earlier, *x.old)
	}
	var del []dataplane.Key
	for _, r := range earlier {
		del = append(del, keysOf(r.want(x.host.Wire))...)
	}
	return x.host.wait(ctx, x.host.replace(del, x.r))
}

// endpoint announces the endpoint, or writes it.
func (x *addition) endpoint(ctx context.Context) (err error) {
	switch {
	case x.shown:
	case x.later:
		x.own.announce(x.r)
	default:
		x.r.Endpoint, err = x.endpoints.putNow(ctx, x.r, "write the workload endpoint")
	}
	return err
}

// done writes down that the attachment is complete.
func (x *addition) done(context.Context) (err error) {
	e := stored
	if x.later {
		e = completed
	}
	x.r, err = x.ledger.save(x.r, e)
	return err
}

// awaitRules waits for the rules of an attachment. Before they are in force the
// device carries nothing, so a workload that is started without them would find
// no network.
func (a *Attacher) awaitRules(ctx context.Context, r record) error {
	if a.rules == nil {
		return nil
	}
	ctx, cancel := bounded(ctx, a.rulesTimeout)
	defer cancel()
	if err := a.rules(ctx, r.Device, r.addrs()); err != nil {
		return fmt.Errorf("wait for the policy rules of %s: %w: %w", r.Device, ErrNotReady, err)
	}
	return nil
}

// errRole says that a container's interface was made otherwise.
func errRole(r record) error {
	made := "with its interface by routerd-cni as the network plugin"
	if r.AddressesOnly {
		made = "with addresses alone, by routerd-cni as the IPAM plugin of another"
	}
	return fmt.Errorf("container %s, interface %s in network %s was attached %s; detach it first: %w", r.ContainerID, r.Interface, r.Network, made, workload.ErrDiffers)
}
