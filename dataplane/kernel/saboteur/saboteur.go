// Package saboteur changes and deletes what routerd keeps in a kernel, as other
// software on a host does, for tests that hold that it is put back. It works by
// ip(8), bridge(8) and sysctl(8), so it runs wherever a test can run commands.
package saboteur

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"time"
)

// calm is the least time between two strikes at one object. More often would
// be a quarrel, which is damped on purpose.
const calm = 3 * time.Second

// Saboteur strikes at objects of routerd on one host. It is for one goroutine.
type Saboteur struct {
	// Exec runs a command on the host, split at spaces, and returns its output.
	Exec func(command string) (string, error)
	// Rand chooses.
	Rand *rand.Rand
	// Devices are tunnel devices of routerd; each is struck at, and what is on
	// it.
	Devices []string
	// Sysctls are settings of the value 0 or 1 that routerd keeps, with slashes.
	Sysctls []string
	// Offload is an offload that routerd keeps, as its log names it, and Switch
	// gives it the other value. Optional.
	Offload string
	Switch  func() error

	struck map[string]time.Time
}

// Strike is one change that another program made.
type Strike struct {
	Object  string // as routerd's log names it
	Command string // empty: an offload was switched
}

// errNothing says that there was nothing to strike at.
var errNothing = errors.New("nothing to strike at")

// Run strikes until ctx ends, with random pauses of at most pause, and returns
// what was struck at.
func (s *Saboteur) Run(ctx context.Context, pause time.Duration) []Strike {
	var done []Strike
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return done
		case <-timer.C:
		}
		if st, err := s.Strike(); err == nil {
			done = append(done, st)
		}
		timer.Reset(time.Duration(s.Rand.Int64N(int64(pause)) + 1))
	}
}

// Strike changes or deletes one random object. It fails where that object went
// meanwhile, or was struck at a moment ago.
func (s *Saboteur) Strike() (Strike, error) {
	kinds := []func() (Strike, error){s.route, s.route, s.nextHop, s.group, s.address, s.neighbour, s.fdb, s.link, s.sysctl, s.offload}
	st, err := kinds[s.Rand.IntN(len(kinds))]()
	if err != nil {
		return Strike{}, err
	}
	if last, ok := s.struck[st.Object]; ok && time.Since(last) < calm {
		return Strike{}, errNothing
	}
	if st.Command == "" {
		err = s.Switch()
	} else if out, rerr := s.Exec(st.Command); rerr != nil {
		err = fmt.Errorf("%s: %w: %s", st.Command, rerr, out)
	}
	if err != nil {
		return Strike{}, err
	}
	if s.struck == nil {
		s.struck = make(map[string]time.Time)
	}
	s.struck[st.Object] = time.Now()
	return st, nil
}

// pick returns a random line of a command's output, as its words.
func (s *Saboteur) pick(command string, fits func([]string) bool) ([]string, error) {
	out, err := s.Exec(command)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", command, err)
	}
	var lines [][]string
	for line := range strings.Lines(out) {
		if f := strings.Fields(line); len(f) > 0 && fits(f) {
			lines = append(lines, f)
		}
	}
	if len(lines) == 0 {
		return nil, errNothing
	}
	return lines[s.Rand.IntN(len(lines))], nil
}

func (s *Saboteur) device() (string, error) {
	if len(s.Devices) == 0 {
		return "", errNothing
	}
	return s.Devices[s.Rand.IntN(len(s.Devices))], nil
}

// after returns the word that follows another; empty if there is none.
func after(f []string, word string) string {
	if i := slices.Index(f, word); i >= 0 && i+1 < len(f) {
		return f[i+1]
	}
	return ""
}

// route deletes a route, or replaces it by a blackhole of ours.
func (s *Saboteur) route() (Strike, error) {
	family := []string{"-4", "-6"}[s.Rand.IntN(2)]
	f, err := s.pick("ip "+family+" route show table all proto 77", func([]string) bool { return true })
	if err != nil {
		return Strike{}, err
	}
	kind, dst := "", f[0]
	if f[0] == "blackhole" {
		kind, dst = "blackhole ", f[1]
	}
	p, err := prefix(dst)
	if err != nil {
		return Strike{}, err
	}
	what, rest := "route "+p.String(), ""
	if t := after(f, "table"); t != "" {
		what, rest = what+" table "+t, rest+" table "+t
	}
	if m := after(f, "metric"); m != "" {
		what, rest = what+" metric "+m, rest+" metric "+m
	}
	if kind == "" && family == "-4" && s.Rand.IntN(3) == 0 {
		return Strike{what, "ip route replace blackhole " + dst + rest + " proto 77"}, nil
	}
	return Strike{what, "ip " + family + " route del " + kind + dst + rest + " proto 77"}, nil
}

// prefix reads a destination as ip(8) writes it.
func prefix(s string) (netip.Prefix, error) {
	if a, err := netip.ParseAddr(s); err == nil {
		return netip.PrefixFrom(a, a.BitLen()), nil
	}
	return netip.ParsePrefix(s)
}

