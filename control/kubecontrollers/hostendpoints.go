// Package kubecontrollers does what a KubeControllersConfiguration asks for and no other part does: it makes
// the host endpoints of Nodes, one for each and more by templates, as the controller of Nodes of Calico's
// kube-controllers does (kube-controllers/pkg/controllers/node/hostendpoints.go), under the same names, so that
// each goes on with what the other made; and it says in the resource what of it is in force.
package kubecontrollers

import (
	"crypto/sha256"
	"encoding/base64"
	"maps"
	"net/netip"
	"slices"
	"strings"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/control/cluster"
	"github.com/routerd/routerd/dataplane/filter"
	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/selector"
)

// Those that were made for a Node have this label, by which users select them too.
const (
	LabelCreatedBy = "projectcalico.org/created-by"
	CreatedBy      = "calico-kube-controllers"
)

const suffix = "-auto-hep"

// Of returns the endpoint of all of a Node's interfaces.
func Of(n *cluster.Node) *v3.HostEndpoint {
	return endpoint(name(n.Name, ""), n, nil, filter.AnyInterface, slices.Concat(n.Hosts, n.Inner))
}

// wanted returns the endpoints that a Node is to have, by name, of which the daemon knows the
// interfaces: their addresses by name.
func wanted(a *cluster.Controllers, n *cluster.Node, interfaces map[string][]netip.Addr) map[string]*v3.HostEndpoint {
	want := make(map[string]*v3.HostEndpoint)
	add := func(h *v3.HostEndpoint) {
		if want[h.Name] == nil {
			want[h.Name] = h
		}
	}
	names := slices.Sorted(maps.Keys(interfaces))
	all := slices.Concat(n.Hosts, n.Inner)
	for _, i := range names {
		all = append(all, interfaces[i]...)
	}
	if a.Default {
		add(endpoint(name(n.Name, ""), n, nil, filter.AnyInterface, all))
	}
	for _, t := range a.Templates {
		if !t.Nodes.Matches(selector.Map(n.Labels)) {
			continue
		}
		var in []netip.Addr
		for _, addr := range all {
			if slices.ContainsFunc(t.Prefixes, func(p netip.Prefix) bool { return p.Contains(addr) }) {
				in = append(in, addr)
			}
		}
		if t.Pattern == nil {
			if len(in) > 0 { // nothing else says of which interfaces it is
				add(endpoint(name(n.Name, "-"+t.GenerateName), n, t.Labels, "", in))
			}
			continue
		}
		for _, i := range names {
			if t.Pattern.MatchString(i) {
				add(endpoint(name(n.Name, "-"+t.GenerateName+"-"+i), n, t.Labels, i, slices.Concat(in, interfaces[i])))
			}
		}
	}
	return want
}

// name returns the name of what is made for a node: that of Calico's controller.
func name(node, of string) string {
	full := node + of + suffix
	if len(full) <= maxName {
		return full
	}
	sum := sha256.Sum256([]byte(full))
	hash := strings.NewReplacer("-", "", "_", "").Replace(base64.RawURLEncoding.EncodeToString(sum[:]))
	return strings.ToLower(hash) + suffix
}

// maxName is how long the name of an object may be (RFC 1123, as Kubernetes has it).
const maxName = 253

func endpoint(name string, n *cluster.Node, labels map[string]string, iface string, addrs []netip.Addr) *v3.HostEndpoint {
	h := store.New(store.KindHostEndpoint).(*v3.HostEndpoint)
	h.Name, h.Labels = name, make(map[string]string, len(n.Labels)+len(labels)+1)
	maps.Copy(h.Labels, n.Labels)
	maps.Copy(h.Labels, labels)
	h.Labels[LabelCreatedBy] = CreatedBy
	h.Spec = v3.HostEndpointSpec{Node: n.Name, InterfaceName: iface, Profiles: []string{store.DefaultAllowProfile}}
	for _, a := range addrs {
		if text := a.String(); !slices.Contains(h.Spec.ExpectedIPs, text) {
			h.Spec.ExpectedIPs = append(h.Spec.ExpectedIPs, text)
		}
	}
	return h
}

// made reports whether a host endpoint is one that was made for a Node, and no user's.
func made(h *v3.HostEndpoint) bool { return h.Labels[LabelCreatedBy] == CreatedBy }
