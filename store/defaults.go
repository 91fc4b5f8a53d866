package store

import (
	"net/netip"
	"strings"

	v3 "github.com/projectcalico/api/pkg/apis/projectcalico/v3"
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
	switch o := v.(type) {
	case *v3.IPPool:
		fillType(&o.Kind, &o.APIVersion, KindIPPool)
		defaultIPPool(&o.Spec)
	case *v3.IPReservation:
		fillType(&o.Kind, &o.APIVersion, KindIPReservation)
	case *v3.BGPPeer:
		fillType(&o.Kind, &o.APIVersion, KindBGPPeer)
	case *v3.BGPConfiguration:
		fillType(&o.Kind, &o.APIVersion, KindBGPConfiguration)
		setIfEmpty(&o.Spec.LogSeverityScreen, "Info")
		setIfNil(&o.Spec.ServiceLoadBalancerAggregation, v3.ServiceLoadBalancerAggregationEnabled)
	case *v3.BGPFilter:
		fillType(&o.Kind, &o.APIVersion, KindBGPFilter)
	case *v3.FelixConfiguration:
		fillType(&o.Kind, &o.APIVersion, KindFelixConfiguration)
		setIfNil(&o.Spec.NFTablesMode, v3.NFTablesMode("Auto"))
		setIfNil(&o.Spec.BPFConnectTimeLoadBalancing, v3.BPFConnectTimeLBTCP)
		setIfNil(&o.Spec.BPFHostNetworkedNATWithoutCTLB, v3.BPFHostNetworkedNATEnabled)
		setIfNil(&o.Spec.FloatingIPs, v3.FloatingIPsDisabled)
	case *v3.ClusterInformation:
		fillType(&o.Kind, &o.APIVersion, KindClusterInformation)
	case *v3.Tier:
		fillType(&o.Kind, &o.APIVersion, KindTier)
		t, ok := builtInTier(o.Name)
		if !ok {
			t = fixedTier{order: v3.DefaultTierOrder, action: v3.Deny}
		}
		setIfNil(&o.Spec.Order, t.order)
		setIfNil(&o.Spec.DefaultAction, t.action)
	case *v3.Profile:
		fillType(&o.Kind, &o.APIVersion, KindProfile)
	case *v3.IPAMConfiguration:
		fillType(&o.Kind, &o.APIVersion, KindIPAMConfiguration)
	case *v3.KubeControllersConfiguration:
		fillType(&o.Kind, &o.APIVersion, KindKubeControllersConfiguration)
		setIfEmpty(&o.Spec.HealthChecks, v3.Enabled)
		setIfNil(&o.Spec.PrometheusMetricsPort, defaultKubeMetricsPort)
	case *v3.CalicoNodeStatus:
		fillType(&o.Kind, &o.APIVersion, KindCalicoNodeStatus)
	case *v3.BlockAffinity:
		fillType(&o.Kind, &o.APIVersion, KindBlockAffinity)
	case *Node:
		fillType(&o.Kind, &o.APIVersion, KindNode)
	case *WorkloadEndpoint:
		fillType(&o.Kind, &o.APIVersion, KindWorkloadEndpoint)
		defaultWorkloadEndpoint(o)
	default:
		defaultPolicyKind(v)
	}
}

func fillType(kind, apiVersion *string, k Kind) {
	setIfEmpty(kind, string(k))
	setIfEmpty(apiVersion, APIVersion)
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
	setIfEmpty(&w.Namespace, DefaultName)
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
