package scenarios

import (
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab/traffic"
	"github.com/routerd/routerd/store"
)

// TestUpgrade: another build of the daemon takes over on one host after the
// other, put in place of the running one as package managers do, and no packet
// is lost.
func TestUpgrade(t *testing.T) {
	beside(t)
	dir := t.TempDir()
	for _, p := range []string{"routerd", "routerd-cni", "routerctl"} {
		copyProgram(t, filepath.Join(binDir(t), p), filepath.Join(dir, p))
	}
	next := filepath.Join(dir, "routerd.next")
	const version = "upgraded"
	build := exec.CommandContext(t.Context(), "go", "build", "-trimpath", "-ldflags", "-s -w -X main.version="+version, "-o", next, "./cmd/routerd")
	build.Dir = filepath.Join("..", "..")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build another routerd: %v\n%s", err, out)
	}

	l := bringFrom(t, "upgrade", topology(3, 2, store.VXLANCrossSubnet), dir)
	reach(t, l, traffic.Options{})
	load := startLoad(t, l, loadPairs()...)
	if err := os.Rename(next, filepath.Join(dir, "routerd")); err != nil {
		t.Fatal(err)
	}
	for _, h := range l.Hosts() {
		if out := routerctl(t, l, h, "", "version"); strings.Contains(out, version) {
			t.Fatalf("%s has the other build already: %s", h, out)
		}
		if err := l.Restart(await.Context(t), h); err != nil {
			t.Fatal(err)
		}
		if out := routerctl(t, l, h, "", "version"); !strings.Contains(out, version) {
			t.Fatalf("%s has not the other build: %s", h, out)
		}
		expectNoLoss(t, "upgrade of "+h, load)
	}
	reach(t, l, traffic.Options{})
}

func copyProgram(t *testing.T, from, to string) {
	t.Helper()
	in, err := os.Open(from)
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY|os.O_EXCL, 0o755)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(out, in); err != nil {
		t.Fatal(err)
	}
	if err := out.Close(); err != nil {
		t.Fatal(err)
	}
}
