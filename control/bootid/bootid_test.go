package bootid

import (
	"regexp"
	"testing"
)

func TestRead(t *testing.T) {
	t.Parallel()
	id, err := Read()
	if err != nil || !regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`).MatchString(id) {
		t.Errorf("%q, %v: want the kernel's uuid", id, err)
	}
	if again, err := Read(); err != nil || again != id {
		t.Errorf("%q, %v: want %q again", again, err, id)
	}
}
