package policy

import (
	"strings"

	"github.com/routerd/routerd/store"
)

// label is one label with its value.
type label struct{ name, value string }

// labels is what selectors see of an endpoint or a network set: what is
// implied, its own, what its profiles lend it, in falling precedence. The maps
// are shared with the store and never written.
type labels struct {
	implied   []label
	own       map[string]string
	inherited []map[string]string
}

func reserved(name string) bool {
	return strings.HasPrefix(name, store.LabelPrefixNamespace) || strings.HasPrefix(name, store.LabelPrefixServiceAccount)
}

// Get implements selector.Labels.
func (l *labels) Get(name string) (string, bool) {
	for _, i := range l.implied {
		if i.name == name {
			return i.value, true
		}
	}
	if v, ok := l.own[name]; ok && !reserved(name) {
		return v, true
	}
	for _, inherited := range l.inherited {
		if v, ok := inherited[name]; ok {
			return v, true
		}
	}
	return "", false
}

// each calls f with every label that [labels.Get] would find, once.
func (l *labels) each(f func(name, value string)) {
	for _, i := range l.implied {
		f(i.name, i.value)
	}
	for name, value := range l.own {
		if !reserved(name) && !l.isImplied(name) {
			f(name, value)
		}
	}
	for n, inherited := range l.inherited {
		for name, value := range inherited {
			if !l.hidden(name, n) {
				f(name, value)
			}
		}
	}
}

func (l *labels) isImplied(name string) bool {
	for _, i := range l.implied {
		if i.name == name {
			return true
		}
	}
	return false
}

// hidden reports whether something of higher precedence than the nth lender
// has the label.
func (l *labels) hidden(name string, n int) bool {
	if l.isImplied(name) {
		return true
	}
	if _, ok := l.own[name]; ok && !reserved(name) {
		return true
	}
	for _, inherited := range l.inherited[:n] {
		if _, ok := inherited[name]; ok {
			return true
		}
	}
	return false
}
