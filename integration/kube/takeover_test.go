package kube_test

import (
	"context"
	"crypto/sha3"
	"encoding/base32"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/kube"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/integration/lab/calico"
	"github.com/routerd/routerd/integration/lab/traffic"
	"github.com/routerd/routerd/store"
	kubestore "github.com/routerd/routerd/store/kube"
	"github.com/routerd/routerd/store/kube/convert"
)

// inAPI is a cluster of Calico's, made by hand, with what it has in Kubernetes' API, in its own form.
type inAPI struct {
	*calico.Cluster
	c *cluster
	g convert.Group
}

// put writes an object as Calico does: in the group v1 its labels are an annotation too.
func (k *inAPI) put(kind store.Kind, name string, labels map[string]string, spec string) {
	k.c.t.Helper()
	r, ok := convert.Custom(k.g, kind)
	if !ok {
		k.c.t.Fatalf("%s has no resource", kind)
	}
	meta := map[string]any{"name": name}
	if labels != nil {
		meta["labels"] = labels
	}
	if k.g == convert.V1 {
		its := map[string]any{}
		if labels != nil {
			its["labels"] = labels
		}
		meta["annotations"] = map[string]string{"projectcalico.org/metadata": k.json(its)}
	}
	body := k.json(map[string]any{"apiVersion": r.APIVersion(), "kind": r.APIKind, "metadata": meta, "spec": json.RawMessage(spec)})
	if _, err := server.Do(k.c.t.Context(), http.MethodPost, r.Path(""), "application/json", []byte(body)); err != nil {
		k.c.t.Fatal(err)
	}
}

func (k *inAPI) json(v any) string {
	k.c.t.Helper()
	raw, err := json.Marshal(v)
	if err != nil {
		k.c.t.Fatal(err)
	}
	return string(raw)
}

func (k *inAPI) patch(path, body string) {
	k.c.t.Helper()
	if _, err := server.Do(k.c.t.Context(), http.MethodPatch, path, "application/strategic-merge-patch+json", []byte(body)); err != nil {
		k.c.t.Fatal(err)
	}
}

