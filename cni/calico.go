package cni

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/containernetworking/cni/pkg/types"
)

// calicoFields are fields of Calico's network configuration that have no effect
// here, in whatever form they are. The plugin warns of them.
type calicoFields struct {
	DatastoreType      json.RawMessage `json:"datastore_type"`
	EtcdEndpoints      json.RawMessage `json:"etcd_endpoints"`
	EtcdDiscoverySRV   json.RawMessage `json:"etcd_discovery_srv"`
	EtcdKeyFile        json.RawMessage `json:"etcd_key_file"`
	EtcdCertFile       json.RawMessage `json:"etcd_cert_file"`
	EtcdCACertFile     json.RawMessage `json:"etcd_ca_cert_file"`
	EtcdScheme         json.RawMessage `json:"etcd_scheme"`
	EtcdAuthority      json.RawMessage `json:"etcd_authority"`
	Kubernetes         json.RawMessage `json:"kubernetes"`
	Policy             json.RawMessage `json:"policy"`
	Hostname           json.RawMessage `json:"hostname"`
	NodenameFile       json.RawMessage `json:"nodename_file"`
	NodenameOptional   json.RawMessage `json:"nodename_file_optional"`
	RequireMTUFile     json.RawMessage `json:"require_mtu_file"`
	PolicySetupTimeout json.RawMessage `json:"policy_setup_timeout_seconds"`
	EndpointStatusDir  json.RawMessage `json:"endpoint_status_dir"`
	IPAMLockFile       json.RawMessage `json:"ipam_lock_file"`
	LogFileMaxSize     json.RawMessage `json:"log_file_max_size"`
	LogFileMaxAge      json.RawMessage `json:"log_file_max_age"`
	LogFileMaxCount    json.RawMessage `json:"log_file_max_count"`
	NumQueues          json.RawMessage `json:"num_queues"`
	ReadinessGates     json.RawMessage `json:"readiness_gates"`
	DataplaneOptions   json.RawMessage `json:"dataplane_options"`
}

// warnings says of each field that is given without effect why it has none.
func (c *calicoFields) warnings() []string {
	const (
		datastore = "the daemon's own configuration says where the datastore is"
		name      = "the daemon knows its node's name"
		waits     = "ADD waits for routes and rules by itself"
		rotation  = "the file is not rotated; logrotate can"
	)
	var out []string
	for _, f := range []struct {
		name  string
		value json.RawMessage
		why   string
	}{
		{"datastore_type", c.DatastoreType, datastore},
		{"etcd_endpoints", c.EtcdEndpoints, datastore},
		{"etcd_discovery_srv", c.EtcdDiscoverySRV, datastore},
		{"etcd_key_file", c.EtcdKeyFile, datastore},
		{"etcd_cert_file", c.EtcdCertFile, datastore},
		{"etcd_ca_cert_file", c.EtcdCACertFile, datastore},
		{"etcd_scheme", c.EtcdScheme, datastore},
		{"etcd_authority", c.EtcdAuthority, datastore},
		{"kubernetes", c.Kubernetes, "the plugin does not ask Kubernetes"},
		{"policy", c.Policy, "endpoints get the network's profile, whatever the policy type"},
		{"hostname", c.Hostname, name},
		{"nodename_file", c.NodenameFile, name},
		{"nodename_file_optional", c.NodenameOptional, name},
		{"require_mtu_file", c.RequireMTUFile, "the daemon computes the MTU"},
		{"policy_setup_timeout_seconds", c.PolicySetupTimeout, waits},
		{"endpoint_status_dir", c.EndpointStatusDir, waits},
		{"ipam_lock_file", c.IPAMLockFile, "the daemon takes calls in parallel"},
		{"log_file_max_size", c.LogFileMaxSize, rotation},
		{"log_file_max_age", c.LogFileMaxAge, rotation},
		{"log_file_max_count", c.LogFileMaxCount, rotation},
		{"num_queues", c.NumQueues, "devices have one queue"},
		{"readiness_gates", c.ReadinessGates, "the daemon says itself when it is ready"},
		{"dataplane_options", c.DataplaneOptions, "they are another dataplane's"},
	} {
		if len(f.value) > 0 && string(f.value) != "null" && string(f.value) != `""` {
			out = append(out, fmt.Sprintf("field %s has no effect: %s", f.name, f.why))
		}
	}
	return out
}

// annotationPrefix begins Calico's annotations of pods.
const annotationPrefix = "cni.projectcalico.org/"

// Annotations are what Calico's annotations of a pod ask for. Without
// Kubernetes' API they come with the call: in runtimeConfig, where a container
// runtime passes the pod's (io.kubernetes.cri.pod-annotations), in args.cni, or
// as keys of CNI_ARGS, the last being the strongest. All other annotations are
// ignored.
type Annotations struct {
	IPv4Pools, IPv6Pools []string // names or CIDRs
	Families             []string // IPv4, IPv6; empty: as the configuration says
	Addresses            []string // from IPAM, these
	Given                []string // not from IPAM
	MAC                  string
	Floating, Sources    []string // addresses translated to its own; prefixes that it may send from
}

// parseAnnotations reads the annotations of a call.
func parseAnnotations(c *Config, a *Args) (Annotations, error) {
	var out Annotations
	for _, source := range []map[string]string{c.RuntimeConfig.Annotations, c.Args.CNI.Annotations, a.annotations} {
		for key, value := range source {
			name, ok := strings.CutPrefix(key, annotationPrefix)
			if !ok || value == "" {
				continue
			}
			if err := out.set(c, name, value); err != nil {
				return out, types.NewError(types.ErrInvalidNetworkConfig, fmt.Sprintf("annotation %s: %v", key, err), "")
			}
		}
	}
	return out, nil
}

