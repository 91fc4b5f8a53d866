package scenarios

import (
	"fmt"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/integration/lab/calico"
)

// inEtcd is a cluster of Calico's, made by hand, with what it has in etcd, in its own bytes.
type inEtcd struct {
	*calico.Cluster
	t *testing.T
}

const calicoEtcd = "http://10.1.0.1:2379" // on the spine

func newCalico(t *testing.T, l *lab.Lab) *inEtcd {
	t.Helper()
	c := &inEtcd{calico.New(t, l), t}
	c.startEtcd()
	c.fill()
	c.Up()
	return c
}

// startEtcd starts Debian's etcd, whose version is one that Calico is used with.
func (c *inEtcd) startEtcd() {
	c.t.Helper()
	dir := c.t.TempDir()
	calico.Run(c.t, c.Lab, "spine", filepath.Join(dir, "log"), "etcd", "--data-dir", filepath.Join(dir, "data"), "--listen-client-urls", calicoEtcd, "--advertise-client-urls", calicoEtcd,
		"--listen-peer-urls", "http://127.0.0.1:2380", "--log-level", "warn")
	poll(c.t, "etcd answers", func() string {
		if out, err := c.Output(await.Context(c.t), "spine", "etcdctl", "--endpoints", calicoEtcd, "endpoint", "health"); err != nil {
			return fmt.Sprint(err, out)
		}
		return ""
	})
}

// fill writes what Calico has in etcd, in its own bytes.
func (c *inEtcd) fill() {
	c.t.Helper()
	const meta = `"uid":"ba499037-3f06-45d3-aa1b-fde5b999f36c","creationTimestamp":"2026-11-21T17:20:26Z"`
	objects := map[string]string{
		"clusterinformations/default":  `"spec":{"clusterGUID":"08f7c4da8ec04385b189b65bc714604b","clusterType":"k8s,bgp","calicoVersion":"v3.31.2","datastoreReady":true}`,
		"felixconfigurations/default":  `"spec":{"logSeverityScreen":"Info","reportingInterval":"0s"}`,
		"bgpconfigurations/default":    `"spec":{"logSeverityScreen":"Info","nodeToNodeMeshEnabled":true,"asNumber":64512}`,
		"ippools/plain":                `"spec":{"cidr":"192.168.0.0/17","vxlanMode":"Never","ipipMode":"Never","natOutgoing":true,"blockSize":26,"nodeSelector":"all()","allowedUses":["Workload","Tunnel"],"assignmentMode":"Automatic"}`,
		"ippools/tunnel":               `"spec":{"cidr":"192.168.128.0/17","vxlanMode":"Always","ipipMode":"Never","natOutgoing":true,"blockSize":26,"nodeSelector":"all()","allowedUses":["Workload","Tunnel"],"assignmentMode":"Automatic"}`,
		"profiles/kns.default":         `"spec":{"ingress":[{"action":"Allow"}],"egress":[{"action":"Allow"}],"labelsToApply":{"pcns.projectcalico.org/name":"default"}}`,
		"profiles/ksa.default.default": `"spec":{"labelsToApply":{"pcsa.projectcalico.org/name":"default"}}`,
	}
	raw := map[string]string{"/calico/ipam/v2/config": `{"strict_affinity":false,"auto_allocate_blocks":true}`}
	for _, h := range c.Hosts {
		objects["nodes/"+h.Name] = fmt.Sprintf(`"spec":{"bgp":{"ipv4Address":"%s/24"},"ipv4VXLANTunnelAddr":"%s","orchRefs":[{"nodeName":"%s","orchestrator":"k8s"}],"addresses":[{"address":"%[1]s/24","type":"CalicoNodeIP"},{"address":"%[1]s","type":"InternalIP"}]},"status":{}`, h.Addr, h.VTEP, h.Name)
		tunnel := "vxlan-tunnel-addr-" + h.Name
		raw["/calico/ipam/v2/handle/"+tunnel] = handleBytes(h.Tunnel)
		attributes := []string{`{"handle_id":"` + tunnel + `","secondary":{"node":"` + h.Name + `","type":"vxlanTunnelAddress"}}`}
		for _, p := range h.Pods() {
			objects["workloadendpoints/default/"+p.Endpoint()] = fmt.Sprintf(`"spec":{"orchestrator":"k8s","node":"%s","containerID":"%s","pod":"%s","endpoint":"eth0","serviceAccountName":"default","ipNetworks":["%s/32"],"profiles":["kns.default","ksa.default.default"],"interfaceName":"%s","mac":"%s"}`,
				h.Name, p.ID, p.Name, p.Addr, p.Device, p.MAC)
			handle := calico.Network + "." + p.ID
			attribute := `{"handle_id":"` + handle + `","secondary":{"namespace":"default","node":"` + h.Name + `","pod":"` + p.Name + `","timestamp":"2026-11-21 17:31:36.8948024 +0000 UTC"}}`
			if p.N == 0 {
				raw["/calico/ipam/v2/handle/"+handle] = handleBytes(h.Plain)
				raw[blockKey(h.Plain)] = blockBytes(h.Name, h.Plain, "", attribute)
			} else {
				raw["/calico/ipam/v2/handle/"+handle] = handleBytes(h.Tunnel)
				raw[blockKey(h.Tunnel)] = blockBytes(h.Name, h.Tunnel, attributes[0], attribute)
			}
		}
		for _, b := range []netip.Prefix{h.Plain, h.Tunnel} {
			raw["/calico/ipam/v2/host/"+h.Name+"/ipv4/block/"+dashed(b)] = `{"state":"confirmed","deleted":false}`
		}
	}
	for path, rest := range objects {
		parts := strings.Split(path, "/")
		namespace := ""
		if len(parts) == 3 {
			namespace = `"namespace":"` + parts[1] + `","labels":{"projectcalico.org/namespace":"default","projectcalico.org/orchestrator":"k8s","projectcalico.org/serviceaccount":"default"},`
		}
		raw["/calico/resources/v3/projectcalico.org/"+path] = fmt.Sprintf(`{"kind":"%s","apiVersion":"projectcalico.org/v3","metadata":{"name":"%s",%s%s},%s}`,
			calicoKinds()[parts[0]], parts[len(parts)-1], namespace, meta, rest)
	}
	var puts strings.Builder // etcdctl's transactions are text: compares, then, else
	puts.WriteString("\n")
	for key, value := range raw {
		fmt.Fprintf(&puts, "put %s %q\n", key, value)
	}
	puts.WriteString("\n\n")
	var out strings.Builder
	code, err := c.Run(await.Context(c.t), "spine", lab.Streams{In: strings.NewReader(puts.String()), Out: &out, Err: &out}, "etcdctl", "--endpoints", calicoEtcd, "txn")
	if err != nil || code != 0 || !strings.Contains(out.String(), "SUCCESS") {
		c.t.Fatalf("etcdctl: exit code %d, %v: %s", code, err, out.String())
	}
}

