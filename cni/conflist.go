package cni

import (
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"

	"github.com/containernetworking/cni/pkg/utils"
)

// ConflistOptions say what a network configuration should hold.
type ConflistOptions struct {
	Name    string // of the network; default k8s-pod-network, as Calico's
	Socket  string // of the daemon; default [DefaultSocket]
	MTU     int    // bytes; 0: the daemon's choice, and left out
	Version string // of the CNI specification; default 1.0.0, which older runtimes read too

	IPv4Pools []string // names or CIDRs; empty: chosen by the pools' selectors
	IPv6Pools []string // likewise
	NoIPv4    bool     // no IPv4 address for containers
	IPv6      bool     // an IPv6 address for containers
	LogLevel  string   // default left out
}

// DefaultNetwork is the name of the network that a configuration without
// options describes.
const DefaultNetwork = "k8s-pod-network"

// Conflist returns a network configuration list for the plugin (CNI
// specification 1.1, section 1), as JSON with a newline at its end. The same
// options give the same bytes.
func Conflist(opts ConflistOptions) ([]byte, error) {
	if opts.Name == "" {
		opts.Name = DefaultNetwork
	}
	if opts.Socket == "" {
		opts.Socket = DefaultSocket
	}
	if opts.Version == "" {
		opts.Version = "1.0.0"
	}
	if err := utils.ValidateNetworkName(opts.Name); err != nil {
		return nil, fmt.Errorf("network name %q: %w", opts.Name, err)
	}
	if !slices.Contains(Versions(), opts.Version) {
		return nil, fmt.Errorf("CNI version %q: want one of %v", opts.Version, Versions())
	}
	if opts.MTU != 0 && (opts.MTU < minMTU || opts.MTU > maxMTU) {
		return nil, fmt.Errorf("mtu %d: want %d to %d, or 0", opts.MTU, minMTU, maxMTU)
	}
	if opts.NoIPv4 && !opts.IPv6 {
		return nil, errors.New("neither IPv4 nor IPv6 addresses for containers: want one of them")
	}
	if !filepath.IsAbs(opts.Socket) {
		return nil, fmt.Errorf("socket %q: want an absolute path", opts.Socket)
	}
	type ipam struct {
		Type       string   `json:"type"`
		AssignIPv4 string   `json:"assign_ipv4"`
		AssignIPv6 string   `json:"assign_ipv6"`
		IPv4Pools  []string `json:"ipv4_pools,omitempty"`
		IPv6Pools  []string `json:"ipv6_pools,omitempty"`
	}
	type plugin struct {
		Type     string `json:"type"`
		Socket   string `json:"socket"`
		MTU      int    `json:"mtu,omitempty"`
		LogLevel string `json:"log_level,omitempty"`
		IPAM     ipam   `json:"ipam"`
		// The runtime passes addresses that it wants.
		Capabilities map[string]bool `json:"capabilities"`
	}
	b, err := json.MarshalIndent(struct {
		Version string   `json:"cniVersion"`
		Name    string   `json:"name"`
		Plugins []plugin `json:"plugins"`
	}{opts.Version, opts.Name, []plugin{{
		Type: PluginType, Socket: opts.Socket, MTU: opts.MTU, LogLevel: opts.LogLevel,
		IPAM:         ipam{PluginType, strconv.FormatBool(!opts.NoIPv4), strconv.FormatBool(opts.IPv6), opts.IPv4Pools, opts.IPv6Pools},
		Capabilities: map[string]bool{"ips": true, "mac": true, "io.kubernetes.cri.pod-annotations": true},
	}}}, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("encode network configuration: %w", err)
	}
	return append(b, '\n'), nil
}
