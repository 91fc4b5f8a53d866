package vm

import (
	"bufio"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
)

// archive writes a cpio archive in the "newc" form that the kernel unpacks as
// an initramfs (Documentation/driver-api/early-userspace/buffer-format.rst in
// the kernel's tree). Directories that a path needs are made on the way. The
// first error sticks: it is returned by Close and makes the calls between do
// nothing.
type archive struct {
	w    *bufio.Writer
	n    int64 // bytes written
	ino  uint32
	dirs map[string]bool
	seen map[string]bool
	err  error
}

// File type bits of a cpio header's mode field.
const (
	modeDir     = 0o040000
	modeFile    = 0o100000
	modeLink    = 0o120000
	cpioTrailer = "TRAILER!!!"
)

func newArchive(w io.Writer) *archive {
	return &archive{
		w:    bufio.NewWriterSize(w, 1<<20),
		dirs: map[string]bool{".": true, "": true},
		seen: map[string]bool{},
	}
}

// clean makes a path relative to the root, as cpio names are.
func clean(name string) string {
	return strings.TrimPrefix(path.Clean("/"+name), "/")
}

func (a *archive) header(name string, mode, size uint32) {
	a.ino++
	// Magic, ino, mode, uid, gid, nlink, mtime, filesize, devmajor, devminor,
	// rdevmajor, rdevminor, namesize, check.
	a.printf("070701%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X",
		a.ino, mode, 0, 0, 1, 0, size, 0, 0, 0, 0, len(name)+1, 0)
	a.printf("%s\x00", name)
	a.pad()
}

func (a *archive) printf(format string, args ...any) {
	if a.err != nil {
		return
	}
	n, err := fmt.Fprintf(a.w, format, args...)
	a.n += int64(n)
	a.err = err
}

// pad fills up to the next multiple of four bytes, as newc asks for after
// names and contents.
func (a *archive) pad() {
	if r := a.n % 4; r != 0 {
		a.printf("%s", "\x00\x00\x00"[:4-r])
	}
}

// mkdir adds a directory and its parents, once.
func (a *archive) mkdir(name string) {
	name = clean(name)
	if a.dirs[name] {
		return
	}
	a.dirs[name] = true
	a.mkdir(path.Dir(name))
	a.header(name, modeDir|0o755, 0)
}

// add claims a name and reports whether it was free: where two callers bring
// the same path, a library of two tools say, the first one counts.
func (a *archive) add(name string) bool {
	if a.seen[name] {
		return false
	}
	a.seen[name] = true
	a.mkdir(path.Dir(name))
	return true
}

// symlink adds a symbolic link.
func (a *archive) symlink(name, target string) {
	name = clean(name)
	if !a.add(name) {
		return
	}
	a.header(name, modeLink|0o777, uint32(len(target)))
	a.printf("%s", target)
	a.pad()
}

// bytes adds a file with the given contents.
func (a *archive) bytes(name string, mode fs.FileMode, content []byte) {
	name = clean(name)
	if !a.add(name) {
		return
	}
	a.header(name, modeFile|uint32(mode.Perm()), uint32(len(content)))
	a.printf("%s", content)
	a.pad()
}

// file adds a file of the host. Symbolic links are followed.
func (a *archive) file(name, host string) {
	if a.err != nil {
		return
	}
	name = clean(name)
	if !a.add(name) {
		return
	}
	if err := a.copyFile(name, host); err != nil && a.err == nil {
		a.err = fmt.Errorf("pack %s as /%s: %w", host, name, err)
	}
}

func (a *archive) copyFile(name, host string) error {
	f, err := os.Open(host)
	if err != nil {
		return err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return err
	}
	if !st.Mode().IsRegular() {
		return fmt.Errorf("neither a regular file nor a directory")
	}
	if st.Size() >= 1<<32 {
		return fmt.Errorf("%d bytes are more than a newc archive can hold", st.Size())
	}
	a.header(name, modeFile|uint32(st.Mode().Perm()), uint32(st.Size()))
	// A file that grows meanwhile must not spill into the next header.
	n, err := io.Copy(a.w, io.LimitReader(f, st.Size()))
	a.n += n
	if err == nil && n != st.Size() {
		err = fmt.Errorf("shrank from %d to %d bytes while it was read", st.Size(), n)
	}
	a.pad()
	return err
}

// tree adds a file, or a directory with all that is below it.
func (a *archive) tree(name, host string) {
	if a.err != nil {
		return
	}
	st, err := os.Stat(host)
	if err != nil {
		a.err = fmt.Errorf("pack %s: %w", host, err)
		return
	}
	if !st.IsDir() {
		a.file(name, host)
		return
	}
	a.mkdir(name)
	err = filepath.WalkDir(host, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(host, p)
		if err != nil {
			return err
		}
		guest := path.Join(name, filepath.ToSlash(rel))
		switch {
		case d.IsDir():
			a.mkdir(guest)
		case d.Type()&fs.ModeSymlink != 0:
			target, err := os.Readlink(p)
			if err != nil {
				return err
			}
			a.symlink(guest, target)
		case d.Type().IsRegular():
			a.file(guest, p)
		}
		return a.err
	})
	if err != nil && a.err == nil {
		a.err = fmt.Errorf("pack %s: %w", host, err)
	}
}

// Close writes the trailer and pads to 512 bytes, so that another archive can
// follow in the same file.
func (a *archive) Close() error {
	a.header(cpioTrailer, 0, 0)
	for a.err == nil && a.n%512 != 0 {
		a.printf("%s", strings.Repeat("\x00", int(512-a.n%512)))
	}
	if a.err != nil {
		return a.err
	}
	return a.w.Flush()
}
