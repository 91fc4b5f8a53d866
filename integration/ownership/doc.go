// Package ownership holds a test of who owns which address, over the whole
// history of a cluster whose hosts and etcd members are killed at random.
package ownership
