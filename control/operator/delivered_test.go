package operator

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestDeliveredPackets(t *testing.T) {
	t.Parallel()
	const head = `Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo: 9 9 0 0 0 0 0 0 9 9 0 0 0 0 0 0
`
	for _, c := range []struct {
		name, lines string
		want        uint64
		err         string
	}{
		{"none", "", 0, "<nil>"},
		{"two", "cali1:  1 2 0 0 0 0 0 0 3 40 0 0 0 0 0 0\n cali2: 1 2 0 0 0 0 0 0 3 2 0 0 0 0 0 0\n  eth0: 1 2 0 0 0 0 0 0 3 7 0 0 0 0 0 0\n", 42, "<nil>"},
		{"short", "cali1: 1 2\n", 0, `count what workloads were sent: FILE has a line of 2 columns: "cali1: 1 2"`},
	} {
		file := filepath.Join(t.TempDir(), "dev")
		if err := os.WriteFile(file, []byte(head+c.lines), 0o600); err != nil {
			t.Fatal(err)
		}
		got, err := deliveredPackets(file, "cali")
		if want := strings.ReplaceAll(c.err, "FILE", file); got != c.want || fmt.Sprint(err) != want {
			t.Errorf("%s: %d, %v; want %d, %s", c.name, got, err, c.want, want)
		}
	}
	if _, err := deliveredPackets("/proc/net/dev", "cali"); err != nil {
		t.Errorf("this kernel's own file: %v", err)
	}
}
