package lab

import (
	"context"
	"fmt"
	"os"
	"testing"

	"github.com/routerd/routerd/integration/await"
	"github.com/routerd/routerd/integration/lab/labtest"
)

// The test binary plays routerd and its plugin, and a program that brings a lab
// up, to be killed.
func TestMain(m *testing.M) {
	labUp := func() error {
		_, err := Up(context.Background(), Options{Name: os.Args[1], BinDir: os.Args[2]})
		return err
	}
	if !labtest.Play(map[string]func() error{"lab-up": labUp}) {
		os.Exit(m.Run())
	}
}

func binDir(t *testing.T) string {
	t.Helper()
	return labtest.BinDir(t, "lab-up")
}

// labName returns a name for one test's lab and sees to it that nothing is left
// of it.
func labName(t *testing.T, suffix string) string {
	t.Helper()
	name := fmt.Sprintf("lt%d-%s", os.Getpid(), suffix)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), await.Patience)
		defer cancel()
		if err := Down(ctx, name); err != nil {
			t.Error(err)
		}
		nothingLeft(t, name)
	})
	return name
}

func nothingLeft(t *testing.T, name string) {
	t.Helper()
	labtest.NothingLeft(t, name, dir(name))
}
