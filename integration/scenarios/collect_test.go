package scenarios

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/control/ipam"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/store"
)

// handlePrefix begins the handles of the lab's containers.
const handlePrefix = "routerd-lab."

// TestLeaksFreed leaves in the store what crashes leave there, and kills the
// daemon that looks for it: another takes its place and frees all of it, and
// nothing of the pods that live, those of the silent host among them.
func TestLeaksFreed(t *testing.T) {
	beside(t)
	top := topology(3, 1, store.VXLAN)
	for i := range top.Nodes {
		// The shortest that there is; and the daemon that runs the store, which has
		// to go on, does not stand for the office.
		grace := "1m"
		if i == 0 {
			grace = "0"
		}
		top.Nodes[i].Config = map[string]any{"ipam": map[string]any{"leakGracePeriod": grace}}
	}
	l := bringUp(t, "leaks", top)
	s := openStore(t, l)
	const rate = 20 // beside tests that count what a busy machine loses
	flows, stop := flowsAt(t, l, rate, [2]string{"node1/pod1", "node2/pod1"}, [2]string{"node2/pod1", "node3/pod1"}, [2]string{"node3/pod1", "node1/pod1"})
	var live map[string]string
	poll(t, "the pods' addresses are confirmed", func() string {
		live = podRecords(t, l, s)
		for where, r := range live {
			if !strings.Contains(r, handlePrefix) {
				return where + ": " + r
			}
		}
		return ""
	})

	var leader, heir string
	poll(t, "two candidates", func() string {
		c := candidates(t, l)
		if len(c) != 2 {
			return fmt.Sprint(c)
		}
		leader, heir = c[0], c[1]
		return ""
	})
	lost := netip.MustParsePrefix("192.168.250.0/26")
	claimed := netip.MustParsePrefix("192.168.251.0/26")
	leaks := []leak{
		{block: lost, holder: "lost", user: "lost", container: "on-a-lost-host"},
		{block: blockOf(t, s, leader), user: "lost", container: "borrowed-from-a-silent-host"},
		{block: blockOf(t, s, heir), user: heir, container: "forgotten"},
	}
	var want []string
	for i := range leaks {
		leaks[i].write(t, s)
		line := fmt.Sprintf(`msg="leaked address freed" component=collector address=%s handle=%s`, leaks[i].addr, leaks[i].handle())
		if leaks[i].user == "lost" {
			line += " node=lost"
		}
		want = append(want, line)
	}
	putNew(t, s, store.AffinityKey("lost", lost), &store.Affinity{State: store.AffinityConfirmed})
	putNew(t, s, store.AffinityKey("lost", claimed), &store.Affinity{State: store.AffinityPending})
	putNew(t, s, store.HandleKey(handlePrefix+"of-nothing"), &store.Handle{Block: map[string]int{lost.String(): 1}})
	want = append(want,
		`msg="leaked block freed" component=collector block=192.168.250.0/26 node=lost`,
		`msg="leaked claim freed" component=collector block=192.168.250.0/26 node=lost`,
		`msg="leaked claim freed" component=collector block=192.168.251.0/26 node=lost`,
		`msg="leaked handle freed" component=collector handle=`+handlePrefix+`of-nothing`)
	slices.Sort(want)
	if out, err := tryRouterctl(t, l, "node1", "", "ipam", "check"); err == nil {
		t.Errorf("ipam check sees no leaks:\n%s", out)
	}

	if err := l.Kill(await.Context(t), leader, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	killed := time.Now()
	// The rest is waiting, for the end of a lease of a minute and for another
	// minute of grace.
	poll(t, "another leads", func() string {
		if c := candidates(t, l); !slices.Equal(c, []string{heir}) {
			return fmt.Sprint(c)
		}
		return ""
	})
	t.Logf("%s was killed, and %s leads", leader, heir)
	poll(t, "the leaks are freed", func() string {
		return cmp.Diff(want, freed(l, heir))
	})
	t.Logf("all is freed %.0f s after the kill:\n%s", time.Since(killed).Seconds(), strings.Join(want, "\n"))

	if err := l.Restart(await.Context(t), leader); err != nil {
		t.Fatal(err)
	}
	if c := candidates(t, l); c[0] != heir {
		t.Errorf("%v stand for the office: %s should hold it still", c, heir)
	}
	for _, h := range l.Hosts() {
		if lines := freed(l, h); h != heir && len(lines) > 0 {
			t.Errorf("%s freed something:\n%s", h, strings.Join(lines, "\n"))
		}
	}
	t.Log(routerctl(t, l, leader, "", "ipam", "check"))
	if diff := cmp.Diff(live, podRecords(t, l, s)); diff != "" {
		t.Errorf("the addresses of the pods (-before +after):\n%s", diff)
	}
	for _, f := range flows {
		if err := f.WaitReceived(await.Context(t), f.Report().Received+rate); err != nil {
			t.Error(err)
		}
	}
	stop()
}

// candidates asks the store who stands for the collector's office; the first
// one holds it.
func candidates(t *testing.T, l *lab.Lab) []string {
	t.Helper()
	c, err := l.Client(l.Hosts()[0])
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	const office = "/routerd/v1/elections/ipam-collector/"
	r, err := etcdserverpb.NewKVClient(c).Range(await.Context(t), &etcdserverpb.RangeRequest{
		Key: []byte(office), RangeEnd: []byte(clientv3.GetPrefixRangeEnd(office)),
		SortTarget: etcdserverpb.RangeRequest_CREATE, SortOrder: etcdserverpb.RangeRequest_ASCEND,
	})
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, kv := range r.Kvs {
		names = append(names, string(kv.Value))
	}
	return names
}

// freed returns what a host's log says was freed, in order of the alphabet.
func freed(l *lab.Lab, host string) []string {
	var out []string
	for line := range strings.SplitSeq(l.LogTail(host, 1<<20), "\n") {
		if i := strings.Index(line, `msg="leaked `); i >= 0 {
			out = append(out, line[i:])
		}
	}
	slices.Sort(out)
	return out
}

// podRecords returns what IPAM has of each pod's address.
func podRecords(t *testing.T, l *lab.Lab, s store.Store) map[string]string {
	t.Helper()
	pods, err := l.Pods()
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for _, p := range pods {
		out[p.String()] = fmt.Sprintf("%s: none", p.Addrs[0])
		eachBlock(t, s, func(cidr netip.Prefix, b *store.Block) {
			all, err := ipam.Allocations(cidr, b)
			if err != nil {
				t.Fatal(err)
			}
			for _, a := range all {
				if a.Addr == p.Addrs[0] {
					out[p.String()] = fmt.Sprintf("%s: %s on %s, number %d, released %s", a.Addr, a.Handle, a.Node, a.Sequence, a.ReleasedAt)
				}
			}
		})
	}
	return out
}

func eachBlock(t *testing.T, s store.Store, f func(netip.Prefix, *store.Block)) {
	t.Helper()
	all, _, err := s.List(await.Context(t), store.KindIPAMBlock, "")
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range all {
		b, ok := o.Value.(*store.Block)
		if !ok {
			t.Fatalf("%s cannot be read", o.Key)
		}
		f(o.Key.CIDR(), b)
	}
}

// blockOf returns a block of a host.
func blockOf(t *testing.T, s store.Store, host string) (out netip.Prefix) {
	t.Helper()
	eachBlock(t, s, func(cidr netip.Prefix, b *store.Block) {
		if owner := b.Holder(); owner == host {
			out = cidr
		}
	})
	if !out.IsValid() {
		t.Fatalf("%s holds no block", host)
	}
	return out
}

// leak is an address that a block gives to a container that no host knows: what
// a daemon leaves that dies with its disk.
type leak struct {
	block     netip.Prefix
	holder    string // of the block, which is made; empty: it is there
	user      string // the node whose container it was
	container string

	addr netip.Addr // set by write
}

func (k *leak) handle() string { return handlePrefix + k.container }

func (k *leak) write(t *testing.T, s store.Store) {
	t.Helper()
	handle := k.handle()
	_, err := store.Modify(await.Context(t), s, store.BlockKey(k.block), func(cur store.Object) (any, error) {
		b, ok := store.Clone(cur.Value).(*store.Block)
		if ok == (k.holder != "") {
			return nil, errors.New("it is there, or not, against what the test expects")
		}
		if !ok {
			affinity := "host:" + k.holder
			b = &store.Block{CIDR: k.block.String(), Affinity: &affinity, Allocations: make([]*int, 64), SequenceNumberForAllocation: map[string]uint64{}}
			for o := range b.Allocations {
				b.Unallocated = append(b.Unallocated, o)
			}
		}
		o, index := b.Unallocated[len(b.Unallocated)-1], len(b.Attributes)
		b.Unallocated = b.Unallocated[:len(b.Unallocated)-1]
		b.Allocations[o] = &index
		b.Attributes = append(b.Attributes, store.Attribute{HandleID: &handle, Secondary: map[string]string{
			ipam.AttrNode: k.user, ipam.AttrTimestamp: time.Now().Add(-time.Hour).UTC().String(),
		}})
		b.SequenceNumber++
		b.SequenceNumberForAllocation[strconv.Itoa(o)] = b.SequenceNumber
		k.addr = k.block.Addr()
		for range o {
			k.addr = k.addr.Next()
		}
		return b, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	putNew(t, s, store.HandleKey(handle), &store.Handle{Block: map[string]int{k.block.String(): 1}})
}

func putNew(t *testing.T, s store.Store, key store.Key, value any) {
	t.Helper()
	if _, err := s.Txn(await.Context(t), store.Op{If: store.IfAbsent(), Action: store.Put, Object: store.Object{Key: key, Value: value}}); err != nil {
		t.Fatal(err)
	}
}
