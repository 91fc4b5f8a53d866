package conn

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Key is one of TCP-AO (RFC 5925), where it is called a master key tuple.
type Key struct {
	Send, Receive uint8  // ids in the segments that are signed with it: this side's, the peer's
	Algorithm     string // as the kernel names it
	Secret        string
}

// MaxKeys is how many keys a peer has at most.
const MaxKeys = 4

// Keys are those of a peer, the one that it is asked to sign with first; the zero value: TCP-AO is not used. They can be compared.
type Keys struct {
	N    int
	List [MaxKeys]Key
}

func (k *Keys) all() []Key { return k.List[:k.N] }

// at are the keys with the n-th one first, which is for the n-th attempt in a row to connect: a peer that has not got
// a new key yet answers nothing that is signed with it.
func (k Keys) at(n int) Keys {
	if k.N > 0 {
		n %= k.N
		k.List[0], k.List[n] = k.List[n], k.List[0]
	}
	return k
}

// Follow reports whether a connection with other keys can get these. One that is not signed, or by a password, cannot; nor can one that
// has none of these, and the ids of each for another secret.
func (k Keys) Follow(old Keys) bool {
	if k.N == 0 || old.N == 0 {
		return k == old
	}
	_, err := replace(installedOf(alone(netip.IPv4Unspecified()), old.all()), old.all(), k.all(), true)
	return err == nil
}

// clashes reports whether two keys cannot be there at once (RFC 5925 section 3.1).
func (q Key) clashes(send, receive uint8) bool { return q.Send == send || q.Receive == receive }

// installed is a key that the kernel has for a socket.
type installed struct {
	to            netip.Prefix
	send, receive uint8
	current       bool // a connection's segments are signed with it
	next          bool // the peer is asked to sign with it
}

func installedOf(to netip.Prefix, keys []Key) (out []installed) {
	for _, k := range keys {
		out = append(out, installed{to: to, send: k.Send, receive: k.Receive})
	}
	return out
}

// step is one change of a socket's keys: one is added, or removed, or the peer is asked to sign with one. From a connection
// none is removed that is in use, so that says by which one it is replaced.
type step struct {
	add    Key
	remove installed
	heir   Key // of remove in a connection
	ask    Key
}

// errNoHeir is why a connection cannot have other keys.
var errNoHeir = errors.New("it has none of the new keys, and what it has are other secrets with their ids: give a new key ids of its own")

// replace says how a socket gets other keys: have are those that the kernel has for it, known what this side knows of them. A
// connection has one that is wanted at every moment, and goes on.
func replace(have []installed, known, want []Key, connection bool) (steps []step, err error) {
	var heir Key // the first of want that is there before any is removed
	found := false
	var stale []installed
	later := map[Key]bool{}
	left := slices.Clone(have)
	for _, k := range want {
		is := func(h installed) bool { return h.send == k.Send && h.receive == k.Receive && slices.Contains(known, k) }
		switch i := slices.IndexFunc(left, is); {
		case i >= 0:
			left = slices.Delete(left, i, i+1)
		case slices.ContainsFunc(have, func(h installed) bool { return k.clashes(h.send, h.receive) }):
			later[k] = true
			continue
		default:
			steps = append(steps, step{add: k})
		}
		if !found {
			heir, found = k, true
		}
	}
	stale = left
	if connection && len(stale) > 0 && !found {
		return nil, errNoHeir
	}
	for _, h := range stale {
		steps = append(steps, step{remove: h, heir: heir})
	}
	for _, k := range want {
		if later[k] {
			steps = append(steps, step{add: k})
		}
	}
	if connection && len(want) > 0 && !slices.ContainsFunc(have, func(h installed) bool { return h.next && h.receive == want[0].Receive && !slices.Contains(stale, h) }) {
		steps = append(steps, step{ask: want[0]})
	}
	return steps, nil
}

// setKeys has a socket sign with these keys. It is called by [signing.set].
func (s *signing) setKeys(fd int, to netip.Prefix, want Keys) error {
	listening, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ACCEPTCONN)
	if err != nil {
		return fmt.Errorf("look whether a socket listens: %w", err)
	}
	for attempt := 0; ; attempt++ {
		// A listener has the keys of all peers, and no other part changes them. Those of a connection the kernel has taken over from
		// its listener, with its prefix, and changes which are in use.
		have := installedOf(to, s.keys)
		if listening == 0 {
			if have, err = keysOf(fd); err != nil {
				return err
			}
		}
		steps, err := replace(have, s.keys, want.all(), listening == 0)
		if err != nil {
			return fmt.Errorf("change the keys of a connection with %s: %w", to.Addr(), err)
		}
		for _, st := range steps {
			if err = s.do(fd, to, st, listening != 0); err != nil {
				break
			}
		}
		// The peer may ask for a key at the moment when it is removed.
		if !errors.Is(err, unix.EBUSY) || attempt == 3 {
			return err
		}
	}
}