// fill writes what Calico has in the API.
func (k *inAPI) fill() {
	k.c.t.Helper()
	k.put(store.KindClusterInformation, "default", nil, `{"clusterGUID":"08f7c4da8ec04385b189b65bc714604b","clusterType":"k8s,bgp,kdd","calicoVersion":"v3.31.2","datastoreReady":true}`)
	k.put(store.KindFelixConfiguration, "default", nil, `{"logSeverityScreen":"Info","reportingInterval":"0s"}`)
	k.put(store.KindBGPConfiguration, "default", nil, `{"logSeverityScreen":"Info","nodeToNodeMeshEnabled":true,"asNumber":64512}`)
	pools := map[string]string{"plain": calico.PlainPool, "tunnel": calico.TunnelPool}
	if k.Hosts[0].Six != nil {
		pools["plain6"], pools["tunnel6"] = calico.PlainPool6, calico.TunnelPool6
	}
	for name, cidr := range pools {
		mode, p := map[bool]string{false: "Never", true: "Always"}[strings.HasPrefix(name, "tunnel")], netip.MustParsePrefix(cidr)
		k.put(store.KindIPPool, name, nil, fmt.Sprintf(`{"cidr":%q,"vxlanMode":%q,"ipipMode":"Never","natOutgoing":%t,"blockSize":%d,"nodeSelector":"all()","allowedUses":["Workload","Tunnel"],"assignmentMode":"Automatic"}`,
			cidr, mode, p.Addr().Is4(), p.Addr().BitLen()-6))
	}
	k.put(store.KindIPAMConfig, "default", nil, `{"strictAffinity":false,"autoAllocateBlocks":true,"maxBlocksPerHost":0}`)
	for _, h := range k.Hosts {
		path := "/api/v1/nodes/" + h.Name
		annotations := map[string]string{
			"projectcalico.org/IPv4Address":         h.Addr.String() + "/24",
			"projectcalico.org/IPv4VXLANTunnelAddr": h.VTEP.String(),
			"projectcalico.org/VXLANTunnelMACAddr":  h.MAC,
		}
		if six := h.Six; six != nil {
			annotations["projectcalico.org/IPv6Address"] = six.Addr.String() + "/64"
			annotations["projectcalico.org/IPv6VXLANTunnelAddr"] = six.VTEP.String()
			annotations["projectcalico.org/VXLANTunnelMACAddrV6"] = six.MAC
		}
		k.patch(path, `{"metadata":{"annotations":`+k.json(annotations)+`}}`)
		k.patch(path+"/status", `{"status":{"conditions":[{"type":"NetworkUnavailable","status":"False","reason":"CalicoIsUp","message":"Calico is running on this node"}]}}`)
		used := map[netip.Prefix]map[int]string{}
		of := func(handle, secondary string, ordinal int, blocks ...netip.Prefix) {
			var counts []string
			for _, block := range blocks {
				used[block][ordinal] = fmt.Sprintf(`{"handle_id":%q,"secondary":{"node":%q,%s}}`, handle, h.Name, secondary)
				counts = append(counts, fmt.Sprintf(`"%s":1`, block))
			}
			k.put(store.KindIPAMHandle, handle, nil, fmt.Sprintf(`{"handleID":%q,"block":{%s},"deleted":false}`, handle, strings.Join(counts, ",")))
		}
		for _, n := range h.Nets() {
			used[n.Plain], used[n.Tunnel] = map[int]string{}, map[int]string{}
			if n.Family == dataplane.IPv6 {
				of("vxlan-v6-tunnel-addr-"+h.Name, `"type":"vxlanV6TunnelAddress"`, 0, n.Tunnel)
			} else {
				of("vxlan-tunnel-addr-"+h.Name, `"type":"vxlanTunnelAddress"`, 0, n.Tunnel)
			}
		}
		for _, p := range h.Pods() {
			create(k.c.t, podsPath, podOn(h.Name, p.Name))
			var prefixes, status []string
			var blocks []netip.Prefix
			for _, a := range p.Addrs() {
				prefixes, status = append(prefixes, netip.PrefixFrom(a, a.BitLen()).String()), append(status, fmt.Sprintf(`{"ip":"%s"}`, a))
			}
			for _, n := range h.Nets() {
				blocks = append(blocks, p.Block(n))
			}
			k.patch(podsPath+"/"+p.Name, fmt.Sprintf(`{"metadata":{"annotations":{"cni.projectcalico.org/podIP":%q,"cni.projectcalico.org/podIPs":%q,"cni.projectcalico.org/containerID":%q}}}`, prefixes[0], strings.Join(prefixes, ","), p.ID))
			k.patch(podsPath+"/"+p.Name+"/status", fmt.Sprintf(`{"status":{"phase":"Running","podIP":"%s","podIPs":[%s]}}`, p.Addr, strings.Join(status, ",")))
			of(calico.Network+"."+p.ID, fmt.Sprintf(`"namespace":"default","pod":%q,"timestamp":"2026-11-21 17:31:36.8948024 +0000 UTC"`, p.Name), 1, blocks...)
		}
		hash := sha3.Sum256([]byte(h.Name))
		for block, attributes := range used {
			name := strings.NewReplacer(".", "-", ":", "-", "/", "-").Replace(block.String())
			k.put(store.KindIPAMBlock, name, nil, blockSpec(h.Name, block, attributes))
			mark := "false"
			if k.g == convert.V1 {
				mark = `"false"`
			}
			k.put(store.KindIPAMAffinity, h.Name+"-"+name, map[string]string{
				"projectcalico.org/affinity-type": "host", "projectcalico.org/ip-version": map[bool]string{true: "4", false: "6"}[block.Addr().Is4()],
				"projectcalico.org/hostname-hash": base32.StdEncoding.WithPadding(base32.NoPadding).EncodeToString(hash[:]),
			}, fmt.Sprintf(`{"cidr":"%s","node":%q,"state":"confirmed","type":"host","deleted":%s}`, block, h.Name, mark))
		}
	}
}

