package bench

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/integration/lab/ns"
)

// The device and the gateway of the routes that are measured.
const (
	routeLink = "bench0"
	routeID   = 4077 // number of the next-hop object of the bare series

	rtaNextHopID = 30 // RTA_NH_ID of linux/rtnetlink.h
)

func routeGateway() netip.Addr { return netip.MustParseAddr("10.99.0.2") }

// routePrefixes returns n different /26 prefixes, as nodes' blocks are.
func routePrefixes(n int) []netip.Prefix {
	ps := make([]netip.Prefix, n)
	for i := range ps {
		v := uint32(20)<<24 | uint32(i)<<6
		var b [4]byte
		binary.BigEndian.PutUint32(b[:], v)
		ps[i] = netip.PrefixFrom(netip.AddrFrom4(b), 26)
	}
	return ps
}

// inRouteSpace calls fn with a fresh namespace that has a link towards the
// gateway, and removes it.
func inRouteSpace(ctx context.Context, name string, fn func() error) error {
	if err := ns.Create(name); err != nil {
		return err
	}
	err := ns.Do(name, func() error {
		for _, args := range [][]string{
			{"link", "set", "lo", "up"},
			{"link", "add", routeLink, "type", "veth", "peer", "name", "bench1"},
			{"addr", "add", "10.99.0.1/24", "dev", routeLink},
			{"link", "set", routeLink, "up"},
			{"link", "set", "bench1", "up"},
		} {
			if err := ip(ctx, args...); err != nil {
				return err
			}
		}
		return nil
	})
	if err == nil {
		err = fn()
	}
	if delErr := ns.Delete(name); err == nil {
		err = delErr
	}
	return err
}

// ip runs ip(8) in the calling thread's namespace.
func ip(ctx context.Context, args ...string) error {
	if out, err := exec.CommandContext(ctx, "ip", args...).CombinedOutput(); err != nil {
		return fmt.Errorf("ip %s: %w: %s", strings.Join(args, " "), err, bytes.TrimSpace(out))
	}
	return nil
}

// routesByIPBatch programs routes with one ip -batch and returns how long it
// took.
func routesByIPBatch(ctx context.Context, space string, prefixes []netip.Prefix) (time.Duration, error) {
	dir, err := os.MkdirTemp("", "routerd-bench-")
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(dir)
	var b bytes.Buffer
	for _, p := range prefixes {
		fmt.Fprintf(&b, "route add %s via %s dev %s proto 77\n", p, routeGateway(), routeLink)
	}
	file := filepath.Join(dir, "batch")
	if err := os.WriteFile(file, b.Bytes(), 0o600); err != nil {
		return 0, err
	}
	var out bytes.Buffer
	cmd := exec.CommandContext(ctx, "ip", "-batch", file)
	cmd.Stdout, cmd.Stderr = &out, &out
	start := time.Now()
	if err := ns.Do(space, cmd.Start); err != nil {
		return 0, err
	}
	if err := cmd.Wait(); err != nil {
		return 0, fmt.Errorf("ip -batch: %w: %s", err, bytes.TrimSpace(out.Bytes()))
	}
	return time.Since(start), nil
}

// bareBatch is how many messages one send of the bare series has: more gain
// nothing.
const bareBatch = 256

// routesBare programs routes by next-hop number with nothing around the
// messages: the limit of what any daemon can reach. It returns how long it
// took.
func routesBare(ctx context.Context, space string, prefixes []netip.Prefix) (time.Duration, error) {
	var conn *netlink.Conn
	err := ns.Do(space, func() (err error) {
		if err := ip(ctx, "nexthop", "add", "id", strconv.Itoa(routeID), "via", routeGateway().String(), "dev", routeLink, "proto", "77"); err != nil {
			return err
		}
		conn, err = netlink.Dial(unix.NETLINK_ROUTE, nil)
		return err
	})
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	if err := conn.SetWriteBuffer(1 << 20); err != nil {
		return 0, err
	}
	start := time.Now()
	for len(prefixes) > 0 {
		n := min(bareBatch, len(prefixes))
		msgs := make([]netlink.Message, n)
		for i, p := range prefixes[:n] {
			msgs[i] = bareRoute(p)
		}
		// Only the last is acknowledged; errors of the others come all the same.
		msgs[n-1].Header.Flags |= netlink.Acknowledge
		if _, err := conn.SendMessages(msgs); err != nil {
			return 0, fmt.Errorf("send routes: %w", err)
		}
		if _, err := conn.Receive(); err != nil {
			return 0, fmt.Errorf("add routes: %w", err)
		}
		prefixes = prefixes[n:]
	}
	return time.Since(start), nil
}

// attr returns one attribute of rtnetlink(7), padded.
func attr(typ uint16, value []byte) []byte {
	b := make([]byte, (4+len(value)+3)&^3)
	binary.NativeEndian.PutUint16(b, uint16(4+len(value)))
	binary.NativeEndian.PutUint16(b[2:], typ)
	copy(b[4:], value)
	return b
}

func u32(v uint32) []byte { return binary.NativeEndian.AppendUint32(nil, v) }

// bareRoute is RTM_NEWROUTE with RTA_DST and RTA_NH_ID (linux/rtnetlink.h).
func bareRoute(p netip.Prefix) netlink.Message {
	addr := p.Addr().As4()
	data := []byte{unix.AF_INET, byte(p.Bits()), 0, 0, unix.RT_TABLE_MAIN, 77, unix.RT_SCOPE_UNIVERSE, unix.RTN_UNICAST, 0, 0, 0, 0}
	data = append(data, attr(unix.RTA_DST, addr[:])...)
	data = append(data, attr(rtaNextHopID, u32(routeID))...)
	return netlink.Message{
		Header: netlink.Header{Type: unix.RTM_NEWROUTE, Flags: netlink.Request | netlink.Create | netlink.Replace},
		Data:   data,
	}
}