func calicoKinds() map[string]string {
	return map[string]string{
		"clusterinformations": "ClusterInformation", "felixconfigurations": "FelixConfiguration", "bgpconfigurations": "BGPConfiguration",
		"ippools": "IPPool", "profiles": "Profile", "nodes": "Node", "workloadendpoints": "WorkloadEndpoint",
	}
}

func dashed(p netip.Prefix) string { return strings.ReplaceAll(p.String(), "/", "-") }

func blockKey(p netip.Prefix) string { return "/calico/ipam/v2/assignment/ipv4/block/" + dashed(p) }

func handleBytes(p netip.Prefix) string { return fmt.Sprintf(`{"block":{"%s":1},"deleted":false}`, p) }

// blockBytes is a block whose first addresses have attributes; empty: the first is free.
func blockBytes(node string, p netip.Prefix, first, second string) string {
	allocations, free, attributes, sequence := "0,1", "", first+","+second, `"0":1795282296903635737,"1":1795282296903635738`
	if first == "" {
		allocations, free, attributes, sequence = "null,0", "0,", second, `"1":1795282296903635738`
	}
	var rest []string
	for n := 2; n < 64; n++ {
		allocations += ",null"
		rest = append(rest, fmt.Sprint(n))
	}
	return fmt.Sprintf(`{"cidr":"%s","affinity":"host:%s","affinity_claim_time":"2026-11-21T17:31:37Z","allocations":[%s],"unallocated":[%s%s],"attributes":[%s],"sequenceNumber":1795282296903635739,"sequenceNumberForAllocation":{%s},"deleted":false}`,
		p, node, allocations, free, strings.Join(rest, ","), attributes, sequence)
}
