package netdev

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const head = `Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
`

func TestParse(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name, lines string
		want        map[string]Counters
		err         string
	}{
		{"none", "", map[string]Counters{}, "<nil>"},
		{
			"two", "cali1:  1 2 3 4 0 0 0 0 5 6 7 8 0 0 0 0\neth0.100: 1 2 0 0 0 0 0 0 3 7 0 0 0 0 0 0\n",
			map[string]Counters{
				"cali1":    {ReceivedBytes: 1, ReceivedPackets: 2, SentBytes: 5, SentPackets: 6, Dropped: 12, Errors: 10},
				"eth0.100": {ReceivedBytes: 1, ReceivedPackets: 2, SentBytes: 3, SentPackets: 7},
			},
			"<nil>",
		},
		{
			"short", "cali1: 1 2\nlo: 1 1 0 0 0 0 0 0 1 1 0 0 0 0 0 0\n",
			map[string]Counters{"lo": {1, 1, 1, 1, 0, 0}},
			`/proc/net/dev: line "cali1: 1 2": 2 columns, want 16`,
		},
		{
			"no number", "lo: x 1 0 0 0 0 0 0 1 1 0 0 0 0 0 0\n",
			map[string]Counters{},
			`/proc/net/dev: line "lo: x 1 0 0 0 0 0 0 1 1 0 0 0 0 0 0": strconv.ParseUint: parsing "x": invalid syntax`,
		},
	} {
		got, err := Parse(head + tt.lines)
		if d := cmp.Diff(tt.want, got); d != "" || fmt.Sprint(err) != tt.err {
			t.Errorf("%s: error %v, want %s; (-want +got)\n%s", tt.name, err, tt.err, d)
		}
	}
}

func TestRead(t *testing.T) {
	t.Parallel()
	got, err := Read()
	if _, ok := got["lo"]; err != nil || !ok {
		t.Errorf("this kernel's own file: %v, error %v", got, err)
	}
}
