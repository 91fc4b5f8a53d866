package doctor

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	apiv1 "github.com/routerd/routerd/control/api/v1"
)

// Cluster is what the datastore says of all hosts.
type Cluster struct {
	Self    string // whose own doctor is asked besides; empty: nobody's
	Members []Member
	// Present are the hosts whose daemons are there; nil: it is not known.
	Present map[string]bool
	Records []Record
}

// Member is a host as it published itself.
type Member struct {
	Name       string
	Addrs      []netip.Addr // on the underlay
	Tunnels    []netip.Addr
	Conditions []*apiv1.Check // none: it is none of routerd's
}

// Record is something that is wrong with IPAM's records.
type Record struct{ Problem, What, Why, Cure string }

// ExamineCluster returns what the datastore shows to be wrong, the worst first.
func ExamineCluster(c Cluster) []Finding {
	var all []Finding
	for _, look := range []func(Cluster) []Finding{absent, sharedAddresses, published, records} {
		all = append(all, look(c)...)
	}
	Sort(all)
	return all
}

// absent finds hosts whose daemons are not there.
func absent(c Cluster) []Finding {
	var out []Finding
	for _, m := range c.Members {
		if c.Present == nil || c.Present[m.Name] || len(m.Conditions) == 0 {
			continue
		}
		out = append(out, Finding{
			Severity: Critical, Check: "host-absent", Node: m.Name, Object: m.Name,
			What:  fmt.Sprintf("the daemon of %s is absent", m.Name),
			Cause: "it has stopped, the host is down, or it cannot reach the datastore; the kernel keeps its last routes and rules",
			Cure:  fmt.Sprintf("systemctl restart routerd # on %s; if the host is gone for good: routerctl delete node %s", m.Name, m.Name),
		})
	}
	return out
}

// sharedAddresses finds addresses that several nodes have.
func sharedAddresses(c Cluster) []Finding {
	var out []Finding
	for _, kind := range []struct {
		check, what string
		of          func(Member) []netip.Addr
	}{
		{"shared-address", "address", func(m Member) []netip.Addr { return m.Addrs }},
		{"shared-tunnel-address", "tunnel address", func(m Member) []netip.Addr { return m.Tunnels }},
	} {
		who := map[netip.Addr][]string{}
		for _, m := range c.Members {
			for _, a := range kind.of(m) {
				if !slices.Contains(who[a], m.Name) {
					who[a] = append(who[a], m.Name)
				}
			}
		}
		for _, a := range slices.SortedFunc(maps.Keys(who), netip.Addr.Compare) {
			names := who[a]
			if len(names) < 2 {
				continue
			}
			slices.Sort(names)
			out = append(out, Finding{
				Severity: Critical, Check: kind.check, Node: names[0], Object: a.String(),
				What:  fmt.Sprintf("the nodes %s have one %s, %s", strings.Join(names, " and "), kind.what, a),
				Cause: "a host was cloned, or was renamed and its old Node is left",
				Cure:  fmt.Sprintf("routerctl delete node %s # the one that does not exist, of %s", names[len(names)-1], strings.Join(names, ", ")),
			})
		}
	}
	return out
}

// published finds conditions of other hosts that are not met, as they published them.
func published(c Cluster) []Finding {
	var out []Finding
	for _, m := range c.Members {
		if m.Name == c.Self || c.Present != nil && !c.Present[m.Name] {
			continue // its own doctor says more; what one said that is not there is old
		}
		for _, cond := range m.Conditions {
			k, ok := condition(cond.GetName())
			if cond.GetOk() || cond.GetName() == "Ready" || !ok && k.what == "" {
				continue
			}
			d := unmet(cond, k)
			d.Node = m.Name
			d.Cure += " # on " + m.Name
			out = append(out, d)
		}
	}
	return out
}

// records finds what is wrong with IPAM's records, many of a kind as one.
func records(c Cluster) []Finding {
	byProblem := map[string][]Record{}
	for _, r := range c.Records {
		byProblem[r.Problem] = append(byProblem[r.Problem], r)
	}
	var out []Finding
	for _, problem := range slices.Sorted(maps.Keys(byProblem)) {
		list := byProblem[problem]
		first := list[0]
		d := Finding{
			Severity: Warning, Check: "ipam-records", Object: first.What, Field: problem,
			What: fmt.Sprintf("IPAM's records, %s: %s: %s", problem, first.What, first.Why), Cause: first.Cure,
			Cure: "routerctl ipam check --show-problem-ips # then --fix for what no host repairs",
		}
		if len(list) > 1 {
			d.What += fmt.Sprintf(" (and %d more)", len(list)-1)
		}
		if problem == "used twice" {
			d.Severity = Critical
		}
		out = append(out, d)
	}
	return out
}
