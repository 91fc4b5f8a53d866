package journal

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"syscall"

	"github.com/routerd/routerd/control/atomicfile"
)

// ErrClosed says that the journal was closed.
var ErrClosed = errors.New("journal is closed")

// slack is how many bytes of history a file may hold before it is written anew,
// beside as many as the entries themselves take.
const slack = 512 << 10

// buffer is how many bytes are written to a file at once.
const buffer = 64 << 10

// BadSuffix ends the name of the copy of a journal in which lines were damaged;
// a number follows where there is one already.
const BadSuffix = ".bad"

const tempSuffix = ".tmp"

// Journal is an open journal. It is safe for concurrent use. Two processes must
// not have one journal open.
type Journal struct {
	path string
	log  *slog.Logger

	lean bool // values are kept in the file alone

	mu      sync.Mutex
	flushed *sync.Cond // a flush ended
	file    *os.File   // nil: closed
	entries map[string]entry
	live    int64 // bytes that the entries take
	size    int64 // of the file up to the last good line
	torn    bool  // the file may have more than size: see mend
	endless bool  // and that begins with a line that lacks nothing but its end
	room    int64 // up to where the disk has kept room for the file
	refused error // what the disk last said to a change; nil: it took it
	suspect bool  // a flush failed: what the kernel still has of the file is not known
	held    bool  // changes wait for a new file; see Forget

	damage Damage // what Open found

	appended, synced uint64 // changes: made, and known to be on the disk
	flushing         bool
	flushes          uint64

	syncDir func(string) error // tests fail there
}

// entry is a key's value, and the line that set it.
type entry struct {
	value    json.RawMessage // nil: only the file has it
	at, size int64           // of the line in the file; size counts also where it is in none yet
}

// line is a change.
type line struct {
	Key   string          `json:"k"`
	Value json.RawMessage `json:"v,omitempty"` // none: the key is deleted
	More  bool            `json:"m,omitempty"` // it counts only with the next line
}

// Change is a change of a key, for [Journal.Apply].
type Change struct {
	Key   string
	Value any // as in [Journal.Put]; nil: the key is deleted

	// Checked says that Value is a [json.RawMessage] which was read as JSON already: to read
	// it once more takes longer than to write it.
	Checked bool
}

// Damage says what was lost of a journal.
type Damage struct {
	Lines int    // that were whole once and could not be read
	Copy  string // the file as it was found; empty: none could be made, and the lines are still in the journal
}

// Damage returns what [Open] found: the zero value where nothing was damaged.
func (j *Journal) Damage() Damage { return j.damage }

// setAside keeps a damaged file's content beside it, and no earlier copy is lost.
func setAside(path string, b []byte) (string, error) {
	name := path + BadSuffix
	for n := 1; ; n++ {
		f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
		if errors.Is(err, fs.ErrExist) {
			name = path + BadSuffix + "." + strconv.Itoa(n)
			continue
		}
		if err != nil {
			return "", err
		}
		_, err = f.Write(b)
		if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
			// Part of a copy is of no use, and fills the disk with each start.
			return "", errors.Join(err, os.Remove(name))
		}
		return name, nil
	}
}

// Open reads a journal, or makes it, with mode 0600. Its directory must exist.
func Open(path string, log *slog.Logger) (*Journal, error) { return open(path, log, false) }

// OpenLean is [Open] for a journal of much that is seldom read: values stay in the
// file, and memory holds only where.
func OpenLean(path string, log *slog.Logger) (*Journal, error) { return open(path, log, true) }

func open(path string, log *slog.Logger, lean bool) (*Journal, error) {
	j := &Journal{path: path, log: log, lean: lean, entries: map[string]entry{}, syncDir: atomicfile.SyncDir}
	j.flushed = sync.NewCond(&j.mu)
	b, err := os.ReadFile(path)
	made := errors.Is(err, fs.ErrNotExist)
	if err != nil && !made {
		return nil, fmt.Errorf("read journal: %w", err)
	}
	if bad := j.replay(b); bad > 0 {
		aside, err := setAside(path, b)
		if err != nil { // as on a full disk, which is no reason not to start
			log.Error("no copy could be made of the damaged journal, which keeps its damaged lines", "file", path, "error", err)
		}
		j.damage = Damage{bad, aside}
		log.Error("damaged lines of the journal are left out", "file", path, "lines", bad, "copy", aside)
	}
	if j.file, err = os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600); err != nil {
		return nil, fmt.Errorf("open journal: %w", err)
	}
	j.torn = j.endless || j.size < int64(len(b))
	if made {
		if err := j.syncDir(filepath.Dir(path)); err != nil {
			return nil, errors.Join(fmt.Errorf("open journal: %w", err), j.file.Close())
		}
		return j, nil
	}
	// A full disk is no reason not to start: what there is has been read, and what
	// is wrong with the file is mended before the next change.
	if j.damage.Copy != "" {
		err = j.rewrite()
	}
	if j.torn && err == nil {
		err = j.mend()
	}
	if err != nil {
		j.refused = err
		log.Error("the journal stays as it was found; the disk refuses changes", "file", path, "error", err)
	}
	return j, nil
}

