// Package convert says what the objects of a Kubernetes API mean in routerd's
// resources, and how resources are written there: in the custom resources that
// Calico keeps in a cluster, and in Nodes, Pods, Namespaces, ServiceAccounts and
// NetworkPolicies, which stand for resources of their own. It does no I/O.
//
// What it reads becomes the JSON that an etcd datastore would hold, so that the
// codec of package store, and what it keeps of members that it does not know, is
// the same for both datastores.
package convert
