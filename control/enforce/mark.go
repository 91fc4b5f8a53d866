package enforce

import (
	"errors"
	"io/fs"
	"log/slog"
	"os"

	"github.com/routerd/routerd/control/bootid"
)

// Mark is the file that says that what is on disk of the datastore's state is at least as
// new as the rules in the kernel. Like these it does not outlive the boot.
type Mark struct {
	File string
	Log  *slog.Logger
}

// Allows reports whether the rules may follow the state on disk: where the
// kernel has none of ours, as after a boot, or none that are newer. A daemon that
// was killed may have known more than it had written.
//
// inKernel finds them.
func (m Mark) Allows(inKernel func() (found bool, err error)) bool {
	found, err := inKernel()
	if err != nil {
		m.Log.Warn("rules are not computed from the state on disk: the kernel may have newer ones", "error", err)
		return false
	}
	if !found {
		return true
	}
	boot, err := bootid.Read()
	if err != nil {
		m.Log.Warn("rules are not computed from the state on disk", "error", err)
		return false
	}
	mark, err := os.ReadFile(m.File)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		m.Log.Warn("rules are not computed from the state on disk", "error", err)
	}
	return err == nil && string(mark) == boot
}

// Set says that the disk has all that the kernel's rules follow from.
func (m Mark) Set() {
	boot, err := bootid.Read()
	if err == nil {
		err = os.WriteFile(m.File, []byte(boot), 0o600)
	}
	if err != nil {
		m.Log.Warn("a restart while the datastore cannot be reached will attach no workloads until it answers", "error", err)
	}
}

// Clear takes the mark away: the kernel is to have rules that may not be on
// disk yet.
func (m Mark) Clear() {
	if err := os.Remove(m.File); err != nil && !errors.Is(err, fs.ErrNotExist) {
		m.Log.Error("a restart while the datastore cannot be reached may apply an older policy; remove the file", "error", err)
	}
}
