package bench

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/integration/lab/ns"
)

// How long a step may take before it is given up, apart from the prefixes: for
// each of those a millisecond more.
const convergeWithin = 2 * time.Minute

// convergence is what a receiver took for a number of prefixes.
type convergence struct {
	feed     time.Duration // from the session's start to the last route in the kernel
	withdraw time.Duration // from the withdrawal of all to the last route's end
	lost     time.Duration // from the death of one of two ToRs to the last packet's turn
	gone     time.Duration // from the death of the other one, to the last route's end
	cpu      time.Duration // of the receiver, for the first feed
	peak     float64       // of its resident memory, MiB, over all
}

// receiver is a BGP speaker that puts what it learns into its kernel.
type receiver struct {
	name  string
	start func(ctx context.Context, s *convergenceSpace) ([]*os.Process, error)
}

// receivers are those that are measured, ours first.
func receivers(p Programs) []receiver {
	all := []receiver{
		{"routerd", func(ctx context.Context, s *convergenceSpace) ([]*os.Process, error) {
			return startRouterd(ctx, s, p)
		}},
		{"BIRD", startBIRDReceiver},
		{"FRR", startFRRReceiver},
	}
	return append(all[:1], p.beside(all[1:])...)
}

// MeasureConvergence feeds each receiver these numbers of prefixes from BIRD.
func MeasureConvergence(ctx context.Context, p Programs, counts []int, progress func(string)) ([]Row, error) {
	var rows []Row
	for _, n := range counts {
		list := receivers(p)
		got := make([]convergence, len(list))
		for i, r := range list {
			progress(fmt.Sprintf("BGP: %d prefixes to %s", n, r.name))
			var err error
			if got[i], err = converge(ctx, r, n); err != nil && (i == 0 || ctx.Err() != nil) {
				return nil, fmt.Errorf("%d prefixes to %s: %w", n, r.name, err)
			} else if err != nil { // ours and the others are worth showing all the same
				got[i] = convergence{}
				progress(fmt.Sprintf("no figures of %s: %v", r.name, err))
			}
		}
		for i, r := range list[1:] {
			ours, theirs := got[0], got[i+1]
			if theirs == (convergence{}) {
				continue
			}
			row := func(what string, unit Unit, a, b float64) {
				rows = append(rows, Row{What: fmt.Sprintf("BGP, %d prefixes: %s", n, what), Against: r.name, Unit: unit, Ours: a, Reference: b})
			}
			row("to the last route", Milliseconds, ms(ours.feed), ms(theirs.feed))
			row("withdrawal of all", Milliseconds, ms(ours.withdraw), ms(theirs.withdraw))
			row("one of two ToRs lost", Milliseconds, ms(ours.lost), ms(theirs.lost))
			row("the only ToR lost", Milliseconds, ms(ours.gone), ms(theirs.gone))
			row("CPU", Milliseconds, ms(ours.cpu), ms(theirs.cpu))
			row("peak memory", MiB, ours.peak, theirs.peak)
		}
	}
	return rows, nil
}

// convergenceSpace are three namespaces: the receiver's, and that of a ToR on
// each of its two wires.
type convergenceSpace struct {
	dir   string
	rx    string
	extra time.Duration // for the prefixes

	announced int // prefixes, by each ToR
	tors      [2]string
	began     []*exec.Cmd

	profiles string // where the daemon's go; empty: nowhere
}

const (
	torASN, rxASN = 65001, 64512
)

func torAddr(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 99, byte(i + 1), 1}) }
func rxAddr(i int) netip.Addr  { return netip.AddrFrom4([4]byte{10, 99, byte(i + 1), 2}) }

