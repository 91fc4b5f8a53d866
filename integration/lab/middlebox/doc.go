// Package middlebox puts on a device what a broken network does to tunnels: it
// drops what a network card with a faulty checksum or segmentation offload
// would spoil, and what is larger than a path takes whose router tells nobody.
//
// The faults are a BPF program (bpf(2)) at the device's clsact hook, see
// tc-bpf(8), so packets stay in the kernel and throughput means something. A
// device of a virtual network never computes the checksums and never cuts the
// segments that a sender left to "the hardware": what reaches the program is
// exactly what a network card would be given. So the program knows a checksum
// that was left to the card by its value, which is still that of the
// pseudo-header alone (RFC 9293, section 3.1), and segments by the kernel's
// note of their size (gso_size).
//
// Only IPv4 in VXLAN or IPIP over IPv4 is touched; everything else passes, as
// a card that fails in tunnels is well in all else.
package middlebox
