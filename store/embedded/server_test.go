package embedded

import (
	"errors"
	"log/slog"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap"

	"github.com/routerd/routerd/integration/await"
)

// TestErr: a server that stops by itself says so, and can still be closed.
func TestErr(t *testing.T) {
	t.Parallel()
	for name, harm := range map[string]func(*Server){
		"etcd stops":    func(s *Server) { s.etcd.Server.HardStop() },
		"etcd gives up": func(s *Server) { s.died("no space left on device") },
	} {
		dir := t.TempDir()
		conf := Config{Dir: filepath.Join(dir, "data"), Socket: filepath.Join(dir, "s.sock")}
		s, err := Start(t.Context(), conf)
		if err != nil {
			t.Fatal(err)
		}
		harm(s)
		select {
		case err := <-s.Err():
			if err == nil || !strings.Contains(err.Error(), "embedded datastore: etcd") {
				t.Errorf("%s: got %v", name, err)
			}
		case <-time.After(await.Patience):
			t.Errorf("%s: no error", name)
		}
		if _, open := <-s.Err(); open {
			t.Errorf("%s: a second error", name)
		}
		s.Close()
		again, err := Start(t.Context(), conf)
		if err != nil {
			t.Errorf("%s: start again: %v", name, err)
			continue
		}
		again.Close()
	}
}

// TestLog: etcd's warnings come out as records of slog; where it means to end
// the process, only the goroutine ends, and its last words are kept.
func TestLog(t *testing.T) {
	t.Parallel()
	var out strings.Builder
	handler := slog.NewTextHandler(&out, &slog.HandlerOptions{Level: slog.LevelInfo, ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey {
			return slog.Attr{}
		}
		return a
	}})
	var words []string
	log := zapLogger(slog.New(handler), func(msg string) { words = append(words, msg) })
	log.Info("normal work")
	log.Warn("closing client listener")
	log.With(zap.String("member", "m")).Named("x").Warn("slow disk", zap.Duration("took", time.Second), zap.Error(errors.New("boo")))

	for _, end := range []func(){
		func() { log.Fatal("cannot write", zap.Error(errors.New("no space left on device"))) },
		func() { log.Panic("invalid downgrade", zap.String("current-server-version", "3.7.3")) },
	} {
		var wg sync.WaitGroup
		wg.Go(func() {
			end()
			t.Error("etcd went on after its end")
		})
		wg.Wait()
	}
	want := `level=WARN msg=etcd message="slow disk" error=boo member=m took=1s
level=ERROR msg=etcd message="cannot write" error="no space left on device"
level=ERROR msg=etcd message="invalid downgrade" current-server-version=3.7.3
`
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Errorf("log (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"cannot write, error no space left on device", "invalid downgrade, current-server-version 3.7.3"}, words); diff != "" {
		t.Errorf("last words (-want +got):\n%s", diff)
	}
}