// newConvergenceSpace makes the namespaces, whose names begin with this one.
func newConvergenceSpace(ctx context.Context, name string) (s *convergenceSpace, err error) {
	prefix := fmt.Sprintf("%s%d-", name, os.Getpid())
	s = &convergenceSpace{rx: prefix + "rx", tors: [2]string{prefix + "tor1", prefix + "tor2"}}
	if s.dir, err = os.MkdirTemp("", "routerd-bench-"); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.close(ctx))
		}
	}()
	if err := ns.Create(s.rx); err != nil {
		return s, err
	}
	if err := ns.Do(s.rx, func() error { return ip(ctx, "link", "set", "lo", "up") }); err != nil {
		return s, err
	}
	for i, tor := range s.tors {
		if err := ns.Create(tor); err != nil {
			return s, err
		}
		dev := fmt.Sprintf("tor%d", i+1)
		err := ns.Do(s.rx, func() error {
			return errors.Join(ip(ctx, "link", "add", dev, "type", "veth", "peer", "name", "rx0", "netns", ns.Path(tor)),
				ip(ctx, "addr", "add", netip.PrefixFrom(rxAddr(i), 24).String(), "dev", dev), ip(ctx, "link", "set", dev, "up"))
		})
		if err != nil {
			return s, err
		}
		err = ns.Do(tor, func() error {
			return errors.Join(ip(ctx, "link", "set", "lo", "up"), ip(ctx, "addr", "add", netip.PrefixFrom(torAddr(i), 24).String(), "dev", "rx0"),
				ip(ctx, "link", "set", "rx0", "up"))
		})
		if err != nil {
			return s, err
		}
	}
	return s, nil
}

func (s *convergenceSpace) close(ctx context.Context) error {
	errs := []error{ns.KillAll(context.WithoutCancel(ctx), s.spaces()...)}
	for _, c := range s.began {
		_ = c.Wait() // it was killed
	}
	for _, name := range s.spaces() {
		errs = append(errs, ns.Delete(name))
	}
	return errors.Join(append(errs, os.RemoveAll(s.dir))...)
}

// spaces lists the namespaces.
func (s *convergenceSpace) spaces() []string {
	return slices.DeleteFunc([]string{s.rx, s.tors[0], s.tors[1]}, func(name string) bool { return name == "" })
}

// run starts a program in a namespace; its output goes to a file.
func (s *convergenceSpace) run(space, program string, args ...string) (*os.Process, error) {
	out, err := os.CreateTemp(s.dir, filepath.Base(program)+"-*.log")
	if err != nil {
		return nil, err
	}
	defer out.Close()
	cmd := exec.Command(program, args...)
	cmd.Stdout, cmd.Stderr, cmd.Dir = out, out, s.dir
	if err := ns.Start(space, cmd); err != nil {
		return nil, fmt.Errorf("start %s: %w", program, err)
	}
	s.began = append(s.began, cmd)
	return cmd.Process, nil
}

// logs is the end of what the programs said.
func (s *convergenceSpace) logs() string {
	const most = 2000
	var out strings.Builder
	files, _ := filepath.Glob(filepath.Join(s.dir, "*.log")) // the pattern is right
	for _, f := range files {
		if b, err := os.ReadFile(f); err == nil && len(b) > 0 {
			fmt.Fprintf(&out, "%s:\n%s\n", filepath.Base(f), b[max(0, len(b)-most):])
		}
	}
	return out.String()
}

func (s *convergenceSpace) file(name, text string) (string, error) {
	path := filepath.Join(s.dir, name)
	return path, os.WriteFile(path, []byte(text), 0o600)
}

// startToR runs BIRD as ToR number i with n prefixes; its session is disabled.
func (s *convergenceSpace) startToR(ctx context.Context, i, n int) (*os.Process, error) {
	var b bytes.Buffer
	fmt.Fprintf(&b, "router id %s;\nprotocol device {}\n", torAddr(i))
	fmt.Fprintf(&b, "protocol bgp receiver { disabled; local %s as %d; neighbor %s as %d; connect retry time 1; ipv4 { import none; export all; }; }\n",
		torAddr(i), torASN, rxAddr(i), rxASN)
	b.WriteString("protocol static feed { ipv4;\n")
	for _, p := range routePrefixes(n) {
		fmt.Fprintf(&b, "route %s blackhole;\n", p)
	}
	b.WriteString("}\n")
	name := fmt.Sprintf("tor%d", i)
	conf, err := s.file(name+".conf", b.String())
	if err != nil {
		return nil, err
	}
	p, err := s.run(s.tors[i], "bird", "-f", "-c", conf, "-s", s.control(i), "-P", filepath.Join(s.dir, name+".pid"))
	if err != nil {
		return nil, err
	}
	return p, until(ctx, "BIRD reads its routes", func() (bool, error) {
		out, err := s.birdc(ctx, i, "show", "route", "count")
		return err == nil && strings.Contains(out, strconv.Itoa(n)+" of "), nil
	})
}

