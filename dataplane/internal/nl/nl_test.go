package nl

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

func TestAttributesReadWhatAttrsWrite(t *testing.T) {
	t.Parallel()
	var b Batch
	b.Begin(1, unix.NLM_F_DUMP, 9, 8, 7, 6)
	b.Uint8(1, 200)
	b.Uint32(2, 1<<31)
	b.Net16(3, 0x1234)
	b.Net32(4, 0x12345678)
	b.Net64(5, 1<<40)
	b.Text(6, "eth0")
	b.Chars(7, "veth")
	b.Addr(8, netip.MustParseAddr("192.0.2.1"))
	b.Nest(9, func() { b.Nest(1, func() { b.Addr(2, netip.MustParseAddr("fd00::1")) }) })
	b.Begin(2, 0)
	var list []Message
	for m := range Messages(b.Finish(7)) {
		list = append(list, m)
	}
	if len(list) != 2 || list[0].Type != 1 || list[0].Flags != unix.NLM_F_DUMP|unix.NLM_F_REQUEST || list[0].Seq != 7 || list[1].Seq != 8 {
		t.Fatalf("messages %+v", list)
	}
	m := list[0].Body[4:]
	got := []any{
		Find(m, 1).Uint8(), Find(m, 2).Uint32(), Find(m, 3).Net16(), Find(m, 4).Net32(), Find(m, 5).Net64(), Find(m, 6).Text(), Find(m, 7).Text(),
		Find(m, 8).Addr().String(), Find(Find(Find(m, 9), 1), 2).Addr().String(), Find(m, 10) == nil, len(Find(m, 7)),
	}
	want := []any{uint8(200), uint32(1 << 31), uint16(0x1234), uint32(0x12345678), uint64(1 << 40), "eth0", "veth", "192.0.2.1", "fd00::1", true, 4}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("read (-want +got):\n%s", diff)
	}
	var short Value = []byte{}
	if short.Uint8() != 0 || short.Uint16() != 0 || short.Uint32() != 0 || short.Net16() != 0 || short.Net32() != 0 || short.Net64() != 0 || short.Addr().IsValid() {
		t.Error("a value that is too short does not read as zero")
	}
}

// What the kernel cannot have answered is an error, and not taken for done; what
// it answers to a request that was given up is passed over.
func TestReplies(t *testing.T) {
	t.Parallel()
	message := func(kind uint16, seq uint32, body ...byte) []byte {
		b := binary.NativeEndian.AppendUint32(nil, uint32(Header+len(body)))
		b = binary.NativeEndian.AppendUint16(b, kind)
		b = binary.NativeEndian.AppendUint16(b, 0)
		b = binary.NativeEndian.AppendUint32(b, seq)
		return append(append(b, 0, 0, 0, 0), body...)
	}
	code := func(e unix.Errno) []byte { return binary.NativeEndian.AppendUint32(nil, uint32(-int32(e))) }
	for name, tt := range map[string]struct {
		in       []byte
		done     bool
		errs     map[int]error
		answered int
		err      error
	}{
		"done":            {in: message(unix.NLMSG_ERROR, 2, code(0)...), done: true},
		"not yet":         {in: message(unix.NLMSG_ERROR, 1, code(0)...)},
		"refused":         {in: message(unix.NLMSG_ERROR, 2, code(unix.EEXIST)...), done: true, errs: map[int]error{1: unix.EEXIST}},
		"two at once":     {in: append(message(unix.NLMSG_ERROR, 1, code(unix.EPERM)...), message(unix.NLMSG_ERROR, 2, code(0)...)...), done: true, errs: map[int]error{0: unix.EPERM}},
		"answer":          {in: message(unix.RTM_NEWLINK, 1), answered: 1},
		"answer to other": {in: message(unix.RTM_NEWLINK, 3)},
		"transaction":     {in: message(unix.NLMSG_ERROR, 0, code(unix.EPERM)...), done: true, err: unix.EPERM},
		"of another":      {in: message(unix.NLMSG_ERROR, 3, code(unix.EPERM)...)},
		"without a code":  {in: message(unix.NLMSG_ERROR, 2), done: true, errs: map[int]error{1: unix.EBADMSG}},
		"cut off":         {in: message(unix.NLMSG_ERROR, 1, code(0)...)[:18], err: errCut},
		"less than that":  {in: []byte{16, 0, 0}, err: errCut},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			answered := 0
			r := replies{first: 1, n: 2, answer: func(int, Message) { answered++ }}
			done, err := each(tt.in, r.take)
			if done != tt.done || !errors.Is(err, tt.err) || len(r.errs) != len(tt.errs) || answered != tt.answered {
				t.Errorf("done %v, %v, %v, %d answers; want %+v", done, err, r.errs, answered, tt)
			}
			for i := range tt.errs {
				if !errors.Is(r.errs[i], tt.errs[i]) {
					t.Errorf("request %d: %v, want %v", i, r.errs[i], tt.errs[i])
				}
			}
		})
	}
}

// A real kernel answers, each request what is its own.
func TestConn(t *testing.T) {
	t.Parallel()
	c, err := Dial(unix.NETLINK_ROUTE, 0, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	var b Batch
	get := func(index byte) { b.Begin(unix.RTM_GETLINK, 0, 0, 0, 0, 0, index, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0) }
	b.Begin(unix.RTM_GETLINK, 0, make([]byte, unix.SizeofIfInfomsg)...)
	links := map[string]bool{}
	if err := c.Dump(&b, func(m Message) { links[Find(m.Body[unix.SizeofIfInfomsg:], unix.IFLA_IFNAME).Text()] = true }); err != nil || !links["lo"] {
		t.Errorf("dump: %v, %v", links, err)
	}
	b.Reset()
	get(1)
	get(255) // none has this index
	get(1)
	var places []int
	errs, err := c.Batch(&b, func(i int, _ Message) { places = append(places, i) })
	if err != nil || len(errs) != 1 || !errors.Is(errs[1], unix.ENODEV) || !cmp.Equal(places, []int{0, 2}) {
		t.Errorf("batch: answers to %v, refused %v, %v", places, errs, err)
	}
	if err := c.Do(&b, nil); !errors.Is(err, unix.ENODEV) {
		t.Errorf("do: %v", err)
	}
}

func TestUndisturbed(t *testing.T) {
	t.Parallel()
	calls := 0
	if err := Undisturbed(3, func() error { calls++; return ErrInterrupted }); !errors.Is(err, ErrInterrupted) || calls != 3 {
		t.Errorf("%d calls, %v", calls, err)
	}
}
