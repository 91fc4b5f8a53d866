package main

import (
	"bufio"
	"cmp"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/async"
	"github.com/routerd/routerd/control/atomicfile"
	"github.com/routerd/routerd/control/config"
	"github.com/routerd/routerd/control/join"
	"github.com/routerd/routerd/control/presence"
	"github.com/routerd/routerd/store/embedded"
	"github.com/routerd/routerd/store/etcd"
)

// systemd is how the service is started, where there is a systemd.
type systemd struct {
	booted    string // is there if the system was booted with it: sd_booted(3)
	unitReads string // the configuration that the unit's daemon reads
}

// hostSystemd is that of a real host.
func hostSystemd() systemd { return systemd{"/run/systemd/system", config.DefaultFile} }

const unitName = "routerd.service"

func (s systemd) isThere() bool {
	_, err := os.Lstat(s.booted)
	return err == nil
}

func (s systemd) run(ctx context.Context, args ...string) error {
	out, err := exec.CommandContext(ctx, "systemctl", args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("systemctl %s: %w: %s", strings.Join(args, " "), err, bytesOrNothing(out))
	}
	return nil
}

func bytesOrNothing(b []byte) string { return cmp.Or(strings.TrimSpace(string(b)), "it says nothing") }

func newJoinCommand(sd systemd) *cobra.Command {
	var file, token, tokenFile string
	var force, noStart bool
	var wait time.Duration
	cmd := &cobra.Command{
		Use:   "join [HOST]",
		Short: "Take this host into a cluster whose datastore another host keeps",
		Long: `Take this host into the cluster of a host that keeps the datastore and serves it
to others (datastore.embedded.listen). "routerctl cluster token" on that host makes the
token, and prints this command whole. HOST, or HOST:PORT, is another address of it than
the token has.

The other host is authenticated by the token before anything is sent. This host makes a
key, which never leaves it, and gets a certificate for it; both are written below
stateDir, and the section "datastore" of the configuration says so. Nothing that
somebody wrote is replaced: what is in the way is named, and --force replaces it. Then
the service is enabled and started, where systemd is there, and waited for.

Whatever ended it, the same command goes on where it stopped, for as long as the token
is good.`,
		Example: `  routerd join 10.1.0.11 --token rjt1.…
  ssh 10.1.0.11 routerctl cluster token -o token | routerd join --token-file -`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			text, err := readToken(token, tokenFile, cmd.InOrStdin())
			if err != nil {
				return err
			}
			t, err := join.ParseToken(text)
			if err != nil {
				return err
			}
			if len(args) > 0 {
				if t, err = t.At(args[0]); err != nil {
					return err
				}
			}
			c, err := config.Load(file)
			if err != nil {
				return err
			}
			if os.Geteuid() != 0 {
				return errors.New("routerd join must be root: it writes the configuration and starts the service; use sudo")
			}
			j := joiner{
				out: cmd.OutOrStdout(), cfg: c, file: cmp.Or(file, config.DefaultFile), token: t, force: force,
				start: !noStart, wait: wait, systemd: sd,
			}
			return j.run(cmd.Context())
		},
	}
	cmd.Flags().StringVarP(&file, "config", "c", "", "configuration file to write (default "+config.DefaultFile+")")
	cmd.Flags().StringVar(&token, "token", "", "what \"routerctl cluster token\" printed")
	cmd.Flags().StringVar(&tokenFile, "token-file", "", "file with the token, which keeps it out of the list of processes; - is standard input")
	cmd.Flags().BoolVar(&force, "force", false, "replace the configuration of the datastore, and credentials of another cluster; leave an embedded datastore behind")
	cmd.Flags().BoolVar(&noStart, "no-start", false, "write everything, and start nothing")
	cmd.Flags().DurationVar(&wait, "wait", time.Minute, "how long to wait until the daemon is ready")
	return cmd
}

