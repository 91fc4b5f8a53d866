package bgp

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	"pgregory.net/rapid"

	"github.com/routerd/routerd/control/cluster/clustertest"
	"github.com/routerd/routerd/store"
)

var update = flag.Bool("update", false, "write the golden files")

// object makes a put event from the JSON of a spec, as the store decodes it.
func object(t testing.TB, key store.Key, spec string) store.Event {
	t.Helper()
	var val any
	raw := fmt.Sprintf(`{"metadata":{"name":%q},"spec":%s}`, key.Name, spec)
	switch key.Kind {
	case store.KindNode:
		val = new(store.Node)
	case store.KindBGPPeer:
		val = new(v3.BGPPeer)
	case store.KindBGPConfiguration:
		val = new(v3.BGPConfiguration)
	case store.KindBGPFilter:
		val = new(v3.BGPFilter)
	case store.KindIPPool:
		val = new(v3.IPPool)
	case store.KindIPAMAffinity:
		val, raw = new(store.Affinity), spec
	case store.KindIPAMBlock:
		val, raw = new(store.Block), spec
	default:
		t.Fatalf("kind %s", key.Kind)
	}
	if err := json.Unmarshal([]byte(raw), val); err != nil {
		t.Fatalf("%s: %v", key, err)
	}
	return store.Event{Key: key, Object: store.Object{Key: key, Value: val, Raw: []byte(raw)}}
}

func node(t testing.TB, name, spec string) store.Event {
	return object(t, store.ResourceKey(store.KindNode, name), spec)
}

func bgpNode(t testing.TB, name, addr string) store.Event {
	return node(t, name, fmt.Sprintf(`{"bgp":{"ipv4Address":%q}}`, addr))
}

func peer(t testing.TB, name, spec string) store.Event {
	return object(t, store.ResourceKey(store.KindBGPPeer, name), spec)
}

func conf(t testing.TB, name, spec string) store.Event {
	return object(t, store.ResourceKey(store.KindBGPConfiguration, name), spec)
}

func filter(t testing.TB, name, spec string) store.Event {
	return object(t, store.ResourceKey(store.KindBGPFilter, name), spec)
}

// labelled gives an object labels, and annotations in the same form.
func labelled(t testing.TB, e store.Event, labels, annotations string) store.Event {
	t.Helper()
	raw := strings.Replace(string(e.Object.Raw), `"metadata":{`, fmt.Sprintf(`"metadata":{"labels":{%s},"annotations":{%s},`, labels, annotations), 1)
	if err := json.Unmarshal([]byte(raw), e.Object.Value); err != nil {
		t.Fatal(err)
	}
	e.Object.Raw = []byte(raw)
	return e
}

func ippool(t testing.TB, name, spec string) store.Event {
	return object(t, store.ResourceKey(store.KindIPPool, name), spec)
}

func affinity(t testing.TB, node, cidr, state string) store.Event {
	return object(t, store.AffinityKey(node, netip.MustParsePrefix(cidr)), fmt.Sprintf(`{"state":%q}`, state))
}

// ipamBlock makes a block; given are ordinal → attribute as JSON.
func ipamBlock(t testing.TB, cidr, holder string, given map[int]string) store.Event {
	p := netip.MustParsePrefix(cidr)
	aff := "null"
	if holder != "" {
		aff = fmt.Sprintf("%q", holder)
	}
	alloc := make([]string, 1<<(p.Addr().BitLen()-p.Bits()))
	var attrs []string
	for i := range alloc {
		alloc[i] = "null"
		if a, ok := given[i]; ok {
			alloc[i] = fmt.Sprint(len(attrs))
			attrs = append(attrs, a)
		}
	}
	return object(t, store.BlockKey(p), fmt.Sprintf(`{"cidr":%q,"affinity":%s,"allocations":[%s],"attributes":[%s]}`,
		cidr, aff, strings.Join(alloc, ","), strings.Join(attrs, ",")))
}

func of(node string) string { return fmt.Sprintf(`{"handle_id":"h","secondary":{"node":%q}}`, node) }

func gone(key store.Key) store.Event {
	return store.Event{Key: key, Object: store.Object{Key: key}}
}

func view(t testing.TB, events ...store.Event) *View {
	t.Helper()
	v := &View{}
	if _, err := v.Apply(clustertest.Step("", store.Batch{Events: events, Synced: true})); err != nil {
		t.Fatal(err)
	}
	return v
}

