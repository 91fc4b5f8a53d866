package bench

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
)

// Churn is how much changes for how long, at a route reflector.
type Churn struct {
	Clients, Prefixes int // of each client
	PerSecond         int
	For               time.Duration
}

// churned is what a reflector made of it.
type churned struct {
	cpu     time.Duration // while it lasted
	lags    []time.Duration
	missing int // prefixes whose last change did not reach a client
	peak    float64
}

// lag is the one that a share of the changes had at most.
func (c *churned) lag(share float64) time.Duration {
	if len(c.lags) == 0 {
		return 0
	}
	return c.lags[min(int(share*float64(len(c.lags))), len(c.lags)-1)]
}

// settleWithin is how long after the last change the last client may have it.
const settleWithin = 10 * time.Second

// MeasureChurn has clients of one reflector change their paths at a steady pace. A lag is from
// a client's UPDATE until another client has it; routerd puts the routes into its kernel
// too, as FRR does.
func MeasureChurn(ctx context.Context, p Programs, size Churn, progress func(string)) ([]Row, error) {
	list := []receiver{
		{"routerd", func(ctx context.Context, s *convergenceSpace) ([]*os.Process, error) {
			return startRouterdReflector(ctx, s, p, size.Clients)
		}},
		{"BIRD", func(ctx context.Context, s *convergenceSpace) ([]*os.Process, error) {
			return startBIRDReflector(ctx, s, size.Clients)
		}},
		{"FRR", func(ctx context.Context, s *convergenceSpace) ([]*os.Process, error) {
			return startFRRReflector(ctx, s, size.Clients)
		}},
	}
	list = append(list[:1], p.beside(list[1:])...)
	got := make([]churned, len(list))
	for i, r := range list {
		progress(fmt.Sprintf("BGP churn: %d changes a second for %v through %s, %d clients", size.PerSecond, size.For, r.name, size.Clients))
		var err error
		if got[i], err = churn(ctx, r, size); err != nil {
			return nil, fmt.Errorf("churn through %s: %w", r.name, err)
		}
		if got[i].missing > 0 {
			progress(fmt.Sprintf("%s: %d last changes did not come within %v", r.name, got[i].missing, settleWithin))
		}
	}
	var rows []Row
	for i := range list[1:] {
		ours, theirs := &got[0], &got[i+1]
		row := func(what string, unit Unit, a, b float64) {
			rows = append(rows, Row{
				What: fmt.Sprintf("BGP churn, %d/s, %d clients: %s", size.PerSecond, size.Clients, what), Against: list[i+1].name, Unit: unit, Ours: a, Reference: b,
			})
		}
		row("lag, median", Milliseconds, ms(ours.lag(0.5)), ms(theirs.lag(0.5)))
		row("lag, 99th of 100", Milliseconds, ms(ours.lag(0.99)), ms(theirs.lag(0.99)))
		row("CPU", Milliseconds, ms(ours.cpu), ms(theirs.cpu))
		row("peak memory", MiB, ours.peak, theirs.peak)
	}
	return rows, nil
}

// churn measures one reflector.
func churn(ctx context.Context, r receiver, size Churn) (out churned, err error) {
	s, err := newReflectorSpace(ctx, size.Clients)
	if err != nil {
		return out, err
	}
	defer func() { err = s.end(ctx, err) }()
	procs, err := r.start(ctx, s)
	if err != nil {
		return out, err
	}
	clients, err := s.connect(ctx, Reflection{Clients: size.Clients, Prefixes: size.Prefixes})
	defer func() { err = errors.Join(err, closeAll(clients)) }()
	if err != nil {
		return out, err
	}
	all := routePrefixes(size.Clients * size.Prefixes)
	var fill errgroup.Group
	for i, c := range clients {
		if err := c.conn.SetReadDeadline(time.Now().Add(convergeWithin)); err != nil {
			return out, err
		}
		fill.Go(func() error { return c.announce(all[i*size.Prefixes : (i+1)*size.Prefixes]) })
		fill.Go(func() error { return c.count((size.Clients - 1) * size.Prefixes) })
	}
	if err := fill.Wait(); err != nil {
		return out, err
	}
	// A change is a new MED, which is its number: from 1, in the order in which they are sent.
	total := int(float64(size.PerSecond) * size.For.Seconds())
	sent := make([]atomic.Int64, total+1) // when, since start
	start, before := time.Now(), cpuTime(procs)
	lags := make([][]time.Duration, len(clients))
	last := make([][]uint32, len(clients)) // what each client heard last of each prefix
	var g errgroup.Group
	for i, c := range clients {
		last[i] = make([]uint32, len(all))
		if err := c.conn.SetReadDeadline(start.Add(size.For + settleWithin)); err != nil {
			return out, err
		}
		want := make([]uint32, len(all)) // the last change of each prefix
		for n := 1; n <= total; n++ {
			if p := changedBy(n, size); p/size.Prefixes != i {
				want[p] = uint32(n)
			}
		}
		left := 0
		for _, n := range want {
			if n > 0 {
				left++
			}
		}
		g.Go(func() error {
			for left > 0 {
				typ, body, err := c.read()
				if errors.Is(err, os.ErrDeadlineExceeded) {
					return nil // it shows in what is missing
				} else if err != nil {
					return fmt.Errorf("%s: %w", c.addr, err)
				}
				if typ != bgpUpdate {
					if typ == bgpNotification {
						return fmt.Errorf("%s: notification %v", c.addr, body)
					}
					continue
				}
				med, list, err := readChange(body)
				if err != nil {
					return err
				}
				for _, p := range list {
					if p >= len(all) || int(med) > total || med == 0 {
						continue
					}
					lags[i] = append(lags[i], time.Since(start)-time.Duration(sent[med].Load()))
					if last[i][p] = med; want[p] == med {
						left--
					}
				}
			}
			return nil
		})
	}
	g.Go(func() error {
		for n := 1; n <= total; n++ {
			pause(ctx, time.Until(start.Add(time.Duration(n)*time.Second/time.Duration(size.PerSecond))))
			if ctx.Err() != nil {
				return ctx.Err()
			}
			p := changedBy(n, size)
			sent[n].Store(int64(time.Since(start)))
			if err := clients[p/size.Prefixes].change(all[p].Addr(), uint32(n)); err != nil {
				return err
			}
		}
		return nil
	})
	profiled := s.profile(ctx, "churn")
	if err := g.Wait(); err != nil {
		return out, errors.Join(err, profiled())
	}
	out.cpu = cpuTime(procs) - before
	if err := profiled(); err != nil {
		return out, err
	}
	out.peak = peakMemory(procs...)
	out.lags = slices.Concat(lags...)
	slices.Sort(out.lags)
	final := make([]uint32, len(all))
	for n := 1; n <= total; n++ {
		final[changedBy(n, size)] = uint32(n)
	}
	for i := range clients {
		for p, n := range final {
			if n > 0 && p/size.Prefixes != i && last[i][p] != n {
				out.missing++
			}
		}
	}
	return out, nil
}