// readToken returns the token, from wherever it comes.
func readToken(token, file string, stdin io.Reader) (string, error) {
	switch {
	case token != "" && file != "":
		return "", errors.New("--token and --token-file exclude each other")
	case file == "-":
		line, err := bufio.NewReader(io.LimitReader(stdin, 4096)).ReadString('\n')
		if err != nil && !errors.Is(err, io.EOF) {
			return "", fmt.Errorf("read the token: %w", err)
		}
		return line, nil
	case file != "":
		b, err := os.ReadFile(file)
		if err != nil {
			return "", fmt.Errorf("read the token: %w", err)
		}
		return string(b), nil
	}
	return token, nil
}

// joiner takes this host into a cluster. Each step finds what an earlier run has done.
type joiner struct {
	out     io.Writer
	cfg     config.Config
	file    string // of the configuration
	token   join.Token
	force   bool
	start   bool
	wait    time.Duration
	systemd systemd

	began    time.Time
	node     string
	admitted bool // in this run
}

func (j *joiner) say(format string, args ...any) { fmt.Fprintf(j.out, format+"\n", args...) }

func (j *joiner) run(ctx context.Context) error {
	j.began = time.Now()
	var err error
	if j.node, err = j.cfg.Name(); err != nil {
		return err
	}
	if err := os.MkdirAll(j.cfg.StateDir, 0o700); err != nil {
		return fmt.Errorf("make stateDir: %w", err)
	}
	alone, err := j.alone()
	if err != nil {
		return err
	}
	defer alone.Close()
	if err := j.leavesNothing(); err != nil {
		return err
	}
	endpoint, err := j.admit(ctx)
	if err != nil {
		return err
	}
	if err := j.configure(endpoint); err != nil {
		return err
	}
	// The token is of no use to this host any more, and is to be of none to others. An
	// earlier run may have said so.
	if err := join.Done(ctx, j.token, join.Host{}); err != nil && j.admitted {
		j.say("The token could not be ended (%v); it ends at %s.", err, j.token.Expires.Format(time.DateTime))
	}
	return j.startService(ctx)
}

// alone keeps a second run of the command out.
func (j *joiner) alone() (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(j.cfg.StateDir, "join.lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock this host: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		return nil, fmt.Errorf("another routerd join runs on this host: wait for its end (%w)", err)
	}
	return f, nil
}

// leavesNothing refuses a host that has a datastore of its own, in which something
// may be.
func (j *joiner) leavesNothing() error {
	if !j.cfg.Datastore.Own() {
		return nil
	}
	data := j.cfg.EtcdDir()
	if _, err := os.Stat(filepath.Join(data, "member")); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	workloads, err := filepath.Glob(filepath.Join(j.cfg.WorkloadDir(), "*"))
	if err != nil {
		return err
	}
	if j.force {
		j.say("The embedded datastore of this host stays in %s, and is not used any more.", data)
		return nil
	}
	has := ""
	if len(workloads) > 0 {
		has = fmt.Sprintf(", and %d workloads have addresses by it", len(workloads))
	}
	return fmt.Errorf("this host has an embedded datastore of its own in %s%s: what is in there is not in the cluster's; save what is of use (routerctl datastore export), end its workloads, stop routerd, and move the directory away; or say --force to leave it behind", data, has)
}

// host is this host, as it asks.
func (j *joiner) host(key crypto.Signer) (join.Host, error) {
	h := join.Host{Node: j.node, Key: key}
	b, err := os.ReadFile(filepath.Join(j.cfg.StateDir, incarnationFile))
	if errors.Is(err, fs.ErrNotExist) {
		return h, nil
	}
	var id presence.Identity
	if err == nil {
		err = json.Unmarshal(b, &id)
	}
	if err != nil {
		return h, fmt.Errorf("read this machine's identity: %w", err)
	}
	h.Instance = id.Instance
	return h, nil
}

