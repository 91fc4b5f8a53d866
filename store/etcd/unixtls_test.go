package etcd_test

import (
	"context"
	"crypto/tls"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store/embedded"
)

// TestUnixEndpointWithTLS holds what docs/commands.md says of calicoctl: a client of
// etcd's library that is given a TLS configuration, as Calico's always is, begins a TLS
// handshake on unix:// too, which no plain socket answers. With unix:// alone it works.
func TestUnixEndpointWithTLS(t *testing.T) {
	t.Parallel()
	endpoint := start(t, embedded.Config{}).Endpoint()
	for _, tt := range []struct {
		conf *tls.Config
		ok   bool
	}{{nil, true}, {&tls.Config{MinVersion: tls.VersionTLS12}, false}} {
		c, err := clientv3.New(clientv3.Config{Endpoints: []string{endpoint}, TLS: tt.conf, Logger: zap.NewNop()})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := await.Context(t), context.CancelFunc(func() {})
		if !tt.ok {
			ctx, cancel = context.WithTimeout(ctx, time.Second) // the time is to run out
		}
		_, err = c.Get(ctx, "/calico/ready")
		cancel()
		c.Close()
		if (err == nil) != tt.ok {
			t.Errorf("with TLS %v: %v", tt.conf != nil, err)
		}
	}
}
