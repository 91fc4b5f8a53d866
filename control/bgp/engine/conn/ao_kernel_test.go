//go:build tcpao

package conn

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"slices"
	"testing"
	"time"

	"github.com/routerd/routerd/control/bgp/engine/wire"
	"github.com/routerd/routerd/integration/await"
)

// The tests of this file ask the kernel, which has to have CONFIG_TCP_AO: make test-tcp-ao.

// TestKernelTakesKeys: the kernel takes each algorithm, and says what of a key it does not like.
func TestKernelTakesKeys(t *testing.T) {
	for _, algorithm := range []string{"hmac(sha1)", "cmac(aes128)", "hmac(sha256)"} {
		for _, secret := range []string{"x", "0123456789abcdef", "a longer one than a block of AES"} {
			if err := TryKey(Key{Algorithm: algorithm, Secret: secret}); err != nil {
				t.Errorf("%s: %v", algorithm, err)
			}
		}
	}
	err := TryKey(Key{Algorithm: "hmac(none)", Secret: "x"})
	if err == nil {
		t.Error("an algorithm that there is not was taken")
	}
	t.Log(err)
}

// kernelKeys are a peer's keys as the kernel has them: their ids, and of a connection the one that it signs with.
func kernelKeys(t *testing.T, p *Peer) (ids []uint8, use KeyUse) {
	t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	for id, l := range p.links {
		if p.machine.Session(id) == nil {
			continue
		}
		raw, err := l.conn.SyscallConn()
		if err == nil {
			err = control(raw, func(fd int) error {
				have, err := keysOf(fd)
				for _, h := range have {
					ids = append(ids, h.send)
				}
				use, _ = useOf(fd)
				return err
			})
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	slices.Sort(ids)
	return ids, use
}

// TestKernelRollover: keys are added, used and removed under a session, in both families, by both sides in turn and at once.
func TestKernelRollover(t *testing.T) {
	old, next, third := key(1, "old"), Key{Send: 2, Receive: 2, Algorithm: "cmac(aes128)", Secret: "new"}, Key{Send: 3, Receive: 3, Algorithm: "hmac(sha256)", Secret: "third"}
	for _, c := range []struct{ a, b string }{{"127.0.94.1", "127.0.94.2"}, {"fd77::1", "fd77::2"}} {
		at := [2]netip.Addr{addr(c.a), addr(c.b)}
		if at[0].Is6() {
			for _, a := range at {
				if out, err := exec.Command("ip", "address", "replace", a.String()+"/128", "dev", "lo", "nodad").CombinedOutput(); err != nil {
					t.Fatalf("%v: %s", err, out)
				}
			}
		}
		var listeners [2]*Listener
		var add [2]func(netip.Addr, *Peer)
		var peers [2]*Peer
		var records [2]*record
		for i := range at {
			listeners[i], add[i] = serve(t, at[i])
		}
		for i := range at {
			o := Options{Peer: listeners[1-i].Addr(), Source: at[i], Auth: Auth{Keys: keysOfList(old)}}
			if err := listeners[i].Sign(alone(at[1-i]), o.Auth); err != nil {
				t.Fatal(err)
			}
			records[i] = &record{}
			f := config(65000+uint32(i), 65001-uint32(i), uint32(i+1), i == 0)
			f.Local.HoldTime, f.Keepalive = 90*time.Second, 200*time.Millisecond
			peers[i] = NewPeer(o, f, records[i])
			t.Cleanup(peers[i].Close)
			add[i](at[1-i], peers[i])
			peers[i].Start()
		}
		for i := range at {
			records[i].up(t)
		}
		sign := func(i int, keys ...Key) {
			t.Helper()
			a := Auth{Keys: keysOfList(keys...)}
			if err := errors.Join(listeners[i].Sign(alone(at[1-i]), a), peers[i].Sign(a, Passwords{})); err != nil {
				t.Fatal(err)
			}
		}
		use := func(i int, current uint8, ids ...uint8) {
			t.Helper()
			await.Until(t, fmt.Sprintf("side %d of %s signs with key %d of %v", i, at[i], current, ids), func() error {
				have, use := kernelKeys(t, peers[i])
				if !slices.Equal(have, ids) || use.Current != current || use != peers[i].KeyUse() {
					return fmt.Errorf("it has %v, and uses %+v", have, use)
				}
				return nil
			})
		}
		use(0, 1, 1)
		sign(0, next, old) // the other side has not got it yet
		heard, _ := peers[0].Messages()
		await.True(t, "what is said goes on", func() bool {
			now, _ := peers[0].Messages()
			return now[wire.Keepalive-1] > heard[wire.Keepalive-1]+2
		})
		use(0, 1, 1, 2)
		use(1, 1, 1)
		sign(1, next, old)
		for i := range at {
			use(i, 2, 1, 2)
		}
		sign(0, next)
		use(0, 2, 2)
		sign(1, next)
		use(1, 2, 2)
		sign(0, third, next)
		sign(1, third) // the former one goes at once
		use(0, 3, 2, 3)
		use(1, 3, 3)
		sign(0, third)
		use(0, 3, 3)
		for i := range at {
			records[i].is(t, "one session", func() bool { return records[i].ups == 1 && len(records[i].ends) == 0 })
		}
		if err := peers[0].Sign(Auth{Keys: keysOfList(Key{Send: 3, Receive: 3, Algorithm: "hmac(sha1)", Secret: "x"})}, Passwords{}); !errors.Is(err, errNoHeir) {
			t.Errorf("another secret with the id of the only one: %v", err)
		}
	}
}

// TestKernelLacksNewKey: a side that has a new key which the other one has not got connects with the former one, and is connected to.
func TestKernelLacksNewKey(t *testing.T) {
	for _, opener := range []int{0, 1} {
		at := [2]netip.Addr{addr("127.0.97.1"), addr("127.0.97.2")}
		keys := [2]Keys{keysOfList(key(2, "new"), key(1, "old")), keysOfList(key(1, "old"))}
		var listeners [2]*Listener
		var add [2]func(netip.Addr, *Peer)
		for i := range at {
			listeners[i], add[i] = serve(t, at[i])
		}
		for i := range at {
			o := Options{Peer: listeners[1-i].Addr(), Source: at[i], Auth: Auth{Keys: keys[i]}}
			if err := listeners[i].Sign(alone(at[1-i]), o.Auth); err != nil {
				t.Fatal(err)
			}
			r := &record{}
			p := NewPeer(o, config(65000+uint32(i), 65001-uint32(i), uint32(i+1), i != opener), r)
			t.Cleanup(p.Close)
			add[i](at[1-i], p)
			p.Start()
			if i == 1 {
				r.up(t)
			}
		}
	}
}

// TestKernelRefusesUnsigned: neither who has another key, nor a password, nor nothing connects to a peer with keys; nor does one that came
// before the listener had them.
func TestKernelRefusesUnsigned(t *testing.T) {
	a, b := addr("127.0.96.1"), addr("127.0.96.2")
	l, _ := serve(t, b)
	o := Options{Peer: l.Addr(), Source: a}
	early, err := o.dial(t.Context(), Auth{})
	if err != nil {
		t.Fatal(err)
	}
	defer early.Close()
	if err := l.Sign(alone(a), Auth{Keys: keysOfList(key(1, "right"))}); err != nil {
		t.Fatal(err)
	}
	for _, auth := range []Auth{
		{},
		{Password: "right"},
		{Keys: keysOfList(key(1, "wrong"))},
		{Keys: keysOfList(key(2, "right"))},
		{Keys: keysOfList(Key{Send: 1, Receive: 1, Algorithm: "hmac(sha256)", Secret: "right"})},
	} {
		if c := dialFor(t, o, auth, 2*time.Second); c != nil {
			t.Errorf("%v connected", auth)
		}
	}
	if dialFor(t, o, Auth{Keys: keysOfList(key(1, "right"))}, time.Minute) == nil {
		t.Error("the right key did not connect")
	}
	o.Auth.Keys = keysOfList(key(1, "right"))
	raw, err := early.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if err := control(raw, o.checkKeys); err == nil {
		t.Error("a connection without keys was taken")
	}
	// Keys make way for a password and come back.
	for _, auth := range []Auth{{Password: "right"}, {Keys: keysOfList(key(9, "other"))}, {}} {
		if err := l.Sign(alone(a), auth); err != nil {
			t.Fatal(err)
		}
		if dialFor(t, o, auth, time.Minute) == nil {
			t.Errorf("%v did not connect", auth)
		}
	}
}

func dialFor(t *testing.T, o Options, auth Auth, limit time.Duration) net.Conn {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	c, err := o.dial(ctx, auth)
	if err != nil {
		return nil
	}
	t.Cleanup(func() { c.Close() })
	return c
}
