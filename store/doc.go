// Package store is the data model and the door to the datastore.
//
// Resources are Calico's v3 kinds, kept in etcd in Calico's key layout, so
// that Calico's own tools read and write what routerd does. IPAM's blocks,
// affinities and handles lie beside them under their own keys.
//
// A [Store] is deliberately small: read, list, one kind of conditional
// transaction, and one ordered watch. Create, Update, Apply and Delete are
// functions upon it. Backends are in store/etcd (external or embedded server)
// and store/memory (tests); store/storetest holds one conformance suite for
// both.
package store