func (a *Annotations) set(c *Config, name, value string) error {
	list := func(to *[]string) error {
		*to = nil
		if err := json.Unmarshal([]byte(value), to); err != nil {
			return fmt.Errorf(`%q: want a JSON list of strings, such as ["192.168.0.5"]`, value)
		}
		return nil
	}
	switch name {
	case "ipv4pools":
		return list(&a.IPv4Pools)
	case "ipv6pools":
		return list(&a.IPv6Pools)
	case "ipFamilies":
		if err := list(&a.Families); err != nil {
			return err
		}
		for _, f := range a.Families {
			if f != "IPv4" && f != "IPv6" {
				return fmt.Errorf("%q is not IPv4 or IPv6", f)
			}
		}
	case "ipAddrs":
		if err := list(&a.Addresses); err != nil {
			return err
		}
		for _, addr := range a.Addresses {
			if _, err := requestedIP(addr); err != nil {
				return err
			}
		}
	case "ipAddrsNoIpam":
		if !c.FeatureControl.IPAddrsNoIPAM {
			return errors.New("the configuration's feature_control.ip_addrs_no_ipam is not true")
		}
		return list(&a.Given)
	case "hwAddr":
		a.MAC = value
	case "floatingIPs":
		return list(&a.Floating)
	case "allowedSourcePrefixes":
		return list(&a.Sources)
	}
	return nil
}

// takeAnnotations takes the annotations out of CNI_ARGS and returns the rest.
func (a *Args) takeAnnotations(s string) (string, error) {
	if !strings.Contains(s, annotationPrefix) {
		return s, nil
	}
	var rest []string
	for pair := range strings.SplitSeq(s, ";") {
		key, value, ok := strings.Cut(pair, "=")
		if !strings.HasPrefix(key, annotationPrefix) {
			rest = append(rest, pair)
			continue
		}
		if !ok {
			return "", fmt.Errorf("%s: no value", key)
		}
		if a.annotations == nil {
			a.annotations = map[string]string{}
		}
		a.annotations[key] = value
	}
	return strings.Join(rest, ";"), nil
}

// requested is what a call asks for, by whichever convention.
type requested struct {
	IPv4, IPv6           bool
	IPv4Pools, IPv6Pools []string
	Addresses            []string
	Given                []string
	MAC                  string
	NamespaceLabels      []string // KEY=VALUE, sorted
	Floating, Sources    []string
}

// requestedOf brings the conventions together.
func requestedOf(c *Config, a *Args) (requested, error) {
	ann, err := parseAnnotations(c, a)
	if err != nil {
		return requested{}, err
	}
	w := requested{
		IPv4: c.IPAM.AssignIPv4.On(true), IPv6: c.IPAM.AssignIPv6.On(false),
		IPv4Pools: c.IPAM.IPv4Pools, IPv6Pools: c.IPAM.IPv6Pools, Given: ann.Given,
	}
	if len(ann.IPv4Pools) > 0 {
		w.IPv4Pools = ann.IPv4Pools
	}
	if len(ann.IPv6Pools) > 0 {
		w.IPv6Pools = ann.IPv6Pools
	}
	if len(ann.Families) > 0 {
		w.IPv4, w.IPv6 = slices.Contains(ann.Families, "IPv4"), slices.Contains(ann.Families, "IPv6")
	}
	if w.Addresses, err = requestedIPs(c, a, ann.Addresses...); err != nil {
		return requested{}, err
	}
	w.Floating = ann.Floating
	for _, f := range w.Floating {
		if _, err := netip.ParseAddr(f); err != nil {
			return requested{}, types.NewError(types.ErrInvalidNetworkConfig, fmt.Sprintf("annotation %sfloatingIPs: %q is not an IP address", annotationPrefix, f), "")
		}
	}
	for _, s := range ann.Sources {
		p, err := netip.ParsePrefix(s)
		if err != nil {
			return requested{}, types.NewError(types.ErrInvalidNetworkConfig, fmt.Sprintf("annotation %sallowedSourcePrefixes: %q is no prefix such as 10.0.0.0/24", annotationPrefix, s), "")
		}
		w.Sources = append(w.Sources, p.Masked().String())
	}
	for _, g := range w.Given {
		if _, err := netip.ParseAddr(g); err != nil {
			return requested{}, types.NewError(types.ErrInvalidNetworkConfig, fmt.Sprintf("annotation %sipAddrsNoIpam: %q is not an IP address", annotationPrefix, g), "")
		}
	}
	for _, m := range []string{ann.MAC, c.RuntimeConfig.MAC, c.Args.CNI.MAC, string(a.MAC)} {
		if m == "" {
			continue
		}
		hw, err := net.ParseMAC(m)
		if err != nil || len(hw) != 6 || hw[0]&1 != 0 {
			return requested{}, types.NewError(types.ErrInvalidNetworkConfig, fmt.Sprintf("requested MAC address %q is not one of a single device, such as 02:00:00:00:00:01", m), "")
		}
		w.MAC = hw.String()
		break
	}
	for k, v := range c.IPAM.NamespaceLabels {
		w.NamespaceLabels = append(w.NamespaceLabels, k+"="+v)
	}
	slices.Sort(w.NamespaceLabels)
	return w, nil
}
