// Package kubesync brings what Kubernetes' API says into an etcd datastore: what Calico's
// kube-controllers do for clusters whose datastore is etcd, in the same objects, and
// Services beside it. All hosts then follow etcd alone, and one of them Kubernetes.
//
// NetworkPolicies and ClusterNetworkPolicies become policies, namespaces and service
// accounts profiles (knp.default.*, kcnp.*, kns.*, ksa.*); endpoints of pods get the labels,
// profiles, ports and limits of their pods, and Nodes the labels of their Nodes. A Node that
// names one of Kubernetes, and is there no more, is deleted. What a policy or a profile of
// these names says is Kubernetes' alone: a change or a deletion in etcd is undone.
package kubesync
