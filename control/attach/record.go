package attach

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/workload"
	"github.com/routerd/routerd/store"
)

// recordVersion numbers the form of records on disk.
const recordVersion = 1

// record is what the daemon knows of an attachment. Records are values: change a
// copy and save it.
type record struct {
	Version     int    `json:"version"`
	Network     string `json:"network"`
	ContainerID string `json:"containerID"`
	Interface   string `json:"interface"`

	Orchestrator string `json:"orchestrator"`
	Namespace    string `json:"namespace"`
	Pod          string `json:"pod,omitempty"`

	Since         time.Time      `json:"since"`
	Netns         string         `json:"netns"`
	Device        string         `json:"device"`
	MAC           string         `json:"mac,omitempty"`
	MTU           int            `json:"mtu"`                 // of both ends, but see mtuState
	TriedMTUs     []int          `json:"triedMTUs,omitempty"` // set out for since, the last one still wanted: either end may have any of them
	FixedMTU      bool           `json:"fixedMTU,omitempty"`  // the request gave it
	Forwarding    bool           `json:"forwarding,omitempty"`
	Addresses     []Address      `json:"addresses,omitempty"`
	Named         bool           `json:"named,omitempty"`            // some of the addresses were asked for by name
	Given         bool           `json:"given,omitempty"`            // the addresses are another's to take back
	AddressesOnly bool           `json:"addressesOnly,omitempty"`    // no wire: another plugin makes the interface; Device is the host's link to it, or empty
	Endpoint      store.Revision `json:"endpointRevision,omitempty"` // of the WorkloadEndpoint as it was written
	Claims        []netip.Addr   `json:"claims,omitempty"`           // those of the addresses that are the reserve's in the datastore
	Reused        bool           `json:"stale,omitempty"`            // the datastore may show more addresses as the handle's, of an earlier container of these names
	Former        []netip.Addr   `json:"former,omitempty"`           // those of them that may still be the reserve's there
	Fenced        string         `json:"lost,omitempty"`             // who has the addresses instead; then the host routes none of them here

	More *more `json:"endpoint,omitempty"` // what the endpoint says beside names and addresses

	State state `json:"-"` // see diskState

	patched bool // the endpoint is written, in what [ledger.pending] returns
}

// diskRecord is a record on disk.
type diskRecord struct {
	plainRecord
	diskState
}

type plainRecord record

// MarshalJSON writes the record as the disk has it.
func (r record) MarshalJSON() ([]byte, error) {
	return json.Marshal(diskRecord{plainRecord(r), r.State.disk()})
}

func parseRecord(b []byte) (record, error) {
	var d diskRecord
	if err := json.Unmarshal(b, &d); err != nil {
		return record{}, err
	}
	r := record(d.plainRecord)
	var known bool
	r.State, known = d.state(r.Fenced != "")
	switch {
	case r.Version != recordVersion:
		return record{}, fmt.Errorf("version %d: only version %d is known", r.Version, recordVersion)
	case r.Network == "" || r.ContainerID == "" || r.Interface == "" || r.Device == "" && !r.AddressesOnly:
		return record{}, errors.New("network, container id, interface or device is missing")
	case !known:
		return record{}, fmt.Errorf("state %q is not known", d.Phase)
	case slices.ContainsFunc(r.Addresses, func(a Address) bool { return !a.Addr.IsValid() }):
		return record{}, errors.New("an address is empty")
	}
	return r, nil
}

// recordOf derives what is known of an attachment from its names alone.
func recordOf(id ID, w Workload) record {
	if w.Orchestrator == "" {
		w.Orchestrator = CNI
	}
	if w.Namespace == "" {
		w.Namespace = store.DefaultName
	}
	namespace := ""
	if w.Orchestrator == Kubernetes {
		namespace = w.Namespace
	} else {
		w.Pod = ""
	}
	return record{
		Network: id.Network, ContainerID: id.ContainerID, Interface: id.Interface,
		Orchestrator: w.Orchestrator, Namespace: w.Namespace, Pod: w.Pod,
		Device: workload.DeviceName(id, namespace, w.Pod),
	}
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
func (r record) leases() bool { return !r.Given || r.Reused }

// handle is the name under which IPAM keeps the addresses: Calico's for a
// container's first interface. Names of networks and containers may have dots,
// so two attachments can have one: see [ledger.namesake].
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

// onHost reports whether what the record says still is on this host, of which
// devices lists the wires. Of a wire that another plugin made nothing is seen.
func (r record) onHost(devices map[string]string) bool {
	return r.AddressesOnly || devices[r.Device] == r.id().Alias()
}

// want is what the kernel of the host should have for the attachment. While the
// ends of the wire may differ in their MTU, the routes have the smallest that an
// end may have.
func (r record) want(w Wire) []dataplane.Object {
	var out []dataplane.Object
	if !r.AddressesOnly {
		for _, s := range w.HostSysctls(r.Device, r.addrs()) {
			out = append(out, s)
		}
	}
	if r.Fenced != "" || r.Device == "" {
		return out
	}
	var mtu uint32
	if len(r.TriedMTUs) > 0 {
		mtu = uint32(min(r.MTU, slices.Min(r.TriedMTUs)))
	}
	for _, a := range r.Addresses {
		out = append(out, dataplane.Route{
			Prefix: netip.PrefixFrom(a.Addr, a.Addr.BitLen()), Table: dataplane.MainTable, Link: r.Device, MTU: mtu,
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

func logID(id ID) []any {
	return []any{"network", id.Network, "container", id.ContainerID, "interface", id.Interface}
}
