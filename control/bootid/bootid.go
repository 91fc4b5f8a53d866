// Package bootid tells one boot of the host from another.
package bootid

import (
	"fmt"
	"os"
	"strings"
)

// Read returns the number that the kernel drew when it booted (random(4), boot_id).
func Read() (string, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("read the boot id: %w", err)
	}
	return strings.TrimSpace(string(b)), nil
}
