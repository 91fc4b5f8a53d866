package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"google.golang.org/grpc"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/control/bgp"
	"github.com/routerd/routerd/control/config"
	"github.com/routerd/routerd/control/lock"
	"github.com/routerd/routerd/control/member"
	"github.com/routerd/routerd/control/node"
	"github.com/routerd/routerd/control/nodenetwork"
	"github.com/routerd/routerd/control/policy"
	"github.com/routerd/routerd/control/presence"
	"github.com/routerd/routerd/control/renewal"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/etcd"
	"github.com/routerd/routerd/store/kube"
)

// backend is a datastore with what the daemon alone asks of it.
type backend interface {
	store.Store
	// Lead calls lead while this process holds the leader-election lease of that name.
	Lead(ctx context.Context, name, id string, ttl time.Duration, lead func(context.Context))
}

// datastore is where the cluster's state is, and what else this host knows by it.
type datastore struct {
	store   backend
	servers []string              // URLs, if it is not this daemon's own
	names   presence.Store        // who keeps the names of nodes
	etcd    *etcd.Store           // nil: the datastore is Kubernetes' API
	hosts   bgp.Hosts             // who is there; with etcd
	member  *member.Membership    // with etcd
	issuer  *member.Issuer        // with etcd
	certs   *renewal.Certificates // with etcd
	db      *lock.Store           // the datastore for who writes what Calico has too

	api      *kube.Store         // Kubernetes' API; nil: this host does not know it
	nodes    *kube.Names         // with api: what it says of this host's Node
	networks *nodenetwork.Others // with api: the condition NetworkUnavailable of others
}

// inAPI reports whether Kubernetes' API is the datastore.
func (ds *datastore) inAPI() bool { return ds.etcd == nil }

// mirrors reports whether Kubernetes' API is not the datastore, and what it says is brought
// there.
func (ds *datastore) mirrors() bool { return ds.api != nil && ds.etcd != nil }

// openDatastore makes the client of the datastore that is configured, and starts the
// embedded one if there is none.
func openDatastore(ctx context.Context, d daemon, p *parts, self store.Incarnation, address func() (netip.Addr, error)) (ds *datastore, err error) {
	log := d.of("store")
	if d.Datastore.Kind == config.DatastoreKubernetes {
		s, err := openAPI(d, false, log)
		if err != nil {
			return nil, err
		}
		p.closes(s.Close)
		names := s.Names(self)
		return &datastore{
			store: s, servers: s.Servers(), names: names, db: lock.New(s, d.of("lock")),
			api: s, nodes: names, networks: nodenetwork.NewOthers(s),
		}, nil
	}
	if ds, err = openEtcd(ctx, d, p, address); err != nil || !d.Kubernetes.Enabled {
		return ds, err
	}
	if ds.api, err = openAPI(d, true, log.With("api", "kubernetes")); err != nil {
		return nil, err
	}
	p.closes(ds.api.Close)
	ds.nodes, ds.networks = ds.api.Names(store.Incarnation{}), nodenetwork.NewOthers(ds.api)
	return ds, nil
}

// openEtcd makes the client of etcd, of which this host may be a member.
func openEtcd(ctx context.Context, d daemon, p *parts, address func() (netip.Addr, error)) (*datastore, error) {
	m, err := member.NewMembership(membershipConfig(d.Config, d.name, address, d.log))
	if err != nil {
		return nil, err
	}
	p.closes(func() error { m.Close(); return nil })
	c, is := &d.Datastore, m.Datastore() // by which d goes from here on
	c.Endpoints, c.CAFile, c.CertFile, c.KeyFile = is.Endpoints, is.CAFile, is.CertFile, is.KeyFile
	ec, err := etcdConfig(*c, d.of("store"))
	if err != nil {
		return nil, err
	}
	if ec, err = m.Boot(ctx, ec); err != nil {
		return nil, fmt.Errorf("start the embedded datastore: %w", err)
	}
	s, err := etcd.Open(ctx, ec)
	if err != nil {
		return nil, err
	}
	p.closes(s.Close)
	m.SetStore(s)
	ds := &datastore{store: s, servers: c.Endpoints, names: s, etcd: s, hosts: s, member: m, issuer: member.NewIssuer(m), db: lock.New(s, d.of("lock"))}
	ds.certs = newCertificates(d, p, ds, ec)
	p.runs("embedded datastore", m.Watch)
	p.runs("new hosts", ds.issuer.Run)
	if m.Ours() {
		p.runs("datastore's members", m.Follow)
		p.runs("membership", m.RunAgent)
	}
	return ds, nil
}