// blockSpec is a block of a node, by the attributes of the addresses that are in use.
func blockSpec(node string, block netip.Prefix, used map[int]string) string {
	var allocations, free, attributes, sequence []string
	for n := range 64 {
		a, ok := used[n]
		if !ok {
			allocations, free = append(allocations, "null"), append(free, fmt.Sprint(n))
			continue
		}
		allocations = append(allocations, fmt.Sprint(len(attributes)))
		attributes = append(attributes, a)
		sequence = append(sequence, fmt.Sprintf(`"%d":%d`, n, 1795282296903635737+n))
	}
	list := func(l []string) string { return strings.Join(l, ",") }
	return fmt.Sprintf(`{"cidr":"%s","affinity":"host:%s","affinityClaimTime":"2026-11-21T17:31:37Z","allocations":[%s],"unallocated":[%s],"attributes":[%s],"sequenceNumber":1795282296903635739,"sequenceNumberForAllocation":{%s},"strictAffinity":false,"deleted":false}`,
		block, node, list(allocations), list(free), list(attributes), list(sequence))
}

// blocksOf are a host's, of all families.
func blocksOf(h calico.Host) (out []netip.Prefix) {
	for _, n := range h.Nets() {
		out = append(out, n.Plain, n.Tunnel)
	}
	return out
}

// owners returns by which handle each address is in use that Calico gave.
func (k *inAPI) owners(s *kubestore.Store) map[string]string {
	k.c.t.Helper()
	out := map[string]string{}
	for _, h := range k.Hosts {
		for _, p := range blocksOf(h) {
			o, err := s.Get(k.c.t.Context(), store.BlockKey(p))
			if err != nil {
				k.c.t.Fatal(err)
			}
			b, ok := o.Value.(*store.Block)
			if !ok || b.Affinity == nil || *b.Affinity != "host:"+h.Name {
				k.c.t.Fatalf("block %s of %s: %s", p, h.Name, o.Raw)
			}
			for n, a := 0, p.Addr(); n < 2; n, a = n+1, a.Next() {
				if i := b.Allocations[n]; i != nil && b.Attributes[*i].HandleID != nil {
					out[a.String()] = *b.Attributes[*i].HandleID
				}
			}
		}
	}
	return out
}

// TestTakeoverFromCalicoV1 and the same in the other group: hosts on which Calico runs, with its resources in
// the API, are moved to routerd one after the other, as the guide says, and pods that send each other
// numbered packets lose none. Addresses stay whose they are. One host goes back, too, and comes again. In the
// first group hosts and pods have IPv4 alone, in the other both families.
func TestTakeoverFromCalicoV1(t *testing.T) { takeover(t, "c1", convert.V1, lab.UnderlayIPv4) }

func TestTakeoverFromCalicoV3(t *testing.T) { takeover(t, "c3", convert.V3, lab.UnderlayDual) }

