package attach

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/workload"
)

// Restore takes up what an earlier life of the daemon left: it reads the
// records, hands to the sink what the attachments wish whose devices are there,
// and announces those that the datastore does not know yet. Of the others, from before a reboot, only the record stays, for DEL
// and GC. An ADD that was cut short is released by [Attacher.Run], unless the
// runtime repeats it first. Call it once, before serving.
func (a *Attacher) Restore(ctx context.Context) error {
	records, err := a.load()
	if err != nil {
		return err
	}
	if err := a.loadMTU(records); err != nil {
		return err
	}
	a.loadKept()
	devices, err := a.cfg.Wire.Devices(ctx)
	if err != nil {
		return fmt.Errorf("restore attachments: %w", err)
	}
	var (
		wishes []dataplane.Object
		live   int
		untold []record // the datastore does not know of them yet
	)
	a.mu.Lock()
	for id, r := range records {
		if r.State != stateAttached {
			// Its address may have been given back already, and be another's.
			r.State, r.Addresses = stateReleasing, nil
		}
		a.set(r)
		a.touched[id] = true
		if r.State == stateAttached && r.there(devices) {
			wishes = append(wishes, r.wishes(a.cfg.Wire)...)
			live++
			if r.Queued {
				untold = append(untold, r)
			}
		}
	}
	a.mu.Unlock()
	for _, r := range untold {
		a.announce(r, true)
	}
	a.cfg.Sink.Replace(dataplane.SourceWorkload, wishes)
	a.cfg.Sink.Synced(dataplane.SourceWorkload)
	a.mu.Lock()
	a.restored = true
	a.mu.Unlock()
	a.writeLater()
	a.log.Info("attachments restored", "records", len(records), "live", live)
	return nil
}

// Check verifies that an attachment is as ADD made it, and that the runtime
// remembers it rightly. It changes nothing. The error matches [ErrUnknown] or
// [workload.ErrDiffers] and names every difference.
func (a *Attacher) Check(ctx context.Context, req CheckRequest) error {
	if !a.isRestored() {
		return errStarting()
	}
	unlock, r, known, err := a.lock(ctx, req.ID, Workload{})
	if err != nil {
		return err
	}
	defer unlock()
	if !known || r.State != stateAttached {
		return fmt.Errorf("container %s, interface %s in network %s: %w", req.ID.ContainerID, req.ID.Interface, req.ID.Network, ErrUnknown)
	}
	errs := []error{remembered(req, r)}
	if r.AddressesOnly != req.AddressesOnly {
		errs = append(errs, errRole(r))
	}
	if r.AddressesOnly {
		return errors.Join(errs...)
	}
	spec := r.spec()
	if req.Netns != "" {
		spec.Netns = req.Netns
	}
	errs = append(errs, a.cfg.Wire.Verify(ctx, spec, r.mac()))
	for _, addr := range r.addrs() {
		errs = append(errs, a.cfg.Wire.VerifyRoute(ctx, r.Device, addr))
	}
	return errors.Join(errs...)
}

// remembered compares what the runtime knows with the record.
func remembered(req CheckRequest, r record) error {
	var errs []error
	differ := func(what, have, want string) {
		errs = append(errs, fmt.Errorf("%s in prevResult is %s, attached was %s: %w", what, have, want, workload.ErrDiffers))
	}
	if req.Device != "" && req.Device != r.Device {
		differ("the host's interface", req.Device, r.Device)
	}
	if req.MAC != "" && !strings.EqualFold(req.MAC, r.MAC) {
		differ("the container's MAC address", req.MAC, r.MAC)
	}
	if len(req.Addresses) > 0 && !sameAddrs(req.Addresses, r.addrs()) {
		differ("the address", fmt.Sprint(req.Addresses), fmt.Sprint(r.addrs()))
	}
	return errors.Join(errs...)
}

func sameAddrs(a, b []netip.Addr) bool {
	set := make(map[netip.Addr]bool, len(a))
	for _, x := range a {
		set[x] = true
	}
	for _, x := range b {
		if !set[x] {
			return false
		}
	}
	return len(set) == len(b)
}
