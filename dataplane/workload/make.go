package workload

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/internal/nl"
)

// vethInfoPeer is VETH_INFO_PEER (linux/veth.h): the other end.
const vethInfoPeer = 1

// Numbers of a device's IPv4 settings (IPV4_DEVCONF_* of linux/ip.h).
const (
	devconfForwarding    = 1
	devconfProxyARP      = 3
	devconfRPFilter      = 8
	devconfRouteLocalnet = 26
)

// make makes a wire of which nothing is there yet, in as few requests as it
// takes: for most containers the only thing to do. It reports false when there
// is something already, or when the kernel refuses a part; then [Wire.mend]
// does what is missing or says what is wrong.
func (w *Wire) make(ctx context.Context, spec Spec) (End, bool, error) {
	ns, err := w.foreignNamespace(spec.Netns)
	if err != nil {
		return End{}, false, err
	}
	defer ns.close()
	families := familiesOf(spec.Addresses)
	six := slices.Contains(families, dataplane.IPv6)
	var pod *nl.Conn
	err = ns.do(func() (err error) {
		if err := w.sysctls.setForwarding(families, spec.Forwarding); err != nil {
			return err
		}
		pod, err = openSocket()
		return err
	})
	if err != nil {
		return End{}, false, fmt.Errorf("%s: %w", spec.Netns, err)
	}
	defer pod.Close()

	var m batch
	m.veth(spec, ns.fd)
	if r, err := w.sockets.exchange(&m); err != nil || r.refused != nil {
		return End{}, false, err
	}
	// At once, so that what a kill leaves here says whose it is. The kernel
	// takes no alias in the message that makes the pair.
	m = batch{}
	m.mark(spec, w.rpFilter)
	if r, err := w.sockets.exchange(&m); err != nil || r.refused != nil {
		return End{}, false, err
	}
	if err := ctx.Err(); err != nil {
		return End{}, false, err
	}
	if six {
		// Its settings and addresses need more than requests.
		return End{}, false, nil
	}
	inner, ok, err := configure(pod, spec)
	if err != nil || !ok {
		return End{}, false, err
	}
	if w.ipv6 {
		if err := w.host.do(func() error { return w.sysctls.noIPv6(spec.Device) }); err != nil {
			return End{}, false, fmt.Errorf("%s: %w", spec.Device, err)
		}
	}
	// The host end comes up last: before that nothing reaches the workload.
	m = batch{}
	m.up(spec.Device)
	if r, err := w.sockets.exchange(&m); err != nil || r.refused != nil {
		return End{}, false, err
	}
	if ok, err := w.carried(ctx, pod, spec); err != nil || !ok {
		return End{}, false, err
	}
	return End{MAC: inner.mac}, true, nil
}

// carried waits until both ends of a new wire carry packets; see [Wire.settle].
// It reports false when one of them vanished. Since Linux 6.8 the first question
// is enough.
func (w *Wire) carried(ctx context.Context, pod *nl.Conn, spec Spec) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, settleTimeout)
	defer cancel()
	tick := time.NewTicker(settleTick)
	defer tick.Stop()
	var host, inside batch
	host.getLink(spec.Device)
	inside.getLink(spec.Owner.Interface)
	for {
		r, err := w.sockets.exchange(&host)
		if err != nil || r.refused != nil {
			return false, err
		}
		if carries(r) {
			if r, err = exchange(pod, &inside); err != nil || r.refused != nil {
				return false, err
			}
			if carries(r) {
				return true, nil
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return false, fmt.Errorf("wait until %s and its peer have a carrier: %w", spec.Device, ctx.Err())
		}
	}
}

// carries reports whether the device that a reply is about sends packets; see
// [Wire.settle].
func carries(r reply) bool {
	return len(r.links) == 1 && r.links[0].operState == netlink.OperUp
}

// noIPv6 keeps IPv6 off a new device of the calling thread's namespace.
func (s settings) noIPv6(device string) error {
	name := "net/ipv6/conf/" + device + "/disable_ipv6"
	f, err := os.OpenFile(s.path(name), os.O_WRONLY, 0)
	if err == nil {
		_, err = f.WriteString("1")
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		return fmt.Errorf("set sysctl %s to 1: %w", name, err)
	}
	return nil
}

