package bgp

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
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
		if part == "" || part != filepath.Base(part) || part == "." || part == ".." {
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
	text := strings.TrimRight(string(b), "\r\n")
	switch {
	case text == "":
		return Password{}, fmt.Errorf("secret %s: %s is empty", ref, path)
	case len(text) > maxPassword:
		return Password{}, fmt.Errorf("secret %s: %s holds %d bytes, and the kernel takes %d at most", ref, path, len(text), maxPassword)
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

// secretPoll is how often secrets are read while the kernel lets no program watch
// them.
const secretPoll = time.Minute

// followSecrets wakes the controller when a file of a secret changes, until ctx
// ends. Where that cannot be watched it wakes it from time to time. Without any
// secret nothing is watched.
func (c *Controller) followSecrets(ctx context.Context) {
	failed := ""
	w := dirwatch.Watch{Open: c.inotify, Lists: c.secretDirs, Changed: func() {
		if failed != "" {
			c.log.Info("bgp secrets watched again")
			failed = ""
		}
		c.poke()
	}}
	select {
	case <-ctx.Done():
		return
	case w.Dirs = <-c.secretDirs:
	}
	for {
		err := w.Run(ctx)
		if ctx.Err() != nil {
			return
		}
		if failed != err.Error() {
			failed = err.Error()
			c.log.Warn("bgp secrets not watched: they are read from time to time", "error", err, "interval", secretPoll)
		}
		tick := time.NewTimer(secretPoll)
		for wait := true; wait; {
			select {
			case <-ctx.Done():
				tick.Stop()
				return
			case w.Dirs = <-c.secretDirs:
			case <-tick.C:
				wait = false
			}
		}
		c.poke()
	}
}
