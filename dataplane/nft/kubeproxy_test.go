//go:build kubeproxy

package nft

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/dataplane/filter"
	"github.com/routerd/routerd/integration/await"
)

// kubeObjects are what the API has for kube-proxy, by the last part of the path.
var kubeObjects = map[string]string{
	"nodes":    `{"metadata":{"name":"node1","uid":"1","resourceVersion":"1"},"status":{"addresses":[{"type":"InternalIP","address":"10.1.255.1"},{"type":"InternalIP","address":"fd00::ff"}]}}`,
	"services": `{"metadata":{"name":"web","namespace":"default","uid":"2","resourceVersion":"1"},"spec":{"type":"NodePort","clusterIP":"10.96.0.10","clusterIPs":["10.96.0.10","fd00:10:96::a"],"ipFamilies":["IPv4","IPv6"],"ipFamilyPolicy":"RequireDualStack","externalTrafficPolicy":"Cluster","internalTrafficPolicy":"Cluster","sessionAffinity":"None","ports":[{"name":"x","protocol":"UDP","port":80,"targetPort":80,"nodePort":30080}]}}`,
	"endpointslices": `{"metadata":{"name":"web-4","namespace":"default","uid":"3","resourceVersion":"1","labels":{"kubernetes.io/service-name":"web"}},"addressType":"IPv4","ports":[{"name":"x","protocol":"UDP","port":80}],"endpoints":[{"addresses":["10.1.0.1"],"conditions":{"ready":true},"nodeName":"node1"}]},` +
		`{"metadata":{"name":"web-6","namespace":"default","uid":"4","resourceVersion":"1","labels":{"kubernetes.io/service-name":"web"}},"addressType":"IPv6","ports":[{"name":"x","protocol":"UDP","port":80}],"endpoints":[{"addresses":["fd01::1"],"conditions":{"ready":true},"nodeName":"node1"}]}`,
}

