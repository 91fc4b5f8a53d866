package hostlocal

import (
	"errors"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// FuzzStore: a container's addresses are those of the files that name it and no other's,
// whatever stands beside them.
func FuzzStore(f *testing.F) {
	f.Add("10.0.0.5", []byte("c1\r\neth0"))
	f.Add("fd00::5", []byte("\n c1 \n"))
	f.Add("::ffff:10.0.0.5", []byte("c10\neth0"))
	f.Add("last_reserved_ip.0", []byte("c1"))
	f.Add("fe80::1%eth0", []byte("c1"))
	f.Fuzz(func(t *testing.T, name string, content []byte) {
		dir := filepath.Join(t.TempDir(), "net")
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		const other, mine = "10.9.9.9", "10.9.9.8"
		if name == "" || name == "." || name == ".." || name == "lock" || name == other || name == mine || strings.ContainsAny(name, "/\x00") || len(name) > 200 {
			return
		}
		for file, text := range map[string][]byte{name: content, other: []byte("c2\neth0"), mine: []byte("c1\r\neth0")} {
			if err := os.WriteFile(filepath.Join(dir, file), text, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		s := Store(filepath.Dir(dir))
		all, err := s.Addresses()
		if err != nil {
			t.Fatal(err)
		}
		for _, a := range all {
			if !a.IsValid() || a.Zone() != "" || a.Is4In6() {
				t.Errorf("%s is read as address %v", name, a)
			}
		}
		if err := s.Release(t.Context(), "c1"); err != nil {
			t.Fatal(err)
		}
		isThere := func(file string) bool {
			_, err := os.Lstat(filepath.Join(dir, file))
			if err != nil && !errors.Is(err, fs.ErrNotExist) {
				t.Fatal(err)
			}
			return err == nil
		}
		first, _, _ := strings.Cut(strings.TrimSpace(string(content)), "\n")
		a, err := netip.ParseAddr(name)
		freed := err == nil && a.Zone() == "" && strings.TrimSpace(first) == "c1"
		if isThere(mine) || !isThere(other) || isThere(name) == freed {
			t.Errorf("after the release: its own is there: %v, another's: %v, %q with %q: %v", isThere(mine), isThere(other), name, content, isThere(name))
		}
	})
}
