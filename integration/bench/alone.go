package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/routerd/routerd/control/bgp/engine"
	"github.com/routerd/routerd/control/bgp/engine/wire"
)

// speaker is the configuration of a process that runs the BGP engine alone: no datastore, no
// policy, no kernel. All that it learns is read and dropped.
type speaker struct {
	AS       uint32
	RouterID netip.Addr
	Listen   netip.AddrPort
	Control  string       // a Unix socket that says how many prefixes have a path, to who connects
	Cluster  netip.Addr   // valid: peers are clients of this route reflector
	Peers    []netip.Addr // in its AS
}

// enginePace is the daemon's pace of the collector with tables of 500,000 prefixes (cmd/routerd).
const enginePace = 15

// Speak runs the engine by a configuration in a file until ctx ends.
func Speak(ctx context.Context, file string) (err error) {
	var s speaker
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(text, &s); err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(enginePace)
	}
	e, err := engine.New(engine.Options{AS: s.AS, RouterID: s.RouterID, LimitPause: time.Minute})
	if err != nil {
		return err
	}
	defer func() {
		stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		err = errors.Join(err, e.Stop(stop, nil))
	}()
	var peers []engine.Peer
	for _, a := range s.Peers {
		p := engine.Peer{Addr: a, Port: 179, AS: s.AS, Passive: true, HoldTime: 240 * time.Second, ConnectRetry: 5 * time.Second, ClusterID: s.Cluster}
		p.Families[wire.IPv4].Enabled = true
		peers = append(peers, p)
	}
	if err := errors.Join(e.SetPeers(peers), e.Listen(ctx, []netip.AddrPort{s.Listen})); err != nil {
		return err
	}
	l, err := new(net.ListenConfig).Listen(ctx, "unix", s.Control)
	if err != nil {
		return err
	}
	defer l.Close()
	var routes atomic.Int64
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return // it is closed below
			}
			fmt.Fprintln(c, routes.Load())
			c.Close()
		}
	})
	defer l.Close()
	known := map[wire.Family][]uint64{} // bit i: prefix i of routePrefixes has a path
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-e.Changed():
		}
		for e.Take(4096, func(engine.Event) {}, func(p wire.Prefix, chosen iter.Seq[*engine.Path]) {
			some := false
			for range chosen {
				some = true
				break
			}
			i := (p.Hi>>32 - 20<<24) >> 6
			for uint64(len(known[p.Family])) <= i/64 {
				known[p.Family] = append(known[p.Family], 0)
			}
			word, bit := &known[p.Family][i/64], uint64(1)<<(i%64)
			switch had := *word&bit != 0; {
			case some && !had:
				*word |= bit
				routes.Add(1)
			case !some && had:
				*word &^= bit
				routes.Add(-1)
			}
		}) {
		}
	}
}

// startBIRDAlone runs BIRD with one peer and without a kernel protocol.
func startBIRDAlone(ctx context.Context, s *convergenceSpace) ([]*os.Process, error) {
	return startBIRDWithoutKernel(ctx, s, fmt.Sprintf("protocol bgp client0 { local %s as %d; neighbor %s as %d; passive; ipv4 { import all; export none; }; }\n",
		reflectorAddr(), rxASN, clientAddr(0), rxASN))
}

// startSpeaker runs the engine alone, with one peer, or as a reflector of several clients.
func startSpeaker(ctx context.Context, s *convergenceSpace, programs Programs, clients int) ([]*os.Process, error) {
	c := speaker{
		AS: rxASN, RouterID: reflectorAddr(), Listen: netip.AddrPortFrom(reflectorAddr(), 179), Control: s.speakerSocket(),
	}
	if clients > 1 {
		c.Cluster = netip.MustParseAddr(reflectorCluster)
	}
	for i := range clients {
		c.Peers = append(c.Peers, clientAddr(i))
	}
	text, err := json.Marshal(c)
	if err != nil {
		return nil, err
	}
	conf, err := s.file("speaker.json", string(text))
	if err != nil {
		return nil, err
	}
	p, err := s.run(s.rx, programs.Speaker[0], append(programs.Speaker[1:len(programs.Speaker):len(programs.Speaker)], conf)...)
	if err != nil {
		return nil, err
	}
	return []*os.Process{p}, until(ctx, "the engine answers", func() (bool, error) {
		_, err := s.speakerRoutes(ctx)
		return err == nil, ctx.Err()
	})
}