// text renders a Config for reading.
func (c Config) text() string {
	var b strings.Builder
	fmt.Fprintf(&b, "node %s as %d id %s listen %v port %d\n", c.Node, c.ASN, c.RouterID, c.ListenAddrs, c.ListenPort)
	for _, p := range c.Peers {
		fmt.Fprintf(&b, "peer %s %q %q as %d", netip.AddrPortFrom(p.Addr, p.Port), p.Type, p.Name, p.ASN)
		if p.Passive {
			b.WriteString(" passive")
		}
		if p.PoolsOnly {
			b.WriteString(" pools-only")
		}
		if p.Source.IsValid() {
			fmt.Fprintf(&b, " from %s", p.Source)
		}
		for _, f := range []struct {
			name  string
			value any
			unset bool
		}{
			{"local-as", p.LocalASN, p.LocalASN == 0},
			{"client-of", p.ClusterID, !p.ClusterID.IsValid()},
			{"reflect", "", !p.Reflect},
			{"ttl-security", p.TTLSecurity, p.TTLSecurity == 0},
			{"max-prefixes", p.MaxPrefixes, p.MaxPrefixes == 0},
			{"reachable-by", p.ReachableBy, !p.ReachableBy.IsValid()},
			{"next-hop-mode", p.NextHopMode, p.NextHopMode == NextHopAuto},
			{"filters", p.Filters, p.Filters == ""},
			{"secret", p.Secret, p.Secret == SecretRef{}},
			{"stale-time", p.StaleTime, p.StaleTime == 0},
			{"range", fmt.Sprintf("%s, %d at most", p.Range, p.Limit), !p.Range.IsValid()},
			{"bfd", fmt.Sprintf("%v x %d", p.BFD.Interval, p.BFD.Multiplier), p.BFD == store.BFD{}},
		} {
			if !f.unset {
				fmt.Fprintf(&b, " %s %v", f.name, f.value)
			}
		}
		if p.AllowOwnASN > 0 {
			fmt.Fprintf(&b, " allow-own-as %d", p.AllowOwnASN)
		}
		fmt.Fprintf(&b, " restart %s hold %s", p.RestartTime, p.HoldTime)
		if p.Keepalive > 0 {
			fmt.Fprintf(&b, " keepalive %s", p.Keepalive)
		}
		b.WriteByte('\n')
		if p.ExtendedNextHop {
			fmt.Fprintf(&b, "     with IPv4%s\n", map[bool]string{true: ", on the link of " + p.Interface}[p.Interface != ""])
		}
		if p.Problem != "" {
			fmt.Fprintf(&b, "     down: %s\n", p.Problem)
		}
	}
	for _, hop := range []netip.Addr{c.NextHop, c.NextHop6} {
		if hop.IsValid() {
			fmt.Fprintf(&b, "next-hop %s\n", hop)
		}
	}
	if c.LocalPref != 0 || c.LocalPref6 != 0 {
		fmt.Fprintf(&b, "local-pref %d %d\n", c.LocalPref, c.LocalPref6)
	}
	for _, l := range []struct {
		name string
		list []netip.Prefix
	}{{"announce", c.Announce}, {"pool", c.Pools}, {"own", c.Own}, {"lent", c.Borrowed}, {"hidden", c.Hidden}} {
		for _, p := range l.list {
			fmt.Fprintf(&b, "%s %s", l.name, p)
			if tags := c.Tags[p]; tags != "" && l.name == "announce" {
				fmt.Fprintf(&b, " communities %s", tags)
			}
			b.WriteByte('\n')
		}
	}
	for _, c := range c.Collectors {
		fmt.Fprintf(&b, "collector: %+v\n", c)
	}
	for _, s := range c.Ignored {
		fmt.Fprintf(&b, "ignored: %s\n", s)
	}
	return b.String()
}

