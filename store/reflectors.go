package store

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// Annotations of route reflectors that nodes choose among themselves.
const (
	// AnnotationReflectors on the BGPConfiguration named default asks for them: "2", or "2 per LABEL" for so many
	// among the nodes with each value of a label.
	AnnotationReflectors = "routerd.io/reflectors"

	// AnnotationReflects on a Node says that it reflects: "starting", when it is about to, and "true" when it does. Its own
	// host writes it.
	AnnotationReflects = "routerd.io/reflects"

	// AnnotationReflectedBy on a Node lists the reflectors whose routes it has, separated by spaces: each a name, followed
	// by a hyphen if it has lost them again; [ReflectedMesh] says that it has those of the whole mesh. Its own host writes it.
	AnnotationReflectedBy = "routerd.io/reflectedBy"
)

// LabelReflector on a Node, [NeverReflects], keeps it from being chosen.
const (
	LabelReflector = "routerd.io/reflector"
	NeverReflects  = "never"
)

// ReflectedMesh in [AnnotationReflectedBy] stands for the mesh: no node has this name, with a space in it.
const ReflectedMesh = "*"

// maxReflectors bounds how many of a group there may be: each client has a session with each.
const maxReflectors = 16

// Reflectors is what an [AnnotationReflectors] asks for; the zero value is none.
type Reflectors struct {
	Count int
	Per   string // a label's key; empty: Count in all
}

// String is the annotation's form.
func (r Reflectors) String() string {
	if r.Per == "" {
		return strconv.Itoa(r.Count)
	}
	return fmt.Sprintf("%d per %s", r.Count, r.Per)
}

// ParseReflectors reads the value of an [AnnotationReflectors].
func ParseReflectors(value string) (Reflectors, error) {
	count, per, grouped := strings.Cut(value, " per ")
	n, err := strconv.Atoi(count)
	r := Reflectors{n, strings.TrimSpace(per)}
	if err != nil || n < 1 || n > maxReflectors || grouped && (r.Per == "" || strings.ContainsAny(r.Per, " ,")) {
		return Reflectors{}, fmt.Errorf("must be how many reflectors there are to be, 1 to %d, as \"2\" or \"2 per LABEL\"", maxReflectors)
	}
	return r, nil
}

// NodeReflection is what a node says of itself about reflectors.
type NodeReflection struct {
	Reflects bool
	Ready    bool            // it does by now
	By       map[string]bool // reflectors whose routes it has had since they reflect; false: it has lost them again
}

// Equal reports whether two nodes say the same.
func (r NodeReflection) Equal(o NodeReflection) bool {
	return r.Reflects == o.Reflects && r.Ready == o.Ready && maps.Equal(r.By, o.By)
}

// NodeReflectionOf reads a Node's annotations.
func NodeReflectionOf(annotations map[string]string) NodeReflection {
	r := NodeReflection{Ready: annotations[AnnotationReflects] == "true"}
	r.Reflects = r.Ready || annotations[AnnotationReflects] == "starting"
	for name := range strings.FieldsSeq(annotations[AnnotationReflectedBy]) {
		if r.By == nil {
			r.By = map[string]bool{}
		}
		lost := strings.HasSuffix(name, "-") // no name ends so
		r.By[strings.TrimSuffix(name, "-")] = !lost
	}
	return r
}

// SetNodeReflection writes a Node's annotations, and removes those that say nothing. It leaves a map that the node
// shares with others alone.
func SetNodeReflection(n *Node, r NodeReflection) {
	a := maps.Clone(n.Annotations)
	if a == nil {
		a = map[string]string{}
	}
	delete(a, AnnotationReflects)
	delete(a, AnnotationReflectedBy)
	switch {
	case r.Ready:
		a[AnnotationReflects] = "true"
	case r.Reflects:
		a[AnnotationReflects] = "starting"
	}
	var by []string
	for _, name := range slices.Sorted(maps.Keys(r.By)) {
		if !r.By[name] {
			name += "-"
		}
		by = append(by, name)
	}
	if len(by) > 0 {
		a[AnnotationReflectedBy] = strings.Join(by, " ")
	}
	n.Annotations = a
}
