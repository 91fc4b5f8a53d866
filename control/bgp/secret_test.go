package bgp

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/control/dirwatch"
	"github.com/routerd/routerd/store"
)

func writeSecret(t testing.TB, dir string, ref SecretRef, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Join(dir, ref.Name), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, ref.Name, ref.Key), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestReadSecret(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for key, text := range map[string]string{"good": "geheim\n", "empty": "\n", "long": strings.Repeat("x", 81)} {
		writeSecret(t, dir, SecretRef{"s", key}, text)
	}
	if err := os.Mkdir(filepath.Join(dir, "s", "dir"), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		ref        SecretRef
		want, fail string
	}{
		{SecretRef{"s", "good"}, "geheim", ""},
		{SecretRef{"s", "missing"}, "", "secret s/missing is missing: put it in " + dir + "/s/missing"},
		{SecretRef{"none", "k"}, "", "is missing"},
		{SecretRef{"s", "empty"}, "", "/s/empty is empty"},
		{SecretRef{"s", ""}, "", "secret s/: want a name and a key without slashes"},
		{SecretRef{"s", "dir"}, "", "secret s/dir: read "},
		{SecretRef{"s", "long"}, "", "holds 81 bytes, and the kernel takes 80 at most"},
		{SecretRef{"..", "good"}, "", "without slashes"},
		{SecretRef{"s", "../s/good"}, "", "without slashes"},
		{SecretRef{}, "", "without slashes"},
	} {
		got, err := ReadSecret(dir, c.ref)
		if got.reveal() != c.want || (err == nil) != (c.fail == "") || err != nil && !strings.Contains(err.Error(), c.fail) {
			t.Errorf("%s: %q, %v; want %q, %q", c.ref, got.reveal(), err, c.want, c.fail)
		}
		if err != nil && strings.Contains(err.Error(), "xxx") {
			t.Errorf("the error shows the secret: %v", err)
		}
	}
}

// TestPasswordNeverShown prints a peer in every way.
func TestPasswordNeverShown(t *testing.T) {
	t.Parallel()
	p := Peer{Name: "tor", Password: Password{"geheim"}, AO: AOKeys{1, [store.MaxTCPAOKeys]AOKey{{Text: Password{"geheim"}}}}}
	c := Config{Peers: []Peer{p}}
	var log strings.Builder
	slog.New(slog.NewTextHandler(&log, nil)).Info("x", "peer", p, "password", p.Password, "config", c)
	slog.New(slog.NewJSONHandler(&log, nil)).Info("x", "peer", p, "password", p.Password)
	all := fmt.Sprintf("%v %+v %#v %s %q %x %v %+v %#v", p, p, p, p.Password, p.Password, p.AO, &c, c, c) + log.String()
	if strings.Contains(all, "geheim") || strings.Contains(all, "67656865696d") {
		t.Errorf("the password is shown:\n%s", all)
	}
}

// TestMissingSecret: the session is down with the reason, and comes up as soon
// as the secret is there; another session never notices.
func TestMissingSecret(t *testing.T) {
	t.Parallel()
	h := hosts(t, 3)
	dir := t.TempDir()
	for i, password := range []string{"geheim", ""} {
		startFRRAs(t, remote{self: h[i+1], asn: 64999, peer: h[0], peerASN: 64512, password: password})
	}
	v := []string{
		fmt.Sprintf(`{"peerIP":%q,"asNumber":64999,"password":{"secretKeyRef":{"name":"s","key":"k"}}}`, h[1]),
		fmt.Sprintf(`{"peerIP":%q,"asNumber":64999}`, h[2]),
	}
	c := newDaemonOf(t, Options{Node: "node1", SecretDir: dir})
	c.send(store.Batch{Synced: true, Events: []store.Event{
		bgpNode(t, "node1", h[0].String()+"/24"), conf(t, "default", `{"bindMode":"NodeIP"}`), peer(t, "with", v[0]), peer(t, "without", v[1]),
	}})
	with := func() PeerStatus { return c.peer("with") }
	poll(t, func() string { return fmt.Sprint(with()) }, func() bool {
		return with().State == StateDown && strings.Contains(with().Info, "secret s/k is missing") && strings.HasSuffix(with().Info, "; the session is not run without it")
	})
	poll(t, func() string { return fmt.Sprint(c.peer("without")) }, func() bool { return c.peer("without").State == StateUp })
	since := c.peer("without").Since
	writeSecret(t, dir, SecretRef{"s", "k"}, "geheim\n")
	poll(t, func() string { return fmt.Sprint(with()) }, func() bool { return with().State == StateUp })
	if err := os.Remove(filepath.Join(dir, "s", "k")); err != nil {
		t.Fatal(err)
	}
	poll(t, func() string { return fmt.Sprint(with()) }, func() bool { return with().State == StateDown })
	if now := c.peer("without").Since; !now.Equal(since) {
		t.Errorf("the other session was up since %s, and is since %s", since, now)
	}
}

// TestPasswordTakenAway: the passive side hears the peer when both go without the
// password that they had, and with it again.
func TestPasswordTakenAway(t *testing.T) {
	t.Parallel()
	h := hosts(t, 2)
	active, passive := newRun(t, SpeakerOptions{}), newRun(t, SpeakerOptions{})
	for _, password := range []string{"geheim", "", "geheim", "other", ""} {
		there, here := tor(h[0], h[1], 64999), waiting(tor(h[1], h[0], 64512))
		there.Password, here.Password = Password{password}, Password{password}
		passive.apply(testConfig(h[1], 64999, nil, here))
		active.apply(testConfig(h[0], 64512, nil, there))
		active.waitUp(h[1])
		passive.waitUp(h[0])
	}
}

