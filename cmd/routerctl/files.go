package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/pflag"

	"github.com/routerd/routerd/store"
	"github.com/routerd/routerd/store/manifest"
)

// input is the manifests that a command line names.
type input struct {
	files     []string
	recursive bool   // manifests below a directory's directories too
	namespace string // of objects that give none
	skipEmpty bool   // no object is no error
	// parse reads one manifest; nil: as resources.
	parse func(name string, r io.Reader) ([]manifest.Document, error)
}

// flags adds the flags that fill it.
func (i *input) flags(f *pflag.FlagSet) {
	i.fileFlags(f)
	namespaceFlag(f, &i.namespace)
	f.BoolVar(&i.skipEmpty, "skip-empty", false, "ignore manifests without any resource")
}

// fileFlags adds those of which files are meant.
func (i *input) fileFlags(f *pflag.FlagSet) {
	f.StringArrayVarP(&i.files, "filename", "f", nil, "manifest, directory of manifests, or - for standard input; repeatable")
	f.BoolVarP(&i.recursive, "recursive", "R", false, "descend into subdirectories")
}

// none says that the command line names no manifest; nil: it does.
func (i *input) none(v verb, args []string) error {
	if len(args) > 0 {
		return usagef("%s takes manifests by -f, not %q", v, args[0])
	}
	if len(i.files) == 0 {
		return usagef("%s: name a manifest with -f FILE, a directory with -f DIR, or - for standard input", v)
	}
	return nil
}

// read reads every file, every manifest in every directory, and
// standard input for "-". It reports what is wrong with any of them in one
// error, and then returns no document. Unknown fields alone are left to the
// caller, for the stored objects may have them.
func (i input) read(stdin io.Reader) ([]manifest.Document, error) {
	names := i.files
	var docs []manifest.Document
	var errs, slips []error // slips: unknown fields too, in the input's order
	for _, name := range names {
		files, err := i.expand(name)
		errs, slips = append(errs, err), append(slips, err)
		for _, f := range files {
			d, err := i.readOne(stdin, f)
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
	if len(docs) == 0 && !i.skipEmpty {
		return nil, fmt.Errorf("%s: no resources given; write at least one document with apiVersion, kind, metadata and spec", names)
	}
	return docs, nil
}

// expand lists the manifests of a directory, in the order of their names. Of its directories it lists them with
// --recursive, as calicoctl and kubectl do.
func (i input) expand(name string) ([]string, error) {
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
	left := "" // a directory that is not looked into
	err = filepath.WalkDir(name, func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && path != name && !i.recursive:
			left = path
			return fs.SkipDir
		case isManifest(d):
			files = append(files, path)
		}
		return nil
	})
	switch {
	case err != nil:
		return nil, fmt.Errorf("read manifests: %w", err)
	case len(files) > 0:
		return files, nil
	case left != "":
		return nil, fmt.Errorf("read manifests: %s holds no .yaml, .yml or .json file, and directories such as %s are read with --recursive (-R)", name, left)
	}
	return nil, fmt.Errorf("read manifests: %s holds no .yaml, .yml or .json file", name)
}

// isManifest reports whether an entry of a directory is read. What Kubernetes makes of a ConfigMap are links.
func isManifest(d fs.DirEntry) bool {
	return (d.Type().IsRegular() || d.Type() == fs.ModeSymlink) && slices.Contains([]string{".yaml", ".yml", ".json"}, strings.ToLower(filepath.Ext(d.Name())))
}

func (i input) readOne(stdin io.Reader, name string) (docs []manifest.Document, err error) {
	parse := i.parse
	if parse == nil {
		parse = func(name string, r io.Reader) ([]manifest.Document, error) { return manifest.ReadIn(i.in(), name, r) }
	}
	if name == "-" {
		return parse("standard input", stdin)
	}
	f, err := os.Open(name)
	if err != nil {
		return nil, fmt.Errorf("read manifest: %w", err)
	}
	defer f.Close() //nolint:errcheck // it was only read
	return parse(name, f)
}

func (i input) in() string { return cmp.Or(i.namespace, store.DefaultName) }

// namespaceFlag adds -n.
func namespaceFlag(f *pflag.FlagSet, to *string) {
	f.StringVarP(to, "namespace", "n", "", "namespace of namespaced resources (default "+store.DefaultName+")")
}
