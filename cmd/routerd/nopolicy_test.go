package main

import (
	"errors"
	"fmt"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/dataplane/nft"
	"github.com/routerd/routerd/integration/await"
)

// withoutNetfilter is set in the environment of a daemon whose kernel is to be
// one without netfilter.
const withoutNetfilter = "ROUTERD_TEST_WITHOUT_NETFILTER"

// refuseNetfilter has the kernel answer this process as one without nfnetlink
// does: there is no such protocol of AF_NETLINK (seccomp(2)).
func refuseNetfilter() error {
	load := func(at uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: at}
	}
	// Of struct seccomp_data: the number of the call, then the low halves of its
	// first and third argument.
	const number, first, third = 0, 16, 32
	unless := func(v uint32, skip uint8) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: v, Jf: skip}
	}
	end := func(v uint32) unix.SockFilter { return unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: v} }
	program := []unix.SockFilter{
		load(number), unless(unix.SYS_SOCKET, 5),
		load(first), unless(unix.AF_NETLINK, 3),
		load(third), unless(unix.NETLINK_NETFILTER, 1),
		end(unix.SECCOMP_RET_ERRNO | uint32(unix.EPROTONOSUPPORT)),
		end(unix.SECCOMP_RET_ALLOW),
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("set no_new_privs: %w", err)
	}
	p := unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]}
	_, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC, uintptr(unsafe.Pointer(&p)))
	if errno != 0 {
		return fmt.Errorf("install a filter of system calls: %w", errno)
	}
	return nil
}

func (h *host) hasTable() (bool, error) {
	out, err := h.exec("nft", "list", "tables")
	return strings.Contains(out, "table inet "+nft.TableName), err
}

// TestKernelWithoutNetfilter: a host that cannot enforce policy says so, with
// the cure, attaches nothing, and attaches again where policy is switched off.
func TestKernelWithoutNetfilter(t *testing.T) {
	t.Parallel()
	h := newHost(t, "10.1.0.11/24")
	h.env = append(h.env, withoutNetfilter+"=1")
	r := h.start()
	cure := []string{"cannot enforce network policy", "nf_tables", "nf_conntrack", "policy.enabled: false"}
	r.when("the condition Policy", func(n *apiv1.NodeResponse) error {
		c := conditionOf(n, "Policy")
		if c.GetOk() {
			return errors.New("it is fine")
		}
		return mentions(c.GetReason(), cure...)
	})
	await.Until(t, "what ADD says", func() error { // before, that the host is not registered
		_, err := r.attach("a")
		if err == nil {
			t.Fatal("a workload is attached without its policy")
		}
		return mentions(err.Error(), cure...)
	})
	r.kill(syscall.SIGTERM)
	h.config["policy"] = map[string]any{"enabled": false}
	r = h.start()
	r.ready()
	if _, err := r.attach("a"); err != nil {
		t.Errorf("policy is switched off: %v", err)
	}
}

// TestPolicySwitchedOff: with policy switched off the table goes, and with it
// what was denied; switched on, it is there again.
func TestPolicySwitchedOff(t *testing.T) {
	t.Parallel()
	h := newHost(t, "10.1.0.11/24")
	for i, enabled := range []bool{true, false, true} {
		h.config["policy"] = map[string]any{"enabled": enabled}
		r := h.start()
		r.ready()
		if _, err := r.attach(fmt.Sprintf("pod%d", i)); err != nil {
			t.Errorf("policy.enabled: %t: %v", enabled, err)
		}
		if found, err := h.hasTable(); err != nil || found != enabled {
			t.Errorf("policy.enabled: %t: the table is there: %t (%v)", enabled, found, err)
		}
		lines := 0
		if !enabled {
			lines = 1
		}
		r.tells(lines, "network policy is switched off")
		if n, err := r.node(); err != nil || enabled && !conditionOf(n, "Policy").GetOk() {
			t.Errorf("policy.enabled: %t: %v, the condition is %v", enabled, err, conditionOf(n, "Policy"))
		}
		r.kill(syscall.SIGTERM)
	}
}