// serve serves resources to routerctl, and the cluster of the datastore.
func (ds *datastore) serve(r grpc.ServiceRegistrar) {
	apiv1.RegisterClusterServer(r, member.NewService(ds.issuer, noTokens))
	if ds.etcd == nil {
		etcd.RefuseKV(r, noEtcd)
		return
	}
	ds.etcd.RegisterKV(r)
}

// full says that there is no room for the embedded datastore.
func (ds *datastore) full() error {
	if ds.member == nil {
		return nil
	}
	return ds.member.Err()
}

// services is what the datastore tells of Services that rules name.
func (ds *datastore) services() policy.Services {
	switch {
	case ds.inAPI():
		return policy.AllServices
	case ds.api != nil:
		return policy.BroughtServices
	}
	return policy.NoServices
}

// bootstrap makes what every cluster has, once the datastore answers, and says so.
func (ds *datastore) bootstrap(ctx context.Context, d daemon, made func()) error {
	// Of what a start writes to the datastore.
	backoff := async.Backoff{Min: 100 * time.Millisecond, Max: 10 * time.Second}
	return async.Retry(ctx, backoff, func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		had, err := ds.had(ctx, d.name)
		if err == nil {
			err = store.Bootstrap(ctx, ds.store, had...)
		}
		if err != nil {
			d.log.Debug("bootstrap; will try again", "error", err)
			return err
		}
		made()
		return nil
	})
}

// had returns the ClusterInformation that this host knows of a cluster in which its Node
// is: then somebody has deleted it if it is not there, while the host was down perhaps.
// A datastore without the Node is another one, or empty.
func (ds *datastore) had(ctx context.Context, node string) ([]store.Object, error) {
	last, err := ds.db.Last(ctx)
	if err != nil || last.Value == nil {
		return nil, err
	}
	switch _, err := ds.store.Get(ctx, store.ResourceKey(store.KindNode, node)); {
	case errors.Is(err, store.ErrNotFound):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("look for this host's Node: %w", err)
	}
	return []store.Object{last}, nil
}

// memberFile is what this host is in the datastore's cluster.
func memberFile(c config.Config) string { return filepath.Join(c.StateDir, "etcd", "member.json") }

// membershipConfig is what a configuration says of the cluster of the embedded datastore.
func membershipConfig(c config.Config, name string, address func() (netip.Addr, error), log *slog.Logger) member.MembershipConfig {
	ds, e := c.Datastore, c.Datastore.Embedded
	var listen netip.AddrPort
	if e.Listen != "" {
		listen = netip.MustParseAddrPort(e.Listen) // Validate has parsed it
	}
	return member.MembershipConfig{
		Node:      name,
		Datastore: member.Datastore{Endpoints: ds.Endpoints, CAFile: ds.CAFile, CertFile: ds.CertFile, KeyFile: ds.KeyFile},
		StateFile: memberFile(c), MembersFile: filepath.Join(c.StateDir, "datastore-members.json"),
		DataDir: c.EtcdDir(), PKIDir: c.PKIDir(), ClientPKIDir: c.ClientPKIDir(), Socket: c.EtcdSocket(),
		Listen: listen, Hosts: e.Hosts,
		JoinPort: uint16(e.JoinPort), PeerPort: uint16(e.PeerPort), //nolint:gosec // Validate has checked them
		Address: address, ValidName: config.ValidNodeName, Log: log,
	}
}

