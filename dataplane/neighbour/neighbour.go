// Package neighbour finds out whether hosts answer as neighbours: by ARP (RFC
// 826) in IPv4, by neighbour solicitation (RFC 4861, section 7.2) in IPv6.
//
// It sends nothing itself. It asks the kernel to use an entry (NTF_USE), as a
// packet to the neighbour would, and hears what became of it.
package neighbour

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
)

// Event says what the kernel found out about a neighbour.
type Event struct {
	LinkIndex int
	Addr      netip.Addr
	// Answer is Yes for one that answered, No for one that did not, and
	// Unknown for one of which something was heard, so that it is worth asking.
	Answer dataplane.Answer
	MAC    dataplane.MAC // zero: not known
}

// Asker asks about neighbours in one network namespace. Its methods may be
// called from any goroutine.
type Asker struct {
	requests *netlink.Conn
	notices  *netlink.Conn
}

// Open returns an Asker for the network namespace of the calling thread.
func Open() (*Asker, error) {
	requests, err := netlink.Dial(unix.NETLINK_ROUTE, nil)
	if err != nil {
		return nil, fmt.Errorf("open rtnetlink: %w", err)
	}
	notices, err := netlink.Dial(unix.NETLINK_ROUTE, &netlink.Config{Groups: 1 << (unix.RTNLGRP_NEIGH - 1)})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("listen to the kernel's neighbours: %w", err), requests.Close())
	}
	return &Asker{requests, notices}, nil
}

// Close ends the Asker and a [Asker.Run] in progress.
func (a *Asker) Close() error { return errors.Join(a.requests.Close(), a.notices.Close()) }

// Ask makes the kernel find out about an address on a device. What it finds
// comes by [Asker.Run]. One that it knows to be there is asked when the
// kernel's own time for that has come; nothing comes then while it answers.
func (a *Asker) Ask(linkIndex int, addr netip.Addr) error {
	return a.set(linkIndex, addr, 0, unix.NTF_USE, nil)
}

// Probe makes the kernel ask a neighbour at once of which it has the MAC.
func (a *Asker) Probe(linkIndex int, addr netip.Addr, mac dataplane.MAC) error {
	return a.set(linkIndex, addr, unix.NUD_PROBE, 0, mac[:])
}

func (a *Asker) set(linkIndex int, addr netip.Addr, state uint16, flags uint8, mac []byte) error {
	ae := netlink.NewAttributeEncoder()
	ae.Bytes(unix.NDA_DST, addr.AsSlice())
	if mac != nil {
		ae.Bytes(unix.NDA_LLADDR, mac)
	}
	attrs, err := ae.Encode()
	if err != nil {
		return fmt.Errorf("ask for neighbour %s: %w", addr, err)
	}
	b := []byte{family(addr), 0, 0, 0}
	b = binary.NativeEndian.AppendUint32(b, uint32(linkIndex))
	b = binary.NativeEndian.AppendUint16(b, state)
	b = append(b, flags, 0)
	_, err = a.requests.Execute(netlink.Message{
		Header: netlink.Header{Type: unix.RTM_NEWNEIGH, Flags: netlink.Request | netlink.Acknowledge | netlink.Create | netlink.Replace},
		Data:   append(b, attrs...),
	})
	if err != nil {
		return fmt.Errorf("ask for neighbour %s: %w", addr, err)
	}
	return nil
}

func family(a netip.Addr) byte {
	if a.Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

// Run calls fn for everything that the kernel says about neighbours, what it
// knows already first. It returns when ctx ends, which closes the Asker.
func (a *Asker) Run(ctx context.Context, fn func(Event)) error {
	stop := context.AfterFunc(ctx, func() { _ = a.Close() })
	defer stop()
	for again := true; again; {
		if err := a.List(fn); err != nil && ctx.Err() == nil {
			return err
		}
		again = false
		for !again {
			msgs, err := a.notices.Receive()
			switch {
			case ctx.Err() != nil:
				return ctx.Err()
			case errors.Is(err, unix.ENOBUFS):
				again = true // some were lost: what counts is in the table
			case err != nil:
				return fmt.Errorf("listen to the kernel's neighbours: %w", err)
			}
			for _, m := range msgs {
				if e, ok := eventOf(m); ok {
					fn(e)
				}
			}
		}
	}
	return nil
}

// List calls fn for what the kernel knows of all neighbours now. It may be called
// beside [Asker.Run], whose events may then tell what was before.
func (a *Asker) List(fn func(Event)) error {
	msgs, err := a.requests.Execute(netlink.Message{
		Header: netlink.Header{Type: unix.RTM_GETNEIGH, Flags: netlink.Request | netlink.Dump},
		Data:   make([]byte, headerLen),
	})
	// A listing that changes interrupted lacks nothing that does not come as a
	// notice.
	if err != nil && !errors.Is(err, unix.EINTR) {
		return fmt.Errorf("list the kernel's neighbours: %w", err)
	}
	for _, m := range msgs {
		if e, ok := eventOf(m); ok {
			fn(e)
		}
	}
	return nil
}

// headerLen is the size of struct ndmsg (linux/neighbour.h).
const headerLen = 12

// eventOf says what a message means; false: nothing.
func eventOf(m netlink.Message) (Event, bool) {
	if m.Header.Type != unix.RTM_NEWNEIGH || len(m.Data) < headerLen || m.Data[0] != unix.AF_INET && m.Data[0] != unix.AF_INET6 {
		return Event{}, false
	}
	e := Event{LinkIndex: int(int32(binary.NativeEndian.Uint32(m.Data[4:])))}
	state := binary.NativeEndian.Uint16(m.Data[8:])
	ad, err := netlink.NewAttributeDecoder(m.Data[headerLen:])
	if err != nil {
		return Event{}, false
	}
	for ad.Next() {
		switch ad.Type() {
		case unix.NDA_DST:
			e.Addr, _ = netip.AddrFromSlice(ad.Bytes())
		case unix.NDA_LLADDR:
			if b := ad.Bytes(); len(b) == len(e.MAC) {
				e.MAC = dataplane.MAC(b)
			}
		}
	}
	if ad.Err() != nil || !e.Addr.IsValid() || family(e.Addr) != m.Data[0] {
		return Event{}, false
	}
	switch {
	case state&unix.NUD_FAILED != 0:
		e.Answer = dataplane.No
	case state&(unix.NUD_REACHABLE|unix.NUD_PERMANENT|unix.NUD_NOARP) != 0:
		e.Answer = dataplane.Yes
	case state&unix.NUD_STALE != 0:
	default:
		return Event{}, false // on its way to one of the above
	}
	return e, true
}