// kubeAPI answers kube-proxy as an API server of an older version does, with a state that never changes.
func kubeAPI(w http.ResponseWriter, r *http.Request) {
	q, parts := r.URL.Query(), strings.Split(r.URL.Path, "/")
	w.Header().Set("Content-Type", "application/json")
	kinds := map[string][2]string{"nodes": {"Node", "v1"}, "services": {"Service", "v1"}, "endpointslices": {"EndpointSlice", "discovery.k8s.io/v1"}, "servicecidrs": {"ServiceCIDR", "networking.k8s.io/v1"}}
	last := parts[len(parts)-1]
	switch kind, ok := kinds[last]; {
	case q.Get("sendInitialEvents") != "":
		w.WriteHeader(http.StatusUnprocessableEntity)
		fmt.Fprint(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Invalid","code":422}`)
	case q.Get("watch") != "":
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	case ok:
		fmt.Fprintf(w, `{"kind":"%sList","apiVersion":%q,"metadata":{"resourceVersion":"1"},"items":[%s]}`, kind[0], kind[1], kubeObjects[last])
	case len(parts) > 1 && parts[len(parts)-2] == "nodes":
		fmt.Fprintf(w, `{"kind":"Node","apiVersion":"v1",%s`, kubeObjects["nodes"][1:])
	default:
		w.WriteHeader(http.StatusNotFound)
		fmt.Fprint(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"NotFound","code":404}`)
	}
}

// TestKubeProxyIPVS has kube-proxy itself, in mode ipvs, balance a Service on the node of its endpoint: by its
// addresses and by the node's port, in both families, the policies of the endpoint hold for others' packets.
func TestKubeProxyIPVS(t *testing.T) {
	bin := os.Getenv("KUBE_BIN")
	if bin == "" {
		t.Fatal("KUBE_BIN does not say where kube-proxy is: make kubernetes runs this in the virtual machine, whose kernel has IPVS")
	}
	l := newLab(t)
	var listener net.Listener
	err := l.host.Do(func() (err error) {
		listener, err = net.Listen("tcp", "127.0.0.1:8001")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewUnstartedServer(http.HandlerFunc(kubeAPI))
	_ = server.Listener.Close()
	server.Listener = listener
	server.Start()
	t.Cleanup(func() { server.CloseClientConnections(); server.Close() })
	config := filepath.Join(t.TempDir(), "config")
	text, err := json.Marshal(map[string]any{
		"apiVersion": "v1", "kind": "Config", "current-context": "x",
		"clusters": []any{map[string]any{"name": "x", "cluster": map[string]any{"server": "http://127.0.0.1:8001"}}},
		"contexts": []any{map[string]any{"name": "x", "context": map[string]any{"cluster": "x", "user": ""}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(config, text, 0o600); err != nil {
		t.Fatal(err)
	}
	log, err := os.Create(filepath.Join(t.TempDir(), "log"))
	if err != nil {
		t.Fatal(err)
	}
	proxy := exec.Command(filepath.Join(bin, "kube-proxy"), "--proxy-mode=ipvs", "--kubeconfig="+config, "--hostname-override=node1",
		"--cluster-cidr=10.1.0.0/24,fd01::/64", "--conntrack-max-per-core=0", "--conntrack-tcp-timeout-established=0", "--conntrack-tcp-timeout-close-wait=0")
	proxy.Stdout, proxy.Stderr = log, log
	if err := l.host.Do(proxy.Start); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = proxy.Process.Kill()
		_ = proxy.Wait()
		if t.Failed() {
			b, _ := os.ReadFile(log.Name())
			t.Logf("kube-proxy says:\n%s", b)
		}
	})
	begin := time.Now()
	// One after the other, as each of the many programs that kube-proxy starts takes long on an emulated processor.
	for _, want := range []string{"0A60000A:0050", "0A01FF01:7580", ":000a]:0050", ":00ff]:7580"} {
		await.Until(t, "IPVS has the Service at "+want, func() error {
			return l.host.Do(func() error {
				b, err := os.ReadFile("/proc/thread-self/net/ip_vs")
				if _, after, found := strings.Cut(string(b), want); err == nil && (!found || !strings.Contains(after, "Masq")) {
					err = fmt.Errorf("it has\n%s", b)
				}
				return err
			})
		})
	}
	t.Logf("kube-proxy was ready after %v", time.Since(begin))
	table := openTable(t, l.host, Config{})
	defer table.Close()
	allow, deny := filter.Path{Default: filter.Allow}, filter.Path{Default: filter.Deny}
	port := uint16(2000)
	for _, step := range []struct {
		virtual bool
		ingress filter.Path
		arrives bool
	}{
		{true, allow, true},
		{true, deny, false},
		{false, deny, true}, // what there is the setting for
	} {
		err := table.Apply(filter.Delta{
			Settings: &filter.Settings{WorkloadPrefixes: []string{"cali"}, WorkloadToHost: filter.HostReturn, Virtual: step.virtual},
			PutEndpoints: []filter.Endpoint{
				{Interface: "cali1", Sources: prefixes("10.1.0.1/32", "fd01::1/128"), Ingress: step.ingress, Egress: allow},
				{Interface: "cali2", Sources: prefixes("10.1.0.2/32", "fd01::2/128"), Ingress: allow, Egress: allow},
			},
		})
		if err != nil {
			t.Fatal(err)
		}
		for _, tt := range []struct {
			in, src, dst string
			port         uint16
		}{
			{"cali2", "10.1.0.2", "10.96.0.10", 80},
			{"cali2", "fd01::2", "fd00:10:96::a", 80},
			{"cali2", "10.1.0.2", "10.1.255.1", 30080},
			{"eth0", "192.0.2.1", "10.1.255.1", 30080},
			{"eth0", "fd02::1", "fd00::ff", 30080},
		} {
			port++
			f := filter.Flow{In: tt.in, Out: "cali1", Packet: filter.Packet{
				Src: netip.MustParseAddr(tt.src), Dst: netip.MustParseAddr(tt.dst), Protocol: unix.IPPROTO_UDP, SrcPort: port, DstPort: tt.port,
			}}
			if got := l.try(t, []filter.Flow{f}, func(filter.Flow) bool { return step.arrives }); got[0] != step.arrives {
				t.Errorf("virtual %t, ingress %v: from %s to %s:%d arrives: %t, want %t", step.virtual, step.ingress.Default, tt.src, tt.dst, tt.port, got[0], step.arrives)
			}
		}
	}
}