// scenarios are states of the store, each held by a golden file.
func scenarios(t testing.TB) map[string][]store.Event {
	three := []store.Event{
		bgpNode(t, "node1", "10.1.0.11/24"), bgpNode(t, "node2", "10.1.0.12/24"), bgpNode(t, "node3", "10.2.0.9/24"),
		ippool(t, "default-ipv4-ippool", `{"cidr":"192.168.0.0/16"}`),
	}
	with := func(more ...store.Event) []store.Event { return append(append([]store.Event{}, three...), more...) }
	return map[string][]store.Event{
		"dual-stack": {
			node(t, "node1", `{"bgp":{"ipv4Address":"10.1.0.11/24","ipv6Address":"fd00:1::11/64"}}`),
			node(t, "node2", `{"bgp":{"ipv4Address":"10.1.0.12/24","ipv6Address":"fd00:1::12/64"}}`),
			bgpNode(t, "four-only", "10.1.0.13/24"), node(t, "six-only", `{"bgp":{"ipv6Address":"fd00:1::9/64"}}`),
			peer(t, "tor4", `{"peerIP":"10.1.0.1","asNumber":64999}`), peer(t, "tor6", `{"peerIP":"[fd00:1::1]:1790","asNumber":64999}`),
			peer(t, "link-local", `{"peerIP":"fe80::1","asNumber":64999}`),
			labelled(t, peer(t, "unnumbered", `{"asNumber":64999}`), "", `"routerd.io/peerInterface":"eth1"`),
			ippool(t, "four", `{"cidr":"192.168.0.0/16"}`), ippool(t, "six", `{"cidr":"fd00:10::/48"}`),
			affinity(t, "node1", "192.168.1.0/26", "confirmed"), affinity(t, "node1", "fd00:10::40/122", "confirmed"),
			ipamBlock(t, "fd00:10::40/122", "host:node1", map[int]string{3: of("node2")}),
			ipamBlock(t, "fd00:10::80/122", "host:node2", map[int]string{1: of("node1")}),
		},
		"unnumbered": {
			bgpNode(t, "node1", "10.1.0.11/24"),
			ippool(t, "four", `{"cidr":"192.168.0.0/16"}`), ippool(t, "six", `{"cidr":"fd00:10::/48"}`),
			affinity(t, "node1", "192.168.1.0/26", "confirmed"), affinity(t, "node1", "fd00:10::40/122", "confirmed"),
			labelled(t, peer(t, "a-any", `{"asNumber":64999}`), "", `"routerd.io/peerInterface":"eth1"`),
			labelled(t, peer(t, "b-known", `{"asNumber":64999,"peerIP":"fe80::1","maxRestartTime":"30s"}`), "", `"routerd.io/peerInterface":"eth2"`),
			labelled(t, peer(t, "c-same-link", `{"asNumber":64999}`), "", `"routerd.io/peerInterface":"eth1"`),
			labelled(t, peer(t, "d-two-known", `{"asNumber":64999,"peerIP":"fe80::2"}`), "", `"routerd.io/peerInterface":"eth2"`),
			labelled(t, peer(t, "e-global", `{"asNumber":64999,"peerIP":"fd00::2"}`), "", `"routerd.io/peerInterface":"eth3"`),
			labelled(t, peer(t, "f-name", `{"asNumber":64999}`), "", `"routerd.io/peerInterface":"a/b"`),
			labelled(t, peer(t, "g-no-as", `{}`), "", `"routerd.io/peerInterface":"eth4"`),
			labelled(t, peer(t, "h-four", `{"asNumber":64999,"peerIP":"10.1.0.1"}`), "", `"routerd.io/extendedNextHop":"true"`),
			labelled(t, peer(t, "i-maybe", `{"asNumber":64999,"peerIP":"10.1.0.2"}`), "", `"routerd.io/extendedNextHop":"maybe"`),
		},
		"unnumbered-wrong-first": {
			bgpNode(t, "node1", "10.1.0.11/24"),
			labelled(t, peer(t, "a-no-as", `{}`), "", `"routerd.io/peerInterface":"eth1"`),
			labelled(t, peer(t, "b-no-filter", `{"asNumber":64999,"filters":["missing"]}`), "", `"routerd.io/peerInterface":"eth1"`),
			labelled(t, peer(t, "c-right", `{"asNumber":64999}`), "", `"routerd.io/peerInterface":"eth1"`),
		},
		"unnumbered-node-ip": {
			bgpNode(t, "node1", "10.1.0.11/24"), conf(t, "default", `{"bindMode":"NodeIP"}`),
			labelled(t, peer(t, "tor", `{"asNumber":64999}`), "", `"routerd.io/peerInterface":"eth1"`),
		},
		"unnumbered-refused": {
			bgpNode(t, "node1", "10.1.0.11/24"),
			labelled(t, peer(t, "no-as", `{}`), "", `"routerd.io/peerInterface":"eth1"`),
		},
		"extended-next-hop": {
			node(t, "node1", `{"bgp":{"ipv6Address":"fd00:1::11/64"}}`), node(t, "node2", `{"bgp":{"ipv6Address":"fd00:1::12/64"}}`),
			ippool(t, "four", `{"cidr":"192.168.0.0/16"}`), ippool(t, "six", `{"cidr":"fd00:10::/48"}`),
			affinity(t, "node1", "192.168.1.0/26", "confirmed"), affinity(t, "node1", "fd00:10::40/122", "confirmed"),
			labelled(t, peer(t, "tor", `{"peerIP":"fd00:1::1","asNumber":64999}`), "", `"routerd.io/extendedNextHop":"true"`),
			labelled(t, peer(t, "nodes", `{"nodeSelector":"all()","peerSelector":"all()"}`), "", `"routerd.io/extendedNextHop":"true"`),
		},
		"reflector-unnumbered": {
			node(t, "node1", `{"bgp":{"ipv4Address":"10.1.0.11/24","routeReflectorClusterID":"244.0.0.1"}}`),
			labelled(t, peer(t, "outside", `{"asNumber":64999}`), "", `"routerd.io/peerInterface":"eth1"`),
			labelled(t, peer(t, "inside", `{"asNumber":64512}`), "", `"routerd.io/peerInterface":"eth2"`),
		},
		"ipv6-only": {
			node(t, "node1", `{"bgp":{"ipv6Address":"fd00:1::11/64"}}`), node(t, "node2", `{"bgp":{"ipv6Address":"fd00:1::12/64","ipv4Address":"10.1.0.12/24"}}`),
			peer(t, "tor4", `{"peerIP":"10.1.0.1","asNumber":64999}`),
			ippool(t, "four", `{"cidr":"192.168.0.0/16"}`), ippool(t, "six", `{"cidr":"fd00:10::/48"}`),
			affinity(t, "node1", "192.168.1.0/26", "confirmed"), affinity(t, "node1", "fd00:10::40/122", "confirmed"),
		},
		"mesh": with(
			affinity(t, "node1", "192.168.1.0/26", "confirmed"), affinity(t, "node1", "192.168.1.64/26", ""),
			affinity(t, "node1", "192.168.1.128/26", "pending"), affinity(t, "node1", "192.168.1.192/26", "pendingDeletion"),
			affinity(t, "node2", "192.168.2.0/26", "confirmed"),
			node(t, "reflector", `{"bgp":{"ipv4Address":"10.1.0.99/24","routeReflectorClusterID":"244.0.0.1"}}`),
			node(t, "no-bgp", `{}`), node(t, "six-only", `{"bgp":{"ipv6Address":"fd00::1/64"}}`),
			node(t, "own-as", `{"bgp":{"ipv4Address":"10.1.0.14/24","asNumber":65014}}`)),
		"node-as": with(
			conf(t, "default", `{"asNumber":64600,"listenPort":1790,"bindMode":"NodeIP"}`),
			conf(t, "node.node1", `{"listenPort":1791}`), conf(t, "node.node3", `{"listenPort":1793}`),
			conf(t, "stranger", `{"listenPort":1}`),
			node(t, "node1", `{"bgp":{"ipv4Address":"10.1.0.11","asNumber":64513}}`)),
		"mesh-off": with(conf(t, "default", `{"nodeToNodeMeshEnabled":false}`)),
		"mesh-password": with(
			conf(t, "default", `{"nodeMeshPassword":{"secretKeyRef":{"name":"s","key":"k"}},"communities":[{"name":"c","value":"1:2"}]}`)),
		"mesh-restart-time": with(conf(t, "default", `{"nodeMeshMaxRestartTime":"30s","nodeToNodeMeshEnabled":true}`)),
		"reflector": with(node(t, "node1", `{"bgp":{"ipv4Address":"10.1.0.11/24","routeReflectorClusterID":"244.0.0.1"}}`), peer(t, "ibgp", `{"peerIP":"10.1.0.12","asNumber":64512}`), peer(t, "tor", `{"peerIP":"10.1.0.1","asNumber":64999}`),
			labelled(t, peer(t, "hold-time", `{"peerIP":"10.1.0.51","asNumber":64512}`), "", `"routerd.io/holdTime":"30s"`)),
		"bfd": with(
			labelled(t, conf(t, "default", `{}`), "", `"routerd.io/bfd":"50ms x 3"`),
			labelled(t, peer(t, "tor", `{"peerIP":"10.1.0.1","asNumber":64999}`), "", `"routerd.io/bfd":"on"`),
			labelled(t, peer(t, "tor-off", `{"peerIP":"10.1.0.2","asNumber":64999}`), "", `"routerd.io/bfd":"off"`)),
		"drain-shift": with(
			labelled(t, bgpNode(t, "node1", "10.1.0.11/24"), "", `"routerd.io/drain":"shift"`),
			labelled(t, bgpNode(t, "node2", "10.1.0.12/24"), "", `"routerd.io/drain":"shift"`), // concerns that node alone
			affinity(t, "node1", "192.168.1.0/26", "confirmed"), affinity(t, "node1", "192.168.2.0/26", "confirmed"),
			conf(t, "default", `{"communities":[{"name":"c","value":"1:2"}],"prefixAdvertisements":[{"cidr":"192.168.1.0/24","communities":["c"]}]}`)),
		"drain-withdrawn": with(labelled(t, bgpNode(t, "node1", "10.1.0.11/24"), "", `"routerd.io/drain":"withdrawn"`),
			affinity(t, "node1", "192.168.1.0/26", "confirmed")),
		"refused-bfd":    with(labelled(t, conf(t, "default", `{}`), "", `"routerd.io/bfd":"5ms"`)),
		"mesh-limit":     with(labelled(t, conf(t, "default", `{}`), "", `"routerd.io/maxPrefixes":"100"`)),
		"mesh-limit-off": with(labelled(t, conf(t, "default", `{}`), "", `"routerd.io/maxPrefixes":"off"`)),
		"collectors": with(labelled(t, conf(t, "default", `{}`), "", `"routerd.io/bmp":"10.9.0.5:11019"`),
			labelled(t, conf(t, "node.node1", `{}`), "", `"routerd.io/bmp":"10.9.0.6:11019 loc-rib, 10.9.0.7:11019 stats=0s"`)),
		"refused-collectors": with(labelled(t, conf(t, "default", `{}`), "", `"routerd.io/bmp":"collector:11019"`)),
		"refused-limit":      with(labelled(t, conf(t, "default", `{}`), "", `"routerd.io/maxPrefixes":"0"`)),
		"refused-reflector":  with(node(t, "node1", `{"bgp":{"ipv4Address":"10.1.0.11/24","routeReflectorClusterID":"one"}}`), peer(t, "ibgp", `{"peerIP":"10.1.0.99","asNumber":64512}`)),
		"refused-restart":    with(conf(t, "default", `{"nodeMeshMaxRestartTime":"2h"}`)),
		"refused-password":   with(conf(t, "default", `{"nodeMeshPassword":{}}`)),
		"same-address":       with(bgpNode(t, "node4", "10.1.0.12/24"), bgpNode(t, "node5", "10.1.0.11/24")),
		"peers": with(
			object(t, store.ResourceKey(store.KindNode, "node1"), `{"bgp":{"ipv4Address":"10.1.0.11/24"}}`),
			peer(t, "tor-a", `{"peerIP":"10.1.0.1","asNumber":64999}`),
			peer(t, "tor-b", `{"peerIP":"10.1.0.2:1790","asNumber":64999,"node":"node1","sourceAddress":"None","numAllowedLocalASNumbers":2,"maxRestartTime":"1m30s","keepaliveTime":"20s","nextHopMode":"Keep"}`),
			peer(t, "not-mine", `{"peerIP":"10.1.0.3","asNumber":64999,"node":"node2"}`),
			peer(t, "again", `{"peerIP":"10.1.0.1:179","asNumber":65000,"node":"node1"}`),
			peer(t, "other-port", `{"peerIP":"10.1.0.1:1799","asNumber":65000,"node":"node1"}`),
			peer(t, "myself", `{"peerIP":"10.1.0.11","asNumber":64512}`),
			peer(t, "a-node", `{"peerIP":"10.2.0.9","asNumber":64512}`),
			peer(t, "a-node-2", `{"peerIP":"10.1.0.12","node":"node1"}`),
			peer(t, "empty", `{}`)),
		"selectors": with(
			peer(t, "all", `{"peerIP":"10.1.0.1","asNumber":64999,"nodeSelector":"all()"}`),
			peer(t, "none", `{"peerIP":"10.1.0.2","asNumber":64999,"nodeSelector":"rack == 'r9'"}`),
			peer(t, "wrong", `{"peerIP":"10.1.0.3","asNumber":64999,"nodeSelector":"rack = 'r9'"}`),
			peer(t, "both", `{"peerIP":"10.1.0.4","asNumber":64999,"nodeSelector":"all()","node":"node1"}`)),
		"refused": with(
			peer(t, "bad-ip", `{"peerIP":"10.1.0","asNumber":64999}`),
			peer(t, "bad-keepalive", `{"peerIP":"10.9.0.1","asNumber":64999,"keepaliveTime":"2m"}`),
			peer(t, "bad-loops", `{"peerIP":"10.9.0.2","asNumber":64999,"numAllowedLocalASNumbers":256}`),
			peer(t, "bad-restart", `{"peerIP":"10.9.0.3","asNumber":64999,"maxRestartTime":"2h"}`),
			peer(t, "filters", `{"peerIP":"10.9.0.4","asNumber":64999,"filters":["f"]}`),
			peer(t, "mine-as-local-as", `{"peerIP":"10.9.0.6","asNumber":64999,"localASNumber":64512}`),
			peer(t, "no-as", `{"peerIP":"10.9.0.7"}`),
			peer(t, "password", `{"peerIP":"10.9.0.8","asNumber":64999,"password":{}}`),
			peer(t, "password-to-node", `{"peerIP":"10.1.0.12","asNumber":64512,"password":{"secretKeyRef":{"name":"s","key":"k"}}}`),
			peer(t, "reachable", `{"peerIP":"10.9.0.9","asNumber":64999,"reachableBy":"fd00::1"}`),
			peer(t, "selector", `{"peerSelector":"all("}`),
			labelled(t, peer(t, "limit", `{"peerIP":"10.9.0.12","asNumber":64999}`), "", `"routerd.io/maxPrefixes":"-1"`),
			labelled(t, peer(t, "stale", `{"peerIP":"10.9.0.16","asNumber":64999}`), "", `"routerd.io/longLivedStaleTime":"0s"`),
			peer(t, "local-as-0", `{"peerIP":"10.9.0.17","asNumber":64999,"localASNumber":0}`),
			peer(t, "multicast", `{"peerIP":"224.0.0.5","asNumber":64999}`),
			labelled(t, peer(t, "bfd", `{"peerIP":"10.9.0.19","asNumber":64999}`), "", `"routerd.io/bfd":"true"`),
			labelled(t, peer(t, "hold", `{"peerIP":"10.9.0.13","asNumber":64999}`), "", `"routerd.io/holdTime":"1s"`),
			peer(t, "six", `{"peerIP":"[fd00::1]:179","asNumber":64999}`),
			peer(t, "source", `{"peerIP":"10.9.0.10","asNumber":64999,"sourceAddress":"eth0"}`),
			peer(t, "ttl", `{"peerIP":"10.9.0.11","asNumber":64999,"ttlSecurity":0}`),
			peer(t, "workloads", `{"localWorkloadSelector":"all()","asNumber":64999}`)),
		"listening": with(
			conf(t, "default", `{"nodeToNodeMeshEnabled":false}`), node(t, "node1", `{"bgp":{"ipv4Address":"10.1.0.11/24","routeReflectorClusterID":"244.0.0.1"}}`),
			listener(t, "clients", "10.77.0.0/16", "2", `{"asNumber":64512,"password":{"secretKeyRef":{"name":"s","key":"k"}}}`),
			listener(t, "narrow", "10.77.1.0/24", "", `{"asNumber":64999,"ttlSecurity":1,"password":{"secretKeyRef":{"name":"s","key":"other"}}}`),
			listener(t, "nodes", "10.1.0.0/24", "", `{"asNumber":64512}`)),
		"refused-listening": with(
			listener(t, "a-host", "10.77.0.7/24", "", `{"asNumber":64999}`),
			listener(t, "b-many", "10.77.0.0/24", "0", `{"asNumber":64999}`),
			listener(t, "c-no-as", "10.77.1.0/24", "", `{}`),
			listener(t, "d-both", "10.77.1.0/24", "", `{"asNumber":64999,"peerIP":"10.77.1.7"}`),
			listener(t, "e-family", "fd00:77::/64", "", `{"asNumber":64999}`),
			listener(t, "f-nodes-have-none", "10.0.0.0/8", "", `{"asNumber":64999,"password":{"secretKeyRef":{"name":"s","key":"k"}}}`),
			listener(t, "g-right", "10.88.0.0/24", "", `{"asNumber":64999}`),
			listener(t, "h-twice", "10.88.0.0/24", "", `{"asNumber":64998}`),
			listener(t, "i-filter", "10.2.0.0/24", "", `{"asNumber":64999,"filters":["missing"]}`),
			labelled(t, peer(t, "j-limit", `{"peerIP":"10.9.0.1","asNumber":64999}`), "", `"routerd.io/listenLimit":"5"`)),
		"accepted": with(
			labelled(t, peer(t, "annotated", `{"peerIP":"10.9.0.1","asNumber":64999}`), "", `"routerd.io/maxPrefixes":"1000","routerd.io/holdTime":"9s","routerd.io/longLivedStaleTime":"1h"`),
			peer(t, "filters", `{"peerIP":"10.9.0.4","asNumber":64999,"filters":["f","g"]}`), filter(t, "f", `{}`), filter(t, "g", `{}`),
			peer(t, "local-as", `{"peerIP":"10.9.0.5","asNumber":64999,"localASNumber":65001}`),
			peer(t, "local-as-ibgp", `{"peerIP":"10.9.0.6","asNumber":65001,"localASNumber":65001,"keepOriginalNextHop":true}`),
			peer(t, "keep", `{"peerIP":"10.9.0.7","asNumber":64999,"keepOriginalNextHop":true}`),
			peer(t, "self", `{"peerIP":"10.9.0.8","asNumber":64999,"nextHopMode":"Self"}`),
			peer(t, "password", `{"peerIP":"10.9.0.9","asNumber":64999,"password":{"secretKeyRef":{"name":"s","key":"k"}}}`),
			peer(t, "reachable", `{"peerIP":"10.9.0.10","asNumber":64999,"reachableBy":"10.1.0.1"}`),
			peer(t, "ttl", `{"peerIP":"10.9.0.11","asNumber":4200000001,"ttlSecurity":2}`)),
		"peer-selector": with(
			labelled(t, bgpNode(t, "node1", "10.1.0.11/24"), `"rack":"r1"`, ""), labelled(t, bgpNode(t, "node2", "10.1.0.12/24"), `"rack":"r1"`, ""),
			labelled(t, node(t, "node3", `{"bgp":{"ipv4Address":"10.2.0.9/24","asNumber":64600}}`), `"rack":"r2"`, ""),
			conf(t, "default", `{"nodeToNodeMeshEnabled":false}`), conf(t, "node.node3", `{"listenPort":1793}`),
			peer(t, "mates", `{"nodeSelector":"rack == 'r1'","peerSelector":"rack == 'r1'"}`),
			peer(t, "turned", `{"nodeSelector":"rack == 'r2'","peerSelector":"rack == 'r1'"}`)),
		// node1 shows another AS to node2, is shown one by node3, and is on both
		// sides together with node4.
		"peer-selector-local-as": with(
			labelled(t, bgpNode(t, "node1", "10.1.0.11/24"), `"from":"","mate":""`, ""), labelled(t, bgpNode(t, "node4", "10.1.0.14/24"), `"mate":""`, ""),
			conf(t, "default", `{"nodeToNodeMeshEnabled":false}`), labelled(t, bgpNode(t, "node2", "10.1.0.12/24"), `"to":""`, ""),
			peer(t, "a-shows", `{"nodeSelector":"has(from)","peerSelector":"has(to)","localASNumber":65001}`),
			peer(t, "b-is-shown", `{"node":"node3","peerSelector":"has(from)","localASNumber":65002}`),
			peer(t, "c-both", `{"nodeSelector":"has(mate)","peerSelector":"has(mate)","localASNumber":65003}`)),
		"peer-selector-local-as-0": with(conf(t, "default", `{"nodeToNodeMeshEnabled":false}`),
			labelled(t, bgpNode(t, "node1", "10.1.0.11/24"), `"to":""`, ""),
			peer(t, "zero", `{"node":"node3","peerSelector":"has(to)","localASNumber":0}`)),
		"reverse-manual": with(conf(t, "default", `{"nodeToNodeMeshEnabled":false}`),
			labelled(t, bgpNode(t, "node1", "10.1.0.11/24"), `"rr":""`, ""),
			peer(t, "one-way", `{"node":"node2","peerSelector":"has(rr)","reversePeering":"Manual"}`)),
		// The reflectors' recipe, as node1 sees it, step by step.
		"recipe-1-labelled": with(labelled(t, node(t, "node1", `{"bgp":{"ipv4Address":"10.1.0.11/24","routeReflectorClusterID":"244.0.0.1"}}`), `"rr":""`, "")),
		"recipe-2-peers": with(labelled(t, node(t, "node1", `{"bgp":{"ipv4Address":"10.1.0.11/24","routeReflectorClusterID":"244.0.0.1"}}`), `"rr":""`, ""),
			labelled(t, node(t, "node2", `{"bgp":{"ipv4Address":"10.1.0.12/24","routeReflectorClusterID":"244.0.0.1"}}`), `"rr":""`, ""),
			peer(t, "to-reflectors", `{"nodeSelector":"!has(rr)","peerSelector":"has(rr)"}`),
			peer(t, "between-reflectors", `{"nodeSelector":"has(rr)","peerSelector":"has(rr)"}`)),
		"services": with(
			conf(t, "default", `{"serviceClusterIPs":[{"cidr":"10.96.0.0/12"}],"serviceExternalIPs":[{"cidr":"172.16.0.0/24"}],"serviceLoadBalancerIPs":[{"cidr":"172.17.0.0/24"},{"cidr":"fd00:9::/64"}],
				"communities":[{"name":"c1","value":"65000:100"}],"prefixAdvertisements":[{"cidr":"192.168.0.0/16","communities":["c1","65000:200:3"]},{"cidr":"10.96.0.0/12","communities":["65000:1"]}]}`),
			affinity(t, "node1", "192.168.1.0/26", "confirmed")),
		"services-excluded": with(labelled(t, bgpNode(t, "node1", "10.1.0.11/24"), `"node.kubernetes.io/exclude-from-external-load-balancers":"true"`, ""),
			conf(t, "default", `{"serviceClusterIPs":[{"cidr":"10.96.0.0/12"}]}`)),
		"services-single": with(conf(t, "default", `{"serviceLoadBalancerAggregation":"Disabled","serviceLoadBalancerIPs":[{"cidr":"172.17.0.0/24"}],"serviceClusterIPs":[{"cidr":"10.96.0.0/12"}],"prefixAdvertisements":[{"cidr":"10.96.0.0/12","communities":["65000:1"]}]}`),
			conf(t, "node.node1", `{"prefixAdvertisements":[{"cidr":"10.96.0.0/12","communities":["65000:2"]}]}`)),
		"priorities": with(conf(t, "default", `{"ipv4NormalRoutePriority":500,"ipv6NormalRoutePriority":2147483646,"programClusterRoutes":"EnabledNoEncapOnly"}`)),
		"refused-priorities": with(conf(t, "default", `{"ipv4NormalRoutePriority":0,"ipv6NormalRoutePriority":2147483647,"programClusterRoutes":"Disabled"}`),
			conf(t, "node.node1", `{"ipv4NormalRoutePriority":500}`)),
		"hidden-accepted": with(
			ippool(t, "hidden", `{"cidr":"172.16.0.0/16","disableBGPExport":true}`), affinity(t, "node1", "172.16.1.0/26", "confirmed"),
			peer(t, "tor", `{"peerIP":"10.9.0.4","asNumber":64999,"filters":["out"]}`),
			filter(t, "out", `{"exportV4":[{"cidr":"172.16.0.0/16","matchOperator":"In","action":"Accept"}]}`)),
		"borrowed": with(
			affinity(t, "node1", "192.168.1.0/29", "confirmed"),
			ipamBlock(t, "192.168.1.0/29", "host:node1", map[int]string{0: of("node1"), 3: of("node2"), 4: of("")}),
			affinity(t, "node2", "192.168.2.0/29", "confirmed"),
			ipamBlock(t, "192.168.2.0/29", "host:node2", map[int]string{
				5: of("node1"), 6: of("node3"),
				7: `{"secondary":{"node":"node1"},"releasedAt":"2026-11-21T17:31:37Z"}`,
			}),
			ipamBlock(t, "192.168.3.0/29", "", map[int]string{1: of("node1")}),
			ipamBlock(t, "192.168.4.0/29", "virtual:load-balancer", map[int]string{1: of("node1")}),
			affinity(t, "node1", "192.168.5.0/29", "confirmed"),
			ipamBlock(t, "192.168.5.0/29", "host:node3", nil)),
		"local": with(
			conf(t, "default", `{"bindMode":"NodeIP"}`),
			peer(t, "lb", `{"peerIP":"127.0.0.2","asNumber":64600}`),
			peer(t, "vpn", `{"peerIP":"127.0.0.3:1790","asNumber":64512}`),
			labelled(t, peer(t, "few", `{"peerIP":"127.0.0.4","asNumber":64600}`), "", `"routerd.io/maxPrefixes":"5"`),
			peer(t, "six", `{"peerIP":"::1","asNumber":64600}`),
			peer(t, "reachable", `{"peerIP":"127.0.0.5","asNumber":64600,"reachableBy":"10.1.0.1"}`)),
		"reflectors": with(
			labelled(t, conf(t, "default", `{}`), "", `"routerd.io/reflectors":"1 per rack"`),
			labelled(t, bgpNode(t, "node1", "10.1.0.11/24"), `"rack":"a"`, `"routerd.io/reflects":"true","routerd.io/reflectedBy":"node3"`),
			labelled(t, bgpNode(t, "node2", "10.1.0.12/24"), `"rack":"a"`, `"routerd.io/reflectedBy":"node1"`),
			labelled(t, bgpNode(t, "node3", "10.2.0.9/24"), `"rack":"b"`, `"routerd.io/reflects":"true","routerd.io/reflectedBy":"node1"`),
			labelled(t, bgpNode(t, "node4", "10.2.0.10/24"), `"rack":"b"`, `"routerd.io/reflectedBy":"node3-"`),
			labelled(t, bgpNode(t, "node5", "10.2.0.11/24"), `"rack":"b"`, ``),
			node(t, "other-as", `{"bgp":{"ipv4Address":"10.2.0.12/24","asNumber":64600}}`)),
		"reflectors-configured": with(
			labelled(t, conf(t, "default", `{}`), "", `"routerd.io/reflectors":"2"`),
			labelled(t, bgpNode(t, "node2", "10.1.0.12/24"), ``, `"routerd.io/reflects":"true"`),
			node(t, "node3", `{"bgp":{"ipv4Address":"10.2.0.9/24","routeReflectorClusterID":"244.0.0.1"}}`)),
		"reflectors-wrong": with(labelled(t, conf(t, "default", `{}`), "", `"routerd.io/reflectors":"some"`)),
		"no-export": with(
			ippool(t, "hidden", `{"cidr":"172.16.0.0/16","disableBGPExport":true}`),
			affinity(t, "node1", "172.16.1.0/26", "confirmed"), affinity(t, "node1", "192.168.1.0/26", "confirmed"),
			ipamBlock(t, "172.16.9.0/29", "host:node2", map[int]string{1: of("node1")})),
	}
}

