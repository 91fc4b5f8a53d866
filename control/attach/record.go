package attach

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
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

	State      state          `json:"state"`
	Since      time.Time      `json:"since"`
	Netns      string         `json:"netns"`
	Device     string         `json:"device"`
	MAC        string         `json:"mac,omitempty"`
	MTU        int            `json:"mtu"`                 // of both ends, but see mtuState
	TriedMTUs  []int          `json:"triedMTUs,omitempty"` // set out for since, the last one still wanted: either end may have any of them
	FixedMTU   bool           `json:"fixedMTU,omitempty"`  // the request gave it
	Forwarding bool           `json:"forwarding,omitempty"`
	Addresses  []Address      `json:"addresses,omitempty"`
	Endpoint   store.Revision `json:"endpointRevision,omitempty"` // of the WorkloadEndpoint as ADD wrote it
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

// handle is the name under which IPAM keeps the addresses: Calico's for a
// container's first interface.
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
		MTU: r.MTU, Forwarding: r.Forwarding, TakeOver: r.Orchestrator == Kubernetes,
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
	for _, s := range w.HostSysctls(r.Device, r.addrs()) {
		out = append(out, s)
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

const (
	recordSuffix = ".json"
	tempSuffix   = ".tmp" // of a record that is being written
	badSuffix    = ".bad" // of one that cannot be read
)

func makeRecordDir(dir string) error {
	if dir == "" {
		return errors.New("attach: directory for records is missing")
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("make directory for attachment records: %w", err)
	}
	return nil
}

// recordPath names a record after a hash of the id: an id can be longer than a
// file name may be.
func (a *Attacher) recordPath(id ID) string {
	sum := sha256.Sum256([]byte(id.Network + "/" + id.ContainerID + "/" + id.Interface))
	return filepath.Join(a.cfg.Dir, hex.EncodeToString(sum[:16])+recordSuffix)
}

// save writes a record: a reader finds the old one or the new one. With sync
// it survives the loss of power. Without, it survives the death of the daemon,
// which is enough where only namespaces, which do not outlive the power
// either, depend on it.
func (a *Attacher) save(r record, sync bool) error {
	r.Version = recordVersion
	b, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return fmt.Errorf("encode record: %w", err)
	}
	path := a.recordPath(r.id())
	if err := writeFile(path, append(b, '\n'), sync); err != nil {
		return fmt.Errorf("write attachment record: %w", err)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.records[r.id()] = r
	return nil
}

func writeFile(path string, b []byte, sync bool) (err error) {
	f, err := os.OpenFile(path+tempSuffix, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(f.Name())
		}
	}()
	_, err = f.Write(b)
	if err == nil && sync {
		err = f.Sync()
	}
	if closeErr := f.Close(); err == nil {
		err = closeErr
	}
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err == nil && sync {
		err = syncDir(filepath.Dir(path))
	}
	return err
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	err = d.Sync()
	if closeErr := d.Close(); err == nil {
		err = closeErr
	}
	return err
}

// forget removes a record.
func (a *Attacher) forget(id ID) error {
	if err := os.Remove(a.recordPath(id)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove attachment record: %w", err)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.records, id)
	return nil
}

// load reads all records. One that cannot be read is put aside and logged: the
// others matter more. Its container can still be detached, by derivation.
func (a *Attacher) load() (map[ID]record, error) {
	entries, err := os.ReadDir(a.cfg.Dir)
	if err != nil {
		return nil, fmt.Errorf("read attachment records: %w", err)
	}
	out := make(map[ID]record)
	for _, e := range entries {
		path := filepath.Join(a.cfg.Dir, e.Name())
		if strings.HasSuffix(path, tempSuffix) {
			_ = os.Remove(path)
			continue
		}
		if !strings.HasSuffix(path, recordSuffix) {
			continue
		}
		b, err := os.ReadFile(path)
		if err != nil {
			return nil, fmt.Errorf("read attachment record: %w", err)
		}
		r, err := parseRecord(b)
		if err == nil && a.recordPath(r.id()) != path {
			err = errors.New("the file's name does not belong to its content")
		}
		if err != nil {
			a.log.Error("attachment record put aside: its container has no route until it is made anew",
				"file", path+badSuffix, "error", err)
			if err := os.Rename(path, path+badSuffix); err != nil {
				return nil, fmt.Errorf("put attachment record aside: %w", err)
			}
			continue
		}
		out[r.id()] = r
	}
	return out, nil
}

func parseRecord(b []byte) (record, error) {
	var r record
	if err := json.Unmarshal(b, &r); err != nil {
		return record{}, err
	}
	switch {
	case r.Version != recordVersion:
		return record{}, fmt.Errorf("version %d: only version %d is known", r.Version, recordVersion)
	case r.Network == "" || r.ContainerID == "" || r.Interface == "" || r.Device == "":
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
