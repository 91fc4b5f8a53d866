package felix

import (
	"fmt"
	"os/exec"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane/internal/nl"
	"github.com/routerd/routerd/dataplane/workload/netnstest"
)

func run(t *testing.T, ns *netnstest.Netns, input string, args ...string) {
	t.Helper()
	err := ns.Do(func() error {
		cmd := exec.Command(args[0], args[1:]...)
		cmd.Stdin = strings.NewReader(input)
		cmd.Env = append(cmd.Environ(), "XTABLES_LOCKFILE=/dev/null") // one for all namespaces
		out, err := cmd.CombinedOutput()
		if err != nil {
			return fmt.Errorf("%s: %w: %s", strings.Join(args, " "), err, out)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func find(t *testing.T, ns *netnstest.Netns) []Rest {
	t.Helper()
	var list []Rest
	if err := ns.Do(func() (err error) { list, err = Find(); return err }); err != nil {
		t.Fatal(err)
	}
	return list
}

// As Felix writes them, beside a chain of kube-proxy's and one of kube-router's.
const (
	filterTable = `*filter
:INPUT ACCEPT [0:0]
:FORWARD ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:KUBE-FORWARD - [0:0]
:KUBE-ROUTER-FORWARD - [0:0]
:cali-FORWARD - [0:0]
:cali-tw-cali1234567890a - [0:0]
-A FORWARD -m comment --comment "cali:wUHhoiAYhphO9Mso" -j cali-FORWARD
-A FORWARD -j KUBE-FORWARD
-A FORWARD -j KUBE-ROUTER-FORWARD
-A KUBE-FORWARD -m comment --comment "california/web:cali" -j ACCEPT
-A cali-FORWARD -m comment --comment "cali:vjrMJCRpqwy5oRoX" -j MARK --set-xmark 0x0/0xe0000
-A cali-FORWARD -o cali1234567890a -g cali-tw-cali1234567890a
-A cali-tw-cali1234567890a -m comment --comment "cali:abcdefghijklmnop" -j DROP
COMMIT
`
	natTable = `*nat
:PREROUTING ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:KUBE-SERVICES - [0:0]
:cali-nat-outgoing - [0:0]
-A POSTROUTING -j cali-nat-outgoing
COMMIT
`
)

// What Felix left is found in each of its forms, and told from what others have.
func TestFind(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name    string
		input   string
		command []string
		want    []Rest
	}{
		{"nothing", "", []string{"true"}, nil},
		{"others", strings.ReplaceAll(filterTable, "cali-", "CALM-"), []string{"iptables-legacy-restore"}, nil},
		{"others, nft", strings.ReplaceAll(filterTable, "cali-", "CALM-"), []string{"iptables-nft-restore"}, nil},
		{"legacy", filterTable + natTable, []string{"iptables-legacy-restore"}, []Rest{
			{Legacy, false, "nat", []string{"cali-nat-outgoing"}},
			{Legacy, false, "filter", []string{"cali-FORWARD", "cali-tw-cali1234567890a"}},
		}},
		{"legacy, IPv6", natTable, []string{"ip6tables-legacy-restore"}, []Rest{{Legacy, true, "nat", []string{"cali-nat-outgoing"}}}},
		{"nft", filterTable, []string{"iptables-nft-restore"}, []Rest{{NFT, false, "filter", []string{"cali-FORWARD", "cali-tw-cali1234567890a"}}}},
		{"nft, IPv6", natTable, []string{"ip6tables-nft-restore"}, []Rest{{NFT, true, "nat", []string{"cali-nat-outgoing"}}}},
		{
			"nftables", "table ip6 calico {\n chain filter-cali-FORWARD {\n }\n chain filter-FORWARD {\n type filter hook forward priority 0\n }\n}\ntable inet calico {\n chain x {\n }\n}\n",
			[]string{"nft", "-f", "-"},
			[]Rest{{NFTables, true, "calico", []string{"filter-FORWARD", "filter-cali-FORWARD"}}},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			ns := netnstest.New(t)
			run(t, ns, tt.input, tt.command...)
			if diff := cmp.Diff(tt.want, find(t, ns)); diff != "" {
				t.Errorf("found (-want +got):\n%s", diff)
			}
		})
	}
}

// Sets are found by their names, and judge nothing.
func TestFindSets(t *testing.T) {
	t.Parallel()
	ns := netnstest.New(t)
	for _, name := range []string{"cali60this-host", "KUBE-CLUSTER-IP", "cali40all-ipam-pools"} {
		if err := ns.Do(func() error { return createSet(name) }); err != nil {
			t.Fatalf("create %s: %v", name, err)
		}
	}
	got := find(t, ns)
	if diff := cmp.Diff([]Rest{{IPSet, false, "", []string{"cali40all-ipam-pools", "cali60this-host"}}}, got); diff != "" || got[0].Judges() {
		t.Errorf("found (-want +got):\n%s", diff)
	}
}

// createSet makes an ipset as ipset(8) does, which test machines need not have.
func createSet(name string) error {
	c, err := nl.Dial(unix.NETLINK_NETFILTER, 0, 0)
	if err != nil {
		return err
	}
	defer c.Close()
	var b nl.Batch
	b.Begin(unix.NFNL_SUBSYS_IPSET<<8|2, unix.NLM_F_CREATE|unix.NLM_F_EXCL, unix.AF_INET, unix.NFNETLINK_V0, 0, 0) // IPSET_CMD_CREATE
	b.Uint8(attrProtocol, protocolVersion)
	b.Text(attrSetName, name)
	b.Text(3, "hash:ip")     // IPSET_ATTR_TYPENAME
	b.Uint8(4, 0)            // IPSET_ATTR_REVISION
	b.Uint8(5, unix.AF_INET) // IPSET_ATTR_FAMILY
	b.Nest(7, func() {})     // IPSET_ATTR_DATA
	return c.Do(&b, nil)
}

// A table that is no table gives no names and no panic.
func TestChainNamesOfRubbish(t *testing.T) {
	t.Parallel()
	for _, b := range [][]byte{nil, make([]byte, 100), make([]byte, 400), []byte(strings.Repeat("\xff", 400))} {
		for _, x := range []xtables{ipTables(), ip6Tables()} {
			if got := x.chainNames(b); len(got) > 0 {
				t.Errorf("%q", got)
			}
		}
	}
}