func TestDesired(t *testing.T) {
	t.Parallel()
	for name, events := range scenarios(t) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			v := view(t, events...)
			v.injection.limit = 1000
			for _, a := range []string{"10.77.0.5", "10.77.0.6", "10.77.1.7", "10.77.0.8", "10.1.0.12", "10.2.0.9", "10.88.0.1"} {
				v.callers = append(v.callers, netip.MustParseAddr(a))
			}
			c, err := Desired(v, "node1")
			if err != nil {
				t.Fatal(err)
			}
			file := filepath.Join("testdata", name+".golden")
			if *update {
				if err := os.WriteFile(file, []byte(c.text()), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), c.text()); diff != "" {
				t.Errorf("config differs (-want +got):\n%s", diff)
			}
		})
	}
}

// TestBothEndsShowWhatIsExpected: of a session that peerSelector makes each end
// shows the AS that the other one expects.
func TestBothEndsShowWhatIsExpected(t *testing.T) {
	t.Parallel()
	v := view(t, scenarios(t)["peer-selector-local-as"]...)
	configs := map[netip.Addr]Config{}
	for _, name := range []string{"node1", "node2", "node3", "node4"} {
		c, err := Desired(v, name)
		if err != nil {
			t.Fatal(err)
		}
		configs[c.NextHop] = c
	}
	n := 0
	for addr, c := range configs {
		for _, p := range c.Peers {
			if !p.runs() {
				continue
			}
			n++
			for _, back := range configs[p.Addr].Peers {
				if back.Addr == addr && back.localASN(configs[p.Addr].ASN) != p.ASN {
					t.Errorf("%s expects AS %d of %s, which shows %d", addr, p.ASN, p.Addr, back.localASN(configs[p.Addr].ASN))
				}
			}
		}
	}
	if n != 4 {
		t.Errorf("%d ends run, want those of two sessions", n)
	}
}

