package scenarios

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/routerd/routerd/dataplane"
	"github.com/routerd/routerd/integration/lab"
)

// plannedKernel reads what a host's kernel has of routerd's devices, their addresses and entries, and
// routes, as plans show them: by kind and name, what it is.
func plannedKernel(t *testing.T, l *lab.Lab, host string) map[string]string {
	t.Helper()
	out := map[string]string{}
	add := func(o dataplane.Object) { out[o.Key().String()] = o.Key().Kind().String() + " " + o.String() }
	var links []struct {
		Name   string `json:"ifname"`
		MTU    int
		MAC    string `json:"address"`
		Detail struct {
			Kind string `json:"info_kind"`
			Data struct {
				ID     uint32
				Port   uint16
				Local  string
				Local6 string
				Link   string
			} `json:"info_data"`
		} `json:"linkinfo"`
	}
	ipJSON(t, l, host, &links, "-d", "link", "show")
	for _, i := range links {
		if !strings.HasPrefix(i.Name, "vxlan") || !strings.Contains(i.Name, ".calico") {
			continue // the kernel of these hosts has no device for ipip
		}
		d := i.Detail.Data
		add(dataplane.Link{
			Name: i.Name, Type: dataplane.LinkType(i.Detail.Kind), MTU: i.MTU, MAC: macOf(t, i.MAC), Local: netip.MustParseAddr(d.Local + d.Local6), Parent: d.Link, VNI: d.ID, Port: d.Port,
		})
	}
	ours := func(device string) bool { return out[(dataplane.LinkKey{Name: device}).String()] != "" }
	var addrs []struct {
		Name  string `json:"ifname"`
		Infos []struct {
			Local string
			Len   int `json:"prefixlen"`
		} `json:"addr_info"`
	}
	ipJSON(t, l, host, &addrs, "addr", "show")
	for _, a := range addrs {
		for _, one := range a.Infos {
			if addr := netip.MustParseAddr(one.Local); ours(a.Name) && !addr.IsLinkLocalUnicast() {
				add(dataplane.Address{Link: a.Name, Prefix: netip.PrefixFrom(addr, one.Len)})
			}
		}
	}
	var neighbours []struct{ Dst, Dev, LLAddr string }
	ipJSON(t, l, host, &neighbours, "neigh", "show", "nud", "permanent")
	for _, n := range neighbours {
		if ours(n.Dev) {
			add(dataplane.Neighbour{Link: n.Dev, Addr: netip.MustParseAddr(n.Dst), MAC: macOf(t, n.LLAddr)})
		}
	}
	var entries []struct{ MAC, Dst, IfName string }
	readJSON(t, l, host, &entries, "bridge", "-j", "fdb", "show")
	for _, e := range entries {
		if ours(e.IfName) && e.Dst != "" {
			add(dataplane.FDBEntry{Link: e.IfName, MAC: macOf(t, e.MAC), Dst: netip.MustParseAddr(e.Dst)})
		}
	}
	for _, family := range []string{"-4", "-6"} {
		for _, r := range plannedRoutes(t, l, host, family) {
			out["route "+r.dst] = "route " + r.text
		}
	}
	return out
}

// plannedRoute is a route: where to, and as plans show it.
type plannedRoute struct{ dst, text string }

func plannedRoutes(t *testing.T, l *lab.Lab, host, family string) []plannedRoute {
	t.Helper()
	var routes []struct {
		Type, Dst, Gateway, Dev string
		Metrics                 []struct{ MTU int }
	}
	ipJSON(t, l, host, &routes, family, "route", "show", "proto", "77")
	var out []plannedRoute
	for _, r := range routes {
		if addr, err := netip.ParseAddr(r.Dst); err == nil {
			r.Dst = netip.PrefixFrom(addr, addr.BitLen()).String()
		}
		s := r.Dst
		switch {
		case r.Type == "blackhole":
			s = "blackhole " + s
		case r.Gateway != "":
			s += fmt.Sprintf(" via %s dev %s", r.Gateway, r.Dev)
		default:
			s += fmt.Sprintf(" dev %s scope link", r.Dev)
		}
		for _, m := range r.Metrics {
			s += fmt.Sprintf(" mtu %d", m.MTU)
		}
		out = append(out, plannedRoute{r.Dst, s})
	}
	return out
}

func macOf(t *testing.T, s string) dataplane.MAC {
	t.Helper()
	mac, err := dataplane.ParseMAC(s)
	if err != nil {
		t.Fatal(err)
	}
	return mac
}

func ipJSON(t *testing.T, l *lab.Lab, host string, to any, args ...string) {
	t.Helper()
	readJSON(t, l, host, to, append([]string{"ip", "-j"}, args...)...)
}

func readJSON(t *testing.T, l *lab.Lab, host string, to any, command ...string) {
	t.Helper()
	out := strings.TrimSpace(output(t, l, host, command...))
	if out == "" {
		return
	}
	// ip(8) shows an empty object for each device that a filter leaves out.
	out = strings.ReplaceAll(out, "{},", "")
	if err := json.Unmarshal([]byte(out), to); err != nil {
		t.Fatalf("%v on %s: %v in %s", command, host, err, out)
	}
}

// changed says of a host's kernel what a plan would: + what came, - what went, ~ what is another.
func changed(before, after map[string]string) []string {
	var out []string
	for k, was := range before {
		switch will, stays := after[k]; {
		case !stays:
			out = append(out, "- "+was)
		case was != will:
			kind, _, _ := strings.Cut(was, " ")
			out = append(out, "~ "+was+" → "+strings.TrimPrefix(will, kind+" "))
		}
	}
	for k, will := range after {
		if _, had := before[k]; !had {
			out = append(out, "+ "+will)
		}
	}
	return out
}
