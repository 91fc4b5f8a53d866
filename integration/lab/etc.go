package lab

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/routerd/routerd/control/atomicfile"
)

// etcNetns holds, by namespace, what "ip netns exec" shows in place of entries
// of /etc (ip-netns(8)).
const etcNetns = "/etc/netns"

// iproute2Dir is where ip(8) keeps the names of routing protocols. Newer
// releases keep their own elsewhere and read this one too.
const iproute2Dir = "/etc/iproute2"

// nameProtocols makes "ip netns exec" know routerd's protocol by its name on
// hosts of the lab, as a machine on which routerd is installed does. The files
// are the lab's; only a link to them lies outside of its directory.
func (l *Lab) nameProtocols() error {
	if _, err := os.Stat(iproute2Dir); errors.Is(err, fs.ErrNotExist) {
		return nil // there is nothing to put it in place of
	}
	names := filepath.Join(dir(l.name), ".iproute2")
	if err := os.CopyFS(names, os.DirFS(iproute2Dir)); err != nil {
		return fmt.Errorf("name routerd's protocol: %w", err)
	}
	protos := filepath.Join(names, "rt_protos.d")
	if err := os.MkdirAll(protos, 0o755); err != nil {
		return fmt.Errorf("name routerd's protocol: %w", err)
	}
	if err := atomicfile.Write(filepath.Join(protos, "routerd.conf"), []byte("77 routerd\n"), 0o644); err != nil {
		return err
	}
	for _, h := range append(l.Hosts(), spineName) {
		etc := filepath.Join(etcNetns, l.Space(h))
		err := os.MkdirAll(etc, 0o755)
		for errors.Is(err, fs.ErrNotExist) {
			// The last host of another lab took the parent with it just now.
			err = os.MkdirAll(etc, 0o755)
		}
		if err != nil {
			return fmt.Errorf("name routerd's protocol: %w", err)
		}
		if err := os.Symlink(names, filepath.Join(etc, "iproute2")); err != nil {
			return fmt.Errorf("name routerd's protocol: %w", err)
		}
	}
	return nil
}

// removeEtc takes away what [Lab.nameProtocols] made for a namespace, and
// nothing that somebody else put there.
func removeEtc(name, space string) error {
	etc := filepath.Join(etcNetns, space)
	link := filepath.Join(etc, "iproute2")
	target, err := os.Readlink(link)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil || !strings.HasPrefix(target, dir(name)+"/") {
		return nil //nolint:nilerr // not a link of ours
	}
	if err := os.Remove(link); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove files: %w", err)
	}
	// Either may hold other things, or be gone with another lab's last host.
	_ = os.Remove(etc)
	_ = os.Remove(etcNetns)
	return nil
}
