package lab

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
	"testing"
	"time"

	types100 "github.com/containernetworking/cni/pkg/types/100"
	"google.golang.org/grpc"
	"sigs.k8s.io/yaml"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/integration/lab/ns"
)

// The test binary also plays the programs that a lab runs, so that the lab's
// own work is tested by itself; the scenarios run the real ones.
func TestMain(m *testing.M) {
	var err error
	switch filepath.Base(os.Args[0]) {
	case "routerd":
		err = playDaemon(os.Args[len(os.Args)-1])
	case "routerd-cni":
		err = playPlugin()
	case "lab-up":
		_, err = Up(context.Background(), Options{Name: os.Args[1], BinDir: os.Args[2]})
	default:
		os.Exit(m.Run())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// binDir makes a directory with the programs that the test binary plays.
func binDir(t *testing.T) string {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	d := t.TempDir()
	for _, name := range []string{"routerd", "routerd-cni", "lab-up"} {
		if err := os.Symlink(self, filepath.Join(d, name)); err != nil {
			t.Fatal(err)
		}
	}
	return d
}

// operator is a daemon that is ready at once, or as its configuration says.
type operator struct {
	apiv1.UnimplementedOperatorServer
	name, mode string
}

func (o operator) Node(context.Context, *apiv1.NodeRequest) (*apiv1.NodeResponse, error) {
	ready := &apiv1.Check{Ok: o.mode != "never-ready", Reason: "played: " + o.mode}
	return &apiv1.NodeResponse{Name: o.name, Pid: int64(os.Getpid()), Health: &apiv1.Health{Ready: ready}}, nil
}

func (o operator) CNIConfig(context.Context, *apiv1.CNIConfigRequest) (*apiv1.CNIConfigResponse, error) {
	return &apiv1.CNIConfigResponse{Conflist: `{"cniVersion":"1.1.0","name":"routerd-lab","plugins":[{"type":"routerd-cni"}]}`}, nil
}

func playDaemon(config string) error {
	b, err := os.ReadFile(config)
	if err != nil {
		return err
	}
	var c struct {
		NodeName, RunDir string
		Play             string
	}
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
	apiv1.RegisterOperatorServer(s, operator{name: c.NodeName, mode: c.Play})
	return s.Serve(l)
}

// playPlugin puts a wire into the pod, or refuses pods whose name says so.
func playPlugin() error {
	id := os.Getenv("CNI_CONTAINERID")
	if os.Getenv("CNI_COMMAND") != "ADD" {
		return nil
	}
	if strings.HasPrefix(id, "bad") {
		fmt.Println(`{"cniVersion":"1.1.0","code":11,"msg":"datastore unavailable"}`)
		os.Exit(1)
	}
	space := filepath.Base(os.Getenv("CNI_NETNS"))
	if out, err := exec.Command("ip", "-n", space, "link", "add", "eth0", "mtu", "1450", "type", "veth", "peer", "name", "far0").CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	_, ipnet, err := net.ParseCIDR("127.0.0.1/32") // an address that answers, in every namespace
	if err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(&types100.Result{CNIVersion: "1.1.0", IPs: []*types100.IPConfig{{Address: *ipnet}}})
}

// labName returns a name for one test's lab and sees to it that nothing is left
// of it.
func labName(t *testing.T, suffix string) string {
	t.Helper()
	name := fmt.Sprintf("lt%d-%s", os.Getpid(), suffix)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		if err := Down(ctx, name); err != nil {
			t.Error(err)
		}
		nothingLeft(t, name)
	})
	return name
}

func nothingLeft(t *testing.T, lab string) {
	t.Helper()
	entries, err := os.ReadDir(ns.Dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), lab+"-") {
			t.Errorf("namespace %s is left", e.Name())
		}
	}
	if _, err := os.Stat(dir(lab)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("directory %s is left: %v", dir(lab), err)
	}
	procs, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range procs {
		b, err := os.ReadFile(p)
		if err == nil && strings.Contains(string(b), dir(lab)+"/") {
			t.Errorf("process is left: %s: %q", p, b)
		}
	}
}
