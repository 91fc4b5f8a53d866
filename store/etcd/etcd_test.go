package etcd_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/status"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/embedded"
	"github.com/routerd/routerd/store/embedded/clustertest"
	"github.com/routerd/routerd/store/etcd"
)

func start(t *testing.T, c embedded.Config) *embedded.Server {
	t.Helper()
	if c.Dir == "" {
		dir := t.TempDir()
		c.Dir, c.Socket = filepath.Join(dir, "data"), filepath.Join(dir, "s.sock")
	}
	s, err := embedded.Start(await.Context(t), c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

func open(t *testing.T, c etcd.Config) *etcd.Store {
	t.Helper()
	s, err := etcd.Open(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func write(ctx context.Context, s store.Store) error {
	_, err := s.Txn(ctx, store.Op{Action: store.Put, Object: store.Object{Key: store.IPAMConfigKey(), Value: &store.IPAMConfig{AutoAllocateBlocks: true}}})
	return err
}

// freePort returns an address at which nobody listens.
func freePort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// blackHole returns an address that takes connections and never answers.
func blackHole(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		var conns []net.Conn
		for {
			c, err := l.Accept()
			if err != nil {
				break
			}
			conns = append(conns, c)
		}
		for _, c := range conns {
			c.Close()
		}
	}()
	t.Cleanup(func() {
		l.Close()
		<-done
	})
	return l.Addr().String()
}

func TestUnreachable(t *testing.T) {
	t.Parallel()
	server := start(t, embedded.Config{
		Dir: filepath.Join(t.TempDir(), "data"), Socket: filepath.Join(t.TempDir(), "s.sock"),
		Listen: netip.MustParseAddrPort("127.0.0.1:0"),
	})
	other := start(t, embedded.Config{
		Dir: filepath.Join(t.TempDir(), "data"), Socket: filepath.Join(t.TempDir(), "s.sock"),
		Listen: netip.MustParseAddrPort("0.0.0.0:0"),
	})
	ca, cert, key := embedded.ClientFiles(server.PKIDir())
	otherCA, otherCert, otherKey := embedded.ClientFiles(other.PKIDir())
	secure, plain := "https://"+server.Listen().String(), "http://"+server.Listen().String()
	wrongName := fmt.Sprintf("https://127.0.0.9:%d", other.Listen().Port())
	nobody := freePort(t)

	tests := []struct {
		name string
		conf etcd.Config
		want string
	}{
		{"nobody listens", etcd.Config{Endpoints: []string{"http://" + nobody}}, "connection refused"},
		{"nobody listens, with a user", etcd.Config{Endpoints: []string{"http://" + nobody}, Username: "u", Password: "secret"}, "connection refused"},
		{"no socket", etcd.Config{Endpoints: []string{"unix:///nonexistent/s.sock"}}, "there is no such socket"},
		{"unknown host", etcd.Config{Endpoints: []string{"http://nothing.invalid:2379"}}, "cannot be resolved"},
		{"unknown authority", etcd.Config{Endpoints: []string{secure}, CAFile: otherCA, CertFile: cert, KeyFile: key}, "unknown authority: set the CA file"},
		{"system's authorities", etcd.Config{Endpoints: []string{secure}, CertFile: cert, KeyFile: key}, "unknown authority: set the CA file"},
		{"no client certificate", etcd.Config{Endpoints: []string{secure}, CAFile: ca}, "set the certificate and key files"},
		// TLS 1.3 lets the client learn of the refusal, or of the closed
		// connection first; both texts name the certificate.
		{"another authority's client", etcd.Config{Endpoints: []string{secure}, CAFile: ca, CertFile: otherCert, KeyFile: otherKey}, "the client's certificate"},
		{"without TLS", etcd.Config{Endpoints: []string{plain}}, "it may want https://"},
		{"another name", etcd.Config{Endpoints: []string{wrongName}, CAFile: otherCA, CertFile: otherCert, KeyFile: otherKey}, "the server's certificate is for other names: certificate is valid for"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			s := open(t, tt.conf)
			ctx := await.Context(t)
			_, getErr := s.Get(ctx, store.IPAMConfigKey())
			_, _, listErr := s.List(ctx, store.KindIPPool, "")
			for what, err := range map[string]error{"Get": getErr, "List": listErr, "Txn": write(ctx, s)} {
				if !errors.Is(err, store.ErrUnavailable) || !strings.Contains(err.Error(), tt.want) || !strings.Contains(err.Error(), tt.conf.Endpoints[0]) {
					t.Errorf("%s: got %v, want %q", what, err, tt.want)
				}
				if err != nil && (strings.Contains(err.Error(), "rpc error") || strings.Contains(err.Error(), "secret")) {
					t.Errorf("%s: %v", what, err)
				}
			}
			if ctx.Err() != nil {
				t.Error("the failure is known, and yet the call waited for its deadline")
			}
		})
	}
}

func TestSilentServer(t *testing.T) {
	t.Parallel()
	for _, conf := range []etcd.Config{
		{Endpoints: []string{"http://" + blackHole(t)}},
		{Endpoints: []string{"https://" + blackHole(t)}},
		{Endpoints: []string{"http://" + blackHole(t)}, Username: "u", Password: "secret"},
	} {
		s := open(t, conf)
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		err := write(ctx, s)
		if !errors.Is(err, store.ErrUnavailable) || !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), conf.Endpoints[0]+": no answer in time") {
			t.Errorf("%s: %v", conf.Endpoints[0], err)
		}
		cancel()
		ctx, cancel = context.WithCancel(t.Context())
		time.AfterFunc(50*time.Millisecond, cancel)
		if _, err := s.Get(ctx, store.IPAMConfigKey()); !errors.Is(err, context.Canceled) || errors.Is(err, store.ErrUnavailable) {
			t.Errorf("%s: %v", conf.Endpoints[0], err)
		}
	}
}

