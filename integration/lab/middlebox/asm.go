package middlebox

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// reg is a register of the BPF machine.
type reg uint8

// R0 is the result of a load and of the program; a load spoils R1 to R5; R6
// holds the context that loads read from (linux/bpf.h, Documentation/bpf).
const (
	r0 reg = iota
	r1
	r2
	_
	_
	_
	r6
	r7
	r8
	r9
)

// insn is a struct bpf_insn with the name of the place that it jumps to.
type insn struct {
	code     uint8
	dst, src reg
	off      int16
	imm      int32
	target   string
}

// program is a BPF program under construction.
type program struct {
	insns  []insn
	labels map[string]int
}

func (p *program) add(i insn) { p.insns = append(p.insns, i) }

// label names the next instruction.
func (p *program) label(name string) {
	if p.labels == nil {
		p.labels = map[string]int{}
	}
	p.labels[name] = len(p.insns)
}

func (p *program) mov(dst, src reg)        { p.alu(unix.BPF_MOV, dst, src) }
func (p *program) movImm(dst reg, v int32) { p.aluImm(unix.BPF_MOV, dst, v) }
func (p *program) alu(op uint8, dst, src reg) {
	p.add(insn{code: unix.BPF_ALU64 | op | unix.BPF_X, dst: dst, src: src})
}

func (p *program) aluImm(op uint8, d reg, v int32) {
	p.add(insn{code: unix.BPF_ALU64 | op | unix.BPF_K, dst: d, imm: v})
}

// abs loads size bytes of the packet at a fixed offset into R0, in the host's
// order. A packet that is too short ends the program with 0: it passes.
func (p *program) abs(size uint8, offset int32) {
	p.add(insn{code: unix.BPF_LD | unix.BPF_ABS | size, imm: offset})
}

// ind loads like abs, from offset plus what is in r.
func (p *program) ind(size uint8, r reg, offset int32) {
	p.add(insn{code: unix.BPF_LD | unix.BPF_IND | size, src: r, imm: offset})
}

// field loads a 32-bit member of the context.
func (p *program) field(dst reg, offset int16) {
	p.add(insn{code: unix.BPF_LDX | unix.BPF_MEM | unix.BPF_W, dst: dst, src: r6, off: offset})
}

// jump goes to a label if dst compares so with the value.
func (p *program) jump(op uint8, dst reg, v int32, target string) {
	p.add(insn{code: unix.BPF_JMP | op | unix.BPF_K, dst: dst, imm: v, target: target})
}

// jumpReg goes to a label if dst compares so with src.
func (p *program) jumpReg(op uint8, dst, src reg, target string) {
	p.add(insn{code: unix.BPF_JMP | op | unix.BPF_X, dst: dst, src: src, target: target})
}

func (p *program) always(target string) {
	p.add(insn{code: unix.BPF_JMP | unix.BPF_JA, target: target})
}

func (p *program) ret(v int32) {
	p.movImm(r0, v)
	p.add(insn{code: unix.BPF_JMP | unix.BPF_EXIT})
}

// assemble returns the program as the kernel takes it.
func (p *program) assemble() ([]byte, error) {
	var b bytes.Buffer
	for at, i := range p.insns {
		off := i.off
		if i.target != "" {
			to, ok := p.labels[i.target]
			if !ok {
				return nil, fmt.Errorf("assemble: no label %q", i.target)
			}
			off = int16(to - at - 1)
		}
		b.Write([]byte{i.code, byte(i.dst) | byte(i.src)<<4})
		b.Write(binary.NativeEndian.AppendUint16(nil, uint16(off)))
		b.Write(binary.NativeEndian.AppendUint32(nil, uint32(i.imm)))
	}
	return b.Bytes(), nil
}

// progLoad is the part of union bpf_attr that BPF_PROG_LOAD reads.
type progLoad struct {
	progType, count uint32
	insns, license  uint64
	logLevel        uint32
	logSize         uint32
	logBuf          uint64
	kernVersion     uint32
	flags           uint32
}

// load hands the program to the kernel and returns its descriptor.
func (p *program) load() (int, error) {
	code, err := p.assemble()
	if err != nil {
		return 0, err
	}
	license := []byte("GPL\x00")
	verifier := make([]byte, 1<<16)
	attr := progLoad{
		progType: unix.BPF_PROG_TYPE_SCHED_CLS, count: uint32(len(p.insns)),
		insns: address(code), license: address(license), logLevel: 1, logSize: uint32(len(verifier)), logBuf: address(verifier),
	}
	fd, _, errno := unix.Syscall(unix.SYS_BPF, unix.BPF_PROG_LOAD, uintptr(unsafe.Pointer(&attr)), unsafe.Sizeof(attr))
	runtime.KeepAlive(code)
	runtime.KeepAlive(license)
	runtime.KeepAlive(verifier)
	if errno != 0 {
		text, _, _ := bytes.Cut(verifier, []byte{0})
		return 0, errors.Join(fmt.Errorf("load BPF program: %w", errno), errors.New(string(text)))
	}
	return int(fd), nil
}

func address(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(&b[0]))) }