// mend has the file end with a whole line: what is behind that is cut off, which
// takes no room.
func (j *Journal) mend() error {
	if j.endless {
		if _, err := j.file.WriteAt([]byte{'\n'}, j.size-1); err != nil {
			return fmt.Errorf("end the last line of the journal: %w", err)
		}
	}
	if err := j.file.Truncate(j.size); err != nil {
		return fmt.Errorf("truncate a half written line of the journal: %w", err)
	}
	j.torn, j.endless, j.room = false, false, 0
	j.appended++ // the next flush makes sure of it
	return nil
}

// replay applies what a file holds and returns how many whole lines are damaged.
// What follows the last end of a line is the beginning of one, or one that lacks
// nothing but its end. Changes that were made together of which the last is not there
// are left out.
func (j *Journal) replay(b []byte) (bad int) {
	type found struct {
		line
		at, size int64
	}
	var group []found
	var at int64
	for len(b) > 0 {
		text, rest, whole := bytes.Cut(b, []byte{'\n'})
		size := int64(len(text))
		if whole {
			size++
		}
		l, ok := parse(text)
		switch {
		case ok:
			group = append(group, found{l, at, size})
		case whole:
			bad++
			group = nil
		}
		at += size
		if ok && !l.More {
			for _, f := range group {
				j.apply(f.line, f.at, f.size)
				j.drop(f.Key)
			}
			group = group[:0]
		}
		if len(group) == 0 && (whole || ok) {
			j.size = at
			if j.endless = !whole; j.endless {
				j.size++
			}
		}
		b = rest
	}
	return bad
}

// parse reads a line without its end.
func parse(b []byte) (line, bool) {
	sum, body, ok := bytes.Cut(b, []byte(" "))
	if !ok || len(sum) != 8 {
		return line{}, false
	}
	want, err := strconv.ParseUint(string(sum), 16, 32)
	if err != nil || uint32(want) != checksum(body) {
		return line{}, false
	}
	var l line
	if json.Unmarshal(body, &l) != nil || l.Key == "" {
		return line{}, false
	}
	return l, true
}

func checksum(b []byte) uint32 { return crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli)) }

// encode writes a line. The value is one line of JSON: it goes in as it is.
func encode(l line) ([]byte, error) {
	key, err := json.Marshal(l.Key)
	if err != nil {
		return nil, err
	}
	const sum = len("00000000 ")
	out := make([]byte, sum, sum+len(key)+len(l.Value)+len(`{"k":,"v":,"m":true}`)+1)
	out = append(append(out, `{"k":`...), key...)
	if len(l.Value) > 0 {
		out = append(append(out, `,"v":`...), l.Value...)
	}
	if l.More {
		out = append(out, `,"m":true`...)
	}
	out = append(out, '}')
	copy(out, fmt.Sprintf("%08x ", checksum(out[sum:])))
	return append(out, '\n'), nil
}

// encodeValue returns a value's JSON in one line. Raw JSON that is so stays as it is.
func encodeValue(c Change) (json.RawMessage, error) {
	raw, ok := c.Value.(json.RawMessage)
	if ok && len(bytes.TrimSpace(raw)) == len(raw) && bytes.IndexByte(raw, '\n') < 0 && (c.Checked || json.Valid(raw)) {
		return raw, nil
	}
	return json.Marshal(c.Value)
}

// apply makes a change in memory. size is that of its line, and at where it is.
func (j *Journal) apply(l line, at, size int64) {
	if old, ok := j.entries[l.Key]; ok {
		j.live -= old.size
		delete(j.entries, l.Key)
	}
	if l.Value != nil {
		j.entries[l.Key] = entry{l.Value, at, size}
		j.live += size
	}
}

// drop has memory not hold a value that the file has.
func (j *Journal) drop(key string) {
	if e, ok := j.entries[key]; ok && j.lean {
		e.value = nil
		j.entries[key] = e
	}
}

// Entries returns what the journal holds, and nil of one that was opened with
// [OpenLean]. The values are not to be changed.
func (j *Journal) Entries() map[string]json.RawMessage {
	if j.lean {
		return nil
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	out := make(map[string]json.RawMessage, len(j.entries))
	for key, e := range j.entries {
		out[key] = e.value
	}
	return out
}

// Keys returns the keys that the journal holds, sorted.
func (j *Journal) Keys() []string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return slices.Sorted(maps.Keys(j.entries))
}

