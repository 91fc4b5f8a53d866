package bench

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane/filter"
	"github.com/routerd/routerd/dataplane/nft"
	"github.com/routerd/routerd/integration/lab/ns"
)

// forwardPackets is how many first packets of flows are sent in one
// measurement: the kernel's table of connections takes them all.
const forwardPackets = 20_000

// forwardRows measures first packets of flows through a host with more and more
// endpoints, to the last of them and its last rule, beside iptables.
func forwardRows(ctx context.Context, log *slog.Logger) ([]Row, error) {
	const rounds = 5
	rate := func(n int, rules func() (func() error, error)) (float64, error) {
		took, err := best(rounds, func() (time.Duration, error) { return forward(ctx, n, firstPackets, rules) })
		return forwardPackets / took.Seconds(), err
	}
	none := func() (func() error, error) { return func() error { return nil }, nil }
	bare, err := rate(1, none)
	if err != nil {
		return nil, err
	}
	var rows []Row
	for _, n := range []int{1, 100, 1000} {
		ours, err := rate(n, func() (func() error, error) {
			t, err := nft.Open(nft.Config{Log: log})
			if err != nil {
				return nil, err
			}
			return t.Close, t.Apply(endpointRules(n, false))
		})
		if err != nil {
			return nil, err
		}
		what := fmt.Sprintf("first packets of flows, %d endpoints × %d rules", n, rulesPerEndpoint)
		rows = append(rows, Row{what, ours, bare, "no rules", PerSecond})
		for _, tool := range []string{"iptables-nft-restore", "iptables-legacy-restore"} {
			theirs, err := rate(n, func() (func() error, error) {
				return func() error { return nil }, runTool(ctx, []string{tool}, iptablesRules(n))
			})
			if err != nil {
				return nil, fmt.Errorf("%s: %w", tool, err)
			}
			rows = append(rows, Row{what, ours, theirs, tool, PerSecond})
		}
	}
	return rows, nil
}

// acceptsEstablished is what connection tracking costs, as rules for nft.
const acceptsEstablished = "table inet bench { chain c { type filter hook forward priority 0; ct state established,related accept; }; }\n"

// MeasureEstablished measures packets of one flow that is established, beside no rules,
// and beside one rule that accepts it, which is what connection tracking alone costs.
func MeasureEstablished(ctx context.Context, log *slog.Logger) ([]Row, error) {
	const rounds = 5
	none := func() (func() error, error) { return func() error { return nil }, nil }
	tracked := func() (func() error, error) {
		return func() error { return nil }, runTool(ctx, []string{"nft", "-f", "-"}, acceptsEstablished)
	}
	ours := func() (func() error, error) {
		t, err := nft.Open(nft.Config{Log: log})
		if err != nil {
			return nil, err
		}
		return t.Close, t.Apply(endpointRules(1, false))
	}
	offloaded := func() (func() error, error) {
		end, err := ours()
		if err != nil {
			return nil, err
		}
		o, err := nft.OpenOffload()
		if err != nil {
			return nil, errors.Join(err, end())
		}
		return func() error { return errors.Join(end(), o.Close()) }, o.Set([]filter.Device{{Name: "up0"}, {Name: "cali0", Workload: true}})
	}
	kinds := []func() (func() error, error){none, tracked, ours, offloaded}
	least := make([]time.Duration, len(kinds))
	for range rounds { // in turns, so that what else the machine does falls on all
		for i, rules := range kinds {
			took, err := forward(ctx, 1, onePacket, rules)
			if errors.Is(err, errors.ErrUnsupported) {
				continue
			}
			if err != nil {
				return nil, err
			}
			if least[i] == 0 || took < least[i] {
				least[i] = took
			}
		}
	}
	rate := func(i int) float64 { return forwardPackets / least[i].Seconds() }
	const what = "packets of an established flow"
	rows := []Row{
		{what, rate(2), rate(0), "no rules", PerSecond},
		{what, rate(2), rate(1), "one rule that accepts it", PerSecond},
	}
	if least[3] > 0 {
		rows = append(rows, Row{what + ", flowtable", rate(3), rate(0), "no rules", PerSecond})
	}
	return rows, nil
}

// packets says which packets are sent.
type packets uint8

const (
	firstPackets packets = iota // each of a flow of its own
	onePacket                   // of one flow, which was answered
)

