package cni

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/google/go-cmp/cmp"
)

func TestParseConfig(t *testing.T) {
	t.Parallel()
	c, err := ParseConfig([]byte(`{
		"cniVersion": "1.0.0", "name": "net1", "type": "routerd-cni", "somebody": {"else": true},
		"mtu": 1400, "socket": "/tmp/x.sock", "log_level": "Info",
		"ipam": {"type": "calico-ipam", "assign_ipv4": "true", "assign_ipv6": false, "ipv4_pools": ["pool1", "192.168.0.0/16"]},
		"container_settings": {"allow_ip_forwarding": true},
		"add_timeout_seconds": 5,
		"runtimeConfig": {"ips": ["192.168.0.7/24"], "mac": "02:00:00:00:00:01"},
		"args": {"cni": {"ips": ["192.168.0.7"]}},
		"prevResult": {"cniVersion": "1.0.0"}
	}`))
	if err != nil {
		t.Fatal(err)
	}
	want := &Config{
		CNIVersion: "1.0.0", Name: "net1", Type: "routerd-cni", Socket: "/tmp/x.sock", MTU: 1400, LogLevel: "Info",
		IPAM:              IPAMConfig{Type: "calico-ipam", AssignIPv4: "true", AssignIPv6: "false", IPv4Pools: []string{"pool1", "192.168.0.0/16"}},
		AddTimeoutSeconds: 5,
	}
	want.ContainerSettings.AllowIPForwarding = true
	want.RuntimeConfig.IPs = []string{"192.168.0.7/24"}
	want.RuntimeConfig.MAC = "02:00:00:00:00:01"
	want.Args.CNI.IPs = []string{"192.168.0.7"}
	if d := cmp.Diff(want, c, cmp.AllowUnexported(Config{})); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	for args, want := range map[types.UnmarshallableString][]string{
		"192.168.0.7":          {"192.168.0.7"},
		"192.168.0.7,fd00::7":  {"192.168.0.7", "fd00::7"},
		"fd00:0::7/64":         {"192.168.0.7", "fd00::7"},
		"::ffff:192.168.0.7":   {"192.168.0.7"},
		"192.168.0.7, fd00::7": {"192.168.0.7", "fd00::7"},
	} {
		ips, err := requestedIPs(c, &Args{IP: args})
		if err != nil || !slices.Equal(ips, want) {
			t.Errorf("requested addresses with IP=%s: %q, %v; want %q", args, ips, err, want)
		}
	}

	c, err = ParseConfig([]byte(`{"name": "net1"}`))
	if err != nil {
		t.Fatal(err)
	}
	if c.Socket != DefaultSocket || !c.IPAM.AssignIPv4.On(true) || c.IPAM.AssignIPv6.On(false) ||
		c.addTimeout() != DefaultAddTimeout || c.delTimeout() != DefaultDelTimeout || c.statusTimeout() != DefaultStatusTimeout {
		t.Errorf("defaults: %+v", c)
	}
}

func expectError(t *testing.T, err error, code uint, says string) {
	t.Helper()
	var e *types.Error
	if !errors.As(err, &e) || e.Code != code || !strings.Contains(e.Error(), says) {
		t.Errorf("got %v, want a CNI error %d that says %q", err, code, says)
	}
}