// admit has this host have credentials that the datastore takes, and returns its
// endpoint.
func (j *joiner) admit(ctx context.Context) (endpoint string, err error) {
	dir := j.cfg.ClientPKIDir()
	caFile, certFile, keyFile := embedded.ClientFiles(dir)
	want := config.Datastore{CAFile: caFile, CertFile: certFile, KeyFile: keyFile}
	have := j.cfg.Datastore
	if len(have.Endpoints) > 0 && have.CAFile == caFile && have.CertFile == certFile && have.KeyFile == keyFile {
		switch err := j.checkFiles(); {
		case err == nil:
			j.say("This host has its credentials in %s and is configured for %s.", dir, strings.Join(have.Endpoints, ", "))
			return have.Endpoints[0], nil
		case !j.force:
			return "", fmt.Errorf("%s: %w; to join the token's cluster instead of that of before, say --force", dir, err)
		}
	}
	// What stands in the way is found before the token is used.
	want.Endpoints = []string{"https://" + j.token.Address}
	if _, err := j.edit(want); err != nil {
		return "", err
	}
	key, err := j.key()
	if err != nil {
		return "", err
	}
	host, err := j.host(key)
	if err != nil {
		return "", err
	}
	a, err := join.Ask(ctx, j.token, host)
	if err != nil {
		return "", err
	}
	j.admitted = true
	j.say("%s has admitted this host as %s.", j.token.Address, j.node)
	if err := atomicfile.Write(caFile, a.CA, 0o600); err != nil {
		return "", err
	}
	if err := atomicfile.Write(certFile, a.Certificate, 0o600); err != nil {
		return "", err
	}
	j.say("Wrote its key, its certificate and the authority's to %s.", dir)
	want.Endpoints = []string{a.Endpoint}
	if err := j.reach(ctx, want); err != nil {
		return "", err
	}
	return a.Endpoint, nil
}

// checkFiles reports why the credentials that are there are not those of this host in
// the token's cluster.
func (j *joiner) checkFiles() error {
	caFile, certFile, keyFile := embedded.ClientFiles(j.cfg.ClientPKIDir())
	ca, err := os.ReadFile(caFile)
	if err != nil {
		return err
	}
	if err := join.CheckCA(ca, j.token.CA); err != nil {
		return fmt.Errorf("%s: %w", caFile, err)
	}
	cert, err := os.ReadFile(certFile)
	if err != nil {
		return err
	}
	key, err := etcd.ReadKey(keyFile)
	if err != nil {
		return err
	}
	have, err := join.CheckCertificate(ca, cert, j.node, key.Public())
	if err != nil {
		return fmt.Errorf("%s: %w", certFile, err)
	}
	if time.Now().After(have.NotAfter) {
		return fmt.Errorf("%s ended on %s", certFile, have.NotAfter.Format(time.DateOnly))
	}
	return nil
}

// key returns the key of this host: the one that is there if it has no certificate
// yet or one of this cluster, else a new one.
func (j *joiner) key() (crypto.Signer, error) {
	_, certFile, keyFile := embedded.ClientFiles(j.cfg.ClientPKIDir())
	key, err := etcd.ReadKey(keyFile)
	_, certErr := os.Stat(certFile)
	switch {
	case err == nil && errors.Is(certErr, fs.ErrNotExist):
		return key, nil // a run that was ended before it had the answer
	case err == nil:
		if err := j.checkFiles(); err == nil {
			return key, nil // one that was ended before it wrote the configuration
		} else if !j.force {
			return nil, fmt.Errorf("this host has credentials already: %w: is it in another cluster? To replace them, say --force", err)
		}
	case !errors.Is(err, fs.ErrNotExist) && !j.force:
		return nil, fmt.Errorf("%w: to replace it, say --force", err)
	case errors.Is(err, fs.ErrNotExist) && certErr == nil && !j.force:
		return nil, fmt.Errorf("%s is there, and its key %s is not: to replace it, say --force", certFile, keyFile)
	}
	if err := os.Remove(certFile); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	fresh, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make a key: %w", err)
	}
	der, err := x509.MarshalPKCS8PrivateKey(fresh)
	if err != nil {
		return nil, fmt.Errorf("make a key: %w", err)
	}
	if err := os.MkdirAll(filepath.Dir(keyFile), 0o700); err != nil {
		return nil, err
	}
	// Before it is used: who is ended meanwhile asks again with the same key.
	return fresh, atomicfile.Write(keyFile, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), 0o600)
}