// veth makes the pair, with the other end where it belongs. Neither can be up
// from the start: the kernel connects them last (veth_open).
//
// Each end has one queue for sending and one for receiving, as it would have
// anyway (veth_init_queues): unless it is said, the kernel makes as many as
// there may be processors, and takes all but one away again, which waits for
// RCU each time.
func (m *batch) veth(spec Spec, netns int) {
	end := func(name string) {
		m.Text(unix.IFLA_IFNAME, name)
		m.Uint32(unix.IFLA_MTU, uint32(spec.MTU))
		m.Uint32(unix.IFLA_NUM_TX_QUEUES, 1)
		m.Uint32(unix.IFLA_NUM_RX_QUEUES, 1)
	}
	m.Begin(unix.RTM_NEWLINK, create, linkHeader(0, false)...)
	end(spec.Device)
	m.Bytes(unix.IFLA_ADDRESS, hardware(HostMAC())...)
	m.Nest(unix.IFLA_LINKINFO, func() {
		m.Text(unix.IFLA_INFO_KIND, "veth")
		m.Nest(unix.IFLA_INFO_DATA, func() {
			m.Nest(vethInfoPeer, func() {
				m.B = append(m.B, linkHeader(0, false)...)
				end(spec.Owner.Interface)
				m.Uint32(unix.IFLA_NET_NS_FD, uint32(netns))
				if !spec.MAC.IsZero() {
					m.Bytes(unix.IFLA_ADDRESS, hardware(spec.MAC)...)
				}
			})
		})
	})
}

// mark says whose the host end is, and gives it those of its settings that a
// request can carry (inet_set_link_af). They are those of [Wire.HostSysctls].
func (m *batch) mark(spec Spec, rpFilter string) {
	m.Begin(unix.RTM_SETLINK, 0, linkHeader(0, false)...)
	m.Text(unix.IFLA_IFNAME, spec.Device)
	m.Chars(unix.IFLA_IFALIAS, spec.Owner.Alias())
	settings := func() {
		m.Uint32(devconfProxyARP, 1)
		m.Uint32(devconfForwarding, 1)
		m.Uint32(devconfRouteLocalnet, 1)
		if n, err := strconv.ParseUint(rpFilter, 10, 8); err == nil {
			m.Uint32(devconfRPFilter, uint32(n))
		}
	}
	m.Nest(unix.IFLA_AF_SPEC, func() {
		m.Nest(unix.AF_INET, func() { m.Nest(unix.IFLA_INET_CONF, settings) })
	})
}

// up sets a device up.
func (m *batch) up(device string) {
	m.Begin(unix.RTM_SETLINK, 0, linkHeader(0, true)...)
	m.Text(unix.IFLA_IFNAME, device)
}

// configure gives the workload's end of a new wire its IPv4 addresses and its
// way out, and sets it and the loopback device up.
func configure(pod *nl.Conn, spec Spec) (linkState, bool, error) {
	var m batch
	m.getLink(spec.Owner.Interface)
	r, err := exchange(pod, &m)
	if err != nil || r.refused != nil || len(r.links) != 1 {
		return linkState{}, false, err
	}
	inner := r.links[0]
	m = batch{}
	const loopback = 1 // LOOPBACK_IFINDEX
	m.Begin(unix.RTM_SETLINK, 0, linkHeader(loopback, true)...)
	m.Begin(unix.RTM_SETLINK, 0, linkHeader(inner.index, true)...)
	for _, a := range spec.Addresses {
		m.address(inner.index, a.AsSlice())
	}
	m.wayOut(inner.index)
	if r, err = exchange(pod, &m); err != nil {
		return inner, false, err
	}
	return inner, r.refused == nil, nil
}

// create is what makes a new object, or fails.
const create = unix.NLM_F_CREATE | unix.NLM_F_EXCL

// address adds an IPv4 address of full length.
func (m *batch) address(index int, addr []byte) {
	h := make([]byte, 4, unix.SizeofIfAddrmsg) // struct ifaddrmsg
	h[0], h[1] = unix.AF_INET, 32
	m.Begin(unix.RTM_NEWADDR, create, nativeIndex(h, index)...)
	m.Bytes(unix.IFA_LOCAL, addr...)
	m.Bytes(unix.IFA_ADDRESS, addr...)
}

// wayOut sets the routes to and through the IPv4 gateway and its neighbour
// entry; see [inside.wayOut].
func (m *batch) wayOut(index int) {
	gw := Gateway(dataplane.IPv4)
	route := func(bits, scope byte, kind uint16) {
		// struct rtmsg
		m.Begin(unix.RTM_NEWROUTE, create, unix.AF_INET, bits, 0, 0, unix.RT_TABLE_MAIN, unix.RTPROT_BOOT, scope, unix.RTN_UNICAST, 0, 0, 0, 0)
		m.Addr(kind, gw)
		m.Uint32(unix.RTA_OIF, uint32(index))
	}
	route(32, unix.RT_SCOPE_LINK, unix.RTA_DST)
	route(0, unix.RT_SCOPE_UNIVERSE, unix.RTA_GATEWAY)
	h := append(nativeIndex([]byte{unix.AF_INET, 0, 0, 0}, index), 0, 0, 0, 0) // struct ndmsg
	h[8] = unix.NUD_PERMANENT
	m.Begin(unix.RTM_NEWNEIGH, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, h...)
	m.Addr(unix.NDA_DST, gw)
	m.Bytes(unix.NDA_LLADDR, hardware(HostMAC())...)
}

// nativeIndex appends a device's number to a header.
func nativeIndex(b []byte, index int) []byte {
	return binary.NativeEndian.AppendUint32(b, uint32(index))
}