// do does a step.
func (s *signing) do(fd int, to netip.Prefix, st step, listening bool) error {
	switch none := (Key{}); {
	case st.add != none:
		if err := addKey(fd, to, st.add); err != nil {
			return err
		}
		s.keys = append(s.keys, st.add)
	case st.ask != none:
		return askFor(fd, st.ask)
	default:
		if err := removeKey(fd, st, listening); err != nil {
			return err
		}
		s.keys = slices.DeleteFunc(s.keys, func(k Key) bool { return k.Send == st.remove.send && k.Receive == st.remove.receive })
	}
	return nil
}

// The kernel's interface is in include/uapi/linux/tcp.h, and described in Documentation/networking/tcp_ao.rst.
const (
	tcpAOAddKey  = 38
	tcpAODelKey  = 39
	tcpAOInfo    = 40
	tcpAOGetKeys = 41
)

// Flags, which the kernel has as bit-fields.
const (
	aoSetCurrent  = 1 << 0
	aoSetNext     = 1 << 1
	aoDeleteAsync = 1 << 2 // in aoDelete, of a listener
	aoIsCurrent   = 1 << 0 // in aoKey
	aoIsNext      = 1 << 1
	aoAll         = 1 << 2
)

// sockaddr is a struct sockaddr_storage.
type sockaddr struct {
	family uint16
	data   [126]byte
}

// aoAdd is a struct tcp_ao_add.
type aoAdd struct {
	addr                  sockaddr
	algorithm             [64]byte
	_                     int32  // ifindex: any
	_                     uint32 // set_current, set_rnext
	_                     uint16
	prefix, send, receive uint8
	_                     uint8 // length of signatures: 12 bytes, as RFC 5926 has them
	_                     uint8 // keyflags
	keyLen                uint8
	key                   [unix.TCP_AO_MAXKEYLEN]byte
}

// aoDelete is a struct tcp_ao_del.
type aoDelete struct {
	addr                                 sockaddr
	_                                    int32 // ifindex
	flags                                uint32
	_                                    uint16
	prefix, send, receive, current, next uint8
	_                                    uint8 // keyflags
}

// aoInfo is a struct tcp_ao_info_opt.
type aoInfo struct {
	flags         uint32
	_             uint16
	current, next uint8
	_             [5]uint64 // counters
}

// aoKey is a struct tcp_ao_getsockopt.
type aoKey struct {
	addr                  sockaddr
	_                     [64]byte // algorithm
	_                     [unix.TCP_AO_MAXKEYLEN]byte
	n                     uint32
	flags                 uint16
	send, receive, prefix uint8
	_                     [3]uint8  // length of signatures, keyflags, keylen
	_                     int32     // ifindex
	_                     [2]uint64 // counters
}

// option sets a socket's option, which is a structure without pointers.
func option[T any](fd, name int, v *T) error {
	return unix.SetsockoptString(fd, unix.IPPROTO_TCP, name, string(unsafe.Slice((*byte)(unsafe.Pointer(v)), unsafe.Sizeof(*v))))
}

// addKey adds a key, whatever device segments come from, as with passwords: without TCP_AO_KEYF_IFINDEX it counts in every VRF.
func addKey(fd int, to netip.Prefix, k Key) error {
	o := aoAdd{prefix: uint8(to.Bits()), send: k.Send, receive: k.Receive, keyLen: uint8(len(k.Secret))}
	if len(k.Secret) > len(o.key) || len(k.Algorithm) >= len(o.algorithm) {
		return fmt.Errorf("key %s of %d bytes, where the kernel has room for %d", k, len(k.Secret), len(o.key))
	}
	o.addr.family = putAddr(o.addr.data[:], to.Addr())
	copy(o.algorithm[:], k.Algorithm)
	copy(o.key[:], k.Secret)
	err := option(fd, tcpAOAddKey, &o)
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.ENOPROTOOPT):
		return fmt.Errorf("this kernel has no TCP-AO (CONFIG_TCP_AO is not set; Linux can have it since 6.7): %w", err)
	case errors.Is(err, unix.ENOENT):
		return fmt.Errorf("algorithm %s is none that this kernel has for TCP-AO: %w", k.Algorithm, err)
	case errors.Is(err, unix.ENOMEM):
		return fmt.Errorf("add key %s for %s: the sysctl net.core.optmem_max limits how many keys a socket has: %w", k, to, err)
	}
	return fmt.Errorf("add key %s for %s: %w", k, to, err)
}

