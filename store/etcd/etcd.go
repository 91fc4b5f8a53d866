// Package etcd is the [store.Store] over etcd v3 (3.4 and later), in Calico's
// key layout.
package etcd

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"

	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/internal/backend"
)

const (
	defaultDialTimeout      = 10 * time.Second // these three are Calico's
	defaultKeepaliveTime    = 30 * time.Second
	defaultKeepaliveTimeout = 10 * time.Second

	// reconnectMax bounds the pause between tries to connect. gRPC's own bound
	// of two minutes is how long a host would not notice that etcd is back.
	reconnectMax = 3 * time.Second

	// readTries is how often a read is tried that an endpoint could not serve.
	// There may be a better endpoint; a longer wait is the caller's affair.
	readTries = 3

	// pageSize is how many keys one request of a list asks for: about a
	// megabyte of endpoints.
	pageSize = 1000
	// pageTimeout bounds each of these requests: a state may be as large as it is
	// as long as something comes.
	pageTimeout = 10 * time.Second
)

// Store is a client of one etcd cluster. Its methods are safe for concurrent
// use. Make one with [Open].
//
// A transaction that fails with [store.ErrUnavailable] may have taken place
// all the same: its answer can be lost. Conditions make a second try safe.
type Store struct {
	store.KeyLocks

	client *clientv3.Client
	conn   *grpc.ClientConn
	log    *slog.Logger
	where  string // the endpoints, for errors
	secure bool   // they are reached by TLS

	pageTimeout  time.Duration
	historyCheck time.Duration
	rightsCheck  time.Duration
	history      *history

	ctx     context.Context // ends with Close; all watches hang on it
	cancel  context.CancelFunc
	mu      sync.Mutex // makes Watch and Close exclude each other
	watches sync.WaitGroup
}

// Open makes a client. It checks the configuration and reads its files; an
// error matches [store.ErrInvalid] and names the setting. It does not need
// etcd to be there: connections are made, and made again, when they are
// wanted. ctx is only for looking up [Config.DiscoverySRV].
func Open(ctx context.Context, c Config) (*Store, error) {
	if err := c.discover(ctx); err != nil {
		return nil, err
	}
	scheme, err := c.validate()
	if err != nil {
		return nil, fmt.Errorf("open etcd: %w", err)
	}
	log := c.Logger
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	conf := clientv3.Config{
		Endpoints:            c.Endpoints,
		DialTimeout:          orDefault(c.DialTimeout, defaultDialTimeout),
		DialKeepAliveTime:    orDefault(c.KeepaliveTime, defaultKeepaliveTime),
		DialKeepAliveTimeout: orDefault(c.KeepaliveTimeout, defaultKeepaliveTimeout),
		MaxUnaryRetries:      readTries,
		Logger:               zap.NewNop(), // what goes wrong comes back as an error
	}
	switch {
	case scheme == "https", scheme == "unix" && c.CAFile != "":
		if conf.TLS, err = c.tls(); err != nil {
			return nil, fmt.Errorf("open etcd: %w", err)
		}
		conf.DialOptions = append(conf.DialOptions, grpc.WithTransportCredentials(byConnection{rereading{credentials.NewTLS(conf.TLS), c}}))
	case c.CAFile != "" || c.CertFile != "":
		log.Warn("certificates are set, but the endpoints do not use TLS", "endpoints", c.Endpoints)
	}
	backoffs := backoff.DefaultConfig
	backoffs.BaseDelay, backoffs.MaxDelay = 100*time.Millisecond, reconnectMax
	session := newSession(c.Username, c.Password)
	conf.DialOptions = append(conf.DialOptions,
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoffs, MinConnectTimeout: conf.DialTimeout}),
		grpc.WithChainUnaryInterceptor(session.unary),
		grpc.WithChainStreamInterceptor(session.stream),
	)
	conf.DialOptions = append(conf.DialOptions, c.DialOptions...)

	client, err := clientv3.New(conf)
	if err != nil {
		return nil, fmt.Errorf("open etcd: %w: %w", store.ErrInvalid, err)
	}
	s := &Store{
		client: client, pageTimeout: pageTimeout, historyCheck: historyCheck, rightsCheck: rightsCheck, history: newHistory(log),
		conn:   client.ActiveConnection(),
		log:    log,
		where:  strings.Join(c.Endpoints, ","),
		secure: scheme == "https",
	}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	return s, nil
}

