// Package embedded runs an etcd server in this process: the datastore of those who
// configure none. It is a cluster of one member, or one member of several, each on
// another host. It listens on a unix socket that only root may open, and on addresses,
// one for clients and one for the other members, only when told to, then with TLS and
// certificates on both sides, which it makes itself.
package embedded

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"go.etcd.io/etcd/client/pkg/v3/transport"
	"go.etcd.io/etcd/server/v3/embed"
	"google.golang.org/grpc"
)

// Config says how to run the server.
type Config struct {
	// Dir holds the data. It is made when missing. Required.
	Dir string

	// Socket is the absolute path of the unix socket. Its directory is made,
	// for root alone, when missing. Required.
	Socket string

	// Listen is an address to listen on too, with TLS. The zero value means
	// the socket alone. Port 0 takes a free one: see [Server.Listen].
	Listen netip.AddrPort

	// Hosts are more names and addresses by which clients reach Listen.
	Hosts []string

	// Peer is where the other members of the cluster reach this one. The zero value
	// means that there are none, or none yet: see [Server.ServePeers]. It wants Listen.
	// With it [Start] does not wait until the server takes requests, for which more than
	// half of the members must be up: see [Server.Ready].
	Peer netip.AddrPort

	// Cluster is the cluster that a new member enters, as etcd writes it: NAME=URL, for
	// all members, separated by commas. It counts only while there are no data.
	Cluster string

	// PKIDir holds the certificates for Listen. Empty means "pki" beside Dir.
	PKIDir string

	// Name is the member's name in etcd's own records. Empty means "routerd".
	Name string

	// Logger gets what etcd warns of. Nil: nothing is logged.
	Logger *slog.Logger
}

// DefaultPKIDir returns the directory of the certificates that belong to a
// data directory.
func DefaultPKIDir(dir string) string { return filepath.Join(filepath.Dir(filepath.Clean(dir)), "pki") }

const (
	// tick and election are etcd's heartbeat and election timeout. Where there is
	// nobody to elect but ourselves, a short timeout is a quick start.
	tick     = 50 * time.Millisecond
	election = 5 * tick

	// electionBesideOthers is how long a member that may have others waits for its
	// leader: a busy host or a slow disk is not to count as a dead one.
	electionBesideOthers = 10 * tick

	// retention is how much history there is for watches that lag. Who lags
	// more reads the state again; IPAM rewrites kilobytes at each allocation,
	// and an hour of that would be gigabytes.
	retention = "5m"
	quota     = 4 << 30 // bytes of the database

	// progress is how often a watch on a quiet store receives the revision.
	progress = time.Minute

	// renewal is how often the certificates' age is looked at. etcd reads the
	// files for each connection.
	renewal = 12 * time.Hour

	// closing bounds the orderly end of a server that has already failed.
	closing = 10 * time.Second

	// peerHost stands where etcd wants an address for the other members, of which
	// there are none.
	peerHost = "peerless"
	peerURL  = "unix://" + peerHost

	// maxSocket is what a unix address holds (unix(7)), without the final NUL.
	maxSocket = 107
)

// Server is a running server. Make one with [Start].
type Server struct {
	conf Config
	log  *slog.Logger
	lock *os.File
	etcd *embed.Etcd

	mu     sync.Mutex
	grpc   []*grpc.Server
	pkiErr error     // why the certificates were not renewed
	peer   *peerDoor // nil: no other member is served

	dead    chan string // what etcd said as it gave up
	errs    chan error
	stop    chan struct{}
	closed  sync.Once
	workers sync.WaitGroup
}

// Start runs a server until [Server.Close], and returns when it answers. ctx
// bounds the start only. What stands in the way (a directory in use, a port
// taken, data of a newer version) comes back as an error that names it and the
// cure.
func Start(ctx context.Context, c Config) (*Server, error) {
	s, err := start(ctx, c)
	if err != nil {
		return nil, fmt.Errorf("embedded datastore: %w", err)
	}
	return s, nil
}

func start(ctx context.Context, c Config) (_ *Server, err error) {
	if err := c.complete(); err != nil {
		return nil, err
	}
	s := &Server{
		conf: c,
		log:  c.Logger,
		dead: make(chan string, 1),
		errs: make(chan error, 1),
		stop: make(chan struct{}),
	}
	if s.lock, err = lockDir(c.Dir); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			s.lock.Close()
		}
	}()
	if err := inspect(c.Dir, c.Peer.IsValid()); err != nil {
		return nil, err
	}
	for _, path := range []string{c.Socket, c.Socket + httpSuffix} {
		if err := prepareSocket(path); err != nil {
			return nil, err
		}
	}
	if c.Listen.IsValid() {
		if err := s.certify(); err != nil {
			return nil, err
		}
	}
	if err := s.launch(); err != nil {
		return nil, err
	}
	if err := s.open(ctx); err != nil {
		s.end()
		return nil, err
	}
	s.workers.Go(s.supervise)
	return s, nil
}