// String names a key by its ids.
func (q Key) String() string {
	if q.Send == q.Receive {
		return fmt.Sprint(q.Send)
	}
	return fmt.Sprintf("%d/%d", q.Send, q.Receive)
}

func removeKey(fd int, st step, listening bool) error {
	h := st.remove
	o := aoDelete{prefix: uint8(h.to.Bits()), send: h.send, receive: h.receive}
	o.addr.family = putAddr(o.addr.data[:], h.to.Addr())
	if listening {
		o.flags = aoDeleteAsync
	} else {
		o.flags, o.next = aoSetNext, st.heir.Receive
		if h.current {
			o.flags, o.current = o.flags|aoSetCurrent, st.heir.Send
		}
	}
	if err := option(fd, tcpAODelKey, &o); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("remove key %s for %s: %w", Key{Send: h.send, Receive: h.receive}, h.to, err)
	}
	return nil
}

// askFor has the peer of a connection asked to sign with a key; it does when it has it.
func askFor(fd int, k Key) error {
	if err := option(fd, tcpAOInfo, &aoInfo{flags: aoSetNext, next: k.Receive}); err != nil {
		return fmt.Errorf("ask for key %s: %w", k, err)
	}
	return nil
}

// begin has a socket that is to connect sign with a key, and ask for it.
func begin(fd int, k Key) error {
	if err := option(fd, tcpAOInfo, &aoInfo{flags: aoSetCurrent | aoSetNext, current: k.Send, next: k.Receive}); err != nil {
		return fmt.Errorf("begin with key %s: %w", k, err)
	}
	return nil
}

// keysOf returns the keys of a connection.
func keysOf(fd int) ([]installed, error) {
	for n := 2 * MaxKeys; ; {
		buf := make([]aoKey, n)
		buf[0].flags, buf[0].n = aoAll, uint32(n)
		size := uint32(unsafe.Sizeof(buf[0]))
		_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.IPPROTO_TCP, tcpAOGetKeys,
			uintptr(unsafe.Pointer(&buf[0])), uintptr(unsafe.Pointer(&size)), 0)
		switch {
		case errno == unix.ENOENT: // it has never had one
			return nil, nil
		case errno != 0:
			return nil, fmt.Errorf("list the keys of a socket: %w", errno)
		}
		all := int(buf[0].n)
		if all > n {
			n = all
			continue
		}
		var out []installed
		for _, k := range buf[:all] {
			a := netip.AddrFrom4([4]byte(k.addr.data[2:]))
			if k.addr.family == unix.AF_INET6 {
				a = netip.AddrFrom16([16]byte(k.addr.data[6:]))
			}
			out = append(out, installed{
				to: netip.PrefixFrom(a, int(k.prefix)), send: k.send, receive: k.receive,
				current: k.flags&aoIsCurrent != 0, next: k.flags&aoIsNext != 0,
			})
		}
		return out, nil
	}
}

// TryKey says why the kernel signs no segments with a key; nil: it does.
func TryKey(k Key) error {
	return try(func(fd int) error { return addKey(fd, alone(netip.AddrFrom4([4]byte{127, 0, 0, 1})), k) })
}

// KeyUse says which keys a connection uses; the zero value: none.
type KeyUse struct {
	On      bool
	Current uint8 // Send of the one that segments are signed with
	Next    uint8 // Receive of the one that the peer is asked to sign with
}

// checkKeys refuses a connection that came before the listener had the keys: it is not signed, and cannot be any more.
func (o *Options) checkKeys(fd int) error {
	if o.Auth.Keys.N == 0 {
		return nil
	}
	if u, err := useOf(fd); err != nil || !u.On {
		return errors.Join(errUnsigned, err)
	}
	return nil
}

var errUnsigned = errors.New("the connection was opened without TCP-AO")

func useOf(fd int) (KeyUse, error) {
	have, err := keysOf(fd)
	if err != nil || len(have) == 0 {
		return KeyUse{}, err
	}
	u := KeyUse{On: true}
	for _, h := range have {
		if h.current {
			u.Current = h.send
		}
		if h.next {
			u.Next = h.receive
		}
	}
	return u, nil
}
