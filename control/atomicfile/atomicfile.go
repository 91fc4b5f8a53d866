// Package atomicfile writes files in one step: whoever reads a file finds the
// old one or the new one, never a part, whatever dies in between. It uses the
// standard library alone, for the CNI binary links it.
package atomicfile

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// Write makes path a file with that content and mode, in place of what is
// there. Several that write one path at once leave the whole file of one of
// them. When it returns nil the file has reached the disk (fsync(2) of the file
// and then of its directory). Without it what was there stays.
//
// Until then the content is in a file beside it whose name begins with a dot
// and ends in ".tmp", which no program that reads a directory of configurations
// takes for one; it stays there only if the process or the machine dies.
func Write(path string, content []byte, mode fs.FileMode) error {
	if err := write(path, content, mode); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}

func write(path string, content []byte, mode fs.FileMode) error {
	dir := filepath.Dir(path)
	f, err := os.CreateTemp(dir, "."+filepath.Base(path)+".*.tmp")
	if err != nil {
		return err
	}
	_, err = f.Write(content)
	if err == nil {
		err = f.Chmod(mode) // CreateTemp's is 0600, and a umask takes nothing away
	}
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return SyncDir(dir)
}

// Leftovers lists what a [Write] of path left beside it when the process or the
// machine died meanwhile. While somebody writes path, the file may be among them.
func Leftovers(path string) ([]string, error) {
	entries, err := os.ReadDir(filepath.Dir(path))
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil, nil
		}
		return nil, fmt.Errorf("list what is left of writing %s: %w", path, err)
	}
	var list []string
	for _, e := range entries {
		middle, ok := strings.CutPrefix(e.Name(), "."+filepath.Base(path)+".")
		if number, isTemp := strings.CutSuffix(middle, ".tmp"); ok && isTemp && number != "" && strings.Trim(number, "0123456789") == "" {
			list = append(list, filepath.Join(filepath.Dir(path), e.Name()))
		}
	}
	return list, nil
}

// SyncDir has the names in a directory outlast the loss of power, as they are now.
func SyncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