func (s *convergenceSpace) control(i int) string {
	return filepath.Join(s.dir, fmt.Sprintf("tor%d.ctl", i))
}

func (s *convergenceSpace) birdc(ctx context.Context, i int, args ...string) (string, error) {
	out, err := exec.CommandContext(ctx, "birdc", append([]string{"-s", s.control(i)}, args...)...).CombinedOutput()
	return string(out), err
}

// wake makes a ToR's BIRD look at its sockets, which it may leave for up to
// three seconds, until stop is called.
func (s *convergenceSpace) wake(ctx context.Context, tors ...int) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			for _, i := range tors {
				_, _ = s.birdc(ctx, i, "show", "status") // one that was killed has nothing to say
			}
			pause(ctx, 50*time.Millisecond)
		}
	}()
	return func() { cancel(); <-done }
}

func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}

// until asks until the answer is yes.
func until(ctx context.Context, what string, ask func() (bool, error)) error {
	return untilWithin(ctx, convergeWithin, what, ask)
}

func untilWithin(ctx context.Context, limit time.Duration, what string, ask func() (bool, error)) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for {
		start := time.Now()
		ok, err := ask()
		if ok || err != nil {
			return err
		}
		if ctx.Err() != nil {
			return fmt.Errorf("%s: not within %v", what, limit)
		}
		pause(ctx, max(10*time.Millisecond, 3*time.Since(start))) // what asking costs is the receivers' time
	}
}

// routesInKernel counts the routes of the receiver's main table.
func (s *convergenceSpace) routesInKernel() (n int, err error) {
	err = ns.Do(s.rx, func() error {
		text, err := os.ReadFile("/proc/thread-self/net/fib_triestat")
		if err != nil {
			return err
		}
		n, err = mainPrefixes(string(text))
		return err
	})
	return n, err
}

// mainPrefixes reads the number of prefixes in the main table, which comes
// first, or alone where it serves as the local one too.
func mainPrefixes(triestat string) (int, error) {
	_, rest, ok := strings.Cut(triestat, "Main:")
	if !ok {
		return 0, errors.New("fib_triestat has no main table")
	}
	_, rest, ok = strings.Cut(rest, "Prefixes:")
	f := strings.Fields(rest)
	if !ok || len(f) == 0 {
		return 0, errors.New("fib_triestat has no number of prefixes")
	}
	return strconv.Atoi(f[0])
}

// converge takes one receiver through a feed, its withdrawal and the loss of
// one of two ToRs.
func converge(ctx context.Context, r receiver, n int) (c convergence, err error) {
	s, err := newConvergenceSpace(ctx, "rdbench")
	if err != nil {
		return c, err
	}
	defer func() { err = s.end(ctx, err) }()
	s.extra, s.announced = time.Duration(n)*time.Millisecond, n
	var tors [2]*os.Process
	for i := range tors {
		if tors[i], err = s.startToR(ctx, i, n); err != nil {
			return c, err
		}
	}
	procs, err := r.start(ctx, s)
	if err != nil {
		return c, err
	}
	base, err := s.routesInKernel()
	if err != nil {
		return c, err
	}
	step := func(name string) func() error { return s.profile(ctx, fmt.Sprintf("%d prefixes %s", n, name)) }
	before, profiled := cpuTime(procs), step("feed")
	if c.feed, err = s.timed(ctx, "the last route", base+n, 0, "enable"); err != nil {
		return c, err
	}
	c.cpu = cpuTime(procs) - before
	if err := profiled(); err != nil {
		return c, err
	}
	profiled = step("withdrawal")
	if c.withdraw, err = s.withdrawals(ctx, base, n); err != nil {
		return c, err
	}
	if err := profiled(); err != nil {
		return c, err
	}
	if c.lost, err = s.lose(ctx, base+n, tors[0]); err != nil {
		return c, err
	}
	profiled = step("loss")
	if c.gone, err = s.loseLast(ctx, base, tors[1]); err != nil {
		return c, err
	}
	if err := profiled(); err != nil {
		return c, err
	}
	c.peak = peakMemory(procs...)
	return c, nil
}

