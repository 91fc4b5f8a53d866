package soak

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/integration/clock"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/store"
)

// brokenError is a promise that was broken, which no fault excuses.
type brokenError struct{ what string }

func (e *brokenError) Error() string { return e.what }

// cniTime is how long a container runtime would wait for the plugin.
const cniTime = 60 * time.Second

// attach makes a pod.
func (r *run) attach(ctx context.Context, where string) error {
	ctx, cancel := context.WithTimeout(ctx, cniTime)
	defer cancel()
	p, err := r.l.AttachPod(ctx, where)
	if err != nil {
		return err
	}
	for other, addrs := range r.world.pods {
		for _, a := range p.Addrs {
			if slices.Contains(addrs, a) {
				return &brokenError{fmt.Sprintf("%s was given to %s while %s has it", a, where, other)}
			}
		}
	}
	r.world.pods[where] = p.Addrs
	return nil
}

// detach takes a pod away. One whose DEL is refused stays on its way out: a runtime
// asks again.
func (r *run) detach(ctx context.Context, where string) error {
	ctx, cancel := context.WithTimeout(ctx, cniTime)
	defer cancel()
	if err := r.l.DetachPod(ctx, where); err != nil {
		r.world.leaving[where] = true
		return err
	}
	delete(r.world.pods, where)
	delete(r.world.leaving, where)
	return nil
}

// catchUp asks once more for the DELs that were refused.
func (r *run) catchUp(ctx context.Context) error {
	for where := range r.world.leaving {
		if err := r.detach(ctx, where); err != nil {
			return err
		}
	}
	return nil
}

// routerctl runs a command on a host at which the datastore can be written.
func (r *run) routerctl(ctx context.Context, stdin string, args ...string) error {
	host := cmp.Or(r.world.speaker(), r.world.hosts[0])
	dir, err := filepath.Abs(r.o.BinDir)
	if err != nil {
		return err
	}
	var out strings.Builder
	code, err := r.l.Run(ctx, host, lab.Streams{In: strings.NewReader(stdin), Out: &out, Err: &out},
		append([]string{filepath.Join(dir, "routerctl"), "--socket", lab.Socket(r.l.Name(), host)}, args...)...)
	if err == nil && code != 0 {
		err = fmt.Errorf("routerctl %s: exit code %d: %s", strings.Join(args, " "), code, out.String())
	}
	return err
}

func (r *run) setMode(ctx context.Context, mode store.Encapsulation) error {
	err := r.applyPool(ctx, "default-ipv4-ippool", r.l.Topology().Pool.CIDR, mode, false)
	if err == nil {
		r.world.mode = mode
	}
	return err
}

func (r *run) applyPool(ctx context.Context, name string, cidr netip.Prefix, mode store.Encapsulation, disabled bool) error {
	vxlan := map[store.Encapsulation]string{store.VXLAN: "Always", store.VXLANCrossSubnet: "CrossSubnet", store.Direct: "Never"}[mode]
	return r.routerctl(ctx, fmt.Sprintf("apiVersion: projectcalico.org/v3\nkind: IPPool\nmetadata: {name: %s}\nspec: {cidr: %s, blockSize: %d, ipipMode: Never, vxlanMode: %s, natOutgoing: true, disabled: %t}\n",
		name, cidr, r.l.Topology().Pool.BlockSize, vxlan, disabled), "apply", "-f", "-")
}

// secondName is the name of the pool that comes and goes.
const secondName = "soak-second"

// setSecond brings the pool that comes and goes to a state. It keeps the first of the modes.
func (r *run) setSecond(ctx context.Context, to poolState) error {
	var err error
	if to == poolAbsent {
		err = r.routerctl(ctx, "", "delete", "ippool", secondName)
	} else {
		err = r.applyPool(ctx, secondName, secondPool(), r.world.modes[0], to == poolDisabled)
	}
	if err == nil {
		r.world.second = to
	}
	return err
}

const policyName = "soak-deny"

// deny keeps a pod from all others, and waits until it is kept.
func (r *run) deny(ctx context.Context, where string) error {
	var rules strings.Builder // a rule is of one family
	for _, a := range r.world.pods[where] {
		fmt.Fprintf(&rules, "  - {action: Deny, source: {nets: [%s]}}\n", netip.PrefixFrom(a, a.BitLen()))
	}
	err := r.routerctl(ctx, fmt.Sprintf(`apiVersion: projectcalico.org/v3
kind: GlobalNetworkPolicy
metadata: {name: %s}
spec:
  order: 1
  types: [Ingress]
  ingress:
%s  - {action: Allow}
`, policyName, rules.String()), "apply", "-f", "-")
	if err != nil {
		return err
	}
	r.world.denied = where
	return nil
}

