package bench

import "testing"

// TestReflect takes both reflectors through a small run.
func TestReflect(t *testing.T) {
	t.Parallel()
	rows, err := MeasureReflector(t.Context(), Programs{Dir: programs(t), Profiles: t.TempDir()}, []Reflection{{Clients: 3, Prefixes: 200}}, func(s string) { t.Log(s) })
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range rows {
		t.Logf("%+v", r)
	}
	if len(rows) != 3 || rows[0].Ours <= 0 || rows[0].Ours >= ms(reflectWithin) || rows[2].Ours <= 0 {
		t.Errorf("not measured, or not done: %+v", rows)
	}
}

// TestTakeUpdate counts prefixes in what a reflector sends, and refuses what is
// cut off.
func TestTakeUpdate(t *testing.T) {
	t.Parallel()
	c := &bgpClient{seen: make([]uint64, 1)}
	// Nothing withdrawn, one attribute, 20.0.0.0/26, 20.0.0.64/26 and the first again.
	msg := []byte{0, 0, 0, 4, 0x40, 1, 1, 0, 26, 20, 0, 0, 0, 26, 20, 0, 0, 64, 26, 20, 0, 0, 0}
	if err := c.take(msg); err != nil || c.n != 2 || c.seen[0] != 3 {
		t.Errorf("%d prefixes, %b, %v", c.n, c.seen[0], err)
	}
	for n := range len(msg) {
		switch n {
		case 8, 13, 18: // whole prefixes
			continue
		}
		if err := c.take(msg[:n]); err == nil {
			t.Errorf("cut after %d bytes: no error", n)
		}
	}
}