// watch watches until the test ends.
func watch(t *testing.T, s *etcd.Store, kinds ...store.Kind) <-chan store.Batch {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	ch := s.Watch(ctx, kinds...)
	t.Cleanup(func() {
		cancel()
		for range ch {
		}
	})
	return ch
}

// take returns the next batch of a watch that satisfies done.
func take(t *testing.T, ch <-chan store.Batch, what string, done func(store.Batch) bool) store.Batch {
	t.Helper()
	deadline := time.After(await.Patience)
	for {
		select {
		case b, ok := <-ch:
			if !ok {
				t.Fatalf("the watch ended before: %s", what)
			}
			if done(b) {
				return b
			}
		case <-deadline:
			t.Fatalf("not within %v: %s", await.Patience, what)
		}
	}
}

func isSynced(b store.Batch) bool { return b.Synced }

// TestWatchBeforeServer: a daemon that starts before its store is told so
// once, and gets the state when the store comes.
func TestWatchBeforeServer(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	conf := embedded.Config{Dir: filepath.Join(dir, "data"), Socket: filepath.Join(dir, "s.sock")}
	s := open(t, etcd.Config{Endpoints: []string{"unix://" + conf.Socket}})
	ch := watch(t, s, store.KindIPAMConfig)
	first := take(t, ch, "notice", func(store.Batch) bool { return true })
	if !errors.Is(first.Err, store.ErrUnavailable) || !strings.Contains(first.Err.Error(), "no such socket") || first.Synced {
		t.Errorf("got %+v", first)
	}
	start(t, conf)
	b := take(t, ch, "the state", func(b store.Batch) bool {
		if b.Err != nil {
			t.Errorf("a second notice: %v", b.Err)
		}
		return b.Synced
	})
	if len(b.Events) != 0 {
		t.Errorf("got %+v", b)
	}
}

// However large a state is, it is read as long as its pages come; when they do not,
// that is told as an outage.
func TestWatchLargeState(t *testing.T) {
	t.Parallel()
	server := start(t, embedded.Config{})
	var delay atomic.Int64
	var pages atomic.Int32
	slowly := func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
		if method == "/etcdserverpb.KV/Range" {
			pages.Add(1)
			select {
			case <-time.After(time.Duration(delay.Load())):
			case <-ctx.Done():
				return status.FromContextError(ctx.Err()).Err()
			}
		}
		return invoke(ctx, method, req, reply, cc, opts...)
	}
	s := open(t, etcd.Config{Endpoints: []string{server.Endpoint()}, DialOptions: []grpc.DialOption{grpc.WithChainUnaryInterceptor(slowly)}})
	const keys, patience = 5500, time.Second
	for first := 0; first < keys; first += store.MaxOps {
		var ops []store.Op
		for i := first; i < min(first+store.MaxOps, keys); i++ {
			n := store.New(store.KindNode).(*store.Node)
			n.Name = fmt.Sprint("node", i)
			ops = append(ops, store.Op{If: store.IfAbsent(), Action: store.Put, Object: store.Object{Key: store.ResourceKey(store.KindNode, n.Name), Value: n}})
		}
		if _, err := s.Txn(t.Context(), ops...); err != nil {
			t.Fatal(err)
		}
	}
	s.SetPageTimeout(patience)
	delay.Store(int64(patience / 4))
	start := time.Now()
	b := take(t, watch(t, s, store.KindNode), "a state of six pages", func(b store.Batch) bool { return isSynced(b) || b.Err != nil })
	if b.Err != nil || len(b.Events) != keys || pages.Load() < 6 || time.Since(start) < patience {
		t.Errorf("%d nodes after %v and %d pages, error %v", len(b.Events), time.Since(start), pages.Load(), b.Err)
	}
	delay.Store(int64(time.Hour))
	b = take(t, watch(t, s, store.KindNode), "an outage", func(b store.Batch) bool { return isSynced(b) || b.Err != nil })
	if !errors.Is(b.Err, store.ErrUnavailable) || !strings.Contains(b.Err.Error(), "no answer in time") {
		t.Errorf("error %v", b.Err)
	}
}