// reach asks the datastore something with the new credentials.
func (j *joiner) reach(ctx context.Context, d config.Datastore) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	s, err := etcd.Open(ctx, etcd.Config{
		Endpoints: d.Endpoints, CAFile: d.CAFile, CertFile: d.CertFile, KeyFile: d.KeyFile, Logger: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		return err
	}
	_, err = s.Name(ctx, j.node)
	if err = errors.Join(err, s.Close()); err != nil {
		return fmt.Errorf("the datastore of the other host is not reached with this host's certificate: %w; mend it and run the same command again", err)
	}
	j.say("The datastore at %s answers.", d.Endpoints[0])
	return nil
}

// edit returns the configuration with the datastore of another host in it.
func (j *joiner) edit(d config.Datastore) (out []byte, err error) {
	text, err := os.ReadFile(j.file)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	out, err = config.UseDatastore(text, d, j.force)
	var written *config.Written
	switch {
	case errors.As(err, &written):
		return nil, fmt.Errorf("%s: %w: take it out, or say --force to replace it", j.file, err)
	case err != nil:
		return nil, fmt.Errorf("%s: %w", j.file, err)
	case string(out) == string(text):
		return nil, nil
	}
	return out, nil
}

// configure writes the section of the datastore.
func (j *joiner) configure(endpoint string) error {
	ca, cert, key := embedded.ClientFiles(j.cfg.ClientPKIDir())
	text, err := j.edit(config.Datastore{Endpoints: []string{endpoint}, CAFile: ca, CertFile: cert, KeyFile: key})
	if err != nil || text == nil {
		return err
	}
	mode := fs.FileMode(0o644)
	if info, err := os.Stat(j.file); err == nil {
		mode = info.Mode().Perm()
	}
	if err := os.MkdirAll(filepath.Dir(j.file), 0o755); err != nil {
		return err
	}
	if err := atomicfile.Write(j.file, text, mode); err != nil {
		return err
	}
	j.say("Wrote the section datastore of %s.", j.file)
	return nil
}

// startService starts the daemon, where systemd is there, and waits until it is ready.
func (j *joiner) startService(ctx context.Context) error {
	if !j.start || j.file != j.systemd.unitReads || !j.systemd.isThere() {
		command := "routerd run"
		if j.file != config.DefaultFile {
			command += " --config " + j.file
		}
		j.say("This host is configured. To start routerd, or start it anew: %s", command)
		return nil
	}
	for _, args := range [][]string{{"enable", unitName}, {"restart", unitName}} {
		if err := j.systemd.run(ctx, args...); err != nil {
			return fmt.Errorf("this host is configured, and routerd is not started: %w; see journalctl -u routerd, and run the same command again", err)
		}
	}
	j.say("Started %s.", unitName)
	return j.awaitReady(ctx)
}

// awaitReady waits for the daemon, and says what it waits for.
func (j *joiner) awaitReady(ctx context.Context) error {
	waiting, cancel := context.WithTimeout(ctx, j.wait)
	defer cancel()
	pause := async.Backoff{Min: 50 * time.Millisecond, Max: 500 * time.Millisecond}
	said := ""
	for {
		h, err := askHealth(waiting, j.cfg.OperatorSocket())
		why := notReady(h, err)
		if why == "" {
			j.say("%s is ready, %.1f s after the start of this command.", j.node, time.Since(j.began).Seconds())
			return nil
		}
		if err == nil && why != said {
			j.say("Waiting until %s is ready: %s", j.node, why)
			said = why
		}
		if err := pause.Wait(waiting); err != nil {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			return fmt.Errorf("this host is configured and routerd is started, but not ready after %s: %s; see routerctl node status and journalctl -u routerd", j.wait, cmp.Or(said, why))
		}
	}
}

func notReady(h *apiv1.Health, err error) string {
	switch {
	case err != nil:
		return err.Error()
	case h.GetReady().GetOk():
		return ""
	}
	return cmp.Or(h.GetReady().GetReason(), "it does not say why")
}
