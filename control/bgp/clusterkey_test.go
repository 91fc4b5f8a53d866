package bgp

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/memory"
)

// keyHost is a host's part that follows the cluster's key of BGP.
type keyHost struct {
	*ClusterKey
	t  *testing.T
	mu sync.Mutex
	uses,
	tells string
	log strings.Builder
}

func newKeyHost(t *testing.T, s store.Store, file string) *keyHost {
	h := &keyHost{t: t}
	h.ClusterKey = NewClusterKey(ClusterKeyConfig{
		Store: s, File: file, Log: slog.New(slog.NewTextHandler(h, nil)),
		CanSign: func() error { return nil },
		Use:     func(k Keyring) { h.set(&h.uses, k.String()) },
		Publish: func(ids []string) { h.set(&h.tells, strings.Join(ids, ",")) },
	})
	return h
}

func (h *keyHost) Write(b []byte) (int, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.log.Write(b)
}

func (h *keyHost) set(what *string, to string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	*what = to
}

// start runs it until the test ends.
func (h *keyHost) start() (stop func()) {
	ctx, cancel := context.WithCancel(h.t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { _ = h.Run(ctx) })
	stop = sync.OnceFunc(func() { cancel(); wg.Wait() })
	h.t.Cleanup(stop)
	return stop
}

// until waits until it says of sessions what begins so, and publishes these keys.
func (h *keyHost) until(uses string, tells ...string) {
	h.t.Helper()
	await.Until(h.t, uses, func() error {
		h.mu.Lock()
		defer h.mu.Unlock()
		if !strings.HasPrefix(h.uses, uses) || h.tells != strings.Join(tells, ",") {
			return fmt.Errorf("sessions are %q, published is %q, want %q", h.uses, h.tells, tells)
		}
		return nil
	})
}

// TestFollowClusterKey: a host follows the key of its cluster, from its beginning until somebody
// deletes it or writes one that is none; a restart goes by the disk, which only root can read,
// with the datastore away too, and by nothing where that is damaged. No log has the key.
func TestFollowClusterKey(t *testing.T) {
	t.Parallel()
	s := memory.New()
	defer s.Close()
	file := filepath.Join(t.TempDir(), "bgp.key")
	h := newKeyHost(t, s, file)
	h.Load()
	stop := h.start()
	if err := store.Bootstrap(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	h.Made()
	began, err := store.BGPKey(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	first := began.KeyIDs()[0]
	h.until("signed with key "+first, first)
	both, err := store.RotateBGPKey(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	h.Changed()
	h.until("signed with key "+both.KeyIDs()[0]+", or", both.KeyIDs()...)
	await.Until(t, "the disk has it", func() error {
		k, err := readBGPKey(file)
		if err == nil && !slices.Equal(k.KeyIDs(), both.KeyIDs()) {
			err = fmt.Errorf("%q", k.KeyIDs())
		}
		return err
	})
	if i, err := os.Stat(file); err != nil || i.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", i.Mode(), err)
	}
	stop()

	s.Fail(errors.New("unplugged"))
	away := newKeyHost(t, s, file)
	away.Load()
	away.until("signed with key "+both.KeyIDs()[0]+", or", both.KeyIDs()...)
	away.start()
	await.Until(t, "the log says that the datastore is away", func() error {
		away.mu.Lock()
		defer away.mu.Unlock()
		if !strings.Contains(away.log.String(), "the last known key stays in use") {
			return errors.New(away.log.String())
		}
		return nil
	})
	away.until("signed with key "+both.KeyIDs()[0]+", or", both.KeyIDs()...)
	s.Fail(nil)
	only, err := store.FinishBGPKey(t.Context(), s, both.KeyIDs()[0])
	if err != nil {
		t.Fatal(err)
	}
	away.until("signed with key "+only.KeyIDs()[0], only.KeyIDs()...)

	s.PutRaw(store.SecretKey(store.BGPSecret).Path(), []byte("garbage"))
	away.Changed()
	await.Until(t, "the log says how to be rid of it", func() error {
		away.mu.Lock()
		defer away.mu.Unlock()
		if !strings.Contains(away.log.String(), "routerctl bgp key off") {
			return errors.New(away.log.String())
		}
		return nil
	})
	away.until("signed with key "+only.KeyIDs()[0], only.KeyIDs()...)
	away.Made()
	if err := store.DropBGPKey(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	away.until("not signed: the cluster has no key")
	await.Until(t, "the disk forgets it", func() error {
		if _, err := os.Stat(file); err == nil {
			return errors.New("it is there")
		}
		return nil
	})

	if err := os.WriteFile(file, []byte(`{"key":"`), 0o600); err != nil {
		t.Fatal(err)
	}
	damaged := newKeyHost(t, s, file)
	damaged.Load()
	damaged.start()
	damaged.Made()
	damaged.until("not signed: the cluster has no key")

	for _, host := range []*keyHost{h, away, damaged} {
		host.mu.Lock()
		for _, k := range both.Keys() {
			if strings.Contains(host.log.String(), fmt.Sprintf("%x", k)) {
				t.Error("the log has the key")
			}
		}
		host.mu.Unlock()
	}
}

// TestKeyKeptBeforePublished: by what a host publishes the others expect its sessions, also when
// it loses power then and starts while the datastore is away. So the disk has each key before.
func TestKeyKeptBeforePublished(t *testing.T) {
	t.Parallel()
	s := memory.New()
	defer s.Close()
	if err := store.Bootstrap(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	h := newKeyHost(t, s, filepath.Join(t.TempDir(), "bgp.key"))
	publish := h.c.Publish
	h.c.Publish = func(ids []string) {
		k, err := readBGPKey(h.c.File)
		if err != nil || len(ids) > 0 && !slices.Equal(k.KeyIDs(), ids) {
			t.Errorf("published %q, and the disk has %q, %v", ids, k.KeyIDs(), err)
		}
		publish(ids)
	}
	h.Made()
	h.start()
	began, err := store.BGPKey(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	h.until("signed with key "+began.KeyIDs()[0], began.KeyIDs()...)
	both, err := store.RotateBGPKey(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	h.Changed()
	h.until("signed with key "+both.KeyIDs()[0]+", or", both.KeyIDs()...)
}

// TestWithoutClusterKey: a host without BGP, or whose kernel cannot sign, says that it has no key,
// whatever an earlier run published, and keeps none.
func TestWithoutClusterKey(t *testing.T) {
	t.Parallel()
	for _, kernel := range []bool{false, true} {
		s := memory.New()
		defer s.Close()
		if err := store.Bootstrap(t.Context(), s); err != nil {
			t.Fatal(err)
		}
		h := newKeyHost(t, s, filepath.Join(t.TempDir(), "bgp.key"))
		if err := os.WriteFile(h.c.File, []byte("{}"), 0o600); err != nil {
			t.Fatal(err)
		}
		h.tells = "an earlier run's"
		if kernel {
			h.c.CanSign = func() error { return errors.New("protocol not available") }
		} else {
			h.c.Use = nil
		}
		if err := h.Run(t.Context()); err != nil {
			t.Error(err)
		}
		if _, err := os.Stat(h.c.File); err == nil || h.tells != "" || kernel != strings.Contains(h.uses, "this kernel cannot sign") {
			t.Errorf("%v; sessions %q, published %q", err, h.uses, h.tells)
		}
	}
}
