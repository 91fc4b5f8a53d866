package group

import "github.com/routerd/routerd/control/bgp/engine/rib"

// segment is messages of the log.
type segment struct {
	data       []byte
	only, skip rib.Peer // None: no such
	gen        uint32   // the earliest of what it says
	waiting    int      // members that have not read it
}

// overhead is what a segment costs beside its messages.
const overhead = 64

// log is what members have yet to read. Segments have numbers that are not used
// again.
type log struct {
	segments []segment
	base     uint64 // number of the first
	size     int
	limit    int
	sinceGen int // bytes since the generation changed
}

func (l *log) end() uint64 { return l.base + uint64(len(l.segments)) }

func (l *log) at(n uint64) *segment { return &l.segments[n-l.base] }

func (l *log) append(s segment) {
	l.segments = append(l.segments, s)
	l.size += len(s.data) + overhead
	l.sinceGen += len(s.data)
}

// trim drops segments that all have read.
func (l *log) trim() {
	n := 0
	for n < len(l.segments) && l.segments[n].waiting == 0 {
		l.size -= len(l.segments[n].data) + overhead
		l.segments[n] = segment{}
		n++
	}
	l.segments = l.segments[n:]
	l.base += uint64(n)
	if len(l.segments) == 0 {
		l.segments = nil
	}
}
