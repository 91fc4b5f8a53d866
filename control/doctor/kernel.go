package doctor

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/dataplane/survey"
)

// ip is how ip(8) is called for a family.
func ip(f dataplane.Family) string {
	if f == dataplane.IPv6 {
		return "ip -6"
	}
	return "ip"
}

// uplinks finds devices with this host's addresses that are down.
func uplinks(f Facts) []Finding {
	var out []Finding
	for _, l := range f.Uplinks {
		if !l.Up {
			out = append(out, Finding{
				Severity: Critical, Check: "uplink-down", Device: l.Name,
				What:  fmt.Sprintf("%s, by which this host reaches the others, is down", l.Name),
				Cause: "it was set down, or the cable or the switch port has no link", Cure: fmt.Sprintf("ip link set %s up # and see its link: ethtool %s", l.Name, l.Name),
			})
		}
	}
	return out
}

// missing finds addresses of this host that no device has.
func missing(f Facts) []Finding {
	var out []Finding
	for _, a := range f.Missing {
		device := f.Node.GetUplink()
		if a.Addr().Is6() {
			device = f.Node.GetIpv6Uplink()
		}
		out = append(out, Finding{
			Severity: Critical, Check: "address-missing", Device: device, Object: a.String(),
			What:  fmt.Sprintf("this host is registered with %s, but none of its devices has it", a.Addr()),
			Cause: "it was removed, or its DHCP lease ended", Cure: fmt.Sprintf("ip addr add %s dev %s", a, device),
		})
	}
	return out
}

// calico finds Calico's own programs. That they run is the cause of much else that is found.
func calico(f Facts) []Finding {
	if len(f.Calico) == 0 {
		return nil
	}
	list := strings.Join(f.Calico, ", ")
	return []Finding{{
		Severity: Critical, Check: "calico-runs", Object: list,
		What:  "Calico runs on this host beside routerd: " + list,
		Cause: "both program the same routes, devices, rules and BGP sessions, and write this host's Node",
		Cure:  fmt.Sprintf("systemctl disable --now calico-felix calico-bird calico-confd # in Kubernetes: take %s out of what the DaemonSet calico-node selects", f.Node.GetName()),
	}}
}

// felix finds rules of Calico's agent.
func felix(f Facts) []Finding {
	if len(f.Felix) == 0 {
		return nil
	}
	return []Finding{{
		Severity: Critical, Check: "felix-rules", Object: strings.Join(f.Felix, ", "),
		What:  "rules of Calico's Felix apply to packets beside routerd's: " + strings.Join(f.Felix, ", "),
		Cause: "Felix leaves them when it stops", Cure: "routerd cleanup --calico # if Felix does not run on this host any more",
	}}
}

// foreignRoutes finds routes of other programs that take packets from ours.
func foreignRoutes(f Facts) []Finding {
	var out []Finding
	for _, r := range f.Foreign {
		fam := dataplane.IPv4
		if strings.Contains(r.Theirs, ":") {
			fam = dataplane.IPv6
		}
		out = append(out, Finding{
			Severity: Critical, Check: "foreign-route", Object: r.Theirs,
			What:  fmt.Sprintf("route %s of another program diverts the packets of %s", r.Theirs, r.Ours),
			Cause: "the kernel prefers it, and routerd does not remove routes of other programs", Cure: ip(fam) + " route del " + r.Theirs,
		})
	}
	return out
}

// foreignRules finds policy routing rules of other programs that decide about packets
// of pods.
func foreignRules(f Facts) []Finding {
	var out []Finding
	for _, r := range f.Host.Rules {
		if !slices.ContainsFunc(f.Pools, r.Takes) {
			continue
		}
		severity := Warning // its table may have no route for them
		if slices.ContainsFunc(f.Ways, func(w Way) bool { return dataplane.FamilyOf(w.Packet.To) == r.Family && w.wrong() }) {
			severity = Critical
		}
		out = append(out, Finding{
			Severity: severity, Check: "foreign-rule", Object: r.String(),
			What:  fmt.Sprintf("rule %q of another program applies to packets of pods before routerd's routes", r),
			Cause: "packets that match it are not looked up in the main table, which holds routerd's routes", Cure: ip(r.Family) + " rule del " + r.String(),
		})
	}
	return out
}

