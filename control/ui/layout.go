package ui

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
)

const (
	// compactFrom is the number of hosts from which on their boxes have no text.
	compactFrom = 40
	// MaxMesh is the number of nodes up to which the sessions of other nodes are drawn: of more it would be a black
	// ball, and all that this host knows of them is that they should be there.
	MaxMesh = 24

	margin   = 24
	gap      = 18 // between boxes
	rackGap  = 96 // between racks: links run there
	title    = 34 // of a rack, above its boxes
	rowWidth = 1100
)

// layOut gives everything its place: peers outside the cluster in a row at the top, below them the racks, in rows of
// about [rowWidth]; in each its hosts in a column, or in as many as make it a square.
func layOut(t *Topology, rackBy map[string]string) {
	t.Compact = len(t.Hosts) >= compactFrom
	w, h := 176, 66
	if t.Compact {
		w, h = 26, 26
	}
	racks := map[string][]int{}
	var outside []int
	for i, host := range t.Hosts {
		if host.Outside {
			outside = append(outside, i)
		} else {
			racks[host.Rack] = append(racks[host.Rack], i)
		}
	}
	y, width := margin, 0
	for at, i := range outside {
		per := max(1, rowWidth/(w+gap))
		t.Hosts[i].Box = Box{X: margin + at%per*(w+gap), Y: margin + at/per*(h+gap), W: w, H: h}
		y, width = t.Hosts[i].Y+h+rackGap*2/3, max(width, t.Hosts[i].X+w)
	}
	x, rowH := margin, 0
	for _, name := range slices.SortedFunc(maps.Keys(racks), compareNatural) {
		list := racks[name]
		slices.SortFunc(list, func(a, b int) int { return compareNatural(t.Hosts[a].Name, t.Hosts[b].Name) })
		cols := 1
		if len(list) > 6 || t.Compact {
			cols = int(math.Ceil(math.Sqrt(float64(len(list)) * float64(h+gap) / float64(w+gap))))
		}
		rows := (len(list) + cols - 1) / cols
		box := Box{W: max(cols*(w+gap)+gap, 160), H: title + rows*(h+gap)}
		if x > margin && x+box.W > rowWidth {
			x, y, rowH = margin, y+rowH+gap*2, 0
		}
		box.X, box.Y = x, y
		t.Racks = append(t.Racks, Rack{Name: name, By: rackBy[name], Box: box})
		for at, i := range list {
			t.Hosts[i].Box = Box{X: x + gap + at%cols*(w+gap), Y: y + title + at/cols*(h+gap), W: w, H: h}
		}
		x, rowH = x+box.W+rackGap, max(rowH, box.H)
		width = max(width, box.X+box.W)
	}
	t.Width, t.Height = width+margin, y+rowH+margin
	boxes := map[string]Box{}
	for _, host := range t.Hosts {
		boxes[host.ID] = host.Box
	}
	for i, l := range t.Links {
		t.Links[i].Path = curve(boxes[l.From], boxes[l.To])
	}
}

// curve is the way between two boxes: from side to side where they are beside each other, from bottom to top where
// one is above the other in another column, and in a bow beside them where both are in one column.
func curve(a, b Box) string {
	if b.X < a.X || b.X == a.X && b.Y < a.Y {
		a, b = b, a
	}
	switch {
	case a.X == b.X && b.Y-(a.Y+a.H) <= gap: // neighbours in a column
		x := a.X + a.W/2
		return fmt.Sprintf("M%d %dL%d %d", x, a.Y+a.H, x, b.Y)
	case a.X == b.X:
		x, y1, y2 := a.X+a.W, a.Y+a.H/2, b.Y+b.H/2
		bow := x + min(20+(y2-y1)/8, rackGap-12)
		return fmt.Sprintf("M%d %dC%d %d %d %d %d %d", x, y1, bow, y1, bow, y2, x, y2)
	case b.X >= a.X+a.W:
		if a.Y+a.H < b.Y-title || b.Y+b.H < a.Y-title { // one is in a row above
			up, low := a, b
			if b.Y < a.Y {
				up, low = b, a
			}
			x1, y1, x2, y2 := up.X+up.W/2, up.Y+up.H, low.X+low.W/2, low.Y
			mid := (y1 + y2) / 2
			return fmt.Sprintf("M%d %dC%d %d %d %d %d %d", x1, y1, x1, mid, x2, mid, x2, y2)
		}
		x1, y1, x2, y2 := a.X+a.W, a.Y+a.H/2, b.X, b.Y+b.H/2
		mid := (x1 + x2) / 2
		return fmt.Sprintf("M%d %dC%d %d %d %d %d %d", x1, y1, mid, y1, mid, y2, x2, y2)
	}
	return fmt.Sprintf("M%d %dL%d %d", a.X+a.W/2, a.Y+a.H/2, b.X+b.W/2, b.Y+b.H/2)
}

// compareNatural orders names as people do: node2 comes before node10.
func compareNatural(a, b string) int {
	for a != "" && b != "" {
		na, ra := digits(a)
		nb, rb := digits(b)
		switch {
		case na != "" && nb != "":
			// The longer number is the larger: zeros in front are rare.
			if c := cmp.Or(cmp.Compare(len(na), len(nb)), cmp.Compare(na, nb)); c != 0 {
				return c
			}
			a, b = ra, rb
		case a[0] != b[0]:
			return cmp.Compare(a[0], b[0])
		default:
			a, b = a[1:], b[1:]
		}
	}
	return cmp.Compare(len(a), len(b))
}

// digits splits a text after the digits that it begins with.
func digits(s string) (number, rest string) {
	i := 0
	for i < len(s) && s[i] >= '0' && s[i] <= '9' {
		i++
	}
	return s[:i], s[i:]
}