// A withdrawal of fewer prefixes than fewPrefixes takes hardly more than the steps in which it is measured
// and in which the sender looks at its sockets, so there are several.
const (
	fewPrefixes = 50_000
	withdrawn   = 7 // times
)

// withdrawals withdraws all prefixes of the first ToR, and if there are few announces and withdraws them again. It
// returns the median.
func (s *convergenceSpace) withdrawals(ctx context.Context, base, n int) (time.Duration, error) {
	times := 1
	if n < fewPrefixes {
		times = withdrawn
	}
	var took []time.Duration
	for {
		one, err := s.timed(ctx, "the last withdrawal", base, 0, "withdraw")
		if took = append(took, one); err != nil || len(took) == times {
			slices.Sort(took)
			return took[len(took)/2], err
		}
		if _, err := s.birdc(ctx, 0, "enable", "feed"); err != nil {
			return 0, err
		}
		if _, err := s.timed(ctx, "the routes once more", base+n, 0, "enable"); err != nil {
			return 0, err
		}
	}
}

// ownRoutes is how many routes of its own a receiver may add meanwhile.
const ownRoutes = 16

// timed makes ToR i announce or withdraw, and waits until the kernel has that
// many routes. An announcement counts from the session's start.
func (s *convergenceSpace) timed(ctx context.Context, what string, routes, i int, do string) (time.Duration, error) {
	start := time.Now()
	if do == "withdraw" {
		if _, err := s.birdc(ctx, i, "disable", "feed"); err != nil {
			return 0, err
		}
	} else {
		if _, err := s.birdc(ctx, i, "enable", "receiver"); err != nil {
			return 0, err
		}
		err := until(ctx, "the session", func() (bool, error) {
			out, err := s.birdc(ctx, i, "show", "protocols", "receiver")
			return strings.Contains(out, "Established"), err
		})
		if err != nil {
			return 0, err
		}
		start = time.Now()
	}
	defer s.wake(ctx, i)()
	dst, err := s.newSamples()
	if err != nil {
		return 0, err
	}
	defer dst.close()
	n := 0
	err = untilWithin(ctx, convergeWithin+s.extra, what, func() (_ bool, err error) {
		if do == "withdraw" {
			if dst.reached(anyDevice) > 0 {
				return false, nil
			}
			n, err = s.routesInKernel()
			return n < routes+ownRoutes, err
		}
		if dst.reached(anyDevice) < samples {
			return false, nil
		}
		n, err = s.routesInKernel()
		return n >= routes, err
	})
	if took := time.Since(start); err == nil {
		return took, nil
	}
	session, _ := s.birdc(ctx, i, "show", "protocols", "all", "receiver") // what there is helps
	return 0, fmt.Errorf("%w: the kernel has %d routes, and %d are awaited; the ToR's session: %s", err, n, routes, session)
}

// lose lets both ToRs announce all, kills the first, and waits until no
// destination is reached through it.
func (s *convergenceSpace) lose(ctx context.Context, routes int, first *os.Process) (time.Duration, error) {
	if _, err := s.birdc(ctx, 0, "enable", "feed"); err != nil {
		return 0, err
	}
	if _, err := s.timed(ctx, "the routes of the first ToR", routes, 0, "enable"); err != nil {
		return 0, err
	}
	if _, err := s.timed(ctx, "the routes of the second ToR", routes, 1, "enable"); err != nil {
		return 0, err
	}
	stop := s.wake(ctx, 0, 1)
	defer stop()
	// Asked for once: the kernel answers about devices only when no change is
	// under way, and about routes at any time.
	var devices [len(s.tors)]int
	err := ns.Do(s.rx, func() error {
		for i := range devices {
			l, err := netlink.LinkByName(fmt.Sprintf("tor%d", i+1))
			if err != nil {
				return err
			}
			devices[i] = l.Attrs().Index
		}
		return nil
	})
	if err != nil {
		return 0, err
	}
	dst, err := s.newSamples()
	if err != nil {
		return 0, err
	}
	defer dst.close()
	// All are shared when a third leaves by each, three times in a row.
	shared := 0
	err = untilWithin(ctx, convergeWithin+s.extra, "both ToRs are used", func() (bool, error) {
		if shared++; dst.reached(devices[1]) < samples/3 {
			shared = 0
		}
		return shared == 3, nil
	})
	if err != nil {
		return 0, err
	}
	pause(ctx, 2*time.Second+s.extra/100) // what the receiver still does is not the loss's
	start := time.Now()
	if err := first.Kill(); err != nil {
		return 0, err
	}
	err = untilWithin(ctx, convergeWithin+s.extra, "the last packet goes the other way", func() (bool, error) {
		return dst.reached(devices[0]) == 0, nil
	})
	return time.Since(start), err
}

