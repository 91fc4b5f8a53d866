package cni

import (
	"encoding/json"
	"errors"
	"net/netip"
	"path/filepath"
	"testing"

	"github.com/containernetworking/cni/pkg/types"
)

// FuzzParseConfig: a configuration is refused with an error of CNI, or is one with which
// the plugin can go on; what it asks for is then refused like that, or is as the daemon
// wants it.
func FuzzParseConfig(f *testing.F) {
	f.Add([]byte(`{"name":"net1","type":"routerd-cni","socket":"/s","mtu":1400,"ipam":{"assign_ipv6":true,"ipv4_pools":["p"],"routes":[{"dst":"10.0.0.0/8"}],"prefix_length":24},
		"runtimeConfig":{"ips":["192.168.0.7/24"],"mac":"02:00:00:00:00:01"},"args":{"cni":{"ips":["fd00::7"],"annotations":{"cni.projectcalico.org/ipAddrs":"[\"192.168.0.5\"]"}}}}`), "IgnoreUnknown=1;IP=10.0.0.1,fd00::1;K8S_POD_NAME=p")
	f.Add([]byte(`{"name":"n","log_level":"none","add_timeout_seconds":3,"dataplane_options":null,"policy":{},"feature_control":{"ip_addrs_no_ipam":true}}`), `cni.projectcalico.org/ipAddrsNoIpam=["1.2.3.4"]`)
	f.Add([]byte(`{"name":"n","ipam":{"assign_ipv4":"false","assign_ipv6":"TRUE","routes":[null]}}`), `cni.projectcalico.org/ipFamilies=["IPv4"];cni.projectcalico.org/hwAddr=x`)
	f.Fuzz(func(t *testing.T, raw []byte, args string) {
		refused := func(err error) {
			t.Helper()
			var e *types.Error
			if !errors.As(err, &e) || e.Code == 0 || e.Msg == "" {
				t.Errorf("%v (%T) is no error of CNI", err, err)
			}
		}
		c, err := ParseConfig(raw)
		if err != nil {
			refused(err)
			return
		}
		if c.Name == "" || !filepath.IsAbs(c.Socket) || c.addTimeout() <= 0 || c.delTimeout() <= 0 {
			t.Errorf("%+v is taken", c)
		}
		c.warnings()
		a, err := ParseArgs(args)
		if err != nil {
			refused(err)
			return
		}
		w, err := requestedOf(c, a)
		if err != nil {
			refused(err)
			return
		}
		var v4, v6 int
		for _, s := range w.Addresses {
			addr, err := netip.ParseAddr(s)
			switch {
			case err != nil:
				t.Errorf("address %q is asked for", s)
			case addr.Is4():
				v4++
			default:
				v6++
			}
		}
		if v4 > 1 || v6 > 1 {
			t.Errorf("%q: more than one of a family", w.Addresses)
		}
		for _, s := range w.Sources {
			if p, err := netip.ParsePrefix(s); err != nil || p != p.Masked() {
				t.Errorf("source %q is asked for", s)
			}
		}
	})
}

// FuzzAnnotations: what a pod's owner writes is refused with an error of CNI, or valid.
func FuzzAnnotations(f *testing.F) {
	for _, s := range [][2]string{
		{"ipAddrs", `["192.168.0.5","fd00::1/64"]`},
		{"ipFamilies", `["IPv4","IPv6"]`},
		{"ipv4pools", `["default","10.0.0.0/8"]`},
		{"ipv6pools", `null`},
		{"ipAddrsNoIpam", `["::ffff:10.0.0.1"]`},
		{"hwAddr", "02:00:00:00:00:01"},
		{"floatingIPs", `["10.0.0.9"]`},
		{"allowedSourcePrefixes", `["10.0.0.1/24"]`},
	} {
		f.Add(s[0], s[1], true)
		f.Add(s[0], s[1], false)
	}
	f.Fuzz(func(t *testing.T, name, value string, noIPAM bool) {
		c := &Config{}
		c.FeatureControl.IPAddrsNoIPAM = noIPAM
		c.RuntimeConfig.Annotations = map[string]string{annotationPrefix + name: value}
		got, err := parseAnnotations(c, &Args{})
		var e *types.Error
		if err != nil {
			if !errors.As(err, &e) || e.Code != types.ErrInvalidNetworkConfig {
				t.Errorf("%v is no error of CNI", err)
			}
			return
		}
		if !noIPAM && len(got.Given) > 0 {
			t.Errorf("%v is given, which the configuration does not allow", got.Given)
		}
		for _, s := range got.Addresses {
			if _, err := requestedIP(s); err != nil {
				t.Error(err)
			}
		}
		if _, err := json.Marshal(got); err != nil {
			t.Error(err)
		}
		if w, err := requestedOf(c, &Args{}); err == nil && !w.IPv4 && !w.IPv6 && len(w.Addresses) == 0 && len(w.Given) == 0 {
			t.Errorf("%s: %q asks for no address at all", name, value)
		}
	})
}
