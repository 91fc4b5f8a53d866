package nft

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane/filter"
	"github.com/routerd/routerd/dataplane/internal/nl"
)

// OffloadTable is the name of the table, of family inet, that an [Offload] keeps.
const OffloadTable = "routerd-flows"

// Names in that table.
const (
	flowtable    = "flows"
	offloadChain = "offload"
	offloadSet   = "workloads"
)

// prioOffload is behind the rules and those of everybody else who filters: what any of
// them drops is not offloaded.
const prioOffload = 100

// The attributes of a flowtable and of the expression that puts a flow into one
// (linux/netfilter/nf_tables.h).
const (
	flowtableTable   = 1 // NFTA_FLOWTABLE_TABLE
	flowtableName    = 2 // NFTA_FLOWTABLE_NAME
	flowtableHook    = 3 // NFTA_FLOWTABLE_HOOK
	flowtableFlags   = 7 // NFTA_FLOWTABLE_FLAGS
	flowtableCounter = 2 // NFT_FLOWTABLE_COUNTER (Linux 5.7)

	flowtableHookNum      = 1 // NFTA_FLOWTABLE_HOOK_NUM
	flowtableHookPriority = 2 // NFTA_FLOWTABLE_HOOK_PRIORITY
	flowtableHookDevs     = 3 // NFTA_FLOWTABLE_HOOK_DEVS
	deviceName            = 1 // NFTA_DEVICE_NAME

	flowTableName = 1 // NFTA_FLOW_TABLE_NAME
)

// mostDevices is how many devices go in one message (NFT_NETDEVICE_MAX).
const mostDevices = 256

// Offload keeps the established flows of TCP and UDP from and to workloads in a
// flowtable: their packets go from the device that they come by to the one that they
// leave by past connection tracking, all rules and the look-up of the route, as long as
// the route stands (Documentation/networking/nf_flowtable.rst).
//
// It has a table of its own, so that whatever becomes of it the rules stand, and so that
// to forget all flows is to make it anew. It is open to others: without it, packets take
// the way of rules. Its methods may be called from any goroutine.
type Offload struct {
	conn conn

	mu     sync.Mutex
	probed bool
	made   bool // the table is as have says
	have   map[string]filter.Device
}

// OpenOffload returns what offloads flows in the network namespace of the calling
// thread. The kernel is not changed until [Offload.Set].
func OpenOffload() (*Offload, error) {
	c, err := open()
	if err != nil {
		return nil, err
	}
	return &Offload{conn: c}, nil
}

// Close ends the use. What is offloaded stays so.
func (o *Offload) Close() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.conn.Close()
}

// Set says whose flows are offloaded, all devices at a time; of none, nothing is. A
// device that went or came meanwhile is an error, after which Set is to be called again; it
// is [errors.ErrUnsupported] where the kernel has no flowtables.
func (o *Offload) Set(list []filter.Device) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	want := make(map[string]filter.Device, len(list))
	for _, d := range list {
		want[d.Name] = d
	}
	if o.made && maps.Equal(o.have, want) {
		return nil
	}
	if o.made && len(want) > 0 && o.change(want) == nil {
		o.have = want
		return nil
	}
	return o.make(want)
}

// Forget has all flows take the way of rules again; those that rules let pass are
// offloaded anew with their next packet. On an error none is.
func (o *Offload) Forget() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.made && len(o.have) == 0 {
		return nil
	}
	err := o.make(o.have) // before the first Set, what an earlier process left goes
	switch {
	case err == nil, errors.Is(err, errors.ErrUnsupported):
		return nil
	case len(o.have) == 0:
		return err
	}
	return errors.Join(err, o.make(nil))
}

// make makes the table anew, or with no devices deletes it.
func (o *Offload) make(want map[string]filter.Device) error {
	o.made = false
	if !o.probed {
		if err := o.probe(); err != nil {
			return err
		}
		o.probed = true
	}
	b := &batch{table: OffloadTable}
	b.putTable(0)
	b.delTable()
	if len(want) > 0 {
		putOffload(b, sortedDevices(want))
	}
	if err := o.conn.commit(b); err != nil {
		return fmt.Errorf("write table %s: %w", OffloadTable, err)
	}
	o.made, o.have = true, maps.Clone(want)
	return nil
}

// probe asks for a flowtable and a rule that uses it, in a table that is gone with the
// same transaction.
func (o *Offload) probe() error {
	b := &batch{table: OffloadTable}
	b.putTable(0)
	b.delTable()
	putOffload(b, nil)
	b.delTable()
	switch err := o.conn.commit(b); {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.EINVAL):
		return fmt.Errorf("this kernel has no flowtables (%w): %w", errors.ErrUnsupported, err)
	default:
		return err
	}
}

