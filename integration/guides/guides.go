// Package guides finds the commands in the documents, for tests that run them as they stand there.
package guides

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// Block is a fenced block of commands in a document.
type Block struct {
	Name   string // the document, and the first command
	ByHand bool   // not run with the others, as its fence says

	Commands []string
}

// Blocks returns the blocks of commands in a document: those of "sh" have nothing else, those of "console" have a prompt
// before them, and what they print.
func Blocks(t *testing.T, doc, text string) (out []Block) {
	t.Helper()
	var b *Block
	lang := ""
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if fence, ok := strings.CutPrefix(line, "```"); ok {
			if b != nil {
				if len(b.Commands) > 0 {
					b.Name = doc + ": " + b.Commands[0]
					out = append(out, *b)
				}
				b = nil
				continue
			}
			words := append(strings.Fields(fence), "")
			lang, b = words[0], &Block{ByHand: slices.Contains(words, "by-hand")}
			continue
		}
		if b == nil || line == "" {
			continue
		}
		root, asRoot := strings.CutPrefix(line, "# ")
		user, asUser := strings.CutPrefix(line, "$ ")
		switch {
		case lang == "sh":
			b.Commands = append(b.Commands, line)
		case lang == "console" && asRoot:
			b.Commands = append(b.Commands, root)
		case lang == "console" && asUser:
			b.Commands = append(b.Commands, user)
		case lang != "console" && strings.HasPrefix(strings.TrimLeft(line, "#$ "), "routerctl "):
			t.Errorf("%s: %q stands in a block of %q: fence it as sh or console, so that it is run", doc, line, lang)
		}
	}
	return out
}

// Commands returns those of the block of a document that begins with a command, for a package in integration.
func Commands(t *testing.T, doc, begin string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "..", "docs", doc))
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range Blocks(t, doc, string(text)) {
		if strings.HasPrefix(b.Commands[0], begin) {
			return strings.Join(b.Commands, "\n")
		}
	}
	t.Fatalf("%s has no block that begins with %q", doc, begin)
	return ""
}