// TestDesiredIndependentOfPath holds that a view that went through other
// states, in another order and in other batches, wants the same in the end.
func TestDesiredIndependentOfPath(t *testing.T) {
	t.Parallel()
	states := scenarios(t)
	nodes := []string{"node1", "node2", "node3"}
	var names []string
	for name := range states {
		names = append(names, name)
	}
	rapid.Check(t, func(rt *rapid.T) {
		first := states[rapid.SampledFrom(names).Draw(rt, "first")]
		last := states[rapid.SampledFrom(names).Draw(rt, "last")]
		seed := rapid.Uint64().Draw(rt, "seed")
		rnd := rand.New(rand.NewPCG(seed, 1))

		direct := view(t, last...)
		v := &View{}
		// As a controller does it: only what changes for the node is looked at,
		// and only as much as changed.
		type follower struct {
			View
			memo
			last Config
			err  error
		}
		followers := map[string]*follower{}
		for _, name := range nodes {
			followers[name] = &follower{View: View{self: name}, err: ErrNotSynced}
		}
		apply := func(b store.Batch) {
			if _, err := v.Apply(clustertest.Step("", b)); err != nil {
				rt.Fatal(err)
			}
			for name, f := range followers {
				changed, err := f.Apply(clustertest.Step("", b))
				if err != nil {
					rt.Fatal(err)
				}
				if changed {
					f.last, f.err = f.desired(&f.View, name)
				}
			}
		}
		step := func(e ...store.Event) { apply(store.Batch{Events: e, Synced: rnd.IntN(2) == 0}) }
		for _, e := range first {
			step(e)
		}
		final := map[store.Key]store.Event{}
		for _, e := range first {
			final[e.Key] = gone(e.Key)
		}
		for _, e := range last {
			final[e.Key] = e // the last of a key is what counts
		}
		var events []store.Event
		for _, e := range final {
			events = append(events, e)
		}
		rnd.Shuffle(len(events), func(i, j int) { events[i], events[j] = events[j], events[i] })
		for len(events) > 0 {
			n := 1 + rnd.IntN(len(events))
			step(events[:n]...)
			events = events[n:]
		}
		apply(store.Batch{Synced: true})
		for _, name := range nodes {
			want, err1 := Desired(direct, name)
			got, err2 := Desired(v, name)
			if f := followers[name]; !errors.Is(err2, err1) || !errors.Is(f.err, err1) {
				rt.Fatalf("%s: error %v and %v, want %v", name, err2, f.err, err1)
			}
			for how, got := range map[string]Config{"by steps": got, "by what changed": followers[name].last} {
				if diff := cmp.Diff(want, got, cmp.Comparer(func(a, b netip.Addr) bool { return a == b }),
					cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }), cmpopts.EquateComparable(Peer{}, store.BMP{}), cmpopts.EquateEmpty()); diff != "" {
					rt.Fatalf("%s: (-direct +%s):\n%s", name, how, diff)
				}
			}
		}
	})
}

