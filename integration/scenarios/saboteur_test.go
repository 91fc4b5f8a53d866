package scenarios

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/dataplane/kernel/saboteur"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/integration/lab/stall"
	"github.com/routerd/routerd/store"
)

// metricsAddress is where each daemon of the saboteur's lab serves its numbers.
const metricsAddress = "127.0.0.1:9099"

// kernelOf shows all that a host's daemon keeps in the kernel, without what
// chance puts in: the indexes of devices, and the order of hash tables.
func kernelOf(t *testing.T, l *lab.Lab, host string) []string {
	t.Helper()
	var lines []string
	for _, c := range []string{
		"ip -4 -d route show table all proto 77", "ip -6 -d route show table all proto 77", "ip -d nexthop show proto 77",
		"bridge fdb show dev vxlan.calico", "ip neigh show nud permanent", "ip -o addr show dev vxlan.calico",
		"ip -d link show type vxlan", "sysctl net.ipv4.ip_forward net/ipv4/conf/vxlan.calico/forwarding net/ipv4/conf/eth0/forwarding",
	} {
		r, err := l.Exec(await.Context(t), host, strings.Fields(c)...)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(r.Stdout) {
			f := strings.Fields(line)
			if len(f) > 1 && strings.HasSuffix(f[0], ":") {
				f = f[1:]
			}
			lines = append(lines, strings.Join(f, " "))
		}
	}
	slices.Sort(lines)
	return lines
}

// metric sums the values of a metric of a host's daemon over all labels.
func metric(t *testing.T, l *lab.Lab, host, name string) int {
	t.Helper()
	a, port, _ := strings.Cut(metricsAddress, ":")
	out := output(t, l, host, "bash", "-c", fmt.Sprintf("exec 3<>/dev/tcp/%s/%s; printf 'GET /metrics HTTP/1.0\\r\\n\\r\\n' >&3; cat <&3", a, port))
	sum := 0
	for _, m := range regexp.MustCompile(`(?m)^`+name+`(?:\{[^}]*\})? ([0-9.e+]+)$`).FindAllStringSubmatch(out, -1) {
		v, err := strconv.ParseFloat(m[1], 64)
		if err != nil {
			t.Fatal(err)
		}
		sum += int(v)
	}
	return sum
}

// TestSaboteur lets somebody on each host change and delete routerd's objects
// at random for a minute, under traffic. Afterwards each kernel is as it was,
// each strike is in the log, and each repair in the log and in the metrics.
func TestSaboteur(t *testing.T) {
	beside(t)
	top := topology(3, 3, store.VXLANCrossSubnet)
	for i := range top.Nodes {
		top.Nodes[i].Config = map[string]any{"health": map[string]any{"listen": metricsAddress}}
	}
	l := bringUp(t, "saboteur", top)
	before := map[string][]string{}
	for _, h := range l.Hosts() {
		before[h] = kernelOf(t, l, h)
	}
	traffic := startLoad(t, l, loadPairs()...)

	stalls, err := stall.Start(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer stalls.Stop()

	strikes := make([][]saboteur.Strike, len(l.Hosts()))
	ctx := await.Context(t)
	var wg sync.WaitGroup
	for i, h := range l.Hosts() {
		s := &saboteur.Saboteur{
			Exec:    func(command string) (string, error) { return try(t.Context(), l, h, command) },
			Rand:    rand.New(rand.NewPCG(uint64(i), uint64(time.Now().UnixNano()))),
			Devices: []string{"vxlan.calico"}, Sysctls: []string{"net/ipv4/ip_forward", "net/ipv4/conf/eth0/forwarding"},
		}
		wg.Go(func() { strikes[i] = s.Run(ctx, 300*time.Millisecond) })
	}
	wg.Wait()

	for i, h := range l.Hosts() {
		poll(t, "the kernel of "+h+" is as it was (-before +now)", func() string {
			return cmp.Diff(before[h], kernelOf(t, l, h))
		})
		log := ""
		poll(t, "each strike at "+h+" is in the log", func() string {
			log = l.LogTail(h, 1<<20)
			for _, s := range strikes[i] {
				// What went with its device before it was put back is said to be
				// as it should be again.
				if !regexp.MustCompile(`msg="changed by somebody else, [a-z ]+" component=kernel object="` + regexp.QuoteMeta(s.Object) + `"`).MatchString(log) {
					return fmt.Sprintf("nothing about %s (%s)", s.Object, s.Command)
				}
			}
			return ""
		})
		told, counted := strings.Count(log, `msg="put back"`), metric(t, l, h, "routerd_drift_repairs_total")
		timed := metric(t, l, h, "routerd_drift_repair_seconds_count")
		fast := metric(t, l, h, `routerd_drift_repair_seconds_bucket\{kind="[a-z]+",le="0.1"\}`)
		soon := repairedWithin(t, log, 100*time.Millisecond, stalls)
		t.Logf("%s: %d strikes, %d repairs, %d of them within 100 ms, %d of the machine's own time", h, len(strikes[i]), counted, fast, soon)
		if told != counted || timed != counted || counted < len(strikes[i]) {
			t.Errorf("%s: %d strikes; %d repairs in the log, %d counted, %d timed", h, len(strikes[i]), told, counted, timed)
		}
		// The rest is what came to a device that was just being made anew.
		if soon < counted*9/10 {
			t.Errorf("%s: only %d of %d repairs within 100 ms of the kernel's notice", h, soon, counted)
		}
		if len(strikes[i]) < 10 {
			t.Errorf("%s: only %d strikes", h, len(strikes[i]))
		}
	}
	// Strikes cost packets; connections survive them.
	t.Log(traffic.packets.Interval().Sum())
	for _, s := range traffic.streams {
		if r := s.Report(); r.Err != nil {
			t.Errorf("a connection ended: %s", r)
		}
	}
	reachAll(t, l)
}

// repairedWithin counts the repairs in a log that took no longer than limit,
// apart from the time in which the machine stalled.
func repairedWithin(t *testing.T, log string, limit time.Duration, stalls *stall.Recorder) (n int) {
	t.Helper()
	for _, m := range regexp.MustCompile(`(?m)^time=(\S+) .* msg="put back" .* took=(\S+)$`).FindAllStringSubmatch(log, -1) {
		at, err := time.Parse(time.RFC3339Nano, m[1])
		if err != nil {
			t.Fatal(err)
		}
		took, err := time.ParseDuration(m[2])
		if err != nil {
			t.Fatal(err)
		}
		if took-stalls.Within(at.Add(-took), at) <= limit {
			n++
		}
	}
	return n
}

// try runs a command on a host and returns an error if it fails.
func try(ctx context.Context, l *lab.Lab, host, command string) (string, error) {
	r, err := l.Exec(ctx, host, strings.Fields(command)...)
	if err == nil && r.Code != 0 {
		err = errors.New(strings.TrimSpace(r.Stderr))
	}
	return r.Stdout, err
}

// reachAll waits until all pods reach all pods.
func reachAll(t *testing.T, l *lab.Lab) {
	t.Helper()
	for _, pair := range loadPairs() {
		flows, stop := startFlows(t, l, pair)
		waitFlows(t, flows, 200*time.Millisecond)
		stop()
	}
}
