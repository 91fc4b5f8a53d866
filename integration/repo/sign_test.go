package repo

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestSign: what .ci/sign signs is checked as docs/operations/packages.md says, and one byte that is another is noticed.
func TestSign(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	sums, key := filepath.Join(dir, "SHA256SUMS"), filepath.Join(dir, "key")
	content := []byte("0123  routerd_1.2.3_amd64.deb\n")
	if err := os.WriteFile(sums, content, 0o600); err != nil {
		t.Fatal(err)
	}
	run := func(stdin []byte, command ...string) (string, error) {
		c := exec.CommandContext(t.Context(), command[0], command[1:]...)
		c.Stdin = bytes.NewReader(stdin)
		out, err := c.CombinedOutput()
		return string(out), err
	}
	if out, err := run(nil, "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	sign := filepath.Join("..", "..", ".ci", "sign")
	if out, err := run(nil, sign, sums, ""); err != nil || !strings.Contains(out, "is not signed: SIGN_KEY names no SSH key") {
		t.Errorf("without a key: %v\n%s", err, out)
	}
	if out, err := run(nil, sign, sums, filepath.Join(dir, "none")); err == nil || !strings.Contains(out, "cannot be read") {
		t.Errorf("with a key that is not there: %v\n%s", err, out)
	}
	if out, err := run(nil, sign, sums, key); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	pub, err := os.ReadFile(key + ".pub")
	if err != nil {
		t.Fatal(err)
	}
	signers := filepath.Join(dir, "allowed_signers")
	if err := os.WriteFile(signers, append([]byte(`release namespaces="routerd-release" `), pub...), 0o600); err != nil {
		t.Fatal(err)
	}
	verify := []string{"ssh-keygen", "-Y", "verify", "-f", signers, "-I", "release", "-n", "routerd-release", "-s", sums + ".sig"}
	if out, err := run(content, verify...); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	content[0] = '9'
	if out, err := run(content, verify...); err == nil {
		t.Errorf("another file is taken for what was signed:\n%s", out)
	}
}
