package oldapi

import (
	"github.com/projectcalico/api/pkg/lib/numorstring"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// APIVersion is that of Calico's resources before version 3.
const APIVersion = "v1"

type pool struct {
	metav1.TypeMeta `json:",inline"`

	Metadata struct {
		CIDR string `json:"cidr"`
	} `json:"metadata"`
	Spec struct {
		IPIP *struct {
			Enabled bool   `json:"enabled"`
			Mode    string `json:"mode"`
		} `json:"ipip"`
		NATOutgoing bool `json:"nat-outgoing"`
		Disabled    bool `json:"disabled"`
	} `json:"spec"`
}

type bgpPeer struct {
	metav1.TypeMeta `json:",inline"`

	Metadata struct {
		Scope  string `json:"scope"`
		Node   string `json:"node"`
		PeerIP string `json:"peerIP"`
	} `json:"metadata"`
	Spec struct {
		ASNumber numorstring.ASNumber `json:"asNumber"`
	} `json:"spec"`
}

type node struct {
	metav1.TypeMeta `json:",inline"`

	Metadata struct {
		Name string `json:"name"`
	} `json:"metadata"`
	Spec struct {
		OrchRefs []struct {
			NodeName     string `json:"nodeName"`
			Orchestrator string `json:"orchestrator"`
		} `json:"orchRefs"`
		BGP *struct {
			ASNumber           *numorstring.ASNumber `json:"asNumber"`
			IPv4Address        string                `json:"ipv4Address"`
			IPv6Address        string                `json:"ipv6Address"`
			IPv4IPIPTunnelAddr string                `json:"ipv4IPIPTunnelAddr"`
		} `json:"bgp"`
	} `json:"spec"`
}

type policy struct {
	metav1.TypeMeta `json:",inline"`

	Metadata struct {
		Name        string            `json:"name"`
		Annotations map[string]string `json:"annotations"`
	} `json:"metadata"`
	Spec struct {
		Order      *float64 `json:"order"`
		Ingress    []rule   `json:"ingress"`
		Egress     []rule   `json:"egress"`
		Selector   string   `json:"selector"`
		DoNotTrack bool     `json:"doNotTrack"`
		PreDNAT    bool     `json:"preDNAT"`
		Types      []string `json:"types"`
	} `json:"spec"`
}

type profile struct {
	metav1.TypeMeta `json:",inline"`

	Metadata struct {
		Name   string            `json:"name"`
		Tags   []string          `json:"tags"`
		Labels map[string]string `json:"labels"`
	} `json:"metadata"`
	Spec struct {
		Ingress []rule `json:"ingress"`
		Egress  []rule `json:"egress"`
	} `json:"spec"`
}

type hostEndpoint struct {
	metav1.TypeMeta `json:",inline"`

	Metadata struct {
		Name   string            `json:"name"`
		Node   string            `json:"node"`
		Labels map[string]string `json:"labels"`
	} `json:"metadata"`
	Spec struct {
		InterfaceName string   `json:"interfaceName"`
		ExpectedIPs   []string `json:"expectedIPs"`
		Profiles      []string `json:"profiles"`
		Ports         []port   `json:"ports"`
	} `json:"spec"`
}

type workloadEndpoint struct {
	metav1.TypeMeta `json:",inline"`

	Metadata struct {
		Name             string            `json:"name"`
		Workload         string            `json:"workload"`
		Orchestrator     string            `json:"orchestrator"`
		Node             string            `json:"node"`
		ActiveInstanceID string            `json:"activeInstanceID"`
		Labels           map[string]string `json:"labels"`
	} `json:"metadata"`
	Spec struct {
		IPNetworks []string `json:"ipNetworks"`
		IPNATs     []struct {
			InternalIP string `json:"internalIP"`
			ExternalIP string `json:"externalIP"`
		} `json:"ipNATs"`
		IPv4Gateway   string   `json:"ipv4Gateway"`
		IPv6Gateway   string   `json:"ipv6Gateway"`
		Profiles      []string `json:"profiles"`
		InterfaceName string   `json:"interfaceName"`
		MAC           string   `json:"mac"`
		Ports         []port   `json:"ports"`
	} `json:"spec"`
}

type port struct {
	Name     string               `json:"name"`
	Protocol numorstring.Protocol `json:"protocol"`
	Port     uint16               `json:"port"`
}

type rule struct {
	Action      string                `json:"action"`
	IPVersion   *int                  `json:"ipVersion"`
	Protocol    *numorstring.Protocol `json:"protocol"`
	ICMP        *icmp                 `json:"icmp"`
	NotProtocol *numorstring.Protocol `json:"notProtocol"`
	NotICMP     *icmp                 `json:"notICMP"`
	Source      entity                `json:"source"`
	Destination entity                `json:"destination"`
}

type icmp struct {
	Type *int `json:"type"`
	Code *int `json:"code"`
}

type entity struct {
	Tag         string             `json:"tag"`
	Net         string             `json:"net"`
	Nets        []string           `json:"nets"`
	Selector    string             `json:"selector"`
	Ports       []numorstring.Port `json:"ports"`
	NotTag      string             `json:"notTag"`
	NotNet      string             `json:"notNet"`
	NotNets     []string           `json:"notNets"`
	NotSelector string             `json:"notSelector"`
	NotPorts    []numorstring.Port `json:"notPorts"`
}