func (r *run) allow(ctx context.Context) error {
	if err := r.routerctl(ctx, "", "delete", "globalnetworkpolicy", policyName); err != nil {
		return err
	}
	r.world.denied, r.isKept = "", false
	return nil
}

func (r *run) strangePeer(ctx context.Context) error {
	err := r.routerctl(ctx, "apiVersion: projectcalico.org/v3\nkind: BGPPeer\nmetadata: {name: soak}\nspec: {peerIP: 192.0.2.1, asNumber: 64999}\n", "apply", "-f", "-")
	if err != nil {
		return err
	}
	return r.routerctl(ctx, "", "delete", "bgppeer", "soak")
}

// flap ends the connections of BGP between a host and the router between the racks, by
// a reset as from a middlebox that has forgotten them.
func (r *run) flap(ctx context.Context, h string) error {
	gateways, err := r.gateways(ctx, h)
	if err != nil {
		return err
	}
	for _, gw := range gateways {
		if _, err := r.l.Output(ctx, h, append([]string{"ss", "-K"}, sessionWith(gw)...)...); err != nil {
			return err
		}
	}
	return nil
}

// sessionWith are the arguments by which ss(8) finds the connection of BGP with a peer.
func sessionWith(peer netip.Addr) []string {
	dst := peer.String()
	if peer.Is6() {
		dst = "[" + dst + "]"
	}
	return []string{"-Htn", "state", "established", "dst", dst, "and", "(", "sport", "=", ":179", "or", "dport", "=", ":179", ")"}
}

// gateways are the addresses of the router between the racks that a host peers with, one
// of each family.
func (r *run) gateways(ctx context.Context, h string) ([]netip.Addr, error) {
	var out []netip.Addr
	for i := range r.families() {
		routes, err := r.l.Output(ctx, h, "ip", []string{"-4", "-6"}[i], "-o", "route", "show", "default")
		if err != nil {
			return nil, err
		}
		fields := strings.Fields(routes)
		if len(fields) < 3 || fields[1] != "via" {
			return nil, fmt.Errorf("%s has no default route: %q", h, routes)
		}
		gw, err := netip.ParseAddr(fields[2])
		if err != nil {
			return nil, err
		}
		out = append(out, gw)
	}
	return out, nil
}

// checkSessions looks whether each host has its sessions with the router between the racks.
func (r *run) checkSessions(ctx context.Context) error {
	for _, h := range r.l.Hosts() {
		gateways, err := r.gateways(ctx, h)
		if err != nil {
			return err
		}
		for _, gw := range gateways {
			out, err := r.l.Output(ctx, h, append([]string{"ss"}, sessionWith(gw)...)...)
			if err != nil {
				return err
			}
			if out == "" {
				return fmt.Errorf("%s has no BGP session with %s", h, gw)
			}
		}
	}
	return nil
}

func (r *run) kill(ctx context.Context, h string) error {
	err := r.l.Kill(ctx, h, unix.SIGKILL)
	if err == nil {
		r.world.down[h] = true
	}
	return err
}

// restart starts a daemon, also one that was killed. One whose datastore is away is
// ready all the same.
func (r *run) restart(ctx context.Context, h string) error {
	err := r.l.Restart(ctx, h)
	if err == nil {
		delete(r.world.down, h)
	} else {
		r.world.down[h] = true
	}
	return err
}

// start is restart that does not wait until the daemon is ready: of members of the
// datastore none may be, until enough of them are there.
func (r *run) start(ctx context.Context, h string) error {
	err := r.l.Start(ctx, h)
	if err == nil {
		delete(r.world.down, h)
	}
	return err
}

func (r *run) stop(ctx context.Context, h string) error {
	err := r.l.Kill(ctx, h, unix.SIGSTOP)
	if err == nil {
		r.world.stopped[h] = true
	}
	return err
}

func (r *run) cont(ctx context.Context, h string) error {
	err := r.l.Kill(ctx, h, unix.SIGCONT)
	if err == nil {
		delete(r.world.stopped, h)
	}
	return err
}

// jump lets the wall clock of a daemon be so much off, until it is started anew.
func (r *run) jump(ctx context.Context, h string, by time.Duration) error {
	p, err := r.l.Daemon(h)
	if err != nil {
		return err
	}
	return clock.Set(ctx, p.PID, by)
}

