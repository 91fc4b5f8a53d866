package store

import (
	"regexp"
	"strings"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
)

// MaxStatusPeriod is how seldom a node may be asked to report its status, in seconds.
const MaxStatusPeriod = 86400

func (c *checker) nodeStatus(s *v3.CalicoNodeStatusSpec) {
	if s.Node == "" {
		c.add("spec.node", nil, "required: the node that is to report")
	} else {
		c.reference("spec.node", s.Node)
	}
	if len(s.Classes) == 0 {
		c.add("spec.classes", nil, "required: what is to be reported, of Agent, BGP, Routes")
	}
	seen := map[v3.NodeStatusClassType]bool{}
	for i, class := range s.Classes {
		field := index("spec.classes", i)
		if class == "" {
			c.add(field, nil, "must be one of Agent, BGP, Routes")
		}
		c.oneOf(field, string(class), string(v3.NodeStatusClassTypeAgent), string(v3.NodeStatusClassTypeBGP), string(v3.NodeStatusClassTypeRoutes))
		c.reject(seen[class], field, string(class), "is given twice; keep one")
		seen[class] = true
	}
	if s.UpdatePeriodSeconds == nil {
		c.add("spec.updatePeriodSeconds", nil, "required: every how many seconds to report, up to %d; 0 for never", MaxStatusPeriod)
		return
	}
	c.reject(*s.UpdatePeriodSeconds > MaxStatusPeriod, "spec.updatePeriodSeconds", *s.UpdatePeriodSeconds, "must be a number from 0 to %d", MaxStatusPeriod)
}

func (c *checker) kubeControllers(s *v3.KubeControllersConfigurationSpec) {
	enabled := func(field, value string) { c.oneOf(field, value, v3.Enabled, v3.Disabled) }
	period := func(field string, d *metav1.Duration) {
		if d != nil {
			c.reject(d.Duration < 0, field, d.Duration.String(), "must be 0s or more")
		}
	}
	c.reject(s.LogSeverityScreen != "" && !validSeverity(s.LogSeverityScreen), "spec.logSeverityScreen", s.LogSeverityScreen, "must be one of None, Debug, Info, Warning, Error, Fatal")
	enabled("spec.healthChecks", s.HealthChecks)
	period("spec.etcdV3CompactionPeriod", s.EtcdV3CompactionPeriod)
	if p := s.PrometheusMetricsPort; p != nil {
		c.between("spec.prometheusMetricsPort", *p, 0, 65535)
	}
	if p := s.DebugProfilePort; p != nil {
		c.between("spec.debugProfilePort", int(*p), 0, 65535)
	}
	at := "spec.controllers."
	if n := s.Controllers.Node; n != nil {
		period(at+"node.reconcilerPeriod", n.ReconcilerPeriod)
		period(at+"node.leakGracePeriod", n.LeakGracePeriod)
		enabled(at+"node.syncLabels", n.SyncLabels)
		if h := n.HostEndpoint; h != nil {
			enabled(at+"node.hostEndpoint.autoCreate", h.AutoCreate)
			enabled(at+"node.hostEndpoint.createDefaultHostEndpoint", string(h.CreateDefaultHostEndpoint))
			c.hostEndpointTemplates(at+"node.hostEndpoint.templates", h.Templates)
		}
	}
	if p := s.Controllers.Policy; p != nil {
		period(at+"policy.reconcilerPeriod", p.ReconcilerPeriod)
	}
	if w := s.Controllers.WorkloadEndpoint; w != nil {
		period(at+"workloadEndpoint.reconcilerPeriod", w.ReconcilerPeriod)
	}
	if a := s.Controllers.ServiceAccount; a != nil {
		period(at+"serviceAccount.reconcilerPeriod", a.ReconcilerPeriod)
	}
	if n := s.Controllers.Namespace; n != nil {
		period(at+"namespace.reconcilerPeriod", n.ReconcilerPeriod)
	}
	if l := s.Controllers.LoadBalancer; l != nil {
		c.oneOf(at+"loadBalancer.assignIPs", string(l.AssignIPs), string(v3.AllServices), string(v3.RequestedServicesOnly))
	}
}

// hostEndpointTemplates checks what host endpoints are made by. That one names its interfaces is
// not seen here: a later version of Calico has another field for that.
func (c *checker) hostEndpointTemplates(field string, templates []v3.Template) {
	seen := make(map[string]bool)
	for i, t := range templates {
		f := index(field, i)
		name := t.GenerateName
		switch {
		case name == "":
			c.add(f+".generateName", nil, "required: it goes into the names of the host endpoints that are made")
		case len(validation.IsDNS1123Subdomain(name)) > 0:
			c.add(f+".generateName", name, "must be a part of a name: lower case letters, digits, '-' and '.'")
		}
		c.reject(name != "" && seen[name], f+".generateName", name, "an earlier template has it; give another one")
		seen[name] = true
		c.nets(f+".interfaceCIDRs", t.InterfaceCIDRs)
		if _, err := regexp.Compile(t.InterfaceSelector); err != nil {
			c.add(f+".interfaceSelector", t.InterfaceSelector, "must be a regular expression of interfaces' names such as eth0|eth1: %v", err)
		}
		c.labels(f+".labels", t.Labels)
		c.selector(f+".nodeSelector", t.NodeSelector, noGlobal)
	}
}

func validSeverity(s string) bool {
	switch strings.ToLower(s) {
	case "none", "debug", "info", "warning", "warn", "error", "fatal":
		return true
	}
	return false
}
