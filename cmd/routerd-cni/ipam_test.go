package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/control/attach"
	"github.com/routerd/routerd/store"
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

// GC reaches the other IPAM plugin although the daemon could not remove
// everything, and what is left there keeps its address. Both errors are told. A
// daemon that does not say what is left leaves all as it is.
func TestDelegatedGC(t *testing.T) {
	t.Parallel()
	away := fmt.Errorf("release the address: %w", store.ErrUnavailable)
	c2 := attach.ID{Network: "net1", ContainerID: "c2", Interface: "eth1"}
	for _, tt := range []struct {
		name   string
		daemon func(d *daemon)
		refuse bool   // the other plugin fails too
		code   uint   // 0: success
		says   string // in the error
		valid  string // that the other plugin hears of; empty: it hears nothing
	}{
		{name: "all removed", valid: "c1"},
		{name: "one is busy", daemon: func(d *daemon) { d.left = []attach.ID{c2} }, valid: "c1 c2"},
		{name: "datastore away", daemon: func(d *daemon) { d.err, d.left = away, []attach.ID{c2} }, code: 11, says: "datastore unavailable", valid: "c1 c2"},
		{name: "one fails", daemon: func(d *daemon) { d.err, d.left = errors.New("container c2: broken"), []attach.ID{c2} }, code: 999, says: "container c2: broken", valid: "c1 c2"},
		{name: "nothing left", daemon: func(d *daemon) { d.err = away }, code: 11, says: "datastore unavailable", valid: "c1"},
		{name: "the other fails", refuse: true, code: 5, says: "IPAM plugin their-ipam (ipam.type): torn", valid: "c1"},
		{name: "both fail", daemon: func(d *daemon) { d.err, d.left = away, []attach.ID{c2} }, refuse: true, code: 11, says: "datastore unavailable; and IPAM plugin their-ipam (ipam.type): torn", valid: "c1 c2"},
		{name: "nobody knows the wires", daemon: func(d *daemon) { d.err, d.unlisted = errors.New("list devices"), true }, code: 999, says: "list devices"},
		{name: "daemon stalls", daemon: func(d *daemon) { d.stall = true }, code: 11, says: "within 1s"},
		{name: "daemon absent", daemon: func(d *daemon) { d.socket += ".none" }, code: 11, says: "systemctl status routerd"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			d := start(t)
			if tt.daemon != nil {
				d.mu.Lock()
				tt.daemon(d)
				d.mu.Unlock()
			}
			dir := t.TempDir()
			script := "#!/bin/sh\ncat >" + filepath.Join(dir, "conf") + "\n"
			if tt.refuse {
				script += `echo '{"cniVersion":"1.1.0","code":5,"msg":"torn"}'; exit 1`
			}
			if err := os.WriteFile(filepath.Join(dir, "their-ipam"), []byte(script), 0o755); err != nil {
				t.Fatal(err)
			}
			valid := []map[string]string{{"containerID": "c1", "ifname": "eth0"}}
			in := invocation{verb: "GC", env: map[string]string{"CNI_PATH": dir}, conf: d.conf("1.1.0", map[string]any{
				"ipam": map[string]any{"type": "their-ipam"}, "log_level": "info", "log_file_path": filepath.Join(dir, "log"),
				"cni.dev/valid-attachments": valid, "cni.dev/attachments": valid,
			})}
			if d.stall {
				in.conf["add_timeout_seconds"] = 1
			}
			if tt.code == 0 {
				succeed(t, in)
			} else {
				refuse(t, in, tt.code, tt.says)
			}
			for _, list := range []string{"cni.dev/valid-attachments", "cni.dev/attachments"} {
				if got := heard(t, filepath.Join(dir, "conf"), list); got != tt.valid {
					t.Errorf("the IPAM plugin hears that %q are valid (%s), want %q", got, list, tt.valid)
				}
			}
			log, err := os.ReadFile(filepath.Join(dir, "log"))
			if answers := tt.valid != "" || d.unlisted; err != nil || strings.Contains(string(log), "container=stale") != answers {
				t.Errorf("what was removed is in the log: %v, want %v (%v): %s", !answers, answers, err, log)
			}
		})
	}
}

// heard returns the containers that a configuration lists; empty: it was not
// given to anybody.
func heard(t *testing.T, file, list string) string {
	t.Helper()
	b, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return ""
	}
	if err != nil {
		t.Fatal(err)
	}
	var conf map[string]json.RawMessage
	var attachments []types.GCAttachment
	if err := json.Unmarshal(b, &conf); err != nil {
		t.Fatalf("%v: %s", err, b)
	}
	if err := json.Unmarshal(conf[list], &attachments); err != nil {
		t.Fatalf("%s: %v: %s", list, err, b)
	}
	var out []string
	for _, a := range attachments {
		out = append(out, a.ContainerID)
	}
	return strings.Join(out, " ")
}
