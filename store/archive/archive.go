// Package archive is a datastore's keys in a file: what `routerctl datastore export`
// writes and `import` reads. It is text, a line of JSON for each key with its value
// as it is stored, so that nothing is lost that routerd does not know, between a
// header and a sum by which damage and a missing end are found.
package archive

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"time"

	"github.com/routerd/routerd/store"
)

const (
	format  = "routerd-datastore"
	version = 1

	// maxLine bounds a line: etcd takes no value above 1.5 MiB.
	maxLine = 4 << 20
)

// Header is the first line.
type Header struct {
	Format      string         `json:"format"`
	Version     int            `json:"version"`
	ClusterGUID string         `json:"clusterGUID,omitempty"`
	Revision    store.Revision `json:"revision"` // zero where it was not known yet
	Time        time.Time      `json:"time"`
}

// Entry is one key.
type Entry struct {
	Path  string
	Value []byte
}

// line is an Entry as it is written: its value as JSON where it is that, as text that
// can be read and compared, else in base64.
type line struct {
	Key   string          `json:"key"`
	Value json.RawMessage `json:"value,omitempty"`
	Bytes []byte          `json:"base64,omitempty"`
}

// end is the last line.
type end struct {
	Keys int    `json:"keys"`
	Sum  string `json:"sha256"` // of all lines before it
}

// Writer writes an archive. Make one with [NewWriter]; [Writer.Close] completes it.
type Writer struct {
	out  io.Writer
	hash hash.Hash
	keys int
}

// NewWriter begins an archive.
func NewWriter(w io.Writer, h Header) (*Writer, error) {
	h.Format, h.Version = format, version
	sum := sha256.New()
	a := &Writer{out: io.MultiWriter(w, sum), hash: sum}
	return a, a.line(h)
}

func (a *Writer) line(v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	_, err = a.out.Write(append(b, '\n'))
	return err
}

// Write adds a key. Keys come in order.
func (a *Writer) Write(e Entry) error {
	l := line{Key: e.Path}
	// Only what comes back byte for byte may stand as JSON.
	if b, err := json.Marshal(json.RawMessage(e.Value)); err == nil && len(e.Value) > 0 && bytes.Equal(b, e.Value) {
		l.Value = e.Value
	} else {
		l.Bytes = e.Value
	}
	a.keys++
	return a.line(l)
}

// Close writes the end.
func (a *Writer) Close() error {
	return a.line(end{a.keys, hex.EncodeToString(a.hash.Sum(nil))})
}

// Archive is what a file holds.
type Archive struct {
	Header
	Entries []Entry
}

// Read reads an archive and checks that it is whole. Errors name the line.
func Read(r io.Reader) (*Archive, error) {
	in := bufio.NewScanner(r)
	in.Buffer(nil, maxLine)
	sum := sha256.New()
	var a Archive
	var last *end
	for n := 1; in.Scan(); n++ {
		if last != nil {
			return nil, fmt.Errorf("line %d: there is more after the end; the file was changed or put together of several", n)
		}
		b := in.Bytes()
		var err error
		if n == 1 {
			err = a.header(b)
		} else {
			last, err = a.entry(b)
		}
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", n, err)
		}
		if last == nil {
			sum.Write(b)
			sum.Write([]byte("\n"))
		}
	}
	switch {
	case in.Err() != nil:
		return nil, in.Err()
	case a.Format == "":
		return nil, errors.New("is empty")
	case last == nil:
		return nil, fmt.Errorf("ends after %d keys without its last line; part of it is missing", len(a.Entries))
	case last.Keys != len(a.Entries) || last.Sum != hex.EncodeToString(sum.Sum(nil)):
		return nil, fmt.Errorf("its checksum is wrong: it was changed after it was written; it holds %d keys, its last line says %d", len(a.Entries), last.Keys)
	}
	return &a, nil
}

func (a *Archive) header(b []byte) error {
	if err := json.Unmarshal(b, &a.Header); err != nil || a.Format != format {
		return errors.New("is not the beginning of what `routerctl datastore export` writes")
	}
	if a.Version != version {
		return fmt.Errorf("has version %d of the format; this program knows %d: use the routerctl that wrote it, or a newer one", a.Version, version)
	}
	return nil
}

// entry reads a line that is a key, or the end.
func (a *Archive) entry(b []byte) (*end, error) {
	var l struct {
		line
		end
	}
	if err := json.Unmarshal(b, &l); err != nil {
		return nil, fmt.Errorf("is not JSON: %w", err)
	}
	if l.Key == "" {
		return &l.end, nil
	}
	if n := len(a.Entries); n > 0 && a.Entries[n-1].Path >= l.Key {
		return nil, fmt.Errorf("key %s is out of order", l.Key)
	}
	value := l.Bytes
	if l.Value != nil {
		value = l.Value
	}
	a.Entries = append(a.Entries, Entry{l.Key, value})
	return nil, nil
}
