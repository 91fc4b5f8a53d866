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
	"github.com/routerd/routerd/dataplane/internal/nl"
)

// Event says what the kernel found out about a neighbour.
type Event struct {
	LinkIndex int
	Addr      netip.Addr
	// Answer is Yes for one that answered, No for one that did not, and
	// Unknown for one of which something was heard, so that it is worth asking.
	Answer dataplane.Answer
	MAC    dataplane.MAC // zero: not known
	Fixed  bool          // somebody entered it by hand
}

// Asker asks about neighbours in one network namespace. Its methods may be
// called from any goroutine.
type Asker struct {
	requests *nl.Conn
	notices  *netlink.Conn
}

// Open returns an Asker for the network namespace of the calling thread.
func Open() (*Asker, error) {
	requests, err := nl.Dial(unix.NETLINK_ROUTE, 0, 0)
	if err != nil {
		return nil, err
	}
	notices, _, err := nl.Listen(unix.NETLINK_ROUTE, 0, unix.RTNLGRP_NEIGH)
	if err != nil {
		return nil, errors.Join(err, requests.Close())
	}
	return &Asker{requests, notices}, nil
}

// Close ends the Asker and a [Asker.Run] in progress.
func (a *Asker) Close() error { return errors.Join(a.requests.Close(), a.notices.Close()) }

// Ask makes the kernel find out about an address on a device. What it finds
// comes by [Asker.Run]. One that it knows to be there is asked when the
// kernel's own time for that has come; nothing comes then while it answers.
// Since Linux 5.16 one that is fixed is fixed no more then (NEIGH_UPDATE_F_USE).
func (a *Asker) Ask(linkIndex int, addr netip.Addr) error {
	return a.set(linkIndex, addr, 0, unix.NTF_USE, nil)
}

// Probe makes the kernel ask a neighbour at once of which it has the MAC.
func (a *Asker) Probe(linkIndex int, addr netip.Addr, mac dataplane.MAC) error {
	return a.set(linkIndex, addr, unix.NUD_PROBE, 0, mac[:])
}

func (a *Asker) set(linkIndex int, addr netip.Addr, state uint16, flags uint8, mac []byte) error {
	head := []byte{nl.Family(addr), 0, 0, 0} // struct ndmsg
	head = binary.NativeEndian.AppendUint32(head, uint32(linkIndex))
	head = binary.NativeEndian.AppendUint16(head, state)
	var b nl.Batch
	b.Begin(unix.RTM_NEWNEIGH, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, append(head, flags, 0)...)
	b.Addr(unix.NDA_DST, addr)
	if mac != nil {
		b.Bytes(unix.NDA_LLADDR, mac...)
	}
	if err := a.requests.Do(&b, nil); err != nil {
		return fmt.Errorf("ask for neighbour %s: %w", addr, err)
	}
	return nil
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
				if e, ok := eventOf(uint16(m.Header.Type), m.Data); ok {
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
	var b nl.Batch
	b.Begin(unix.RTM_GETNEIGH, 0, make([]byte, unix.SizeofNdMsg)...)
	// fn may wait for somebody who asks meanwhile: it is called when the connection
	// is free again.
	var events []Event
	err := a.requests.Dump(&b, func(m nl.Message) {
		if e, ok := eventOf(m.Type, m.Body); ok {
			events = append(events, e)
		}
	})
	// A dump that changes interrupted lacks nothing that does not come as a
	// notice.
	if err != nil && !errors.Is(err, nl.ErrInterrupted) {
		return fmt.Errorf("list the kernel's neighbours: %w", err)
	}
	for _, e := range events {
		fn(e)
	}
	return nil
}

// eventOf says what a message means; false: nothing.
func eventOf(kind uint16, b []byte) (Event, bool) {
	if kind != unix.RTM_NEWNEIGH || len(b) < unix.SizeofNdMsg || b[0] != unix.AF_INET && b[0] != unix.AF_INET6 {
		return Event{}, false
	}
	e := Event{LinkIndex: int(int32(nl.Value(b[4:]).Uint32()))}
	state := nl.Value(b[8:]).Uint16()
	for kind, v := range nl.Attributes(b[unix.SizeofNdMsg:]) {
		switch kind {
		case unix.NDA_DST:
			e.Addr = v.Addr()
		case unix.NDA_LLADDR:
			if len(v) == len(e.MAC) {
				e.MAC = dataplane.MAC(v)
			}
		}
	}
	if !e.Addr.IsValid() || nl.Family(e.Addr) != b[0] {
		return Event{}, false
	}
	switch {
	case state&unix.NUD_FAILED != 0:
		e.Answer = dataplane.No
	case state&(unix.NUD_REACHABLE|unix.NUD_PERMANENT|unix.NUD_NOARP) != 0:
		e.Answer, e.Fixed = dataplane.Yes, state&(unix.NUD_PERMANENT|unix.NUD_NOARP) != 0
	case state&unix.NUD_STALE != 0:
	default:
		return Event{}, false // on its way to one of the above
	}
	return e, true
}
