package main

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/store"
)

// columns says what `get` prints of a kind: calicoctl's headings, so that
// scripts which cut its tables find theirs.
type columns struct {
	head []string
	wide []string
	// cells returns the cell of every heading.
	cells func(v any) map[string]string
}

// columnsOf returns the columns of a kind. globalAS stands where a node has no
// AS number of its own.
func columnsOf(kind store.Kind, globalAS string) columns {
	name := []string{"NAME"}
	switch kind {
	case store.KindIPPool:
		return columns{
			[]string{"NAME", "CIDR", "SELECTOR"},
			[]string{"NAME", "CIDR", "NAT", "IPIPMODE", "VXLANMODE", "DISABLED", "DISABLEBGPEXPORT", "SELECTOR", "ASSIGNMENTMODE"},
			poolCells,
		}
	case store.KindIPReservation:
		return columns{name, []string{"NAME", "CIDRS"}, func(v any) map[string]string {
			return map[string]string{"CIDRS": truncate(strings.Join(v.(*v3.IPReservation).Spec.ReservedCIDRs, ","), 80)}
		}}
	case store.KindNode:
		return columns{name, []string{"NAME", "ASN", "IPV4", "IPV6"}, func(v any) map[string]string { return nodeCells(v.(*store.Node), globalAS) }}
	case store.KindBGPPeer:
		h := []string{"NAME", "PEERIP", "NODE", "ASN"}
		return columns{h, h, peerCells}
	case store.KindBGPConfiguration:
		h := []string{"NAME", "LOGSEVERITY", "MESHENABLED", "ASNUMBER"}
		return columns{h, h, bgpConfigurationCells}
	case store.KindBGPFilter:
		h := []string{"NAME", "EXPORTV4", "IMPORTV4", "EXPORTV6", "IMPORTV6"}
		return columns{h, h, func(v any) map[string]string {
			s := v.(*v3.BGPFilter).Spec
			return map[string]string{
				"EXPORTV4": strconv.Itoa(len(s.ExportV4)), "IMPORTV4": strconv.Itoa(len(s.ImportV4)),
				"EXPORTV6": strconv.Itoa(len(s.ExportV6)), "IMPORTV6": strconv.Itoa(len(s.ImportV6)),
			}
		}}
	case store.KindClusterInformation:
		h := []string{"NAME", "CLUSTERGUID", "CLUSTERTYPE", "CALICOVERSION", "DATASTOREREADY"}
		return columns{h, h, func(v any) map[string]string {
			s := v.(*v3.ClusterInformation).Spec
			return map[string]string{
				"CLUSTERGUID": s.ClusterGUID, "CLUSTERTYPE": s.ClusterType, "CALICOVERSION": s.CalicoVersion,
				"DATASTOREREADY": orDash(s.DatastoreReady),
			}
		}}
	case store.KindBlockAffinity:
		h := []string{"NAME", "CIDR", "NODE", "STATE"}
		return columns{h, h, func(v any) map[string]string {
			s := v.(*v3.BlockAffinity).Spec
			return map[string]string{"CIDR": s.CIDR, "NODE": s.Node, "STATE": string(s.State)}
		}}
	case store.KindCalicoNodeStatus:
		h := []string{"NAME", "NODE", "CLASSES", "UPDATEINTERVAL", "LASTUPDATED"}
		return columns{h, h, nodeStatusCells}
	case store.KindTier:
		h := []string{"NAME", "ORDER"}
		return columns{h, h, func(v any) map[string]string {
			return map[string]string{"ORDER": formatOrder(v.(*v3.Tier).Spec.Order)}
		}}
	case store.KindProfile:
		return columns{name, []string{"NAME", "LABELS"}, func(v any) map[string]string {
			return map[string]string{"LABELS": joinMap(v.(*v3.Profile).Spec.LabelsToApply)}
		}}
	case store.KindWorkloadEndpoint:
		return columns{
			[]string{"WORKLOAD", "NODE", "NETWORKS", "INTERFACE"},
			[]string{"NAME", "WORKLOAD", "NODE", "NETWORKS", "INTERFACE", "PROFILES", "NATS"},
			endpointCells,
		}
	}
	if c, ok := policyColumns(kind); ok {
		return c
	}
	return columns{name, name, func(any) map[string]string { return nil }}
}

