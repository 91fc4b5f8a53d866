package main

import (
	"strconv"
	"strings"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/store"
)

// policyColumns returns calicoctl's columns of the kinds that say what may
// pass, and false for other kinds.
func policyColumns(kind store.Kind) (columns, bool) {
	name := []string{"NAME"}
	switch kind {
	case store.KindNetworkPolicy, store.KindGlobalNetworkPolicy, store.KindStagedNetworkPolicy, store.KindStagedGlobalNetworkPolicy:
		return columns{[]string{"NAME", "TIER"}, []string{"NAME", "TIER", "ORDER", "SELECTOR"}, policyCells}, true
	case store.KindStagedKubernetesNetworkPolicy:
		return columns{name, []string{"NAME", "PODSELECTOR"}, policyCells}, true
	case store.KindNetworkSet, store.KindGlobalNetworkSet:
		return columns{name, []string{"NAME", "NETS"}, policyCells}, true
	case store.KindHostEndpoint:
		return columns{[]string{"NAME", "NODE"}, []string{"NAME", "NODE", "INTERFACE", "IPS", "PROFILES"}, policyCells}, true
	}
	return columns{}, false
}

func policyCells(v any) map[string]string {
	policy := func(tier string, order *float64, selector string) map[string]string {
		return map[string]string{"TIER": tier, "ORDER": formatOrder(order), "SELECTOR": selector}
	}
	nets := func(list []string) map[string]string {
		return map[string]string{"NETS": truncate(strings.Join(list, ","), 80)}
	}
	switch o := v.(type) {
	case *v3.NetworkPolicy:
		return policy(o.Spec.Tier, o.Spec.Order, o.Spec.Selector)
	case *v3.GlobalNetworkPolicy:
		return policy(o.Spec.Tier, o.Spec.Order, o.Spec.Selector)
	case *v3.StagedNetworkPolicy:
		return policy(o.Spec.Tier, o.Spec.Order, o.Spec.Selector)
	case *v3.StagedGlobalNetworkPolicy:
		return policy(o.Spec.Tier, o.Spec.Order, o.Spec.Selector)
	case *v3.StagedKubernetesNetworkPolicy:
		return map[string]string{"PODSELECTOR": o.Spec.PodSelector.String()}
	case *v3.NetworkSet:
		return nets(o.Spec.Nets)
	case *v3.GlobalNetworkSet:
		return nets(o.Spec.Nets)
	case *v3.HostEndpoint:
		return map[string]string{
			"NODE": o.Spec.Node, "INTERFACE": o.Spec.InterfaceName,
			"IPS": strings.Join(o.Spec.ExpectedIPs, ","), "PROFILES": strings.Join(o.Spec.Profiles, ","),
		}
	}
	return nil
}

// formatOrder prints an order as its user wrote it; "-" is none, which comes
// last.
func formatOrder(order *float64) string {
	if order == nil {
		return "-"
	}
	return strconv.FormatFloat(*order, 'f', -1, 64)
}