// complete checks the configuration and fills in what was left out.
func (c *Config) complete() error {
	switch {
	case c.Dir == "":
		return errors.New("no data directory is set")
	case !filepath.IsAbs(c.Socket):
		return fmt.Errorf("socket %q: want an absolute path", c.Socket)
	case c.Peer.IsValid() && !c.Listen.IsValid():
		return fmt.Errorf("the address %s for other members goes with one for clients, and there is none", c.Peer)
	case len(c.Socket+httpSuffix) > maxSocket:
		return fmt.Errorf("socket %q: the path has %d bytes, at most %d are possible: choose a shorter one", c.Socket, len(c.Socket), maxSocket-len(httpSuffix))
	}
	if c.PKIDir == "" {
		c.PKIDir = DefaultPKIDir(c.Dir)
	}
	if c.Name == "" {
		c.Name = "routerd"
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return nil
}

// certify makes or renews the certificates.
func (s *Server) certify() error {
	n, err := serverNames(s.conf.Listen.Addr(), s.conf.Hosts, net.InterfaceAddrs)
	if err != nil {
		return err
	}
	return pki{s.conf.PKIDir, time.Now}.ensure(n)
}

// serverNames returns what the server's certificate must be for. A server that
// listens on all addresses is reached by any of the host's.
func serverNames(listen netip.Addr, hosts []string, interfaces func() ([]net.Addr, error)) (names, error) {
	n := names{dns: []string{"localhost"}, ips: []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback()}}
	for _, h := range hosts {
		if ip, err := netip.ParseAddr(h); err == nil {
			n.ips = append(n.ips, ip.WithZone(""))
		} else {
			n.dns = append(n.dns, h)
		}
	}
	if !listen.IsUnspecified() {
		n.ips = append(n.ips, listen.WithZone(""))
		return n, nil
	}
	addrs, err := interfaces()
	if err != nil {
		return names{}, fmt.Errorf("read this host's addresses: %w", err)
	}
	for _, a := range addrs {
		if p, err := netip.ParsePrefix(a.String()); err == nil && p.Addr().IsGlobalUnicast() {
			n.ips = append(n.ips, p.Addr())
		}
	}
	return n, nil
}

// options is etcd's own configuration.
func (s *Server) options() *embed.Config {
	c := embed.NewConfig()
	c.Name, c.Dir = s.conf.Name, s.conf.Dir
	c.ZapLoggerBuilder = embed.NewZapLoggerBuilder(zapLogger(s.log, s.died))
	c.LogLevel = "warn"

	socket := url.URL{Scheme: "unix", Path: s.conf.Socket}
	c.ListenClientUrls = []url.URL{socket}
	c.ListenClientHttpUrls = []url.URL{{Scheme: "unix", Path: s.conf.Socket + httpSuffix}}
	if s.conf.Listen.IsValid() {
		c.ListenClientUrls = append(c.ListenClientUrls, url.URL{Scheme: "https", Host: s.conf.Listen.String()})
		c.ClientTLSInfo = transport.TLSInfo{
			CertFile:       filepath.Join(s.conf.PKIDir, "server.crt"),
			KeyFile:        filepath.Join(s.conf.PKIDir, "server.key"),
			TrustedCAFile:  filepath.Join(s.conf.PKIDir, "ca.crt"),
			ClientCertAuth: true,
		}
		c.TlsMinVersion = "TLS1.2"
		// It may get other members while it runs.
		c.PeerTLSInfo = transport.TLSInfo{
			CertFile:      filepath.Join(s.conf.PKIDir, "peer.crt"),
			KeyFile:       filepath.Join(s.conf.PKIDir, "peer.key"),
			TrustedCAFile: filepath.Join(s.conf.PKIDir, "ca.crt"),
		}
	}
	c.AdvertiseClientUrls = c.ListenClientUrls

	// The door for other members is our own, which may be opened later. A member
	// must have a URL, which is written down when it is made.
	c.ListenPeerUrls = nil
	c.AdvertisePeerUrls = []url.URL{{Scheme: "unix", Host: peerHost}}
	if s.conf.Peer.IsValid() {
		c.AdvertisePeerUrls = []url.URL{{Scheme: "https", Host: s.conf.Peer.String()}}
	}
	c.InitialCluster = c.InitialClusterFromName(c.Name)
	if s.conf.Cluster != "" {
		c.InitialCluster, c.ClusterState = s.conf.Cluster, embed.ClusterStateFlagExisting
	}

	c.TickMs, c.ElectionMs = uint(tick.Milliseconds()), uint(election.Milliseconds())
	if s.conf.Listen.IsValid() {
		c.ElectionMs = uint(electionBesideOthers.Milliseconds())
	}
	c.AutoCompactionMode, c.AutoCompactionRetention = embed.CompactorModePeriodic, retention
	c.QuotaBackendBytes = quota
	c.BootstrapDefragThresholdMegabytes = 256
	c.WatchProgressNotifyInterval = progress
	c.EnableGRPCGateway = false
	c.ServiceRegister = func(g *grpc.Server) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.grpc = append(s.grpc, g)
	}
	return c
}

// died is notified that etcd gave up.
func (s *Server) died(msg string) {
	select {
	case s.dead <- msg:
	default:
	}
}

