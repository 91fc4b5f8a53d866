package doctor

import (
	"strings"

	apiv1 "github.com/routerd/routerd/control/api/v1"
)

// known says what a condition's name means to an operator.
type known struct {
	severity Severity
	what     string
	cure     string
}

// condition returns what is known of a condition; ok is false for those that other
// checks judge with more to go by.
func condition(name string) (k known, ok bool) {
	switch name {
	case "Registered":
		return known{Critical, "this host is not registered", "routerctl get nodes -o wide"}, true
	case "Address":
		return known{Critical, "this host's address is wrong", "ip -br addr"}, true
	case "DataplaneProgrammed":
		return known{Critical, "this host's dataplane is not programmed", "routerctl routes --all"}, true
	case "Datastore":
		return known{Critical, "the datastore cannot be reached", "routerctl cluster status"}, true
	case "Certificates":
		return known{Warning, "a certificate ends soon, or cannot be read or renewed", "openssl x509 -enddate -noout -in FILE # the condition names FILE and the cure"}, true
	case "BGP":
		return known{Critical, "BGP does not run as it should", "ss -ltnp sport = :179"}, true
	case "WorkloadMTU":
		return known{Warning, "the MTU of workloads is wrong", "routerctl node paths"}, true
	case "Policy":
		return known{Critical, "the policy in the datastore is not enforced", "routerctl policy show"}, true
	case "Journal":
		return known{Critical, "the journal of attachments cannot be written", "df -h /var/lib/routerd"}, true
	case "Files":
		return known{Warning, "the daemon cannot write its files", "df -h /var/lib/routerd /run/routerd"}, true
	case "FelixRules":
		return known{Critical, "rules of Calico's Felix are left", "routerd cleanup --calico"}, false
	case "WorkloadAddresses":
		return known{Critical, "workloads have addresses of others", "routerctl node status"}, true
	case "TunnelAddresses":
		return known{Critical, "two nodes have one tunnel address", "routerctl get nodes -o yaml"}, true
	case "PodCIDRs":
		return known{Critical, "pod CIDRs of Nodes and pools do not agree", "kubectl get nodes -o custom-columns=NAME:.metadata.name,CIDRS:.spec.podCIDRs"}, true
	case "ForeignRoutes":
		return known{Critical, "routes of other programs divert packets", "routerctl routes"}, false
	}
	if strings.HasPrefix(name, "Pool/") || strings.HasPrefix(name, "Pool-") {
		return known{Critical, "a pool cannot be served", "routerctl get ippools " + name[len("Pool/"):] + " -o yaml"}, false
	}
	return known{Warning, "condition " + name + " is not met", "routerctl node status"}, true
}

// conditions finds conditions of this host that are not met.
func conditions(f Facts) []Finding {
	var out []Finding
	if l := f.Node.GetHealth().GetLive(); l != nil && !l.GetOk() {
		out = append(out, Finding{
			Severity: Critical, Check: "live", What: "the daemon hangs: " + l.GetReason(), Cause: l.GetReason(), Cure: "systemctl restart routerd",
		})
	}
	for _, c := range f.Node.GetHealth().GetConditions() {
		if k, ok := condition(c.GetName()); ok && !c.GetOk() {
			out = append(out, unmet(c, k))
		}
	}
	return out
}

func unmet(c *apiv1.Check, k known) Finding {
	d := Finding{
		Severity: k.severity, Check: "condition-" + strings.ToLower(strings.ReplaceAll(c.GetName(), "/", "-")), Object: c.GetName(),
		What: k.what + ": " + c.GetReason(), Cause: c.GetReason(), Cure: k.cure,
	}
	for _, s := range specific() {
		if strings.Contains(c.GetReason(), s.text) {
			d.Cure = s.cure
			if s.severity != "" {
				d.Severity = s.severity
			}
			break
		}
	}
	return d
}

// specific are cures of reasons that are told apart by their text.
func specific() []remedy {
	return []remedy{
		{"is registered with it", "routerctl get nodes -o wide # set address.ipv4 on the host that is wrong; if the other is gone: routerctl delete node NAME", ""},
		{"the datastore is locked", "routerctl datastore unlock", ""},
		{"database is full", "etcdctl compact $(etcdctl endpoint status -w json | grep -o '\"revision\":[0-9]*' | cut -d: -f2); etcdctl defrag; etcdctl alarm disarm", ""},
		{"no leader", "etcdctl endpoint health --cluster", ""},
		{"connection refused", "systemctl status etcd # or routerd on the host that embeds the datastore", ""},
		{"read-only file system", "mount -o remount,rw /proc/sys", ""},
		{"cannot enforce network policy", "modprobe -a nf_tables nf_conntrack", ""},
		{"of FelixConfiguration is", "routerctl get felixconfigurations default -o yaml # lower the MTU that is named, or take it out", Critical}, // the kernel refuses the device
		{"cni.mtu is", "routerctl node paths # then lower cni.mtu in /etc/routerd/routerd.yaml, or set it to 0, and restart routerd", ""},
		{"is taken by", "ss -ltnp sport = :179", ""},
	}
}
