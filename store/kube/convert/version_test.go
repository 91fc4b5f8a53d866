package convert

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/printer"
	"go/token"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

var update = flag.Bool("update", false, "record in testdata/version.json what Version stands for")

// record is testdata/version.json: what [Version] stands for.
type record struct {
	Version int `json:"version"`
	// Read has the digests of what Read made of each object in testdata, by those of the
	// objects.
	Read map[string]string `json:"read"`
	// Source is the digest of this package without its tests and comments, and of the
	// versions of the modules that the types of API objects are from.
	Source string `json:"source"`
}

// TestVersion: Read makes of each object in testdata what it made when Version was given
// its number, and a change of how it does so is not overlooked, for no file of testdata
// may show it. Two programs with one number go on from each other's state.
func TestVersion(t *testing.T) {
	t.Parallel()
	const file = "testdata/version.json"
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var was record
	if err := json.Unmarshal(text, &was); err != nil {
		t.Fatal(err)
	}
	is := record{Version: Version, Read: readAll(t), Source: sourceDigest(t)}
	if is.Version < was.Version {
		t.Fatalf("Version is %d and was %d: a number is used once", is.Version, was.Version)
	}
	if is.Version == was.Version {
		for object, made := range is.Read {
			if before, ok := was.Read[object]; ok && before != made {
				t.Fatalf("Read makes something else of an object in testdata (sha256 %s): raise Version, and run this test with -update", object)
			}
		}
	}
	if *update {
		text, err := json.MarshalIndent(is, "", "  ")
		if err == nil {
			err = os.WriteFile(file, append(text, '\n'), 0o644) //nolint:gosec // a file of the repository
		}
		if err != nil {
			t.Fatal(err)
		}
		return
	}
	if is.Source != was.Source {
		t.Error("the program that reads objects is another: if it makes anything else of any object, raise Version; then run this test with -update")
	}
	if len(is.Read) != len(was.Read) || is.Version != was.Version {
		t.Error("Version or testdata is another: run this test with -update")
	}
}

// readAll returns the digests of what Read makes of the objects in testdata, by theirs.
func readAll(t *testing.T) map[string]string {
	t.Helper()
	files, err := filepath.Glob("testdata/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatalf("no files: %v", err)
	}
	out := make(map[string]string, len(files))
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var g golden
		if err := yaml.Unmarshal(text, &g); err != nil {
			t.Fatal(err)
		}
		var head struct{ Kind, APIVersion string }
		if err := json.Unmarshal(g.API, &head); err != nil {
			t.Fatal(err)
		}
		o, err := source(t, g.Group, g.Kind, head.APIVersion, head.Kind).Read(g.API)
		made := fmt.Sprintf("%s %t %t %s", o.Key.Path(), o.Marked, err != nil, o.Raw)
		out[digest([]byte(string(g.Group)+" "+string(g.Kind)+" "+string(g.API)))] = digest([]byte(made))
	}
	return out
}

func digest(b []byte) string { return fmt.Sprintf("%x", sha256.Sum256(b))[:16] }

// typeModules are those that the types of API objects are from, and how they are read.
const typeModules = `(?m)^\s*(github\.com/projectcalico/api|k8s\.io/api|k8s\.io/apimachinery|sigs\.k8s\.io/network-policy-api) v\S+`

func sourceDigest(t *testing.T) string {
	t.Helper()
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	var all bytes.Buffer
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") || file == "version.go" {
			continue
		}
		set := token.NewFileSet()
		f, err := parser.ParseFile(set, file, nil, parser.SkipObjectResolution) // without comments
		if err == nil {
			err = printDecls(&all, f)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	mod, err := os.ReadFile("../../../go.mod")
	if err != nil {
		t.Fatal(err)
	}
	modules := regexp.MustCompile(typeModules).FindAll(mod, -1)
	if len(modules) != strings.Count(typeModules, "|")+1 {
		t.Fatalf("of the modules of types go.mod has %q", modules)
	}
	for _, m := range modules {
		all.Write(bytes.TrimSpace(m))
	}
	return digest(all.Bytes())
}

// printDecls writes the declarations of a file: where their lines break says nothing.
func printDecls(w io.Writer, f *ast.File) error {
	for _, d := range f.Decls {
		// Without positions the printer breaks lines as it would anywhere.
		if err := printer.Fprint(w, token.NewFileSet(), d); err != nil {
			return err
		}
	}
	return nil
}
