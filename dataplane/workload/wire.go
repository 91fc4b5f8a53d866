package workload

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
)

// ErrClash says that a device which is not routerd's stands in the way.
var ErrClash = errors.New("in the way")

// HostMAC returns the MAC of every host end. All have the same, so that a
// workload's neighbour entry for its gateway is right on any host.
func HostMAC() dataplane.MAC { return dataplane.MAC{0xee, 0xee, 0xee, 0xee, 0xee, 0xee} }

// Gateway returns the address that a workload sends all its packets to. It is
// on no device; IPv6's is the link-local address that [HostMAC] gives.
func Gateway(f dataplane.Family) netip.Addr {
	if f == dataplane.IPv4 {
		return netip.AddrFrom4([4]byte{169, 254, 1, 1})
	}
	return netip.MustParseAddr("fe80::ecee:eeff:feee:eeee")
}

// Spec is what a wire should be.
type Spec struct {
	Device    string       // host end; see DeviceName
	Owner     Owner        // Owner.Interface is the end inside the namespace
	Netns     string       // path of the workload's network namespace
	Addresses []netip.Addr // of the workload
	MTU       int          // bytes, of both ends
	// Forwarding leaves the workload's kernel forwarding packets.
	Forwarding bool
	// MAC is the one that the workload's end gets; zero: the kernel's choice.
	MAC dataplane.MAC
	// TakeOver replaces a wire of the same name that another container has: a
	// Kubernetes pod whose container was made anew keeps its device's name.
	TakeOver bool
}

// End describes the workload's end of a wire.
type End struct {
	MAC dataplane.MAC
}

// Config is what [New] needs.
type Config struct {
	// HostNetns is the path of the network namespace of the host ends. Empty
	// means the process's own.
	HostNetns string
	// Sysctls is where the kernel's settings are: /proc/sys, unless that is
	// read-only in a container that is given them elsewhere. Empty: there.
	Sysctls string
}

// Wire makes, verifies and removes wires of one host. It is safe for
// concurrent use; calls about one device must not overlap, those about
// different devices run in parallel.
type Wire struct {
	sysctls  settings
	host     *namespace
	netlink  *netlink.Handle
	sockets  *sockets
	reaper   *reaper
	rpFilter string
	ipv6     bool // the kernel knows it
}

// New opens the host's side. The caller closes the result.
func New(cfg Config) (*Wire, error) {
	path := cfg.HostNetns
	if path == "" {
		path = "/proc/self/ns/net"
	}
	host, err := openNamespace(path)
	if err != nil {
		return nil, err
	}
	w := &Wire{sysctls: settings(cmp.Or(cfg.Sysctls, string(procSys))), host: host, sockets: newSockets(host)}
	err = host.do(func() error {
		if w.netlink, err = netlink.NewHandle(unix.NETLINK_ROUTE); err != nil {
			return fmt.Errorf("open netlink socket: %w", err)
		}
		if w.reaper, err = newReaper(); err != nil {
			return err
		}
		if w.ipv6, err = w.sysctls.hasIPv6(); err != nil {
			return err
		}
		w.rpFilter, err = w.sysctls.read("net/ipv4/conf/default/rp_filter")
		return err
	})
	if err != nil {
		w.Close()
		return nil, err
	}
	return w, nil
}

// Close releases what [New] opened. Wires stay.
func (w *Wire) Close() {
	if w.netlink != nil {
		w.netlink.Close()
	}
	if w.reaper != nil {
		w.reaper.close()
	}
	w.sockets.close()
	w.host.close()
}

// HostSysctls returns the settings that the host end of a wire needs, those
// that Calico makes, for a workload with these addresses.
func (w *Wire) HostSysctls(device string, addrs []netip.Addr) []dataplane.Sysctl {
	out := ipv4Sysctls(device, w.rpFilter)
	if w.ipv6 {
		out = append(out, ipv6Sysctls(device, slices.Contains(familiesOf(addrs), dataplane.IPv6))...)
	}
	return out
}

