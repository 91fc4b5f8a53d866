package store_test

import (
	"testing"

	"github.com/routerd/routerd/store"
)

func TestParseAddress(t *testing.T) {
	for s, want := range map[string]string{
		"10.1.0.11/24": "10.1.0.11/24", "10.1.0.11": "10.1.0.11/32", "fd00::1": "fd00::1/128", "fd00::1/64": "fd00::1/64",
	} {
		if got, err := store.ParseAddress(s); err != nil || got.String() != want {
			t.Errorf("ParseAddress(%q) = %s, %v; want %s", s, got, err, want)
		}
	}
	for _, s := range []string{"", "node1", "10.1.0", "10.1.0.11/33"} {
		if got, err := store.ParseAddress(s); err == nil {
			t.Errorf("ParseAddress(%q) = %s, want an error", s, got)
		}
	}
}
