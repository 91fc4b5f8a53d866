package bench

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"syscall"
	"testing"
	"time"
)

// TestMain lets this program be the engine alone, too.
func TestMain(m *testing.M) {
	if len(os.Args) == 3 && os.Args[1] == "speak" {
		ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
		err := Speak(ctx, os.Args[2])
		if stop(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

func withSpeaker(t *testing.T) Programs {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return Programs{Speaker: []string{self, "speak"}}
}

// measured checks that each row has numbers of both.
func measured(t *testing.T, rows []Row, err error, want int) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range rows {
		t.Logf("%+v", r)
		if r.Unit == MiB && (r.Ours <= 0 || r.Reference <= 0) || r.Ours < 0 || r.Reference < 0 {
			t.Errorf("not measured: %+v", r)
		}
	}
	if len(rows) != want {
		t.Errorf("%d rows, want %d", len(rows), want)
	}
}

// TestAlone takes the engine alone and BIRD through small runs, with one peer and with three.
func TestAlone(t *testing.T) {
	t.Parallel()
	log := func(s string) { t.Log(s) }
	rows, err := MeasureAlone(t.Context(), withSpeaker(t), []int{2000}, log)
	measured(t, rows, err, 4)
	rows, err = MeasureReflectorAlone(t.Context(), withSpeaker(t), []Reflection{{Clients: 3, Prefixes: 200}}, log)
	measured(t, rows, err, 3)
}

// TestChurn takes all reflectors through a moment of changes.
func TestChurn(t *testing.T) {
	t.Parallel()
	p := withSpeaker(t)
	p.Dir = programs(t)
	rows, err := MeasureChurn(t.Context(), p, Churn{Clients: 3, Prefixes: 20, PerSecond: 200, For: 500 * time.Millisecond}, func(s string) { t.Log(s) })
	measured(t, rows, err, 8)
	for _, r := range rows {
		if r.Unit == Milliseconds && r.Ours == 0 && r.What[len(r.What)-3:] != "CPU" {
			t.Errorf("no change came: %+v", r)
		}
	}
}

// TestReadChange reads what a reflector sends of a change, and refuses what is cut off.
func TestReadChange(t *testing.T) {
	t.Parallel()
	// Nothing withdrawn, an attribute of two bytes' length, MED 258, 20.0.0.64/26.
	msg := []byte{0, 0, 0, 15, 0x50, 2, 0, 4, 1, 2, 3, 4, 0x80, 4, 4, 0, 0, 1, 2, 26, 20, 0, 0, 64}
	if med, list, err := readChange(msg); med != 258 || !slices.Equal(list, []int{1}) || err != nil {
		t.Errorf("MED %d, %v, %v", med, list, err)
	}
	for n := range len(msg) {
		if _, list, err := readChange(msg[:n]); err == nil && n != len(msg)-5 {
			t.Errorf("cut after %d bytes: %v, no error", n, list)
		}
	}
}
