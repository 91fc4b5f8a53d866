package bgp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/store"
)

// fakeSecrets are those of an API that a test has.
type fakeSecrets struct {
	mu      sync.Mutex
	state   map[string]any // by name: a map[string]string, or an error; nothing: the API says nothing
	changed chan struct{}  // closed at the next change
	asked   map[string]int // how many follow a name
}

func newFakeSecrets() *fakeSecrets {
	return &fakeSecrets{state: map[string]any{}, changed: make(chan struct{}), asked: map[string]int{}}
}

func (f *fakeSecrets) set(name string, state any) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.state[name] = state
	close(f.changed)
	f.changed = make(chan struct{})
}

func (f *fakeSecrets) following(name string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.asked[name]
}

func (f *fakeSecrets) Namespace() string { return "kube-system" }

func (f *fakeSecrets) FollowSecret(ctx context.Context, name string, tell func(map[string][]byte, error)) {
	ask := func(n int) {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.asked[name] += n
	}
	ask(1)
	defer ask(-1)
	for ctx.Err() == nil {
		f.mu.Lock()
		state, changed := f.state[name], f.changed
		f.mu.Unlock()
		switch s := state.(type) {
		case error:
			tell(nil, s)
		case map[string]string:
			data := map[string][]byte{}
			for k, v := range s {
				data[k] = []byte(v)
			}
			tell(data, nil)
		}
		select {
		case <-ctx.Done():
		case <-changed:
		}
	}
}

// TestSecretObjects: what a password is and what is said where there is none, through all that may become of a Secret; what is kept
// on disk for a restart, with which rights, and that nothing of it is shown.
func TestSecretObjects(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	file := filepath.Join(t.TempDir(), "bgp.secrets")
	api := newFakeSecrets()
	tor, other := SecretRef{"tor", "password"}, SecretRef{"other", "k"}
	var o *secretObjects
	end := func() {}
	start := func() {
		t.Helper()
		changed := async.NewSignal()
		o = newSecretObjects(api, file, slog.New(slog.NewTextHandler(&log, nil)), changed.Set)
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { o.run(ctx) })
		end = sync.OnceFunc(func() { cancel(); running.Wait() })
	}
	defer func() { end() }()
	says := func(ref SecretRef, want, doubt, fails string) {
		t.Helper()
		poll(t, func() string { p, d, err := o.password(ref); return fmt.Sprintf("%q, %q, %v", p.reveal(), d, err) }, func() bool {
			p, d, err := o.password(ref)
			return p.reveal() == want && strings.Contains(d, doubt) && (d == "") == (doubt == "") &&
				(err == nil) == (fails == "") && (err == nil || strings.Contains(err.Error(), fails))
		})
	}
	disk := func(want ...string) {
		t.Helper()
		poll(t, func() string { b, err := os.ReadFile(file); return fmt.Sprintf("%s, %v", b, err) }, func() bool {
			b, err := os.ReadFile(file)
			if len(want) == 0 {
				return errors.Is(err, fs.ErrNotExist)
			}
			for _, w := range want {
				if !bytes.Contains(b, []byte(w)) {
					return false
				}
			}
			return !bytes.Contains(b, []byte("unused"))
		})
	}
	missing := fmt.Errorf("%w: there is none", store.ErrNotFound)
	away := fmt.Errorf("%w: connection refused", store.ErrUnavailable)
	forbidden := fmt.Errorf("%w: forbidden: no role names it", store.ErrUnavailable)

	start()
	o.want(t.Context(), []SecretRef{tor})
	says(tor, "", "", "secret tor/password: the API has not said yet what is in the Secret tor of the namespace kube-system")
	api.set("tor", forbidden)
	says(tor, "", "", "secret tor/password: datastore unavailable: forbidden: no role names it")
	api.set("tor", missing)
	says(tor, "", "", "secret tor/password is missing: make it: kubectl -n kube-system create secret generic tor --from-file=password=FILE")
	api.set("tor", map[string]string{})
	says(tor, "", "", "the Secret tor of the namespace kube-system lacks the key password, it is empty: kubectl -n kube-system edit secret tor")
	api.set("tor", map[string]string{"unused": "geheim"})
	says(tor, "", "", "lacks the key password, it has unused")
	api.set("tor", map[string]string{"password": "\n"})
	says(tor, "", "", "the Secret tor of the namespace kube-system is empty")
	api.set("tor", map[string]string{"password": strings.Repeat("geheim", 14)})
	says(tor, "", "", "holds 84 bytes, and the kernel takes 80 at most")
	api.set("tor", map[string]string{"password": "geheim\n", "unused": "geheim"})
	says(tor, "geheim", "", "")
	disk(`"password"`)
	info, err := os.Stat(file)
	if err != nil || info.Mode() != 0o600 {
		t.Errorf("the file is %v, %v", info.Mode(), err)
	}

	api.set("tor", away)
	says(tor, "geheim", "connection refused", "")
	end()
	start() // with the API away
	says(tor, "geheim", "", "")
	o.want(t.Context(), []SecretRef{tor, other})
	says(tor, "geheim", " cannot be read, so its last known content is in use: ", "")
	says(other, "", "", "the API has not said yet")
	api.set("other", map[string]string{"k": "geheim too"})
	says(other, "geheim too", "", "")
	disk(`"tor"`, `"other"`)

	api.set("tor", map[string]string{"password": "geheim anew"})
	says(tor, "geheim anew", "", "")
	o.want(t.Context(), []SecretRef{tor})
	poll(t, func() string { return fmt.Sprint(api.following("other")) }, func() bool { return api.following("other") == 0 })
	says(other, "", "", "the API has not said yet")
	api.set("tor", missing)
	says(tor, "", "", "is missing: make it")
	disk()
	end()

	if err := os.WriteFile(file, []byte(`{"Secrets": geheim`), 0o600); err != nil {
		t.Fatal(err)
	}
	start()
	says(tor, "", "", "the API has not said yet")
	end()
	if strings.Contains(log.String(), "geheim") || !strings.Contains(log.String(), "cannot be decoded") || strings.Count(log.String(), "no role names it") != 1 {
		t.Errorf("the log says:\n%s", &log)
	}
}