// The table by which a link is cut, apart from routerd's.
const cutTable = "soak_cut"

// cutLink drops all that a host sends and receives on its uplink.
func (r *run) cutLink(ctx context.Context, h string) error {
	for _, c := range []string{
		"add table inet " + cutTable,
		"add chain inet " + cutTable + " in { type filter hook prerouting priority -500; }",
		"add chain inet " + cutTable + " out { type filter hook postrouting priority 500; }",
		"add rule inet " + cutTable + " in iifname eth0 drop",
		"add rule inet " + cutTable + " out oifname eth0 drop",
	} {
		if _, err := r.l.Output(ctx, h, "nft", c); err != nil {
			return err
		}
	}
	r.world.isCut[h] = true
	return nil
}

func (r *run) joinLink(ctx context.Context, h string) error {
	_, err := r.l.Output(ctx, h, "nft", "delete table inet "+cutTable)
	if err == nil {
		delete(r.world.isCut, h)
	}
	return err
}

// stateDir is where a host's daemon keeps its files.
func (r *run) stateDir(h string) string { return filepath.Join(lab.Root, r.l.Name(), h, "state") }

// fillName is the file that fills a disk.
const fillName = "full"

// fill fills the disk of a host's daemon, if that is one of its own: else it would
// be the machine's.
func (r *run) fill(_ context.Context, h string) error {
	dir := r.stateDir(h)
	var fs unix.Statfs_t
	if err := unix.Statfs(dir, &fs); err != nil {
		return err
	}
	if fs.Type != unix.TMPFS_MAGIC || fs.Blocks*uint64(fs.Bsize) > maxDisk {
		return fmt.Errorf("%s is no small disk of its own", dir)
	}
	f, err := os.Create(filepath.Join(dir, fillName))
	if err != nil {
		return err
	}
	defer f.Close()
	r.world.full[h] = true
	zeros := make([]byte, 64<<10)
	for size := len(zeros); size > 0; {
		if _, err := f.Write(zeros[:size]); err != nil {
			size /= 2
		}
	}
	return nil
}

func (r *run) free(_ context.Context, h string) error {
	err := os.Remove(filepath.Join(r.stateDir(h), fillName))
	if err == nil {
		delete(r.world.full, h)
	}
	return err
}

// maxDisk is the size of a disk that may be filled, in bytes.
const maxDisk = 64 << 20

// SmallDisks is [SmallDisk] for all hosts that are not to be members of the datastore.
func SmallDisks(ctx context.Context, l *lab.Lab, members int) (undo func() error, err error) {
	var undos []func() error
	undo = func() error {
		var errs []error
		for _, u := range undos {
			errs = append(errs, u())
		}
		return errors.Join(errs...)
	}
	for _, h := range l.Hosts()[members:] {
		u, err := SmallDisk(ctx, l, h)
		if u != nil {
			undos = append(undos, u)
		}
		if err != nil {
			return undo, err
		}
	}
	return undo, nil
}

// SmallDisk puts the files of a host's daemon on a small disk of their own, which
// the run then fills now and then. The daemon is started anew. undo takes the disk
// away; it is to be called before the lab goes.
func SmallDisk(ctx context.Context, l *lab.Lab, h string) (undo func() error, err error) {
	if err := l.Kill(ctx, h, unix.SIGTERM); err != nil {
		return nil, err
	}
	dir := filepath.Join(lab.Root, l.Name(), h, "state")
	kept, err := os.MkdirTemp("", "soak")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(kept)
	if err := os.CopyFS(kept, os.DirFS(dir)); err != nil {
		return nil, err
	}
	if err := unix.Mount("soak", dir, "tmpfs", 0, fmt.Sprintf("size=%d,mode=700", maxDisk/4)); err != nil {
		return nil, fmt.Errorf("mount a small disk at %s: %w", dir, err)
	}
	undo = func() error { return unix.Unmount(dir, unix.MNT_DETACH) }
	if err := os.CopyFS(dir, os.DirFS(kept)); err != nil {
		return undo, err
	}
	return undo, l.Restart(ctx, h)
}

// others lists the pods but one, in order.
func (w *world) others(where string) []string {
	var out []string
	for p := range w.pods {
		if p != where && !w.leaving[p] {
			out = append(out, p)
		}
	}
	slices.Sort(out)
	return out
}
