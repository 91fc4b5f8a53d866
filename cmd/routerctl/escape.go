package main

import (
	"fmt"
	"io"
	"unicode"
	"unicode/utf8"
)

// printable writes text with its control characters, but for tab and newline,
// escaped as JSON does: what somebody wrote into the datastore must not command the
// terminal of who reads it. Bytes that are no UTF-8 are written as \xNN. It is for
// one goroutine at a time.
type printable struct {
	w    io.Writer
	rest []byte // the beginning of a character whose end is still to come
}

func (p *printable) Write(b []byte) (int, error) {
	out, rest := appendPrintable(make([]byte, 0, len(b)), append(p.rest, b...))
	p.rest = append([]byte(nil), rest...)
	if _, err := p.w.Write(out); err != nil {
		return 0, err
	}
	return len(b), nil
}

// asPrinted returns text as a printable writes it, for who has to know how wide that is.
func asPrinted(s string) string {
	out, rest := appendPrintable(make([]byte, 0, len(s)), []byte(s))
	return string(out) + string(rest)
}

// appendPrintable appends what is written of text to out, and returns what is the beginning of a character.
func appendPrintable(out, in []byte) (written, rest []byte) {
	for len(in) > 0 {
		r, n := utf8.DecodeRune(in)
		switch {
		case r == utf8.RuneError && n == 1 && !utf8.FullRune(in):
			return out, in
		case r == utf8.RuneError && n == 1:
			out = fmt.Appendf(out, `\x%02x`, in[0])
		case r != '\n' && r != '\t' && unicode.In(r, unicode.Cc, unicode.Cf):
			out = fmt.Appendf(out, `\u%04x`, r)
		default:
			out = append(out, in[:n]...)
		}
		in = in[n:]
	}
	return out, nil
}
