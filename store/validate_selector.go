package store

import (
	"errors"
	"fmt"
	"strings"

	"github.com/routerd/routerd/store/selector"
)

const (
	// maxSelector is the limit that Calico's CRDs set on most selectors.
	maxSelector = 1024

	allSelector = "all()"
)

// globalRule says whether a selector may use global().
type globalRule bool

const (
	noGlobal globalRule = false
	// globalAlone is for the namespaceSelector of a rule, where global() stands
	// for what belongs to no namespace, and must be the whole selector.
	globalAlone globalRule = true
)

func (c *checker) selector(field, s string, global globalRule) {
	if s == "" {
		return
	}
	if len(s) > maxSelector {
		c.add(field, s[:32]+"…", "is %d characters long; at most %d are allowed", len(s), maxSelector)
		return
	}
	if _, err := selector.Parse(s); err != nil {
		message := err.Error()
		if e := (*selector.SyntaxError)(nil); errors.As(err, &e) {
			message = fmt.Sprintf("character %d: %s", e.Offset+1, e.Message)
		}
		c.add(field, s, "is not a selector: %s", message)
		return
	}
	if !mentionsGlobal(s) {
		return
	}
	switch {
	case global == noGlobal:
		c.add(field, s, "global() cannot be used here; use all() or a label")
	case strings.TrimSpace(s) != "global()":
		c.add(field, s, "global() must stand alone")
	}
}

// mentionsGlobal reports whether a selector that parses uses global(),
// outside of its quoted strings.
func mentionsGlobal(s string) bool {
	var quote byte
	for i := range len(s) {
		switch b := s[i]; {
		case quote != 0:
			if b == quote {
				quote = 0
			}
		case b == '\'' || b == '"':
			quote = b
		case strings.HasPrefix(s[i:], "global(") && (i == 0 || !isLabelByte(s[i-1])):
			return true
		}
	}
	return false
}

func isLabelByte(b byte) bool {
	return b >= 'a' && b <= 'z' || b >= 'A' && b <= 'Z' || b >= '0' && b <= '9' || strings.IndexByte("_./-", b) >= 0
}