// TestSecretsWithoutInotify: the kernel has no instance left. The daemon lives,
// reads what is there, reads it again each minute, and watches as soon as it
// may.
func TestSecretsWithoutInotify(t *testing.T) {
	t.Parallel()
	t.Run("the controller lives", func(t *testing.T) {
		t.Parallel()
		h := hosts(t, 2)
		dir := t.TempDir()
		writeSecret(t, dir, SecretRef{"s", "k"}, "geheim")
		d := newDaemonOf(t, Options{Node: "node1", SecretDir: dir}, func(c *Controller) {
			c.files.inotify = func() (int, error) { return -1, unix.EMFILE }
		})
		d.send(store.Batch{Synced: true, Events: []store.Event{
			bgpNode(t, "node1", h[0].String()+"/24"), conf(t, "default", `{"bindMode":"NodeIP"}`),
			peer(t, "with", fmt.Sprintf(`{"peerIP":%q,"asNumber":64999,"password":{"secretKeyRef":{"name":"s","key":"k"}}}`, h[1])),
		}})
		poll(t, func() string { return fmt.Sprint(d.peer("with")) }, func() bool {
			return d.peer("with").State == StateStart // it runs, with its password
		})
		d.stop() // reports the error of Run
	})
	t.Run("polls, then watches", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			var log bytes.Buffer
			c := New(Options{Log: slog.New(slog.NewTextHandler(&log, nil)), SecretDir: "/nowhere"})
			tries := 0
			c.files.inotify = func() (int, error) {
				if tries++; tries <= 3 {
					return -1, unix.EMFILE
				}
				return dirwatch.Open()
			}
			ctx, cancel := context.WithCancel(t.Context())
			var wg sync.WaitGroup
			wg.Go(func() { c.files.run(ctx) })
			began := time.Now()
			for range 3 {
				c.files.dirs <- []string{c.opts.SecretDir} // as each reconciliation does
				<-c.dirty
			}
			// For the first time at once: what changed before the refusal went unseen.
			if d := time.Since(began); d != 2*secretPoll {
				t.Errorf("read three times after %s, want %s", d, 2*secretPoll)
			}
			<-c.dirty // the watch began
			if d := time.Since(began); d != 3*secretPoll {
				t.Errorf("watched after %s", d)
			}
			cancel()
			wg.Wait()
			for _, says := range []string{"fs.inotify.max_user_instances", "watched again"} {
				if strings.Count(log.String(), says) != 1 {
					t.Errorf("the log should say %q once:\n%s", says, &log)
				}
			}
		})
	})
}

func TestDrops(t *testing.T) {
	t.Parallel()
	table := "TcpExt: SyncookiesSent TCPMD5NotFound TCPMD5Unexpected TCPMD5Failure TCPMinTTLDrop TCPAORequired TCPAOBad TCPAOKeyNotFound\nTcpExt: 9 1 2 3 4 5 6 7\nIpExt: InNoRoutes\nIpExt: 5\n"
	d := parseDrops(table)
	if want := (drops{missing: 1, unexpected: 2, wrong: 3, far: 4, aoMissing: 5, aoWrong: 6, aoUnknown: 7}); d != want {
		t.Fatalf("got %+v, want %+v", d, want)
	}
	plain, password, keys := Peer{}, Peer{Password: Password{"x"}}, Peer{AO: aoKeys([]store.TCPAOKey{{Name: "tor", Key: "k", Send: 1, Receive: 1}})}
	less := func(change func(*drops)) drops {
		was := d
		change(&was)
		return was
	}
	for _, c := range []struct {
		was  drops
		peer Peer
		says string
	}{
		{d, password, ""},
		{d, plain, ""},
		{d, keys, ""},
		{less(func(d *drops) { d.wrong-- }), password, "1 segments came signed with another password"},
		{less(func(d *drops) { d.missing-- }), password, "1 segments came without a signature"},
		{less(func(d *drops) { d.unexpected -= 2 }), plain, "2 segments came with a signature"},
		{less(func(d *drops) { d.aoWrong-- }), keys, "1 segments came signed with another secret or algorithm for a key's id"},
		{less(func(d *drops) { d.aoUnknown -= 2 }), keys, "2 segments came signed with, or asked for, a key that is not among 1 (tor/k"},
		{less(func(d *drops) { d.aoMissing-- }), keys, "1 segments came without a signature: does the peer have the keys?"},
		{less(func(d *drops) { d.aoUnknown-- }), plain, "1 segments came signed with keys: does the peer have some that annotation routerd.io/tcpAO lacks here?"},
		{less(func(d *drops) { d.missing-- }), keys, ""},
	} {
		if got := d.since(c.was).suspicion(c.peer); !strings.Contains(got, c.says) || c.says == "" && got != "" {
			t.Errorf("since %+v: %q, want %q", c.was, got, c.says)
		}
	}
	if got := d.since(drops{far: 1}).farther(2); !strings.Contains(got, "3 segments came from further away than 2 hops") || d.farther(0) != "" || d.since(d).farther(2) != "" {
		t.Errorf("further away: %q", got)
	}
}
