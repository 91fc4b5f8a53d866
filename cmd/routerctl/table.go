package main

import (
	"fmt"
	"io"
	"strings"
	"unicode/utf8"
)

// columnGap is what `calicoctl get` leaves between columns.
const columnGap = 3

// printTable writes columns set apart by spaces, as `calicoctl get` does, but
// without spaces at the ends of lines.
func printTable(w io.Writer, head []string, rows [][]string) error {
	return printRows(w, append([][]string{head}, rows...), tableWidths(head, rows))
}

// tableWidths returns the widths of a table's columns.
func tableWidths(head []string, rows [][]string) []int {
	widths := make([]int, len(head))
	for _, l := range append([][]string{head}, rows...) {
		for i, c := range l {
			widths[i] = max(widths[i], utf8.RuneCountInString(asPrinted(c)))
		}
	}
	return widths
}

// printRows writes rows with columns so wide at least.
func printRows(w io.Writer, rows [][]string, widths []int) error {
	var b strings.Builder
	for _, l := range rows {
		var line strings.Builder
		for i, c := range l {
			c = asPrinted(c)
			line.WriteString(c + strings.Repeat(" ", max(0, widths[i]-utf8.RuneCountInString(c))+columnGap))
		}
		b.WriteString(strings.TrimRight(line.String(), " ") + "\n")
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// printBox writes a table in a frame, as `calicoctl node status` and
// `calicoctl ipam show` do: headings in the middle, columns of bare numbers to
// the right, others to the left.
func printBox(w io.Writer, head []string, rows [][]string) error {
	widths := make([]int, len(head))
	numeric := make([]bool, len(head))
	for i, h := range head {
		widths[i], numeric[i] = utf8.RuneCountInString(h), len(rows) > 0
		for _, r := range rows {
			widths[i] = max(widths[i], utf8.RuneCountInString(asPrinted(r[i])))
			numeric[i] = numeric[i] && isNumber(r[i])
		}
	}
	var b strings.Builder
	rule := func() {
		for _, n := range widths {
			b.WriteString("+" + strings.Repeat("-", n+2))
		}
		b.WriteString("+\n")
	}
	rule()
	for i, h := range head {
		space := widths[i] - utf8.RuneCountInString(h)
		fmt.Fprintf(&b, "| %s%s%s ", strings.Repeat(" ", space/2), h, strings.Repeat(" ", space-space/2))
	}
	b.WriteString("|\n")
	rule()
	for _, r := range rows {
		for i, c := range r {
			c = asPrinted(c)
			space := strings.Repeat(" ", widths[i]-utf8.RuneCountInString(c))
			if numeric[i] {
				fmt.Fprintf(&b, "| %s%s ", space, c)
			} else {
				fmt.Fprintf(&b, "| %s%s ", c, space)
			}
		}
		b.WriteString("|\n")
	}
	rule()
	_, err := io.WriteString(w, b.String())
	return err
}

func isNumber(s string) bool {
	return s != "" && strings.Trim(s, "0123456789.e+") == ""
}
