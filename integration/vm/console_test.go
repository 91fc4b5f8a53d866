package vm

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestConsoleTail: of a machine whose kernel panicked the error shows why, which stands before the panic if it
// follows from a fault of the kernel.
func TestConsoleTail(t *testing.T) {
	t.Parallel()
	var boot, trace []string
	for i := range 100 {
		boot = append(boot, fmt.Sprintf("[    1.%06d] boot %d", i, i))
		trace = append(trace, fmt.Sprintf("[    4.%06d]  function+0x%x/0x100", i, i))
	}
	const (
		fault = "[    4.000000] BUG: kernel NULL pointer dereference, address: 0000000000000008"
		dead  = "[    4.200000] Kernel panic - not syncing: Fatal exception in interrupt"
	)
	text := func(lines ...[]string) string {
		var all []string
		for _, l := range lines {
			all = append(all, l...)
		}
		return strings.Join(all, "\r\n")
	}
	for _, tt := range []struct{ name, console, first, last string }{
		{"no panic", text(boot), boot[60], boot[99]},
		{"panic", text(boot, []string{dead}, trace), dead, trace[38]},
		{"fault", text(boot, []string{fault}, trace[:20], []string{dead}), fault, dead},
		{"fault with a long trace", text(boot, []string{fault}, trace, []string{dead}), fault, trace[38]},
	} {
		m := &machine{console: filepath.Join(t.TempDir(), "console")}
		if err := os.WriteFile(m.console, []byte(tt.console), 0o600); err != nil {
			t.Fatal(err)
		}
		lines := strings.Split(m.consoleTail(), "\n  ")[1:]
		if lines[0] != tt.first || lines[len(lines)-1] != tt.last {
			t.Errorf("%s: from %q to %q, want %q to %q", tt.name, lines[0], lines[len(lines)-1], tt.first, tt.last)
		}
	}
}
