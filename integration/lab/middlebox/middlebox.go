package middlebox

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Faults says what goes wrong with tunnelled packets.
type Faults struct {
	// Checksum drops packets whose inner checksum was left to the hardware:
	// the receiver would find it wrong.
	Checksum bool
	// Segmentation drops packets that the hardware was to cut into segments.
	Segmentation bool
	// MTU drops, without a word to the sender, what is larger than this many
	// bytes from the outer IP header on; 0: nothing.
	MTU int
	// Port is VXLAN's UDP port; 0: 4789.
	Port uint16
}

func (f Faults) any() bool { return f.Checksum || f.Segmentation || f.MTU > 0 }

const (
	pass int32 = 0 // TC_ACT_OK
	drop int32 = 2 // TC_ACT_SHOT

	vxlanPort = 4789

	// Offsets in a packet, from the Ethernet header on.
	atEtherType  = 12
	atOuterProto = 14 + 9
	atOuterPort  = 14 + 20 + 2
	atVXLANType  = 14 + 20 + 8 + 8 + 12
	atVXLANInner = 14 + 20 + 8 + 8 + 14
	atIPIPInner  = 14 + 20

	// Offsets in struct __sk_buff (linux/bpf.h).
	skbLen     = 0
	skbGSOSize = 176
)

// build writes the program. R6: context; R7: where the inner IP header is; R8:
// the inner protocol; R9: gso_size.
func build(f Faults) *program {
	port := int32(vxlanPort)
	if f.Port != 0 {
		port = int32(f.Port)
	}
	p := new(program)
	p.mov(r6, r1)
	p.abs(unix.BPF_H, atEtherType)
	p.jump(unix.BPF_JNE, r0, unix.ETH_P_IP, "pass")
	p.abs(unix.BPF_B, atOuterProto)
	p.movImm(r7, atIPIPInner)
	p.jump(unix.BPF_JEQ, r0, unix.IPPROTO_IPIP, "inner")
	p.jump(unix.BPF_JNE, r0, unix.IPPROTO_UDP, "pass")
	p.abs(unix.BPF_H, atOuterPort)
	p.jump(unix.BPF_JNE, r0, port, "pass")
	p.abs(unix.BPF_H, atVXLANType)
	p.jump(unix.BPF_JNE, r0, unix.ETH_P_IP, "pass")
	p.movImm(r7, atVXLANInner)
	p.label("inner")
	p.ind(unix.BPF_B, r7, 9)
	p.mov(r8, r0)
	p.field(r9, skbGSOSize)
	if f.Segmentation {
		p.jump(unix.BPF_JNE, r9, 0, "drop")
	}
	if f.MTU > 0 {
		p.size(int32(f.MTU))
	}
	if f.Checksum {
		p.checksum()
	}
	p.label("pass")
	p.ret(pass)
	if f.any() { // the kernel refuses what nothing leads to
		p.label("drop")
		p.ret(drop)
	}
	return p
}

// size drops a packet that is larger than the MTU, or whose segments will be.
func (p *program) size(mtu int32) {
	p.jump(unix.BPF_JNE, r9, 0, "segments")
	p.field(r0, skbLen)
	p.aluImm(unix.BPF_SUB, r0, 14)
	p.always("sized")
	p.label("segments")
	// Headers up to the inner IP header, that header, and the transport's.
	p.movImm(r0, 8)
	p.jump(unix.BPF_JNE, r8, unix.IPPROTO_TCP, "headers")
	p.ind(unix.BPF_B, r7, 20+12) // TCP's data offset, in words, is the upper half
	p.aluImm(unix.BPF_RSH, r0, 4)
	p.aluImm(unix.BPF_LSH, r0, 2)
	p.label("headers")
	p.alu(unix.BPF_ADD, r0, r7)
	p.alu(unix.BPF_ADD, r0, r9)
	p.aluImm(unix.BPF_ADD, r0, 20-14)
	p.label("sized")
	p.jump(unix.BPF_JGT, r0, mtu, "drop")
}

// checksum drops a packet whose checksum is that of the pseudo-header alone.
func (p *program) checksum() {
	p.movImm(r9, 0) // gso_size is not needed any more: R9 is the sum
	for _, at := range []int32{12, 14, 16, 18} {
		p.ind(unix.BPF_H, r7, at)
		p.alu(unix.BPF_ADD, r9, r0)
	}
	p.ind(unix.BPF_H, r7, 2)
	p.aluImm(unix.BPF_SUB, r0, 20)
	p.alu(unix.BPF_ADD, r9, r0)
	p.alu(unix.BPF_ADD, r9, r8)
	for range 2 {
		p.mov(r2, r9)
		p.aluImm(unix.BPF_RSH, r2, 16)
		p.aluImm(unix.BPF_AND, r9, 0xffff)
		p.alu(unix.BPF_ADD, r9, r2)
	}
	p.jump(unix.BPF_JEQ, r8, unix.IPPROTO_UDP, "udp")
	p.jump(unix.BPF_JNE, r8, unix.IPPROTO_TCP, "pass")
	p.ind(unix.BPF_H, r7, 20+16)
	p.always("compare")
	p.label("udp")
	p.ind(unix.BPF_H, r7, 20+6)
	p.label("compare")
	p.jumpReg(unix.BPF_JEQ, r0, r9, "drop")
}

// Attach puts the faults on a device of the calling thread's network
// namespace, for packets in both directions, in place of those that were there.
func Attach(device string, f Faults) error {
	return attach(device, f, netlink.HANDLE_MIN_INGRESS, netlink.HANDLE_MIN_EGRESS)
}

// AttachIngress is [Attach] for packets that come in by the device alone: only
// those who send to this host have the fault.
func AttachIngress(device string, f Faults) error {
	if err := Detach(device); err != nil {
		return err
	}
	return attach(device, f, netlink.HANDLE_MIN_INGRESS)
}

func attach(device string, f Faults, hooks ...uint32) error {
	link, err := netlink.LinkByName(device)
	if err != nil {
		return fmt.Errorf("find %s: %w", device, err)
	}
	fd, err := build(f).load()
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	qdisc := &netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: link.Attrs().Index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT,
	}}
	if err := netlink.QdiscAdd(qdisc); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("add clsact to %s: %w", device, err)
	}
	for _, hook := range hooks {
		filter := &netlink.BpfFilter{
			FilterAttrs: netlink.FilterAttrs{
				LinkIndex: link.Attrs().Index, Parent: hook, Handle: 1, Priority: 1, Protocol: unix.ETH_P_ALL,
			},
			Fd: fd, Name: "middlebox", DirectAction: true,
		}
		if err := netlink.FilterReplace(filter); err != nil {
			return fmt.Errorf("add filter to %s: %w", device, err)
		}
	}
	return nil
}

// Detach takes the faults away. A device without any is not an error.
func Detach(device string) error {
	link, err := netlink.LinkByName(device)
	if err != nil {
		return fmt.Errorf("find %s: %w", device, err)
	}
	qdisc := &netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: link.Attrs().Index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT,
	}}
	if err := netlink.QdiscDel(qdisc); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("remove clsact from %s: %w", device, err)
	}
	return nil
}
