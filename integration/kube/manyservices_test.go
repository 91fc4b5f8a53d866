package kube_test

import (
	"context"
	"flag"
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab"
)

var manyServices = flag.Int("services", 200, "how many Services TestManyServices announces")

// manyRange is what the Services have their addresses of.
const manyRange = "172.18.0.0/16"

// used is what a process has used so far, and holds.
type used struct {
	cpu            time.Duration // user and system
	resident, peak int           // KiB
}

func (u used) String() string {
	return fmt.Sprintf("%.1f s of the processor, %.1f MiB resident, %.1f at most", u.cpu.Seconds(), float64(u.resident)/1024, float64(u.peak)/1024)
}

// used reads it of a host's daemon.
func (c *cluster) used(host string) used {
	c.t.Helper()
	p, err := c.Daemon(host)
	if err != nil {
		c.t.Fatal(err)
	}
	return usedBy(c.t, p.PID)
}

func usedBy(t *testing.T, pid int) (u used) {
	t.Helper()
	read := func(name string) string {
		raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, name))
		if err != nil {
			t.Fatal(err)
		}
		return string(raw)
	}
	number := func(text string) int {
		n, err := strconv.Atoi(text)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	for line := range strings.Lines(read("status")) {
		switch f := strings.Fields(line); f[0] {
		case "VmRSS:":
			u.resident = number(f[1])
		case "VmHWM:":
			u.peak = number(f[1])
		}
	}
	// The name, in parentheses, may have blanks; the state is the third field, utime the
	// 14th, in hundredths of a second (proc_pid_stat(5)).
	stat := read("stat")
	f := strings.Fields(stat[strings.LastIndexByte(stat, ')')+1:])
	u.cpu = time.Duration(number(f[11])+number(f[12])) * 10 * time.Millisecond
	return u
}

// switchHas waits until the switch's kernel has n single addresses of a range.
func (c *cluster) switchHas(n int, in string) {
	c.t.Helper()
	await.Until(c.t, fmt.Sprintf("the switch has %d addresses", n), func() error {
		out, err := c.Output(c.t.Context(), spine, "ip", "route", "show", "root", in)
		got := 0
		for line := range strings.Lines(out) {
			if to, _, _ := strings.Cut(line, " "); !strings.Contains(to, "/") {
				got++
			}
		}
		if err == nil && got != n {
			err = fmt.Errorf("it has %d", got)
		}
		return err
	})
}

// restarts returns how many graceful restarts the switch has seen to their ends.
func (c *cluster) restarts() int {
	c.t.Helper()
	raw, err := os.ReadFile(filepath.Join(filepath.Dir(lab.Socket(c.Name(), spine)), "bird.log"))
	if err != nil {
		c.t.Fatal(err)
	}
	return strings.Count(string(raw), "Neighbor graceful restart done")
}

// restarted kills the daemon of node1, starts it again, and waits until the switch has all
// routes anew and the datastore has been read.
func (c *cluster) restarted() time.Duration {
	c.t.Helper()
	n, begin := c.restarts(), time.Now()
	if err := c.Kill(c.t.Context(), "node1", unix.SIGKILL); err != nil {
		c.t.Fatal(err)
	}
	if err := c.Restart(c.t.Context(), "node1"); err != nil {
		c.t.Fatal(err)
	}
	await.True(c.t, "the restart is over", func() bool { return c.restarts() > n })
	took := time.Since(begin)
	if err := c.WaitReady(c.t.Context(), "node1"); err != nil {
		c.t.Fatal(err)
	}
	return took
}