// TestWatchReplacedStore: the server comes back with other data, at a lower
// revision. A watch that only went on from its revision would wait for ever; and what
// consumers get as revisions does not go back.
func TestWatchReplacedStore(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	conf := embedded.Config{Dir: filepath.Join(dir, "data"), Socket: filepath.Join(dir, "s.sock")}
	server := start(t, conf)
	s := open(t, etcd.Config{Endpoints: []string{server.Endpoint()}})
	for range 10 {
		if err := write(t.Context(), s); err != nil {
			t.Fatal(err)
		}
	}
	ch := watch(t, s, store.KindIPAMConfig, store.KindIPAMHandle)
	before := take(t, ch, "the state", isSynced)

	server.Close()
	if err := os.RemoveAll(conf.Dir); err != nil {
		t.Fatal(err)
	}
	start(t, conf)
	after := take(t, ch, "the new state", isSynced)
	if after.Revision <= before.Revision || len(after.Events) != 1 || !after.Events[0].Deleted() || after.Events[0].Key != store.IPAMConfigKey() {
		t.Errorf("before: %+v, after: %+v", before, after)
	}
	if err := write(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	b := take(t, ch, "a change", func(b store.Batch) bool { return len(b.Events) > 0 })
	if len(b.Events) != 1 || b.Events[0].Deleted() {
		t.Errorf("got %+v", b)
	}
}

// TestPassword runs against a server with users, also over its restart, which
// makes it forget its tokens.
func TestPassword(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	data, socket := filepath.Join(dir, "data"), filepath.Join(dir, "s.sock")
	stop := clustertest.StartAuth(t, data, socket)
	admin := open(t, etcd.Config{Endpoints: []string{"unix://" + socket}, Username: "root", Password: "secret"})
	// Users are off: user and password do no harm.
	if err := write(t.Context(), admin); err != nil {
		t.Fatal(err)
	}
	auth := etcdserverpb.NewAuthClient(admin.Conn())
	for _, step := range []func() error{
		func() error {
			_, err := auth.UserAdd(t.Context(), &etcdserverpb.AuthUserAddRequest{Name: "root", Password: "secret"})
			return err
		},
		func() error {
			_, err := auth.UserAdd(t.Context(), &etcdserverpb.AuthUserAddRequest{Name: "guest", Password: "secret"})
			return err
		},
		func() error {
			_, err := auth.UserGrantRole(t.Context(), &etcdserverpb.AuthUserGrantRoleRequest{User: "root", Role: "root"})
			return err
		},
		func() error {
			_, err := auth.AuthEnable(t.Context(), &etcdserverpb.AuthEnableRequest{})
			return err
		},
	} {
		if err := step(); err != nil {
			t.Fatal(err)
		}
	}
	for _, tt := range []struct{ user, password, want string }{
		{"root", "secret", ""},
		{"root", "wrong", "authentication failed"},
		{"nobody", "secret", "authentication failed"},
		{"", "", "authentication is required"},
		{"guest", "secret", "permission denied"},
	} {
		s := open(t, etcd.Config{Endpoints: []string{"unix://" + socket}, Username: tt.user, Password: tt.password})
		err := write(t.Context(), s)
		switch {
		case tt.want == "" && err != nil:
			t.Errorf("%s: %v", tt.user, err)
		case tt.want != "" && (!errors.Is(err, store.ErrUnavailable) || !strings.Contains(err.Error(), tt.want) || strings.Contains(err.Error(), "secret")):
			t.Errorf("%s: got %v, want %q", tt.user, err, tt.want)
		}
	}

	if err := write(t.Context(), admin); err != nil {
		t.Fatal(err)
	}
	ch := watch(t, admin, store.KindIPAMConfig)
	take(t, ch, "the state", isSynced)
	stop()
	clustertest.StartAuth(t, data, socket)
	take(t, ch, "the state after the restart", isSynced)
	if err := write(t.Context(), admin); err != nil {
		t.Error(err)
	}
	take(t, ch, "a change after the restart", func(b store.Batch) bool { return len(b.Events) == 1 })
}

func TestConn(t *testing.T) {
	t.Parallel()
	s := open(t, etcd.Config{Endpoints: []string{start(t, embedded.Config{}).Endpoint()}})
	if err := write(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	resp, err := etcdserverpb.NewKVClient(s.Conn()).Range(t.Context(), &etcdserverpb.RangeRequest{Key: []byte("/calico/ipam/v2/config")})
	if err != nil || len(resp.Kvs) != 1 {
		t.Fatalf("got %v, %v", resp, err)
	}
	if diff := cmp.Diff(`{"auto_allocate_blocks":true}`, string(resp.Kvs[0].Value)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
