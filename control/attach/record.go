package attach

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/workload"
	"github.com/routerd/routerd/store"
)

// state says how far an attachment is.
type state string

const (
	stateAdding    state = "adding"    // ADD began; anything of it may exist
	stateAttached  state = "attached"  // complete
	stateReleasing state = "releasing" // to go; anything of it may still exist
)

// recordVersion numbers the form of records on disk.
const recordVersion = 1

// record is what the daemon remembers of an attachment. Records are values:
// change a copy and save it.
type record struct {
	Version     int    `json:"version"`
	Network     string `json:"network"`
	ContainerID string `json:"containerID"`
	Interface   string `json:"interface"`

	Orchestrator string `json:"orchestrator"`
	Namespace    string `json:"namespace"`
	Pod          string `json:"pod,omitempty"`

	State         state          `json:"state"`
	Since         time.Time      `json:"since"`
	Netns         string         `json:"netns"`
	Device        string         `json:"device"`
	MAC           string         `json:"mac,omitempty"`
	MTU           int            `json:"mtu"`                 // of both ends, but see mtuState
	TriedMTUs     []int          `json:"triedMTUs,omitempty"` // set out for since, the last one still wanted: either end may have any of them
	FixedMTU      bool           `json:"fixedMTU,omitempty"`  // the request gave it
	Forwarding    bool           `json:"forwarding,omitempty"`
	Addresses     []Address      `json:"addresses,omitempty"`
	Given         bool           `json:"given,omitempty"`            // the addresses are another's to take back
	AddressesOnly bool           `json:"addressesOnly,omitempty"`    // no wire: another plugin makes the interface; Device is the host's link to it, or empty
	Endpoint      store.Revision `json:"endpointRevision,omitempty"` // of the WorkloadEndpoint as it was written
	Queued        bool           `json:"queued,omitempty"`           // the datastore is to be told of it
	Claims        []netip.Addr   `json:"claims,omitempty"`           // those of the addresses that are the reserve's there
	Stale         bool           `json:"stale,omitempty"`            // the datastore may show more addresses as the handle's, of an earlier life of the container
	Former        []netip.Addr   `json:"former,omitempty"`           // those of them that may still be the reserve's there
	Lost          string         `json:"lost,omitempty"`             // who has the addresses instead; then the host routes none of them here
	Disowned      bool           `json:"disowned,omitempty"`         // releasing: what the datastore shows of it is another machine's

	cut bool // the wire is gone, and the host's routes with it
}

func (r record) id() ID {
	return ID{Network: r.Network, ContainerID: r.ContainerID, Interface: r.Interface}
}

func (r record) workload() Workload {
	return Workload{Orchestrator: r.Orchestrator, Namespace: r.Namespace, Pod: r.Pod}
}

func (r record) addrs() []netip.Addr {
	out := make([]netip.Addr, len(r.Addresses))
	for i, a := range r.Addresses {
		out[i] = a.Addr
	}
	return out
}

// families says of which families the attachment has addresses.
func (r record) families() (v4, v6 bool) {
	for _, a := range r.Addresses {
		if dataplane.FamilyOf(a.Addr) == dataplane.IPv4 {
			v4 = true
		} else {
			v6 = true
		}
	}
	return v4, v6
}

func (r record) mac() dataplane.MAC {
	m, err := dataplane.ParseMAC(r.MAC)
	if err != nil {
		return dataplane.MAC{}
	}
	return m
}

// leases reports whether IPAM may have addresses under the attachment's handle.
func (r record) leases() bool { return !r.Given || r.Stale }

// handle is the name under which IPAM keeps the addresses: Calico's for a
// container's first interface. Names of networks and containers may have dots,
// so two attachments can have one: see [Attacher.namesake].
func handle(id ID) string {
	h := id.Network + "." + id.ContainerID
	if id.Interface != "eth0" {
		h += "." + id.Interface
	}
	return h
}

func (r record) spec() workload.Spec {
	return workload.Spec{
		Device: r.Device, Owner: r.id(), Netns: r.Netns, Addresses: r.addrs(),
		MTU: r.MTU, Forwarding: r.Forwarding, TakeOver: r.Orchestrator == Kubernetes, MAC: r.mac(),
	}
}

func (r record) result() Result {
	return Result{
		Device: r.Device, HostMAC: workload.HostMAC(), MAC: r.mac(), MTU: r.MTU,
		Addresses: slices.Clone(r.Addresses),
	}
}

