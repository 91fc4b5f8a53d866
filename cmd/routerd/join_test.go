package main

import (
	"bytes"
	"crypto/tls"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/routerd/routerd/control/config"
	"github.com/routerd/routerd/control/enrol"
	"github.com/routerd/routerd/control/join"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/embedded"

	apiv1 "github.com/routerd/routerd/control/api/v1"
)

// underSystemd has a test binary that is to be routerd join act as on a host with
// systemd, whose unit reads the named configuration.
const underSystemd = "ROUTERD_TEST_UNDER_SYSTEMD"

// twoHosts are host11, which serves its datastore, and host12, which has nothing yet,
// on one wire.
func twoHosts(t *testing.T) (first *running, second *host) {
	t.Helper()
	one, two := newHost(t, "10.9.0.1/24"), newHost(t, "10.9.0.2/24")
	one.ip("link del eth0")
	two.ip("link del eth0")
	one.ip("link add eth0 type veth peer name eth0 netns " + two.ns.Path)
	for h, addr := range map[*host]string{one: "10.1.0.11/24", two: "10.1.0.12/24"} {
		h.ip("addr add " + addr + " dev eth0")
		h.ip("link set eth0 up")
	}
	one.config["nodeName"], two.config["nodeName"] = "host11", "host12"
	one.config["datastore"] = map[string]any{"embedded": map[string]any{"listen": "10.1.0.11:2379"}}
	first = one.start()
	first.ready()
	return first, two
}

// token is what routerctl cluster token asks for.
func (r *running) token() string {
	r.t.Helper()
	resp, err := apiv1.NewClusterClient(r.dial(config.OperatorSocketName)).JoinToken(await.Context(r.t), &apiv1.JoinTokenRequest{})
	if err != nil {
		r.t.Fatal(err)
	}
	return resp.GetToken()
}

// takesHosts reports whether the host listens for new ones.
func (h *host) takesHosts() bool {
	h.t.Helper()
	out, err := h.exec("ss", "-Hltn", "sport = :7748")
	if err != nil {
		h.t.Fatal(err)
	}
	return strings.TrimSpace(out) != ""
}

// fakeSystemctl has the host's commands be as under systemd, with a systemctl that
// writes down what it is asked, or runs a script.
func (h *host) fakeSystemctl(file string, script ...string) (said string) {
	h.t.Helper()
	dir := filepath.Join(h.dir, "bin")
	said = filepath.Join(h.dir, "systemctl.log")
	text := "#!/bin/sh\necho \"$@\" >> " + said + "\n" + strings.Join(script, "\n") + "\n"
	if err := errors.Join(os.MkdirAll(dir, 0o755), os.WriteFile(filepath.Join(dir, "systemctl"), []byte(text), 0o755)); err != nil { //nolint:gosec // it is to be run
		h.t.Fatal(err)
	}
	h.env = append(h.env, "PATH="+dir+":"+os.Getenv("PATH"), underSystemd+"="+file)
	return said
}

