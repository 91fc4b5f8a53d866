package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// terminal is one that shows a screen and passes keys on as they are typed. What is drawn takes the place of what was there;
// close brings that back.
type terminal struct {
	in, out *os.File
	saved   unix.Termios
}

// openTerminal takes the terminal that a command was called from; ok is false if there is none, or one that cannot move its
// cursor.
func openTerminal(stdin io.Reader, stdout io.Writer, name string) (t *terminal, ok bool, err error) {
	in, isIn := stdin.(*os.File)
	out, isOut := stdout.(*os.File)
	if !isIn || !isOut || name == "" || name == "dumb" {
		return nil, false, nil
	}
	saved, err := unix.IoctlGetTermios(int(in.Fd()), unix.TCGETS) //nolint:gosec // a descriptor
	if err != nil {
		return nil, false, nil //nolint:nilerr // it is no terminal
	}
	if _, err := unix.IoctlGetTermios(int(out.Fd()), unix.TCGETS); err != nil { //nolint:gosec // a descriptor
		return nil, false, nil //nolint:nilerr // it is no terminal
	}
	t = &terminal{in: in, out: out, saved: *saved}
	raw := *saved
	// Keys come at once and are not shown (termios(3)). ^C is a signal still, and ^Z nothing: the screen would stay as it is.
	raw.Lflag &^= unix.ICANON | unix.ECHO
	raw.Cc[unix.VMIN], raw.Cc[unix.VTIME], raw.Cc[unix.VSUSP] = 1, 0, 0
	if err := unix.IoctlSetTermios(int(in.Fd()), unix.TCSETS, &raw); err != nil { //nolint:gosec // a descriptor
		return nil, false, fmt.Errorf("have the terminal pass keys on: %w", err)
	}
	// The alternate screen, without a cursor (xterm's control sequences; others have them too).
	_, err = io.WriteString(t.out, "\x1b[?1049h\x1b[?25l\x1b[2J")
	return t, true, err
}

func (t *terminal) close() error {
	_, err := io.WriteString(t.out, "\x1b[0m\x1b[?25h\x1b[?1049l")
	return errors.Join(err, unix.IoctlSetTermios(int(t.in.Fd()), unix.TCSETS, &t.saved)) //nolint:gosec // a descriptor
}

// size is how many columns and lines there are.
func (t *terminal) size() (columns, lines int) {
	w, err := unix.IoctlGetWinsize(int(t.out.Fd()), unix.TIOCGWINSZ) //nolint:gosec // a descriptor
	if err != nil || w.Col == 0 || w.Row == 0 {
		return 80, 24
	}
	return int(w.Col), int(w.Row)
}

// keyPoll is how often the wait for a key looks whether it is to end.
const keyPoll = 100 * time.Millisecond

// keys passes on what is typed until ctx ends or the terminal is gone, and closes the channel then.
func (t *terminal) keys(ctx context.Context, typed chan<- string) {
	defer close(typed)
	fd := []unix.PollFd{{Fd: int32(t.in.Fd()), Events: unix.POLLIN}} //nolint:gosec // a descriptor
	b := make([]byte, 64)
	for ctx.Err() == nil {
		n, err := unix.Poll(fd, int(keyPoll.Milliseconds()))
		if errors.Is(err, unix.EINTR) || err == nil && n == 0 {
			continue
		}
		if err != nil {
			return
		}
		if n, err = unix.Read(int(t.in.Fd()), b); err != nil || n <= 0 { //nolint:gosec // a descriptor
			return
		}
		select {
		case typed <- string(b[:n]):
		case <-ctx.Done():
		}
	}
}

// styled is text with the number of a rendition (ECMA-48, SGR); empty: as it is.
type styled struct{ text, sgr string }

// draw shows lines from the top.
func (t *terminal) draw(lines []styled) error {
	var b bytes.Buffer
	safe := &printable{w: &b}
	b.WriteString("\x1b[H")
	for i, l := range lines {
		if i > 0 {
			b.WriteString("\r\n")
		}
		if l.sgr != "" {
			b.WriteString("\x1b[" + l.sgr + "m")
		}
		_, _ = io.WriteString(safe, l.text) // a buffer takes it
		if l.sgr != "" {
			b.WriteString("\x1b[0m")
		}
		b.WriteString("\x1b[K")
	}
	b.WriteString("\x1b[J")
	_, err := t.out.Write(b.Bytes())
	return err
}
