package attach

import (
	"context"
	"errors"
	"fmt"
)

// locks has the locks of attachments: that of the attachment itself, and that of
// what it shares with others, always acquired in this order.
type locks struct {
	keys     keyedMutex
	ledger   *ledger
	gateways *gateways
}

// locked is an attachment whose locks are held.
type locked struct {
	record
	known  bool // there is a record; else it is derived from the names
	unlock func()
}

// lock waits for the locks of an attachment.
func (l *locks) lock(ctx context.Context, id ID, w Workload) (locked, error) {
	return l.lockBy(ctx, recordOf(id, w), l.keys.lock)
}

// lockBy is lock for an attachment whose record is like r, if there is none, with how to wait for
// each lock. It waits for neither while it holds the other: who holds that of a device may wait
// for the attachment of another container of the pod ([locks.lockBeside]).
func (l *locks) lockBy(ctx context.Context, r record, wait func(context.Context, string) (func(), error)) (locked, error) {
	for {
		free, err := wait(ctx, attachmentLock(r.id()))
		if err != nil {
			return locked{}, fmt.Errorf("wait for another call about the container: %w", err)
		}
		have, _ := l.recorded(r)
		shared := l.shared(have)
		if freeShared, ok := l.keys.tryLock(shared); ok {
			// Whoever took the device over changed the record.
			have, known := l.recorded(r)
			return locked{have, known, func() { freeShared(); free() }}, nil
		}
		free()
		freeShared, err := wait(ctx, shared)
		if err != nil {
			return locked{}, fmt.Errorf("wait for another call about device %s: %w", have.Device, err)
		}
		freeShared()
	}
}

// recorded returns the record of an attachment, or r, which is derived, where there is none.
func (l *locks) recorded(r record) (record, bool) {
	if have, known := l.ledger.get(r.id()); known {
		return have, true
	}
	return r, false
}

// tryLock takes the locks of an attachment that has a record, unless another call has
// them.
func (l *locks) tryLock(id ID) (locked, bool) {
	free, ok := l.keys.tryLock(attachmentLock(id))
	if !ok {
		return locked{}, false
	}
	r, known := l.ledger.get(id)
	if known {
		var freeShared func()
		if freeShared, ok = l.keys.tryLock(l.shared(r)); ok {
			// Whoever took the device over changed the record.
			if r, known = l.ledger.get(id); known {
				return locked{r, true, func() { freeShared(); free() }}, true
			}
			freeShared()
		}
	}
	free()
	return locked{}, false
}

// errBusy says that another call has a lock.
var errBusy = errors.New("another call is under way")

// lockBeside takes the locks of an attachment for who has those of another, own, with which it
// may share a device. It does not wait for who is about another device, who may wait for own's.
func (l *locks) lockBeside(ctx context.Context, id ID, own record) (locked, error) {
	free := func() {}
	if attachment := attachmentLock(id); attachment != attachmentLock(own.id()) {
		var err error
		if free, err = l.keys.lock(ctx, attachment); err != nil {
			return locked{}, fmt.Errorf("wait for another call about the container: %w", err)
		}
	}
	r, known := l.recorded(recordOf(id, Workload{}))
	shared := l.shared(r)
	if shared == l.shared(own) {
		return locked{r, known, free}, nil
	}
	freeShared, ok := l.keys.tryLock(shared)
	if !ok {
		free()
		return locked{}, errBusy
	}
	return locked{r, known, func() { freeShared(); free() }}, nil
}

// shared names the lock of what an attachment shares with others. Two have
// one device's name when a pod's container is made anew. Of addresses alone the
// device is another plugin's, such as a bridge that all containers have, and
// they share only a gateway that goes with the last of them.
func (l *locks) shared(r record) string {
	switch {
	case !r.AddressesOnly:
		return "device " + r.Device
	case l.gateways.endsWith(r.Network):
		return "gateway " + r.Network
	}
	return "addresses " + r.Network + "/" + r.ContainerID + "/" + r.Interface
}

// attachmentLock names the lock of an attachment: one for all that have its
// handle.
func attachmentLock(id ID) string { return "attachment " + handle(id) }
