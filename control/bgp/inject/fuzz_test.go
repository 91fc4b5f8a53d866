package inject

import (
	"os"
	"path/filepath"
	"testing"
	"time"
)

// FuzzFile: what the file of an earlier run says counts only as far as an owner could
// have said it, and what is kept of it is written and read again as the same.
func FuzzFile(f *testing.F) {
	for _, text := range []string{
		`{"boot":"a","routes":[{"prefix":"10.0.0.0/8","nextHop":"10.1.0.1","communities":["1:2"],"owner":"x","until":7200000000000}]}`,
		`{"boot":"a","routes":[{"prefix":"10.0.0.1/32","owner":"x","stream":true},{"prefix":"fd00::/8","owner":"y","process":{"pid":7,"start":100}}]}`,
		`{"boot":"a","routes":[{"prefix":"","owner":"x","until":9}]}`,
		`{"boot":"a","routes":[{"prefix":"10.0.0.1/8","owner":"x","stream":true},{"prefix":"10.0.0.0/8","stream":true}]}`,
		`{"boot":"a","routes":[{"prefix":"10.0.0.0/8","owner":"x"}]}`,
		`{"boot":"a","routes":[{"prefix":"10.0.0.0/8","owner":"x","until":9223372036854775807}]}`,
		`{"boot":"a","routes":[{"prefix":"10.0.0.0/8","nextHop":"fd00::1","owner":"x","stream":true}]}`,
		`{"boot":"a","routes":[null]}`, `null`, `[`,
	} {
		f.Add([]byte(text))
	}
	name := filepath.Join(f.TempDir(), "injected")
	f.Fuzz(func(t *testing.T, text []byte) {
		if err := os.WriteFile(name, text, 0o600); err != nil {
			t.Fatal(err)
		}
		start := func() *Table {
			table, _ := open(Options{MaxRoutes: 3, File: name}, "a", func() time.Duration { return time.Hour }, func(pid int) uint64 { return map[int]uint64{7: 100}[pid] })
			return table
		}
		table := start()
		for _, e := range table.List() {
			if !e.Prefix.IsValid() || e.Prefix != e.Prefix.Masked() {
				t.Errorf("prefix %s is kept", e.Prefix)
			}
			if e.Owner == "" || len(e.Owner) > maxName {
				t.Errorf("%s is of owner %q", e.Prefix, e.Owner)
			}
			if e.TTL == 0 && e.PID == 0 || e.TTL > MaxTTL {
				t.Errorf("%s goes with process %d or after %s", e.Prefix, e.PID, e.TTL)
			}
			if hop := e.NextHop; hop.IsValid() && hop.Is4() != e.Prefix.Addr().Is4() {
				t.Errorf("%s goes by %s", e.Prefix, hop)
			}
		}
		kept := has(table)
		if err := table.save(); err != nil {
			t.Fatal(err)
		}
		if again := has(start()); again != kept {
			t.Errorf("kept %q, and after another restart %q", kept, again)
		}
	})
}
