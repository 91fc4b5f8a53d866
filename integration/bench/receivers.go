package bench

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// startRouterd runs the daemon with its own datastore and makes both ToRs its
// peers. They may announce everything: none of it is inside its pool.
func startRouterd(ctx context.Context, s *convergenceSpace, programs Programs) ([]*os.Process, error) {
	p, err := s.startDaemon(programs, "nodeName: bench\n")
	if err != nil {
		return nil, err
	}
	var peers bytes.Buffer
	for i := range s.tors {
		fmt.Fprintf(&peers, "apiVersion: projectcalico.org/v3\nkind: BGPPeer\nmetadata: {name: tor%d}\nspec: {peerIP: %s, asNumber: %d, sourceAddress: None}\n---\n", i+1, torAddr(i), torASN)
	}
	return []*os.Process{p}, s.applyUntilTaken(ctx, programs.Dir, peers.String())
}

// startDaemon runs the daemon as a host runs it, with these settings beside
// those of the space.
func (s *convergenceSpace) startDaemon(p Programs, settings string) (*os.Process, error) {
	health := "{}"
	if s.profiles = p.Profiles; s.profiles != "" {
		health = fmt.Sprintf("{listen: %q, profiles: true}", profileAddr)
	}
	conf, err := s.file("routerd.yaml", fmt.Sprintf(`stateDir: %[1]s/state
runDir: %[1]s/run
logLevel: warn
address: {ipv4: "interface=tor1", ipv6: none}
cni: {binDir: %[1]s/cni, confDir: %[1]s/cni}
health: %[2]s
%[3]s`, s.dir, health, settings))
	if err != nil {
		return nil, err
	}
	for _, sub := range []string{"state", "run", "cni"} {
		if err := os.Mkdir(filepath.Join(s.dir, sub), 0o700); err != nil {
			return nil, err
		}
	}
	return s.run(s.rx, filepath.Join(p.Dir, "routerd"), "run", "--config", conf)
}

func (s *convergenceSpace) socket() string { return filepath.Join(s.dir, "run", "routerd.sock") }

// applyUntilTaken applies a manifest as soon as the daemon takes it.
func (s *convergenceSpace) applyUntilTaken(ctx context.Context, binDir, text string) error {
	manifest, err := s.file("manifest.yaml", text)
	if err != nil {
		return err
	}
	var last error
	err = until(ctx, "routerd takes the manifest", func() (bool, error) {
		out, err := exec.CommandContext(ctx, filepath.Join(binDir, "routerctl"), "apply", "-f", manifest, "--socket", s.socket()).CombinedOutput()
		if last = err; err != nil {
			last = fmt.Errorf("routerctl apply: %w: %s", err, out)
		}
		return err == nil, ctx.Err()
	})
	if err != nil {
		return fmt.Errorf("%w: %w", err, last)
	}
	return nil
}

// startBIRDReceiver runs BIRD with equal paths merged, as a host's would be.
func startBIRDReceiver(ctx context.Context, s *convergenceSpace) ([]*os.Process, error) {
	var b bytes.Buffer
	fmt.Fprintf(&b, "router id %s;\nprotocol device {}\nprotocol kernel { merge paths on; ipv4 { import none; export all; }; }\n", rxAddr(0))
	for i := range s.tors {
		fmt.Fprintf(&b, "protocol bgp tor%d { local %s as %d; neighbor %s as %d; connect retry time 1; ipv4 { import all; export none; }; }\n",
			i+1, rxAddr(i), rxASN, torAddr(i), torASN)
	}
	conf, err := s.file("rx.conf", b.String())
	if err != nil {
		return nil, err
	}
	control := filepath.Join(s.dir, "rx.ctl")
	p, err := s.run(s.rx, "bird", "-f", "-c", conf, "-s", control, "-P", filepath.Join(s.dir, "rx.pid"))
	if err != nil {
		return nil, err
	}
	return []*os.Process{p}, until(ctx, "BIRD answers", func() (bool, error) {
		return exec.CommandContext(ctx, "birdc", "-s", control, "show", "status").Run() == nil, ctx.Err()
	})
}

// startFRRReceiver runs FRR with both ToRs as peers.
func startFRRReceiver(ctx context.Context, s *convergenceSpace) ([]*os.Process, error) {
	var b bytes.Buffer
	fmt.Fprintf(&b, "frr defaults datacenter\nrouter bgp %d\n bgp router-id %s\n no bgp ebgp-requires-policy\n", rxASN, rxAddr(0))
	for i := range s.tors {
		fmt.Fprintf(&b, " neighbor %s remote-as %d\n neighbor %s timers connect 1\n", torAddr(i), torASN, torAddr(i))
	}
	return startFRR(ctx, s, b.String())
}

// startFRR runs zebra, which insists on FRR's own user, and bgpd by its configuration.
func startFRR(ctx context.Context, s *convergenceSpace, config string) ([]*os.Process, error) {
	conf, err := s.file("bgpd.conf", config)
	if err != nil {
		return nil, err
	}
	empty, err := s.file("zebra.conf", "")
	if err != nil {
		return nil, err
	}
	for _, path := range []string{s.dir, conf, empty} {
		if err := os.Chmod(path, 0o777); err != nil {
			return nil, err
		}
	}
	api := filepath.Join(s.dir, "zserv.api")
	args := func(name, file string) []string {
		return []string{"-f", file, "-i", filepath.Join(s.dir, name+".pid"), "--vty_socket", s.dir, "-z", api, "-P", "0", "--log", "stdout"}
	}
	zebra, err := s.run(s.rx, "/usr/lib/frr/zebra", append(args("zebra", empty), "-s", "90000000", "-u", "frr", "-g", "frr")...)
	if err != nil {
		return nil, err
	}
	if err := until(ctx, "zebra answers", func() (bool, error) { _, err := os.Stat(api); return err == nil, ctx.Err() }); err != nil {
		return nil, err
	}
	bgpd, err := s.run(s.rx, "/usr/lib/frr/bgpd", append(args("bgpd", conf), "-S")...)
	if err != nil {
		return nil, err
	}
	return []*os.Process{zebra, bgpd}, until(ctx, "bgpd answers", func() (bool, error) {
		return exec.CommandContext(ctx, "vtysh", "--vty_socket", s.dir, "-d", "bgpd", "-c", "show version").Run() == nil, ctx.Err()
	})
}