// TestJoin: one command on each of two hosts, and the second is in the cluster of the
// first, with a certificate of its own, registered and ready. Nothing listens for new
// hosts before and after. The same command again finds everything done.
func TestJoin(t *testing.T) {
	t.Parallel()
	first, two := twoHosts(t)
	if first.takesHosts() {
		t.Error("new hosts are taken before there is a token")
	}
	token := first.token()
	if !first.takesHosts() {
		t.Error("there is a token, and nothing listens")
	}
	file := two.writeConfig()
	said := two.fakeSystemctl(file)
	asked := func() error {
		b, err := os.ReadFile(said)
		if want := "enable routerd.service\nrestart routerd.service\n"; err == nil && string(b) != want {
			err = fmt.Errorf("systemctl was asked %q, want %q", b, want)
		}
		return err
	}
	cmd, hold := two.command("join", "10.1.0.11", "--config", file, "--token", token)
	defer hold.Close()
	var out log
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := two.ns.Do(cmd.Start); err != nil {
		t.Fatal(err)
	}
	await.Until(t, "the service is started", asked)
	two.env = nil
	second := two.startFrom(file)
	if err := cmd.Wait(); err != nil || !strings.Contains(out.String(), "host12 is ready, ") {
		t.Fatalf("join: %v\n%s", err, &out)
	}
	t.Logf("%s", &out)
	if c := second.ready(); !strings.Contains(c.GetDatastore(), "https://10.1.0.11:2379") {
		t.Errorf("its datastore is %s", c.GetDatastore())
	}

	c := first.store(filepath.Join(first.runDir(), config.OperatorSocketName))
	nodes, _, err := c.List(await.Context(t), store.KindNode, "")
	if err != nil || len(nodes) != 2 {
		t.Errorf("nodes: %v, %v", nodes, err)
	}
	_, certFile, keyFile := embedded.ClientFiles(filepath.Join(two.dir, "state", "pki"))
	pair, err := tls.LoadX509KeyPair(certFile, keyFile)
	if err != nil || pair.Leaf.Subject.CommonName != "host12" {
		t.Errorf("certificate: %v, %v", pair.Leaf, err)
	}
	if info, err := os.Stat(keyFile); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("key: %v, %v", info, err)
	}
	await.True(t, "nothing listens for new hosts", func() bool { return !first.takesHosts() })
	if code, out := two.routerd("join", "--config", file, "--token", token); code != 0 || !strings.Contains(out, "is configured for https://10.1.0.11:2379") {
		t.Errorf("again: %d\n%s", code, out)
	}
	two.fakeSystemctl(file, "echo no such unit; exit 5")
	if code, out := two.routerd("join", "--config", file, "--token", token); code == 0 || mentions(out, "systemctl enable routerd.service", "no such unit", "run the same command again") != nil {
		t.Errorf("a service that does not start: %d\n%s", code, out)
	}
	if got := first.log.lines("level=ERROR"); len(got) > 0 {
		t.Errorf("the first host's log: %q", got)
	}
}

// TestJoinKilled: wherever routerd join is killed, the same command goes on, with one
// token.
func TestJoinKilled(t *testing.T) {
	t.Parallel()
	first, two := twoHosts(t)
	token := first.token()
	file := two.writeConfig()
	args := []string{"join", "--config", file, "--token", token, "--no-start"}
	caFile, certFile, keyFile := embedded.ClientFiles(filepath.Join(two.dir, "state", "pki"))
	there := func(path string) func() bool {
		return func() bool { _, err := os.Stat(path); return err == nil }
	}
	configured := func() bool {
		b, err := os.ReadFile(file)
		return err == nil && bytes.Contains(b, []byte("10.1.0.11"))
	}
	for _, step := range []func() bool{there(keyFile), there(caFile), there(certFile), configured} {
		cmd, hold := two.command(args...)
		if err := two.ns.Do(cmd.Start); err != nil {
			t.Fatal(err)
		}
		await.True(t, "the next file", step)
		_ = cmd.Process.Signal(syscall.SIGKILL) // it may have ended
		_ = cmd.Wait()
		hold.Close()
	}
	if code, out := two.routerd(args...); code != 0 {
		t.Fatalf("in the end: %d\n%s", code, out)
	}
	if c := two.startFrom(file).ready(); !strings.Contains(c.GetDatastore(), "https://10.1.0.11:2379") {
		t.Errorf("its datastore is %s", c.GetDatastore())
	}
}

