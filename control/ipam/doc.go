// Package ipam gives addresses to workloads and tunnels, in Calico's
// structures, so that Calico's own tools and Calico's hosts may use the same
// store at the same time.
//
// A pool is cut into blocks; a node holds some of them and gives addresses
// from these. What is free is written in the block itself. A handle names
// addresses that belong together, such as those of one container, and says in
// which blocks they are; blocks are the truth, handles a hint.
//
// What is to be written is decided by pure functions, on the state that the
// one watch of the datastore delivers, and written by one conditional
// transaction that holds every record that an allocation touches: the block,
// the handle, and the affinity when the block is new. So whatever dies, there
// is never an address without its handle, nor one given twice. Callers that
// ask while a transaction is under way are served together by the next one.
package ipam
