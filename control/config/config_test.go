package config_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/routerd/routerd/control/config"
)

func write(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "routerd.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestLoad(t *testing.T) {
	want := config.Default()
	want.NodeName = "node1"
	want.Datastore.Endpoints = []string{"https://10.1.0.11:2379", "https://10.1.0.12:2379"}
	want.Datastore.CAFile = "/etc/routerd/ca.crt"
	want.Dataplane.FullCheckInterval = time.Minute
	got, err := config.Load(write(t, `
nodeName: node1
datastore:
  endpoints: [https://10.1.0.11:2379, https://10.1.0.12:2379]
  caFile: /etc/routerd/ca.crt
dataplane:
  fullCheckInterval: 1m
`))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("configuration (-want +got):\n%s", diff)
	}
}

func TestEmptyFileIsDefault(t *testing.T) {
	got, err := config.Load(write(t, "{}"))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(config.Default(), got); diff != "" {
		t.Errorf("configuration (-want +got):\n%s", diff)
	}
}

// TestDatastoreType: the variable of Calico's users names the datastore where nothing
// else does.
func TestDatastoreType(t *testing.T) {
	for _, tt := range []struct{ text, env, want string }{
		{"{}", "", ""},
		{"{}", "kubernetes", config.DatastoreKubernetes},
		{"{}", "etcdv3", ""},
		{"datastore: {kind: etcd}", "kubernetes", config.DatastoreEtcd},
		{"datastore: {endpoints: ['http://a:1']}", "kubernetes", ""},
	} {
		t.Setenv("DATASTORE_TYPE", tt.env)
		got, err := config.Load(write(t, tt.text))
		if err != nil || got.Datastore.Kind != tt.want {
			t.Errorf("%s with DATASTORE_TYPE=%s: kind %q, %v", tt.text, tt.env, got.Datastore.Kind, err)
		}
	}
	t.Setenv("DATASTORE_TYPE", "consul")
	if _, err := config.Load(write(t, "{}")); err == nil || !strings.Contains(err.Error(), "consul") {
		t.Errorf("DATASTORE_TYPE=consul: %v", err)
	}
}

func TestEnvironment(t *testing.T) {
	t.Setenv("ROUTERD_NODENAME", "from-env")
	t.Setenv("ROUTERD_DATASTORE_ENDPOINTS", "http://127.0.0.1:2379,http://127.0.0.2:2379")
	t.Setenv("ROUTERD_DEFAULTPOOL_BLOCKSIZE", "28")
	got, err := config.Load(write(t, "nodeName: from-file"))
	if err != nil {
		t.Fatal(err)
	}
	if got.NodeName != "from-env" || len(got.Datastore.Endpoints) != 2 || got.DefaultPool.BlockSize != 28 {
		t.Errorf("the environment did not win: %+v", got)
	}
}

