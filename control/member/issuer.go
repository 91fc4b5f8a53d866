package member

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"github.com/routerd/routerd/control/join"
	"github.com/routerd/routerd/store/embedded"
	"github.com/routerd/routerd/store/etcd"
)

// orderedSecrets is what the issuer of certificates asks of the membership.
type orderedSecrets struct {
	orders etcd.Records
	verify func(digest, signature []byte) bool
	server *embedded.Server
}

func (i orderedSecrets) Follow(ctx context.Context, yield func(map[string]int64)) {
	i.orders.Follow(ctx, yield)
}

func (i orderedSecrets) Secrets(ctx context.Context, node string) (ca, key []byte, err error) {
	b, _, err := i.orders.Read(ctx, node)
	if err != nil {
		return nil, nil, err
	}
	if b == nil {
		return nil, nil, errors.New("no order says so")
	}
	var o Order
	if err := json.Unmarshal(b, &o); err != nil {
		return nil, nil, fmt.Errorf("the order: %w", err)
	}
	if err := o.Check(node, time.Now(), i.verify); err != nil {
		return nil, nil, fmt.Errorf("the order: %w", err)
	}
	if o.Wanted != Voter {
		return nil, nil, errors.New("the order has it become a client")
	}
	return i.server.Secrets()
}

// Issuer takes new hosts and members in while this host's server serves others.
type Issuer struct {
	m   *Membership
	log *slog.Logger

	mu      sync.Mutex
	current *join.Issuer // nil: no other host is served
}

// NewIssuer makes what serves new hosts.
func NewIssuer(m *Membership) *Issuer {
	return &Issuer{m: m, log: m.cfg.Log.With("component", "join")}
}

// Run serves until ctx ends.
func (i *Issuer) Run(ctx context.Context) error {
	set := func(to *join.Issuer) {
		i.mu.Lock()
		defer i.mu.Unlock()
		i.current = to
	}
	return i.m.WhileServing(ctx, func(ctx context.Context, server *embedded.Server) error {
		serving := i.serving(server)
		set(serving)
		defer set(nil)
		return serving.Run(ctx)
	})
}

func (i *Issuer) serving(server *embedded.Server) *join.Issuer {
	m, serves := i.m, server.Listen()
	return join.NewIssuer(join.Config{
		Tokens: m.store.Joins(), Names: m.store, Authority: server, DatastorePort: serves.Port(),
		Members:   orderedSecrets{orders: m.store.Orders(), verify: m.verifier(), server: server},
		Listen:    netip.AddrPortFrom(serves.Addr(), m.cfg.JoinPort),
		ValidName: m.cfg.ValidName,
		Log:       i.log,
	})
}

// now returns what serves new hosts; nil: no other host is served.
func (i *Issuer) now() *join.Issuer {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.current
}

// verifier checks members' signatures by the authority that this host knows.
func (m *Membership) verifier() func(digest, signature []byte) bool {
	return func(digest, signature []byte) bool {
		file := cmp.Or(m.cfg.Datastore.CAFile, filepath.Join(m.cfg.PKIDir, "ca.crt"))
		ca, err := os.ReadFile(file)
		return err == nil && embedded.Verify(ca, digest, signature)
	}
}

// RunAgent has this host be in the datastore's cluster what it is to be.
func (m *Membership) RunAgent(ctx context.Context) error {
	return New(Config{
		Node: m.cfg.Node, Orders: m.store.Orders(), Host: m, Verify: m.verifier(), Changed: m.changed, Log: m.cfg.Log.With("component", "members"),
	}).Run(ctx)
}

// joinAddress is where a server's host takes new hosts and members.
func (m *Membership) joinAddress(server *embedded.Server) (string, error) {
	addr := server.Listen().Addr()
	if addr.IsUnspecified() {
		var err error
		if addr, err = m.cfg.Address(); err != nil {
			return "", err
		}
	}
	return net.JoinHostPort(addr.String(), strconv.Itoa(int(m.cfg.JoinPort))), nil
}