// launch starts etcd. Where it would rather panic, that becomes an error.
func (s *Server) launch() error {
	done := make(chan error, 1)
	go func() {
		err := errors.New("etcd ended its start without a word")
		defer func() {
			if p := recover(); p != nil {
				// It does so of some kinds of damaged files.
				s.died(fmt.Sprintf("etcd panicked: %v", p))
			}
			done <- err
		}()
		s.etcd, err = embed.StartEtcd(s.options())
	}()
	err := <-done
	if err == nil {
		return nil
	}
	select {
	case msg := <-s.dead:
		err = fmt.Errorf("etcd cannot start from %s: %s: restore the directory from a backup, or move it away to begin anew", s.conf.Dir, msg)
	default:
	}
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return fmt.Errorf("listen on %s: %w: another program has that port; stop it, or choose another port", s.conf.Listen, err)
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		return fmt.Errorf("listen on %s: %w: no interface of this host has that address", s.conf.Listen, err)
	}
	return err
}

// open closes the sockets to all but root, opens the door for other members, and waits
// until the server takes requests if it has none.
func (s *Server) open(ctx context.Context) error {
	for _, path := range []string{s.conf.Socket, s.conf.Socket + httpSuffix} {
		if err := os.Chmod(path, 0o600); err != nil {
			return fmt.Errorf("close the socket to others: %w", err)
		}
	}
	if s.conf.Peer.IsValid() {
		return s.ServePeers(s.conf.Peer)
	}
	return s.Ready(ctx)
}

// Ready waits until the server takes requests.
func (s *Server) Ready(ctx context.Context) error {
	select {
	case <-s.etcd.Server.ReadyNotify():
		return nil
	case msg := <-s.dead:
		s.died(msg) // for others
		return fmt.Errorf("etcd gave up: %s", msg)
	case <-s.etcd.Server.StopNotify():
		return errors.New("etcd stopped during its start")
	case err := <-s.etcd.Err():
		return fmt.Errorf("etcd stopped during its start: %w", err)
	case <-ctx.Done():
		return fmt.Errorf("etcd in %s is not ready: %w", s.conf.Dir, context.Cause(ctx))
	}
}

// supervise renews certificates, and reports when etcd stops by itself.
func (s *Server) supervise() {
	defer close(s.errs)
	timer := time.NewTicker(renewal)
	defer timer.Stop()
	for {
		select {
		case <-s.stop:
			return
		case <-timer.C:
			if s.conf.Listen.IsValid() {
				err := s.certify()
				if err != nil {
					s.log.Error("renew the datastore's certificates", "error", err)
				}
				s.mu.Lock()
				s.pkiErr = err
				s.mu.Unlock()
			}
			continue
		case msg := <-s.dead:
			s.died(msg) // for Close
			s.errs <- fmt.Errorf("embedded datastore: etcd gave up: %s", msg)
		case err := <-s.etcd.Err():
			s.errs <- fmt.Errorf("embedded datastore: %w", err)
		case <-s.etcd.Server.StopNotify():
			s.errs <- errors.New("embedded datastore: etcd stopped by itself")
		}
		return
	}
}

// Endpoint returns the endpoint of the socket, for etcd.Config.
func (s *Server) Endpoint() string { return Endpoint(s.conf.Socket) }

// Endpoint returns the endpoint of a server's socket.
func Endpoint(socket string) string { return "unix://" + socket }

// Listen returns the address that the server listens on with TLS, with the
// port that it got. It is invalid when there is none.
func (s *Server) Listen() netip.AddrPort {
	for _, l := range s.etcd.Clients {
		if a, ok := l.Addr().(*net.TCPAddr); ok {
			p := a.AddrPort()
			return netip.AddrPortFrom(p.Addr().Unmap(), p.Port())
		}
	}
	return netip.AddrPort{}
}

// CertificateError returns why the server's certificates could not be renewed when that
// was last tried.
func (s *Server) CertificateError() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.pkiErr
}

// PKIDir returns the directory of the certificates: see [ClientFiles].
func (s *Server) PKIDir() string { return s.conf.PKIDir }

// Err gives one error when the server stops by itself, which it cannot
// recover from. The channel is closed after that, and by [Server.Close].
func (s *Server) Err() <-chan error { return s.errs }

// Close stops the server and waits until it is gone. Watches of clients are
// cut off. The data stay.
func (s *Server) Close() {
	s.closed.Do(func() {
		close(s.stop)
		s.workers.Wait()
		s.end()
	})
}

func (s *Server) end() {
	// etcd waits some seconds for open watches to end by themselves, which
	// they do not.
	s.mu.Lock()
	servers := slices.Clone(s.grpc)
	s.mu.Unlock()
	for _, g := range servers {
		g.Stop()
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.etcd.Close()
	}()
	var late <-chan time.Time
	if len(s.dead) > 0 {
		// A part of etcd that gave up may have left locks behind; then there is
		// nothing to wait for.
		t := time.NewTimer(closing)
		defer t.Stop()
		late = t.C
	}
	select {
	case <-done:
	case <-late:
		s.log.Error("the embedded datastore does not end", "dir", s.conf.Dir)
	}
	s.closePeers()
	s.lock.Close()
}