// TestJoinRefused: what stands in the way on this host is named, with its cure, before
// the token is used.
func TestJoinRefused(t *testing.T) {
	t.Parallel()
	tok := join.Token{ID: "AAAAAAAAAAA", Secret: make([]byte, 32), Address: "127.0.0.1:1", Expires: time.Now().Add(time.Hour)}
	token, err := tok.Encode()
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name, config string
		prepare      func(state string) error
		args         []string
		want         []string
	}{
		{"no token", "", nil, nil, []string{"routerctl cluster token"}},
		{"half a token", "", nil, []string{"--token", token[:40]}, []string{"cut short"}},
		{"two tokens", "", nil, []string{"--token", token, "--token-file", "/x"}, []string{"exclude each other"}},
		{"no such file", "", nil, []string{"--token-file", "/no/such"}, []string{"/no/such"}},
		{"a bad address", "", nil, []string{"https://a", "--token", token}, []string{"https://a", "HOST:PORT"}},
		{"another datastore", "datastore: {endpoints: ['http://10.0.0.1:1']}\n", nil, []string{"--token", token}, []string{"routerd.yaml", "datastore.endpoints", "10.0.0.1:1", "--force"}},
		{"it serves others", "datastore: {embedded: {listen: '10.0.0.1:1'}}\n", nil, []string{"--token", token}, []string{"routerd.yaml", "datastore.embedded.listen", "--force"}},
		{"a datastore of its own", "", func(state string) error {
			return errors.Join(os.MkdirAll(filepath.Join(state, "etcd", "data", "member"), 0o700), os.MkdirAll(filepath.Join(state, "workloads", "one"), 0o700))
		}, []string{"--token", token}, []string{"/etcd/data", "1 workloads", "move the directory away", "--force"}},
		{"credentials of another cluster", "", func(state string) error {
			s, err := embedded.Start(await.Context(t), embedded.Config{Dir: filepath.Join(state, "x", "d"), Socket: filepath.Join(state, "s"), Listen: netip.MustParseAddrPort("127.0.0.1:0"), PKIDir: filepath.Join(state, "pki")})
			if err == nil {
				s.Close()
			}
			return err
		}, []string{"--token", token}, []string{"/pki/ca.crt", "another cluster", "--force"}},
		{"a damaged key", "", func(state string) error {
			return errors.Join(os.MkdirAll(filepath.Join(state, "pki"), 0o700), os.WriteFile(filepath.Join(state, "pki", "client.key"), []byte("x"), 0o600))
		}, []string{"--token", token}, []string{"/pki/client.key", "--force"}},
		{"a certificate without a key", "", func(state string) error {
			return errors.Join(os.MkdirAll(filepath.Join(state, "pki"), 0o700), os.WriteFile(filepath.Join(state, "pki", "client.crt"), []byte("x"), 0o600))
		}, []string{"--token", token}, []string{"/pki/client.crt", "--force"}},
		{"nobody there", "", nil, []string{"--token", token}, []string{"127.0.0.1:1", "refused", "no token is outstanding"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			dir, err := os.MkdirTemp("", "join") //nolint:usetesting // the path of a socket is short
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { os.RemoveAll(dir) })
			state, file := filepath.Join(dir, "state"), filepath.Join(dir, "routerd.yaml")
			before := "nodeName: host12\nstateDir: " + state + "\n" + tt.config
			if err := errors.Join(os.MkdirAll(state, 0o700), os.WriteFile(file, []byte(before), 0o600)); err != nil {
				t.Fatal(err)
			}
			if tt.prepare != nil {
				if err := tt.prepare(state); err != nil {
					t.Fatal(err)
				}
			}
			c := newJoinCommand(enrol.Systemd{Booted: filepath.Join(dir, "none")})
			var out bytes.Buffer
			c.SetArgs(append([]string{"--config", file}, tt.args...))
			c.SetOut(&out)
			c.SetErr(&out)
			c.SetIn(&out)
			c.SilenceUsage, c.SilenceErrors = true, true
			err = c.ExecuteContext(t.Context())
			if err == nil {
				t.Fatalf("it has joined:\n%s", &out)
			}
			if err := mentions(err.Error(), tt.want...); err != nil {
				t.Error(err)
			}
			if after, err := os.ReadFile(file); err != nil || string(after) != before {
				t.Errorf("the configuration is now %q, %v", after, err)
			}
		})
	}
}

// TestNoTokens: a host that serves nobody says what to do.
func TestNoTokens(t *testing.T) {
	t.Parallel()
	r := newHost(t, "10.1.0.11/24").start()
	r.ready()
	_, err := apiv1.NewClusterClient(r.dial(config.OperatorSocketName)).JoinToken(await.Context(t), &apiv1.JoinTokenRequest{})
	if err == nil || mentions(err.Error(), "datastore.embedded.listen", "restart routerd") != nil {
		t.Errorf("got %v", err)
	}
}