func orDefault(d, otherwise time.Duration) time.Duration {
	if d <= 0 {
		return otherwise
	}
	return d
}

// Conn returns the connection, for other services of etcd's API. It is closed
// by [Store.Close].
func (s *Store) Conn() *grpc.ClientConn { return s.conn }

// Close ends all watches, waits for them, and closes the connection.
func (s *Store) Close() error {
	s.mu.Lock()
	s.cancel()
	s.mu.Unlock()
	s.watches.Wait()
	if err := s.client.Close(); err != nil && !errors.Is(err, context.Canceled) {
		return fmt.Errorf("close the connection to %s: %w", s.where, err)
	}
	return nil
}

// Get implements [store.Store].
func (s *Store) Get(ctx context.Context, key store.Key) (store.Object, error) {
	path := key.Path()
	if path == "" {
		return store.Object{}, fmt.Errorf("get %s: %w: no key", key, store.ErrInvalid)
	}
	var resp *clientv3.GetResponse
	in, err := s.again(ctx, func(life) (_ *etcdserverpb.ResponseHeader, err error) {
		if resp, err = s.client.Get(ctx, path); err != nil {
			return nil, err
		}
		return resp.Header, nil
	})
	if err != nil {
		return store.Object{}, fmt.Errorf("get %s: %w", key, s.explain(ctx, err))
	}
	if len(resp.Kvs) == 0 {
		return store.Object{}, fmt.Errorf("get %s: %w", key, store.ErrNotFound)
	}
	obj, err := backend.Object(key, in.revision(resp.Kvs[0].ModRevision), resp.Kvs[0].Value)
	if err != nil {
		return obj, fmt.Errorf("get %s: %w", key, err)
	}
	return obj, nil
}

// List implements [store.Store].
func (s *Store) List(ctx context.Context, kind store.Kind, namespace string) ([]store.Object, store.Revision, error) {
	prefix := store.PathPrefix(kind, namespace)
	if prefix == "" {
		return nil, 0, fmt.Errorf("list: %w: unknown kind %q", store.ErrInvalid, kind)
	}
	st, err := s.readPrefixes(ctx, []string{prefix}, nil)
	if err != nil {
		return nil, 0, fmt.Errorf("list %s: %w", kind, s.explain(ctx, err))
	}
	var objs []store.Object
	var bad backend.DecodeErrors
	for _, kv := range st.kvs {
		key, ok := store.ParsePath(string(kv.Key))
		if !ok || key.Kind != kind {
			continue
		}
		obj, err := backend.Object(key, st.in.revision(kv.ModRevision), kv.Value)
		if err != nil {
			bad = append(bad, err)
			continue
		}
		objs = append(objs, obj)
	}
	return objs, st.in.revision(st.rev), bad.Err()
}

// state is what there is below some prefixes.
type state struct {
	kvs    []*mvccpb.KeyValue
	rev    int64 // etcd's, at which it was read
	in     life
	denied []string // the prefixes that were not read for want of a right
}

// readPrefixes reads all keys under some prefixes as they are at one revision of
// etcd, page by page, and of others those that this user may read. The error is etcd's.
func (s *Store) readPrefixes(ctx context.Context, prefixes, others []string) (st state, err error) {
	for {
		in, err := s.again(ctx, func(life) (header *etcdserverpb.ResponseHeader, err error) {
			st, header, err = s.tryReadPrefixes(ctx, prefixes, others)
			return header, err
		})
		// A compaction between two pages makes the rest of that revision
		// unreadable: begin at a later one.
		if errors.Is(rpctypes.Error(err), rpctypes.ErrCompacted) && ctx.Err() == nil {
			continue
		}
		st.in = in
		return st, err
	}
}

