package ui

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab"
	"github.com/routerd/routerd/integration/lab/bring"
	"github.com/routerd/routerd/store"
)

// forward passes connections of a loopback port on to a socket, as ssh -L does, and returns the port.
func forward(t *testing.T, socket string) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	serve := func(c net.Conn) {
		defer c.Close()
		far, err := net.Dial("unix", socket)
		if err != nil {
			return
		}
		defer far.Close()
		end := make(chan struct{}, 2)
		pass := func(to, from net.Conn) { _, _ = io.Copy(to, from); end <- struct{}{} }
		go pass(far, c)
		go pass(c, far)
		<-end // either end closes both
	}
	all.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go serve(c)
		}
	})
	t.Cleanup(func() { _ = l.Close(); all.Wait() })
	_, port, err := net.SplitHostPort(l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	return port
}

// TestPage opens the page of one of three hosts with the address that routerctl ui gives.
func TestPage(t *testing.T) {
	t.Parallel()
	top := lab.DefaultTopology(3)
	pods := 2
	top.Pods, top.Pool.Encapsulation = &pods, store.VXLAN
	// The labs of a package are called so: see bring.Up.
	socket := filepath.Join(lab.Root, fmt.Sprintf("%s%d-page", labPrefix, os.Getpid()), "node1", "ui.sock")
	top.Nodes[0].Config = map[string]any{"ui": map[string]any{"listen": "unix://" + socket}}
	b := startBrowser(t)
	l := bring.Up(t, 2*time.Minute, labPrefix, "page", top, bring.BinDir())
	b.attach()

	if info, err := os.Stat(socket); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the page's socket: %v, %v; want mode 0600", info, err)
	}
	port := forward(t, socket)
	origin := "http://localhost:" + port
	b.call("Page.navigate", map[string]any{"url": origin + "/?token=" + token(t, l)}, nil)

	// The cluster is in the picture, and well.
	hosts := func() string {
		return b.text(`[...document.querySelectorAll('#picture .host')].map((h) => h.getAttribute('aria-label')).join('|')`)
	}
	want(t, "hosts", "node1: up, this host|node2: up|node3: up", hosts)
	want(t, "links", "node1 to node2: session up, tunnel up|node1 to node3: session up, tunnel up|node2 to node3: session up, tunnel none", func() string {
		return b.text(`[...document.querySelectorAll('#picture .link')].map((h) => h.getAttribute('aria-label')).join('|')`)
	})
	want(t, "racks", "10.1.0.0/24|10.2.0.0/24", func() string {
		return b.text(`[...document.querySelectorAll('#picture .rack text')].map((r) => r.textContent).join('|')`)
	})
	want(t, "the tables of the picture", "3|3", func() string {
		return b.text(`['hosts', 'links'].map((t) => document.getElementById(t).tBodies[0].rows.length).join('|')`)
	})
	if got := b.text(`location.href`); got != origin+"/" {
		t.Errorf("after the token was used the address is %q, want none of it there", got)
	}
	want(t, "rates of devices", "eth0|vxlan.calico", func() string {
		return b.text(`[...document.getElementById('rates').tBodies[0].rows].map((r) => r.cells[0].textContent).join('|')`)
	})
	screenshots(b, "topology")
	tracePods(t, b)
	b.call("Page.navigate", map[string]any{"url": origin + "/"}, nil) // the keyboard begins at the top again
	want(t, "hosts", "node1: up, this host|node2: up|node3: up", hosts)

	// A host's daemon dies. That it is gone the others know when its lease ends.
	b.text(`window.same = true`)
	if err := l.Kill(await.Context(t), "node3", unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	want(t, "session of the host that died", "down", func() string {
		return b.text(`document.querySelector('[data-key="link node1 node3"] .session').classList[1]`)
	})
	t.Logf("its session was red after %.1f s", time.Since(start).Seconds())

	// Every view is reached with the keyboard alone. Each is a link after the other.
	for i, v := range []struct{ view, filled string }{
		{"pools", `document.querySelectorAll('#pools .map .claimed').length > 0`},
		{"routes", `[...document.getElementById('routes').tBodies[0].rows].some((r) => r.textContent.includes('node3'))`},
		{"policy", `document.querySelectorAll('#policy details').length === 2`},
		{"trace", `document.querySelectorAll('#pods .pod').length === 6`},
		{"events", `document.getElementById('events').tBodies[0].rows.length > 0`},
		{"doctor", `document.querySelectorAll('#findings .finding').length > 0`},
	} {
		if i == 0 { // from the top: the link that skips, and the first view
			b.text(`document.activeElement.blur()`)
			b.tab()
			if got := b.text(`document.activeElement.className`); got != "skip" {
				t.Errorf("the first Tab leads to %q, want the link that skips the views", got)
			}
			b.tab()
		}
		b.tab()
		if got := b.text(`document.activeElement.hash`); got != "#/"+v.view {
			t.Errorf("Tab %d among the views leads to %q, want %s", i, got, v.view)
		}
		b.enter()
		want(t, "what is shown", v.view, func() string {
			return b.text(`[...document.querySelectorAll('main > section:not([hidden])')].map((s) => s.id.slice(5)).join('|') + (document.querySelector('nav [aria-current]').hash === location.hash ? '' : ', and nav says another')`)
		})
		want(t, v.view, "true", func() string { return b.text(v.filled) })
		if v.view != "doctor" {
			screenshots(b, v.view)
		}
	}

	// The host turned red without a reload; what it is about can be asked for with the keyboard.
	b.text(`document.querySelector('nav a[href="#/topology"]').focus()`)
	b.enter()
	want(t, "host that died", "node3: down", func() string {
		return b.text(`document.querySelector('[data-key="host node3"]').getAttribute('aria-label')`)
	})
	t.Logf("it was red after %.1f s", time.Since(start).Seconds())
	b.text(`document.querySelector('[data-key="host node3"]').focus()`)
	b.enter()
	want(t, "details", "true", func() string {
		return b.text(`document.getElementById('details').textContent.includes('its daemon is absent')`)
	})
	screenshots(b, "down")
	b.text(`document.querySelector('nav a[href="#/doctor"]').focus()`)
	b.enter()
	want(t, "doctor", "true", func() string {
		return b.text(`document.getElementById('findings').textContent.includes('the daemon of node3 is absent')`)
	})
	screenshots(b, "doctor")
	if got := b.text(`window.same`); got != "true" {
		t.Error("the page was loaded anew")
	}

	requests, problems := b.seen()
	for _, r := range requests {
		if !strings.HasPrefix(r, origin+"/") && r != "about:blank" {
			t.Errorf("the page asked for %s", r)
		}
	}
	if len(requests) < 5 {
		t.Errorf("only %d requests were seen: %q", len(requests), requests)
	}
	for _, p := range problems {
		t.Errorf("on the console: %s", p)
	}
}

