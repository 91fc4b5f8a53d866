package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/embed"
	"go.etcd.io/etcd/server/v3/etcdserver/api/v3client"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/events"
	"github.com/routerd/routerd/control/rollback"
	"github.com/routerd/routerd/control/rpc"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store/etcd"
)

var updateScripts = flag.Bool("update", false, "rewrite the expected output in the scripts")

// The race detector waits a second at the end of each process, for what other threads
// may still report.
const exitAtOnce = "GORACE=atexit_sleep_ms=0"

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"routerctl": main, pluginName: main})
}

// operator answers with what the script has put into its working directory:
// node.json, routes.json, paths.json and cni.json, as protobuf's JSON.
type operator struct {
	apiv1.UnimplementedOperatorServer
	dir string
}

func (o *operator) answer(file string, m proto.Message) error {
	b, err := os.ReadFile(filepath.Join(o.dir, file))
	if err != nil {
		return status.Errorf(codes.Unavailable, "the core is not running yet")
	}
	if err := protojson.Unmarshal(b, m); err != nil {
		return status.Errorf(codes.Internal, "%s: %v", file, err)
	}
	return nil
}

func (o *operator) Node(context.Context, *apiv1.NodeRequest) (*apiv1.NodeResponse, error) {
	m := &apiv1.NodeResponse{}
	return m, o.answer("node.json", m)
}

// Examine implements [rpc.Doctor]. A script that says nothing of it has a host that is
// well.
func (o *operator) Examine(context.Context, *apiv1.ExamineRequest) (*apiv1.ExamineResponse, error) {
	m := &apiv1.ExamineResponse{Node: "node1"}
	if _, err := os.Stat(filepath.Join(o.dir, "doctor.json")); err != nil {
		return m, nil
	}
	return m, o.answer("doctor.json", m)
}

func (o *operator) Look(context.Context, *apiv1.LookRequest) (*apiv1.LookResponse, error) {
	m := &apiv1.LookResponse{}
	return m, o.answer("look.json", m)
}

func (o *operator) Trace(context.Context, *apiv1.TraceRequest) (*apiv1.TraceResponse, error) {
	m := &apiv1.TraceResponse{}
	return m, o.answer("trace.json", m)
}

// Session answers with the script's file session.txt.
func (o *operator) Session(stream grpc.ClientStreamingServer[apiv1.SessionRequest, apiv1.SessionResponse]) error {
	for {
		_, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
	}
	b, err := os.ReadFile(filepath.Join(o.dir, "session.txt"))
	if err != nil {
		return stream.SendAndClose(&apiv1.SessionResponse{}) // most scripts have none
	}
	return stream.SendAndClose(&apiv1.SessionResponse{Ends: strings.TrimSpace(string(b))})
}

// Hosts answers with hosts1.json once, where there is one, and then with hosts.json.
func (o *operator) Hosts(context.Context, *apiv1.HostsRequest) (*apiv1.HostsResponse, error) {
	m := &apiv1.HostsResponse{}
	if err := o.answer("hosts1.json", m); err == nil {
		return m, os.Remove(filepath.Join(o.dir, "hosts1.json"))
	}
	m = &apiv1.HostsResponse{}
	return m, o.answer("hosts.json", m)
}

func (o *operator) Paths(context.Context, *apiv1.PathsRequest) (*apiv1.PathsResponse, error) {
	m := &apiv1.PathsResponse{}
	return m, o.answer("paths.json", m)
}

func (o *operator) CNIConfig(context.Context, *apiv1.CNIConfigRequest) (*apiv1.CNIConfigResponse, error) {
	m := &apiv1.CNIConfigResponse{}
	return m, o.answer("cni.json", m)
}

// Tunnels writes down what is to be measured anew, in asked.txt.
func (o *operator) Tunnels(_ context.Context, r *apiv1.TunnelsRequest) (*apiv1.TunnelsResponse, error) {
	if len(r.GetRetry()) > 0 {
		if err := os.WriteFile(filepath.Join(o.dir, "asked.txt"), []byte(strings.Join(r.GetRetry(), "\n")+"\n"), 0o600); err != nil {
			return nil, err
		}
	}
	m := &apiv1.TunnelsResponse{}
	return m, o.answer("tunnels.json", m)
}

