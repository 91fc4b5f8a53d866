package embedded

import (
	"errors"
	"fmt"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

func TestIsFull(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name string
		err  error
		want bool
	}{
		{"nothing", nil, false},
		{"another reason", errors.New("etcd gave up: walpb: crc mismatch"), false},
		{"a system call", fmt.Errorf("write the key: %w", &os.PathError{Op: "write", Path: "/x", Err: unix.ENOSPC}), true},
		{"a quota", fmt.Errorf("write the key: %w", unix.EDQUOT), true},
		{"etcd's words", errors.New("etcd gave up: failed to commit tx, error write /x/db: no space left on device"), true},
	} {
		if got := IsFull(tt.err); got != tt.want {
			t.Errorf("%s: %t", tt.name, got)
		}
	}
}

// TestRoom: what it tries with is gone afterwards.
func TestRoom(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := Room(dir); err != nil {
		t.Error(err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
	if err := Room(dir + "/none"); err == nil {
		t.Error("there is room in a directory that is not there")
	}
}
