package etcd_test

import (
	"errors"
	"log/slog"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/authpb"
	"go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/embedded/clustertest"
	"github.com/routerd/routerd/store/etcd"
)

// guarded is an etcd with users: root, and a host whose role a test changes.
type guarded struct {
	t            *testing.T
	data, socket string
	stop         func()
	root         *etcd.Store
}

func startGuarded(t *testing.T) *guarded {
	t.Helper()
	dir := t.TempDir()
	g := &guarded{t: t, data: filepath.Join(dir, "data"), socket: filepath.Join(dir, "s.sock")}
	g.stop = clustertest.StartAuth(t, g.data, g.socket)
	g.root = open(t, etcd.Config{Endpoints: []string{g.endpoint()}, Username: "root", Password: "top"})
	auth := etcdserverpb.NewAuthClient(g.root.Conn())
	ctx := await.Context(t)
	for _, user := range []struct{ name, role string }{{"root", "root"}, {"host", "host"}} {
		_, err := auth.RoleAdd(ctx, &etcdserverpb.AuthRoleAddRequest{Name: user.role})
		if err == nil {
			_, err = auth.UserAdd(ctx, &etcdserverpb.AuthUserAddRequest{Name: user.name, Password: "top"})
		}
		if err == nil {
			_, err = auth.UserGrantRole(ctx, &etcdserverpb.AuthUserGrantRoleRequest{User: user.name, Role: user.role})
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	g.grant(store.RootPath)
	if _, err := auth.AuthEnable(ctx, &etcdserverpb.AuthEnableRequest{}); err != nil {
		t.Fatal(err)
	}
	return g
}

func (g *guarded) endpoint() string { return "unix://" + g.socket }

func (g *guarded) grant(prefix string) {
	g.t.Helper()
	_, err := etcdserverpb.NewAuthClient(g.root.Conn()).RoleGrantPermission(g.t.Context(), &etcdserverpb.AuthRoleGrantPermissionRequest{
		Name: "host", Perm: &authpb.Permission{PermType: authpb.READ, Key: []byte(prefix), RangeEnd: []byte(clientv3.GetPrefixRangeEnd(prefix))},
	})
	if err != nil {
		g.t.Fatal(err)
	}
}

func (g *guarded) revoke(prefix string) {
	g.t.Helper()
	_, err := etcdserverpb.NewAuthClient(g.root.Conn()).RoleRevokePermission(g.t.Context(), &etcdserverpb.AuthRoleRevokePermissionRequest{
		Role: "host", Key: []byte(prefix), RangeEnd: []byte(clientv3.GetPrefixRangeEnd(prefix)),
	})
	if err != nil {
		g.t.Fatal(err)
	}
}

// restart has every watch read the state anew.
func (g *guarded) restart() {
	g.stop()
	g.stop = clustertest.StartAuth(g.t, g.data, g.socket)
}

// TestMissingRight: a kind of routerd's own that a host's user may not read, as with roles of an earlier version, is
// named with the cure and keeps nothing else from being followed. It is there when the right is. A right that
// goes takes nothing of what was known.
func TestMissingRight(t *testing.T) {
	t.Parallel()
	g := startGuarded(t)
	const services, slices = "/routerd/v1/services/", "/routerd/v1/endpointslices/"
	g.grant(services)
	web, slice := store.ServiceKey("ns", "web"), store.EndpointSliceKey("ns", "web-1")
	put := func(key store.Key, value any) {
		t.Helper()
		await.Until(t, "a write", func() error {
			_, err := g.root.Txn(t.Context(), store.Op{Action: store.Put, Object: store.Object{Key: key, Value: value}})
			return err
		})
	}
	put(slice, &store.EndpointSlice{Service: "web"})
	put(web, &store.Service{})
	var log strings.Builder
	s := open(t, etcd.Config{Endpoints: []string{g.endpoint()}, Username: "host", Password: "top", Logger: slog.New(slog.NewTextHandler(&log, nil))})
	s.SetRightsCheck(20 * time.Millisecond)

	if b := take(t, watch(t, s, store.KindEndpointSlice), "alone", func(store.Batch) bool { return true }); !errors.Is(b.Err, store.ErrDenied) || b.Synced {
		t.Errorf("a kind alone that may not be read: %+v", b)
	}

	ch := watch(t, s, store.KindIPAMConfig, store.KindService, store.KindEndpointSlice)
	known := map[store.Key]bool{}
	until := func(what string, done func(store.Batch) bool) {
		t.Helper()
		take(t, ch, what, func(b store.Batch) bool {
			for _, e := range b.Events {
				known[e.Key] = !e.Deleted()
			}
			return done(b)
		})
	}
	until("the state without what may not be read", func(b store.Batch) bool {
		w, ok := b.Withheld[store.KindEndpointSlice]
		if !b.Synced || len(b.Withheld) != 1 || !ok || w.Known || !known[web] || known[slice] {
			t.Errorf("the first batch: %+v", b)
		} else if text := w.Err.Error(); !strings.Contains(text, slices) || !strings.Contains(text, "configs/etcd/roles.sh") {
			t.Errorf("it says %q", text)
		}
		return true
	})
	put(web, &store.Service{ClusterIPs: []string{"10.96.0.1"}})
	put(store.IPAMConfigKey(), &store.IPAMConfig{})
	until("the others are followed", func(store.Batch) bool { return known[store.IPAMConfigKey()] })
	g.grant(slices)
	until("the right is there", func(b store.Batch) bool { return known[slice] && b.Synced && b.Withheld == nil })

	g.revoke(services)
	g.restart()
	until("a right has gone", func(b store.Batch) bool { return b.Synced && b.Withheld[store.KindService].Known })
	if !known[web] || !known[slice] {
		t.Errorf("what was known has gone: %v", known)
	}
	put(slice, &store.EndpointSlice{Service: "web", IPv6: true})
	until("the others are followed", func(b store.Batch) bool { return len(b.Events) == 1 && b.Events[0].Key == slice })
	if _, err := g.root.Txn(t.Context(), store.Op{Action: store.Remove, Object: store.Object{Key: web}}); err != nil {
		t.Fatal(err)
	}
	g.grant(services)
	until("what happened meanwhile", func(b store.Batch) bool { return !known[web] && b.Withheld == nil })
	if err := write(t.Context(), s); !errors.Is(err, store.ErrDenied) || !errors.Is(err, store.ErrUnavailable) {
		t.Errorf("a write without the right: %v", err)
	}
	s.Close()
	if n := strings.Count(log.String(), "kind=EndpointSlice"); n != 2 {
		t.Errorf("the right that was missing, and came, is logged %d times:\n%s", n, log.String())
	}
}
