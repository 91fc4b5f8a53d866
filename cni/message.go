package cni

// The messages of control/api/v1/cni.proto as the plugin needs them, in their
// JSON form. Initialising the generated code takes three times as long as all
// that the plugin does; a test holds these to it, field by field.

type attachment struct {
	Network     string `json:"network"`
	ContainerID string `json:"containerId"`
	Ifname      string `json:"ifname"`
}

type workload struct {
	Orchestrator string `json:"orchestrator"`
	Namespace    string `json:"namespace"`
	Pod          string `json:"pod,omitempty"`
	UID          string `json:"uid,omitempty"`
}

type addRequest struct {
	Attachment        attachment `json:"attachment"`
	Workload          workload   `json:"workload"`
	Netns             string     `json:"netns"`
	MTU               int32      `json:"mtu,omitempty"`
	IPv4Pools         []string   `json:"ipv4Pools,omitempty"`
	IPv6Pools         []string   `json:"ipv6Pools,omitempty"`
	AssignIPv4        bool       `json:"assignIpv4,omitempty"`
	AssignIPv6        bool       `json:"assignIpv6,omitempty"`
	RequestedIPs      []string   `json:"requestedIps,omitempty"`
	AllowIPForwarding bool       `json:"allowIpForwarding,omitempty"`
	Node              string     `json:"node,omitempty"`
	NamespaceLabels   []string   `json:"namespaceLabels,omitempty"`
	MAC               string     `json:"mac,omitempty"`
	Given             []string   `json:"given,omitempty"`
	FloatingIPs       []string   `json:"floatingIps,omitempty"`
	SourcePrefixes    []string   `json:"sourcePrefixes,omitempty"`
	PodCIDR           bool       `json:"podCidr,omitempty"`
}

type addResponse struct {
	HostInterface string    `json:"hostInterface"`
	HostMAC       string    `json:"hostMac"`
	ContainerMAC  string    `json:"containerMac"`
	MTU           int32     `json:"mtu"`
	Addresses     []address `json:"addresses"`
}

type address struct {
	CIDR    string `json:"cidr"`
	Gateway string `json:"gateway"`
	Block   string `json:"block"`
}

type allocateRequest struct {
	Attachment      attachment `json:"attachment"`
	Workload        workload   `json:"workload"`
	Node            string     `json:"node,omitempty"`
	IPv4Pools       []string   `json:"ipv4Pools,omitempty"`
	IPv6Pools       []string   `json:"ipv6Pools,omitempty"`
	AssignIPv4      bool       `json:"assignIpv4,omitempty"`
	AssignIPv6      bool       `json:"assignIpv6,omitempty"`
	RequestedIPs    []string   `json:"requestedIps,omitempty"`
	NamespaceLabels []string   `json:"namespaceLabels,omitempty"`
	Link            string     `json:"link,omitempty"`
	Gateway         bool       `json:"gateway,omitempty"`
}

type allocateResponse struct {
	Addresses []address `json:"addresses"`
}

type delRequest struct {
	Attachment    attachment `json:"attachment"`
	Workload      workload   `json:"workload"`
	Netns         string     `json:"netns,omitempty"`
	AddressesOnly bool       `json:"addressesOnly,omitempty"`
}

type checkRequest struct {
	Attachment    attachment `json:"attachment"`
	Workload      workload   `json:"workload"`
	Netns         string     `json:"netns,omitempty"`
	HostInterface string     `json:"hostInterface,omitempty"`
	ContainerMAC  string     `json:"containerMac,omitempty"`
	Addresses     []string   `json:"addresses,omitempty"`
	AddressesOnly bool       `json:"addressesOnly,omitempty"`
}

type gcRequest struct {
	Network string       `json:"network"`
	Valid   []attachment `json:"valid,omitempty"`
}

type gcResponse struct {
	Removed  []attachment `json:"removed"`
	Left     []attachment `json:"left"`
	Unlisted bool         `json:"unlisted"`
}

// nothing is a message without fields: a StatusRequest, and what DEL, CHECK and
// STATUS answer.
type nothing struct{}