// fixedNeighbours finds neighbours that somebody entered by hand for other hosts. The
// kernel sends there without asking, also when the host is long elsewhere.
func fixedNeighbours(f Facts) []Finding {
	var out []Finding
	for _, n := range f.Host.Fixed {
		node := f.Nodes[n.Addr]
		if node == "" || !slices.ContainsFunc(f.Uplinks, func(l dataplane.UnderlayLink) bool { return l.Name == n.Device }) {
			continue
		}
		out = append(out, Finding{
			Severity: Critical, Check: "fixed-neighbour", Device: n.Device, Object: n.Addr.String(),
			What:  fmt.Sprintf("the neighbour entry of %s (%s) on %s is permanent, with %s", node, n.Addr, n.Device, n.MAC),
			Cause: "it was entered by hand, so the kernel does not resolve the address", Cure: fmt.Sprintf("ip neigh del %s dev %s", n.Addr, n.Device),
		})
	}
	return out
}

// chains finds packet filters of others that drop what is forwarded, pods' packets
// among it.
func chains(f Facts) []Finding {
	var out []Finding
	for _, c := range f.Host.Chains {
		if c.Lets {
			continue
		}
		out = append(out, Finding{
			Severity: Critical, Check: "forward-drop", Object: c.String(), Field: "policy",
			What:  fmt.Sprintf("chain %q of another program drops forwarded packets unless one of its rules accepts them, and none names the pods' devices", c),
			Cause: "a firewall, or Docker, which sets the policy of FORWARD to DROP", Cure: fmt.Sprintf("nft insert rule %s iifname \"cali*\" accept; nft insert rule %s oifname \"cali*\" accept", c, c),
		})
	}
	return out
}

// Shares of a table, in percent, from which it counts as nearly full and as full.
const (
	nearlyFull = 90
	full       = 99
)

// fill judges how full a table is. Count is what it holds, for people.
func fill(t survey.Fill, what, key string) []Finding {
	if !t.Of(nearlyFull) {
		return nil
	}
	out := Finding{
		Severity: Warning, Check: "table-full", Object: what, Field: key,
		What:  fmt.Sprintf("the kernel's table of %s is nearly full: %d of %d", what, t.Count, t.Max),
		Cause: "there are more than the host is configured for; the kernel drops packets that need another entry", Cure: fmt.Sprintf("sysctl -w %s=%d", key, 4*t.Max),
	}
	if t.Of(full) {
		out.Severity, out.What = Critical, fmt.Sprintf("the kernel's table of %s is full: %d of %d", what, t.Count, t.Max)
	}
	return []Finding{out}
}

// conntrack finds a table of tracked connections without room.
func conntrack(f Facts) []Finding {
	return fill(f.Host.Conntrack, "tracked connections", "net.netfilter.nf_conntrack_max")
}

// neighbourTables finds tables of neighbours without room: with more hosts on a link
// than the default of 1024 some are not reached.
func neighbourTables(f Facts) []Finding {
	return slices.Concat(
		fill(f.Host.Neighbours[dataplane.IPv4], "IPv4 neighbours", "net.ipv4.neigh.default.gc_thresh3"),
		fill(f.Host.Neighbours[dataplane.IPv6], "IPv6 neighbours", "net.ipv6.neigh.default.gc_thresh3"))
}

