package operator

import (
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/routerd/routerd/control/bgp"
	"github.com/routerd/routerd/control/node"
)

// TestTroubleshootingNamesEveryReason: whatever node status prints has a
// heading for the operator to find.
func TestTroubleshootingNamesEveryReason(t *testing.T) {
	t.Parallel()
	b, err := os.ReadFile("../../docs/operations/troubleshoot.md")
	if err != nil {
		t.Fatal(err)
	}
	var headings []string
	for line := range strings.Lines(string(b)) {
		if h, ok := strings.CutPrefix(line, "#"); ok {
			headings = append(headings, strings.TrimLeft(strings.TrimSpace(h), "# "))
		}
	}
	all := strings.Join(headings, "\n")
	taken := &node.AddressTakenError{Address: netip.MustParseAddr("10.0.0.1"), Node: "…", Other: "…"}
	for _, want := range []string{
		"Live", "Registered", "DataplaneProgrammed", "Policy", "FelixRules", "Datastore", "Certificates", "WorkloadMTU", "Files", "BGP", "BGP peers", "Pool",
		bgp.ErrNotSynced.Error(), bgp.ErrNoNode.Error(), node.ErrNoAddress.Error(), view{}.registered().Error(),
		view{node: node.Status{Registered: true}}.registered().Error(),
		strings.Split(bgp.ErrNoAddress.Error(), ":")[0],
		strings.Split(strings.ReplaceAll(taken.Error(), "10.0.0.1", "…"), " with it;")[0],
		view{waiting: "the datastore's first complete answer"}.programmed(func() (bool, string) { return true, "" }).Error(),
		view{}.programmed(func() (bool, string) { return false, "the first pass is not done yet" }).Error(),
	} {
		if !strings.Contains(all, want) {
			t.Errorf("no heading for %q", want)
		}
	}
	// Reasons against a candidate are in the list below "Packets do not arrive".
	for _, want := range []string{"no pool contains it", "itself lies in it", "the underlay has no route to the next hop"} {
		if !strings.Contains(string(b), want) {
			t.Errorf("nothing about %q", want)
		}
	}
}
