// Package labtest plays the programs that a lab runs, so that what concerns
// labs can be tested without the real ones; the scenarios run those.
//
// A test binary plays them itself, under other names: its TestMain calls
// [Play], its tests give [BinDir] to the lab.
package labtest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	types100 "github.com/containernetworking/cni/pkg/types/100"
	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
	"sigs.k8s.io/yaml"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/integration/lab/ns"
)

// Play runs the program that this binary was started as: routerd, routerd-cni,
// or one of others. It reports false when it was started under its own name.
func Play(others map[string]func() error) bool {
	name := filepath.Base(os.Args[0])
	var err error
	switch name {
	case "routerd":
		err = playDaemon(os.Args[len(os.Args)-1])
	case "routerd-cni":
		err = playPlugin()
	default:
		other, ok := others[name]
		if !ok {
			return false
		}
		err = other()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	return true
}

// BinDir makes a directory with the programs that the test binary plays.
func BinDir(tb testing.TB, others ...string) string {
	tb.Helper()
	self, err := os.Executable()
	if err != nil {
		tb.Fatal(err)
	}
	d := tb.TempDir()
	for _, name := range append(others, "routerd", "routerd-cni") {
		if err := os.Symlink(self, filepath.Join(d, name)); err != nil {
			tb.Fatal(err)
		}
	}
	return d
}

// AskedAgain is the line that a played daemon logs when it is asked for its
// health a second time: the one who asks has its first answer.
const AskedAgain = "played: asked again"

// operator answers as its configuration's key "play" says: "never-ready", or
// else as a daemon that is ready at once.
type operator struct {
	apiv1.UnimplementedOperatorServer
	name, play string
	asked      atomic.Int64
}

func (o *operator) Node(context.Context, *apiv1.NodeRequest) (*apiv1.NodeResponse, error) {
	if o.asked.Add(1) == 2 {
		fmt.Fprintln(os.Stderr, AskedAgain)
	}
	ready := &apiv1.Check{Ok: o.play != "never-ready", Reason: "played: " + o.play}
	return &apiv1.NodeResponse{Name: o.name, Pid: int64(os.Getpid()), Health: &apiv1.Health{Ready: ready}}, nil
}

func (o *operator) CNIConfig(context.Context, *apiv1.CNIConfigRequest) (*apiv1.CNIConfigResponse, error) {
	return &apiv1.CNIConfigResponse{Conflist: `{"cniVersion":"1.1.0","name":"routerd-lab","plugins":[{"type":"routerd-cni"}]}`}, nil
}

// datastore takes every write and keeps nothing.
type datastore struct {
	etcdserverpb.UnimplementedKVServer
}

func (datastore) Txn(_ context.Context, r *etcdserverpb.TxnRequest) (*etcdserverpb.TxnResponse, error) {
	out := &etcdserverpb.TxnResponse{Header: &etcdserverpb.ResponseHeader{Revision: 1}, Succeeded: true}
	for range r.Success {
		out.Responses = append(out.Responses, &etcdserverpb.ResponseOp{
			Response: &etcdserverpb.ResponseOp_ResponsePut{ResponsePut: &etcdserverpb.PutResponse{Header: out.Header}},
		})
	}
	return out, nil
}

// playDaemon serves the operator's socket. With "play: die" it ends with a
// message instead.
func playDaemon(config string) error {
	b, err := os.ReadFile(config)
	if err != nil {
		return err
	}
	var c struct{ NodeName, RunDir, Play string }
	if err := yaml.Unmarshal(b, &c); err != nil {
		return err
	}
	fmt.Fprintln(os.Stderr, "played daemon of", c.NodeName)
	if c.Play == "die" {
		return errors.New("address 10.1.0.11 is in use by node9")
	}
	path := filepath.Join(c.RunDir, "routerd.sock")
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		return err
	}
	s := grpc.NewServer()
	apiv1.RegisterOperatorServer(s, &operator{name: c.NodeName, play: c.Play})
	etcdserverpb.RegisterKVServer(s, datastore{})
	return s.Serve(l)
}

// playPlugin puts a wire into the pod and an address that answers everywhere,
// or refuses pods whose name begins with "bad".
func playPlugin() error {
	if os.Getenv("CNI_COMMAND") != "ADD" {
		return nil
	}
	if strings.HasPrefix(os.Getenv("CNI_CONTAINERID"), "bad") {
		fmt.Println(`{"cniVersion":"1.1.0","code":11,"msg":"datastore unavailable"}`)
		os.Exit(1)
	}
	space := filepath.Base(os.Getenv("CNI_NETNS"))
	out, err := exec.Command("ip", "-n", space, "link", "add", "eth0", "mtu", "1450", "type", "veth", "peer", "name", "far0").CombinedOutput()
	if err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	_, loopback, err := net.ParseCIDR("127.0.0.1/32")
	if err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(&types100.Result{CNIVersion: "1.1.0", IPs: []*types100.IPConfig{{Address: *loopback}}})
}

// NothingLeft reports every namespace, file and process of a lab that is still
// there. dir is the lab's directory.
func NothingLeft(tb testing.TB, name, dir string) {
	tb.Helper()
	entries, err := os.ReadDir(ns.Dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		tb.Error(err)
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), name+"-") {
			tb.Errorf("namespace %s is left", e.Name())
		}
	}
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		tb.Errorf("directory %s is left: %v", dir, err)
	}
	etc, err := filepath.Glob("/etc/netns/" + name + "-*")
	if err != nil {
		tb.Error(err)
	}
	for _, e := range etc {
		tb.Errorf("directory %s is left", e)
	}
	procs, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		tb.Error(err)
	}
	for _, p := range procs {
		b, err := os.ReadFile(p)
		if err == nil && strings.Contains(string(b), dir+"/") {
			tb.Errorf("process is left: %s: %q", p, b)
		}
	}
}
