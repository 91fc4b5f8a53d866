// Package ownership tests who owns which address, over the whole history of a
// cluster whose hosts are killed at random and whose datastore is harmed. It is tried
// on etcd here, and on Kubernetes' API in integration/kube.
package ownership
