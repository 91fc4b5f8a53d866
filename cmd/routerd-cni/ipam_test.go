package main

import (
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/control/attach"
)

// Under another plugin the same program gives addresses alone.
func TestAsIPAM(t *testing.T) {
	t.Parallel()
	d := start(t)
	conf := d.conf("1.0.0", map[string]any{"type": "bridge", "isGateway": true, "ipam": map[string]any{
		"type": "routerd-cni", "ipv4_pools": []string{"p"}, "namespace_labels": map[string]string{"team": "x"},
	}})
	got := parse(t, succeed(t, invocation{verb: "ADD", conf: conf}))
	want := parse(t, `{"cniVersion":"1.0.0","ips":[{"address":"192.168.0.7/26","gateway":"192.168.0.1"}],"routes":[{"dst":"0.0.0.0/0"}]}`)
	if diff := cmp.Diff(dropEmptyDNS(want), dropEmptyDNS(got)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	id := attach.ID{Network: "net1", ContainerID: "0123456789abcdef", Interface: "eth0"}
	wantReq := attach.AllocateRequest{
		ID: id, Workload: attach.Workload{Orchestrator: "cni", Namespace: "default"},
		IPv4: true, IPv4Pools: []string{"p"}, NamespaceLabels: map[string]string{"team": "x"}, Link: "cni0", Gateway: true,
	}
	if diff := cmp.Diff(wantReq, d.allocate); diff != "" {
		t.Errorf("request (-want +got):\n%s", diff)
	}
	conf["prevResult"] = got
	succeed(t, invocation{verb: "CHECK", conf: conf})
	if !d.check.AddressesOnly || !cmp.Equal(d.check.Addresses, []netip.Addr{netip.MustParseAddr("192.168.0.7")}, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })) {
		t.Errorf("CHECK: %+v", d.check)
	}
	succeed(t, invocation{verb: "DEL", conf: conf})
	if !d.del.AddressesOnly {
		t.Errorf("DEL: %+v", d.del)
	}
	delete(conf, "prevResult")
	refuse(t, invocation{verb: "CHECK", conf: conf}, 7, "prevResult")
}

// foreign writes an IPAM plugin that notes its verbs and answers with a result.
func foreign(t *testing.T, answer string) (dir string, verbs func() string) {
	t.Helper()
	dir = t.TempDir()
	log := filepath.Join(dir, "verbs")
	script := "#!/bin/sh\necho $CNI_COMMAND >>" + log + "\ncat >/dev/null\n[ $CNI_COMMAND = ADD ] || exit 0\n" + answer
	if err := os.WriteFile(filepath.Join(dir, "their-ipam"), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	return dir, func() string {
		b, err := os.ReadFile(log)
		if err != nil {
			t.Fatal(err)
		}
		return strings.Join(strings.Fields(string(b)), " ")
	}
}

// Another IPAM plugin gives the addresses, and routerd makes the interface.
func TestDelegation(t *testing.T) {
	t.Parallel()
	d := start(t)
	dir, verbs := foreign(t, `echo '{"cniVersion":"1.0.0","ips":[{"address":"10.9.0.5/24","gateway":"10.9.0.1"}],"dns":{"nameservers":["10.9.0.2"]}}'`)
	conf := d.conf("1.0.0", map[string]any{"ipam": map[string]any{"type": "their-ipam"}})
	env := map[string]string{"CNI_PATH": "/nowhere:" + dir}
	out := succeed(t, invocation{verb: "ADD", conf: conf, env: env})
	if !strings.Contains(out, "10.9.0.2") {
		t.Errorf("the DNS settings are lost: %s", out)
	}
	if len(d.add.Given) != 1 || d.add.Given[0] != netip.MustParseAddr("10.9.0.5") {
		t.Errorf("request: %+v", d.add)
	}
	conf["prevResult"] = parse(t, out)
	succeed(t, invocation{verb: "CHECK", conf: conf, env: env})
	succeed(t, invocation{verb: "DEL", conf: conf, env: env})
	if got := verbs(); got != "ADD CHECK DEL" {
		t.Errorf("the IPAM plugin heard %q", got)
	}
	refuse(t, invocation{verb: "ADD", conf: conf}, 7, "there is no such program in CNI_PATH")
}

// What the other plugin says of its failure reaches the runtime, with its code;
// and what it gave goes back when the interface cannot be made.
func TestDelegationFails(t *testing.T) {
	t.Parallel()
	d := start(t)
	dir, verbs := foreign(t, `echo '{"cniVersion":"1.0.0","code":11,"msg":"full"}'; exit 1`)
	conf := d.conf("1.0.0", map[string]any{"ipam": map[string]any{"type": "their-ipam"}})
	refuse(t, invocation{verb: "ADD", conf: conf, env: map[string]string{"CNI_PATH": dir}}, 11, "IPAM plugin their-ipam (ipam.type): full")
	if got := verbs(); got != "ADD" {
		t.Errorf("the IPAM plugin heard %q", got)
	}

	dir, verbs = foreign(t, `echo '{"cniVersion":"1.0.0","ips":[{"address":"10.9.0.5/24"}]}'`)
	d.mu.Lock()
	d.err = attach.ErrNotReady
	d.mu.Unlock()
	refuse(t, invocation{verb: "ADD", conf: conf, env: map[string]string{"CNI_PATH": dir}}, 11, "not ready")
	if got := verbs(); got != "ADD DEL" {
		t.Errorf("the IPAM plugin heard %q", got)
	}

	dir, verbs = foreign(t, `echo rubbish`)
	refuse(t, invocation{verb: "ADD", conf: conf, env: map[string]string{"CNI_PATH": dir}}, 6, "its result")
	if got := verbs(); got != "ADD DEL" {
		t.Errorf("the IPAM plugin heard %q", got)
	}
}