// inParallel calls do with the numbers below n, eight at a time.
func inParallel(t *testing.T, n int, do func(i int) error) {
	t.Helper()
	const workers = 8
	var group sync.WaitGroup
	for w := range workers {
		group.Go(func() {
			for i := w; i < n; i += workers {
				if err := do(i); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	group.Wait()
	if t.Failed() {
		t.FailNow()
	}
}

// oneByOne has the endpoint of each of n Services terminate and be ready again, and reports
// what that costs the daemon. The address stays announced, with other attributes meanwhile.
func (c *cluster) oneByOne(n int) {
	c.t.Helper()
	c.rests()
	before, begin := c.used("node1"), time.Now()
	for i := range 2 * n {
		text := fmt.Sprintf(`{"endpoints":[%s]}`, endpoint("node1", "10.1.0.11", i%2 == 0))
		if _, err := server.Do(c.t.Context(), http.MethodPatch, fmt.Sprintf("%s/many-%d", slicesPath, i/2), "application/merge-patch+json", []byte(text)); err != nil {
			c.t.Fatal(err)
		}
	}
	took := time.Since(begin)
	c.rests()
	cpu := c.used("node1").cpu - before.cpu
	c.t.Logf("%d changes of an endpoint one by one in %v: %v of the processor each", 2*n, took.Round(time.Millisecond), (cpu / time.Duration(2*n)).Round(10*time.Microsecond))
}

// TestManyServices: a host announces the addresses of as many Services as -services says, 10,000 for the
// figures in docs/performance.md; a switch loses none while its daemon is killed and started again.
func TestManyServices(t *testing.T) {
	pods, n := 0, *manyServices
	top := lab.DefaultTopology(1)
	top.Pods, top.Spine.BGP = &pods, new(true)
	c := bringUp(t, "y", top)
	kubectlWith(t, "{apiVersion: projectcalico.org/v3, kind: BGPConfiguration, metadata: {name: default}, spec: {serviceExternalIPs: [{cidr: "+manyRange+"}]}}",
		"apply", "--server-side", "--force-conflicts", "-f", "-")
	c.announced("the range is announced", manyRange, "node1")
	c.restarted()
	t.Logf("without Services: %v", c.used("node1"))

	const services = "/api/v1/namespaces/default/services"
	t.Cleanup(func() {
		inParallel(t, n, func(i int) error { // all at once would take longer than the server allows
			for _, path := range []string{services, slicesPath} {
				if _, err := server.Do(context.WithoutCancel(t.Context()), http.MethodDelete, fmt.Sprintf("%s/many-%d", path, i), "", nil); err != nil {
					return err
				}
			}
			return nil
		})
	})
	addr := netip.MustParsePrefix(manyRange).Addr().As4()
	begin := time.Now()
	inParallel(t, n, func(i int) error {
		a := addr
		a[2], a[3] = byte(i>>8), byte(i)
		_, err := server.Do(t.Context(), http.MethodPost, services, "application/json", fmt.Appendf(nil,
			`{"apiVersion":"v1","kind":"Service","metadata":{"name":"many-%d"},"spec":{"externalIPs":[%q],"externalTrafficPolicy":"Local","ports":[{"port":80}]}}`, i, netip.AddrFrom4(a)))
		return err
	})
	t.Logf("%d Services were written in %v", n, time.Since(begin))
	begin = time.Now()
	inParallel(t, n, func(i int) error {
		_, err := server.Do(t.Context(), http.MethodPost, slicesPath, "application/json", fmt.Appendf(nil,
			`{"apiVersion":"discovery.k8s.io/v1","kind":"EndpointSlice","metadata":{"name":"many-%d","labels":{"kubernetes.io/service-name":"many-%[1]d"}},"addressType":"IPv4","ports":[{"port":80}],"endpoints":[%s]}`,
			i, endpoint("node1", "10.1.0.11", false)))
		return err
	})
	written := time.Now()
	c.switchHas(n, manyRange)
	t.Logf("their EndpointSlices in %v; the switch had all addresses %v later: %v", written.Sub(begin), time.Since(written), c.used("node1"))

	c.oneByOne(min(n, 500))

	log := c.watchRoute(manyRange)
	for range 2 {
		took := c.restarted()
		t.Logf("a restart until the switch had all again: %v: %v", took, c.used("node1"))
		c.switchHas(n, manyRange)
		c.rests()
		t.Logf("at rest: %v", c.used("node1"))
	}
	if gone := log.gone(); gone > 0 {
		t.Errorf("the switch lost %d routes", gone)
	}
	forbidden(t)
}
