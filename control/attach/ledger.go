package attach

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/routerd/routerd/control/journal"
)

// ledger has the records of this host's attachments, in memory and in the
// journal. It is the only one that knows their states.
type ledger struct {
	journal *journal.Journal
	log     *slog.Logger

	mu       sync.Mutex
	records  map[ID]record
	byHandle map[string][]ID
	ready    bool // the records of the previous run are there
}

func newLedger(j *journal.Journal, log *slog.Logger) *ledger {
	return &ledger{journal: j, log: log, records: make(map[ID]record), byHandle: make(map[string][]ID)}
}

// recordPrefix begins the journal's keys of attachments.
const recordPrefix = "workload/"

func recordKey(id ID) string {
	return recordPrefix + id.Network + "/" + id.ContainerID + "/" + id.Interface
}

func (l *ledger) get(id ID) (record, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	r, ok := l.records[id]
	return r, ok
}

// state returns the state of an attachment; without a record: unrecorded.
func (l *ledger) state(id ID) state {
	r, _ := l.get(id)
	return r.State
}

// snapshot returns the records as they are now.
func (l *ledger) snapshot() map[ID]record {
	l.mu.Lock()
	defer l.mu.Unlock()
	return maps.Clone(l.records)
}

// save writes a record, which then outlives the daemon, after an event. The loss
// of power it outlives after the next [journal.Journal.Sync]: who answers for it
// waits for that, and no other caller need. The state is the ledger's, whatever r
// says: others may have moved it since r was read.
func (l *ledger) save(r record, e event) (record, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if have, known := l.records[r.id()]; known {
		r.State = have.State
	}
	return l.put(r, e)
}

// advance is save of the record as the ledger has it; of an attachment that it
// does not know, of r.
func (l *ledger) advance(r record, e event) (record, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if have, known := l.records[r.id()]; known {
		r = have
	}
	return l.put(r, e)
}

// amend changes the record of a complete attachment, unless it is another by now
// or on its way out.
func (l *ledger) amend(id ID, since time.Time, e event, change func(*record)) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	r, ok := l.records[id]
	if !ok || !r.State.attached() || !r.Since.Equal(since) {
		return nil
	}
	change(&r)
	_, err := l.put(r, e)
	return err
}

// put writes a record after an event. The caller has the lock.
func (l *ledger) put(r record, e event) (record, error) {
	before := r
	r.Version, r.State = recordVersion, r.State.after(e)
	if err := l.journal.Put(recordKey(r.id()), r); err != nil {
		return before, fmt.Errorf("write attachment record: %w", err)
	}
	l.set(r)
	return r, nil
}

// note takes account, in memory alone, of an event that the disk need not know,
// and of a change; nil: none. An attachment without a record stays without.
func (l *ledger) note(id ID, e event, change func(*record)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	r, ok := l.records[id]
	if !ok {
		return
	}
	if change != nil {
		change(&r)
	}
	r.State = r.State.after(e)
	l.records[id] = r
}

// set adds or replaces a record. The caller has the lock.
func (l *ledger) set(r record) {
	id := r.id()
	if _, known := l.records[id]; !known {
		l.byHandle[handle(id)] = append(l.byHandle[handle(id)], id)
	}
	l.records[id] = r
}

// remove removes a record from the journal and from memory.
func (l *ledger) remove(id ID) error {
	if err := l.journal.Delete(recordKey(id)); err != nil {
		return fmt.Errorf("remove attachment record: %w", err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	h := handle(id)
	delete(l.records, id)
	l.byHandle[h] = slices.DeleteFunc(l.byHandle[h], func(have ID) bool { return have == id })
	if len(l.byHandle[h]) == 0 {
		delete(l.byHandle, h)
	}
	return nil
}

// settled returns the attachments with addresses of which the datastore knows, or whose
// endpoints it knows.
func (l *ledger) settled() []record {
	return l.having(func(s state) bool { return s == attachedPatched || s.attached() && !s.pending() && s != attachedFenced })
}

// fenced returns the attachments whose addresses the datastore gives to others.
func (l *ledger) fenced() []record {
	return l.having(func(s state) bool { return s == attachedFenced })
}

// having returns the attachments in a state whose addresses this host gave.
func (l *ledger) having(is func(state) bool) []record {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := []record{}
	for _, r := range l.records {
		if is(r.State) && !r.Given {
			out = append(out, r)
		}
	}
	return out
}

// room says why no attachment can begin; nil: the disk has room for its record, and for
// those of who is to go.
func (l *ledger) room() error {
	if err := l.journal.Room(); err != nil {
		return fmt.Errorf("record the attachment: %w: free some on this host; workloads can still be removed", err)
	}
	return nil
}

// sync waits until the disk has what was saved.
func (l *ledger) sync() error {
	if err := l.journal.Sync(); err != nil {
		return fmt.Errorf("write attachment records: %w", err)
	}
	return nil
}

// pending returns the attachments of which the datastore is to be written. With
// mark it may know of them from here on, except those to leave out; of those that patch
// chooses, and that it has heard nothing of, only the endpoint.
func (l *ledger) pending(mark bool, leaveOut func(ID) bool, patch func(record) bool) (due []record, left []ID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for id, r := range l.records {
		switch {
		case !r.State.pending():
		case !mark || leaveOut(id):
			left = append(left, id)
		default:
			e := flushing
			if r.State == attachedPatched && r.Endpoint == 0 || patch(r) {
				e = patching
			}
			r.patched = r.State == attachedPatched && r.Endpoint != 0
			r.State = r.State.after(e)
			due = append(due, r)
			r.patched = false
			l.records[id] = r
		}
	}
	slices.SortFunc(due, func(x, y record) int { return x.Since.Compare(y.Since) })
	return due, left
}

// disown marks what is on its way out as another machine's in the datastore.
func (l *ledger) disown() (n int, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, r := range l.records {
		if r.State.after(disowned) == r.State {
			continue
		}
		if _, err := l.put(r, disowned); err != nil {
			return n, err
		}
		n++
	}
	return n, nil
}

// sharing returns the other attachments that have the device of r and are not on
// their way out.
func (l *ledger) sharing(r record) []record {
	l.mu.Lock()
	defer l.mu.Unlock()
	var out []record
	for id, other := range l.records {
		if other.Device == r.Device && id != r.id() && !other.State.leaving() {
			out = append(out, other)
		}
	}
	return out
}

// taken reports whether another attachment has the device now.
func (l *ledger) taken(r record) bool { return len(l.sharing(r)) > 0 }

// namesake returns another attachment whose addresses IPAM keeps under the handle
// of id. While there is one, id gets none, and what it leaves does not release
// the handle: the last one does. None comes while the lock of id is held, which
// is the handle's.
func (l *ledger) namesake(id ID) (record, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, other := range l.byHandle[handle(id)] {
		if r := l.records[other]; other != id && r.leases() {
			return r, true
		}
	}
	return record{}, false
}

// errNamesake says why an attachment cannot get addresses: another one has its
// handle.
func (l *ledger) errNamesake(r record) error {
	other, shared := l.namesake(r.id())
	if !shared || !r.leases() {
		return nil
	}
	cure, kind := "detach it first, or take names without dots", ErrInvalid
	if other.State.leaving() {
		cure, kind = "it is still being released", ErrNotReady
	}
	return fmt.Errorf("container %s, interface %s in network %s has the IPAM handle %s too: %s: %w",
		other.ContainerID, other.Interface, other.Network, handle(r.id()), cure, kind)
}

// uses reports whether a handle has a record, or may have one.
func (l *ledger) uses(h string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return !l.ready || len(l.byHandle[h]) > 0
}

func (l *ledger) restored() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.ready
}

// has reports whether there is a record of which something holds, or may be.
func (l *ledger) has(what func(state) bool) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.ready {
		return true
	}
	for _, r := range l.records {
		if what(r.State) {
			return true
		}
	}
	return false
}

