package clustertest

import (
	"errors"
	"fmt"
	"os"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// delayFile in a member's directory says how slow its disk is.
const delayFile = "delay"

// notif is struct seccomp_notif, of which the id is used.
type notif struct {
	id   uint64
	rest [72]byte
}

// answer is struct seccomp_notif_resp.
type answer struct {
	id    uint64
	value int64
	errno int32
	flags uint32
}

// delayFlushes has each fsync(2) and fdatasync(2) of this process wait as long as by
// says at the time, as on a slow disk (seccomp_unotify(2)).
func delayFlushes(by func() (time.Duration, error)) error {
	fd, err := watchFlushes()
	if err != nil {
		return fmt.Errorf("watch system calls: %w", err)
	}
	go func() {
		for {
			var n notif
			if err := ioctl(fd, unix.SECCOMP_IOCTL_NOTIF_RECV, unsafe.Pointer(&n)); err != nil {
				if errors.Is(err, unix.EINTR) || errors.Is(err, unix.ENOENT) {
					continue // the thread was interrupted
				}
				fmt.Fprintln(os.Stderr, "wait for a flush:", err)
				os.Exit(1)
			}
			go func() {
				d, err := by()
				if err != nil {
					fmt.Fprintln(os.Stderr, "read how slow the disk is:", err)
				}
				<-time.After(d)
				// Of a call that has been interrupted the kernel knows no more.
				_ = ioctl(fd, unix.SECCOMP_IOCTL_NOTIF_SEND, unsafe.Pointer(&answer{id: n.id, flags: unix.SECCOMP_USER_NOTIF_FLAG_CONTINUE}))
			}()
		}
	}()
	return nil
}

// watchFlushes returns the descriptor by which the kernel asks about flushes.
func watchFlushes() (uintptr, error) {
	const number = 0 // of the call, in struct seccomp_data
	is := func(v uint32, skip uint8) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: v, Jt: skip}
	}
	end := func(v uint32) unix.SockFilter { return unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: v} }
	program := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: number},
		is(unix.SYS_FSYNC, 2),
		is(unix.SYS_FDATASYNC, 1),
		end(unix.SECCOMP_RET_ALLOW),
		end(unix.SECCOMP_RET_USER_NOTIF),
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return 0, err
	}
	p := unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]}
	fd, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER,
		unix.SECCOMP_FILTER_FLAG_TSYNC|unix.SECCOMP_FILTER_FLAG_TSYNC_ESRCH|unix.SECCOMP_FILTER_FLAG_NEW_LISTENER, uintptr(unsafe.Pointer(&p)))
	if errno != 0 {
		return 0, errno
	}
	return fd, nil
}

func ioctl(fd, request uintptr, arg unsafe.Pointer) error {
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, fd, request, uintptr(arg)); errno != 0 {
		return errno
	}
	return nil
}
