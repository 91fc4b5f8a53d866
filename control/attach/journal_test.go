package attach

import (
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/routerd/routerd/control/journal"
)

// TestJournalError: what the disk has lost of the journal is named, and where it is as it was.
func TestJournalError(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name, content string
		want          []string // nil: no error
	}{
		{name: "new"},
		{"damaged", "00000000 {\"k\":\"workload/x\",\"v\":1}\n", []string{"1 damaged lines", journal.BadSuffix, "routerctl ipam check"}},
	} {
		path := filepath.Join(t.TempDir(), "journal")
		if err := os.WriteFile(path, []byte(tt.content), 0o600); err != nil {
			t.Fatal(err)
		}
		j, err := journal.Open(path, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		err = JournalError(j)
		if (err != nil) != (tt.want != nil) {
			t.Errorf("%s: %v", tt.name, err)
		}
		for _, word := range tt.want {
			if err == nil || !strings.Contains(err.Error(), word) {
				t.Errorf("%s: %v, want %q in it", tt.name, err, word)
			}
		}
		if err := j.Close(); err != nil {
			t.Error(err)
		}
	}
}
