package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"time"
)

// bundleFile is a file of a bundle: what a command says.
type bundleFile struct {
	name    string // below the bundle's directory
	command string // for people, and to be run again by hand
	write   func(ctx context.Context, w io.Writer) error
}

const (
	// bundlePatience is how long one command may take: what hangs is what a bundle
	// is made for, and the other files are still to come.
	bundlePatience = 20 * time.Second

	// bundleLimit bounds a file. A host with a whole Internet's routes must not
	// fill its disk by what is to help it.
	bundleLimit = 32 << 20
)

// bundle writes an archive (tar, gzip) of what commands say.
type bundle struct {
	dir      string // of all files in it
	at       time.Time
	patience time.Duration
	limit    int
}

// write collects the files in their order. A command that fails has what it said
// so far in its file, and its error there and in index.txt. It returns how many
// failed, and the error of writing the archive or the end of ctx.
func (b bundle) write(ctx context.Context, w io.Writer, files []bundleFile) (failed int, err error) {
	zip := gzip.NewWriter(w)
	archive := tar.NewWriter(zip)
	var index bytes.Buffer
	for _, f := range files {
		content := &limited{left: b.limit}
		started := time.Now()
		err := b.run(ctx, f, content)
		if ctx.Err() != nil {
			return failed, context.Cause(ctx)
		}
		result := fmt.Sprintf("%d bytes", content.Len())
		if content.cut {
			result += ", cut off there"
			fmt.Fprintf(content.tail(), "\n[cut off after %d bytes; run it by hand for all: %s]\n", b.limit, f.command)
		}
		if err != nil {
			failed++
			result = err.Error()
			fmt.Fprintf(content.tail(), "\n[%s: %v]\n", f.command, err)
		}
		fmt.Fprintf(&index, "%-28s %6.1fs  %s: %s\n", f.name, time.Since(started).Seconds(), f.command, result)
		if err := b.add(archive, f.name, content.Bytes()); err != nil {
			return failed, err
		}
	}
	err = b.add(archive, "index.txt", index.Bytes())
	return failed, errors.Join(err, archive.Close(), zip.Close())
}

func (b bundle) run(ctx context.Context, f bundleFile, w io.Writer) error {
	ctx, cancel := context.WithTimeoutCause(ctx, b.patience, fmt.Errorf("no answer within %v", b.patience))
	defer cancel()
	err := f.write(ctx, w)
	if err != nil && ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

func (b bundle) add(archive *tar.Writer, name string, content []byte) error {
	h := &tar.Header{Name: b.dir + "/" + name, Mode: 0o600, Size: int64(len(content)), ModTime: b.at, Typeflag: tar.TypeReg}
	if err := archive.WriteHeader(h); err != nil {
		return err
	}
	_, err := archive.Write(content)
	return err
}

// limited keeps the first bytes of what is written, and lets the writer believe
// that it kept all: a command that is cut off is not one that failed.
type limited struct {
	bytes.Buffer
	left int
	cut  bool
}

func (l *limited) Write(p []byte) (int, error) {
	n := min(len(p), l.left)
	l.left -= n
	l.cut = l.cut || n < len(p)
	l.Buffer.Write(p[:n])
	return len(p), nil
}

// tail takes what comes after the limit.
func (l *limited) tail() io.Writer { return &l.Buffer }