// restore takes over the records of the previous run. What was not complete is on
// its way out, and its address may be another's by now.
func (l *ledger) restore(records map[ID]record) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for id, r := range records {
		r.State = r.State.after(restarted)
		if r.State.leaving() {
			r.Addresses = nil
		}
		l.set(r)
		records[id] = r
	}
}

func (l *ledger) serve() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ready = true
}

// claim has IPAM know, before it gives the first address, which ones records have.
// Of two records with one address the complete one has it: the other's was
// given back already, and what an attachment had of an earlier container is
// anybody's.
func (l *ledger) claim(to IPAM) {
	var out, in []record
	for key, value := range l.journal.Entries() {
		if r, err := parseRecord(value); err != nil || !strings.HasPrefix(key, recordPrefix) {
			continue
		} else if r.State.attached() {
			in = append(in, r)
		} else {
			out = append(out, r)
		}
	}
	all := append(out, in...)
	for _, r := range all {
		to.Claim(handle(r.id()), r.Former...)
	}
	for _, r := range all {
		if !r.Given {
			to.Claim(handle(r.id()), append(r.addrs(), r.Claims...)...)
		}
	}
}

// badPrefix begins the journal's keys of records that cannot be read.
const badPrefix = "unreadable "

// load reads all records. One that cannot be read is put aside and logged: the
// others matter more. Its container can still be detached, by derivation.
func (l *ledger) load(dir string) (map[ID]record, error) {
	if err := l.importFiles(dir); err != nil {
		return nil, err
	}
	out := make(map[ID]record)
	for key, value := range l.journal.Entries() {
		if !strings.HasPrefix(key, recordPrefix) {
			continue
		}
		r, err := parseRecord(value)
		if err == nil && recordKey(r.id()) != key {
			err = errors.New("its key does not belong to its content")
		}
		if err == nil {
			out[r.id()] = r
			continue
		}
		l.log.Error("attachment record put aside: its container has no route until it is recreated",
			"key", badPrefix+key, "error", err)
		if err := errors.Join(l.journal.Put(badPrefix+key, value), l.journal.Delete(key)); err != nil {
			return nil, fmt.Errorf("put attachment record aside: %w", err)
		}
	}
	return out, nil
}

// badSuffix ends the name of a record's file that cannot be read.
const badSuffix = ".bad"

// importFiles moves the records of an earlier version, which had a file for each,
// to the journal.
func (l *ledger) importFiles(dir string) error {
	files, err := filepath.Glob(filepath.Join(dir, "*.json"))
	if err != nil || len(files) == 0 {
		return err
	}
	for _, path := range files {
		b, err := os.ReadFile(path)
		if err != nil {
			return fmt.Errorf("read attachment record: %w", err)
		}
		r, err := parseRecord(b)
		if err != nil {
			l.log.Error("attachment record put aside: its container has no route until it is recreated",
				"file", path+badSuffix, "error", err)
			if err := os.Rename(path, path+badSuffix); err != nil {
				return fmt.Errorf("put attachment record aside: %w", err)
			}
			continue
		}
		if err := l.journal.Put(recordKey(r.id()), r); err != nil {
			return fmt.Errorf("import attachment record: %w", err)
		}
	}
	if err := l.sync(); err != nil {
		return err
	}
	for _, path := range files {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("import attachment record: %w", err)
		}
	}
	return nil
}
