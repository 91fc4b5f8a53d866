package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/routerd/routerd/integration/lab/ns"
)

// Programs says which programs are measured.
type Programs struct {
	Dir string // where they are

	// Profiles is a directory for profiles of the daemon, of each step: NAME.N.cpu
	// for one slice of time after the other, and NAME.heap at its end. Empty: none.
	Profiles string

	// Speaker is the command by which [Speak] runs in a process of its own; the file is its
	// last argument.
	Speaker []string

	// Against names the speakers to measure beside the daemon; empty: all.
	Against []string
}

// beside returns those of the speakers that are to be measured beside the daemon.
func (p Programs) beside(all []receiver) []receiver {
	if len(p.Against) == 0 {
		return all
	}
	return slices.DeleteFunc(all, func(r receiver) bool { return !slices.Contains(p.Against, r.name) })
}

// profileSlice is the time of one CPU profile: go tool pprof adds up as many as
// it is given, and two of them show what changes with time.
const profileSlice = 2 * time.Second

// profileAddr is where the daemon serves its profiles, in its own namespace.
const profileAddr = "127.0.0.1:9099"

// profile records what the daemon does until stop is called.
func (s *convergenceSpace) profile(ctx context.Context, name string) (stop func() error) {
	if s.profiles == "" {
		return func() error { return nil }
	}
	name = filepath.Join(s.profiles, strings.ReplaceAll(name, " ", "-"))
	slices, cancel := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() {
		// A daemon that has just been started does not serve them yet.
		err := until(ctx, "the daemon serves profiles", func() (bool, error) {
			return s.fetchProfile(ctx, "threadcreate", os.DevNull) == nil, nil
		})
		for n := 0; err == nil && slices.Err() == nil; n++ {
			err = s.fetchProfile(ctx, fmt.Sprintf("profile?seconds=%d", int(profileSlice/time.Second)), fmt.Sprintf("%s.%d.cpu", name, n))
		}
		done <- errors.Join(err, s.fetchProfile(ctx, "heap?gc=1", name+".heap"))
	}()
	return func() error {
		cancel()
		return <-done
	}
}

func (s *convergenceSpace) fetchProfile(ctx context.Context, what, file string) error {
	body, err := ns.Get(ctx, s.rx, "http://"+profileAddr+"/debug/pprof/"+what)
	if err != nil {
		return fmt.Errorf("profile: %w", err)
	}
	return os.WriteFile(file, body, 0o600)
}
