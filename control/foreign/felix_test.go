package foreign

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/routerd/routerd/dataplane/felix"
)

// What Felix left is looked for at the start, and again while there is
// something or it cannot be seen; a look that fails forgets nothing.
func TestFelix(t *testing.T) {
	t.Parallel()
	chains := []felix.Rest{{Backend: felix.Legacy, Table: "filter", Names: []string{"cali-FORWARD"}}}
	sets := []felix.Rest{{Backend: felix.IPSet, Names: []string{"cali40all"}}}
	failed := errors.New("no")
	type step struct {
		after time.Duration
		list  []felix.Rest
		err   error
		looks int
		told  string
	}
	for name, steps := range map[string][]step{
		"left, and removed": {
			{0, chains, nil, 1, "iptables-legacy table filter of IPv4 (1 chain); "},
			{lookAgain / 2, nil, nil, 1, "iptables-legacy"},
			{lookAgain, nil, failed, 2, "iptables-legacy"},
			{lookAgain, append(chains, sets...), nil, 3, "1 ipsets; if it does not run"},
			{lookAgain, sets, nil, 4, ""},
			{lookAgain, nil, nil, 5, ""},
			{lookAgain, chains, nil, 5, ""},
		},
		"not seen at first": {
			{0, nil, failed, 1, ""},
			{lookAgain / 2, chains, nil, 1, ""},
			{lookAgain, nil, failed, 2, ""},
			{lookAgain, chains, nil, 3, "iptables-legacy"},
		},
		"not seen at first, and nothing there": {
			{0, nil, failed, 1, ""},
			{lookAgain, nil, nil, 2, ""},
			{lookAgain, chains, nil, 2, ""},
		},
		"half of it seen": {
			{0, chains, failed, 1, "iptables-legacy"},
			{lookAgain, nil, failed, 2, "iptables-legacy"},
			{lookAgain, nil, nil, 3, ""},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var f Felix
			now, looks := time.Unix(1000, 0), 0
			for i, step := range steps {
				now = now.Add(step.after)
				list := f.Look(now, func() ([]felix.Rest, error) { looks++; return step.list, step.err }, slog.New(slog.DiscardHandler))
				told := ""
				if err := FelixError(list); err != nil {
					told = err.Error()
				}
				if looks != step.looks || (told == "") != (step.told == "") || !strings.Contains(told, step.told) {
					t.Errorf("step %d: %d looks, want %d; told %q, want %q", i, looks, step.looks, told, step.told)
				}
			}
		})
	}
}

func TestWarnOfCalico(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		programs []string
		err      error
		want     []string // none: nothing is logged
	}{
		"none":     {},
		"runs":     {[]string{"calico-node -felix (process 7)", "BIRD at /var/run/calico/bird.ctl"}, nil, []string{"calico-node -felix (process 7), BIRD at", "from-calico.md"}},
		"not seen": {nil, errors.New("no right"), []string{"it cannot be seen", "no right"}},
		"in part":  {[]string{"calico-felix (process 7)"}, errors.New("no right"), []string{"calico-felix", "no right"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var log bytes.Buffer
			WarnOfCalico(func() ([]string, error) { return tt.programs, tt.err }, slog.New(slog.NewTextHandler(&log, nil)))
			if (log.Len() == 0) != (tt.want == nil) {
				t.Errorf("logged %q", log.String())
			}
			for _, w := range tt.want {
				if !strings.Contains(log.String(), w) {
					t.Errorf("no %q in %q", w, log.String())
				}
			}
		})
	}
}
