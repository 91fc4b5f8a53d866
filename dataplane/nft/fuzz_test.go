package nft

import (
	"testing"

	"github.com/mdlayher/netlink"

	"github.com/routerd/routerd/dataplane/internal/nl"
)

// Whatever the socket gives, decoding it ends without a panic.
func FuzzDecode(f *testing.F) {
	b := new(batch)
	b.putRule("x", &rule{exprs: []byte{8, 0, 1, 0, 1, 2, 3, 4}, comment: "c"}, 7)
	f.Add(b.Finish(1))
	f.Add([]byte{20, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 255, 255, 255, 255})
	f.Fuzz(func(t *testing.T, data []byte) {
		total := 0
		for m := range nl.Messages(data) {
			total += len(m.Body)
			_ = m.Err()
			_ = ours(netlink.Message{Header: netlink.Header{Type: netlink.HeaderType(m.Type)}, Data: m.Body})
		}
		if total > len(data) {
			t.Errorf("%d bytes of %d", total, len(data))
		}
		_, _ = countersOf(data)
		_ = hashOf(data)
		_, _ = decodeElem(data, &set{spec: setSpec{flags: 4}})
		for _, v := range nl.Attributes(data) {
			_, _, _ = v.Net32(), v.Net64(), v.Text()
		}
	})
}