// changedBy is the prefix that a change is of: each client in turn, each of its prefixes in
// turn.
func changedBy(n int, size Churn) int {
	return n%size.Clients*size.Prefixes + n/size.Clients%size.Prefixes
}

// readChange returns the MED of an UPDATE and the numbers of the prefixes that it announces.
func readChange(b []byte) (med uint32, list []int, err error) {
	if len(b) < 2 || len(b) < 4+int(binary.BigEndian.Uint16(b)) {
		return 0, nil, errUpdate
	}
	b = b[2+int(binary.BigEndian.Uint16(b)):]
	n := int(binary.BigEndian.Uint16(b))
	if len(b) < 2+n {
		return 0, nil, errUpdate
	}
	for attributes := b[2 : 2+n]; len(attributes) > 0; {
		size, head := 0, 3
		switch long := attributes[0]&0x10 != 0; {
		case len(attributes) >= 3 && !long:
			size = int(attributes[2])
		case len(attributes) >= 4 && long:
			size, head = int(binary.BigEndian.Uint16(attributes[2:])), 4
		default:
			return 0, nil, errUpdate
		}
		if len(attributes) < head+size {
			return 0, nil, errUpdate
		}
		if attributes[1] == 4 && size == 4 {
			med = binary.BigEndian.Uint32(attributes[head:])
		}
		attributes = attributes[head+size:]
	}
	for b = b[2+n:]; len(b) > 0; {
		size := (int(b[0]) + 7) / 8
		if size > 4 || len(b) < 1+size {
			return 0, nil, errUpdate
		}
		var a [4]byte
		copy(a[:], b[1:1+size])
		b = b[1+size:]
		list = append(list, int((binary.BigEndian.Uint32(a[:])-20<<24)>>6))
	}
	return med, list, nil
}

// startFRRReflector runs zebra and bgpd as a reflector of these clients.
func startFRRReflector(ctx context.Context, s *convergenceSpace, clients int) ([]*os.Process, error) {
	var b, families bytes.Buffer
	fmt.Fprintf(&b, "frr defaults datacenter\nrouter bgp %d\n bgp router-id %s\n bgp cluster-id %s\n", rxASN, reflectorAddr(), reflectorCluster)
	for i := range clients {
		fmt.Fprintf(&b, " neighbor %[1]s remote-as %[2]d\n neighbor %[1]s passive\n", clientAddr(i), rxASN)
		fmt.Fprintf(&families, "  neighbor %s route-reflector-client\n", clientAddr(i))
	}
	fmt.Fprintf(&b, " address-family ipv4 unicast\n%s exit-address-family\n", families.String())
	procs, err := startFRR(ctx, s, b.String())
	if err != nil {
		return nil, err
	}
	return procs, until(ctx, "bgpd listens", func() (bool, error) {
		out, err := exec.CommandContext(ctx, "vtysh", "--vty_socket", s.dir, "-d", "bgpd", "-c", "show bgp ipv4 unicast summary").CombinedOutput()
		return err == nil && bytes.Contains(out, []byte(clientAddr(clients-1).String())), ctx.Err()
	})
}
