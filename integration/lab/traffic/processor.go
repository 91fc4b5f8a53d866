package traffic

import (
	"fmt"
	"runtime"

	"golang.org/x/sys/unix"
)

// toOneProcessor moves the goroutine to the first processor that it may use, on
// a thread that ends with it.
func toOneProcessor() error {
	runtime.LockOSThread() // never unlocked
	var may, one unix.CPUSet
	if err := unix.SchedGetaffinity(0, &may); err != nil {
		return fmt.Errorf("get the processors of a thread: %w", err)
	}
	first := 0
	for !may.IsSet(first) {
		first++
	}
	one.Set(first)
	if err := unix.SchedSetaffinity(0, &one); err != nil {
		return fmt.Errorf("move a thread to processor %d: %w", first, err)
	}
	return nil
}
