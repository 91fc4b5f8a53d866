package lab

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/integration/lab/ns"
	"github.com/routerd/routerd/store"
)

// Supported reports whether this kernel has the device that an encapsulation
// needs. It asks the kernel to make one, in a namespace that is thrown away.
func Supported(e store.Encapsulation) (bool, error) {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "probe0"
	var link netlink.Link
	switch e {
	case store.IPIP, store.IPIPCrossSubnet:
		link = &netlink.Iptun{LinkAttrs: attrs, Local: []byte{127, 0, 0, 1}, Remote: []byte{127, 0, 0, 2}}
	case store.VXLAN, store.VXLANCrossSubnet:
		link = &netlink.Vxlan{LinkAttrs: attrs, VxlanId: 1, Port: VXLANPort}
	case store.Direct:
		return true, nil
	default:
		_, err := store.ParseEncapsulation(string(e))
		return false, err
	}
	err := ns.DoNew(func() error {
		fd, err := netns.Get()
		if err != nil {
			return err
		}
		defer fd.Close()
		h, err := netlink.NewHandleAt(fd, unix.NETLINK_ROUTE)
		if err != nil {
			return err
		}
		defer h.Close()
		return addLink(probePatience, func() error { return h.LinkAdd(link) })
	})
	if errors.Is(err, unix.EOPNOTSUPP) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("ask the kernel for a device of %s: %w", e, err)
	}
	return true, nil
}