// lost finds blocks of other hosts to which no route leads.
func lost(f Facts) []Finding {
	var out []Finding
	for _, l := range f.Lost {
		d := Finding{
			Severity: Critical, Check: "no-route", Object: l.Prefix.String(),
			What: fmt.Sprintf("no route leads to %s of %s: %s", l.Prefix, l.Node, l.Reason), Cause: l.Reason, Cure: "routerctl routes " + l.Prefix.String(),
		}
		switch {
		case l.Gone:
			d.Severity, d.What = Warning, fmt.Sprintf("%s is a block of node %s, which does not exist", l.Prefix, l.Node)
			d.Cause, d.Cure = "the Node was deleted or never existed, and the block was left; hosts delete it after ipam.leakGracePeriod", "routerctl ipam check --fix"
		case len(l.Refused) > 0:
			d.What = fmt.Sprintf("no route leads to %s of %s: %s", l.Prefix, l.Node, strings.Join(l.Refused, "; "))
			d.Cause, d.Cure = "import filters reject what BGP peers announce of it", "routerctl bgp explain "+l.Prefix.String()
			if _, name, ok := strings.Cut(l.Refused[0], "BGPFilter "); ok {
				name, _, _ = strings.Cut(name, ":")
				d.Cure = "routerctl get bgpfilters " + name + " -o yaml # let it accept " + l.Prefix.String()
			}
		}
		out = append(out, d)
	}
	return out
}

// ways finds packets that the kernel does not send where routerd's routes lead.
func ways(f Facts) []Finding {
	var out []Finding
	for _, w := range f.Ways {
		if !w.wrong() {
			continue
		}
		fam := dataplane.FamilyOf(w.Packet.To)
		d := Finding{
			Severity: Critical, Check: "way", Device: w.Packet.In, Object: w.Packet.To.String(),
			What: fmt.Sprintf("packets from %s to %s (%s) are not forwarded", w.Packet.From, w.Packet.To, w.Node),
			Cure: ip(fam) + " route get " + w.Packet.String(),
		}
		want := strings.Join(w.Want, " or ")
		if w.Via.IsValid() {
			want += " via " + w.Via.String()
		}
		switch {
		case w.Err == nil:
			d.What = fmt.Sprintf("packets from %s to %s (%s) leave %s instead of %s", w.Packet.From, w.Packet.To, w.Node, w.Hop, want)
			d.Cause = "a route or rule of another program precedes routerd's"
		case errors.Is(w.Err, survey.ErrSource):
			d.Field, d.Cause = conf(w.Packet.In, "rp_filter"), w.Err.Error()
			d.Cure = "sysctl -w " + d.Field + "=2"
		case errors.Is(w.Err, survey.ErrNotForwarded) && fam == dataplane.IPv4 && w.Packet.In != "":
			d.Field, d.Cause = conf(w.Packet.In, "forwarding"), w.Err.Error()
			d.Cure = "sysctl -w " + d.Field + "=1"
		default:
			d.Cause = w.Err.Error()
		}
		out = append(out, d)
	}
	return out
}

// conf is a device's IPv4 setting as sysctl(8) takes it: a dot in the device's name is a slash there.
func conf(device, name string) string {
	return "net.ipv4.conf." + strings.ReplaceAll(device, ".", "/") + "." + name
}

// barred finds devices that drop what other hosts send here, each once.
func barred(f Facts) []Finding {
	var out []Finding
	of := map[string][]string{} // whose packets, by the device
	for _, b := range f.Barred {
		of[b.Device] = append(of[b.Device], fmt.Sprintf("%s (%s)", b.Node, b.Addr))
	}
	for _, b := range f.Barred {
		who := of[b.Device]
		if who == nil {
			continue // it is said
		}
		delete(of, b.Device)
		field := conf(b.By, "rp_filter")
		out = append(out, Finding{
			Severity: Critical, Check: "rp-filter", Device: b.Device, Object: b.Addr.String(), Field: field,
			What:  fmt.Sprintf("packets of %s come in by %s, which drops them: the way back is %s, and rp_filter of %s is strict", strings.Join(who, ", "), b.Device, b.Back, b.Device),
			Cause: fmt.Sprintf("%s is 1 (RFC 3704), and routers send packets for this host to %s", field, b.Device),
			Cure:  fmt.Sprintf("sysctl -w %s=2 # or have the routers send to %s", conf(b.Device, "rp_filter"), b.Back.Device),
		})
	}
	return out
}

