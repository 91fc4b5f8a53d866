package lab

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/routerd/routerd/integration/lab/ns"
)

// birdConfig renders the spine's configuration for BIRD 2: it peers with every
// node as a top-of-rack switch would, over each family that the underlay has,
// puts the pods' blocks into its kernel and tells every node of them, and so it does
// with prefixes that it drops all packets for. Restarts of a node's daemon are graceful,
// which BIRD supports as a helper by default.
func birdConfig(t Topology, dir string, dropped ...netip.Prefix) string {
	var b strings.Builder
	fmt.Fprintf(&b, "log %q all;\n", filepath.Join(dir, "bird.log"))
	fmt.Fprintf(&b, "router id %s;\n", spineRouterID(t))
	b.WriteString("protocol device { scan time 10; }\n")
	merge, filter := "", "all"
	if t.Spine.ECMP {
		merge, filter = "merge paths on; ", "filter { if (65535, 0) ~ bgp_community then bgp_local_pref = 0; accept; }"
	}
	for _, f := range []string{"ipv4", "ipv6"} {
		fmt.Fprintf(&b, "protocol kernel { %s%s { import none; export where source = RTS_BGP || source = RTS_STATIC; }; }\n", merge, f)
		fmt.Fprintf(&b, "protocol static { %s;\n", f)
		for _, p := range dropped {
			if p.Addr().Is6() == (f == "ipv6") {
				fmt.Fprintf(&b, "\troute %s blackhole;\n", p)
			}
		}
		b.WriteString("}\n")
		fmt.Fprintf(&b, `template bgp node_%s {
	local as %d;
	connect delay time 1;
	connect retry time 2;
	error wait time 1, 4;
	debug { states, events };
	%s { import %s; export all; };
}
`, f, t.Spine.ASNumber, f, filter)
	}
	for _, n := range t.Nodes {
		rack, _ := t.rack(n.Rack)
		_, gateways := n.prefixes(rack)
		for i, a := range n.Addrs() {
			f := "ipv4"
			if a.Is6() {
				f = "ipv6"
			}
			fmt.Fprintf(&b, "protocol bgp to_%s_%s from node_%s { source address %s; neighbor %s as %d; }\n",
				strings.ReplaceAll(n.Name, "-", "_"), f, f, gateways[i], a, nodeASNumber)
		}
	}
	return b.String()
}

// spineRouterID is the spine's address in the first rack. An underlay without
// IPv4 has one of the documentation's (RFC 5737): it is a number, no address.
func spineRouterID(t Topology) netip.Addr {
	if a := t.Racks[0].Gateway(); a.IsValid() {
		return a
	}
	return netip.AddrFrom4([4]byte{192, 0, 2, 1})
}

// findBird returns the path of BIRD 2's daemon.
func findBird() (string, error) {
	for _, p := range []string{"bird", "/usr/sbin/bird", "/usr/local/sbin/bird"} {
		if path, err := exec.LookPath(p); err == nil {
			return path, nil
		}
	}
	return "", errors.New("find bird, which is the spine's BGP speaker: not installed; on Debian: apt-get install bird2")
}

// spineFile is a file of the spine's BGP speaker.
func (l *Lab) spineFile(name string) string { return filepath.Join(dir(l.name), spineName, name) }

// SpineDrops has the spine announce prefixes to every node as a switch that lies would:
// packets for them that come to it are dropped. The next call replaces them.
func (l *Lab) SpineDrops(ctx context.Context, prefixes ...netip.Prefix) error {
	conf := birdConfig(l.topology, filepath.Dir(l.spineFile("bird.conf")), prefixes...)
	if err := os.WriteFile(l.spineFile("bird.conf"), []byte(conf), 0o600); err != nil {
		return fmt.Errorf("have the spine announce %v: %w", prefixes, err)
	}
	out, err := l.Output(ctx, spineName, "birdc", "-s", l.spineFile("bird.ctl"), "configure")
	if err == nil && !strings.Contains(out, "Reconfigur") {
		err = errors.New(out)
	}
	if err != nil {
		return fmt.Errorf("have the spine announce %v: %w", prefixes, err)
	}
	return nil
}

// startBird starts the spine's BGP speaker.
func (l *Lab) startBird() error {
	bird, err := findBird()
	if err != nil {
		return err
	}
	dir := filepath.Dir(l.spineFile("bird.conf"))
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("start bird: %w", err)
	}
	conf := l.spineFile("bird.conf")
	if err := os.WriteFile(conf, []byte(birdConfig(l.topology, dir)), 0o600); err != nil {
		return fmt.Errorf("start bird: %w", err)
	}
	// BIRD parses the file the same way; asked beforehand it says what is wrong.
	if out, err := exec.Command(bird, "-p", "-c", conf).CombinedOutput(); err != nil {
		return fmt.Errorf("start bird: %w: %s", err, out)
	}
	p, err := startDetached(l.Space(spineName), filepath.Join(dir, "bird.out"), bird, "-f",
		"-c", conf, "-s", l.spineFile("bird.ctl"), "-P", filepath.Join(dir, "bird.pid"))
	if err != nil {
		return fmt.Errorf("start bird: %w", err)
	}
	_, err = updateState(l.name, func(s *state) error { s.Spine = p; return nil })
	return err
}

// startDetached starts a program that outlives the caller, in a session of its
// own so that the terminal's signals do not reach it. Its output goes to the
// file.
func startDetached(space, output, path string, args ...string) (ns.Process, error) {
	out, err := os.OpenFile(output, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return ns.Process{}, err
	}
	defer out.Close()
	cmd := exec.Command(path, args...)
	cmd.Stdout, cmd.Stderr = out, out
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := ns.Start(space, cmd); err != nil {
		return ns.Process{}, err
	}
	pid := cmd.Process.Pid
	// Nobody waits for it by this handle: ns.Process reaps it, should it end
	// while we live.
	if err := cmd.Process.Release(); err != nil {
		return ns.Process{}, err
	}
	p, err := ns.Find(pid)
	if err != nil {
		return ns.Process{}, fmt.Errorf("%s ended at once: %w; the last lines of %s:\n%s", filepath.Base(path), err, output, tail(output, 15))
	}
	return p, nil
}

// stopProcess asks a process to end and, if it does not within the time, makes
// it. One that has ended is not an error.
func stopProcess(ctx context.Context, p ns.Process, patience time.Duration) error {
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
		err := p.Signal(sig)
		if errors.Is(err, os.ErrProcessDone) {
			return nil
		}
		if err != nil {
			return err
		}
		wait, cancel := context.WithTimeout(ctx, patience)
		err = p.Wait(wait)
		cancel()
		if err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return err
		}
	}
	return fmt.Errorf("process %d does not end", p.PID)
}
