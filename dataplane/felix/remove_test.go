package felix

import (
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/dataplane/workload/netnstest"
)

// All that is Felix's goes and all else stays as it was, in every backend.
func TestRemove(t *testing.T) {
	t.Parallel()
	ns := netnstest.New(t)
	for _, name := range []string{"iptables-legacy", "ip6tables-legacy", "iptables-nft", "ip6tables-nft"} {
		run(t, ns, filterTable+natTable, name+"-restore")
	}
	run(t, ns, "table ip calico {\n chain filter-cali-FORWARD {\n }\n}\ntable inet calico {\n chain x {\n }\n}\n", "nft", "-f", "-")
	for _, name := range []string{"cali40all", "KUBE-CLUSTER-IP"} {
		if err := ns.Do(func() error { return createSet(name) }); err != nil {
			t.Fatal(err)
		}
	}
	rules := func() string {
		var b strings.Builder
		for _, name := range []string{"iptables-legacy", "ip6tables-legacy", "iptables-nft", "ip6tables-nft"} {
			err := ns.Do(func() error {
				out, err := exec.Command(name + "-save").Output()
				b.Write(regexp.MustCompile(`(?m)^#.*\n`).ReplaceAll(out, nil))
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
		}
		return b.String()
	}
	want := ""
	for line := range strings.Lines(rules()) {
		if !strings.Contains(line, "cali-") && !strings.Contains(line, `"cali:`) {
			want += line
		}
	}
	found := find(t, ns)
	if len(found) != 10 {
		t.Errorf("found %v, want two tables of each iptables, one of nftables, and the ipsets", found)
	}
	for _, r := range found {
		if err := ns.Do(func() error { return Remove(t.Context(), r) }); err != nil {
			t.Errorf("remove %s: %v", r, err)
		}
	}
	if left := find(t, ns); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	if diff := cmp.Diff(want, rules()); diff != "" {
		t.Errorf("others' rules (-want +got):\n%s", diff)
	}
	run(t, ns, "", "nft", "list", "table", "inet", "calico")
}

func TestWithout(t *testing.T) {
	t.Parallel()
	kept := `*filter
:FORWARD DROP [5:300]
[1:2] -A FORWARD -m comment --comment "california/web:cali-port" -j ACCEPT
-A FORWARD -m comment --comment "cali:web" -j KUBE-FORWARD
-A FORWARD -m comment --comment "cali:S93hcgKJrXEqnTfs-" -j KUBE-FORWARD
-A FORWARD -o cali0 -j ACCEPT
COMMIT
`
	gone := `:cali-FORWARD - [0:0]
[1:60] -A FORWARD -m comment --comment "cali:S93hcgKJrXEqnTfs" -m comment --comment "Policy explicitly accepted packet." -m mark --mark 0x10000/0x10000 -j ACCEPT
[1:60] -A FORWARD -m comment --comment "cali:S93hcgKJrXEqnTf-" -m mark --mark 0x10000/0x10000 -j ACCEPT
-A FORWARD -m mark --mark 0x10000/0x10000 -j ACCEPT -m comment --comment cali:S93hcgKJrXEqnT--
[0:0] -A cali-FORWARD -j MARK --set-xmark 0x0/0xe0000
-A INPUT -j cali-INPUT
-A FORWARD -i eth0 -g cali-FORWARD
`
	if diff := cmp.Diff(kept, string(without([]byte(gone+kept)))); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
