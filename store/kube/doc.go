// Package kube is the [store.Store] over a Kubernetes API: it holds what Calico
// holds there, in the same objects, so that kubectl and Calico's own programs work
// on it at the same time. What the objects mean is package convert's business.
//
// The API writes one object at a time, so transactions are in parts: see
// [store.Store.Txn]. A watch is many watches of the API's; the order within a kind
// is kept.
package kube