// page reads some keys of a range as they are at a revision of etcd; 0: now.
func (s *Store) page(ctx context.Context, from, end string, rev int64) (*clientv3.GetResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, s.pageTimeout)
	defer cancel()
	return s.client.Get(ctx, from, clientv3.WithRange(end), clientv3.WithLimit(pageSize), clientv3.WithRev(rev))
}

// tryReadPrefixes returns the first page's header too: its revision is that of all.
func (s *Store) tryReadPrefixes(ctx context.Context, prefixes, others []string) (st state, header *etcdserverpb.ResponseHeader, err error) {
	for i, prefix := range slices.Concat(prefixes, others) {
		from, end, before := prefix, clientv3.GetPrefixRangeEnd(prefix), len(st.kvs)
		for {
			resp, err := s.page(ctx, from, end, header.GetRevision())
			if i >= len(prefixes) && denied(err) {
				st.kvs, st.denied = st.kvs[:before], append(st.denied, prefix)
				break
			}
			if err != nil {
				return st, nil, err
			}
			if header == nil {
				header = resp.Header
			}
			st.kvs = append(st.kvs, resp.Kvs...)
			if !resp.More || len(resp.Kvs) == 0 {
				break
			}
			from = string(resp.Kvs[len(resp.Kvs)-1].Key) + "\x00"
		}
	}
	st.rev = header.GetRevision()
	return st, header, nil
}

// Txn implements [store.Store]. It is one request, also when a condition does
// not hold.
func (s *Store) Txn(ctx context.Context, ops ...store.Op) ([]store.Object, error) {
	steps, err := backend.Prepare(ops)
	if err != nil {
		return nil, err
	}
	in := s.history.begin()
	var conds []clientv3.Cmp
	var writes, reads []clientv3.Op
	for _, st := range steps {
		if st.Op.If.Absent() {
			conds = append(conds, clientv3.Compare(clientv3.Version(st.Path), "=", 0))
		} else if rev, ok := st.Op.If.Revision(); ok {
			conds = append(conds, in.condition(st.Path, rev))
		}
		switch st.Op.Action {
		case store.Put:
			writes = append(writes, clientv3.OpPut(st.Path, string(st.Raw)))
		case store.Remove:
			writes = append(writes, clientv3.OpDelete(st.Path))
		case store.Check:
		}
		reads = append(reads, clientv3.OpGet(st.Path))
	}
	resp, err := s.client.Txn(ctx).If(conds...).Then(writes...).Else(reads...).Commit()
	if err != nil {
		return nil, fmt.Errorf("write %s: %w", steps[0].Op.Object.Key, s.explain(ctx, err))
	}
	if err := s.history.judge(in, resp.Header); err != nil {
		return nil, fmt.Errorf("write %s: %w: %s: %w", steps[0].Op.Object.Key, store.ErrUnavailable, s.where, err)
	}
	if resp.Succeeded {
		return backend.Written(steps, in.revision(resp.Header.Revision))
	}
	present := make([]backend.Stored, len(steps))
	for i, r := range resp.Responses {
		if kvs := r.GetResponseRange().GetKvs(); len(kvs) > 0 {
			present[i] = backend.Stored{Revision: in.revision(kvs[0].ModRevision), Raw: kvs[0].Value}
		}
	}
	if err := backend.Conflict(steps, present); err != nil {
		return nil, err
	}
	return nil, fmt.Errorf("write %s: %w: %s: a condition did not hold, and yet all do", steps[0].Op.Object.Key, store.ErrUnavailable, s.where)
}
