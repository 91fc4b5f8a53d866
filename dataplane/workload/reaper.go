package workload

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// reaper deletes devices, those that wait at one time together: the deletion
// of a device waits for two RCU grace periods, about 20 ms, and so does the
// deletion of fifty by one message that names their group.
type reaper struct {
	netlink *netlink.Handle
	socket  *nl.SocketHandle
	turn    chan struct{} // holds one token: whoever has it deletes for all

	mu      sync.Mutex
	waiting []*death
}

// death is one device to be deleted.
type death struct {
	link netlink.Link
	done chan struct{} // closed when err is set
	err  error
}

// newReaper opens sockets in the calling thread's namespace: its own, since a
// request holds its socket for as long as the kernel takes.
func newReaper() (*reaper, error) {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open netlink socket: %w", err)
	}
	s, err := nl.GetNetlinkSocketAt(netns.None(), netns.None(), unix.NETLINK_ROUTE)
	if err != nil {
		h.Close()
		return nil, fmt.Errorf("open netlink socket: %w", err)
	}
	return &reaper{netlink: h, socket: &nl.SocketHandle{Socket: s}, turn: make(chan struct{}, 1)}, nil
}

func (r *reaper) close() {
	r.netlink.Close()
	r.socket.Close()
}

// delete removes a device and returns when it is gone. One that does not exist
// is success.
func (r *reaper) delete(ctx context.Context, link netlink.Link) error {
	d := &death{link: link, done: make(chan struct{})}
	r.mu.Lock()
	r.waiting = append(r.waiting, d)
	r.mu.Unlock()

	select {
	case <-d.done:
		return d.err
	case <-ctx.Done():
		return r.withdraw(d, fmt.Errorf("delete device %s: %w", link.Attrs().Name, ctx.Err()))
	case r.turn <- struct{}{}:
	}
	defer func() { <-r.turn }()
	r.mu.Lock()
	batch := r.waiting
	r.waiting = nil
	r.mu.Unlock()
	// The batch is empty when another caller took d with its own and was done
	// just before the turn came.
	r.deleteAll(batch)
	<-d.done
	return d.err
}

// withdraw takes d out of the queue and returns err. When another caller is
// already deleting it, that caller's result counts.
func (r *reaper) withdraw(d *death, err error) error {
	r.mu.Lock()
	for i, x := range r.waiting {
		if x == d {
			r.waiting = append(r.waiting[:i], r.waiting[i+1:]...)
			r.mu.Unlock()
			return err
		}
	}
	r.mu.Unlock()
	<-d.done
	return d.err
}

func (r *reaper) deleteAll(batch []*death) {
	if len(batch) > 1 {
		r.deleteGroup(batch)
	}
	for _, d := range batch {
		// After the group's deletion this finds nothing; it is what remains when
		// a device could not be put into the group.
		if d.err == nil && !r.gone(d, len(batch) > 1) {
			d.err = r.deleteOne(d.link)
		}
		close(d.done)
	}
}

// gone reports whether the device is known not to exist any more.
func (r *reaper) gone(d *death, check bool) bool {
	if !check {
		return false
	}
	_, err := r.netlink.LinkByIndex(d.link.Attrs().Index)
	var missing netlink.LinkNotFoundError
	return errors.As(err, &missing)
}

func (r *reaper) deleteOne(link netlink.Link) error {
	err := r.netlink.LinkDel(link)
	if err != nil && !errors.Is(err, unix.ENODEV) && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("delete device %s: %w", link.Attrs().Name, err)
	}
	return nil
}

// deleteGroup puts the devices into a link group and deletes the group. The
// number is drawn anew each time from a range nobody uses by hand, so that no
// foreign device is in it. What fails here is left to deletion one by one.
func (r *reaper) deleteGroup(batch []*death) {
	group := 1<<30 + rand.Uint32N(1<<30)
	for _, d := range batch {
		_ = r.netlink.LinkSetGroup(d.link, int(group))
	}
	req := nl.NewNetlinkRequest(unix.RTM_DELLINK, unix.NLM_F_ACK)
	req.Sockets = map[int]*nl.SocketHandle{unix.NETLINK_ROUTE: r.socket}
	req.AddData(nl.NewIfInfomsg(unix.AF_UNSPEC))
	req.AddData(nl.NewRtAttr(unix.IFLA_GROUP, nl.Uint32Attr(group)))
	_, _ = req.Execute(unix.NETLINK_ROUTE, 0)
}
