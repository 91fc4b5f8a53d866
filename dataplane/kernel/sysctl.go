package kernel

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// sysctlRoot is where the kernel's settings are. Those below net are of the
// network namespace of the thread that opens them.
const sysctlRoot = "/proc/sys"

// sysctlLink is the device that a setting belongs to:
// net/<family>/{conf,neigh}/<device>/<setting>. Those of all devices and of
// future ones ("all", "default") belong to none.
func sysctlLink(name string) string {
	p := strings.Split(name, "/")
	if len(p) == 5 && p[0] == "net" && (p[2] == "conf" || p[2] == "neigh") && p[3] != "all" && p[3] != "default" {
		return p[3]
	}
	return ""
}

// readSysctl returns the value in its canonical form; ok is false if there is
// no such setting.
func (k *Kernel) readSysctl(name string) (value string, ok bool, err error) {
	err = k.ns.do(func() error {
		b, err := os.ReadFile(filepath.Join(sysctlRoot, name))
		value = canonicalSysctl(string(b))
		return err
	})
	if errors.Is(err, fs.ErrNotExist) {
		return "", false, nil
	}
	if err != nil {
		return "", false, fmt.Errorf("read sysctl %s: %w", name, err)
	}
	return value, true, nil
}

func (k *Kernel) writeSysctl(name, value string) error {
	return k.ns.do(func() error {
		f, err := os.OpenFile(filepath.Join(sysctlRoot, name), os.O_WRONLY, 0)
		if err != nil {
			return err
		}
		_, err = f.WriteString(value)
		return errors.Join(err, f.Close())
	})
}
