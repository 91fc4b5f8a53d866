package vm

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"
	"testing/iotest"
)

// full takes no more.
type full struct{}

func (full) Write([]byte) (int, error) { return 0, errors.New("no room") }

func TestCopyUntil(t *testing.T) {
	t.Parallel()
	const mark = "\x00end\n"
	for _, tt := range []struct{ name, in, want string }{
		{"nothing but the mark", mark, ""},
		{"output and the mark", "a\nb" + mark, "a\nb"},
		{"what comes after it", "a" + mark + "b", "a"},
		{"something like it before it", "a\x00en\x00end\x00" + mark, "a\x00en\x00end\x00"},
		{"no mark: the machine died", "a\x00en", "a\x00en"},
		{"much", strings.Repeat("x\x00e", 100_000) + mark, strings.Repeat("x\x00e", 100_000)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			for _, r := range []io.Reader{strings.NewReader(tt.in), iotest.OneByteReader(strings.NewReader(tt.in))} {
				var out bytes.Buffer
				if err := copyUntil(&out, r, []byte(mark)); err != nil || out.String() != tt.want {
					t.Errorf("%d bytes, %v; want %d", out.Len(), err, len(tt.want))
				}
			}
			if err := copyUntil(full{}, strings.NewReader(tt.in), []byte(mark)); tt.want != "" && err == nil {
				t.Error("a writer without room: no error")
			}
		})
	}
}
