package kernel

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/internal/nl"
)

// UnsupportedError says that the kernel cannot make a kind of device, and what
// to do.
type UnsupportedError struct {
	Requirement dataplane.Requirement
	Err         error
}

func (e *UnsupportedError) Error() string {
	other := "VXLAN"
	if e.Requirement.Link == dataplane.LinkVXLAN {
		other = "IPIP or no encapsulation"
	}
	return fmt.Sprintf("this kernel cannot make %s devices: module %s is not loaded and cannot be loaded by itself: "+
		"run \"modprobe %[2]s\"; if there is no such module, install the distribution's extra kernel modules "+
		"(linux-modules-extra on Ubuntu, kernel-modules-extra on Fedora and RHEL, a kernel that is not cut down for "+
		"virtual machines on Debian); or choose %[3]s for the pool", e.Requirement.Link, e.Requirement.Module, other)
}

func (e *UnsupportedError) Unwrap() error { return e.Err }

// Supports reports whether the kernel can make the kind of device that is
// required: nil if it can, an [UnsupportedError] if it cannot. To find out, a
// device with a random name is made, which may load the module, and deleted at
// once. What was found to be supported is not looked for again.
func (k *Kernel) Supports(ctx context.Context, r dataplane.Requirement) error {
	if r.Link == "" {
		return nil
	}
	if _, known := k.supported.Load(r.Link); known {
		return nil
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	err := k.ns.do(func() error { return probeKind(r) })
	if err != nil {
		return err
	}
	k.supported.Store(r.Link, true)
	return nil
}

// probeKind tries a device kind in the calling thread's network namespace.
func probeKind(r dataplane.Requirement) error {
	c, err := dialConn()
	if err != nil {
		return err
	}
	defer c.Close()
	if r.Link == dataplane.LinkIPIP {
		if index, err := findLink(c, nameIPIP); err != nil || index != 0 {
			return err
		}
	}
	var id [4]byte
	if _, err := rand.Read(id[:]); err != nil {
		return fmt.Errorf("choose a name: %w", err)
	}
	l := dataplane.Link{Name: "rdprobe" + hex.EncodeToString(id[:]), Type: r.Link}
	if r.Link == dataplane.LinkVXLAN {
		l.VNI, l.Port = nl.Value(id[:]).Uint32()&0xffffff, 4789
	}
	var b builder
	b.createLink(l, 0)
	errs, err := c.Batch(&b.Batch, nil)
	if err != nil {
		return fmt.Errorf("try a device of kind %s: %w", r.Link, err)
	}
	switch err := errs[0]; {
	case errors.Is(err, unix.EOPNOTSUPP):
		return &UnsupportedError{Requirement: r, Err: err}
	case errors.Is(err, unix.EEXIST):
		return nil // only a kind that there is can find its like
	case err != nil:
		return fmt.Errorf("try a device of kind %s: %w", r.Link, err)
	}
	index, err := findLink(c, l.Name)
	if err != nil || index == 0 {
		return err
	}
	b.Reset()
	b.deleteLink(index)
	if errs, err := c.Batch(&b.Batch, nil); err != nil || errs[0] != nil {
		return fmt.Errorf("delete the device %s made for a test: %w", l.Name, errors.Join(err, errs[0]))
	}
	return nil
}

// findLink returns the index of the device with that name; 0 if there is none.
func findLink(c transport, name string) (int, error) {
	var b nl.Batch
	b.Begin(unix.RTM_GETLINK, 0, make([]byte, unix.SizeofIfInfomsg)...)
	index := 0
	err := c.Dump(&b, func(m nl.Message) {
		if l, ok := parseLink(m.Body); ok && l.name == name {
			index = l.index
		}
	})
	if err != nil && !errors.Is(err, nl.ErrInterrupted) {
		return 0, fmt.Errorf("list links: %w", err)
	}
	return index, nil
}