// wishes is what the kernel of the host should have for the attachment. While
// the ends of the wire may differ in their MTU, the routes say the smallest
// that an end may have.
func (r record) wishes(w Wire) []dataplane.Object {
	var out []dataplane.Object
	if r.AddressesOnly {
		return r.linkRoutes()
	}
	for _, s := range w.HostSysctls(r.Device, r.addrs()) {
		out = append(out, s)
	}
	if r.Lost != "" {
		return out
	}
	var hold uint32
	if len(r.TriedMTUs) > 0 {
		hold = uint32(min(r.MTU, slices.Min(r.TriedMTUs)))
	}
	for _, a := range r.Addresses {
		out = append(out, dataplane.Route{
			Prefix: netip.PrefixFrom(a.Addr, a.Addr.BitLen()),
			Table:  dataplane.MainTable,
			Link:   r.Device,
			MTU:    hold,
		})
	}
	return out
}

func keysOf(objs []dataplane.Object) []dataplane.Key {
	out := make([]dataplane.Key, len(objs))
	for i, o := range objs {
		out[i] = o.Key()
	}
	return out
}

func compareIDs(a, b ID) int {
	return cmp.Or(cmp.Compare(a.Network, b.Network), cmp.Compare(a.ContainerID, b.ContainerID), cmp.Compare(a.Interface, b.Interface))
}

// recordPrefix begins the journal's keys of attachments.
const recordPrefix = "workload/"

func recordKey(id ID) string {
	return recordPrefix + id.Network + "/" + id.ContainerID + "/" + id.Interface
}

func makeStateDir(dir string) error {
	if dir == "" {
		return errors.New("attach: directory for state is missing")
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("make directory for the state of workloads: %w", err)
	}
	return nil
}

// save writes a record, which then outlives the daemon. The loss of power it
// outlives after the next [journal.Journal.Sync]: who answers for it waits for
// that, and nobody else need.
func (a *Attacher) save(r record) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.put(r)
}

// put is save for callers who hold the lock.
func (a *Attacher) put(r record) error {
	r.Version = recordVersion
	if err := a.cfg.Journal.Put(recordKey(r.id()), r); err != nil {
		return fmt.Errorf("write attachment record: %w", err)
	}
	a.set(r)
	return nil
}

// set takes in a record. The caller has the lock.
func (a *Attacher) set(r record) {
	id := r.id()
	if _, known := a.records[id]; !known {
		a.byHandle[handle(id)] = append(a.byHandle[handle(id)], id)
	}
	a.records[id] = r
}

// unset drops a record. The caller has the lock.
func (a *Attacher) unset(id ID) {
	h := handle(id)
	delete(a.records, id)
	a.byHandle[h] = slices.DeleteFunc(a.byHandle[h], func(have ID) bool { return have == id })
	if len(a.byHandle[h]) == 0 {
		delete(a.byHandle, h)
	}
}

// namesake returns another attachment whose addresses IPAM keeps under the handle
// of id. While there is one, id gets none, and what it leaves does not release
// the handle: the last one does. None comes while the lock of id is held, which
// is the handle's.
func (a *Attacher) namesake(id ID) (record, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, other := range a.byHandle[handle(id)] {
		if r := a.records[other]; other != id && r.leases() {
			return r, true
		}
	}
	return record{}, false
}

// errNamesake says why an attachment cannot get addresses: another one has its
// handle.
func (a *Attacher) errNamesake(r record) error {
	other, shared := a.namesake(r.id())
	if !shared || !r.leases() {
		return nil
	}
	cure, kind := "detach it first, or take names without dots", ErrInvalid
	if other.State == stateReleasing {
		cure, kind = "it is still being released", ErrNotReady
	}
	return fmt.Errorf("container %s, interface %s in network %s has the IPAM handle %s too: %s: %w",
		other.ContainerID, other.Interface, other.Network, handle(r.id()), cure, kind)
}