func (s *convergenceSpace) speakerSocket() string { return filepath.Join(s.dir, "speaker.sock") }

// speakerRoutes asks the engine for how many prefixes it has a path.
func (s *convergenceSpace) speakerRoutes(ctx context.Context) (int, error) {
	c, err := new(net.Dialer).DialContext(ctx, "unix", s.speakerSocket())
	if err != nil {
		return 0, err
	}
	defer c.Close()
	b, err := io.ReadAll(c)
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(strings.TrimSpace(string(b)))
}

// birdRoutes asks BIRD for the same.
func (s *convergenceSpace) birdRoutes(ctx context.Context) (n int, err error) {
	out, err := exec.CommandContext(ctx, "birdc", "-s", filepath.Join(s.dir, "rr.ctl"), "show", "route", "count").CombinedOutput()
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(out)) {
		if before, _, ok := strings.Cut(line, " of "); ok {
			return strconv.Atoi(strings.TrimSpace(before))
		}
	}
	return 0, fmt.Errorf("BIRD's answer has no number: %s", out)
}

// ingest is what a speaker took for prefixes that go nowhere else.
type ingest struct {
	feed, withdraw, cpu time.Duration // cpu: of the feed
	peak                float64
}

// MeasureAlone feeds the engine alone and BIRD without a kernel protocol these numbers of prefixes,
// by one session.
func MeasureAlone(ctx context.Context, p Programs, counts []int, progress func(string)) ([]Row, error) {
	var rows []Row
	for _, n := range counts {
		progress(fmt.Sprintf("BGP alone: %d prefixes to the engine", n))
		ours, err := ingestOf(ctx, n, func(ctx context.Context, s *convergenceSpace) ([]*os.Process, error) {
			return startSpeaker(ctx, s, p, 1)
		}, (*convergenceSpace).speakerRoutes)
		if err != nil {
			return nil, fmt.Errorf("%d prefixes to the engine: %w", n, err)
		}
		progress(fmt.Sprintf("BGP alone: %d prefixes to BIRD", n))
		theirs, err := ingestOf(ctx, n, func(ctx context.Context, s *convergenceSpace) ([]*os.Process, error) {
			return startBIRDAlone(ctx, s)
		}, (*convergenceSpace).birdRoutes)
		if err != nil {
			return nil, fmt.Errorf("%d prefixes to BIRD: %w", n, err)
		}
		row := func(what string, unit Unit, a, b float64) {
			rows = append(rows, Row{What: fmt.Sprintf("BGP alone, %d prefixes: %s", n, what), Against: "BIRD", Unit: unit, Ours: a, Reference: b})
		}
		row("to the last path", Milliseconds, ms(ours.feed), ms(theirs.feed))
		row("withdrawal of all", Milliseconds, ms(ours.withdraw), ms(theirs.withdraw))
		row("CPU", Milliseconds, ms(ours.cpu), ms(theirs.cpu))
		row("peak memory", MiB, ours.peak, theirs.peak)
	}
	return rows, nil
}

// ingestOf measures one speaker, which routes asks for how many prefixes it has a path.
func ingestOf(ctx context.Context, n int, start func(context.Context, *convergenceSpace) ([]*os.Process, error), routes func(*convergenceSpace, context.Context) (int, error)) (out ingest, err error) {
	s, err := newReflectorSpace(ctx, 1)
	if err != nil {
		return out, err
	}
	defer func() { err = s.end(ctx, err) }()
	procs, err := start(ctx, s)
	if err != nil {
		return out, err
	}
	clients, err := s.connect(ctx, Reflection{Clients: 1, Prefixes: n})
	if err != nil {
		return out, err
	}
	client := clients[0]
	defer func() { err = errors.Join(err, client.close()) }()
	all := routePrefixes(n)
	timed := func(want int, send func([]netip.Prefix) error) (time.Duration, error) {
		start := time.Now()
		if err := send(all); err != nil {
			return 0, err
		}
		err := untilWithin(ctx, convergeWithin, fmt.Sprintf("%d prefixes", want), func() (bool, error) {
			got, err := routes(s, ctx)
			return got == want, err
		})
		return time.Since(start), err
	}
	before := cpuTime(procs)
	if out.feed, err = timed(n, client.announce); err != nil {
		return out, err
	}
	out.cpu = cpuTime(procs) - before
	if out.withdraw, err = timed(0, client.withdraw); err != nil {
		return out, err
	}
	out.peak = peakMemory(procs...)
	return out, nil
}
