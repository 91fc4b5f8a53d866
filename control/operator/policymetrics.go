package operator

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/routerd/routerd/dataplane/nft"
)

// policyCollector counts what policy does. What it has labels for is bounded:
// by the actions, not by the policies or the endpoints, whose counters
// routerctl policy show reads.
type policyCollector struct {
	p                                    *PolicyServer
	objects, steps, cut, repairs, took   *prometheus.Desc
	packets, staged, translated, missed  *prometheus.Desc
	unlogged, repair, longest            *prometheus.Desc
	transactions, kernelObjects, problem *prometheus.Desc
}

func newPolicyCollector(p *PolicyServer) *policyCollector {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("routerd_policy_"+name, help, labels, nil)
	}
	return &policyCollector{
		p:             p,
		objects:       desc("objects", "Number of policy objects in force on this host by kind.", "kind"),
		kernelObjects: desc("nftables_objects", "Number of objects in the nftables table by kind.", "kind"),
		steps:         desc("steps_total", "Total number of changes of the rules put into force."),
		transactions:  desc("transactions_total", "Total number of nftables transactions."),
		took:          desc("last_step_seconds", "Time that the last change of the rules took to come into force."),
		cut:           desc("cut_connections_total", "Total number of connections denied by a change of the rules."),
		repairs:       desc("repairs_total", "Total number of repairs of the table after changes by other programs."),
		problem:       desc("unusable_objects", "Number of objects in the datastore that cannot be used."),
		packets:       desc("first_packets", "Number of first packets of connections by action of the rules, since the last change of the rules.", "action"),
		staged:        desc("staged_first_packets", "Number of first packets of connections by action that staged rules would have taken.", "action"),
		translated:    desc("translated_connections", "Number of connections whose source address was translated."),
		missed:        desc("flow_records_missed_total", "Total number of logged packets whose records were lost for lack of space."),
		unlogged:      desc("unlogged_packets", "Number of packets not logged because of policy.logRate, since the last change of the rules."),
		repair:        desc("last_repair_seconds", "Time from the kernel's notice of the last change of the table by another program to its repair."),
		longest:       desc("longest_repair_seconds", "Longest time from the kernel's notice of such a change to its repair, since the daemon started."),
	}
}

// Describe implements [prometheus.Collector].
func (c *policyCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		c.objects, c.kernelObjects, c.steps, c.transactions, c.took, c.cut, c.repairs, c.problem, c.packets, c.staged, c.translated, c.missed,
		c.unlogged, c.repair, c.longest,
	} {
		ch <- d
	}
}

// Collect implements [prometheus.Collector].
func (c *policyCollector) Collect(ch chan<- prometheus.Metric) {
	if c.p.able() != nil {
		return
	}
	send := func(desc *prometheus.Desc, kind prometheus.ValueType, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(desc, kind, v, labels...)
	}
	s, t := c.p.cfg.Enforcer.Status(), c.p.cfg.Table.Status()
	for kind, n := range map[string]int{"endpoint": s.Endpoints, "policy": s.Policies, "set": s.Sets, "member": s.Members} {
		send(c.objects, prometheus.GaugeValue, float64(n), kind)
	}
	for kind, n := range map[string]int{"chain": t.Chains, "rule": t.Rules, "set": t.Sets, "element": t.Elements} {
		send(c.kernelObjects, prometheus.GaugeValue, float64(n), kind)
	}
	send(c.steps, prometheus.CounterValue, float64(s.Steps))
	send(c.transactions, prometheus.CounterValue, float64(t.Transactions))
	send(c.took, prometheus.GaugeValue, s.Took.Seconds())
	send(c.cut, prometheus.CounterValue, float64(s.Cut))
	send(c.repairs, prometheus.CounterValue, float64(t.Repairs))
	send(c.repair, prometheus.GaugeValue, t.LastRepairTook.Seconds())
	send(c.longest, prometheus.GaugeValue, t.LongestRepair.Seconds())
	send(c.problem, prometheus.GaugeValue, float64(len(s.Problems)))
	send(c.missed, prometheus.CounterValue, float64(c.p.cfg.Flows.Missed()))
	list, err := c.p.cfg.Table.Counters()
	if err != nil {
		return
	}
	judged, staged := map[string]uint64{}, map[string]uint64{}
	var translated uint64
	for _, k := range list {
		switch {
		case k.Reason == nft.ByNAT:
			translated += k.Packets
		case k.Staged:
			staged[k.Action.String()] += k.Packets
		default:
			judged[k.Action.String()] += k.Packets
		}
	}
	for action, n := range judged {
		send(c.packets, prometheus.GaugeValue, float64(n), action)
	}
	for action, n := range staged {
		send(c.staged, prometheus.GaugeValue, float64(n), action)
	}
	send(c.translated, prometheus.GaugeValue, float64(translated))
	send(c.unlogged, prometheus.GaugeValue, float64(unlogged(list)))
}