func TestDesiredWaits(t *testing.T) {
	t.Parallel()
	unsynced := &View{}
	if _, err := unsynced.Apply(clustertest.Step("", store.Batch{Events: []store.Event{bgpNode(t, "node1", "10.1.0.11/24")}})); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name string
		view *View
		want error
	}{
		{"store not read", unsynced, ErrNotSynced},
		{"zero view", &View{}, ErrNotSynced},
		{"no node", view(t, bgpNode(t, "node2", "10.1.0.12/24")), ErrNoNode},
		{"no bgp", view(t, node(t, "node1", `{}`)), ErrNoAddress},
		{"no address", view(t, node(t, "node1", `{"bgp":{"asNumber":65000}}`)), ErrNoAddress},
	} {
		if _, err := Desired(tt.view, "node1"); !errors.Is(err, tt.want) {
			t.Errorf("%s: error %v, want %v", tt.name, err, tt.want)
		}
	}
}

// TestViewKeepsLastKnownGood holds that input that lies changes nothing and is
// named.
func TestViewKeepsLastKnownGood(t *testing.T) {
	t.Parallel()
	key := store.ResourceKey(store.KindNode, "node1")
	for _, tt := range []struct {
		name  string
		event store.Event
		says  string
	}{
		{"undecodable", store.Event{Key: key, Err: store.ErrDecode}, "Node(node1)"},
		{"wrong type", store.Event{Key: key, Object: store.Object{Key: key, Value: new(v3.IPPool)}}, "Node(node1)"},
		{"no address", node(t, "node1", `{"bgp":{"ipv4Address":"ten"}}`), "spec.bgp.ipv4Address"},
		{"IPv4 as IPv6", node(t, "node1", `{"bgp":{"ipv4Address":"10.1.0.11/24","ipv6Address":"10.1.0.11/24"}}`), "spec.bgp.ipv6Address"},
		{"IPv6 as IPv4", node(t, "node1", `{"bgp":{"ipv4Address":"fd00::1/64"}}`), "spec.bgp.ipv4Address"},
		{"bad pool", ippool(t, "p", `{"cidr":"192.168.0.0"}`), "spec.cidr"},
		{"bad priority", conf(t, "default", `{"asNumber":65000,"ipv4NormalRoutePriority":"high"}`), "spec.ipv4NormalRoutePriority"},
		{"bad keepalive", peer(t, "tor", `{"peerIP":"10.1.0.1","asNumber":1,"keepaliveTime":"soon"}`), "spec.keepaliveTime"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			v := view(t, bgpNode(t, "node1", "10.1.0.11/24"), ippool(t, "p", `{"cidr":"192.168.0.0/16"}`),
				peer(t, "tor", `{"peerIP":"10.1.0.1","asNumber":64999}`))
			before, err := Desired(v, "node1")
			if err != nil {
				t.Fatal(err)
			}
			changed, err := v.Apply(clustertest.Step("", store.Batch{Events: []store.Event{tt.event}}))
			if err == nil || !strings.Contains(err.Error(), tt.says) {
				t.Errorf("error %v, want one that says %q", err, tt.says)
			}
			if changed {
				t.Error("reported as a change")
			}
			after, err := Desired(v, "node1")
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(before.text(), after.text()); diff != "" {
				t.Errorf("config changed (-before +after):\n%s", diff)
			}
		})
	}
}

