package survey

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/internal/nl"
)

// Entry is what the kernel has of a neighbour, or of where a VXLAN device sends the
// frames for a MAC address.
type Entry struct {
	MAC   dataplane.MAC
	Dst   netip.Addr // of the VTEP; invalid for a neighbour
	State uint16     // NUD_*; 0: there is no entry
}

// Resolved reports whether packets can be sent by the entry.
func (e Entry) Resolved() bool {
	return e.State&(unix.NUD_PERMANENT|unix.NUD_NOARP|unix.NUD_REACHABLE|unix.NUD_PROBE|unix.NUD_STALE|unix.NUD_DELAY) != 0
}

func (e Entry) String() string {
	for _, s := range []struct {
		bit  uint16
		name string
	}{
		{unix.NUD_PERMANENT, "PERMANENT"},
		{unix.NUD_NOARP, "NOARP"},
		{unix.NUD_REACHABLE, "REACHABLE"},
		{unix.NUD_STALE, "STALE"},
		{unix.NUD_DELAY, "DELAY"},
		{unix.NUD_PROBE, "PROBE"},
		{unix.NUD_FAILED, "FAILED"},
		{unix.NUD_INCOMPLETE, "INCOMPLETE"},
	} {
		if e.State&s.bit == 0 {
			continue
		}
		out := s.name
		if !e.MAC.IsZero() {
			out = "lladdr " + e.MAC.String() + " " + out
		}
		if e.Dst.IsValid() {
			out = "dst " + e.Dst.String() + " " + out
		}
		return out
	}
	return "none"
}

// Neighbour returns the kernel's entry of an address on a device; the zero Entry: there
// is none.
func (a *Asker) Neighbour(device string, addr netip.Addr) (Entry, error) {
	return a.entry(device, nl.Family(addr), 0, func(b *nl.Batch) { b.Addr(unix.NDA_DST, addr) })
}

// Forwarding returns where a VXLAN device sends the frames for a MAC address; the zero
// Entry: nowhere in particular.
func (a *Asker) Forwarding(device string, mac dataplane.MAC) (Entry, error) {
	return a.entry(device, unix.AF_BRIDGE, unix.NTF_SELF, func(b *nl.Batch) { b.Bytes(unix.NDA_LLADDR, mac[:]...) })
}

func (a *Asker) entry(device string, family, flags byte, key func(*nl.Batch)) (Entry, error) {
	link, err := net.InterfaceByName(device)
	if err != nil {
		return Entry{}, fmt.Errorf("find device %s: %w", device, err)
	}
	head := []byte{family, 0, 0, 0} // struct ndmsg
	head = binary.NativeEndian.AppendUint32(head, uint32(link.Index))
	var b nl.Batch
	b.Begin(unix.RTM_GETNEIGH, 0, append(head, 0, 0, flags, 0)...)
	key(&b)
	var e Entry
	err = a.conn.Do(&b, func(_ int, m nl.Message) {
		if m.Type != unix.RTM_NEWNEIGH || len(m.Body) < unix.SizeofNdMsg {
			return
		}
		e.State = nl.Value(m.Body[8:]).Uint16()
		rest := m.Body[unix.SizeofNdMsg:]
		if mac := nl.Find(rest, unix.NDA_LLADDR); len(mac) == len(e.MAC) {
			e.MAC = dataplane.MAC(mac)
		}
		if family == unix.AF_BRIDGE {
			e.Dst = nl.Find(rest, unix.NDA_DST).Addr()
		}
	})
	if errors.Is(err, unix.ENOENT) {
		return Entry{}, nil
	}
	if err != nil {
		return Entry{}, fmt.Errorf("read an entry of %s: %w", device, err)
	}
	return e, nil
}

// Permanent is an entry that is entered and does not age.
func Permanent(mac dataplane.MAC, dst netip.Addr) Entry {
	return Entry{MAC: mac, Dst: dst, State: unix.NUD_PERMANENT}
}

// Unanswered reports whether the kernel has asked and has no answer, or none yet.
func (e Entry) Unanswered() bool { return e.State&(unix.NUD_FAILED|unix.NUD_INCOMPLETE) != 0 }

// Failed reports whether the kernel has asked and had no answer.
func (e Entry) Failed() bool { return e.State&unix.NUD_FAILED != 0 }