// forward sends packets from an uplink to the last of n workloads of
// [endpointRules] and returns how long it took until the host had forwarded
// all. rules loads rules; what it returns is called at the end.
func forward(ctx context.Context, n int, kind packets, rules func() (func() error, error)) (took time.Duration, err error) {
	name := fmt.Sprintf("bench-forward-%d", os.Getpid())
	peer := name + "-peers"
	for _, space := range []string{name, peer} {
		if err := ns.Create(space); err != nil {
			return 0, err
		}
		defer func() { err = errors.Join(err, ns.Delete(space)) }()
	}
	to := netip.AddrFrom4([4]byte{10, 1, byte((n - 1) >> 8), byte(n - 1)}) //nolint:gosec // a thousand at most
	device := fmt.Sprintf("cali%d", n-1)
	const hostMAC, peerMAC = "02:00:00:00:00:01", "02:00:00:00:00:02"
	setup := fmt.Sprintf(`link add up0 address %[1]s type veth peer name up0 netns %[3]s
link add %[4]s address %[1]s type veth peer name %[4]s address %[2]s netns %[3]s
link set up0 up
link set %[4]s up
addr add 10.9.0.1/24 dev up0
route add 10.1.0.1/32 dev up0
route replace %[5]s/32 dev %[4]s
neigh add %[5]s lladdr %[2]s dev %[4]s
neigh add 10.1.0.1 lladdr %[2]s dev up0
`, hostMAC, peerMAC, peer, device, to)
	if err := ipBatch(ctx, name, setup); err != nil {
		return 0, err
	}
	if err := ipBatch(ctx, peer, "link set up0 up\nlink set "+device+" up\n"); err != nil {
		return 0, err
	}
	end := func() error { return nil }
	err = ns.Do(name, func() (err error) {
		for file, value := range map[string]string{"ip_forward": "1", "conf/all/rp_filter": "0", "conf/default/rp_filter": "0", "conf/up0/rp_filter": "0"} {
			if err := os.WriteFile("/proc/sys/net/ipv4/"+file, []byte(value), 0o600); err != nil {
				return err
			}
		}
		end, err = rules()
		return err
	})
	if end != nil {
		defer func() { err = errors.Join(err, end()) }()
	}
	if err != nil {
		return 0, err
	}
	err = ns.Do(peer, func() (err error) { took, err = sendFlows(ctx, kind, device, to); return err })
	return took, err
}

func ipBatch(ctx context.Context, space, lines string) error {
	return ns.Do(space, func() error {
		cmd := exec.CommandContext(ctx, "ip", "-batch", "-")
		cmd.Stdin = strings.NewReader(lines)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("ip: %w: %s", err, out)
		}
		return nil
	})
}

// sendFlows sends packets of UDP out of up0, and returns how long it took until all
// were received from a device.
func sendFlows(ctx context.Context, kind packets, device string, to netip.Addr) (time.Duration, error) {
	fd, err := sender("up0")
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	frame := udpFrame(netip.AddrFrom4([4]byte{10, 1, 0, 1}), to, 1000+rulesPerEndpoint-1)
	binary.BigEndian.PutUint16(frame[sourcePortAt:], firstPort-1)
	// A device that was set up a moment ago carries nothing yet.
	var before uint64
	err = until(ctx, "the host forwards", func() (bool, error) {
		if _, err := unix.Write(fd, frame); err != nil {
			return false, err
		}
		before, err = received(device)
		return before > warmUp, err
	})
	if err != nil {
		return 0, err
	}
	if kind == onePacket {
		if err := answer(ctx, device, frame); err != nil {
			return 0, err
		}
		if before, err = received(device); err != nil {
			return 0, err
		}
	}
	if kind == firstPackets {
		return burst(ctx, fd, frame, device, before, forwardPackets, true)
	}
	// A burst is shorter than the time that a busy machine gives to others at a stretch.
	const bursts, each = 60, forwardPackets / 20
	least, err := best(bursts, func() (time.Duration, error) {
		took, err := burst(ctx, fd, frame, device, before, each, false)
		before += each
		return took, err
	})
	return least * forwardPackets / each, err
}