// nextHop deletes a next hop, or turns it to another gateway.
func (s *Saboteur) nextHop() (Strike, error) {
	f, err := s.pick("ip nexthop show proto 77", func(f []string) bool { return after(f, "via") != "" })
	if err != nil {
		return Strike{}, err
	}
	what := "nexthop id " + after(f, "id")
	if s.Rand.IntN(2) == 0 {
		return Strike{what, "ip nexthop del id " + after(f, "id")}, nil
	}
	gw, err := netip.ParseAddr(after(f, "via"))
	if err != nil {
		return Strike{}, err
	}
	return Strike{what, fmt.Sprintf("ip nexthop replace id %s via %s dev %s onlink proto 77", after(f, "id"), gw.Next(), after(f, "dev"))}, nil
}

// group deletes a group of next hops, or leaves one member alone in it.
func (s *Saboteur) group() (Strike, error) {
	f, err := s.pick("ip nexthop show proto 77", func(f []string) bool { return after(f, "group") != "" })
	if err != nil {
		return Strike{}, err
	}
	id := after(f, "id")
	what := "nexthop id " + id + " group"
	first, rest, more := strings.Cut(after(f, "group"), "/")
	if !more || rest == "" || s.Rand.IntN(2) == 0 {
		return Strike{what, "ip nexthop del id " + id}, nil
	}
	return Strike{what, "ip nexthop replace id " + id + " group " + first + " proto 77"}, nil
}

// address removes an address of a tunnel device, or adds one.
func (s *Saboteur) address() (Strike, error) {
	dev, err := s.device()
	if err != nil {
		return Strike{}, err
	}
	if s.Rand.IntN(2) == 0 {
		stray := fmt.Sprintf("203.0.113.%d/32", 1+s.Rand.IntN(250))
		return Strike{"address " + stray + " dev " + dev, "ip addr add " + stray + " dev " + dev}, nil
	}
	f, err := s.pick("ip -o addr show dev "+dev, func(f []string) bool {
		p, err := netip.ParsePrefix(after(f, f[2]))
		return err == nil && !p.Addr().IsLinkLocalUnicast()
	})
	if err != nil {
		return Strike{}, err
	}
	return Strike{"address " + f[3] + " dev " + dev, "ip addr del " + f[3] + " dev " + dev}, nil
}

// neighbour removes a permanent neighbour, or gives it another MAC.
func (s *Saboteur) neighbour() (Strike, error) {
	dev, err := s.device()
	if err != nil {
		return Strike{}, err
	}
	f, err := s.pick("ip neigh show nud permanent dev "+dev, func(f []string) bool { return after(f, "lladdr") != "" })
	if err != nil {
		return Strike{}, err
	}
	what := "neighbour " + f[0] + " dev " + dev
	if s.Rand.IntN(2) == 0 {
		return Strike{what, "ip neigh del " + f[0] + " dev " + dev}, nil
	}
	return Strike{what, "ip neigh replace " + f[0] + " lladdr 02:00:00:00:00:01 dev " + dev + " nud permanent"}, nil
}

// fdb removes an FDB entry, or gives it another destination.
func (s *Saboteur) fdb() (Strike, error) {
	dev, err := s.device()
	if err != nil {
		return Strike{}, err
	}
	f, err := s.pick("bridge fdb show dev "+dev, func(f []string) bool { return after(f, "dst") != "" })
	if err != nil {
		return Strike{}, err
	}
	what := "fdb " + f[0] + " dev " + dev
	if s.Rand.IntN(2) == 0 {
		return Strike{what, "bridge fdb del " + f[0] + " dev " + dev + " self"}, nil
	}
	dst, err := netip.ParseAddr(after(f, "dst"))
	if err != nil {
		return Strike{}, err
	}
	return Strike{what, "bridge fdb replace " + f[0] + " dev " + dev + " dst " + dst.Next().String() + " self permanent"}, nil
}

// link deletes a tunnel device, sets it down or changes it.
func (s *Saboteur) link() (Strike, error) {
	dev, err := s.device()
	if err != nil {
		return Strike{}, err
	}
	how := []string{"set " + dev + " down", "set " + dev + " mtu 1300", "set " + dev + " addrgenmode eui64"}
	if dev != "tunl0" {
		how = append(how, "del "+dev)
	}
	if strings.HasPrefix(dev, "vxlan") {
		// Not protodown: a carrier that comes back leaves the device's state UP
		// instead of UNKNOWN.
		how = append(how, "set "+dev+" type vxlan ttl 1", "set "+dev+" arp off")
	}
	return Strike{"link " + dev, "ip link " + how[s.Rand.IntN(len(how))]}, nil
}

// sysctl flips a setting.
func (s *Saboteur) sysctl() (Strike, error) {
	if len(s.Sysctls) == 0 {
		return Strike{}, errNothing
	}
	name := s.Sysctls[s.Rand.IntN(len(s.Sysctls))]
	out, err := s.Exec("sysctl -n " + name)
	if err != nil {
		return Strike{}, fmt.Errorf("read %s: %w", name, err)
	}
	value := "0"
	if strings.TrimSpace(out) == "0" {
		value = "1"
	}
	return Strike{"sysctl " + name, "sysctl -qw " + name + "=" + value}, nil
}

// offload switches an offload, for which there need be no command.
func (s *Saboteur) offload() (Strike, error) {
	if s.Switch == nil {
		return Strike{}, errNothing
	}
	return Strike{Object: s.Offload}, nil
}
