package felix

import (
	"bytes"
	"context"
	"fmt"
	"os/exec"
	"regexp"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane/internal/nl"
)

// Remove takes away what was found, with the tools that made it: iptables of
// the same kind, or nft. What others have in the same tables stays, with its
// counters. Who writes to a table of iptables in that moment has to write
// again, as kube-proxy does by itself.
func Remove(ctx context.Context, r Rest) error {
	family := "ip"
	if r.IPv6 {
		family = "ip6"
	}
	switch r.Backend {
	case NFTables:
		_, err := tool(ctx, nil, "nft", "delete", "table", family, r.Table)
		return err
	case IPSet:
		for _, name := range r.Names {
			if err := destroySet(name); err != nil {
				return fmt.Errorf("destroy ipset %s: %w", name, err)
			}
		}
		return nil
	default:
	}
	name := family + "tables-" + string(r.Backend[len("iptables-"):])
	saved, err := tool(ctx, nil, name+"-save", "-c", "-t", r.Table)
	if err != nil {
		return err
	}
	_, err = tool(ctx, without(saved), name+"-restore", "-c", "-w", "-T", r.Table)
	return err
}

// without returns what iptables-save wrote without what is Felix's: its chains,
// what leads to them, and the rules in others' chains that carry its hash.
func without(saved []byte) []byte {
	felix := regexp.MustCompile(`^:cali-|^(\[\d+:\d+\] )?-A cali-|^(\[\d+:\d+\] )?-A .* -[jg] cali-|^(\[\d+:\d+\] )?-A .*--comment "?cali:[A-Za-z0-9_-]{16}(?:[^A-Za-z0-9_-]|$)`)
	var out []byte
	for line := range bytes.Lines(saved) {
		if !felix.Match(line) {
			out = append(out, line...)
		}
	}
	return out
}

func tool(ctx context.Context, input []byte, name string, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Stdin = bytes.NewReader(input)
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("run %s: %w: %s", name, err, bytes.TrimSpace(errOut.Bytes()))
	}
	return out.Bytes(), nil
}

// cmdDestroy is IPSET_CMD_DESTROY.
const cmdDestroy = unix.NFNL_SUBSYS_IPSET<<8 | 3

// destroySet does without ipset(8), which a host without Calico need not have.
func destroySet(name string) error {
	c, err := nl.Dial(unix.NETLINK_NETFILTER, 0, 0)
	if err != nil {
		return err
	}
	defer c.Close()
	var b nl.Batch
	b.Begin(cmdDestroy, 0, unix.AF_INET, unix.NFNETLINK_V0, 0, 0)
	b.Uint8(attrProtocol, protocolVersion)
	b.Text(attrSetName, name)
	return c.Do(&b, nil)
}
