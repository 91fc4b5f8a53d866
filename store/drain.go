package store

// AnnotationDrain on a Node has traffic leave the host before it goes: no address is given to new workloads there, and BGP
// peers are asked to prefer other ways ([DrainShift]), until nothing is advertised any more ([DrainWithdrawn]).
const AnnotationDrain = "routerd.io/drain"

// Drain is how far a host is drained; the zero value: it is not.
type Drain string

// The stages of a drain.
const (
	// DrainShift: what the host advertises carries GRACEFUL_SHUTDOWN and the least LOCAL_PREF (RFC 8326).
	DrainShift Drain = "shift"
	// DrainWithdrawn: it advertises nothing.
	DrainWithdrawn Drain = "withdrawn"
)

// DrainOf returns how far the annotations of a Node have it drained. A value that is not known counts as the first stage: it
// asks for a drain, and takes no route away.
func DrainOf(annotations map[string]string) Drain {
	v, ok := annotations[AnnotationDrain]
	switch {
	case !ok:
		return ""
	case Drain(v) == DrainWithdrawn:
		return DrainWithdrawn
	}
	return DrainShift
}

// drain checks an [AnnotationDrain].
func (c *checker) drain(annotations map[string]string) {
	v, ok := annotations[AnnotationDrain]
	c.reject(ok && Drain(v) != DrainShift && Drain(v) != DrainWithdrawn, "metadata.annotations["+AnnotationDrain+"]", v,
		"must be %q or %q; leave it out for a host in service", DrainShift, DrainWithdrawn)
}
