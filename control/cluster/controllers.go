package cluster

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"slices"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"

	"github.com/routerd/routerd/store/selector"
)

// Controllers is what a KubeControllersConfiguration asks for of the host endpoints of Nodes.
type Controllers struct {
	Create  bool // any at all; what was made goes otherwise
	Default bool // one of all interfaces
	// Elsewhere is set where the controller is switched off, or goes by a variable: what was
	// made is not to be touched here.
	Elsewhere bool
	Templates []HostEndpointTemplate
	Problems  []string // what cannot be carried out, with the field, and is left out
}

// HostEndpointTemplate asks for one host endpoint of a Node, or for one of each of some interfaces. Its
// InterfaceSelector is that by which it goes.
type HostEndpointTemplate struct {
	v3.Template
	Prefixes []netip.Prefix
	Pattern  *regexp.Regexp // of interfaces' names; nil: one endpoint for the addresses in Prefixes
	Nodes    *selector.Selector
}

// variable is what kube-controllers go by in place of the resource, where it is set.
const variable = "AUTO_HOST_ENDPOINTS"

// newControllers reads a resource. raw is how it is stored: a later version of Calico's types has
// interfaceSelector under the name of interfacePattern.
func newControllers(k *v3.KubeControllersConfiguration, raw []byte) *Controllers {
	n := k.Spec.Controllers.Node
	_, byVariable := k.Status.EnvironmentVars[variable]
	a := &Controllers{Elsewhere: n == nil || byVariable}
	if n == nil || n.HostEndpoint == nil || n.HostEndpoint.AutoCreate != v3.Enabled {
		return a
	}
	a.Create, a.Default = true, n.HostEndpoint.CreateDefaultHostEndpoint != v3.DefaultHostEndpointsDisabled
	later := patterns(raw)
	for i, t := range n.HostEndpoint.Templates {
		pattern := t.InterfaceSelector
		if pattern == "" && i < len(later) {
			pattern = later[i]
		}
		made, err := newTemplate(t, pattern)
		if err == nil && slices.ContainsFunc(a.Templates, func(o HostEndpointTemplate) bool { return o.GenerateName == made.GenerateName }) {
			err = fmt.Errorf("generateName %q: an earlier template has it; give another one", made.GenerateName)
		}
		if err != nil {
			a.Problems = append(a.Problems, fmt.Sprintf("spec.controllers.node.hostEndpoint.templates[%d].%v", i, err))
			continue
		}
		a.Templates = append(a.Templates, made)
	}
	return a
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
		return nil // what the types cannot read either is reported where it is decoded
	}
	for _, t := range k.Spec.Controllers.Node.HostEndpoint.Templates {
		list = append(list, t.InterfacePattern)
	}
	return list
}

// newTemplate reads a template. The error begins with the field.
func newTemplate(t v3.Template, pattern string) (out HostEndpointTemplate, err error) {
	out.Template = t
	out.InterfaceSelector = pattern
	if t.GenerateName == "" {
		return out, errors.New("generateName: required: it goes into the names of what is made")
	}
	if len(t.InterfaceCIDRs) == 0 && pattern == "" {
		return out, errors.New("interfaceCIDRs: none is given, and no interfaceSelector: no interface is meant; 0.0.0.0/0 stands for all addresses of IPv4")
	}
	for i, s := range t.InterfaceCIDRs {
		p, err := netip.ParsePrefix(s)
		if err != nil {
			return out, fmt.Errorf("interfaceCIDRs[%d] %q: want a CIDR such as 10.1.0.0/16", i, s)
		}
		out.Prefixes = append(out.Prefixes, p.Masked())
	}
	if pattern != "" {
		if out.Pattern, err = regexp.Compile(pattern); err != nil {
			return out, fmt.Errorf("interfaceSelector %q: %w", pattern, err)
		}
	}
	if out.Nodes, err = selector.Parse(t.NodeSelector); err != nil {
		return out, fmt.Errorf("nodeSelector: %w", err)
	}
	return out, nil
}
