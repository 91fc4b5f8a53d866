package main

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/routerd/routerd/store/manifest"
)

// readManifests reads every file, every manifest in every directory, and
// standard input for "-". It reports what is wrong with any of them in one
// error, and then returns no document. Unknown fields alone are left to the
// caller, for the stored objects may have them.
func readManifests(stdin io.Reader, names []string) ([]manifest.Document, error) {
	var docs []manifest.Document
	var errs, slips []error // slips: unknown fields too, in the input's order
	for _, name := range names {
		files, err := expand(name)
		errs, slips = append(errs, err), append(slips, err)
		for _, f := range files {
			d, err := readManifest(stdin, f)
			errs, slips = append(errs, err), append(slips, err)
			for _, doc := range d {
				slips = append(slips, doc.CheckUnknown(nil))
			}
			docs = append(docs, d...)
		}
	}
	// Objects given twice within one file are in errs already; then docs has
	// none of that file.
	twice := manifest.Unique(docs)
	if errors.Join(errs...) != nil || twice != nil {
		return nil, errors.Join(append(slips, twice)...)
	}
	if len(docs) == 0 {
		return nil, fmt.Errorf("%s: no resources given; write at least one document with apiVersion, kind, metadata and spec", names)
	}
	return docs, nil
}

// expand lists the manifests of a directory, in the order of their names.
func expand(name string) ([]string, error) {
	if name == "-" {
		return []string{name}, nil
	}
	info, err := os.Stat(name)
	if err != nil {
		return nil, fmt.Errorf("read manifest: %w", err)
	}
	if !info.IsDir() {
		return []string{name}, nil
	}
	var files []string
	err = filepath.WalkDir(name, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() && slices.Contains([]string{".yaml", ".yml", ".json"}, filepath.Ext(path)) {
			files = append(files, path)
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("read manifests: %w", err)
	}
	if len(files) == 0 {
		return nil, fmt.Errorf("read manifests: %s holds no .yaml, .yml or .json file", name)
	}
	return files, nil
}

func readManifest(stdin io.Reader, name string) (docs []manifest.Document, err error) {
	if name == "-" {
		return manifest.Read("standard input", stdin)
	}
	f, err := os.Open(name)
	if err != nil {
		return nil, fmt.Errorf("read manifest: %w", err)
	}
	defer f.Close() //nolint:errcheck // it was only read
	return manifest.Read(name, f)
}
