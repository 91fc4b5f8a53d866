package ui

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/routerd/routerd/integration/await"
)

// browser is a headless Chromium with one tab, spoken to in its DevTools protocol over a pair of pipes
// (--remote-debugging-pipe: JSON, a zero byte after each message).
type browser struct {
	t       *testing.T
	to      *os.File
	session string // of the tab

	mu       sync.Mutex
	last     int
	answers  map[int]chan message
	requests []string // the addresses that the tab asked for
	problems []string // errors on its console
	ended    error
}

type message struct {
	ID      int             `json:"id,omitempty"`
	Session string          `json:"sessionId,omitempty"`
	Method  string          `json:"method,omitempty"`
	Params  json.RawMessage `json:"params,omitempty"`
	Result  json.RawMessage `json:"result,omitempty"`
	Error   *struct {
		Message string `json:"message"`
	} `json:"error,omitempty"`
}

// startBrowser starts a browser that ends with the test, and does not wait for it.
func startBrowser(t *testing.T) *browser {
	t.Helper()
	path, err := exec.LookPath("chromium")
	if err != nil {
		t.Fatalf("%v: install the Debian package chromium (make deps-test)", err)
	}
	in, to, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	from, out, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	c := exec.Command(path, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
		"--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-proxy-server",
		"--remote-debugging-pipe", "--user-data-dir="+t.TempDir(), "--window-size=1360,940", "about:blank")
	c.ExtraFiles = []*os.File{in, out} // its descriptors 3 and 4
	c.SysProcAttr = &unix.SysProcAttr{Setpgid: true}
	var said bytes.Buffer
	c.Stderr = &said
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	_, _ = in.Close(), out.Close()
	b := &browser{t: t, to: to, answers: map[int]chan message{}}
	var reader sync.WaitGroup
	reader.Go(func() { b.read(from) })
	t.Cleanup(func() {
		_ = unix.Kill(-c.Process.Pid, unix.SIGKILL) // with its children
		_ = c.Wait()
		_ = to.Close()
		reader.Wait()
		_ = from.Close()
		if t.Failed() {
			t.Logf("the browser said:\n%s", &said)
		}
	})
	return b
}

// attach waits for the browser's tab.
func (b *browser) attach() {
	t := b.t
	t.Helper()
	var targets struct {
		TargetInfos []struct{ TargetID, Type string }
	}
	await.True(t, "a tab", func() bool {
		b.call("Target.getTargets", nil, &targets)
		return len(targets.TargetInfos) > 0 && targets.TargetInfos[0].Type == "page"
	})
	var attached struct{ SessionID string }
	b.call("Target.attachToTarget", map[string]any{"targetId": targets.TargetInfos[0].TargetID, "flatten": true}, &attached)
	b.session = attached.SessionID
	for _, domain := range []string{"Page", "Runtime", "Log", "Network"} {
		b.call(domain+".enable", nil, nil)
	}
}

// read takes what the browser says until it ends.
func (b *browser) read(from *os.File) {
	r := bufio.NewReader(from)
	for {
		raw, err := r.ReadBytes(0)
		if err != nil {
			b.mu.Lock()
			b.ended = fmt.Errorf("the browser has ended: %w", err)
			for id, c := range b.answers {
				close(c)
				delete(b.answers, id)
			}
			b.mu.Unlock()
			return
		}
		var m message
		if json.Unmarshal(raw[:len(raw)-1], &m) == nil {
			b.take(m)
		}
	}
}

func (b *browser) take(m message) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch m.Method {
	case "":
		if c := b.answers[m.ID]; c != nil {
			c <- m // it has room
			delete(b.answers, m.ID)
		}
	case "Network.requestWillBeSent":
		var p struct {
			Request struct{ URL string } `json:"request"`
		}
		if json.Unmarshal(m.Params, &p) == nil {
			b.requests = append(b.requests, p.Request.URL)
		}
	case "Runtime.exceptionThrown":
		b.problems = append(b.problems, string(m.Params))
	case "Runtime.consoleAPICalled", "Log.entryAdded":
		var p struct {
			Type  string // of a call of console
			Entry struct{ Level string }
		}
		if json.Unmarshal(m.Params, &p) != nil || p.Type == "error" || p.Type == "warning" || p.Entry.Level == "error" || p.Entry.Level == "warning" {
			b.problems = append(b.problems, string(m.Params))
		}
	}
}

// call calls a method and waits for its result.
func (b *browser) call(method string, params, result any) {
	b.t.Helper()
	raw, err := json.Marshal(params)
	if err != nil {
		b.t.Fatal(err)
	}
	if params == nil {
		raw = []byte("{}")
	}
	answer := make(chan message, 1)
	b.mu.Lock()
	if b.ended != nil {
		b.mu.Unlock()
		b.t.Fatal(b.ended)
	}
	b.last++
	m := message{ID: b.last, Session: b.session, Method: method, Params: raw}
	b.answers[m.ID] = answer
	b.mu.Unlock()
	text, err := json.Marshal(m)
	if err != nil {
		b.t.Fatal(err)
	}
	if _, err := b.to.Write(append(text, 0)); err != nil {
		b.t.Fatalf("%s: %v", method, err)
	}
	var got message
	select {
	case got = <-answer:
	case <-await.Context(b.t).Done():
		b.t.Fatalf("%s: no answer", method)
	}
	switch {
	case got.ID == 0:
		b.t.Fatalf("%s: the browser has ended", method)
	case got.Error != nil:
		b.t.Fatalf("%s: %s", method, got.Error.Message)
	case result != nil:
		if err := json.Unmarshal(got.Result, result); err != nil {
			b.t.Fatalf("%s: %v", method, err)
		}
	}
}

// text evaluates an expression in the page to a text. What throws is an empty one.
func (b *browser) text(expression string) string {
	b.t.Helper()
	var r struct {
		Result struct{ Value any } `json:"result"`
	}
	b.call("Runtime.evaluate", map[string]any{"expression": "String(" + expression + ")", "returnByValue": true, "awaitPromise": true}, &r)
	s, _ := r.Result.Value.(string)
	return s
}

// press presses a key, as a person does.
func (b *browser) press(key string, code int, text string) {
	b.t.Helper()
	p := map[string]any{"type": "keyDown", "key": key, "code": key, "windowsVirtualKeyCode": code, "text": text}
	b.call("Input.dispatchKeyEvent", p, nil)
	p["type"] = "keyUp"
	b.call("Input.dispatchKeyEvent", p, nil)
}

func (b *browser) tab()   { b.t.Helper(); b.press("Tab", 9, "") }
func (b *browser) enter() { b.t.Helper(); b.press("Enter", 13, "\r") }

// seen returns which addresses were asked for, and what was wrong.
func (b *browser) seen() (requests, problems []string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return append([]string(nil), b.requests...), append([]string(nil), b.problems...)
}

// screenshot writes what the tab shows into a file, in light or dark colours.
func (b *browser) screenshot(file, scheme string) {
	b.t.Helper()
	b.call("Emulation.setEmulatedMedia", map[string]any{"features": []map[string]string{{"name": "prefers-color-scheme", "value": scheme}}}, nil)
	var shot struct{ Data []byte }
	b.call("Page.captureScreenshot", map[string]any{"format": "png"}, &shot)
	if err := os.WriteFile(file, shot.Data, 0o644); err != nil {
		b.t.Fatal(err)
	}
}
