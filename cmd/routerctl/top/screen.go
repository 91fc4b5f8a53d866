package top

import (
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode/utf8"
)

// Style is how a line stands out on a terminal.
type Style int

// The styles.
const (
	Plain Style = iota
	Title
	Heading
	Bad
	Warn
)

// Line is a line of the screen.
type Line struct {
	Text  string
	Style Style
}

// Screen is what the user has chosen, and how much room there is.
type Screen struct {
	Width, Height int // characters; 0: as much as there is to show
	Order         string
	Reverse       bool
	Devices       string
	Top           int    // the first host that is shown
	Note          string // of the last try to ask
	Now           time.Time
}

// Help says what the keys do.
const Help = "q quit  s sort by next column  S by previous  r reverse  d devices  ↑↓ scroll  space now"

// reasonsShown is how many lines below the table say why hosts are not ready.
const reasonsShown = 6

// Keys applies what was typed. It reports whether the user quits, and whether he wants the hosts asked now.
func (s *Screen) Keys(typed string) (quit, now bool) {
	for typed != "" {
		r, n := utf8.DecodeRuneInString(typed)
		switch {
		case strings.HasPrefix(typed, "\x1b[A"), strings.HasPrefix(typed, "\x1bOA"):
			r, n = 'k', 3
		case strings.HasPrefix(typed, "\x1b[B"), strings.HasPrefix(typed, "\x1bOB"):
			r, n = 'j', 3
		case strings.HasPrefix(typed, "\x1b"):
			return quit, now // of another key, whose length is its own
		}
		typed = typed[n:]
		switch r {
		case 'q', 'Q':
			quit = true
		case 's':
			s.Order = next(Orders(), s.Order, 1)
		case 'S':
			s.Order = next(Orders(), s.Order, -1)
		case 'r':
			s.Reverse = !s.Reverse
		case 'd':
			s.Devices = next(Devices(), s.Devices, 1)
		case 'j':
			s.Top++
		case 'k':
			s.Top = max(0, s.Top-1)
		case ' ':
			now = true
		}
	}
	return quit, now
}

func next(list []string, of string, by int) string {
	return list[(slices.Index(list, of)+by+len(list))%len(list)]
}

// Draw lays a view out. It sorts its hosts.
func (s *Screen) Draw(v View) []Line {
	Sort(v.Hosts, s.Order, s.Devices, s.Reverse)
	lines := []Line{{s.summary(v), Title}}
	for _, u := range v.Unknown {
		lines = append(lines, Line{"not examined: " + u, Warn})
	}
	if s.Note != "" {
		lines = append(lines, Line{s.Note, Bad})
	}
	reasons := s.reasons(v)
	table := s.table(v)
	if s.Height > 0 {
		room := max(1, s.Height-len(lines)-len(reasons)-2) // the headings and the keys
		s.Top = max(0, min(s.Top, len(table)-1-room))
		end := min(len(table), 1+s.Top+room)
		table = append(table[:1:1], table[1+s.Top:end]...)
	}
	lines = append(append(lines, table...), reasons...)
	if s.Height > 0 {
		lines = append(lines[:min(len(lines), max(0, s.Height-1))], Line{Help, Plain})
	}
	for i := range lines {
		lines[i].Text = cut(lines[i].Text, s.Width)
	}
	return lines
}

// cut makes text fit.
func cut(text string, width int) string {
	if width <= 0 || utf8.RuneCountInString(text) <= width {
		return text
	}
	return string([]rune(text)[:width])
}

func (s *Screen) summary(v View) string {
	count := map[string]int{}
	var up, total uint32
	for _, h := range v.Hosts {
		count[h.State]++
		up, total = up+h.Sessions.Up, total+h.Sessions.Total
	}
	var parts []string
	for _, st := range slices.Backward(states()) {
		if count[st] > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", count[st], st))
		}
	}
	return fmt.Sprintf("%s  from %s  hosts: %s  sessions: %d of %d up  %s, by %s", s.Now.Format(time.TimeOnly), v.Node, strings.Join(parts, ", "), up, total, s.Devices, s.Order)
}

func (s *Screen) table(v View) []Line {
	rows := [][]string{{"HOST", "STATE", "SESSIONS", "PODS", "RX", "TX", "PPS", "DROPS", "DENIED", "CPU", "MEM"}}
	for _, h := range v.Hosts {
		rx, tx, pps := "-", "-", "-"
		if r, ok := h.Rates[s.Devices]; ok {
			rx, tx, pps = amount(r.ReceivedBits, "b"), amount(r.SentBits, "b"), amount(r.packets(), "")
		}
		cpu, mem, sessions, pods := "-", "-", "-", "-"
		if h.CPU != nil {
			cpu = fmt.Sprintf("%.1f%%", *h.CPU)
		}
		if h.State != Absent && h.State != NoAnswer {
			mem, sessions, pods = amount(float64(h.Memory), "B"), fmt.Sprintf("%d/%d", h.Sessions.Up, h.Sessions.Total), fmt.Sprint(h.Workloads)
		}
		rows = append(rows, []string{h.Node, h.State, sessions, pods, rx, tx, pps, rate(h.Dropped), rate(h.Denied), cpu, mem})
	}
	widths := make([]int, len(rows[0]))
	for _, r := range rows {
		for i, c := range r {
			widths[i] = max(widths[i], utf8.RuneCountInString(c))
		}
	}
	var out []Line
	for i, r := range rows {
		var b strings.Builder
		for j, c := range r {
			space := strings.Repeat(" ", widths[j]-utf8.RuneCountInString(c))
			if j < 2 {
				b.WriteString(c + space + "  ")
			} else {
				b.WriteString(space + c + "  ")
			}
		}
		l := Line{Text: strings.TrimRight(b.String(), " ")}
		if i == 0 {
			l.Style = Heading
		} else {
			l.Style = styleOf(v.Hosts[i-1].State)
		}
		out = append(out, l)
	}
	return out
}

func styleOf(state string) Style {
	switch state {
	case Ready:
		return Plain
	case Impaired:
		return Warn
	}
	return Bad
}

// reasons says of the worst hosts why they are not ready.
func (s *Screen) reasons(v View) []Line {
	hosts := slices.Clone(v.Hosts)
	Sort(hosts, "state", s.Devices, false)
	var out []Line
	more := 0
	for _, h := range hosts {
		for _, r := range h.Reasons {
			if len(out) == reasonsShown {
				more++
				continue
			}
			out = append(out, Line{h.Node + ": " + r, styleOf(h.State)})
		}
	}
	if more > 0 {
		out = append(out, Line{fmt.Sprintf("and %d more: routerctl top --once -o json", more), Plain})
	}
	if len(out) > 0 {
		out = append([]Line{{}}, out...)
	}
	return out
}

func rate(p *float64) string {
	if p == nil {
		return "-"
	}
	return amount(*p, "")
}

// amount is a number with a prefix of the SI.
func amount(n float64, unit string) string {
	prefixes := []string{"", "k", "M", "G", "T"}
	i := 0
	for n >= 999.95 && i < len(prefixes)-1 {
		n, i = n/1000, i+1
	}
	if i == 0 && n >= 10 || n == 0 {
		return fmt.Sprintf("%.0f%s", n, unit)
	}
	return fmt.Sprintf("%.1f%s%s", n, prefixes[i], unit)
}
