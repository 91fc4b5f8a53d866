// Package probe measures the paths between this host and each other host of the
// cluster, with two kinds of probe.
//
// Probes of the underlay find out which of a peer's addresses answers (its own,
// or a public one that a NAT translates), whether data may come from any source
// port, how large a packet gets there, and whether a peer of the same subnet
// answers as a neighbour. Nothing is guessed from addresses: they travel in the
// tunnel's own encapsulation, so an answer says that it gets through, past the
// same firewalls and translators, and no port is opened beside the tunnel's. The
// decisions are in an engine that knows neither sockets nor a clock.
//
// Probes of tunnels go through the tunnel's device, with sockets bound to it: what
// the routes say does not matter, so a tunnel is known to work before any traffic
// uses it, and the packets are the kernel's own, with the checksums and the
// segmentation left to the hardware as those of workloads are. A measurement
// sends small and full-size UDP packets with DF set, each once with a checksum
// that the kernel computed and once with one that was left to the device; then
// datagrams that go as one packet for the device to cut (UDP_SEGMENT); then 256
// KiB over TCP. Which of them arrive tells what is at fault, without a change to
// the device: see [Finding]. A fault of the offloads is cured on the device and
// measured again, and the cure is kept only if it helps.
//
// Cost of a tunnel: one measurement is at most 24 small packets, 12 full-size
// ones, two bursts of 40 and a TCP transfer of 256 KiB, about 400 packets in all; a
// peer whose full-size packets are lost costs up to 100 more. It is measured when
// it comes up, when the path changes, and then about once an hour; at most eight
// at once. A peer that is well costs the underlay about one packet in four
// seconds.
package probe
