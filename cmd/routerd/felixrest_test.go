package main

import (
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/routerd/routerd/dataplane/felix"
)

// What Felix left is looked for at the start, and again while there is
// something; a look that fails forgets nothing.
func TestFelixRest(t *testing.T) {
	t.Parallel()
	chains := []felix.Rest{{Backend: felix.Legacy, Table: "filter", Names: []string{"cali-FORWARD"}}}
	sets := []felix.Rest{{Backend: felix.IPSet, Names: []string{"cali40all"}}}
	var f felixRest
	now, looks := time.Unix(1000, 0), 0
	for i, step := range []struct {
		after time.Duration
		list  []felix.Rest
		err   error
		looks int
		told  string
	}{
		{0, chains, nil, 1, "iptables-legacy table filter of IPv4 (1 chain); "},
		{lookAgain / 2, nil, nil, 1, "iptables-legacy"},
		{lookAgain, nil, errors.New("no"), 2, "iptables-legacy"},
		{lookAgain, append(chains, sets...), nil, 3, "1 ipsets; if it does not run"},
		{lookAgain, sets, nil, 4, ""},
		{lookAgain, nil, nil, 5, ""},
		{lookAgain, chains, nil, 5, ""},
	} {
		now = now.Add(step.after)
		list := f.look(now, func() ([]felix.Rest, error) { looks++; return step.list, step.err }, slog.New(slog.DiscardHandler))
		told := ""
		if err := felixError(list); err != nil {
			told = err.Error()
		}
		if looks != step.looks || (told == "") != (step.told == "") || !strings.Contains(told, step.told) {
			t.Errorf("step %d: %d looks, want %d; told %q, want %q", i, looks, step.looks, told, step.told)
		}
	}
}
