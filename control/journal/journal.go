package journal

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
)

// ErrClosed says that the journal was closed.
var ErrClosed = errors.New("journal is closed")

// slack is how many bytes of history a file may hold before it is written anew,
// beside as many as the entries themselves take.
const slack = 512 << 10

// BadSuffix ends the name of the copy of a journal in which lines were damaged;
// a number follows where there is one already.
const BadSuffix = ".bad"

const tempSuffix = ".tmp"

// Journal is an open journal. It is safe for concurrent use. Two processes must
// not have one journal open.
type Journal struct {
	path string
	log  *slog.Logger

	mu      sync.Mutex
	flushed *sync.Cond // a flush ended
	file    *os.File   // nil: closed
	entries map[string]json.RawMessage
	live    int64 // bytes that the entries take
	size    int64 // of the file up to the last good line
	torn    bool  // the file may have more than size
	suspect bool  // a flush failed: what the kernel still has of the file is not known
	held    bool  // changes wait for a new file; see Begin

	damage Damage // what Open found

	appended, synced uint64 // changes: made, and known to be on the disk
	flushing         bool
	flushes          uint64

	syncDir func(string) error // tests fail there
}

// line is a change.
type line struct {
	Key   string          `json:"k"`
	Value json.RawMessage `json:"v,omitempty"` // none: the key is deleted
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
func Open(path string, log *slog.Logger) (*Journal, error) {
	j := &Journal{path: path, log: log, entries: map[string]json.RawMessage{}, syncDir: syncDir}
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
	j.torn = j.size < int64(len(b))
	if j.damage.Copy != "" || j.torn {
		err = j.rewrite()
	} else if made {
		err = j.syncDir(filepath.Dir(path))
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open journal: %w", err), j.file.Close())
	}
	return j, nil
}

// replay applies what a file holds and returns how many whole lines are damaged.
// What follows the last end of a line is the beginning of one, or one that lacks
// nothing but its end.
func (j *Journal) replay(b []byte) (bad int) {
	for len(b) > 0 {
		text, rest, whole := bytes.Cut(b, []byte{'\n'})
		l, ok := parse(text)
		switch {
		case ok:
			j.apply(l)
		case whole:
			bad++
		}
		if whole {
			j.size += int64(len(text)) + 1
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
	out := make([]byte, sum, sum+len(key)+len(l.Value)+len(`{"k":,"v":}`)+1)
	out = append(append(out, `{"k":`...), key...)
	if len(l.Value) > 0 {
		out = append(append(out, `,"v":`...), l.Value...)
	}
	out = append(out, '}')
	copy(out, fmt.Sprintf("%08x ", checksum(out[sum:])))
	return append(out, '\n'), nil
}

// encodeValue returns a value's JSON in one line. Raw JSON that is so stays as it is.
func encodeValue(value any) (json.RawMessage, error) {
	raw, ok := value.(json.RawMessage)
	if ok && len(bytes.TrimSpace(raw)) == len(raw) && bytes.IndexByte(raw, '\n') < 0 && json.Valid(raw) {
		return raw, nil
	}
	return json.Marshal(value)
}

func (j *Journal) apply(l line) {
	if old, ok := j.entries[l.Key]; ok {
		j.live -= footprint(l.Key, old)
		delete(j.entries, l.Key)
	}
	if l.Value != nil {
		j.entries[l.Key] = l.Value
		j.live += footprint(l.Key, l.Value)
	}
}

// footprint is about how many bytes an entry takes in the file.
func footprint(key string, value []byte) int64 { return int64(len(key) + len(value) + 24) }

// Entries returns what the journal holds. The values are not to be changed.
func (j *Journal) Entries() map[string]json.RawMessage {
	j.mu.Lock()
	defer j.mu.Unlock()
	return maps.Clone(j.entries)
}

// Put sets a key to a value's JSON. After it the value outlives the process,
// and after [Journal.Sync] the loss of power. On an error nothing has changed. A
// [json.RawMessage] is kept, not copied: it must not be changed any more.
func (j *Journal) Put(key string, value any) error {
	v, err := encodeValue(value)
	if err != nil {
		return fmt.Errorf("encode %s for the journal: %w", key, err)
	}
	return j.append(line{Key: key, Value: v})
}

// Delete removes a key; one that is not there is no error. It lasts as Put does.
func (j *Journal) Delete(key string) error {
	j.mu.Lock()
	_, known := j.entries[key]
	j.mu.Unlock()
	if !known {
		return nil
	}
	return j.append(line{Key: key})
}

func (j *Journal) append(l line) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.file == nil {
		return ErrClosed
	}
	if j.held {
		j.appended++
		j.apply(l)
		return nil
	}
	b, err := encode(l)
	if err != nil {
		return fmt.Errorf("encode %s for the journal: %w", l.Key, err)
	}
	if j.torn {
		if err := j.file.Truncate(j.size); err != nil {
			return fmt.Errorf("truncate a half written line of the journal: %w", err)
		}
		j.torn = false
	}
	if _, err := j.file.WriteAt(b, j.size); err != nil {
		j.torn = true
		return fmt.Errorf("append to the journal: %w", err)
	}
	j.size += int64(len(b))
	j.appended++
	j.apply(l)
	if j.size > 2*j.live+slack && !j.flushing {
		// It only saves room: the change itself is made.
		if err := j.rewrite(); err != nil {
			j.log.Warn("journal not written anew; it goes on growing", "file", j.path, "error", err)
		}
	}
	return nil
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
		return fmt.Errorf("flush the journal: %w", err)
	}
	j.synced = max(j.synced, upTo)
	return nil
}

// Begin has the changes from now on reach the disk in one step, at the next
// [Journal.Sync] that succeeds: a crash finds all of them or none. Until then they
// do not outlive the process.
func (j *Journal) Begin() {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.held = true
}

// Forget takes the file off the disk, which a full one allows, and keeps the
// entries: the next [Journal.Sync] that succeeds writes all of them anew, as after
// [Journal.Begin]. On an error the file may be there still.
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
		_ = j.file.Truncate(0) // its room is of use meanwhile; it is written to no more
		err = j.syncDir(filepath.Dir(j.path))
	}
	if err != nil {
		return fmt.Errorf("remove the journal: %w", err)
	}
	return nil
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
	f, size, err := j.replace()
	if err != nil {
		return fmt.Errorf("write the journal anew: %w", err)
	}
	// The old file has no name any more, whatever follows.
	_ = j.file.Close() // nothing is read from it
	j.file, j.size, j.torn, j.held = f, size, false, false
	if err := j.syncDir(filepath.Dir(j.path)); err != nil {
		// After the loss of power the name may be the old file's.
		j.suspect = true
		return fmt.Errorf("write the journal anew: %w", err)
	}
	j.synced, j.suspect = j.appended, false
	j.flushes++
	return nil
}

// replace writes a new file, flushes it and gives it the journal's name.
func (j *Journal) replace() (f *os.File, size int64, err error) {
	temp := j.path + tempSuffix
	if f, err = os.OpenFile(temp, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600); err != nil {
		return nil, 0, err
	}
	size, err = writeAll(f, j.entries)
	if err == nil {
		err = f.Sync()
	}
	if err == nil {
		err = os.Rename(temp, j.path)
	}
	if err != nil {
		_ = f.Close()
		_ = os.Remove(temp)
		return nil, 0, err
	}
	return f, size, nil
}

func writeAll(w io.Writer, entries map[string]json.RawMessage) (int64, error) {
	var b bytes.Buffer
	for _, k := range slices.Sorted(maps.Keys(entries)) {
		l, err := encode(line{Key: k, Value: entries[k]})
		if err != nil {
			return 0, err
		}
		b.Write(l)
	}
	return b.WriteTo(w)
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
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
