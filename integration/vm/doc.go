// Package vm runs a command in a small virtual machine with Debian's kernel.
//
// Some machines that build routerd have a kernel without the devices that
// routerd drives: ipip, dummy, vrf. What needs them runs here. The machine is
// put together from Debian's linux-image-cloud-amd64 package, which is
// unpacked and not installed, and an initramfs that holds busybox, the modules
// of the network, the tools that the tests call (ip, nft, tcpdump, bird) with
// their libraries, and the files that the caller names. It has no disk and no
// network card: hosts are network namespaces in it.
//
// The machine runs under QEMU's own translator (TCG), so it needs neither
// /dev/kvm nor privileges, and it is slow: see docs/development.md for what was
// measured.
//
// The base of the initramfs is built once and kept in a cache directory; each
// run appends a second cpio archive with the caller's files, which the kernel
// unpacks after the first (Documentation/driver-api/early-userspace in the
// kernel's tree).
package vm
