package embedded_test

import (
	"context"
	"net/netip"
	"path/filepath"
	"sync"
	"testing"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.uber.org/goleak"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/embedded"
	"github.com/routerd/routerd/store/etcd"
	"github.com/routerd/routerd/store/storetest"
)

// config is a server's configuration in a fresh directory.
func config(t *testing.T) embedded.Config {
	t.Helper()
	dir := t.TempDir()
	return embedded.Config{Dir: filepath.Join(dir, "data"), Socket: filepath.Join(dir, "run", "s.sock")}
}

func start(t *testing.T, c embedded.Config) *embedded.Server {
	t.Helper()
	s, err := embedded.Start(await.Context(t), c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

func dial(t *testing.T, c etcd.Config) *etcd.Store {
	t.Helper()
	s, err := etcd.Open(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// lab is a server and a client, with the suite's faults.
type lab struct {
	*etcd.Store
	t    *testing.T
	conf embedded.Config

	mu     sync.Mutex
	server *embedded.Server
}

func (l *lab) Compact(ctx context.Context) error {
	_, rev, err := l.List(ctx, store.KindIPAMConfig, "")
	if err != nil {
		return err
	}
	_, err = etcdserverpb.NewKVClient(l.Conn()).Compact(ctx, &etcdserverpb.CompactionRequest{Revision: int64(rev), Physical: true})
	return err
}

// Interrupt stops the server; heal starts it again on the same data.
func (l *lab) Interrupt() func() {
	l.mu.Lock()
	l.server.Close()
	return func() {
		defer l.mu.Unlock()
		l.server = start(l.t, l.conf)
	}
}

func (l *lab) PutRaw(ctx context.Context, path string, raw []byte) error {
	_, err := etcdserverpb.NewKVClient(l.Conn()).Put(ctx, &etcdserverpb.PutRequest{Key: []byte(path), Value: raw})
	return err
}

func TestConformanceUnix(t *testing.T) {
	t.Parallel()
	storetest.Run(t, func(t *testing.T) store.Store {
		l := &lab{t: t, conf: config(t)}
		l.server = start(t, l.conf)
		l.Store = dial(t, etcd.Config{Endpoints: []string{l.server.Endpoint()}})
		return l
	})
}

func TestConformanceTLS(t *testing.T) {
	t.Parallel()
	storetest.Run(t, func(t *testing.T) store.Store {
		l := &lab{t: t, conf: config(t)}
		l.conf.Listen = netip.MustParseAddrPort("127.0.0.1:0")
		l.server = start(t, l.conf)
		l.conf.Listen = l.server.Listen() // the same port after a restart
		l.Store = dial(t, clientOf(l.server))
		return l
	})
}

// clientOf configures a client of the address that a server listens on.
func clientOf(s *embedded.Server) etcd.Config {
	ca, cert, key := embedded.ClientFiles(s.PKIDir())
	return etcd.Config{
		Endpoints: []string{"https://" + s.Listen().String()},
		CAFile:    ca, CertFile: cert, KeyFile: key,
	}
}

func verifyMain(m *testing.M) { goleak.VerifyTestMain(m) }
