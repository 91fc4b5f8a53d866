package nft

import "testing"

// Whatever the socket gives, decoding it ends without a panic.
func FuzzDecode(f *testing.F) {
	b := new(batch)
	b.putRule("x", &rule{exprs: []byte{8, 0, 1, 0, 1, 2, 3, 4}, comment: "c"}, 7)
	f.Add(b.frame())
	f.Add([]byte{20, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 255, 255, 255, 255})
	f.Fuzz(func(t *testing.T, data []byte) {
		total := 0
		parse(data, func(m message) {
			total += len(m.data)
			_ = m.errno()
			_ = ours(m)
		})
		if total > len(data) {
			t.Errorf("%d bytes of %d", total, len(data))
		}
		_, _ = countersOf(data)
		_ = hashOf(data)
		_, _ = decodeElem(data, &set{spec: setSpec{flags: 4}})
		each(data, func(a attr) { _, _, _ = a.u32(), a.u64(), a.str() })
	})
}
