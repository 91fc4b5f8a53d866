package embedded_test

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/embedded"
	"github.com/routerd/routerd/store/etcd"
)

// memberConfig is a member's on an address of the loopback network of its own, drawn
// so that nobody else has it.
func memberConfig(t *testing.T, name string) embedded.Config {
	t.Helper()
	c := config(t)
	c.Name = name
	n := 2 + rand.Uint32N(1<<24-4) //nolint:gosec // no secret
	c.Listen = netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, byte(n >> 16), byte(n >> 8), byte(n)}), 2379)
	return c
}

func peerAddr(c embedded.Config) netip.AddrPort {
	return netip.AddrPortFrom(c.Listen.Addr(), 2380)
}

// eventually does what the cluster may refuse for a while.
func eventually(t *testing.T, what string, do func(context.Context) error) {
	t.Helper()
	await.Until(t, what, func() error { return do(await.Context(t)) })
}

// enter makes a host a member of the cluster of another's, as far as etcd is concerned.
func enter(t *testing.T, first *embedded.Server, c embedded.Config, s *etcd.Store) (*embedded.Server, embedded.Config) {
	t.Helper()
	ca, key, err := first.Secrets()
	if err != nil {
		t.Fatal(err)
	}
	c.PKIDir = embedded.DefaultPKIDir(c.Dir)
	if err := embedded.InstallSecrets(c.PKIDir, ca, key, time.Now()); err != nil {
		t.Fatal(err)
	}
	if !embedded.HasSecrets(c.PKIDir, ca) {
		t.Error("the secrets are not where they were installed")
	}
	c.Peer = peerAddr(c)
	var id uint64
	eventually(t, "a learner is added", func(ctx context.Context) (err error) {
		id, err = s.AddLearner(ctx, embedded.PeerURL(c.Peer))
		return err
	})
	list, err := s.Members(await.Context(t))
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	for _, m := range list {
		name := m.Name
		if name == "" {
			name = c.Name
		}
		all = append(all, name+"="+m.Peers[0])
	}
	c.Cluster = strings.Join(all, ",")
	server := start(t, c)
	if server.ID() != id {
		t.Errorf("the member is %x, want %x", server.ID(), id)
	}
	eventually(t, "it has a vote", func(ctx context.Context) error { return s.PromoteMember(ctx, id) })
	return server, c
}