func TestParseConfigRefuses(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		json string
		code uint
		says string
	}{
		{`{"name": "net1",`, 6, "unexpected end"},
		{`{"name": "net1", "mtu": "1400"}`, 6, "field mtu: want a whole number, got a JSON string"},
		{`{"name": "net1", "ipam": {"ipv4_pools": "pool1"}}`, 6, "field ipam.ipv4_pools: want a list, got a JSON string"},
		{`{"name": "net1", "ipam": "calico-ipam"}`, 6, "field ipam: want an object"},
		{`{"name": "net1", "ipam": {"assign_ipv4": "yes"}}`, 6, `"yes": want "true" or "false"`},
		{`{"name": "net1", "container_settings": {"allow_ip_forwarding": "true"}}`, 6, "allow_ip_forwarding: want true or false"},
		{`{}`, 7, "field name is missing"},
		{`{"name": "net1", "mtu": 20}`, 7, "field mtu: 20 is not from 68"},
		{`{"name": "net1", "socket": "cni.sock"}`, 7, "field socket: \"cni.sock\" is not an absolute path"},
		{`{"name": "net1", "ipam": {"type": "../host-local"}}`, 7, `field ipam.type: "../host-local" is not the name of a plugin`},
		{`{"name": "net1", "device_type": "netkit"}`, 7, `field device_type: "netkit"`},
		{`{"name": "net1", "log_file_path": "cni.log"}`, 7, "field log_file_path"},
		{`{"name": "net1", "type": "routerd-cni", "ipam": {"routes": [{"dst": "10.0.0.0/8"}]}}`, 7, "field ipam.routes"},
		{`{"name": "net1", "ipam": {"prefix_length": 129}}`, 7, "field ipam.prefix_length"},
		{`{"name": "net1", "ipam": {"assign_ipv4": "false"}}`, 7, "a container needs an address"},
		{`{"name": "net1", "log_level": "loud"}`, 7, `field log_level: "loud"`},
		{`{"name": "net1", "add_timeout_seconds": -1}`, 7, "field add_timeout_seconds"},
		{`{"name": "net1", "del_timeout_seconds": -1}`, 7, "field del_timeout_seconds"},
		{`{"name": "net1", "status_timeout_seconds": -1}`, 7, "field status_timeout_seconds"},
	} {
		_, err := ParseConfig([]byte(tt.json))
		expectError(t, err, tt.code, tt.says)
	}
}

func TestParseArgs(t *testing.T) {
	t.Parallel()
	a, err := ParseArgs("IgnoreUnknown=1;K8S_POD_NAMESPACE=ns1;K8S_POD_NAME=web-0;K8S_POD_INFRA_CONTAINER_ID=abc;IP=192.168.0.7;X=y;")
	if err != nil {
		t.Fatal(err)
	}
	if a.K8S_POD_NAMESPACE != "ns1" || a.K8S_POD_NAME != "web-0" || a.K8S_POD_INFRA_CONTAINER_ID != "abc" || a.IP != "192.168.0.7" {
		t.Errorf("%+v", a)
	}
	for _, tt := range []struct{ args, says string }{
		{"K8S_POD_NAME", "invalid pair"},
		{"K8S_POD_NAMESPACE=ns1", "give both or neither"},
		{"X=y", "unknown args"},
		{"IgnoreUnknown=maybe", "IgnoreUnknown"},
	} {
		_, err := ParseArgs(tt.args)
		expectError(t, err, 4, tt.says)
	}
}

func TestRequestedIPRefuses(t *testing.T) {
	t.Parallel()
	c := new(Config)
	c.RuntimeConfig.IPs = []string{"192.168.0.7", "192.168.0.8"}
	_, err := requestedIPs(c, new(Args))
	expectError(t, err, 7, "a container gets one")
	_, err = requestedIPs(new(Config), &Args{IP: "x"})
	expectError(t, err, 7, `"x" is not an IP address`)
}

// usePodCidr takes host-local's place: routerd knows the pod CIDRs.
func TestUsePodCIDR(t *testing.T) {
	t.Parallel()
	for text, own := range map[string]bool{
		`{"name": "n", "type": "calico", "ipam": {"type": "host-local", "subnet": "usePodCidr"}}`:  true,
		`{"name": "n", "type": "calico", "ipam": {"type": "host-local", "subnet": "10.0.0.0/24"}}`: false,
	} {
		c, err := ParseConfig([]byte(text))
		if err != nil {
			t.Fatal(err)
		}
		if c.IPAM.own() != own || c.IPAM.podCIDR() != own || c.asIPAM("calico") {
			t.Errorf("%s: own %t, pod CIDR %t, IPAM plugin %t", text, c.IPAM.own(), c.IPAM.podCIDR(), c.asIPAM("calico"))
		}
	}
}
