package store

import (
	"net/netip"
	"reflect"
	"strings"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// DefaultName is the name of the object that holds for the whole cluster, for
// kinds that have one; also the namespace of what names none.
const DefaultName = "default"

// Labels that the store keeps on workload endpoints, and those that selectors
// see beside them.
const (
	LabelNamespace      = "projectcalico.org/namespace"
	LabelOrchestrator   = "projectcalico.org/orchestrator"
	LabelServiceAccount = "projectcalico.org/serviceaccount" // of the endpoint's spec; never stored
)

// defaultKubeMetricsPort is where Calico's kube-controllers serve their metrics.
const defaultKubeMetricsPort = 9094

// SetDefaults fills in what Calico's clients fill in when they write v, in
// place: kind and apiVersion, and the defaults of unset fields. A pool's CIDR
// is put into its canonical form. Values that are there, right or wrong, stay
// as they are, except for labels that the store keeps: the two that a workload
// endpoint must carry, and a policy's tier. It does nothing to types that have no manifest form.
func SetDefaults(v any) {
	kind, _ := KindOf(v)
	meta := Meta(v)
	if kind == "" || meta == nil {
		return
	}
	t := reflect.ValueOf(v).Elem().FieldByName("TypeMeta").Addr().Interface().(*metav1.TypeMeta)
	setIfEmpty(&t.Kind, string(kind))
	setIfEmpty(&t.APIVersion, APIVersion)
	if kind.Namespaced() {
		setIfEmpty(&meta.Namespace, DefaultName)
	}
	switch o := v.(type) {
	case *v3.IPPool:
		defaultIPPool(&o.Spec)
	case *v3.BGPConfiguration:
		setIfEmpty(&o.Spec.LogSeverityScreen, "Info")
		setIfNil(&o.Spec.ServiceLoadBalancerAggregation, v3.ServiceLoadBalancerAggregationEnabled)
	case *v3.FelixConfiguration:
		setIfNil(&o.Spec.NFTablesMode, v3.NFTablesMode("Auto"))
		setIfNil(&o.Spec.BPFConnectTimeLoadBalancing, v3.BPFConnectTimeLBTCP)
		setIfNil(&o.Spec.BPFHostNetworkedNATWithoutCTLB, v3.BPFHostNetworkedNATEnabled)
		setIfNil(&o.Spec.FloatingIPs, v3.FloatingIPsDisabled)
	case *v3.Tier:
		t, ok := builtInTier(o.Name)
		if !ok {
			t = fixedTier{order: v3.DefaultTierOrder, action: v3.Deny}
		}
		setIfNil(&o.Spec.Order, t.order)
		setIfNil(&o.Spec.DefaultAction, t.action)
	case *v3.KubeControllersConfiguration:
		setIfEmpty(&o.Spec.HealthChecks, v3.Enabled)
		setIfNil(&o.Spec.PrometheusMetricsPort, defaultKubeMetricsPort)
	case *WorkloadEndpoint:
		defaultWorkloadEndpoint(o)
	case *v3.NetworkPolicy:
		defaultPolicy(meta, &o.Spec.Tier, &o.Spec.Types, o.Spec.Ingress, o.Spec.Egress)
	case *v3.GlobalNetworkPolicy:
		defaultPolicy(meta, &o.Spec.Tier, &o.Spec.Types, o.Spec.Ingress, o.Spec.Egress)
	case *v3.StagedNetworkPolicy:
		setIfEmpty(&o.Spec.StagedAction, v3.StagedActionSet)
		defaultPolicy(meta, &o.Spec.Tier, &o.Spec.Types, o.Spec.Ingress, o.Spec.Egress)
	case *v3.StagedGlobalNetworkPolicy:
		setIfEmpty(&o.Spec.StagedAction, v3.StagedActionSet)
		defaultPolicy(meta, &o.Spec.Tier, &o.Spec.Types, o.Spec.Ingress, o.Spec.Egress)
	case *v3.StagedKubernetesNetworkPolicy:
		setIfEmpty(&o.Spec.StagedAction, v3.StagedActionSet)
	}
}

func setIfEmpty[T ~string](p *T, v T) {
	if *p == "" {
		*p = v
	}
}

func setIfNil[T any](p **T, v T) {
	if *p == nil {
		*p = &v
	}
}

func defaultIPPool(s *v3.IPPoolSpec) {
	setIfEmpty(&s.VXLANMode, v3.VXLANModeNever)
	setIfEmpty(&s.IPIPMode, v3.IPIPModeNever)
	setIfEmpty(&s.NodeSelector, allSelector)
	if len(s.AllowedUses) == 0 {
		s.AllowedUses = []v3.IPPoolAllowedUse{v3.IPPoolAllowedUseWorkload, v3.IPPoolAllowedUseTunnel}
	}
	setIfNil(&s.AssignmentMode, v3.Automatic)
	p, err := netip.ParsePrefix(s.CIDR)
	if err != nil {
		return
	}
	if p == p.Masked() {
		s.CIDR = p.String()
	}
	if s.BlockSize == 0 {
		s.BlockSize = defaultBlockSizeV4
		if !p.Addr().Is4() {
			s.BlockSize = defaultBlockSizeV6
		}
	}
}

func defaultWorkloadEndpoint(w *WorkloadEndpoint) {
	if w.Name == "" {
		// What is missing for a name is reported when the object is validated.
		w.Name, _ = WorkloadEndpointName(&w.Spec)
	}
	if w.Labels == nil {
		w.Labels = map[string]string{}
	}
	w.Labels[LabelNamespace] = w.Namespace
	w.Labels[LabelOrchestrator] = w.Spec.Orchestrator
}

// WorkloadEndpointName returns the one name that an endpoint can have in
// Calico's model: node, orchestrator, what the orchestrator calls the
// workload, and the endpoint, joined by '-', with each '-' inside them
// doubled. The error is a [FieldErrors] that says which of these is missing or
// cannot be part of a name.
func WorkloadEndpointName(s *WorkloadEndpointSpec) (string, error) {
	type segment struct{ field, value string }
	workload := segment{"spec.workload", s.Workload}
	switch s.Orchestrator {
	case "k8s":
		workload = segment{"spec.pod", s.Pod}
	case "cni":
		workload = segment{"spec.containerID", s.ContainerID}
	case "libnetwork":
		workload = segment{"spec.orchestrator", "libnetwork"}
	}
	var errs FieldErrors
	var parts []string
	for _, seg := range []segment{{"spec.node", s.Node}, {"spec.orchestrator", s.Orchestrator}, workload, {"spec.endpoint", s.Endpoint}} {
		switch {
		case seg.value == "":
			errs = append(errs, FieldError{Field: seg.field, Message: "required: it is part of the endpoint's name"})
		case strings.HasPrefix(seg.value, "-") || strings.HasSuffix(seg.value, "-"):
			errs = append(errs, FieldError{Field: seg.field, Value: seg.value, Message: "is part of the endpoint's name, so it must not begin or end with '-'"})
		default:
			parts = append(parts, strings.ReplaceAll(seg.value, "-", "--"))
		}
	}
	if len(errs) > 0 {
		return "", errs
	}
	return strings.Join(parts, "-"), nil
}

// IsEndpointOf reports whether an endpoint is a node's, by its name, in which a '-' that is
// not doubled ends the node's.
func IsEndpointOf(key Key, node string) bool {
	rest, ok := strings.CutPrefix(key.Name, strings.ReplaceAll(node, "-", "--")+"-")
	return ok && key.Kind == KindWorkloadEndpoint && !strings.HasPrefix(rest, "-")
}