// TestGrow: one embedded datastore becomes three while it is written to, without a
// pause; one may end, and come again; one leaves; the last cannot.
func TestGrow(t *testing.T) {
	t.Parallel()
	one := memberConfig(t, "one")
	first := start(t, one)
	s := dial(t, clientOf(first))

	ctx, cancel := context.WithCancel(t.Context())
	var writing sync.WaitGroup
	defer writing.Wait()
	defer cancel()
	var slowest time.Duration
	writing.Go(func() {
		tick := time.NewTicker(time.Millisecond) // not to fill the log
		defer tick.Stop()
		for n := 0; ctx.Err() == nil; n++ {
			<-tick.C
			began := time.Now()
			if _, err := s.Txn(ctx, handle(n)); err != nil && ctx.Err() == nil {
				t.Errorf("a write while the cluster grows: %v", err)
				return
			}
			slowest = max(slowest, time.Since(began))
		}
	})
	if err := first.ServePeers(peerAddr(one)); err != nil {
		t.Fatal(err)
	}
	if err := s.SetPeer(await.Context(t), first.ID(), embedded.PeerURL(peerAddr(one))); err != nil {
		t.Fatal(err)
	}
	second, _ := enter(t, first, memberConfig(t, "two"), s)
	third, three := enter(t, first, memberConfig(t, "three"), s)
	cancel()
	writing.Wait()
	t.Logf("the slowest write while it grew took %s", slowest)

	// Who has a client's certificate is no member.
	_, cert, key := embedded.ClientFiles(first.PKIDir())
	pair, err := tls.LoadX509KeyPair(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	conn, err := tls.Dial("tcp", peerAddr(one).String(), &tls.Config{InsecureSkipVerify: true, Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS13}) //nolint:gosec // it is the other side that is tested
	if err == nil {
		_, err = conn.Read(make([]byte, 1))
		conn.Close()
	}
	if err == nil || !strings.Contains(err.Error(), "tls:") {
		t.Errorf("a client at the members' door: %v", err)
	}

	all := []string{"https://" + first.Listen().String(), "https://" + second.Listen().String(), "https://" + third.Listen().String()}
	s.SetEndpoints(all)
	written := func(n int) {
		t.Helper()
		eventually(t, fmt.Sprint("write ", n), func(ctx context.Context) error {
			_, err := s.Txn(ctx, handle(n))
			if errors.Is(err, store.ErrConflict) {
				err = nil // the answer to an earlier try was lost
			}
			return err
		})
	}
	first.Close()
	written(1_000_001)
	// Started again it needs nobody to tell it what it is, and waits for nobody.
	one.Peer = peerAddr(one)
	first = start(t, one)
	if err := first.Ready(await.Context(t)); err != nil {
		t.Fatal(err)
	}
	third.Close()
	written(1_000_002)
	third = start(t, three)
	if err := third.Ready(await.Context(t)); err != nil {
		t.Fatal(err)
	}

	// One leaves: it may lead.
	s.SetEndpoints(all[:2])
	if err := third.HandOver(); err != nil {
		t.Error(err)
	}
	eventually(t, "the third is removed", func(ctx context.Context) error {
		err := s.RemoveMember(ctx, third.ID())
		if errors.Is(err, etcd.ErrNoMember) {
			err = nil
		}
		return err
	})
	third.Close()
	if to, err := embedded.PutAway(three.Dir, "left", time.Now()); err != nil || !embedded.HasData(to) || embedded.HasData(three.Dir) {
		t.Errorf("the data were put to %q: %v", to, err)
	}
	written(1_000_003)
	// Who is removed still answers, but knows nothing any more.
	s.SetEndpoints(all[:1])
	eventually(t, "the second is removed", func(ctx context.Context) error {
		err := s.RemoveMember(ctx, second.ID())
		if errors.Is(err, etcd.ErrNoMember) {
			err = nil
		}
		return err
	})
	written(1_000_004)
	if err := s.RemoveMember(await.Context(t), first.ID()); !errors.Is(err, etcd.ErrNotNow) {
		t.Errorf("the last member was removed: %v", err)
	}
}

// TestPeersRefused: a server that serves nobody has no members beside it, and what
// stands in the way of the listener is named.
func TestPeersRefused(t *testing.T) {
	t.Parallel()
	alone := start(t, config(t))
	at := netip.MustParseAddrPort("127.0.0.1:0")
	if err := alone.ServePeers(at); err == nil {
		t.Error("a server on a socket alone listens for members")
	}
	c := config(t)
	c.Listen = at
	server := start(t, c)
	if err := server.ServePeers(server.Listen()); err == nil || !strings.Contains(err.Error(), "datastore.embedded.peerPort") {
		t.Errorf("a port that is taken: %v", err)
	}
	if err := server.ServePeers(netip.MustParseAddrPort("192.0.2.1:2380")); err == nil || !strings.Contains(err.Error(), "no interface of this host") {
		t.Errorf("an address of nobody: %v", err)
	}
	c = config(t)
	c.Peer = at
	if s, err := embedded.Start(await.Context(t), c); err == nil {
		s.Close()
		t.Error("a member that serves no clients was started")
	}
}

// TestSign: what the authority signed is verified by its certificate, and nothing else.
func TestSign(t *testing.T) {
	t.Parallel()
	c, other := config(t), config(t)
	c.Listen = netip.MustParseAddrPort("127.0.0.1:0")
	other.Listen = c.Listen
	one, two := start(t, c), start(t, other)
	digest := make([]byte, 32)
	sig, err := one.Sign(digest)
	if err != nil {
		t.Fatal(err)
	}
	mine, err := one.CA()
	if err != nil {
		t.Fatal(err)
	}
	foreign, err := two.CA()
	if err != nil {
		t.Fatal(err)
	}
	altered := append([]byte{1}, digest[1:]...)
	if !embedded.Verify(mine, digest, sig) || embedded.Verify(foreign, digest, sig) || embedded.Verify(mine, altered, sig) || embedded.Verify(nil, digest, sig) {
		t.Error("signatures are not told apart")
	}
	dir := filepath.Join(t.TempDir(), "pki")
	if err := embedded.IssueClient(one.PKIDir(), dir, "host12"); err != nil {
		t.Fatal(err)
	}
	ca, cert, key := embedded.ClientFiles(dir)
	s := dial(t, etcd.Config{Endpoints: []string{"https://" + one.Listen().String()}, CAFile: ca, CertFile: cert, KeyFile: key})
	if _, err := s.Txn(await.Context(t), handle(1)); err != nil {
		t.Errorf("with the certificate that was issued: %v", err)
	}
	if err := embedded.ForgetSecrets(one.PKIDir()); err != nil {
		t.Error(err)
	}
	if embedded.HasSecrets(one.PKIDir(), mine) {
		t.Error("the authority's key is still there")
	}
}
