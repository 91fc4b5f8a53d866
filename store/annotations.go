package store

// AnnotationIPv6IPIPTunnelAddr is where a Node resource has the address of its
// IPv6 IPIP tunnel (tunl6.calico). Calico's Node has no field for it.
const AnnotationIPv6IPIPTunnelAddr = "routerd.io/ipv6IPIPTunnelAddr"
