package main

import (
	"crypto"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/store/embedded"
)

// age has a host's certificate of the first host's datastore be one that ends so much
// later than now.
func age(t *testing.T, first *running, certFile string, left time.Duration) {
	t.Helper()
	pki := filepath.Join(first.dir, "state", "etcd", "pki")
	ca, err := tls.LoadX509KeyPair(filepath.Join(pki, "ca.crt"), filepath.Join(pki, "ca.key"))
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(certFile)
	if err != nil {
		t.Fatal(err)
	}
	block, _ := pem.Decode(text)
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	end := time.Now().Add(left)
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: cert.Subject, NotBefore: end.AddDate(-2, 0, 0), NotAfter: end,
		KeyUsage: cert.KeyUsage, ExtKeyUsage: cert.ExtKeyUsage,
	}, ca.Leaf, cert.PublicKey, ca.PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(certFile, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600); err != nil {
		t.Fatal(err)
	}
}

// TestRenewal: a joined host whose certificate nears its end gets another one, of its
// name and for another key, over the datastore. Where its files cannot be written,
// node status names the cure; after the end routerd join does.
func TestRenewal(t *testing.T) {
	t.Parallel()
	first, two := twoHosts(t)
	two.config["health"] = map[string]any{"listen": "127.0.0.1:9099"}
	file := two.writeConfig()
	args := []string{"join", "--config", file, "--token", first.token(), "--no-start"}
	if code, out := two.routerd(args...); code != 0 {
		t.Fatalf("join: %d\n%s", code, out)
	}
	dir := filepath.Join(two.dir, "state", "pki")
	_, certFile, keyFile := embedded.ClientFiles(dir)
	old, err := tls.LoadX509KeyPair(certFile, keyFile)
	if err != nil {
		t.Fatal(err)
	}

	age(t, first, certFile, -time.Hour)
	if code, out := two.routerd(args...); code == 0 || mentions(out, "client.crt ended on", "--force") != nil {
		t.Errorf("join with a certificate that has ended: %d\n%s", code, out)
	}

	age(t, first, certFile, 60*24*time.Hour)
	readOnly := func(flags uintptr) {
		t.Helper()
		if err := unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_BIND|flags, ""); err != nil {
			t.Fatal(err)
		}
	}
	if err := unix.Mount(dir, dir, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	readOnly(unix.MS_RDONLY)
	second := two.startFrom(file)
	second.ready()
	second.when("the cure is named", func(n *apiv1.NodeResponse) error {
		c := conditionOf(n, "Certificates")
		if c.GetOk() {
			return errors.New("all is well")
		}
		return mentions(c.GetReason(), certFile, "read-only file system", "ReadWritePaths="+dir)
	})
	two.endShown(endOf(t, certFile))
	if state := second.kill(syscall.SIGTERM); !state.Success() {
		t.Errorf("stopped: %v", state)
	}
	readOnly(0)

	second = two.startFrom(file)
	await.Until(t, "there is another certificate, and its key", func() error {
		pair, err := tls.LoadX509KeyPair(certFile, keyFile)
		if err != nil {
			return err
		}
		if left := time.Until(pair.Leaf.NotAfter); left < 700*24*time.Hour {
			return fmt.Errorf("it ends in %v", left)
		}
		if key, ok := old.Leaf.PublicKey.(interface{ Equal(crypto.PublicKey) bool }); pair.Leaf.Subject.CommonName != "host12" || !ok || key.Equal(pair.Leaf.PublicKey) {
			t.Errorf("it is of %s, with the key of before", pair.Leaf.Subject)
		}
		return nil
	})
	second.ready()
	second.when("all is well", func(n *apiv1.NodeResponse) error {
		if c := conditionOf(n, "Certificates"); !c.GetOk() {
			return errors.New(c.GetReason())
		}
		return nil
	})
	two.endShown(endOf(t, certFile))
	first.tells(1, "a host got another certificate", "host=host12")
	// The daemon is a client by it, from its next connection on.
	second.kill(syscall.SIGKILL)
	second = two.startFrom(file)
	second.ready()
	if _, err := second.attach("pod1"); err != nil {
		t.Error(err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 3 {
		t.Errorf("files: %v, %v", entries, err)
	}
	if l := append(first.log.lines("level=ERROR"), second.log.lines("level=ERROR")...); len(l) > 0 {
		t.Errorf("log: %s", strings.Join(l, "\n"))
	}
}
