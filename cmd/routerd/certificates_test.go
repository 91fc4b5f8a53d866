package main

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/routerd/routerd/control/renewal"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store/embedded"
	"github.com/routerd/routerd/store/etcd"
)

// A certificate of the embedded datastore that another host copied is named from 90
// days before its end on; the authority that made it, 30 years later.
func TestCertificates(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	free := l.Addr().(*net.TCPAddr).AddrPort()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	conf := embedded.Config{Listen: free, Dir: filepath.Join(dir, "etcd"), PKIDir: filepath.Join(dir, "pki"), Socket: filepath.Join(dir, "s.sock")}
	s, err := embedded.Start(await.Context(t), conf)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	const day = 24 * time.Hour
	ca, cert := filepath.Join(conf.PKIDir, "ca.crt"), filepath.Join(conf.PKIDir, "client.crt")
	none := filepath.Join(dir, "none.crt")
	for _, tt := range []struct {
		name  string
		conf  etcd.Config
		after time.Duration
		says  string // empty: nothing
	}{
		{"no certificates", etcd.Config{}, 100 * 365 * day, ""},
		{"young", etcd.Config{CAFile: ca, CertFile: cert}, day, ""},
		{"91 days left", etcd.Config{CAFile: ca, CertFile: cert}, (2*365 - 91) * day, ""},
		{"89 days left", etcd.Config{CAFile: ca, CertFile: cert}, (2*365 - 89) * day, "client.crt ends on"},
		{"ended", etcd.Config{CAFile: ca, CertFile: cert}, (2*365 + 1) * day, "client.crt ended on"},
		{"authority", etcd.Config{CAFile: ca}, (30*365 - 80) * day, "which needs no restart"},
		{"cannot be read", etcd.Config{CertFile: none}, 0, none},
	} {
		c := certificates{now: filesOf(tt.conf.Expiry, tt.conf.CAFile, false)}
		now := time.Now().Add(tt.after)
		err := c.problem(now)
		if (err == nil) != (tt.says == "") || err != nil && !strings.Contains(err.Error(), tt.says) {
			t.Errorf("%s: %v, want %q", tt.name, err, tt.says)
		}
	}
	file := etcd.Config{CertFile: cert}
	readOnly := fmt.Errorf("%w: %w", renewal.ErrFiles, syscall.EROFS)
	for _, tt := range []struct {
		name  string
		c     *certificates
		after time.Duration
		says  []string // nil: nothing
	}{
		{"it is asked for", &certificates{now: filesOf(file.Expiry, "", false), renewal: func() error { return errors.New("not answered") }}, (2*365 - 100) * day, nil},
		{"nobody answers", &certificates{now: filesOf(file.Expiry, "", false), renewal: func() error { return errors.New("not answered") }}, (2*365 - 80) * day, []string{"goes on asking", "not answered"}},
		{"nobody answered", &certificates{now: filesOf(file.Expiry, "", false), renewal: func() error { return errors.New("not answered") }}, (2*365 + 1) * day, []string{"routerd join --force"}},
		{"files that cannot be written", &certificates{now: filesOf(file.Expiry, "", false), renewal: func() error { return readOnly }}, (2*365 - 200) * day, []string{"ReadWritePaths=" + conf.PKIDir, "read-only file system", "stateDir"}},
		{"a server's", &certificates{now: filesOf(file.Expiry, "", true)}, (2*365 - 80) * day, []string{"every 12 h"}},
		{"a server's authority", &certificates{now: filesOf(etcd.Config{CAFile: ca}.Expiry, ca, true)}, (30*365 - 80) * day, []string{"another authority"}},
	} {
		err := tt.c.problem(time.Now().Add(tt.after))
		if (err == nil) != (tt.says == nil) || err != nil && mentions(err.Error(), tt.says...) != nil {
			t.Errorf("%s: %v, want %q", tt.name, err, tt.says)
		}
	}
	c := certificates{now: filesOf((&etcd.Config{CertFile: none}).Expiry, "", false)}
	now := time.Now()
	if c.problem(now) == nil || !c.expiry().IsZero() {
		t.Error("a file that is not there is none")
	}
	b, err := os.ReadFile(cert)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(none, b, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := c.problem(now.Add(readCertificates)); err != nil {
		t.Errorf("it is there now: %v", err)
	}
}

func filesOf(expires func() (string, time.Time, error), ca string, serves bool) func() certificateFiles {
	return func() certificateFiles { return certificateFiles{expires: expires, ca: ca, serves: serves} }
}