// Plan answers with what is in hosts-plan.json; without it nothing changes on node1.
func (o *operator) Plan(stream grpc.BidiStreamingServer[apiv1.PlanRequest, apiv1.HostPlan]) error {
	for {
		if _, err := stream.Recv(); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return err
		}
	}
	if _, err := os.Stat(filepath.Join(o.dir, "hosts-plan.json")); err != nil {
		return stream.Send(&apiv1.HostPlan{Node: "node1"})
	}
	for _, file := range []string{"hosts-plan.json", "hosts-plan2.json"} {
		m := &apiv1.HostPlan{}
		if err := o.answer(file, m); err != nil {
			return err
		}
		if err := stream.Send(m); err != nil {
			return err
		}
	}
	return nil
}

func (o *operator) Policy(_ context.Context, r *apiv1.PolicyRequest) (*apiv1.PolicyResponse, error) {
	m := &apiv1.PolicyResponse{}
	if r.GetEndpoint() != "" {
		return m, o.answer("policy-endpoint.json", m)
	}
	return m, o.answer("policy.json", m)
}

func (o *operator) PolicyExplain(context.Context, *apiv1.PolicyExplainRequest) (*apiv1.PolicyExplainResponse, error) {
	m := &apiv1.PolicyExplainResponse{}
	return m, o.answer("explain.json", m)
}

func (o *operator) Flows(context.Context, *apiv1.FlowsRequest) (*apiv1.FlowsResponse, error) {
	m := &apiv1.FlowsResponse{}
	return m, o.answer("flows.json", m)
}

// Overlaps plays a host with the address 10.66.0.1/16.
func (o *operator) Overlaps(_ context.Context, r *apiv1.OverlapsRequest) (*apiv1.OverlapsResponse, error) {
	m := &apiv1.OverlapsResponse{Node: "node1"}
	for _, c := range r.GetCidrs() {
		if p, err := netip.ParsePrefix(c); err == nil && p.Overlaps(netip.MustParsePrefix("10.66.0.0/16")) {
			m.Overlaps = append(m.Overlaps, &apiv1.Overlap{Cidr: c, With: "address 10.66.0.1/16 of device eth1"})
		}
	}
	return m, nil
}

func (o *operator) Routes(_ context.Context, r *apiv1.RoutesRequest) (*apiv1.RoutesResponse, error) {
	m := &apiv1.RoutesResponse{}
	if err := o.answer("routes.json", m); err != nil {
		return nil, err
	}
	if r.GetPrefix() != "" {
		kept := m.Routes[:0]
		for _, route := range m.Routes {
			if route.GetPrefix() == r.GetPrefix() {
				kept = append(kept, route)
			}
		}
		m.Routes = kept
	}
	if !r.GetAllObjects() {
		m.Objects = nil
	}
	return m, nil
}

// older is the daemon of an early version: of the services it has one, and of that what an operator asked it for first.
// What its answers lack they have as zero.
type older struct {
	apiv1.UnimplementedOperatorServer
	now operator
}

func (o *older) Node(ctx context.Context, r *apiv1.NodeRequest) (*apiv1.NodeResponse, error) {
	return o.now.Node(ctx, r)
}

func (o *older) Routes(ctx context.Context, r *apiv1.RoutesRequest) (*apiv1.RoutesResponse, error) {
	return o.now.Routes(ctx, r)
}

