package renewal

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

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
		c := &Certificates{now: filesOf(tt.conf.Expiry, tt.conf.CAFile, false)}
		now := time.Now().Add(tt.after)
		err := c.Problem(now)
		if (err == nil) != (tt.says == "") || err != nil && !strings.Contains(err.Error(), tt.says) {
			t.Errorf("%s: %v, want %q", tt.name, err, tt.says)
		}
	}
	file := etcd.Config{CertFile: cert}
	readOnly := fmt.Errorf("%w: %w", ErrFiles, syscall.EROFS)
	for _, tt := range []struct {
		name  string
		c     *Certificates
		after time.Duration
		says  []string // nil: nothing
	}{
		{"it is asked for", &Certificates{now: filesOf(file.Expiry, "", false), renewal: func() error { return errors.New("not answered") }}, (2*365 - 100) * day, nil},
		{"nobody answers", &Certificates{now: filesOf(file.Expiry, "", false), renewal: func() error { return errors.New("not answered") }}, (2*365 - 80) * day, []string{"goes on asking", "not answered"}},
		{"nobody answered", &Certificates{now: filesOf(file.Expiry, "", false), renewal: func() error { return errors.New("not answered") }}, (2*365 + 1) * day, []string{"routerd join --force"}},
		{"files that cannot be written", &Certificates{now: filesOf(file.Expiry, "", false), renewal: func() error { return readOnly }}, (2*365 - 200) * day, []string{"ReadWritePaths=" + conf.PKIDir, "read-only file system", "stateDir"}},
		{"a server's", &Certificates{now: filesOf(file.Expiry, "", true)}, (2*365 - 80) * day, []string{"every 12 h"}},
		{"a server's authority", &Certificates{now: filesOf(etcd.Config{CAFile: ca}.Expiry, ca, true)}, (30*365 - 80) * day, []string{"another authority"}},
	} {
		err := tt.c.Problem(time.Now().Add(tt.after))
		unsaid := func(text string) bool { return !strings.Contains(err.Error(), text) }
		if (err == nil) != (tt.says == nil) || err != nil && slices.ContainsFunc(tt.says, unsaid) {
			t.Errorf("%s: %v, want %q", tt.name, err, tt.says)
		}
	}
	c := &Certificates{now: filesOf((&etcd.Config{CertFile: none}).Expiry, "", false)}
	now := time.Now()
	if c.Problem(now) == nil || !c.Expiry().IsZero() {
		t.Error("a file that is not there is none")
	}
	b, err := os.ReadFile(cert)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(none, b, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := c.Problem(now.Add(readCertificates)); err != nil {
		t.Errorf("it is there now: %v", err)
	}
}

func filesOf(expires func() (string, time.Time, error), ca string, serves bool) func() Files {
	return func() Files { return Files{Expires: expires, CA: ca, Serves: serves} }
}

// A host whose datastore is no etcd has no certificates of it, and is asked about them all
// the same.
func TestNoCertificates(t *testing.T) {
	t.Parallel()
	var none *Certificates
	if err, end := none.Problem(time.Now()), none.Expiry(); err != nil || !end.IsZero() {
		t.Errorf("it has some: %v, %v", err, end)
	}
}
