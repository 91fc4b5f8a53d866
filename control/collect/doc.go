// Package collect finds and frees what IPAM's records hold for nobody: leaks.
// It needs no Kubernetes; the daemons do it themselves.
//
// Each host looks after the addresses that are in use on it, by what it knows
// alone: its workloads. One host at a time, elected in etcd, looks after what
// no host would: addresses, blocks, affinities and endpoints of nodes that do
// not exist any more, and handles that hold nothing.
//
// Nothing is freed at first sight. What looks like a leak must do so again
// after a grace period, unchanged; then the endpoints are read once more; and
// what is written is conditional on all that spoke for it, so that neither a
// workload that appears meanwhile nor another collector is harmed. Records are
// read page by page, without a lock and without keeping a revision alive: what
// is held in memory are the suspects, of which there is a limit.
package collect