func TestErrors(t *testing.T) {
	tests := []struct {
		name, text string
		want       []string // all of them in the message
	}{
		{"unknown key", "nodename2: x", []string{"nodename2", "known keys", "nodeName"}},
		{"unknown nested key", "datastore:\n  endpoint: [x]", []string{"datastore", "endpoint"}},
		{"not YAML", "a: [", []string{"routerd.yaml"}},
		{"wrong type", "cni:\n  mtu: big", []string{"mtu"}},
		{"bad node name", "nodeName: Node_1", []string{"nodeName", "Node_1", "lower-case"}},
		{"relative directory", "stateDir: state", []string{"stateDir", "absolute"}},
		{"long socket path", "runDir: /" + strings.Repeat("x", 100), []string{"runDir", "107"}},
		{"malformed tunnel address", "tunnelAddress: public", []string{"tunnelAddress", "auto", "none"}},
		{"two tunnel addresses of a family", "tunnelAddress: 198.51.100.1,198.51.100.2", []string{"tunnelAddress", "one of each family"}},
		{"keepalives slower than translators forget", "reach: {interval: 60s}", []string{"reach.interval", "25s"}},
		{"no port for probes", "probe: {port: 0}", []string{"probe.port", "7747"}},
		{"duration without unit", "datastore: {dialTimeout: 5}", []string{"datastore.dialTimeout", "10s"}},
		{"log level", "logLevel: loud", []string{"logLevel", "debug, info, warn or error"}},
		{"endpoint without scheme", "datastore: {endpoints: ['10.0.0.1:2379']}", []string{"datastore.endpoints", "10.0.0.1:2379", "https://"}},
		{"two datastores", "datastore: {endpoints: ['http://a:1'], embedded: {listen: '10.0.0.1:2379'}}", []string{"embedded.listen", "remove one"}},
		{"certificate without key", "datastore: {endpoints: ['http://a:1'], certFile: /x}", []string{"certFile", "keyFile"}},
		{"unknown datastore", "datastore: {kind: consul}", []string{"datastore.kind", "consul", "etcd or kubernetes"}},
		{"etcd beside Kubernetes", "datastore: {kind: kubernetes, endpoints: ['http://a:1']}", []string{"datastore.endpoints", "remove one"}},
		{"embedded beside Kubernetes", "datastore: {kind: kubernetes, embedded: {listen: '10.0.0.1:2379'}}", []string{"embedded.listen", "remove one"}},
		{"kubeconfig of etcd", "datastore: {kubernetes: {kubeconfig: /x}}", []string{"datastore.kind", "want kubernetes"}},
		{"kubeconfig beside etcd that follows", "kubernetes: {enabled: true}\ndatastore: {kubernetes: {kubeconfig: /x, apiGroup: projectcalico.org/v3}}", []string{"datastore.kubernetes.apiGroup", "remove it"}},
		{"the API follows itself", "kubernetes: {enabled: true}\ndatastore: {kind: kubernetes}", []string{"kubernetes.enabled", "remove it"}},
		{"kubelet's address without Kubernetes", "address: {ipv4: kubernetes-internal-ip}", []string{"address.ipv4", "datastore.kind", "kubernetes.enabled"}},
		{"API group", "datastore: {kind: kubernetes, kubernetes: {apiGroup: v3}}", []string{"apiGroup", "projectcalico.org/v3"}},
		{"API server without port", "datastore: {kind: kubernetes, kubernetes: {servers: [10.0.0.1]}}", []string{"servers", "HOST:PORT"}},
		{"pool with host bits", "defaultPool: {cidr: 192.168.1.0/16}", []string{"defaultPool.cidr", "192.168.0.0/16"}},
		{"block size", "defaultPool: {blockSize: 33}", []string{"defaultPool.blockSize", "33", "20 to 32"}},
		{"block larger than the pool", "defaultPool: {cidr: 10.0.0.0/28, blockSize: 26}", []string{"blockSize", "larger than the pool"}},
		{"IPv4 in the IPv6 pool", "defaultPool: {cidr6: 10.0.0.0/16}", []string{"defaultPool.cidr6", "IPv6 CIDR"}},
		{"IPv6 pool with host bits", "defaultPool: {cidr6: 'fd00::1/48'}", []string{"defaultPool.cidr6", "fd00::/48"}},
		{"IPv6 in the IPv4 pool", "defaultPool: {cidr: 'fd00::/48'}", []string{"defaultPool.cidr", "IPv4 CIDR"}},
		{"IPv6 block size", "defaultPool: {cidr6: 'fd00::/48', blockSize6: 64}", []string{"defaultPool.blockSize6", "116 to 128"}},
		{"IPv6 encapsulation", "defaultPool: {cidr6: 'fd00::/48', encapsulation6: GRE}", []string{"defaultPool.encapsulation6", "GRE"}},
		{"no address for workloads", "cni: {assignIPv4: false}", []string{"cni.assignIPv4", "cni.assignIPv6"}},
		{"version of CNI", "cni: {version: 1.2.0}", []string{"cni.version", "1.2.0", "1.0.0", "1.1.0"}},
		{"encapsulation", "defaultPool: {encapsulation: GRE}", []string{"encapsulation", "GRE", "VXLANCrossSubnet"}},
		{"protocol of another", "dataplane: {routeProtocol: 80}", []string{"routeProtocol", "80"}},
		{"reserve", "ipam: {reserve: {min: 9, max: 8}}", []string{"ipam.reserve.min", "ipam.reserve.max, which is 8"}},
		{"reserve too large", "ipam: {reserve: {min: 1, max: 257}}", []string{"may be 256 at most"}},
		{"profiles without endpoint", "health: {profiles: true}", []string{"health.profiles", "127.0.0.1:9099"}},
		{"profiles beyond the host", "health: {profiles: true, listen: '10.0.0.1:9099'}", []string{"health.profiles", "loopback", "10.0.0.1:9099"}},
		{"listen without port", "health: {listen: 127.0.0.1}", []string{"health.listen", "ADDRESS:PORT"}},
		{"page beyond the host", "ui: {listen: '10.0.0.1:7749'}", []string{"ui.listen", "10.0.0.1:7749", "loopback", "127.0.0.1:7749", "ssh -L"}},
		{"page on all addresses", "ui: {listen: '0.0.0.0:7749'}", []string{"ui.listen", "0.0.0.0:7749", "loopback"}},
		{"page on all addresses of IPv6", "ui: {listen: '[::]:7749'}", []string{"ui.listen", "loopback"}},
		{"page without port", "ui: {listen: 127.0.0.1}", []string{"ui.listen", "a port"}},
		{"page at any port", "ui: {listen: '127.0.0.1:0'}", []string{"ui.listen", "a port"}},
		{"page at a name", "ui: {listen: 'localhost:7749'}", []string{"ui.listen", "127.0.0.1:7749"}},
		{"page on a relative socket", "ui: {listen: 'unix://ui.sock'}", []string{"ui.listen", "absolute path"}},
		{"page on a socket with dots", "ui: {listen: 'unix:///run/../ui.sock'}", []string{"ui.listen", "absolute path"}},
		{"page on a long socket", "ui: {listen: 'unix:///" + strings.Repeat("x", 100) + "'}", []string{"ui.listen", "at most 88 bytes"}},
		{"several faults at once", "logLevel: loud\nlogFormat: xml", []string{"logLevel", "logFormat"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := config.Load(write(t, tt.text))
			if err == nil {
				t.Fatal("no error")
			}
			for _, want := range tt.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("message does not name %q:\n%v", want, err)
				}
			}
		})
	}
	if _, err := config.Load(filepath.Join(t.TempDir(), "missing.yaml")); err == nil {
		t.Error("a named file that does not exist is not an error")
	}
}

// TestEveryKeyIsDocumented holds docs/configuration.md and the keys together.
func TestEveryKeyIsDocumented(t *testing.T) {
	doc, err := os.ReadFile("../../docs/configuration.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, k := range config.Keys() {
		if !strings.Contains(string(doc), "`"+k+"`") {
			t.Errorf("docs/configuration.md does not describe %s", k)
		}
	}
}

// TestPage: where the page may be served.
func TestPage(t *testing.T) {
	for _, tt := range []struct{ listen, network, address string }{
		{"127.0.0.1:7749", "tcp", "127.0.0.1:7749"},
		{"127.8.9.1:80", "tcp", "127.8.9.1:80"},
		{"[::1]:7749", "tcp", "[::1]:7749"},
		{"unix:///run/routerd/ui.sock", "unix", "/run/routerd/ui.sock"},
	} {
		c, err := config.Load(write(t, "ui: {listen: '"+tt.listen+"'}"))
		if err != nil {
			t.Errorf("%s: %v", tt.listen, err)
			continue
		}
		if network, address, err := c.UI.Address(); network != tt.network || address != tt.address || err != nil {
			t.Errorf("%s: %s %s, %v", tt.listen, network, address, err)
		}
	}
}