// Devices returns the host ends that routerd made, with the alias of each. A
// pair that was never finished has an empty alias.
func (w *Wire) Devices(_ context.Context) (map[string]string, error) {
	links, err := whole(w.netlink.LinkList)
	if err != nil {
		return nil, fmt.Errorf("list devices: %w", err)
	}
	out := make(map[string]string)
	for _, l := range links {
		if a := l.Attrs(); strings.HasPrefix(a.Name, DevicePrefix) && l.Type() == "veth" && isOurs(a.Alias) {
			out[a.Name] = a.Alias
		}
	}
	return out, nil
}

func isOurs(alias string) bool { return alias == "" || strings.HasPrefix(alias, aliasPrefix) }

// lookup finds a device on the host. A device that is not there is nil.
func (w *Wire) lookup(device string) (netlink.Link, error) {
	return linkByName(w.netlink, device)
}

func linkByName(h *netlink.Handle, name string) (netlink.Link, error) {
	l, err := h.LinkByName(name)
	var gone netlink.LinkNotFoundError
	if errors.As(err, &gone) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("look up device %s: %w", name, err)
	}
	return l, nil
}

// Attach makes the wire that spec describes, or what of it is missing. It
// returns [ErrNoNamespace] when the workload's namespace is gone and
// [ErrClash] when a foreign device has the name of either end. IPv6 addresses
// on a host that has IPv6 switched off are [ErrNoIPv6].
func (w *Wire) Attach(ctx context.Context, spec Spec) (End, error) {
	six := slices.Contains(familiesOf(spec.Addresses), dataplane.IPv6)
	if six {
		if err := w.host.do(w.sysctls.checkIPv6); err != nil {
			return End{}, fmt.Errorf("this host: %w", err)
		}
	}
	end, made, err := w.make(ctx, spec)
	if made || err != nil {
		return end, err
	}
	return w.mend(ctx, spec, six)
}

// mend makes of a wire what is missing.
func (w *Wire) mend(ctx context.Context, spec Spec, six bool) (End, error) {
	in, err := w.enter(spec.Netns)
	if err != nil {
		return End{}, err
	}
	defer in.close()

	host, err := w.hostEnd(ctx, spec, in)
	if err != nil {
		return End{}, err
	}
	if err := ctx.Err(); err != nil {
		return End{}, err
	}
	end, err := in.configure(spec)
	if err != nil {
		return End{}, err
	}
	if err := w.hostIPv6(host, six); err != nil {
		return End{}, fmt.Errorf("%s: %w", spec.Device, err)
	}
	// The host end comes up last: before that nothing reaches the workload.
	if err := w.finishHostEnd(spec, host); err != nil {
		return End{}, err
	}
	return end, w.settle(ctx, spec, in, host)
}

// hostEnd returns the host end of the pair whose other end is in the
// workload's namespace, and makes the pair if there is none.
func (w *Wire) hostEnd(ctx context.Context, spec Spec, in *inside) (netlink.Link, error) {
	host, err := w.lookup(spec.Device)
	if err != nil {
		return nil, err
	}
	if host != nil {
		usable, err := w.usable(spec, in, host)
		if err != nil || usable {
			return host, err
		}
		// A pair that never got its alias, whose other end is elsewhere, or that
		// is to be taken over: made anew.
		if err := w.reaper.delete(ctx, host); err != nil {
			return nil, err
		}
	}
	taken, err := linkByName(in.netlink, spec.Owner.Interface)
	if err != nil {
		return nil, err
	}
	if taken != nil {
		return nil, fmt.Errorf("interface %s (%s) exists in %s already: %w", spec.Owner.Interface, taken.Type(), spec.Netns, ErrClash)
	}

	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU = spec.Device, spec.MTU
	mac := HostMAC()
	attrs.HardwareAddr = net.HardwareAddr(mac[:])
	pair := netlink.NewVeth(attrs)
	pair.PeerName = spec.Owner.Interface
	pair.PeerNamespace = netlink.NsFd(in.ns.fd)
	if err := w.netlink.LinkAdd(pair); err != nil {
		return nil, fmt.Errorf("make veth pair %s, %s in %s: %w", spec.Device, spec.Owner.Interface, spec.Netns, err)
	}
	host, err = w.lookup(spec.Device)
	if err != nil {
		return nil, err
	}
	if host == nil {
		return nil, fmt.Errorf("device %s vanished when it was made: did its namespace end?", spec.Device)
	}
	// At once, so that what a kill leaves here says whose it is. The kernel
	// takes no alias in the message that makes the pair.
	if err := w.netlink.LinkSetAlias(host, spec.Owner.Alias()); err != nil {
		return nil, fmt.Errorf("set alias of %s: %w", spec.Device, err)
	}
	return host, nil
}

