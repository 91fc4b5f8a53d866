package cni

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"
)

// defaultBridge is the device that the plugin bridge makes unless told
// otherwise.
const defaultBridge = "cni0"

// allocate is ADD where another plugin makes the interface and asks this one
// for addresses (CNI specification 1.1, section 4).
func (p *plugin) allocate(c *call) error {
	w, err := requestedOf(c.Config, c.args)
	if err != nil {
		return err
	}
	if len(w.Given) > 0 {
		return types.NewError(types.ErrInvalidNetworkConfig, "annotation "+annotationPrefix+"ipAddrsNoIpam: this is the IPAM plugin", "")
	}
	own := c.IPAM.Gateway == "" || c.IPAM.Gateway == "auto"
	req := allocateRequest{
		Attachment: c.attachment(), Workload: c.workload(), Node: c.Nodename,
		IPv4Pools: w.IPv4Pools, IPv6Pools: w.IPv6Pools, AssignIPv4: w.IPv4, AssignIPv6: w.IPv6,
		RequestedIPs: w.Addresses, NamespaceLabels: w.NamespaceLabels, Gateway: own,
	}
	if c.Type == "bridge" && (c.IsGateway || c.IsDefaultGateway) {
		if req.Link = c.Bridge; req.Link == "" {
			req.Link = defaultBridge
		}
	}
	var resp allocateResponse
	if _, err := c.client.call("Allocate", req, &resp); err != nil {
		return err
	}
	result, err := allocationOf(resp, c.Config)
	if err != nil {
		return err
	}
	return result.PrintTo(p.stdout)
}

// allocationOf puts addresses into the form of an IPAM plugin's result, which
// names no interfaces. As with Calico, addresses have their block's length.
func allocationOf(resp allocateResponse, c *Config) (types.Result, error) {
	r := &current.Result{CNIVersion: current.ImplementedSpecVersion, Routes: c.IPAM.Routes}
	for _, a := range resp.Addresses {
		addr, err := netip.ParsePrefix(a.CIDR)
		if err != nil {
			return nil, fmt.Errorf("routerd's answer: address: %w", err)
		}
		block, err := netip.ParsePrefix(a.Block)
		if err != nil {
			return nil, fmt.Errorf("routerd's answer: block: %w", err)
		}
		bits, length := addr.Addr().BitLen(), block.Bits()
		if c.IPAM.PrefixLength > 0 && c.IPAM.PrefixLength <= bits {
			length = c.IPAM.PrefixLength
		}
		ip := &current.IPConfig{Address: net.IPNet{IP: addr.Addr().AsSlice(), Mask: net.CIDRMask(length, bits)}}
		gw, err := c.gatewayOf(a, netip.PrefixFrom(addr.Addr(), length))
		if err != nil {
			return nil, err
		}
		if gw.IsValid() {
			ip.Gateway = gw.AsSlice()
			// With isDefaultGateway the plugin bridge adds the route itself.
			if len(c.IPAM.Routes) == 0 && !c.IsDefaultGateway {
				r.Routes = append(r.Routes, &types.Route{Dst: net.IPNet{IP: make(net.IP, bits/8), Mask: net.CIDRMask(0, bits)}})
			}
		}
		r.IPs = append(r.IPs, ip)
	}
	return r.GetAsVersion(c.CNIVersion)
}

// gatewayOf returns the gateway of an address: the configured one, or the one
// that the daemon keeps.
func (c *Config) gatewayOf(a address, subnet netip.Prefix) (netip.Addr, error) {
	text := c.IPAM.Gateway
	switch text {
	case "none":
		return netip.Addr{}, nil
	case "", "auto":
		if text = a.Gateway; text == "" {
			return netip.Addr{}, nil
		}
	}
	gw, err := netip.ParseAddr(text)
	switch {
	case err != nil:
		return netip.Addr{}, types.NewError(types.ErrInvalidNetworkConfig, fmt.Sprintf("field ipam.gateway: %q is not auto, none or an address", text), "")
	case gw.Is4() != subnet.Addr().Is4():
		return netip.Addr{}, nil
	case !subnet.Contains(gw):
		return netip.Addr{}, types.NewError(types.ErrInvalidNetworkConfig,
			fmt.Sprintf("field ipam.gateway: %s is not in the subnet %s of the container's address; set ipam.prefix_length", gw, subnet.Masked()), "")
	}
	return gw, nil
}

// checkAllocation is CHECK where another plugin makes the interface.
func (c *call) checkAllocation() error {
	req := checkRequest{Attachment: c.attachment(), Workload: c.workload(), Netns: c.netns(), AddressesOnly: true}
	prev, err := previous(c.in.StdinData)
	if err != nil {
		return err
	}
	for _, ip := range prev.IPs {
		req.Addresses = append(req.Addresses, ip.Address.IP.String())
	}
	if len(req.Addresses) == 0 {
		return invalidPrevious(errors.New("no address"))
	}
	_, err = c.client.call("Check", req, &nothing{})
	return err
}
