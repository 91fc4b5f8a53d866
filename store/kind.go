package store

import (
	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
)

// APIVersion is the apiVersion of every v3 resource.
const APIVersion = "projectcalico.org/v3"

// kindInfo says how a kind is called and made.
type kindInfo struct {
	kind       Kind
	plural     string // in etcd keys and on the command line
	aliases    []string
	namespaced bool
	ipam       bool // a record of IPAM: no manifest form
	new        func() any
}

// kindTable returns what is known of every kind, in the order in which
// manifests of several kinds are best applied.
func kindTable() []kindInfo {
	return []kindInfo{
		{kind: KindClusterInformation, plural: "clusterinformations", aliases: []string{"clusterinformation", "clusterinfo"}, new: func() any { return new(v3.ClusterInformation) }},
		{kind: KindTier, plural: "tiers", aliases: []string{"tier"}, new: func() any { return new(v3.Tier) }},
		{kind: KindFelixConfiguration, plural: "felixconfigurations", aliases: []string{"felixconfiguration", "felixconfig", "felixconfigs"}, new: func() any { return new(v3.FelixConfiguration) }},
		{kind: KindBGPConfiguration, plural: "bgpconfigurations", aliases: []string{"bgpconfiguration", "bgpconfig", "bgpconfigs"}, new: func() any { return new(v3.BGPConfiguration) }},
		{kind: KindBGPFilter, plural: "bgpfilters", aliases: []string{"bgpfilter"}, new: func() any { return new(v3.BGPFilter) }},
		{kind: KindIPPool, plural: "ippools", aliases: []string{"ippool", "ipp", "pool", "pools"}, new: func() any { return new(v3.IPPool) }},
		{kind: KindIPReservation, plural: "ipreservations", aliases: []string{"ipreservation"}, new: func() any { return new(v3.IPReservation) }},
		{kind: KindNode, plural: "nodes", aliases: []string{"node", "no"}, new: func() any { return new(Node) }},
		{kind: KindBGPPeer, plural: "bgppeers", aliases: []string{"bgppeer", "bgpp"}, new: func() any { return new(v3.BGPPeer) }},
		{kind: KindProfile, plural: "profiles", aliases: []string{"profile", "pro", "profs"}, new: func() any { return new(v3.Profile) }},
		{kind: KindWorkloadEndpoint, plural: "workloadendpoints", aliases: []string{"workloadendpoint", "wep", "weps"}, namespaced: true, new: func() any { return new(WorkloadEndpoint) }},

		{kind: KindIPAMBlock, ipam: true, new: func() any { return new(Block) }},
		{kind: KindIPAMAffinity, ipam: true, new: func() any { return new(Affinity) }},
		{kind: KindIPAMHandle, ipam: true, new: func() any { return new(Handle) }},
		{kind: KindIPAMConfig, ipam: true, new: func() any { return new(IPAMConfig) }},
	}
}

func infoOf(kind Kind) (kindInfo, bool) {
	for _, i := range kindTable() {
		if i.kind == kind {
			return i, true
		}
	}
	return kindInfo{}, false
}

func infoOfPlural(plural string) (kindInfo, bool) {
	for _, i := range kindTable() {
		if i.plural == plural && plural != "" {
			return i, true
		}
	}
	return kindInfo{}, false
}
