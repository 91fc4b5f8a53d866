package lab

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/integration/lab/ns"
)

// uplink is the name of a host's device on the underlay.
const uplink = "eth0"

// buildUnderlay makes the spine, the racks and the hosts, and connects them.
func buildUnderlay(ctx context.Context, lab string, t Topology) error {
	spaces := []string{lab + "-" + spineName}
	for _, n := range t.Nodes {
		spaces = append(spaces, lab+"-"+n.Name)
	}
	for _, r := range t.routers() {
		spaces = append(spaces, lab+"-"+r)
	}
	g, _ := errgroup.WithContext(ctx)
	for _, s := range spaces {
		g.Go(func() error { return createSpace(s) })
	}
	if err := g.Wait(); err != nil {
		return err
	}
	spine, err := openSpace(lab + "-" + spineName)
	if err != nil {
		return err
	}
	defer spine.close()
	if err := setSysctls(spine.name, routerSysctls()); err != nil {
		return err
	}
	if t.Underlay.has6() {
		if err := setSysctls(spine.name, map[string]string{"net/ipv6/conf/all/forwarding": "1"}); err != nil {
			return err
		}
	}
	if t.Spine.ECMP { // flows are told apart by their ports too
		policies := map[string]string{"net/ipv4/fib_multipath_hash_policy": "1"}
		if t.Underlay.has6() {
			policies["net/ipv6/fib_multipath_hash_policy"] = "1"
		}
		if err := setSysctls(spine.name, policies); err != nil {
			return err
		}
	}
	for i, r := range t.Racks {
		var err error
		if r.translated() {
			err = spine.addRouter(ctx, lab, i, t, r)
		} else {
			err = spine.addRack(r)
		}
		if err != nil {
			return fmt.Errorf("build rack %s: %w", r.Name, err)
		}
	}
	for _, n := range t.Nodes {
		rack, _ := t.rack(n.Rack)
		if err := connect(lab, n, rack); err != nil {
			return fmt.Errorf("connect host %s: %w", n.Name, err)
		}
	}
	for _, r := range t.Racks {
		// A bridge follows the smallest of its ports until its own MTU was
		// changed once; to give it what it has already is no change.
		for _, mtu := range []int{r.MTU - 1, r.MTU} {
			if err := setLinkMTU(r.routerSpace(lab), r.Name, mtu); err != nil {
				return err
			}
		}
	}
	return ctx.Err()
}

// routerSysctls makes a namespace a router.
func routerSysctls() map[string]string {
	return map[string]string{
		"net/ipv4/ip_forward":                  "1",
		"net/ipv4/conf/all/rp_filter":          "0",
		"net/ipv4/conf/default/rp_filter":      "0",
		"net/ipv4/conf/all/send_redirects":     "0",
		"net/ipv4/conf/default/send_redirects": "0",
	}
}

// createSpace makes a namespace with its loopback device up.
func createSpace(name string) error {
	if err := ns.Create(name); err != nil {
		return err
	}
	s, err := openSpace(name)
	if err != nil {
		return err
	}
	defer s.close()
	return s.up("lo")
}

// space is a namespace with a netlink socket in it.
type space struct {
	name string
	fd   netns.NsHandle
	h    *netlink.Handle
}

func openSpace(name string) (*space, error) {
	fd, err := netns.GetFromName(name)
	if err != nil {
		return nil, fmt.Errorf("open network namespace %s: %w", name, err)
	}
	h, err := netlink.NewHandleAt(fd, 0)
	if err != nil {
		fd.Close()
		return nil, fmt.Errorf("open netlink in %s: %w", name, err)
	}
	return &space{name, fd, h}, nil
}

func (s *space) close() {
	s.h.Close()
	s.fd.Close()
}

func (s *space) up(dev string) error {
	l, err := s.h.LinkByName(dev)
	if err != nil {
		return fmt.Errorf("find %s in %s: %w", dev, s.name, err)
	}
	if err := s.h.LinkSetUp(l); err != nil {
		return fmt.Errorf("set %s in %s up: %w", dev, s.name, err)
	}
	return nil
}

// How long to wait for a module that is being loaded: where the lab cannot do
// without it, and where its absence is an answer too.
const (
	modulePatience = 5 * time.Second
	probePatience  = 300 * time.Millisecond
)

