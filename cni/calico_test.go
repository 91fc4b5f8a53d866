package cni

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func config(t *testing.T, s string) *Config {
	t.Helper()
	c, err := ParseConfig([]byte(s))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// What a call asks for comes by many conventions, of which the pod's own
// annotations are the strongest.
func TestWishes(t *testing.T) {
	t.Parallel()
	const base = `"name": "net1", "type": "routerd-cni"`
	for name, tt := range map[string]struct {
		config, args string
		want         requested
	}{
		"nothing": {want: requested{IPv4: true}},
		"configuration": {
			config: `, "ipam": {"assign_ipv6": "true", "ipv4_pools": ["a"], "ipv6_pools": ["b"], "namespace_labels": {"team": "x", "env": "p"}}`,
			want:   requested{IPv4: true, IPv6: true, IPv4Pools: []string{"a"}, IPv6Pools: []string{"b"}, NamespaceLabels: []string{"env=p", "team=x"}},
		},
		"annotations of containerd": {
			config: `, "ipam": {"ipv4_pools": ["a"]}, "runtimeConfig": {"io.kubernetes.cri.pod-annotations": {
				"cni.projectcalico.org/ipv4pools": "[\"c\"]", "cni.projectcalico.org/ipv6pools": "[\"d\"]",
				"cni.projectcalico.org/ipFamilies": "[\"IPv6\"]", "cni.projectcalico.org/hwAddr": "02:00:00:00:00:05", "app": "web"}}`,
			want: requested{IPv6: true, IPv4Pools: []string{"c"}, IPv6Pools: []string{"d"}, MAC: "02:00:00:00:00:05"},
		},
		"annotations in args": {
			config: `, "args": {"cni": {"annotations": {"cni.projectcalico.org/ipAddrs": "[\"192.168.0.9\"]"}}}`,
			want:   requested{IPv4: true, Addresses: []string{"192.168.0.9"}},
		},
		"annotations in CNI_ARGS are the strongest": {
			config: `, "args": {"cni": {"annotations": {"cni.projectcalico.org/ipAddrs": "[\"192.168.0.9\"]"}}}`,
			args:   `IgnoreUnknown=1;cni.projectcalico.org/ipAddrs=["192.168.0.10"];X=1`,
			want:   requested{IPv4: true, Addresses: []string{"192.168.0.10"}},
		},
		"an address without IPAM": {
			config: `, "feature_control": {"ip_addrs_no_ipam": true}`,
			args:   `cni.projectcalico.org/ipAddrsNoIpam=["10.0.0.9"]`,
			want:   requested{IPv4: true, Given: []string{"10.0.0.9"}},
		},
		"MAC by the capability": {config: `, "runtimeConfig": {"mac": "02:00:00:00:00:06"}`, args: "MAC=02:00:00:00:00:07", want: requested{IPv4: true, MAC: "02:00:00:00:00:06"}},
		"MAC by CNI_ARGS":       {args: "MAC=02:00:00:00:00:07", want: requested{IPv4: true, MAC: "02:00:00:00:00:07"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			args, err := ParseArgs(tt.args)
			if err != nil {
				t.Fatal(err)
			}
			got, err := requestedOf(config(t, "{"+base+tt.config+"}"), args)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestWishesRefused(t *testing.T) {
	t.Parallel()
	for args, says := range map[string]string{
		`cni.projectcalico.org/ipv4pools=pool1`:                       "annotation cni.projectcalico.org/ipv4pools: \"pool1\": want a JSON list",
		`cni.projectcalico.org/ipFamilies=["IPv5"]`:                   `"IPv5" is not IPv4 or IPv6`,
		`cni.projectcalico.org/ipAddrsNoIpam=["10.0.0.9"]`:            "feature_control.ip_addrs_no_ipam is not true",
		`cni.projectcalico.org/ipAddrs=["10.0.0.300"]`:                `annotation cni.projectcalico.org/ipAddrs: "10.0.0.300" is not an IP address`,
		`cni.projectcalico.org/floatingIPs=["ten"]`:                   `annotation cni.projectcalico.org/floatingIPs: "ten" is not an IP address`,
		`cni.projectcalico.org/allowedSourcePrefixes=["10.0.0.0"]`:    "is no prefix such as",
		`cni.projectcalico.org/ipAddrs=["192.168.0.1","192.168.0.2"]`: "a container gets one of a family",
		`MAC=01:00:5e:00:00:01`:                                       "is not one of a single device",
		`cni.projectcalico.org/hwAddr=x`:                              `"x" is not one of a single device`,
	} {
		a, err := ParseArgs(args)
		if err != nil {
			t.Fatal(err)
		}
		_, err = requestedOf(config(t, `{"name": "net1"}`), a)
		expectError(t, err, 7, says)
	}
}

// A configuration as Calico's manifest has it is accepted; what has no effect
// is said, field by field.
func TestCalicosConfiguration(t *testing.T) {
	t.Parallel()
	c := config(t, `{
		"cniVersion": "0.3.1", "name": "k8s-pod-network", "type": "calico", "log_level": "info",
		"log_file_path": "/var/log/calico/cni/cni.log", "log_file_max_size": 100,
		"datastore_type": "etcdv3", "etcd_endpoints": "https://10.0.0.1:2379", "etcd_key_file": "",
		"nodename": "node-a", "nodename_file_optional": false, "mtu": 0,
		"ipam": {"type": "calico-ipam", "assign_ipv4": "true", "assign_ipv6": "false"},
		"policy": {"type": "k8s"}, "kubernetes": {"kubeconfig": "/etc/cni/net.d/calico-kubeconfig"},
		"container_settings": {"allow_ip_forwarding": false}, "include_default_routes": true, "num_queues": 1,
		"policy_setup_timeout_seconds": 0, "capabilities": {"portMappings": true}
	}`)
	if c.Nodename != "node-a" || c.LogFilePath == "" || c.asIPAM("calico") || c.asIPAM("routerd-cni") {
		t.Errorf("%+v", c)
	}
	var fields []string
	for _, w := range c.warnings() {
		fields = append(fields, strings.Fields(w)[1])
	}
	want := []string{"datastore_type", "etcd_endpoints", "kubernetes", "policy", "nodename_file_optional", "policy_setup_timeout_seconds", "log_file_max_size", "num_queues"}
	if diff := cmp.Diff(want, fields); diff != "" {
		t.Errorf("warned of (-want +got):\n%s", diff)
	}
}

// The same configuration goes to the network plugin and to its IPAM plugin;
// which of them is meant follows from the names.
func TestRole(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		plugin, ipam, program string
		asIPAM                bool
	}{
		{"routerd-cni", "routerd-cni", "routerd-cni", false},
		{"routerd-cni", "host-local", "routerd-cni", false},
		{"calico", "calico-ipam", "calico", false},
		{"calico", "calico-ipam", "calico-ipam", true},
		{"calico", "calico-ipam", "routerd-cni", false},
		{"bridge", "routerd-cni", "routerd-cni", true},
		{"ptp", "calico-ipam", "calico-ipam", true},
		{"routerd-cni", "", "routerd-cni", false},
	} {
		c := &Config{Type: tt.plugin, IPAM: IPAMConfig{Type: tt.ipam}}
		if got := c.asIPAM(tt.program); got != tt.asIPAM {
			t.Errorf("type %s, ipam.type %s, executed as %s: IPAM plugin %t, want %t", tt.plugin, tt.ipam, tt.program, got, tt.asIPAM)
		}
	}
}

func TestAllocationResult(t *testing.T) {
	t.Parallel()
	resp := allocateResponse{Addresses: []address{{CIDR: "192.168.0.7/32", Block: "192.168.0.0/26", Gateway: "192.168.0.1"}}}
	for ipam, want := range map[string]string{
		`{"type": "routerd-cni"}`:                    `{"cniVersion":"1.0.0","ips":[{"address":"192.168.0.7/26","gateway":"192.168.0.1"}],"routes":[{"dst":"0.0.0.0/0"}]}`,
		`{"type": "routerd-cni", "gateway": "none"}`: `{"cniVersion":"1.0.0","ips":[{"address":"192.168.0.7/26"}]}`,
		`{"type": "routerd-cni", "gateway": "192.168.0.254", "prefix_length": 24, "routes": [{"dst": "10.0.0.0/8"}]}`: `{"cniVersion":"1.0.0","ips":[{"address":"192.168.0.7/24","gateway":"192.168.0.254"}],"routes":[{"dst":"10.0.0.0/8"}]}`,
	} {
		c := config(t, `{"cniVersion": "1.0.0", "name": "net1", "type": "bridge", "ipam": `+ipam+`}`)
		got, err := allocationOf(resp, c)
		if err != nil {
			t.Errorf("%s: %v", ipam, err)
			continue
		}
		b, err := json.Marshal(got)
		if err != nil {
			t.Fatal(err)
		}
		var have, wanted any
		if json.Unmarshal(b, &have) != nil || json.Unmarshal([]byte(want), &wanted) != nil {
			t.Fatalf("%s, %s", b, want)
		}
		delete(have.(map[string]any), "dns")
		if diff := cmp.Diff(wanted, have); diff != "" {
			t.Errorf("%s (-want +got):\n%s", ipam, diff)
		}
	}
	c := config(t, `{"cniVersion": "1.0.0", "name": "net1", "type": "bridge", "ipam": {"type": "routerd-cni", "gateway": "192.168.0.254"}}`)
	_, err := allocationOf(resp, c)
	expectError(t, err, 7, "set ipam.prefix_length")
}
