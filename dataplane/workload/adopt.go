package workload

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
)

// Found is a wire that is there without a record of it. It says nothing of whose it is where another
// program made it, as Calico's CNI plugin does, or where it was never finished; else routerd made it.
type Found struct {
	Device string // host end
	MTU    int    // of the host end, in bytes
	Netns  string // a path of the workload's network namespace; empty: it is mounted nowhere
}

// Inspect returns what there is of a wire that is unmarked, or owner's, and whose end inside has the name
// that owner says. The error matches [ErrDiffers] where it is none.
func (w *Wire) Inspect(_ context.Context, device string, owner Owner) (Found, error) {
	host, err := w.markable(device, owner)
	if err != nil {
		return Found{}, err
	}
	out := Found{Device: device, MTU: host.Attrs().MTU}
	paths, err := mountedNamespaces()
	if err != nil {
		return out, err
	}
	i := slices.IndexFunc(paths, func(path string) bool { return w.leadsTo(host, path, owner.Interface) })
	if i >= 0 {
		out.Netns = paths[i]
	}
	return out, nil
}

// leadsTo reports whether the other end of a wire is in the namespace at a path. It is
// not in one that is not there any more.
func (w *Wire) leadsTo(host netlink.Link, path, inside string) bool {
	ns, err := openNamespace(path)
	if err != nil {
		return false
	}
	id, err := w.netlink.GetNetNsIdByFd(ns.fd)
	ns.close()
	if err != nil || id != host.Attrs().NetNsID {
		return false
	}
	in, err := w.enter(path)
	if err != nil {
		return false
	}
	defer in.close()
	ok, err := w.paired(host, inside, in)
	return ok && err == nil
}

// Mark makes an unmarked wire one of routerd's: from here on it is owner's. Nothing else
// of it changes. One that is owner's already is success.
func (w *Wire) Mark(_ context.Context, device string, owner Owner) error {
	host, err := w.markable(device, owner)
	if err != nil || host.Attrs().Alias != "" {
		return err
	}
	if err := w.netlink.LinkSetAlias(host, owner.Alias()); err != nil {
		return fmt.Errorf("set alias of %s: %w", device, err)
	}
	return nil
}

// markable finds the host end of a wire that has no alias, or owner's.
func (w *Wire) markable(device string, owner Owner) (netlink.Link, error) {
	host, err := w.lookup(device)
	switch {
	case err != nil:
		return nil, err
	case host == nil:
		return nil, fmt.Errorf("device %s is missing: %w", device, ErrDiffers)
	case host.Type() != "veth" || host.Attrs().Alias != "" && host.Attrs().Alias != owner.Alias():
		return nil, fmt.Errorf("device %s (%s) has the alias %q: %w", device, host.Type(), host.Attrs().Alias, ErrDiffers)
	}
	return host, nil
}

// mountedNamespaces returns the paths where namespaces are mounted, as container
// runtimes mount those of their containers.
func mountedNamespaces() ([]string, error) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("look for the workload's network namespace: %w", err)
	}
	defer f.Close()
	return namespacesIn(f)
}

// namespacesIn reads proc_pid_mountinfo(5): the network namespaces that are mounted, each
// by its last path.
func namespacesIn(r io.Reader) ([]string, error) {
	var order []string
	at := make(map[string]string)
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		fields := strings.Fields(lines.Text())
		if len(fields) < 5 || !strings.HasPrefix(fields[3], "net:[") {
			continue
		}
		if at[fields[3]] == "" {
			order = append(order, fields[3])
		}
		at[fields[3]] = unescape(fields[4])
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("look for the workload's network namespace: %w", err)
	}
	paths := make([]string, len(order))
	for i, ns := range order {
		paths[i] = at[ns]
	}
	return paths, nil
}

// unescape undoes the kernel's mangling of a path (mangle in fs/seq_file.c).
func unescape(path string) string {
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(path)
}