// Get returns the value of a key, nil where there is none. It is not to be changed.
func (j *Journal) Get(key string) (json.RawMessage, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	e, ok := j.entries[key]
	if !ok {
		return nil, nil
	}
	if j.file == nil {
		return nil, ErrClosed
	}
	return j.read(key, e)
}

// read returns an entry's value. The caller holds the lock.
func (j *Journal) read(key string, e entry) (json.RawMessage, error) {
	if e.value != nil {
		return e.value, nil
	}
	b := make([]byte, e.size)
	if _, err := j.file.ReadAt(b, e.at); err != nil {
		return nil, fmt.Errorf("read %s in the journal: %w", key, err)
	}
	l, ok := parse(bytes.TrimSuffix(b, []byte{'\n'}))
	if !ok || l.Key != key {
		return nil, fmt.Errorf("read %s in the journal: the line was damaged since", key)
	}
	return l.Value, nil
}

// Put sets a key to a value's JSON. After it the value outlives the process,
// and after [Journal.Sync] the loss of power. On an error nothing has changed. A
// [json.RawMessage] is kept, not copied: it must not be changed any more.
func (j *Journal) Put(key string, value any) error { return j.Apply(Change{Key: key, Value: value}) }

// Delete removes a key; one that is not there is no error. It lasts as Put does.
func (j *Journal) Delete(key string) error { return j.Apply(Change{Key: key}) }

// Apply makes changes as Put and Delete do, and all of them or, when it is
// interrupted, none.
func (j *Journal) Apply(changes ...Change) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	lines := make([]line, 0, len(changes))
	for _, c := range changes {
		l := line{Key: c.Key}
		if c.Value != nil {
			v, err := encodeValue(c)
			if err != nil {
				return fmt.Errorf("encode %s for the journal: %w", c.Key, err)
			}
			l.Value = v
		} else if _, known := j.entries[c.Key]; !known && !slices.ContainsFunc(lines, func(l line) bool { return l.Key == c.Key }) {
			continue
		}
		lines = append(lines, l)
	}
	switch {
	case len(lines) == 0:
		return nil
	case j.file == nil:
		return ErrClosed
	case j.held:
		for _, l := range lines {
			j.apply(l, 0, int64(len(l.Key)+len(l.Value)+len(`00000000 {"k":"","v":}`)+1))
		}
		j.appended++
		return nil
	}
	if j.torn {
		if j.refused = j.mend(); j.refused != nil {
			return j.refused
		}
	}
	ends, err := j.append(lines)
	if err != nil {
		j.torn = true
		j.refused = fmt.Errorf("append to the journal: %w", err)
		return j.refused
	}
	j.refused = nil
	for i, l := range lines {
		j.apply(l, j.size, ends[i]-j.size)
		j.drop(l.Key)
		j.size = ends[i]
	}
	j.appended++
	if j.size > 2*j.live+slack && !j.flushing {
		// It only saves room: the change itself is made.
		if err := j.rewrite(); err != nil {
			j.log.Warn("journal not written anew; it goes on growing", "file", j.path, "error", err)
		}
	}
	return nil
}

// append writes lines behind the last good one, and returns where each ends. The
// caller holds the lock.
func (j *Journal) append(lines []line) (ends []int64, err error) {
	w := bufio.NewWriterSize(io.NewOffsetWriter(j.file, j.size), buffer)
	end := j.size
	for i, l := range lines {
		l.More = i < len(lines)-1
		b, err := encode(l)
		if err != nil {
			return nil, fmt.Errorf("encode %s: %w", l.Key, err)
		}
		if _, err := w.Write(b); err != nil {
			return nil, err
		}
		end += int64(len(b))
		ends = append(ends, end)
	}
	return ends, w.Flush()
}

// Sync returns when all that was appended before the call is on the disk.
func (j *Journal) Sync() error {
	j.mu.Lock()
	defer j.mu.Unlock()
	want := j.appended
	for (j.synced < want || j.held || j.suspect) && j.flushing {
		j.flushed.Wait()
	}
	switch {
	case j.synced >= want && !j.held && !j.suspect:
		return nil
	case j.file == nil:
		return ErrClosed
	case j.suspect, j.held:
		// After a failed flush the kernel may hold pages for clean that are not on
		// the disk. Only a new file is sure.
		return j.rewrite()
	}
	j.flushing = true
	upTo, file := j.appended, j.file
	j.mu.Unlock()
	err := file.Sync()
	j.mu.Lock()
	j.flushing = false
	j.flushes++
	j.flushed.Broadcast()
	if err != nil {
		j.suspect = true
		j.refused = fmt.Errorf("flush the journal: %w", err)
		return j.refused
	}
	j.synced = max(j.synced, upTo)
	return nil
}

