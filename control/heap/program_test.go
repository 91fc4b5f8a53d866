package heap

import (
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestMappings: only what is of the program's file, cannot be written and never was is found.
func TestMappings(t *testing.T) {
	t.Parallel()
	const file = "/opt/my routers/routerd"
	for _, tt := range []struct {
		name, smaps string
		want        []mapping
		fails       bool
	}{
		{name: "a process", smaps: `00400000-01aa2000 r-xp 00000000 fe:00 9994320    /opt/my routers/routerd
Size:              23176 kB
Rss:               16000 kB
Anonymous:             0 kB
VmFlags: rd ex mr mw me sd
01aa2000-033bc000 r--p 016a2000 fe:00 9994320    /opt/my routers/routerd
Anonymous:             0 kB
033bc000-033bd000 r--p 02fbc000 fe:00 9994320    /opt/my routers/routerd
Anonymous:             4 kB
033bd000-0345d000 rw-p 02fbd000 fe:00 9994320    /opt/my routers/routerd
Anonymous:             0 kB
0345d000-054ad000 rw-p 00000000 00:00 0
Anonymous:             0 kB
7f450788e000-7f4507890000 r-xp 00000000 00:00 0  [vdso]
Anonymous:             0 kB
7f4507890000-7f4507891000 r--p 00000000 fe:00 7  /opt/my routers/routerd-cni
Anonymous:             0 kB
`, want: []mapping{{0x400000, 0x1aa2000}, {0x1aa2000, 0x33bc000}}},
		{name: "none"},
		{name: "no range", smaps: "00400000 r-xp 00000000 fe:00 1 /opt/my routers/routerd\n", fails: true},
		{name: "no number", smaps: "0040-xx r-xp 00000000 fe:00 1 /opt/my routers/routerd\n", fails: true},
		{name: "backwards", smaps: "0041-0040 r-xp 00000000 fe:00 1 /opt/my routers/routerd\n", fails: true},
	} {
		got, err := mappings(strings.NewReader(tt.smaps), file)
		if (err != nil) != tt.fails || !cmp.Equal(tt.want, got, cmp.AllowUnexported(mapping{})) {
			t.Errorf("%s: %v, %v, want %v", tt.name, got, err, tt.want)
		}
	}
}

// TestForgetProgram: less of the file is in memory, and the program goes on.
func TestForgetProgram(t *testing.T) {
	before := residentFile(t)
	if err := forgetProgram(); err != nil {
		t.Fatal(err)
	}
	if after := residentFile(t); after >= before {
		t.Errorf("%d kB of files are in memory, before it were %d", after, before)
	}
}

// residentFile is how much of files is in memory, in kB (proc_pid_status(5), RssFile).
func residentFile(t *testing.T) int {
	t.Helper()
	b, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(b), "RssFile:")
	f := strings.Fields(rest)
	if len(f) == 0 {
		t.Fatalf("no RssFile in %s", b)
	}
	n, err := strconv.Atoi(f[0])
	if err != nil {
		t.Fatal(err)
	}
	return n
}