// change brings the table from what it has to what is wanted.
func (o *Offload) change(want map[string]filter.Device) error {
	put, del := make(map[string]filter.Device), make(map[string]filter.Device)
	for name, d := range want {
		if o.have[name] != d {
			put[name] = d
		}
	}
	for name, d := range o.have {
		if want[name] != d {
			del[name] = d
		}
	}
	// The kernel took out what went with its device.
	there, err := o.devices()
	if err != nil {
		return err
	}
	b := &batch{table: OffloadTable}
	stale := slices.DeleteFunc(sortedDevices(del), func(d filter.Device) bool { return !slices.Contains(there, d.Name) })
	for part := range slices.Chunk(stale, mostDevices) {
		putFlowtable(b, unix.NFT_MSG_DELFLOWTABLE, 0, part)
	}
	b.delElems(offloadSet, workloadsSet(), workloads(sortedDevices(del)))
	for part := range slices.Chunk(sortedDevices(put), mostDevices) {
		putFlowtable(b, unix.NFT_MSG_NEWFLOWTABLE, unix.NLM_F_CREATE, part)
	}
	b.putElems(offloadSet, workloadsSet(), workloads(sortedDevices(put)))
	return o.conn.commit(b)
}

// devices lists the names of the devices that the kernel's flowtable has.
func (o *Offload) devices() ([]string, error) {
	var names []string
	ask := func(b *nl.Batch) {
		b.Text(flowtableTable, OffloadTable)
		b.Text(flowtableName, flowtable)
	}
	err := o.conn.request(unix.NFT_MSG_GETFLOWTABLE, ask, func(v []byte) {
		eachOf(v, flowtableHook, func(v []byte) {
			eachOf(v, flowtableHookDevs, func(v []byte) {
				eachOf(v, deviceName, func(v []byte) { names = append(names, string(bytes.TrimRight(v, "\x00"))) })
			})
		})
	})
	if err != nil {
		return nil, fmt.Errorf("read the flowtable of table %s: %w", OffloadTable, err)
	}
	return names, nil
}

func sortedDevices(m map[string]filter.Device) []filter.Device {
	list := make([]filter.Device, 0, len(m))
	for _, name := range slices.Sorted(maps.Keys(m)) {
		list = append(list, m[name])
	}
	return list
}

// putOffload makes all of the table.
func putOffload(b *batch, list []filter.Device) {
	b.putTable(0)
	putFlowtable(b, unix.NFT_MSG_NEWFLOWTABLE, unix.NLM_F_CREATE, nil)
	for part := range slices.Chunk(list, mostDevices) {
		putFlowtable(b, unix.NFT_MSG_NEWFLOWTABLE, unix.NLM_F_CREATE, part)
	}
	b.putSet(offloadSet, workloadsSet())
	b.putElems(offloadSet, workloadsSet(), workloads(list))
	b.putChain(offloadChain, &chain{hook: &hook{"filter", unix.NF_INET_FORWARD, prioOffload}})
	for _, key := range []uint32{unix.NFT_META_IIFNAME, unix.NFT_META_OIFNAME} {
		r := newRule(offloaded(key).B, Counter{})
		b.putRule(offloadChain, &r, 0)
	}
}

// offloaded matches packets of established connections of a workload that were not cut
// and whose answers leave by the device that they came by, and puts the connection into
// the flowtable, which passes over what it cannot take.
//
// The kernel looks the route of the answers up out of the device that a packet came by
// (nft_flow_route, flowi4_oif), and where none leads out of it takes the peer for a
// neighbour there: answers are lost until any route changes. Ways differ so while hosts
// change an encapsulation one after the other, and beside asymmetric routing.
func offloaded(key uint32) *matcher {
	m := new(matcher)
	m.state(stateEstablished)
	m.isCut(true)
	m.meta(key, reg1)
	m.lookup(offloadSet, false)
	m.answeredBack()
	m.expr("flow_offload", func() { m.Text(flowTableName, flowtable) })
	return m
}

// answeredBack matches packets to whose source the best route leads out of the device
// that they came by. The kernel has that at forward since Linux 5.19.
func (m *matcher) answeredBack() {
	m.expr("fib", func() {
		m.Net32(unix.NFTA_FIB_DREG, reg1)
		m.Net32(unix.NFTA_FIB_RESULT, unix.NFT_FIB_RESULT_OIF)
		m.Net32(unix.NFTA_FIB_FLAGS, unix.NFTA_FIB_F_SADDR|unix.NFTA_FIB_F_IIF|unix.NFTA_FIB_F_PRESENT)
	})
	m.cmp(unix.NFT_CMP_EQ, []byte{1})
}

func putFlowtable(b *batch, kind, flags uint16, list []filter.Device) {
	verb := "add"
	if kind == unix.NFT_MSG_DELFLOWTABLE {
		verb = "take devices out of"
	}
	b.add(kind, flags, subject{verb, "flowtable", flowtable}, func() {
		b.Text(flowtableTable, OffloadTable)
		b.Text(flowtableName, flowtable)
		b.Nest(flowtableHook, func() {
			b.Net32(flowtableHookNum, 0) // NF_NETDEV_INGRESS
			b.Net32(flowtableHookPriority, 0)
			if len(list) == 0 {
				return
			}
			b.Nest(flowtableHookDevs, func() {
				for _, d := range list {
					b.Text(deviceName, d.Name)
				}
			})
		})
		if kind == unix.NFT_MSG_NEWFLOWTABLE {
			b.Net32(flowtableFlags, flowtableCounter)
		}
	})
}

func workloadsSet() *set { return &set{spec: setSpec{keyType: typeIfname, keyLen: unix.IFNAMSIZ}} }

// workloads returns the elements of that set.
func workloads(list []filter.Device) []element {
	var elems []element
	for _, d := range list {
		if d.Workload {
			elems = append(elems, element{key: ifname(d.Name)})
		}
	}
	return elems
}