// ownAddress is this host's own, once it is known.
func ownAddress(agent *node.Agent) (netip.Addr, error) {
	found := agent.Status().Addresses
	for _, f := range []dataplane.Family{dataplane.IPv4, dataplane.IPv6} {
		if a, ok := found[f]; ok {
			return a.Prefix.Addr(), nil
		}
	}
	return netip.Addr{}, errors.New("this host's own address is not known yet")
}

// etcdConfig is what a configuration says of an etcd; without endpoints it is the
// embedded one.
func etcdConfig(ds config.Datastore, log *slog.Logger) (etcd.Config, error) {
	password, err := ds.Password()
	return etcd.Config{
		Endpoints: ds.Endpoints, CAFile: ds.CAFile, CertFile: ds.CertFile, KeyFile: ds.KeyFile,
		Username: ds.Username, Password: password, DialTimeout: ds.DialTimeout, Logger: log,
	}, err
}

// openAPI makes the client of Kubernetes' API; native says that Calico's resources are
// elsewhere.
func openAPI(d daemon, native bool, log *slog.Logger) (*kube.Store, error) {
	kc, err := kubeConfig(d.Config, log)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(d.StateDir, 0o700); err != nil {
		return nil, fmt.Errorf("make stateDir: %w", err)
	}
	kc.Node = d.name
	kc.ServersFile, kc.NativeOnly = filepath.Join(d.StateDir, "api-servers.json"), native
	return kube.Open(kc)
}

// kubeConfig is what a configuration says of Kubernetes' API, beside the variables
// that Calico's programs have.
func kubeConfig(c config.Config, log *slog.Logger) (kube.Config, error) {
	kc, err := kube.FromEnv(os.Getenv)
	k := c.Datastore.Kubernetes
	if k.Kubeconfig != "" {
		kc = kube.Config{Kubeconfig: k.Kubeconfig, APIGroup: kc.APIGroup}
	}
	kc.Context, kc.APIGroup = cmp.Or(k.Context, kc.Context), cmp.Or(k.APIGroup, kc.APIGroup)
	kc.Servers, kc.Namespace, kc.UserAgent, kc.Logger = k.Servers, k.Namespace, "routerd/"+version, log
	return kc, err
}

// withDatastore calls fn with the datastore of a configuration that is not embedded.
func withDatastore(ctx context.Context, c config.Config, fn func(context.Context, store.Store) error) error {
	log := slog.New(slog.DiscardHandler)
	var s store.Store
	if c.Datastore.Kind == config.DatastoreKubernetes {
		kc, err := kubeConfig(c, log)
		if err != nil {
			return err
		}
		if s, err = kube.Open(kc); err != nil {
			return err
		}
	} else {
		ec, err := etcdConfig(c.Datastore, log)
		if err != nil {
			return err
		}
		if s, err = etcd.Open(ctx, ec); err != nil {
			return err
		}
	}
	err := fn(ctx, s)
	if closeErr := s.Close(); err == nil {
		err = closeErr
	}
	return err
}

// datastoreName says what the datastore is, for people.
func datastoreName(c config.Config) string {
	switch {
	case c.Datastore.Kind == config.DatastoreKubernetes:
		return "Kubernetes"
	case len(c.Datastore.Endpoints) > 0:
		return strings.Join(c.Datastore.Endpoints, ",")
	case c.Datastore.Embedded.Listen != "":
		return "embedded, serving https://" + c.Datastore.Embedded.Listen
	}
	return "embedded"
}

// noTokens answers who asks for a join token where there is no etcd.
const noTokens = "the datastore of this host is Kubernetes' API: hosts join with what Kubernetes gives them (docs/guides/kubernetes.md)"

// noEtcd answers who asks for etcd where there is none.
const noEtcd = "the resources of this cluster are in Kubernetes' API: set DATASTORE_TYPE=kubernetes, and KUBECONFIG outside a pod, for routerctl to read and write them there, or use kubectl"
