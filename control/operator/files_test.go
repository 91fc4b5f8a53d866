package operator

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestFilesError: a disk without room or inodes, one that is read-only, and a directory that is
// gone are each named.
func TestFilesError(t *testing.T) {
	t.Parallel()
	disk := func(options string, flags uintptr) string {
		dir := t.TempDir()
		if err := unix.Mount("tmpfs", dir, "tmpfs", flags, options); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := unix.Unmount(dir, 0); err != nil {
				t.Error(err)
			}
		})
		return dir
	}
	whole, readOnly, inodes := disk("size=4m", 0), disk("size=4m", unix.MS_RDONLY), disk("size=4m,nr_inodes=2", 0)
	if err := os.WriteFile(filepath.Join(inodes, "last"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for dir, want := range map[string]string{
		whole: "<nil>", readOnly: readOnly + " is read-only", inodes: inodes + " has no inode left", filepath.Join(whole, "gone"): "no such file",
	} {
		if got := fmt.Sprint(filesError([]string{dir})); !strings.Contains(got, want) {
			t.Errorf("%s, want %q", got, want)
		}
	}
	if err := os.WriteFile(filepath.Join(whole, "others"), make([]byte, 3<<20+1), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := fmt.Sprint(filesError([]string{readOnly, whole})); !strings.Contains(got, "the disk of "+whole+" is full") || !strings.Contains(got, readOnly+" is read-only") {
		t.Errorf("both: %s", got)
	}
}
