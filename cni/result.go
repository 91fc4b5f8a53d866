package cni

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/version"
)

// containerEnd is the index of the container's end in a result's interfaces.
const containerEnd = 1

// resultOf puts the daemon's answer into the form of the configuration's
// version. As with Calico, addresses have no gateway, since none is on their
// subnet. Routes are those made inside the container (CNI specification 1.1,
// section 5): the default route through 169.254.1.1. Calico lists the address
// block there, which is no route of the container.
func resultOf(resp addResponse, in *skel.CmdArgs, confVersion string, dns types.DNS) (types.Result, error) {
	host := &current.Interface{Name: resp.HostInterface, Mac: resp.HostMAC}
	inside := &current.Interface{Name: in.IfName, Mac: resp.ContainerMAC, Sandbox: in.Netns}
	if confVersion == current.ImplementedSpecVersion {
		// The field is younger than 1.0.0, and the library does not take it out.
		host.Mtu, inside.Mtu = int(resp.MTU), int(resp.MTU)
	}
	r := &current.Result{CNIVersion: current.ImplementedSpecVersion, Interfaces: []*current.Interface{host, inside}, DNS: dns}
	for _, a := range resp.Addresses {
		p, err := netip.ParsePrefix(a.CIDR)
		if err != nil {
			return nil, fmt.Errorf("routerd's answer: address: %w", err)
		}
		gw, err := netip.ParseAddr(a.Gateway)
		if err != nil {
			return nil, fmt.Errorf("routerd's answer: gateway: %w", err)
		}
		bits := p.Addr().BitLen()
		r.IPs = append(r.IPs, &current.IPConfig{
			Interface: current.Int(containerEnd),
			Address:   net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), bits)},
		})
		r.Routes = append(r.Routes, &types.Route{
			Dst: net.IPNet{IP: make(net.IP, bits/8), Mask: net.CIDRMask(0, bits)},
			GW:  gw.AsSlice(),
		})
	}
	return r.GetAsVersion(confVersion)
}

// previous reads the result of ADD in a configuration.
func previous(stdin []byte) (*current.Result, error) {
	var conf types.PluginConf
	if err := json.Unmarshal(stdin, &conf); err != nil {
		return nil, types.NewError(types.ErrDecodingFailure, "network configuration: "+err.Error(), "")
	}
	if conf.RawPrevResult == nil {
		return nil, invalidPrevious(errors.New("missing: CHECK compares with the result of ADD"))
	}
	if err := version.ParsePrevResult(&conf); err != nil {
		return nil, invalidPrevious(err)
	}
	prev, err := current.GetResult(conf.PrevResult)
	if err != nil {
		return nil, invalidPrevious(err)
	}
	return prev, nil
}

func invalidPrevious(err error) error {
	return types.NewError(types.ErrInvalidNetworkConfig, "network configuration: field prevResult: "+err.Error(), "")
}

// remember adds what the runtime keeps of ADD's result to a CHECK.
func remember(req *checkRequest, in *skel.CmdArgs) error {
	prev, err := previous(in.StdinData)
	if err != nil {
		return err
	}
	inside := -1
	for i, ifc := range prev.Interfaces {
		switch {
		case ifc.Sandbox == "" && req.HostInterface == "":
			req.HostInterface = ifc.Name
		case ifc.Sandbox != "" && ifc.Name == in.IfName:
			req.ContainerMAC, inside = ifc.Mac, i
		}
	}
	for _, ip := range prev.IPs {
		// A plugin after this one may have added interfaces with addresses.
		if ip.Interface == nil || *ip.Interface == inside {
			req.Addresses = append(req.Addresses, ip.Address.IP.String())
		}
	}
	return nil
}