// burst sends a number of packets, if others are wanted each of a flow of its own, and
// returns how long it took until all were received by a device, which had received so
// many before.
func burst(ctx context.Context, fd int, frame []byte, device string, before, number uint64, others bool) (time.Duration, error) {
	start := time.Now()
	for i := range number {
		if i%outstanding == 0 && i > 0 {
			// What waits for the host beyond net.core.netdev_max_backlog is lost.
			if err := awaitPackets(ctx, device, before+i-outstanding/2); err != nil {
				return 0, err
			}
		}
		if others {
			binary.BigEndian.PutUint16(frame[sourcePortAt:], uint16(firstPort+i)) //nolint:gosec // 30,000 at most
		}
		var err error
		for {
			_, err = unix.Write(fd, frame)
			if !errors.Is(err, unix.ENOBUFS) {
				break
			}
		}
		if err != nil {
			return 0, err
		}
	}
	err := awaitPackets(ctx, device, before+number)
	return time.Since(start), err
}

// firstPort is the source port of the first flow; before it another one goes.
const firstPort = 10_000

// sender opens a socket that sends frames by a device.
func sender(device string) (int, error) {
	i, err := net.InterfaceByName(device)
	if err != nil {
		return 0, err
	}
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	if err := unix.Bind(fd, &unix.SockaddrLinklayer{Ifindex: i.Index, Protocol: 0}); err != nil {
		return 0, errors.Join(err, unix.Close(fd))
	}
	return fd, nil
}

// answer has the workload behind a device answer a frame, and waits until that came
// back, which establishes the flow.
func answer(ctx context.Context, device string, frame []byte) error {
	fd, err := sender(device)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	from, to := netip.AddrFrom4([4]byte(frame[30:34])), netip.AddrFrom4([4]byte(frame[26:30]))
	back := udpFrame(from, to, firstPort-1)
	copy(back[sourcePortAt:], frame[sourcePortAt+2:sourcePortAt+4])
	before, err := received("up0")
	if err != nil {
		return err
	}
	return until(ctx, "the host forwards an answer", func() (bool, error) {
		for range 2 * warmUp {
			if _, err := unix.Write(fd, back); err != nil {
				return false, err
			}
		}
		now, err := received("up0")
		return now > before+warmUp, err
	})
}

// warmUp is more than what a device receives by itself when it is set up.
const warmUp = 100

// outstanding is how many packets may wait for the host.
const outstanding = 64

// awaitPackets waits until a device has received a number of packets.
func awaitPackets(ctx context.Context, device string, n uint64) error {
	const patience = 30 * time.Second
	for start := time.Now(); ; time.Sleep(20 * time.Microsecond) {
		now, err := received(device)
		switch {
		case err != nil:
			return err
		case now >= n:
			return nil
		case ctx.Err() != nil:
			return ctx.Err()
		case time.Since(start) > patience:
			return fmt.Errorf("%d packets less than %d were forwarded", n-now, forwardPackets)
		}
	}
}

// received is how many packets a device of the calling thread's network
// namespace has received (/proc/net/dev: the second number behind the name).
func received(device string) (uint64, error) {
	b, err := os.ReadFile("/proc/thread-self/net/dev")
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(b)) {
		var bytes, packets uint64
		name, rest, _ := strings.Cut(strings.TrimSpace(line), ":")
		if name != device {
			continue
		}
		if _, err := fmt.Sscan(rest, &bytes, &packets); err != nil {
			return 0, fmt.Errorf("read /proc/net/dev: %w", err)
		}
		return packets, nil
	}
	return 0, fmt.Errorf("there is no device %s", device)
}

// sourcePortAt is where a frame of Ethernet and IPv4 has the source port.
const sourcePortAt = 14 + 20

// udpFrame is an Ethernet frame to the host with an empty datagram, without its
// checksum.
func udpFrame(from, to netip.Addr, port uint16) []byte {
	b := []byte{2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 0x08, 0x00, 0x45, 0, 0, 28, 0, 0, 0x40, 0, 64, unix.IPPROTO_UDP, 0, 0}
	b = append(append(b, from.AsSlice()...), to.AsSlice()...)
	sum := uint32(0)
	for i := 14; i < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	binary.BigEndian.PutUint16(b[24:], ^uint16(sum)) //nolint:gosec // 16 bits are left
	b = append(b, 0, 0)
	b = binary.BigEndian.AppendUint16(b, port)
	return append(b, 0, 8, 0, 0)
}
