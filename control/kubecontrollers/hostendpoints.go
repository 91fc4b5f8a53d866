// Package kubecontrollers does what a KubeControllersConfiguration asks for and no other part does: it makes
// the host endpoints of Nodes, one for each and more by templates, as the controller of Nodes of Calico's
// kube-controllers does (kube-controllers/pkg/controllers/node/hostendpoints.go), under the same names, so that
// each goes on with what the other made; and it says in the resource what of it is in force.
package kubecontrollers

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"regexp"
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

// variable is what kube-controllers go by in place of the resource, where it is set.
const variable = "AUTO_HOST_ENDPOINTS"

const suffix = "-auto-hep"

// Asked is what a KubeControllersConfiguration asks for.
type Asked struct {
	Create  bool // any at all; what was made goes otherwise
	Default bool // one of all interfaces
	// Elsewhere is set where the controller is switched off, or goes by a variable: what was
	// made is not to be touched here.
	Elsewhere bool

	templates []template
}

type template struct {
	name     string
	prefixes []netip.Prefix
	pattern  *regexp.Regexp // of interfaces' names; nil: one endpoint for the addresses in prefixes
	nodes    *selector.Selector
	labels   map[string]string
	asked    v3.Template
}

// Read returns what a KubeControllersConfiguration asks for, and what of it cannot be carried
// out, with the field, which is left out. raw is how it is stored: a later version of Calico's types has
// interfaceSelector under the name of interfacePattern. With nil nothing is asked for.
func Read(k *v3.KubeControllersConfiguration, raw []byte) (a Asked, problems []string) {
	if k == nil {
		return Asked{Elsewhere: true}, nil
	}
	n := k.Spec.Controllers.Node
	_, byVariable := k.Status.EnvironmentVars[variable]
	a.Elsewhere = n == nil || byVariable
	if n == nil || n.HostEndpoint == nil || n.HostEndpoint.AutoCreate != v3.Enabled {
		return a, nil
	}
	a.Create, a.Default = true, n.HostEndpoint.CreateDefaultHostEndpoint != v3.DefaultHostEndpointsDisabled
	later := patterns(raw)
	for i, t := range n.HostEndpoint.Templates {
		pattern := t.InterfaceSelector
		if pattern == "" && i < len(later) {
			pattern = later[i]
		}
		made, err := newTemplate(t, pattern)
		if err == nil && slices.ContainsFunc(a.templates, func(o template) bool { return o.name == made.name }) {
			err = fmt.Errorf("generateName %q: an earlier template has it; give another one", made.name)
		}
		if err != nil {
			problems = append(problems, fmt.Sprintf("spec.controllers.node.hostEndpoint.templates[%d].%v", i, err))
			continue
		}
		a.templates = append(a.templates, made)
	}
	return a, problems
}

// patterns returns interfacePattern of each template, which the types do not know.
func patterns(raw []byte) (list []string) {
	var k struct {
		Spec struct {
			Controllers struct {
				Node struct {
					HostEndpoint struct {
						Templates []struct {
							InterfacePattern string `json:"interfacePattern"`
						} `json:"templates"`
					} `json:"hostEndpoint"`
				} `json:"node"`
			} `json:"controllers"`
		} `json:"spec"`
	}
	if json.Unmarshal(raw, &k) != nil {
		return nil // what the types cannot read either is told where it is decoded
	}
	for _, t := range k.Spec.Controllers.Node.HostEndpoint.Templates {
		list = append(list, t.InterfacePattern)
	}
	return list
}

// newTemplate reads a template. The error begins with the field.
func newTemplate(t v3.Template, pattern string) (out template, err error) {
	out = template{name: t.GenerateName, labels: t.Labels, asked: t}
	out.asked.InterfaceSelector = pattern
	if t.GenerateName == "" {
		return out, fmt.Errorf("generateName: required: it goes into the names of what is made")
	}
	if len(t.InterfaceCIDRs) == 0 && pattern == "" {
		return out, fmt.Errorf("interfaceCIDRs: none is given, and no interfaceSelector: no interface is meant; 0.0.0.0/0 stands for all addresses of IPv4")
	}
	for i, s := range t.InterfaceCIDRs {
		p, err := netip.ParsePrefix(s)
		if err != nil {
			return out, fmt.Errorf("interfaceCIDRs[%d] %q: want a CIDR such as 10.1.0.0/16", i, s)
		}
		out.prefixes = append(out.prefixes, p.Masked())
	}
	if pattern != "" {
		if out.pattern, err = regexp.Compile(pattern); err != nil {
			return out, fmt.Errorf("interfaceSelector %q: %w", pattern, err)
		}
	}
	if out.nodes, err = selector.Parse(t.NodeSelector); err != nil {
		return out, fmt.Errorf("nodeSelector: %w", err)
	}
	return out, nil
}

// Of returns the endpoint of all of a Node's interfaces.
func Of(n *cluster.Node) *v3.HostEndpoint {
	return endpoint(name(n.Name, ""), n, nil, filter.AnyInterface, slices.Concat(n.Hosts, n.Inner))
}

// Wanted returns the endpoints that a Node is to have, by name, of which the daemon knows the
// interfaces: their addresses by name.
func (a Asked) Wanted(n *cluster.Node, interfaces map[string][]netip.Addr) map[string]*v3.HostEndpoint {
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
	for _, t := range a.templates {
		if !t.nodes.Matches(selector.Map(n.Labels)) {
			continue
		}
		var in []netip.Addr
		for _, addr := range all {
			if slices.ContainsFunc(t.prefixes, func(p netip.Prefix) bool { return p.Contains(addr) }) {
				in = append(in, addr)
			}
		}
		if t.pattern == nil {
			if len(in) > 0 { // nothing else says of which interfaces it is
				add(endpoint(name(n.Name, "-"+t.name), n, t.labels, "", in))
			}
			continue
		}
		for _, i := range names {
			if t.pattern.MatchString(i) {
				add(endpoint(name(n.Name, "-"+t.name+"-"+i), n, t.labels, i, slices.Concat(in, interfaces[i])))
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
