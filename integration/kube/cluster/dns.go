package cluster

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"
)

const (
	dnsImage = "localhost/coredns:1"
	// dnsAddress stands for the address of DNS.
	dnsAddress = "DNS-ADDRESS"
)

// dnsKubelet is what a kubelet has to know of the cluster's DNS.
func (c *Cluster) dnsKubelet() string {
	return fmt.Sprintf("clusterDNS: [%q]\nclusterDomain: cluster.local\n", c.families[0].dns)
}

// dnsManifest is CoreDNS as clusters have it, with one pod.
const dnsManifest = `
apiVersion: v1
kind: ServiceAccount
metadata: {name: coredns, namespace: kube-system}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: coredns}
rules:
- {apiGroups: [""], resources: [services, pods, namespaces], verbs: [list, watch]}
- {apiGroups: [discovery.k8s.io], resources: [endpointslices], verbs: [list, watch]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: coredns}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: coredns}
subjects: [{kind: ServiceAccount, name: coredns, namespace: kube-system}]
---
apiVersion: v1
kind: ConfigMap
metadata: {name: coredns, namespace: kube-system}
data:
  Corefile: |
    .:53 {
        errors
        ready
        kubernetes cluster.local
    }
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: coredns, namespace: kube-system}
spec:
  selector: {matchLabels: {k8s-app: kube-dns}}
  template:
    metadata: {labels: {k8s-app: kube-dns}}
    spec:
      serviceAccountName: coredns
      dnsPolicy: Default
      containers:
      - name: coredns
        image: ` + dnsImage + `
        args: [-conf, /etc/coredns/Corefile]
        readinessProbe: {httpGet: {path: /ready, port: 8181}, periodSeconds: 1}
        volumeMounts: [{name: config, mountPath: /etc/coredns}]
      volumes: [{name: config, configMap: {name: coredns}}]
---
apiVersion: v1
kind: Service
metadata: {name: kube-dns, namespace: kube-system}
spec:
  clusterIP: "` + dnsAddress + `"
  selector: {k8s-app: kube-dns}
  ports: [{name: dns, port: 53, protocol: UDP}, {name: dns-tcp, port: 53, protocol: TCP}]
`

// dnsFiles are those of its image.
func (c *Cluster) dnsFiles() []ImageFile {
	return []ImageFile{{Path: "coredns", Source: filepath.Join(c.conf.KubeBin, "coredns")}}
}

// startDNS applies CoreDNS and waits until it answers.
func (c *Cluster) startDNS(ctx context.Context) error {
	if !c.conf.DNS {
		return nil
	}
	if _, err := c.Kubectl(ctx, strings.ReplaceAll(dnsManifest, dnsAddress, c.families[0].dns), "apply", "--server-side", "-f", "-"); err != nil {
		return err
	}
	_, err := c.Kubectl(ctx, "", "-n", "kube-system", "rollout", "status", "deployment/coredns", "--timeout=4m")
	return err
}