// someEvents is a log in which something was said in 2026.
func someEvents() *events.Log {
	l := events.New(slog.DiscardHandler, slog.LevelInfo)
	say := func(to *slog.Logger, second int, level slog.Level, message string, args ...any) {
		r := slog.NewRecord(time.Date(2026, 1, 2, 3, 4, second, 0, time.UTC), level, message, 0)
		r.Add(args...)
		if err := to.Handler().Handle(context.Background(), r); err != nil {
			panic(err) // the handler discards
		}
	}
	log := l.Logger()
	bgp := log.With(events.PartKey, "bgp")
	log.With(events.PartKey, "ipam")
	say(log, 5, slog.LevelInfo, "starting", "node", "node1")
	say(bgp, 6, slog.LevelInfo, "session is up", "peer", "10.0.0.1")
	say(bgp, 7, slog.LevelWarn, "session is down", "peer", "10.0.0.1", "reason", "hold timer expired")
	return l
}

// startDaemon serves a real etcd and a fake operator service on one socket, as
// the daemon does.
func startDaemon(env *testscript.Env) error {
	// The path of a socket has at most 107 bytes, which $WORK would exceed.
	dir, err := os.MkdirTemp("/tmp", "routerctl")
	if err != nil {
		return err
	}
	env.Defer(func() { os.RemoveAll(dir) }) //nolint:errcheck // it is a temporary directory
	socket := filepath.Join(dir, "s")
	c := embed.NewConfig()
	c.Dir = filepath.Join(dir, "etcd")
	c.LogLevel, c.UnsafeNoFsync = "panic", true
	c.ListenClientUrls = []url.URL{{Scheme: "unix", Path: socket}}
	c.AdvertiseClientUrls = c.ListenClientUrls
	c.ListenPeerUrls = []url.URL{{Scheme: "unix", Path: socket + "p"}}
	c.AdvertisePeerUrls = []url.URL{{Scheme: "http", Host: "127.0.0.1:0"}}
	c.InitialCluster = "default=http://127.0.0.1:0"
	c.ServiceRegister = func(s *grpc.Server) {
		if _, err := os.Stat(filepath.Join(env.WorkDir, "older")); err == nil {
			apiv1.RegisterOperatorServer(s, &older{now: operator{dir: env.WorkDir}})
			return
		}
		apiv1.RegisterOperatorServer(s, &operator{dir: env.WorkDir})
		apiv1.RegisterBGPServer(s, &bgpSpeaker{dir: env.WorkDir})
		apiv1.RegisterEventsServer(s, rpc.NewEventsServer(someEvents()))
		apiv1.RegisterDoctorServer(s, rpc.NewDoctorServer(&operator{dir: env.WorkDir}))
		apiv1.RegisterClusterServer(s, clusterHost{})
		apiv1.RegisterUIServer(s, pageHost{dir: env.WorkDir})
	}
	e, err := embed.StartEtcd(c)
	if err != nil {
		return err
	}
	env.Defer(e.Close)
	select {
	case <-e.Server.ReadyNotify():
	case err := <-e.Err():
		return err
	case <-time.After(await.Patience):
		return fmt.Errorf("etcd did not become ready within %s", await.Patience)
	}
	client := v3client.New(e.Server)
	env.Defer(func() { client.Close() }) //nolint:errcheck // it is in this process
	env.Values["etcd"] = client
	if err := startKeeper(env, socket); err != nil {
		return err
	}
	env.Setenv("ROUTERD_SOCKET", socket)
	env.Setenv("TZ", "UTC")
	env.Setenv(sshConnection, "") // whoever runs the test may have one
	name, value, _ := strings.Cut(exitAtOnce, "=")
	env.Setenv(name, value)
	return nil
}

// startKeeper undoes what is not confirmed, as the daemon does.
func startKeeper(env *testscript.Env, socket string) error {
	s, err := etcd.Open(context.Background(), etcd.Config{Endpoints: []string{"unix://" + socket}})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	k := rollback.Keeper{Node: "node1", Store: s, Log: slog.New(slog.DiscardHandler), Chance: func() float64 { return 0 }}
	go func() {
		defer close(done)
		_ = k.Run(ctx)
	}()
	env.Defer(func() {
		cancel()
		<-done
		s.Close() //nolint:errcheck // the test is over
	})
	return nil
}

