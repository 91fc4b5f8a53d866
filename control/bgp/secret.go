package bgp

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/routerd/routerd/control/bgp/engine/conn"
	"github.com/routerd/routerd/control/dirwatch"
)

// SecretRef names a secret and a key in it, as a Kubernetes secretKeyRef does.
type SecretRef struct{ Name, Key string }

func (r SecretRef) String() string { return r.Name + "/" + r.Key }

// Password is a session's TCP MD5 password (RFC 2385), or the text of a key for TCP-AO. It never shows itself
// in a log, an error or a dump; [Password.reveal] is for the speaker.
type Password struct{ text string }

// String implements [fmt.Stringer].
func (p Password) String() string {
	if p.text == "" {
		return ""
	}
	return "(set)"
}

// GoString implements [fmt.GoStringer].
func (p Password) GoString() string { return p.String() }

// Format implements [fmt.Formatter], so that no verb shows the text.
func (p Password) Format(f fmt.State, _ rune) { _, _ = f.Write([]byte(p.String())) }

// LogValue implements [slog.LogValuer].
func (p Password) LogValue() slog.Value { return slog.StringValue(p.String()) }

func (p Password) reveal() string { return p.text }

// maxPassword is what Linux takes for TCP_MD5SIG (TCP_MD5SIG_MAXKEYLEN), and for TCP-AO (TCP_AO_MAXKEYLEN).
const maxPassword = 80

// ReadSecret reads a password from the file NAME/KEY below dir, the layout in
// which Kubernetes mounts its secrets. A newline at the end does not count. The
// error says which file is at fault, and never what is in it.
func ReadSecret(dir string, ref SecretRef) (Password, error) {
	for _, part := range []string{ref.Name, ref.Key} {
		if !isFileName(part) {
			return Password{}, fmt.Errorf("secret %s: want a name and a key without slashes", ref)
		}
	}
	path := filepath.Join(dir, ref.Name, ref.Key)
	b, err := os.ReadFile(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return Password{}, fmt.Errorf("secret %s is missing: put it in %s", ref, path)
	case err != nil:
		return Password{}, fmt.Errorf("secret %s: %w", ref, err)
	}
	return passwordOf(ref, path, string(b))
}

func isFileName(s string) bool { return s != "" && s == filepath.Base(s) && s != "." && s != ".." }

// passwordOf makes the password of the text that a place has for a secret.
func passwordOf(ref SecretRef, place, text string) (Password, error) {
	text = strings.TrimRight(text, "\r\n")
	switch {
	case text == "":
		return Password{}, fmt.Errorf("secret %s: %s is empty", ref, place)
	case len(text) > maxPassword:
		return Password{}, fmt.Errorf("secret %s: %s holds %d bytes, and the kernel takes %d at most", ref, place, len(text), maxPassword)
	}
	return Password{text}, nil
}

// withSecrets fills in the passwords and keys that the peers ask for. A password that cannot be
// read, or keys of which there is none that the kernel can use, makes its session a down one with the reason, never one
// that is not signed.
func withSecrets(c Config, read func(SecretRef) (Password, error), try func(conn.Key) error) Config {
	peers := make([]Peer, len(c.Peers))
	copy(peers, c.Peers)
	for i := range peers {
		p := &peers[i]
		if !p.runs() && !p.listens() {
			continue
		}
		var err error
		if p.Secret != (SecretRef{}) {
			p.Password, err = read(p.Secret)
		}
		if p.AO.N > 0 {
			p.AO, p.Unread, err = p.AO.withTexts(read, try)
		}
		if err != nil {
			p.Problem = err.Error() + "; the session is not run without it"
		}
	}
	c.Peers = peers
	return c
}

// refs lists the secrets that the peers ask for.
func (c *Config) refs() []SecretRef {
	seen := map[SecretRef]bool{}
	var l []SecretRef
	add := func(r SecretRef) {
		if r != (SecretRef{}) && !seen[r] {
			seen[r] = true
			l = append(l, r)
		}
	}
	for _, p := range c.Peers {
		add(p.Secret)
		for _, k := range p.AO.all() {
			add(k.ref())
		}
	}
	return l
}

// secrets fills in the passwords and keys of a configuration, and has their changes followed. A directory of a secret's name
// comes before the Secret of Kubernetes that has it.
func (c *Controller) secrets(ctx context.Context, cfg Config) Config {
	refs := cfg.refs()
	if len(refs) > 0 {
		c.files.want(ctx, refs)
	}
	var objects []SecretRef // that no directory has
	if c.objects != nil {
		objects = slices.DeleteFunc(slices.Clone(refs), c.files.has)
		c.objects.want(ctx, objects)
	}
	if len(refs) == 0 {
		return cfg
	}
	doubts := map[SecretRef]string{}
	cfg = withSecrets(cfg, func(r SecretRef) (Password, error) {
		if !slices.Contains(objects, r) {
			return ReadSecret(c.files.dir, r)
		}
		p, doubt, err := c.objects.password(r)
		if doubt != "" {
			doubts[r] = doubt
		}
		return p, err
	}, conn.TryKey)
	for i := range cfg.Peers {
		p := &cfg.Peers[i]
		if doubt := p.doubt(doubts); doubt != "" && p.wanted() {
			p.Unread = strings.TrimPrefix(p.Unread+"; "+doubt, "; ")
		}
	}
	return cfg
}

// doubt says of the first of the peer's secrets that has one why it is in doubt.
func (p *Peer) doubt(of map[SecretRef]string) string {
	if doubt := of[p.Secret]; doubt != "" {
		return doubt
	}
	for _, k := range p.AO.all() {
		if doubt := of[k.ref()]; doubt != "" {
			return doubt
		}
	}
	return ""
}

// secretFiles are secrets in files of a directory, as [ReadSecret] says.
type secretFiles struct {
	dir     string
	log     *slog.Logger
	changed func()

	dirs    chan []string       // to watch
	inotify func() (int, error) // inotify_init1(2); a field so that a test can have it refused
}

func newSecretFiles(dir string, log *slog.Logger, changed func()) *secretFiles {
	return &secretFiles{dir: dir, log: log, changed: changed, dirs: make(chan []string), inotify: dirwatch.Open}
}

// has reports whether there is something of a secret's name.
func (f *secretFiles) has(r SecretRef) bool {
	if !isFileName(r.Name) {
		return false
	}
	_, err := os.Lstat(filepath.Join(f.dir, r.Name))
	return err == nil
}

// want has the changes of secrets followed. It is to be called before they are read: what changes in between wakes the controller again.
func (f *secretFiles) want(ctx context.Context, refs []SecretRef) {
	dirs := []string{f.dir}
	for _, r := range refs {
		dirs = append(dirs, filepath.Join(f.dir, r.Name))
	}
	select {
	case f.dirs <- dirs:
	case <-ctx.Done():
	}
}

// secretPoll is how often secrets are read while the kernel lets no program watch
// them.
const secretPoll = time.Minute

// run calls changed when a file of a secret changes, until ctx
// ends. Where that cannot be watched it calls it from time to time. Without any
// secret nothing is watched.
func (f *secretFiles) run(ctx context.Context) {
	w := dirwatch.Watch{Open: f.inotify, Lists: f.dirs, Changed: f.changed, Interval: secretPoll, Refused: func(err error) {
		if err == nil {
			f.log.Info("bgp secrets watched again")
			return
		}
		f.log.Warn("bgp secrets are not watched; they are read periodically", "error", err, "interval", secretPoll)
	}}
	select {
	case <-ctx.Done():
		return
	case w.Dirs = <-f.dirs:
	}
	w.Run(ctx)
}
