package engine

import (
	"net/netip"
	"testing"
)

func TestIdentity(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ addr, name string }{{"10.1.0.1", "10.1.0.1:1790"}, {"fd00::1", "[fd00::1]:1790"}, {"127.0.0.1", "127.0.0.1:1790"}} {
		a := netip.MustParseAddr(c.addr)
		id := Identity(a, 1790)
		if Remote(id) != a || Name(id) != c.name || id == a || Identity(a, 1791) == id {
			t.Errorf("%s is known as %s, which is %s of %s", a, id, Name(id), Remote(id))
		}
		if Remote(a) != a || Name(a) != c.addr {
			t.Errorf("%s alone is %s, %s", a, Remote(a), Name(a))
		}
	}
	link := netip.MustParseAddr("fe80::1%eth0")
	if Remote(link) != link || Name(link) != "fe80::1%eth0" {
		t.Errorf("%s is taken for another's", link)
	}
}