// loseLast kills the ToR that is left and waits until the kernel has no route of
// it.
func (s *convergenceSpace) loseLast(ctx context.Context, base int, last *os.Process) (time.Duration, error) {
	dst, err := s.newSamples()
	if err != nil {
		return 0, err
	}
	defer dst.close()
	pause(ctx, 2*time.Second+s.extra/100) // as above
	start := time.Now()
	if err := last.Kill(); err != nil {
		return 0, err
	}
	n := 0
	err = untilWithin(ctx, convergeWithin+s.extra, "the last route's end", func() (_ bool, err error) {
		if dst.reached(anyDevice) > 0 {
			return false, nil
		}
		n, err = s.routesInKernel()
		return n < base+ownRoutes, err
	})
	if err != nil {
		return 0, fmt.Errorf("%w: the kernel has %d routes, and %d are awaited", err, n, base)
	}
	return time.Since(start), nil
}

// samples is how many destinations are asked for.
const samples = 512

// anyDevice stands for all devices.
const anyDevice = 0

// sampledRoutes asks the receiver's kernel for destinations spread over what the ToRs
// announce. That takes a millisecond or two whatever the number of routes, where counting
// 500,000 takes twenty on an idle machine and a multiple of that on a busy one, which would
// be the least that a figure can be and the step in which it grows.
type sampledRoutes struct {
	kernel    *netlink.Handle
	announced int
}

func (s *convergenceSpace) newSamples() (d sampledRoutes, err error) {
	d.announced = s.announced
	err = ns.Do(s.rx, func() (err error) {
		d.kernel, err = netlink.NewHandle(unix.NETLINK_ROUTE)
		return err
	})
	return d, err
}

func (d sampledRoutes) close() { d.kernel.Close() }

// reached counts the destinations that leave by a device, given by its index.
func (d sampledRoutes) reached(device int) int {
	n := 0
	for i := range samples {
		var b [4]byte
		binary.BigEndian.PutUint32(b[:], uint32(20)<<24|uint32(i*d.announced/samples)<<6|1)
		got, err := d.kernel.RouteGet(b[:])
		if err == nil && len(got) > 0 && (device == anyDevice || got[0].LinkIndex == device) {
			n++
		}
	}
	return n
}

// cpuTime is what processes have used, in user and system mode.
func cpuTime(procs []*os.Process) time.Duration {
	const tick = 10 * time.Millisecond // USER_HZ is 100 everywhere
	var sum time.Duration
	for _, p := range procs {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.Pid))
		_, rest, ok := bytes.Cut(b, []byte(") "))
		f := strings.Fields(string(rest))
		if err != nil || !ok || len(f) < 13 {
			continue
		}
		for _, x := range f[11:13] {
			n, err := strconv.Atoi(x)
			if err == nil {
				sum += time.Duration(n) * tick
			}
		}
	}
	return sum
}

// peakMemory is the largest resident sets of processes so far in MiB together; one that
// is gone has none.
func peakMemory(procs ...*os.Process) (sum float64) {
	for _, p := range procs {
		sum += memoryOf(p.Pid, "VmHWM:")
	}
	return sum
}

// memoryOf reads a line of /proc/PID/status in MiB; 0 if the process is gone.
func memoryOf(pid int, line string) float64 {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	_, rest, ok := strings.Cut(string(b), line)
	f := strings.Fields(rest)
	if err != nil || !ok || len(f) == 0 {
		return 0
	}
	kib, err := strconv.Atoi(f[0])
	if err != nil {
		return 0
	}
	return float64(kib) / 1024
}