func TestScripts(t *testing.T) {
	t.Parallel()
	testscript.Run(t, testscript.Params{
		Dir:           "testdata/scripts",
		Setup:         startDaemon,
		UpdateScripts: *updateScripts,
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			// etcd put KEY FILE and etcd keys PREFIX look under routerctl's feet.
			"etcd": etcdCommand,
			// listen PATH accepts connections and never answers.
			"listen":   listenCommand,
			"examples": examplesCommand,
			"everyday": everydayCommand,
			// manifests N FILE writes N reservations into a file.
			"manifests": manifestsCommand,
		},
	})
}

func etcdCommand(ts *testscript.TestScript, neg bool, args []string) {
	c := ts.Value("etcd").(*clientv3.Client)
	ctx, cancel := context.WithTimeout(context.Background(), await.Patience)
	defer cancel()
	switch {
	case !neg && len(args) == 3 && args[0] == "put":
		_, err := c.Put(ctx, args[1], strings.TrimSpace(ts.ReadFile(args[2])))
		ts.Check(err)
	case !neg && len(args) == 2 && args[0] == "get":
		r, err := c.Get(ctx, args[1])
		ts.Check(err)
		if len(r.Kvs) == 0 {
			ts.Fatalf("no key %s", args[1])
		}
		_, err = ts.Stdout().Write(append(r.Kvs[0].Value, '\n'))
		ts.Check(err)
	case !neg && len(args) == 2 && args[0] == "keys":
		r, err := c.Get(ctx, args[1], clientv3.WithPrefix(), clientv3.WithKeysOnly())
		ts.Check(err)
		for _, kv := range r.Kvs {
			_, err := ts.Stdout().Write(append(kv.Key, '\n'))
			ts.Check(err)
		}
	default:
		ts.Fatalf("usage: etcd put KEY FILE | etcd get KEY | etcd keys PREFIX")
	}
}

func listenCommand(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: listen PATH")
	}
	l, err := net.Listen("unix", ts.MkAbs(args[0]))
	ts.Check(err)
	ts.Defer(func() { l.Close() }) //nolint:errcheck // the test is over
}

func manifestsCommand(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 2 {
		ts.Fatalf("usage: manifests N FILE")
	}
	n := 0
	for _, r := range args[0] {
		n = n*10 + int(r-'0')
	}
	var b bytes.Buffer
	for i := range n {
		b.WriteString("---\napiVersion: projectcalico.org/v3\nkind: IPReservation\nmetadata: {name: r" + strings.Repeat("x", i%10) + string(rune('a'+i/10%26)) + string(rune('a'+i/260)) + "}\n")
	}
	ts.Check(os.WriteFile(ts.MkAbs(args[1]), b.Bytes(), 0o644))
}

func TestSocketErrors(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		err  error
		want string
	}{
		{fs.ErrNotExist, "there is no socket at /x: routerd is not running on this host"},
		{&net.OpError{Op: "dial", Err: os.NewSyscallError("connect", syscall.EACCES)}, "run this command as root"},
		{&net.OpError{Op: "dial", Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}, "nothing listens on /x"},
		{errors.New("boom"), "connect to routerd at /x: boom"},
	} {
		got := (&daemon{}).socketError("/x", tt.err).Error()
		if !strings.Contains(got, tt.want) {
			t.Errorf("%v gives %q, want %q in it", tt.err, got, tt.want)
		}
	}
}

// Every command says what it does and shows how it is used.
func TestHelp(t *testing.T) {
	t.Parallel()
	a := &app{daemon: &daemon{}}
	todo := a.command().Commands()
	for len(todo) > 0 {
		c := todo[0]
		todo = append(todo[1:], c.Commands()...)
		if strings.HasPrefix(c.CommandPath(), "routerctl completion") || strings.HasPrefix(c.CommandPath(), "routerctl lab") || c.Name() == "help" {
			continue
		}
		if c.Short == "" || c.Example == "" {
			t.Errorf("%s: short help or example is missing", c.CommandPath())
		}
	}
}
