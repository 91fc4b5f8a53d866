package flows

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/dataplane/nflog"
)

func TestParse(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		group  uint16
		prefix string
		want   Verdict
	}{
		{verdictGroup, "A|ingress 3: NetworkPolicy prod/web", Verdict{Action: "Allow", By: "NetworkPolicy prod/web rule 3", Direction: "ingress"}},
		{verdictGroup, "D|egress: no policy allows it", Verdict{Action: "Deny", By: "no policy allows it", Direction: "egress"}},
		{verdictGroup, "D|staged ingress 0: GlobalNetworkPolicy x", Verdict{Action: "Deny", By: "GlobalNetworkPolicy x rule 0", Direction: "ingress", Staged: true}},
		{verdictGroup, "without a mark", Verdict{Action: "Log", By: "without a mark"}},
		{logGroup, "calico-packet|x", Verdict{Action: "Log", By: "calico-packet|x"}},
	} {
		if diff := cmp.Diff(tt.want, parse(nflog.Packet{Group: tt.group, Prefix: tt.prefix})); diff != "" {
			t.Errorf("%q (-want +got):\n%s", tt.prefix, diff)
		}
	}
}

// TestRing: the newest records stay, oldest first.
func TestRing(t *testing.T) {
	t.Parallel()
	var f Log
	for i := range kept + 10 {
		f.add(nflog.Packet{Group: logGroup, Prefix: fmt.Sprint(i)})
	}
	list, err := f.Records()
	if err != nil || len(list) != kept || list[0].By != "10" || list[kept-1].By != fmt.Sprint(kept+9) {
		t.Errorf("%d records from %s to %s, %v", len(list), list[0].By, list[len(list)-1].By, err)
	}
	if verdicts, logged := f.Groups(); verdicts != 0 || logged != 0 || f.Missed() != 0 || f.Close() != nil {
		t.Error("a log that nobody listens for has groups or misses packets")
	}
}
