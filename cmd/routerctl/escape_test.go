package main

import (
	"bytes"
	"io"
	"testing"
	"testing/iotest"
)

// TestPrintable: nothing that is printed commands a terminal, however it is cut
// into writes.
func TestPrintable(t *testing.T) {
	t.Parallel()
	const (
		in   = "NAME\tx\n\x1b]0;title\a\x1b[2J row\r\u009b31m \u202e \x9b \x00\x7f ü € \xe2\x82"
		want = "NAME\tx\n" + `\u001b]0;title\u0007\u001b[2J row\u000d\u009b31m \u202e \x9b \u0000\u007f ü € `
	)
	for _, whole := range []bool{true, false} {
		var out bytes.Buffer
		var r io.Reader = bytes.NewReader([]byte(in))
		if !whole {
			r = iotest.OneByteReader(r)
		}
		if n, err := io.Copy(&printable{w: &out}, struct{ io.Reader }{r}); err != nil || n != int64(len(in)) {
			t.Errorf("wrote %d of %d: %v", n, len(in), err)
		}
		if got := out.String(); got != want {
			t.Errorf("in one write %t: got %q, want %q", whole, got, want)
		}
	}
}