// objects finds what the kernel does not take.
func objects(f Facts) []Finding {
	var out []Finding
	for _, o := range f.Failed {
		out = append(out, Finding{
			Severity: Critical, Check: "kernel-refuses", Object: o.GetObject(),
			What: fmt.Sprintf("the kernel refuses the %s %s", o.GetKind(), o.GetObject()), Cause: o.GetReason(), Cure: "routerctl routes --all",
		})
	}
	return out
}

// claims finds addresses that two machines have.
func claims(f Facts) []Finding {
	var out []Finding
	for _, c := range f.Claims {
		whose := f.Nodes[c.Addr]
		d := Finding{Severity: Critical, Check: "duplicate-address", Device: c.Device, Object: c.Addr.String()}
		var macs []string
		for _, m := range c.MACs {
			macs = append(macs, m.String())
		}
		if whose == "" {
			d.What = fmt.Sprintf("another machine on %s has this host's address %s too: %s", c.Device, c.Addr, strings.Join(macs, ", "))
		} else {
			d.Node = whose
			d.What = fmt.Sprintf("several machines on %s answer for %s, the address of %s: %s", c.Device, c.Addr, whose, strings.Join(macs, ", "))
		}
		d.Cause = "a host was cloned, or configured with an address in use; packets go to the machine that answered last"
		d.Cure = fmt.Sprintf("ip addr del %s dev DEVICE # on the machine of %s", netip.PrefixFrom(c.Addr, c.Addr.BitLen()), macs[len(macs)-1])
		out = append(out, d)
	}
	return out
}

// pods finds workloads that are not as they were attached.
func pods(f Facts) []Finding {
	var out []Finding
	for _, p := range f.Pods {
		out = append(out, Finding{
			Severity: Critical, Check: "workload", Device: p.Device, Object: p.Name,
			What:  fmt.Sprintf("the network of workload %s has changed since it was attached: %s", p.Name, strings.ReplaceAll(p.Err.Error(), "\n", "; ")),
			Cause: "it was changed in its network namespace or on this host", Cure: fmt.Sprintf("kubectl delete pod %s # or have its runtime recreate it", kubectl(p.Name)),
		})
	}
	return out
}

// kubectl is NAMESPACE/POD as kubectl takes it.
func kubectl(name string) string {
	if ns, pod, ok := strings.Cut(name, "/"); ok {
		return "-n " + ns + " " + pod
	}
	return name
}

// Free space below which a disk counts as nearly full, and as full: an embedded
// datastore writes some megabytes between two compactions, journals less.
const (
	littleFree = 64 << 20
	noneFree   = 4 << 20
	fewFiles   = 64
)

// disks finds file systems without room.
func disks(f Facts) []Finding {
	var out []Finding
	for _, d := range f.Disks {
		files := d.Inodes > 0 && d.Files < fewFiles
		if d.Free >= littleFree && !files || d.Size == 0 {
			continue
		}
		fi := Finding{
			Severity: Warning, Check: "disk-full", Object: d.Dir,
			What:  fmt.Sprintf("the file system of %s is nearly full: %d MiB of %d are free", d.Dir, d.Free>>20, d.Size>>20),
			Cause: "attachments are written there first; without space no workload can be attached", Cure: "du -xsh " + d.Dir + "/* | sort -h",
		}
		switch {
		case files:
			fi.Severity, fi.What, fi.Cure = Critical, fmt.Sprintf("the file system of %s has no room for more files", d.Dir), "df -i "+d.Dir
		case d.Free < noneFree:
			fi.Severity, fi.What = Critical, fmt.Sprintf("the file system of %s is full: %d KiB are free", d.Dir, d.Free>>10)
		}
		out = append(out, fi)
	}
	return out
}
