package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
)

// unbundle returns the files of an archive by their names.
func unbundle(t *testing.T, archive []byte) map[string]string {
	t.Helper()
	zip, err := gzip.NewReader(bytes.NewReader(archive))
	if err != nil {
		t.Fatal(err)
	}
	files := map[string]string{}
	for r := tar.NewReader(zip); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		if h.Mode != 0o600 {
			t.Errorf("%s has mode %o", h.Name, h.Mode)
		}
		files[h.Name] = string(b)
	}
}

func says(text string, err error) func(context.Context, io.Writer) error {
	return func(_ context.Context, w io.Writer) error {
		fmt.Fprint(w, text)
		return err
	}
}

// TestBundle: a question that fails, says too much or never ends is seen to have,
// and the others are answered.
func TestBundle(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := bundle{dir: "d", at: time.Unix(0, 0), patience: 20 * time.Second, limit: 8}
		var out bytes.Buffer
		failed, err := b.write(t.Context(), &out, []bundleFile{
			{"good.txt", "good", says("well\n", nil)},
			{"bad.txt", "bad -x", says("so far\n", errors.New("no daemon"))},
			{"long.txt", "long", says("0123456789", nil)},
			{"hangs.txt", "hangs", func(ctx context.Context, _ io.Writer) error { <-ctx.Done(); return ctx.Err() }},
			{"last.txt", "last", says("end\n", nil)},
		})
		if failed != 2 || err != nil {
			t.Errorf("%d failed, %v; want 2", failed, err)
		}
		want := map[string]string{
			"d/good.txt":  "well\n",
			"d/bad.txt":   "so far\n\n[bad -x: no daemon]\n",
			"d/long.txt":  "01234567\n[cut off after 8 bytes; run it by hand for all: long]\n",
			"d/hangs.txt": "\n[hangs: no answer within 20s]\n",
			"d/last.txt":  "end\n",
			"d/index.txt": strings.Join([]string{
				"good.txt                        0.0s  good: 5 bytes",
				"bad.txt                         0.0s  bad -x: no daemon",
				"long.txt                        0.0s  long: 8 bytes, cut off there",
				"hangs.txt                      20.0s  hangs: no answer within 20s",
				"last.txt                        0.0s  last: 4 bytes", "",
			}, "\n"),
		}
		if d := cmp.Diff(want, unbundle(t, out.Bytes())); d != "" {
			t.Errorf("files (-want +got):\n%s", d)
		}
	})
}

// TestBundleInterrupted: who interrupts it has no half of an archive taken for whole.
func TestBundleInterrupted(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	_, err := bundle{dir: "d", patience: time.Minute, limit: 8}.write(ctx, io.Discard, []bundleFile{
		{"a.txt", "a", func(context.Context, io.Writer) error { cancel(); return nil }},
	})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("write: %v; want that it was interrupted", err)
	}
}

// TestQuestions: every command line of a bundle is one that routerctl has.
func TestQuestions(t *testing.T) {
	t.Parallel()
	root := (&app{streams: streams{stdout: io.Discard, stderr: io.Discard}, daemon: &daemon{getenv: func(string) string { return "" }}}).command()
	for _, q := range append(ownQuestions(), clusterQuestions()...) {
		c, rest, err := root.Find(strings.Fields(q[1]))
		if err != nil {
			t.Errorf("%s: %v", q[1], err)
			continue
		}
		if err := c.ParseFlags(rest); err != nil {
			t.Errorf("%s: %v", q[1], err)
			continue
		}
		if err := c.ValidateArgs(c.Flags().Args()); err != nil || !c.Runnable() {
			t.Errorf("%s: %v, runnable %t", q[1], err, c.Runnable())
		}
	}
}
