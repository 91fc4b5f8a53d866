package nft

import (
	"slices"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/filter"
)

// The table "arp routerd" lets workloads claim their own IPv4 addresses alone in ARP: the
// kernel keeps a neighbour for every sender that its proxy ARP answers, of 1,024 in all by
// default (gc_thresh3), and packets of IP's families do not come by there.
//
// It has the elements of three sets of the table of IP packets. It is written before that
// one is or with it, so that a workload whose rules are in force is answered; where a table
// differs from what we know of it, it is made anew, in one transaction.
type arpTable struct {
	known    bool
	owned    bool
	prefixes []string
	have     map[elemID]struct{} // by the set that they mirror
	failed   string              // the last error, so that it is logged once
}

// arpIn is the chain of the table, and the rest are its sets, by what they mirror.
const arpIn = "arp-in"

// arpSets maps the sets that are mirrored to their names there.
func arpSets() map[string]string {
	return map[string]string{sourcesSet(dataplane.IPv4): "workload-addresses", netsMap: "workload-sources", otherSet: otherSet}
}

// arpSet returns the set of that table which mirrors another one, without elements.
func arpSet(of string) *set {
	spec := setSpec{keyType: typeIfname, keyLen: unix.IFNAMSIZ}
	if of == sourcesSet(dataplane.IPv4) {
		spec = sourcesSpec(typeIPv4, 4)
	}
	return &set{spec: spec, elems: make(map[string]string)}
}

// syncARP makes the table of ARP anew where it is not as it is known to be, or where
// nothing is known of it. A kernel that has none is no reason to let rules wait: it is
// said, and tried again. Otherwise what changed goes with the rules, in their transaction:
// the kernel takes as long for a second one as for the first.
func (t *Table) syncARP(p *plan) {
	if t.arp.known && t.arp.owned == t.status.Owned && slices.Equal(t.arp.prefixes, t.desired.settings.WorkloadPrefixes) {
		if len(t.desired.arp) > 0 {
			p.change = append(p.change, t.changeARP)
		}
		return
	}
	b := &batch{family: unix.NFPROTO_ARP}
	now := t.newARP(b)
	if err := t.conn.commit(b); err != nil {
		t.arp.known = false
		if text := err.Error(); t.arp.failed != text {
			t.arp.failed = text
			t.cfg.Log.Warn("the kernel does not filter ARP: workloads can fill its table of neighbours; will try again", "table", TableName, "error", err)
		}
		return
	}
	t.arp = now
	t.desired.arp = make(map[elemID]struct{})
}

// newARP makes the table anew.
func (t *Table) newARP(b *batch) arpTable {
	w := t.desired
	now := arpTable{known: true, owned: t.status.Owned, prefixes: slices.Clone(w.settings.WorkloadPrefixes), have: make(map[elemID]struct{})}
	t.putTable(b) // so that there is one to be deleted
	b.delTable()
	t.putTable(b)
	for of, name := range arpSets() {
		s := arpSet(of)
		b.putSet(name, s)
		var list []element
		for key := range w.sets[of].elems {
			list = append(list, element{key: key})
			now.have[elemID{of, key}] = struct{}{}
		}
		b.putElems(name, s, list)
	}
	b.putChain(arpIn, &chain{hook: &hook{"filter", arpInHook, 0}})
	c := &chainWriter{w: w}
	c.arpIn()
	for i := range c.out {
		b.putRule(arpIn, &c.out[i], 0)
	}
	return now
}

// arpInHook is where ARP packets for the host come by (NF_ARP_IN, linux/netfilter_arp.h).
const arpInHook = 0

// changeARP adds and deletes what changed since.
func (t *Table) changeARP(b *batch) {
	put, del := make(map[string][]element), make(map[string][]element)
	for id := range t.desired.arp {
		_, wanted := t.desired.sets[id.set].elems[id.key]
		_, there := t.arp.have[id]
		switch {
		case wanted && !there:
			put[id.set] = append(put[id.set], element{key: id.key})
		case !wanted && there:
			del[id.set] = append(del[id.set], element{key: id.key})
		}
	}
	b.family = unix.NFPROTO_ARP
	for of, name := range arpSets() {
		if len(del[of])+len(put[of]) == 0 {
			continue
		}
		s := arpSet(of)
		b.delElems(name, s, del[of])
		b.putElems(name, s, put[of])
	}
	b.family = 0
}

// changedARP takes note that the kernel has what changed.
func (t *Table) changedARP() {
	if !t.arp.known {
		return
	}
	for id := range t.desired.arp {
		if _, wanted := t.desired.sets[id.set].elems[id.key]; wanted {
			t.arp.have[id] = struct{}{}
		} else {
			delete(t.arp.have, id)
		}
	}
	clear(t.desired.arp)
}

// arpIn accepts what a workload's own address is the sender of, and who asks whether an
// address is in use (RFC 5227, section 2.1.1), of which the kernel keeps nothing.
func (c *chainWriter) arpIn() {
	names := arpSets()
	m := new(matcher)
	m.meta(unix.NFT_META_IIFNAME, reg1)
	m.arpSender(reg2)
	m.lookup(names[sourcesSet(dataplane.IPv4)], false)
	m.do(nfAccept, "")
	c.add(m, Counter{})
	m = new(matcher)
	m.arpSender(reg1)
	m.cmp(unix.NFT_CMP_EQ, make([]byte, 4))
	m.do(nfAccept, "")
	c.add(m, Counter{})
	m = new(matcher)
	m.meta(unix.NFT_META_IIFNAME, reg1)
	m.lookup(names[netsMap], false)
	m.do(nfAccept, "")
	c.add(m, Counter{})
	for _, p := range c.w.settings.WorkloadPrefixes {
		m = new(matcher)
		m.iface(unix.NFT_META_IIFNAME, p, true, false)
		c.drop(m, filter.BySpoofing)
	}
	m = new(matcher)
	m.meta(unix.NFT_META_IIFNAME, reg1)
	m.lookup(names[otherSet], false)
	c.drop(m, filter.BySpoofing)
}

// arpSender loads the sender's IPv4 address (RFC 826), for Ethernet.
func (m *matcher) arpSender(reg uint32) {
	m.payload(unix.NFT_PAYLOAD_NETWORK_HEADER, 14, 4, reg)
}

// mirrored notes that an element changed of a set that the table of ARP has too.
func (w *desired) mirrored(id elemID) {
	switch id.set {
	case sourcesSet(dataplane.IPv4), netsMap, otherSet:
		w.arp[id] = struct{}{}
	default:
	}
}