// tracePods follows a packet between two pods of other hosts that are chosen, one with a
// click and the other with the keyboard.
func tracePods(t *testing.T, b *browser) {
	t.Helper()
	b.text(`location.hash = '#/trace'`)
	want(t, "pods", "2|2|2", func() string {
		return b.text(`[...document.querySelectorAll('#pods section')].map((s) => s.querySelectorAll('.pod').length).join('|')`)
	})
	b.text(`document.querySelector('[aria-label="Pods of node2"] .pod').click()`)
	b.text(`document.querySelector('[aria-label="Pods of node3"] .pod').focus()`)
	b.enter()
	want(t, "verdict", "whole: ", func() string { return b.text(`document.querySelector('#traced .finding.well b').textContent`) })
	want(t, "ways", "There of node2, node3|Back of node3, node2", func() string {
		return b.text(`[...document.querySelectorAll('#traced table')].map((t) => t.caption.textContent + ' of ' + [...new Set([...t.tBodies[0].rows].map((r) => r.cells[0].textContent))].join(', ')).join('|')`)
	})
	want(t, "what is chosen", "2", func() string { return b.text(`document.querySelectorAll('#pods [aria-pressed=true]').length`) })
	screenshots(b, "traced")
	b.text(`document.querySelector('#trace-form [name=to]').value = '192.168.255.1'`)
	b.text(`document.getElementById('trace-form').requestSubmit()`)
	want(t, "what is wrong first", "true", func() string {
		return b.text(`document.querySelector('#traced .finding.critical').textContent.includes('no workload of the cluster has it')`)
	})
}

// token has routerctl ask the daemon for one.
func token(t *testing.T, l *lab.Lab) string {
	t.Helper()
	c := exec.CommandContext(await.Context(t), filepath.Join(bring.BinDir(), "routerctl"), "--socket", lab.Socket(l.Name(), "node1"), "ui", "-o", "json")
	out, err := c.Output()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		t.Fatalf("routerctl ui: %v: %s", err, exit.Stderr)
	}
	var r struct{ Token string }
	if err := errors.Join(err, json.Unmarshal(out, &r)); err != nil || r.Token == "" {
		t.Fatalf("routerctl ui: %v: %s", err, out)
	}
	return r.Token
}

// want waits until a text is the one that is wanted.
func want(t *testing.T, what, text string, get func() string) {
	t.Helper()
	await.Until(t, what, func() error {
		if got := get(); got != text {
			return fmt.Errorf("%q, want %q", got, text)
		}
		return nil
	})
}

// screenshots writes what is shown where $ROUTERD_SCREENSHOTS says: so docs/operations/ui.md has its pictures.
func screenshots(b *browser, name string) {
	b.t.Helper()
	dir := os.Getenv("ROUTERD_SCREENSHOTS")
	if dir == "" {
		return
	}
	for _, scheme := range []string{"light", "dark"} {
		b.screenshot(filepath.Join(dir, name+"-"+scheme+".png"), scheme)
	}
}