// TestSecretRotated: two daemons have a session with a password of a Secret. Both get another one, one after the other, and the
// session goes on, with routes that come meanwhile. Without the Secret it ends, and says what is missing. A directory of
// the Secret's name comes before it.
func TestSecretRotated(t *testing.T) {
	t.Parallel()
	h := hosts(t, 2)
	dir := t.TempDir()
	api, daemons := [2]*fakeSecrets{newFakeSecrets(), newFakeSecrets()}, [2]*daemon{}
	for i := range daemons {
		api[i].set("tor", map[string]string{"password": "geheim"})
		daemons[i] = newDaemonOf(t, Options{Node: "node1", Secrets: api[i], SecretDir: filepath.Join(dir, fmt.Sprint(i))})
		daemons[i].send(store.Batch{Synced: true, Events: []store.Event{
			bgpNode(t, "node1", h[i].String()+"/24"), conf(t, "default", fmt.Sprintf(`{"bindMode":"NodeIP","asNumber":%d}`, 64601+i)),
			peer(t, "with", fmt.Sprintf(`{"peerIP":%q,"asNumber":%d,"password":{"secretKeyRef":{"name":"tor","key":"password"}}}`, h[1-i], 64602-i)),
		}})
	}
	d := daemons[0]
	state := func(want string, info string) {
		t.Helper()
		poll(t, func() string { return fmt.Sprint(d.peer("with")) }, func() bool {
			return d.peer("with").State == want && strings.Contains(d.peer("with").Info, info)
		})
	}
	state(StateUp, "")
	since := d.peer("with").Since
	for i := range daemons {
		api[i].set("tor", map[string]string{"password": "geheim anew"})
	}
	// What is sent from here on is signed with the new one.
	announced := prefixes("10.99.1.0/24")[0]
	daemons[1].send(store.Batch{Events: []store.Event{conf(t, "default", fmt.Sprintf(`{"bindMode":"NodeIP","asNumber":64602,"serviceClusterIPs":[{"cidr":%q}]}`, announced))}})
	poll(t, func() string { return fmt.Sprint(d.peer("with")) }, func() bool {
		d.mu.Lock()
		defer d.mu.Unlock()
		_, there := d.paths[announced]
		return there
	})
	if now := d.peer("with"); now.State != StateUp || !now.Since.Equal(since) {
		t.Errorf("the session was up since %s, and is %s since %s", since, now.State, now.Since)
	}

	api[0].set("tor", fmt.Errorf("%w: connection refused", store.ErrUnavailable))
	state(StateUp, "its last known content is in use: datastore unavailable: connection refused")
	api[0].set("tor", fmt.Errorf("%w: there is none", store.ErrNotFound))
	state(StateDown, "secret tor/password is missing: make it: kubectl -n kube-system create secret generic tor --from-file=password=FILE; the session is not run without it")
	writeSecret(t, filepath.Join(dir, "0"), SecretRef{"tor", "password"}, "geheim anew")
	state(StateUp, "")
}
