// Package presence keeps this host's hold on its node's name: whether it is
// there, by a lease in etcd, and whether it is the same one as before, by its
// incarnation. A host serves, announces and writes only while it holds its
// name, and what was assigned in an earlier epoch it verifies first. That a
// lease has ended frees nothing: the workloads may live on behind a partition.
package presence
