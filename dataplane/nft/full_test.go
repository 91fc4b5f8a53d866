package nft

import (
	"bufio"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/routerd/routerd/dataplane/filter"
)

const connectionLimit = "/proc/sys/net/netfilter/nf_conntrack_max"

// overflows counts the connections that the host's table had no room for: new
// ones that were dropped and old ones that had to go.
func (l *lab) overflows(t *testing.T) (n uint64) {
	t.Helper()
	err := l.host.Do(func() error {
		f, err := os.Open("/proc/thread-self/net/stat/nf_conntrack")
		if err != nil {
			return err
		}
		defer f.Close()
		lines := bufio.NewScanner(f)
		lines.Scan()
		columns := strings.Fields(lines.Text())
		for lines.Scan() { // one line for each processor
			for i, text := range strings.Fields(lines.Text()) {
				if columns[i] == "drop" || columns[i] == "early_drop" {
					v, err := strconv.ParseUint(text, 16, 64)
					if err != nil {
						return err
					}
					n += v
				}
			}
		}
		return lines.Err()
	})
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// TestFullConnectionTable: a table of connections without room lets nothing
// through that rules deny, and what they allow passes again when there is room.
// The limit is one for the whole kernel, so this is for a machine of its own,
// and not beside other tests.
func TestFullConnectionTable(t *testing.T) {
	if os.Getenv("ROUTERD_STAGE") != "vm" {
		t.Skip("the limit of tracked connections is the whole machine's: the virtual machine's stage runs this")
	}
	l := newLab(t)
	table := openTable(t, l.host, Config{Shared: true})
	t.Cleanup(func() { table.Close() })
	if err := table.Apply(small()); err != nil {
		t.Fatal(err)
	}
	was, err := os.ReadFile(connectionLimit)
	if err != nil {
		t.Fatal(err)
	}
	limit := func(text string) {
		if err := os.WriteFile(connectionLimit, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	flow := func(from, to uint16) filter.Flow {
		return filter.Flow{In: "cali2", Out: "cali1", Packet: filter.Packet{Src: addr("10.1.0.2"), Dst: addr("10.1.0.1"), Protocol: 6, SrcPort: from, DstPort: to}}
	}
	allowed := func(f filter.Flow) bool { return f.Packet.DstPort == 80 }
	before := []filter.Flow{flow(1000, 80), flow(1000, 81)}
	if got := l.try(t, before, allowed); !got[0] || got[1] {
		t.Fatalf("with room: allowed %t, denied %t", got[0], got[1])
	}
	full := l.overflows(t)
	limit("8")
	t.Cleanup(func() { limit(strings.TrimSpace(string(was))) })
	var flows []filter.Flow
	for i := range uint16(200) {
		flows = append(flows, flow(2000+i, 80), flow(2000+i, 81))
	}
	got := l.try(t, flows, func(filter.Flow) bool { return false })
	passed := map[uint16]int{}
	for i, f := range flows {
		if got[i] {
			passed[f.Packet.DstPort]++
		}
	}
	overflows := l.overflows(t) - full
	t.Logf("without room %d of 200 allowed connections passed and %d of 200 denied ones; %d did not find room or made it", passed[80], passed[81], overflows)
	if passed[81] > 0 || overflows == 0 {
		t.Errorf("%d denied connections passed; %d did not find room or made it", passed[81], overflows)
	}
	limit(strings.TrimSpace(string(was)))
	after := []filter.Flow{flow(5000, 80), flow(5000, 81)}
	if got := l.try(t, after, allowed); !got[0] || got[1] {
		t.Errorf("with room again: allowed %t, denied %t", got[0], got[1])
	}
}