// usable reports whether an existing device is the host end of the wire that
// spec describes.
func (w *Wire) usable(spec Spec, in *inside, host netlink.Link) (bool, error) {
	alias := host.Attrs().Alias
	switch {
	case host.Type() != "veth" || !isOurs(alias):
		return false, fmt.Errorf("device %s (%s, alias %q) is not routerd's: %w", spec.Device, host.Type(), alias, ErrClash)
	case alias == "":
		return false, nil
	case alias != spec.Owner.Alias() && !spec.TakeOver:
		return false, fmt.Errorf("device %s belongs to %s: %w", spec.Device, strings.TrimPrefix(alias, aliasPrefix), ErrClash)
	case alias != spec.Owner.Alias():
		return false, nil
	}
	return w.paired(host, spec.Owner.Interface, in)
}

// paired reports whether host's other end is the device of that name in the
// workload's namespace.
func (w *Wire) paired(host netlink.Link, name string, in *inside) (bool, error) {
	peer, err := linkByName(in.netlink, name)
	if err != nil || peer == nil {
		return false, err
	}
	// The kernel numbers other namespaces as seen from this one.
	id, err := w.netlink.GetNetNsIdByFd(in.ns.fd)
	if err != nil {
		return false, fmt.Errorf("get number of namespace %s: %w", in.ns.path, err)
	}
	a := host.Attrs()
	return peer.Type() == "veth" && a.ParentIndex == peer.Attrs().Index && a.NetNsID == id, nil
}

// hostIPv6 makes the host end, which is down as yet, the workload's IPv6
// gateway, or keeps IPv6 off it: a workload without an IPv6 address is not to
// reach the host by a link-local one.
//
// The kernel gives it the gateway's address by itself, but would use it only
// after a second or two of duplicate address detection, and until then would
// not ask for the workload's MAC.
func (w *Wire) hostIPv6(host netlink.Link, on bool) error {
	if !w.ipv6 {
		return nil
	}
	name := host.Attrs().Name
	value := "1"
	if on {
		value = "0"
	}
	if err := w.host.do(func() error { return w.sysctls.write("net/ipv6/conf/"+name+"/disable_ipv6", value) }); err != nil || !on {
		return err
	}
	gw := hostPrefix()
	if err := w.netlink.AddrReplace(host, withoutDAD(gw)); err != nil {
		return fmt.Errorf("add address %s: %w", gw, err)
	}
	return nil
}

// hostPrefix is the IPv6 gateway's address as the host end has it.
func hostPrefix() netip.Prefix { return netip.PrefixFrom(Gateway(dataplane.IPv6), 64) }

func (w *Wire) finishHostEnd(spec Spec, host netlink.Link) error {
	a := host.Attrs()
	if mac := HostMAC(); a.HardwareAddr.String() != mac.String() {
		if err := w.netlink.LinkSetHardwareAddr(host, net.HardwareAddr(mac[:])); err != nil {
			return fmt.Errorf("set address of %s: %w", spec.Device, err)
		}
	}
	if err := setMTU(w.netlink, host, spec.MTU, ""); err != nil {
		return err
	}
	if a.Flags&net.FlagUp == 0 {
		if err := w.netlink.LinkSetUp(host); err != nil {
			return fmt.Errorf("set %s up: %w", spec.Device, err)
		}
	}
	return nil
}

// Detach removes the wire of owner whose host end is device. A device that is
// not there, and one that belongs to another owner by now, is success. The
// workload's namespace need not exist.
func (w *Wire) Detach(ctx context.Context, device string, owner Owner) error {
	host, err := w.lookup(device)
	if err != nil {
		return err
	}
	if host == nil {
		return nil
	}
	alias := host.Attrs().Alias
	if host.Type() != "veth" || (alias != "" && alias != owner.Alias()) {
		return nil
	}
	return w.reaper.delete(ctx, host)
}
