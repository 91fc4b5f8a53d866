package clustertest

import (
	"net/url"
	"sync"
	"testing"
	"time"

	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"

	"github.com/routerd/routerd/integration/await"
)

// StartAuth starts an etcd of one member in this process, in dir and on a unix socket, for
// tests with users: each user and each login has a password hashed, which under the race
// detector takes half a second of a processor at etcd's usual cost, and little here. It runs
// until stop, which may be called again, or the end of the test. Another may then start in dir.
func StartAuth(tb testing.TB, dir, socket string) (stop func()) {
	tb.Helper()
	c := embed.NewConfig()
	c.Dir, c.ZapLoggerBuilder, c.BcryptCost = dir, embed.NewZapLoggerBuilder(zap.NewNop()), 4
	c.ListenClientUrls = []url.URL{{Scheme: "unix", Path: socket}}
	c.AdvertiseClientUrls = c.ListenClientUrls
	c.ListenPeerUrls = []url.URL{{Scheme: "unix", Path: socket + "p"}}
	c.AdvertisePeerUrls = []url.URL{{Scheme: "http", Host: "127.0.0.1:0"}}
	c.InitialCluster = "default=http://127.0.0.1:0"
	e, err := embed.StartEtcd(c)
	if err != nil {
		tb.Fatal(err)
	}
	stop = sync.OnceFunc(e.Close) // etcd's panics when called again
	tb.Cleanup(stop)
	select {
	case <-e.Server.ReadyNotify():
	case err := <-e.Err():
		tb.Fatal(err)
	case <-time.After(await.Patience):
		tb.Fatalf("etcd is not ready after %s", await.Patience)
	}
	return stop
}