// addLink calls add, again for a while if the kernel does not know the kind of
// device. Of two that need a module first, one may hear that before the
// other's request has loaded it: modprobe returns at once when the module is
// there already, if only half way.
func addLink(patience time.Duration, add func() error) error {
	for end := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		err := add()
		if !errors.Is(err, unix.EOPNOTSUPP) || !time.Now().Before(end) {
			return err
		}
	}
}

// addRack makes the rack's bridge, which has the spine's address.
func (s *space) addRack(r Rack) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU = r.Name, r.MTU
	if err := addLink(modulePatience, func() error { return s.h.LinkAdd(&netlink.Bridge{LinkAttrs: attrs}) }); err != nil {
		return fmt.Errorf("add bridge: %w", err)
	}
	if err := settleIPv6(s.name, r.Name, r.CIDR6.IsValid()); err != nil {
		return err
	}
	for _, p := range r.prefixes() {
		if err := s.address(r.Name, p); err != nil {
			return err
		}
	}
	return s.up(r.Name)
}

// connect puts a wire between the rack and the host. The far end is born in
// the host's namespace.
func connect(lab string, n Node, r Rack) error {
	s, err := openSpace(r.routerSpace(lab))
	if err != nil {
		return err
	}
	defer s.close()
	host, err := openSpace(lab + "-" + n.Name)
	if err != nil {
		return err
	}
	defer host.close()
	bridge, err := s.h.LinkByName(r.Name)
	if err != nil {
		return fmt.Errorf("find bridge: %w", err)
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU, attrs.MasterIndex = n.Name, n.MTU, bridge.Attrs().Index
	wire := &netlink.Veth{LinkAttrs: attrs, PeerName: uplink, PeerTxQLen: -1, PeerNamespace: netlink.NsFd(host.fd), PeerMTU: uint32(n.MTU)}
	if err := addLink(modulePatience, func() error { return s.h.LinkAdd(wire) }); err != nil {
		return fmt.Errorf("add veth: %w", err)
	}
	if err := errors.Join(settleIPv6(s.name, n.Name, false), settleIPv6(host.name, uplink, n.Address6.IsValid())); err != nil {
		return err
	}
	if err := s.up(n.Name); err != nil {
		return err
	}
	addrs, gateways := n.prefixes(r)
	for _, p := range addrs {
		if err := host.address(uplink, p); err != nil {
			return err
		}
	}
	if err := host.up(uplink); err != nil {
		return err
	}
	for _, gw := range gateways {
		if err := host.h.RouteAdd(&netlink.Route{Gw: gw.AsSlice()}); err != nil {
			return fmt.Errorf("add default route via %s: %w", gw, err)
		}
	}
	return nil
}

func (s *space) address(dev string, p netip.Prefix) error {
	l, err := s.h.LinkByName(dev)
	if err != nil {
		return fmt.Errorf("find %s in %s: %w", dev, s.name, err)
	}
	a, err := netlink.ParseAddr(p.String())
	if err != nil {
		return fmt.Errorf("add address: %w", err)
	}
	if p.Addr().Is6() {
		a.Flags |= unix.IFA_F_NODAD // the lab's addresses are unique
	}
	if err := s.h.AddrAdd(l, a); err != nil {
		return fmt.Errorf("add address %s to %s in %s: %w", p, dev, s.name, err)
	}
	return nil
}

// settleIPv6 keeps router solicitations and the like off an underlay that is
// IPv4: they would stand in every capture. A kernel without IPv6 is quiet. Where
// there is IPv6, addresses and routes are the lab's alone.
func settleIPv6(space, dev string, on bool) error {
	conf := "net/ipv6/conf/" + dev + "/"
	if on {
		return setSysctls(space, map[string]string{conf + "accept_ra": "0", conf + "accept_dad": "0"})
	}
	err := setSysctls(space, map[string]string{conf + "disable_ipv6": "1"})
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// setSysctls writes kernel settings, named with slashes, inside a namespace.
func setSysctls(space string, values map[string]string) error {
	return ns.Do(space, func() error {
		for name, v := range values {
			// Through the thread's own directory: /proc/sys is that of whoever
			// opens it, and this thread alone is in the namespace.
			if err := os.WriteFile("/proc/sys/"+name, []byte(v), 0); err != nil {
				return fmt.Errorf("set %s in %s: %w", strings.ReplaceAll(name, "/", "."), space, err)
			}
		}
		return nil
	})
}
