package manifest

import (
	"fmt"
	"strings"

	"github.com/routerd/routerd/store"
)

// Error is one thing that is wrong with a manifest.
type Error struct {
	Source   string // the file's name, or "-"
	Line     int    // counted from 1; 0 when no line can be named
	Document int    // counted from 1; 0 when it concerns the whole input
	Object   string // "IPPool(name)", as far as it is known
	Field    string // JSON path, such as spec.blockSize; empty for the whole object
	Message  string // what is wrong and how to mend it
}

// Error returns "file:line: document n: Kind(name): field: message".
func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString(e.Source)
	if e.Line > 0 {
		fmt.Fprintf(&b, ":%d", e.Line)
	}
	b.WriteString(": ")
	if e.Document > 0 {
		fmt.Fprintf(&b, "document %d: ", e.Document)
	}
	if e.Object != "" {
		b.WriteString(e.Object + ": ")
	}
	if e.Field != "" {
		b.WriteString(e.Field + ": ")
	}
	b.WriteString(e.Message)
	return b.String()
}

// Errors is everything that is wrong with the input, in its order. It matches
// store.ErrInvalid.
type Errors []*Error

// Error returns the entries, one on each line.
func (e Errors) Error() string {
	lines := make([]string, len(e))
	for i, err := range e {
		lines[i] = err.Error()
	}
	return strings.Join(lines, "\n")
}

// Is reports that an Errors is a store.ErrInvalid.
func (e Errors) Is(target error) bool { return target == store.ErrInvalid }

func (e Errors) err() error {
	if len(e) == 0 {
		return nil
	}
	return e
}
