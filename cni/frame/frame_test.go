package frame

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// FuzzRead: of whatever comes, no more is read than the frame that it says it is; what
// is taken is written and read again as the same; and a gRPC client is told apart.
func FuzzRead(f *testing.F) {
	for _, v := range []any{
		Request{Method: "Add", Timeout: 1000, Message: []byte(`{"containerId":"a"}`)},
		Response{Code: 9, Error: "no\n"},
	} {
		var b bytes.Buffer
		if err := Write(&b, v); err != nil {
			f.Fatal(err)
		}
		f.Add(b.Bytes())
		f.Add(b.Bytes()[:b.Len()-1])
	}
	f.Add([]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))
	f.Add([]byte{0, 0x80, 0, 1})
	f.Add([]byte("\x00\x00\x00\x04null and more"))
	f.Fuzz(func(t *testing.T, b []byte) {
		from := bytes.NewReader(b)
		var q Request
		err := Read(from, &q)
		if len(b) < HeaderLen {
			if err == nil {
				t.Errorf("%q is no header", b)
			}
			return
		}
		size := binary.BigEndian.Uint32(b)
		switch {
		case (Header(b[:HeaderLen]).Foreign() || size > Max) && !errors.Is(err, ErrProtocol):
			t.Errorf("%q: %v, want %v", b, err, ErrProtocol)
		case err == nil && uint64(from.Len()) != uint64(len(b))-HeaderLen-uint64(size):
			t.Errorf("%d bytes are left of %d with a frame of %d", from.Len(), len(b), size)
		case err != nil && !errors.Is(err, ErrProtocol) && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF):
			t.Errorf("%q: %v, by which nobody knows what it is", b, err)
		}
		if err != nil {
			return
		}
		once := again(t, q)
		if diff := cmp.Diff(once, again(t, once)); diff != "" || q.Method != once.Method || q.Timeout != once.Timeout {
			t.Errorf("%+v is read again as %+v\n%s", q, once, diff)
		}
	})
}

// again writes a request, which may lay its message out anew, and reads it.
func again(t *testing.T, q Request) (out Request) {
	t.Helper()
	var b bytes.Buffer
	if err := Write(&b, q); err != nil {
		t.Fatal(err)
	}
	if err := Read(&b, &out); err != nil {
		t.Fatal(err)
	}
	return out
}