// TestViewReportsOnlyChangesThatMatter keeps a busy store from waking BGP.
func TestViewReportsOnlyChangesThatMatter(t *testing.T) {
	t.Parallel()
	given := map[int]string{0: of("node1"), 3: of("node2")}
	v := view(t, bgpNode(t, "node1", "10.1.0.11/24"), ipamBlock(t, "192.168.1.0/29", "host:node1", given),
		affinity(t, "node1", "192.168.1.0/29", "confirmed"), peer(t, "tor", `{"peerIP":"10.1.0.1","asNumber":1,"nodeSelector":"all()"}`))
	conditions := node(t, "node1", `{"bgp":{"ipv4Address":"10.1.0.11/24"},"ipv4VXLANTunnelAddr":"192.168.1.1"}`)
	for _, tt := range []struct {
		name  string
		event store.Event
		want  bool
	}{
		{"own pod starts", ipamBlock(t, "192.168.1.0/29", "host:node1", map[int]string{0: of("node1"), 1: of("node1"), 3: of("node2")}), false},
		{"address borrowed", ipamBlock(t, "192.168.1.0/29", "host:node1", map[int]string{0: of("node1"), 4: of("node2"), 3: of("node2")}), true},
		{"affinity again", affinity(t, "node1", "192.168.1.0/29", ""), false},
		{"affinity goes", affinity(t, "node1", "192.168.1.0/29", "pendingDeletion"), true},
		{"another field of the node", conditions, false},
		{"address of the node", bgpNode(t, "node1", "10.1.0.12/24"), true},
		{"same peer", peer(t, "tor", `{"peerIP":"10.1.0.1","asNumber":1,"nodeSelector":"all()"}`), false},
		{"another kind", gone(store.ResourceKey(store.KindTier, "default")), false},
		{"unknown deleted", gone(store.ResourceKey(store.KindBGPPeer, "nobody")), false},
		{"peer deleted", gone(store.ResourceKey(store.KindBGPPeer, "tor")), true},
	} {
		changed, err := v.Apply(clustertest.Step("", store.Batch{Events: []store.Event{tt.event}}))
		if err != nil {
			t.Fatalf("%s: %v", tt.name, err)
		}
		if changed != tt.want {
			t.Errorf("%s: changed %t, want %t", tt.name, changed, tt.want)
		}
	}
}
