// Package probe measures what tunnels to other hosts deliver, and sets the
// offloads of tunnel devices to the fastest that deliver.
//
// Each host answers probes on its tunnel devices and sends them through the
// device itself, with sockets bound to it: what the routes say does not
// matter, so a tunnel is known to work before any traffic uses it, and the
// packets are the kernel's own, with the checksums and the cutting into
// segments left to the hardware as those of workloads are.
//
// A measurement sends small and full-size UDP packets with DF set, each once
// with a checksum that the kernel computed and once with one that was left to
// the device; then datagrams that go as one packet for the device to cut
// (UDP_SEGMENT); then 256 KiB over TCP. Which of them arrive tells what is at
// fault, without a change to the device: see [Finding]. A fault of the offloads
// is cured on the device and measured again, and the cure is kept only if it
// helps.
//
// Cost: one measurement of a peer is at most 24 small packets, 12 full-size
// ones, two bursts of 40 and a TCP transfer of 256 KiB, about 400 packets in
// all; a peer whose full-size packets are lost costs up to 60 more. A peer is
// measured when it comes up, when the path to it changes, and then about once
// an hour; at most eight peers at once.
package probe