// Forget takes the file off the disk, which a full one allows, and keeps the
// entries: the next [Journal.Sync] that succeeds writes all of them anew, in one step.
// Until then the file has its room, but no name, and changes do not outlive the
// process. On an error it may have its name still.
func (j *Journal) Forget() error {
	j.mu.Lock()
	defer j.mu.Unlock()
	for j.flushing {
		j.flushed.Wait()
	}
	if j.file == nil {
		return ErrClosed
	}
	j.held = true
	err := os.Remove(j.path)
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	if err == nil {
		err = j.syncDir(filepath.Dir(j.path))
	}
	if err != nil {
		return fmt.Errorf("remove the journal: %w", err)
	}
	return nil
}

// spare is how many bytes the disk keeps for changes that end things, when it is full:
// some two hundred workloads can go.
const spare = 256 << 10

// Room returns an error where the disk has no room for more than changes that end
// what the journal has, for which it keeps some behind the file's end. Who begins
// something asks first. It says nothing where the file system cannot keep room.
func (j *Journal) Room() error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.file == nil {
		return ErrClosed
	}
	return j.keepRoom()
}

// keepRoom has the disk keep room behind the end of the file (fallocate(2)), so much
// at once that few changes need it. The caller holds the lock.
func (j *Journal) keepRoom() error {
	if j.held || j.room >= j.size+spare {
		return nil
	}
	const keepSize = 1 // FALLOC_FL_KEEP_SIZE
	for _, n := range []int64{4 * spare, spare} {
		err := syscall.Fallocate(int(j.file.Fd()), keepSize, j.size, n)
		switch {
		case err == nil:
			j.room = j.size + n
			return nil
		case !errors.Is(err, syscall.ENOSPC) && !errors.Is(err, syscall.EDQUOT):
			j.room = math.MaxInt64 // no file system that can
			return nil
		}
	}
	return fmt.Errorf("the disk is full: there is no room for the journal %s but for the end of what it has", j.path)
}

// Err says what is wrong with the disk at present: that it refused the last change, or
// has no room for what begins something.
func (j *Journal) Err() error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.file == nil {
		return nil
	}
	return errors.Join(j.refused, j.keepRoom())
}

// Flushes returns how often the disk was waited for: many callers of
// [Journal.Sync] share one.
func (j *Journal) Flushes() uint64 {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.flushes
}

// rewrite makes a new file of the entries alone, on the disk when it returns,
// and puts it in the old one's place. The caller holds the lock, and no flush is
// under way.
func (j *Journal) rewrite() error {
	f, size, entries, err := j.replace()
	if err != nil {
		return fmt.Errorf("write the journal anew: %w", err)
	}
	// The old file has no name any more, whatever follows.
	_ = j.file.Close() // nothing is read from it
	j.file, j.size, j.torn, j.endless, j.held, j.room = f, size, false, false, false, 0
	j.entries, j.live = entries, size
	if err := j.syncDir(filepath.Dir(j.path)); err != nil {
		// After the loss of power the name may be the old file's.
		j.suspect = true
		return fmt.Errorf("write the journal anew: %w", err)
	}
	j.synced, j.suspect = j.appended, false
	j.flushes++
	return nil
}

// replace writes a new file, flushes it and gives it the journal's name. It returns
// the entries as they are in it.
func (j *Journal) replace() (f *os.File, size int64, entries map[string]entry, err error) {
	temp := j.path + tempSuffix
	if f, err = os.OpenFile(temp, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600); err != nil {
		return nil, 0, nil, err
	}
	size, entries, err = j.writeAll(f)
	if err == nil {
		err = f.Sync()
	}
	if err == nil {
		err = os.Rename(temp, j.path)
	}
	if err != nil {
		_ = f.Close()
		_ = os.Remove(temp)
		return nil, 0, nil, err
	}
	return f, size, entries, nil
}

func (j *Journal) writeAll(to io.Writer) (size int64, entries map[string]entry, err error) {
	w := bufio.NewWriterSize(to, buffer)
	entries = make(map[string]entry, len(j.entries))
	for _, k := range slices.Sorted(maps.Keys(j.entries)) {
		value, err := j.read(k, j.entries[k])
		if err != nil {
			return 0, nil, err
		}
		l, err := encode(line{Key: k, Value: value})
		if err != nil {
			return 0, nil, err
		}
		if _, err := w.Write(l); err != nil {
			return 0, nil, err
		}
		e := entry{value, size, int64(len(l))}
		if j.lean {
			e.value = nil
		}
		entries[k] = e
		size += e.size
	}
	return size, entries, w.Flush()
}

// Close flushes and closes the file.
func (j *Journal) Close() error {
	err := j.Sync()
	j.mu.Lock()
	defer j.mu.Unlock()
	for j.flushing {
		j.flushed.Wait()
	}
	if j.file == nil {
		return nil
	}
	err = errors.Join(err, j.file.Close())
	j.file = nil
	return err
}
