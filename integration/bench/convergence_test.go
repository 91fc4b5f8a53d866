package bench

import (
	"os"
	"path/filepath"
	"testing"
)

func TestMainPrefixes(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]int{
		"Basic info: size of leaf: 48 bytes.\nMain:\n\tLeaves:         3\n\tPrefixes:       10011\nLocal:\n\tPrefixes:  7\n": 10011,
		"":                   -1,
		"Main:\n":            -1,
		"Main:\n\tPrefixes:": -1,
	} {
		got, err := mainPrefixes(text)
		if want < 0 && err == nil || want >= 0 && got != want {
			t.Errorf("mainPrefixes(%q) = %d, %v; want %d", text, got, err, want)
		}
	}
}

// TestConverge takes the daemon through a small run: two ToRs announce the same
// prefixes, both are used, one is killed, and everything goes the other way.
func TestConverge(t *testing.T) {
	t.Parallel()
	p := Programs{Dir: programs(t), Profiles: t.TempDir()}
	c, err := converge(t.Context(), receivers(p)[0], 2000)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%+v", c)
	if c.feed <= 0 || c.withdraw <= 0 || c.lost <= 0 || c.gone <= 0 || c.peak <= 0 {
		t.Errorf("not measured: %+v", c)
	}
	for _, name := range []string{"feed.0.cpu", "feed.heap", "withdrawal.0.cpu", "withdrawal.heap"} {
		if st, err := os.Stat(filepath.Join(p.Profiles, "2000-prefixes-"+name)); err != nil || st.Size() == 0 {
			t.Errorf("no profile %s: %v", name, err)
		}
	}
}
