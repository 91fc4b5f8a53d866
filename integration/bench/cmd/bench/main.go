// Command bench prints what routerd takes beside references that do the same
// work in the same run, as a table of ratios. docs/performance.md says how to
// read it. It needs root, and the programs of make build.
package main

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/integration/bench"
)

// speak has the command run the engine alone, to be measured.
const speak = "speak"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if len(os.Args) == 3 && os.Args[1] == speak {
		if err := bench.Speak(ctx, os.Args[2]); err != nil {
			fmt.Fprintln(os.Stderr, "bench:", err)
			os.Exit(1)
		}
		return
	}
	if err := run(ctx, os.Args[1:], os.Stdout, os.Stderr); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	fs := flag.NewFlagSet("bench", flag.ContinueOnError)
	fs.SetOutput(stderr)
	binDir := fs.String("bin", cmp.Or(os.Getenv("ROUTERD_BIN"), "bin"), "`directory` of the programs")
	only := fs.String("only", "cni,ipam,routes,rules,throughput,scale,bgp,alone,reflector,reflector-alone,churn", "`series` to run, with commas between them")
	atLeast := fs.Duration("time", 2*time.Second, "least `time` of each IPAM series")
	routes := fs.Int("routes", 100_000, "`number` of routes")
	nodes := fs.Int("nodes", 5000, "`number` of nodes of the series scale, up to 10000")
	prefixes := fs.String("prefixes", "10000", "`numbers` of BGP prefixes, with commas between them; 500000 takes minutes and 3 GiB")
	reflect := fs.String("reflect", "100x100", "`clients x prefixes` of a route reflector, with commas between them; 100x1000 takes minutes and 6 GiB")
	profiles := fs.String("profiles", "", "`directory` for profiles of the daemon in the series scale, bgp and reflector; what they cost is in the figures")
	alone := fs.String("alone", "500000", "`numbers` of BGP prefixes for the engine alone, with commas between them")
	churnFor := fs.Duration("churn", 10*time.Second, "for how `long` the series churn lasts with each speaker")
	against := fs.String("against", "BIRD,FRR", "`speakers` beside routerd in the series bgp and churn, with commas between them")
	if err := fs.Parse(args); err != nil {
		return err
	}
	if os.Geteuid() != 0 {
		return fmt.Errorf("the measurements need root: they make network namespaces")
	}
	dir, err := filepath.Abs(*binDir)
	if err != nil {
		return err
	}
	if *profiles != "" {
		if err := os.MkdirAll(*profiles, 0o700); err != nil {
			return err
		}
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	programs := bench.Programs{Dir: dir, Speaker: []string{self, speak}, Profiles: *profiles, Against: strings.Split(*against, ",")}
	log := slog.New(slog.NewTextHandler(stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	progress := func(s string) { fmt.Fprintln(stderr, "bench:", s) }

	series := map[string]func() ([]bench.Row, error){
		"cni": func() ([]bench.Row, error) {
			return bench.MeasureCNIHost(ctx, dir, cniCounts(), progress)
		},
		"ipam": func() ([]bench.Row, error) {
			progress("IPAM: one and sixteen callers")
			return bench.MeasureIPAM(ctx, *atLeast, log)
		},
		"routes": func() ([]bench.Row, error) {
			progress(fmt.Sprintf("routes: %d", *routes))
			return bench.MeasureRoutes(ctx, *routes, log)
		},
		"rules": func() ([]bench.Row, error) {
			return measureRules(ctx, progress, log)
		},
		"throughput": func() ([]bench.Row, error) {
			progress("throughput: packets of one flow, and pods of two hosts")
			packets, err := bench.MeasureEstablished(ctx, log)
			if err != nil {
				return nil, err
			}
			two, err := bench.MeasureTwoHosts(ctx, log)
			if err != nil {
				return nil, err
			}
			streams, err := bench.MeasureThroughput(ctx, *atLeast, log)
			return slices.Concat(packets, two, streams), err
		},
		"scale": func() ([]bench.Row, error) {
			return bench.MeasureScale(ctx, programs, bench.Scale{Nodes: *nodes, Colds: 3, Single: 200, Settle: 10 * time.Second, Idle: 20 * time.Second}, progress)
		},
		"bgp": func() ([]bench.Row, error) {
			counts, err := parseCounts(*prefixes)
			if err != nil {
				return nil, err
			}
			return bench.MeasureConvergence(ctx, programs, counts, progress)
		},
		"reflector": func() ([]bench.Row, error) {
			sizes, err := parseReflections(*reflect)
			if err != nil {
				return nil, err
			}
			return bench.MeasureReflector(ctx, programs, sizes, progress)
		},
		"alone": func() ([]bench.Row, error) {
			counts, err := parseCounts(*alone)
			if err != nil {
				return nil, err
			}
			return bench.MeasureAlone(ctx, programs, counts, progress)
		},
		"reflector-alone": func() ([]bench.Row, error) {
			sizes, err := parseReflections(*reflect)
			if err != nil {
				return nil, err
			}
			return bench.MeasureReflectorAlone(ctx, programs, sizes, progress)
		},
		"churn": func() ([]bench.Row, error) {
			return bench.MeasureChurn(ctx, programs, bench.Churn{Clients: 20, Prefixes: 500, PerSecond: 1000, For: *churnFor}, progress)
		},
	}
	var rows []bench.Row
	for name := range strings.SplitSeq(*only, ",") {
		f, ok := series[name]
		if !ok {
			return fmt.Errorf("--only: %q is no series: want cni, ipam, routes, rules, throughput, scale, bgp, alone, reflector, reflector-alone or churn", name)
		}
		r, err := f()
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		rows = append(rows, r...)
	}
	fmt.Fprintf(stdout, "%s, %d CPUs, %s\n\n", kernelRelease(), runtime.NumCPU(), runtime.Version())
	return bench.WriteTable(stdout, rows)
}

// measureRules measures what a host with a thousand endpoints does, and what
// one in a large cluster has to know.
func measureRules(ctx context.Context, progress func(string), log *slog.Logger) ([]bench.Row, error) {
	const (
		endpoints, perEndpoint = 1000, 10
		clustered, policies    = 100_000, 500
	)
	progress(fmt.Sprintf("rules: %d endpoints", endpoints))
	rules, err := bench.MeasureRules(ctx, endpoints, log)
	if err != nil {
		return nil, err
	}
	progress(fmt.Sprintf("rules: labels of %d endpoints with %d policies", endpoints, perEndpoint))
	label, err := bench.MeasureLabelChange(ctx, endpoints, perEndpoint, log)
	if err != nil {
		return nil, err
	}
	progress(fmt.Sprintf("rules: a cluster of %d endpoints and %d policies", clustered, policies))
	sync, err := bench.MeasurePolicySync(clustered, policies)
	return slices.Concat(rules, label, sync), err
}

// cniCounts are enough for a median, in about two minutes.
func cniCounts() bench.CNICounts {
	return bench.CNICounts{
		OneByOne: 100, AtOnce: 100, Callers: 10, Bursts: []int{16, 64, 500},
		Delays: []time.Duration{50 * time.Millisecond, 400 * time.Millisecond}, Delayed: 30,
	}
}

// parseCounts reads numbers of prefixes. As many as are sampled are needed.
func parseCounts(list string) ([]int, error) {
	var out []int
	for s := range strings.SplitSeq(list, ",") {
		n, err := strconv.Atoi(s)
		if err != nil || n < 512 || n > 4_000_000 {
			return nil, fmt.Errorf("--prefixes: %q: want numbers from 512 to 4000000", s)
		}
		out = append(out, n)
	}
	return out, nil
}

// parseReflections reads sizes of a reflector's work.
func parseReflections(list string) ([]bench.Reflection, error) {
	var out []bench.Reflection
	for s := range strings.SplitSeq(list, ",") {
		a, b, _ := strings.Cut(s, "x")
		clients, err := strconv.Atoi(a)
		prefixes, errP := strconv.Atoi(b)
		if err != nil || errP != nil || clients < 2 || clients > 1000 || prefixes < 1 || clients*prefixes > 200_000 {
			return nil, fmt.Errorf("--reflect: %q: want 2 to 1000 clients, an x and how many prefixes each has, at most 200000 in all", s)
		}
		out = append(out, bench.Reflection{Clients: clients, Prefixes: prefixes})
	}
	return out, nil
}

// kernelRelease is what uname -sr prints.
func kernelRelease() string {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return "unknown kernel"
	}
	return unix.ByteSliceToString(u.Sysname[:]) + " " + unix.ByteSliceToString(u.Release[:])
}