func nodeStatusCells(v any) map[string]string {
	o := v.(*v3.CalicoNodeStatus)
	classes := make([]string, len(o.Spec.Classes))
	for i, c := range o.Spec.Classes {
		classes[i] = string(c)
	}
	updated := "-"
	if t := o.Status.LastUpdated; !t.IsZero() {
		updated = t.UTC().Format(time.RFC3339)
	}
	return map[string]string{
		"NODE": o.Spec.Node, "CLASSES": strings.Join(classes, ","),
		"UPDATEINTERVAL": orDash(o.Spec.UpdatePeriodSeconds), "LASTUPDATED": updated,
	}
}

func poolCells(v any) map[string]string {
	s := v.(*v3.IPPool).Spec
	return map[string]string{
		"CIDR":             s.CIDR,
		"NAT":              strconv.FormatBool(s.NATOutgoing),
		"IPIPMODE":         orNever(string(s.IPIPMode)),
		"VXLANMODE":        orNever(string(s.VXLANMode)),
		"DISABLED":         strconv.FormatBool(s.Disabled),
		"DISABLEBGPEXPORT": strconv.FormatBool(s.DisableBGPExport),
		"SELECTOR":         s.NodeSelector,
		"ASSIGNMENTMODE":   orDash(s.AssignmentMode),
	}
}

func nodeCells(n *store.Node, globalAS string) map[string]string {
	b := n.Spec.BGP
	if b == nil {
		return nil
	}
	as := "(" + globalAS + ")"
	if b.ASNumber != nil {
		as = b.ASNumber.String()
	}
	return map[string]string{"ASN": as, "IPV4": b.IPv4Address, "IPV6": b.IPv6Address}
}

func peerCells(v any) map[string]string {
	s := v.(*v3.BGPPeer).Spec
	node := s.Node
	switch {
	case node != "":
	case s.NodeSelector != "":
		node = s.NodeSelector
	default:
		node = "(global)"
	}
	return map[string]string{"PEERIP": s.PeerIP, "NODE": node, "ASN": s.ASNumber.String()}
}

func bgpConfigurationCells(v any) map[string]string {
	s := v.(*v3.BGPConfiguration).Spec
	return map[string]string{
		"LOGSEVERITY": s.LogSeverityScreen,
		"MESHENABLED": orDash(s.NodeToNodeMeshEnabled),
		"ASNUMBER":    orDash(s.ASNumber),
	}
}

func endpointCells(v any) map[string]string {
	s := v.(*store.WorkloadEndpoint).Spec
	workload := s.Workload
	for _, w := range []string{s.Pod, s.ContainerID} {
		if workload == "" {
			workload = w
		}
	}
	var nats []string
	for _, n := range s.IPNATs {
		nats = append(nats, n.InternalIP+"="+n.ExternalIP)
	}
	return map[string]string{
		"WORKLOAD": workload, "NODE": s.Node, "NETWORKS": strings.Join(s.IPNetworks, ","),
		"INTERFACE": s.InterfaceName, "PROFILES": strings.Join(s.Profiles, ","), "NATS": strings.Join(nats, ","),
	}
}

func orDash[T any](p *T) string {
	if p == nil {
		return "-"
	}
	return fmt.Sprint(*p)
}

func orNever(mode string) string {
	if mode == "" {
		return string(v3.IPIPModeNever)
	}
	return mode
}

func joinMap(m map[string]string) string {
	var parts []string
	for _, k := range slices.Sorted(maps.Keys(m)) {
		parts = append(parts, k+"="+m[k])
	}
	return strings.Join(parts, ",")
}

func truncate(s string, n int) string {
	if len(s) <= n {
		return s
	}
	return s[:n-3] + "..."
}