func takeover(t *testing.T, suffix string, g convert.Group, underlay lab.Underlay) {
	s, _ := open(t, g)
	install(t)
	t.Cleanup(func() {
		if err := wipe(context.WithoutCancel(t.Context()), g); err != nil {
			t.Error(err)
		}
	})
	before, err := server.Audit()
	if err != nil {
		t.Fatal(err)
	}
	pods := 0
	top := lab.DefaultTopology(2)
	top.Pods, top.Spine.BGP = &pods, new(bool)
	if top.Kubeconfig, err = server.Kubeconfig("", kube.Token); err != nil {
		t.Fatal(err)
	}
	top.APIGroup, top.Underlay = string(g), underlay
	dual := underlay == lab.UnderlayDual
	c := bringUpLab(t, suffix, lab.Options{Topology: top, NoDaemons: true}, nil, func(file string) map[string]any {
		return map[string]any{
			"address":   map[string]any{"ipv4": "kubernetes-internal-ip", "ipv6": "kubernetes-internal-ip"},
			"cni":       map[string]any{"networkName": calico.Network, "assignIPv6": dual},
			"datastore": map[string]any{"kubernetes": map[string]any{"kubeconfig": file, "apiGroup": g.APIVersion()}},
		}
	})
	k := &inAPI{calico.New(t, c.Lab), c, g}
	k.UID = func(p calico.Pod) string { return c.pod(p.Name).Metadata.UID }
	k.fill()
	k.Up()
	had := k.owners(s)
	families := []dataplane.Family{dataplane.IPv4}
	if dual {
		families = append(families, dataplane.IPv6)
	}
	if len(had) != 6*len(families) {
		t.Fatalf("addresses in use: %v", had)
	}
	var pairs [][2]traffic.Place
	for _, f := range families {
		for _, p := range k.Pairs() {
			c.reachBy(f, "Calico's own network", p[0], p[1], false)
			var places [2]traffic.Place
			for i, where := range p {
				addr, err := c.AddrOf(where, f)
				if err != nil {
					t.Fatal(err)
				}
				places[i] = traffic.Place{Name: where + " " + f.String(), Space: c.Space(where), Addr: addr}
			}
			pairs = append(pairs, places)
		}
	}
	packets, err := traffic.StartLoad(traffic.LoadOptions{Rate: 500}, pairs...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { packets.Stop() })
	noLoss := func(what string) {
		t.Helper()
		r := packets.Interval()
		t.Logf("%s: %s", what, r.Sum())
		for _, f := range append(r.Bad(), r.Silent()...) {
			t.Errorf("%s: %s", what, f)
		}
	}
	soundOf := func(h calico.Host, workloads int) {
		t.Helper()
		await.Until(t, "the daemon has the pods", func() error {
			n, err := c.Node(t.Context(), h.Name)
			if err == nil && int(n.GetWorkloads()) != workloads {
				err = fmt.Errorf("%d workloads", n.GetWorkloads())
			}
			return err
		})
		now := k.owners(s)
		maps.DeleteFunc(now, func(addr, _ string) bool { return had[addr] == "" }) // what was free
		if diff := cmp.Diff(had, now); diff != "" {
			t.Errorf("whose addresses are after the move of %s (-before +after):\n%s", h.Name, diff)
		}
	}
	// started starts a pod, which is routerd's from the start.
	started := func(h calico.Host) {
		t.Helper()
		p := c.run(fmt.Sprintf("%s/new%d", h.Name, h.I+1))
		if len(p.Addrs) != len(families) {
			t.Errorf("%s has the addresses %v", p, p.Addrs)
		}
		for _, a := range p.Addrs {
			if whose, twice := had[a.String()]; twice {
				t.Errorf("%s was given %s, which %s has", p, a, whose)
			}
		}
		for _, o := range k.Hosts {
			for _, f := range families {
				c.reachBy(f, "a new pod reaches one of Calico's", p.String(), o.Pods()[0].Where(), false)
				c.reachBy(f, "one of Calico's reaches a new pod", o.Pods()[1].Where(), p.String(), false)
			}
		}
	}
	for _, h := range k.Hosts {
		k.TakeOver(h)
		soundOf(h, 2)
		started(h) // the first one while the other host is Calico's
		noLoss("takeover of " + h.Name)
	}
	for _, h := range k.Hosts {
		k.CleanUp(h)
	}
	noLoss("cleanup")
	back := k.Hosts[1]
	k.GoBack(back)
	noLoss("the way back of " + back.Name)
	k.TakeOver(back)
	soundOf(back, 3)
	k.CleanUp(back)
	noLoss("another takeover of " + back.Name)
	ipamSound(t, asAdminOf(t, g))
	packets.Stop()

	// The runtime ends a pod that Calico's plugin began, because it is deleted.
	gone := k.Hosts[0].Pods()[0]
	if _, err := server.Do(t.Context(), http.MethodDelete, podsPath+"/"+gone.Name+"?gracePeriodSeconds=30", "", nil); err != nil {
		t.Fatal(err)
	}
	if err := c.DetachPod(t.Context(), gone.Where()); err != nil {
		t.Fatal(err)
	}
	await.Until(t, "its address is free", func() error {
		_, err := s.Get(t.Context(), store.HandleKey(calico.Network+"."+gone.ID))
		if !errors.Is(err, store.ErrNotFound) {
			return fmt.Errorf("its handle: %w", err)
		}
		now := k.owners(s)
		for _, a := range gone.Addrs() {
			if now[a.String()] == had[a.String()] {
				return fmt.Errorf("%s is in use: %v", a, now)
			}
		}
		return nil
	})
	await.Until(t, "the API is told that the pod has no address", func() error {
		a := c.pod(gone.Name).Metadata.Annotations
		if ip, ok := a["cni.projectcalico.org/podIP"]; !ok || ip != "" {
			return fmt.Errorf("podIP is %q (%t)", ip, ok)
		}
		return nil
	})
	ipamSound(t, asAdminOf(t, g))
	forbidden(t)
	after, err := server.Audit()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range slices.Collect(maps.Keys(after)) {
		if n := after[a] - before[a]; n > 0 && a.Refused() {
			t.Errorf("%d times refused: %+v", n, a)
		}
	}
}