// forget removes a record. Only then may its addresses be given again: a record
// that came back would claim them.
func (a *Attacher) forget(id ID) error {
	_, shared := a.namesake(id)
	if !shared {
		if err := a.cfg.IPAM.Rest(handle(id)); err != nil {
			return err
		}
	}
	if err := a.cfg.Journal.Delete(recordKey(id)); err != nil {
		return fmt.Errorf("remove attachment record: %w", err)
	}
	a.mu.Lock()
	old, told := a.records[id], a.touched[id]
	a.unset(id)
	delete(a.touched, id)
	a.retries.done(id)
	a.mu.Unlock()
	if !shared {
		a.cfg.IPAM.Unclaim(handle(id))
	}
	if key, ok := a.endpointKey(old); ok && a.cfg.Ended != nil {
		a.cfg.Ended(key, told)
	}
	return nil
}

// claim tells IPAM, before it gives the first address, which ones records have.
// Of two records with one address the complete one has it: the other's was
// given back already, and what an attachment had in an earlier life is
// anybody's.
func (a *Attacher) claim() {
	var out, in []record
	for key, value := range a.cfg.Journal.Entries() {
		if r, err := parseRecord(value); err != nil || !strings.HasPrefix(key, recordPrefix) {
			continue
		} else if r.State == stateAttached {
			in = append(in, r)
		} else {
			out = append(out, r)
		}
	}
	all := append(out, in...)
	for _, r := range all {
		a.cfg.IPAM.Claim(handle(r.id()), r.Former...)
	}
	for _, r := range all {
		if !r.Given {
			a.cfg.IPAM.Claim(handle(r.id()), append(r.addrs(), r.Claims...)...)
		}
	}
}

// badPrefix begins the journal's keys of records that cannot be read.
const badPrefix = "unreadable "

// load reads all records. One that cannot be read is put aside and logged: the
// others matter more. Its container can still be detached, by derivation.
func (a *Attacher) load() (map[ID]record, error) {
	if err := a.importFiles(); err != nil {
		return nil, err
	}
	out := make(map[ID]record)
	for key, value := range a.cfg.Journal.Entries() {
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
		a.log.Error("attachment record put aside: its container has no route until it is made anew",
			"key", badPrefix+key, "error", err)
		if err := errors.Join(a.cfg.Journal.Put(badPrefix+key, value), a.cfg.Journal.Delete(key)); err != nil {
			return nil, fmt.Errorf("put attachment record aside: %w", err)
		}
	}
	return out, nil
}

// importFiles takes over the records of an earlier version, which had a file
// for each.
func (a *Attacher) importFiles() error {
	files, err := filepath.Glob(filepath.Join(a.cfg.Dir, "*.json"))
	if err != nil {
		return fmt.Errorf("list attachment records: %w", err)
	}
	for _, path := range files {
		b, err := os.ReadFile(path)
		if err != nil {
			return fmt.Errorf("read attachment record: %w", err)
		}
		r, err := parseRecord(b)
		if err != nil {
			a.log.Error("attachment record put aside: its container has no route until it is made anew",
				"file", path+badSuffix, "error", err)
			if err := os.Rename(path, path+badSuffix); err != nil {
				return fmt.Errorf("put attachment record aside: %w", err)
			}
			continue
		}
		if err := a.cfg.Journal.Put(recordKey(r.id()), r); err != nil {
			return fmt.Errorf("take over attachment record: %w", err)
		}
	}
	if len(files) == 0 {
		return nil
	}
	if err := a.cfg.Journal.Sync(); err != nil {
		return fmt.Errorf("take over attachment records: %w", err)
	}
	for _, path := range files {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("take over attachment record: %w", err)
		}
	}
	return nil
}

// badSuffix ends the name of a record that cannot be read.
const badSuffix = ".bad"

func parseRecord(b []byte) (record, error) {
	var r record
	if err := json.Unmarshal(b, &r); err != nil {
		return record{}, err
	}
	switch {
	case r.Version != recordVersion:
		return record{}, fmt.Errorf("version %d: only version %d is known", r.Version, recordVersion)
	case r.Network == "" || r.ContainerID == "" || r.Interface == "" || r.Device == "" && !r.AddressesOnly:
		return record{}, errors.New("network, container id, interface or device is missing")
	case r.State != stateAdding && r.State != stateAttached && r.State != stateReleasing:
		return record{}, fmt.Errorf("state %q is not known", r.State)
	case slices.ContainsFunc(r.Addresses, func(a Address) bool { return !a.Addr.IsValid() }):
		return record{}, errors.New("an address is empty")
	}
	return r, nil
}

// snapshot returns the records as they are now.
func (a *Attacher) snapshot() map[ID]record {
	a.mu.Lock()
	defer a.mu.Unlock()
	return maps.Clone(a.records)
}
