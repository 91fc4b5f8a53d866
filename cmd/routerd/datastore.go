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

	"github.com/routerd/routerd/control/config"
	"github.com/routerd/routerd/control/lock"
	"github.com/routerd/routerd/control/member"
	"github.com/routerd/routerd/control/nodenetwork"
	"github.com/routerd/routerd/control/presence"
	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/etcd"
	"github.com/routerd/routerd/store/kube"
)

// datastore is where the cluster's state is, with what the daemon alone asks of
// it.
type datastore interface {
	store.Store
	// Lead calls lead while this process holds the leader-election lease of that name.
	Lead(ctx context.Context, name, id string, ttl time.Duration, lead func(context.Context))
}

// openStore makes the client of the datastore that is configured, and starts the
// embedded one if there is none.
func (d *router) openStore(ctx context.Context) error {
	log := d.log.With("component", "store")
	if d.cfg.Datastore.Kind == config.DatastoreKubernetes {
		return d.openKube(log)
	}
	m, err := member.NewMembership(membershipConfig(d.cfg, d.name, d.nodeAddress, d.log))
	if err != nil {
		return err
	}
	d.member, d.issuer = m, member.NewIssuer(m)
	ds, is := &d.cfg.Datastore, m.Datastore()
	ds.Endpoints, ds.CAFile, ds.CertFile, ds.KeyFile = is.Endpoints, is.CAFile, is.CertFile, is.KeyFile
	ec, err := etcdConfig(*ds, log)
	if err != nil {
		return err
	}
	if ec, err = m.Boot(ctx, ec); err != nil {
		return fmt.Errorf("start the embedded datastore: %w", err)
	}
	s, err := etcd.Open(ctx, ec)
	if err != nil {
		return err
	}
	m.SetStore(s)
	d.store, d.servers = s, d.cfg.Datastore.Endpoints
	d.newCertificates(s, ec)
	d.names = func(store.Incarnation) presence.Store { return s }
	d.serveKV = s.RegisterKV
	d.hosts, d.asks = s, s
	d.db = lock.New(s, d.log.With("component", "lock"))
	if d.cfg.Kubernetes.Enabled {
		if d.api, err = d.openAPI(true, log.With("api", "kubernetes")); err != nil {
			return err
		}
		d.conditions = &conditions{d.api.Names(store.Incarnation{}), nodenetwork.NewOthers(d.api)}
	}
	return nil
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

// nodeAddress is this host's own, once it is known.
func (d *router) nodeAddress() (netip.Addr, error) {
	found := d.node.Status().Addresses
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
func (d *router) openAPI(native bool, log *slog.Logger) (*kube.Store, error) {
	kc, err := kubeConfig(d.cfg, log)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(d.cfg.StateDir, 0o700); err != nil {
		return nil, fmt.Errorf("make stateDir: %w", err)
	}
	kc.Node = d.name
	kc.ServersFile, kc.NativeOnly = filepath.Join(d.cfg.StateDir, "api-servers.json"), native
	return kube.Open(kc)
}

// openKube makes the API the datastore.
func (d *router) openKube(log *slog.Logger) error {
	s, err := d.openAPI(false, log)
	if err != nil {
		return err
	}
	d.api = s
	d.store, d.servers = s, s.Servers()
	d.inAPI = true
	d.conditions = &conditions{others: nodenetwork.NewOthers(s)}
	d.names = func(self store.Incarnation) presence.Store {
		d.conditions.names = s.Names(self)
		return d.conditions.names
	}
	d.serveKV = func(r grpc.ServiceRegistrar) { etcd.RefuseKV(r, noEtcd) }
	d.db = lock.New(s, d.log.With("component", "lock"))
	return nil
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
