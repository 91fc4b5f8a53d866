package portholder

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestListeners(t *testing.T) {
	t.Parallel()
	word := func(a ...byte) string { return fmt.Sprintf("%08X", binary.NativeEndian.Uint32(a)) }
	line := func(addr, port, state string, inode int) string {
		return fmt.Sprintf("   0: %s:%s 00000000:0000 %s 00000000:00000000 00:00000000 00000000     0        0 %d 1 0000000000000000 100 0 0 10 0\n", addr, port, state, inode)
	}
	none := word(0, 0, 0, 0)
	table := "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n" +
		line(word(127, 0, 0, 1), "00B3", "0A", 4711) +
		line(word(127, 0, 0, 1), "00B3", "01", 4712) +
		line(word(127, 0, 0, 1), "00B4", "0A", 4713) +
		line(word(10, 1, 0, 11), "00B3", "0A", 4714) +
		line(none, "00B5", "0A", 4715) +
		line(word(0xfd, 0, 0, 1)+none+none+word(0, 0, 0, 2), "00B3", "0A", 4716) +
		line(none+none+none+none, "00B5", "0A", 4717) + "short\n"
	for at, want := range map[string][]string{
		"127.0.0.1:179": {"4711"}, "10.1.0.11:179": {"4714"}, "[fd00:1::2]:179": {"4716"}, "10.1.0.12:179": nil,
		"0.0.0.0:179": {"4711", "4714"}, "[::]:179": {"4716"}, "10.1.0.12:181": {"4715", "4717"},
	} {
		if diff := cmp.Diff(want, listeners(table, true, netip.MustParseAddrPort(at))); diff != "" {
			t.Errorf("%s (-want +got):\n%s", at, diff)
		}
	}
}

// The holder is who listens at the address, not who does on the same port of another, and
// not a process that it has just started.
func TestHolder(t *testing.T) {
	t.Parallel()
	proc, at := t.TempDir(), netip.MustParseAddrPort("127.0.0.1:179")
	if got := Find(proc, TCP, at).Program; got != "" {
		t.Errorf("holder without /proc: %q", got)
	}
	write := func(name, text string) {
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(filepath.Join(proc, name)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(proc, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	run := func(pid, comm, parent, socket string) {
		t.Helper()
		write(pid+"/stat", fmt.Sprintf("%s (%s) S %s 1 1 0", pid, comm, parent))
		if err := os.MkdirAll(filepath.Join(proc, pid, "fd"), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(socket, filepath.Join(proc, pid, "fd", "3")); err != nil {
			t.Fatal(err)
		}
	}
	local, other := fmt.Sprintf("%08X", binary.NativeEndian.Uint32([]byte{127, 0, 0, 1})), fmt.Sprintf("%08X", binary.NativeEndian.Uint32([]byte{127, 0, 0, 2}))
	write("net/tcp", "0: "+other+":00B3 0:0 0A 0:0 0:0 0 0 0 1 1\n1: "+local+":00B3 0:0 0A 0:0 0:0 0 0 0 2 1\n")
	if got := Find(proc, TCP, at).Program; got != "" {
		t.Errorf("holder that is not seen: %q", got)
	}
	if got := Find(proc, UDP, at); got != (Holder{}) {
		t.Errorf("holder of the UDP port: %v", got)
	}
	run("100", "other", "1", "socket:[1]")
	run("200", "child", "300", "socket:[2]")
	run("300", "a (b) c", "1", "socket:[2]")
	if got, want := Find(proc, TCP, at).Program, "a (b) c (pid 300)"; got != want {
		t.Errorf("holder %q, want %q", got, want)
	}
}

// UDP's sockets have no state that counts, and those of tunnels no program.
func TestUDP(t *testing.T) {
	t.Parallel()
	proc, at := t.TempDir(), netip.MustParseAddrPort("0.0.0.0:4789")
	table := UDP.InThread(7)
	if err := os.MkdirAll(filepath.Join(proc, "self/task/7/net"), 0o755); err != nil {
		t.Fatal(err)
	}
	for text, want := range map[string]Holder{
		"0: 00000000:12B5 0:0 07 0:0 0:0 0 0 0 0 2\n": {Kernel: true},
		"0: 00000000:12B6 0:0 07 0:0 0:0 0 0 0 0 2\n": {},
	} {
		if err := os.WriteFile(filepath.Join(proc, string(table)), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		if got := Find(proc, table, at); got != want {
			t.Errorf("%q: %v, want %v", text, got, want)
		}
	}
}
