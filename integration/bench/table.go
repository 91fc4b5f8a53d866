package bench

import (
	"fmt"
	"io"
	"math"
	"slices"
	"text/tabwriter"
	"time"
)

// Row is one line of the table: what routerd takes beside a reference.
type Row struct {
	What      string
	Ours      float64
	Reference float64
	Against   string // what the reference is; empty: there is none
	Unit      Unit
}

// Unit is what the numbers of a row are.
type Unit uint8

// The units.
const (
	Milliseconds      Unit = iota // less is better
	PerSecond                     // more is better
	MiB                           // less is better
	Apiece                        // so many for each; less is better
	Percent                       // less is better
	GigabitsPerSecond             // more is better
)

// Ratio returns how many times as fast, or as small, routerd is as the
// reference; not a number where there is none.
func (r Row) Ratio() float64 {
	if r.Against == "" {
		return math.NaN()
	}
	if r.Unit != PerSecond && r.Unit != GigabitsPerSecond {
		return r.Reference / r.Ours
	}
	return r.Ours / r.Reference
}

func (u Unit) format(v float64) string {
	switch {
	case math.IsNaN(v) || math.IsInf(v, 0):
		return "–"
	case u == Milliseconds && v < 1:
		return fmt.Sprintf("%.2f ms", v)
	case u == Milliseconds:
		return fmt.Sprintf("%.1f ms", v)
	case u == Apiece:
		return fmt.Sprintf("%.2f", v)
	case u == Percent:
		return fmt.Sprintf("%.2f %%", v)
	case u == GigabitsPerSecond:
		return fmt.Sprintf("%.1f Gb/s", v)
	case u == MiB:
		return fmt.Sprintf("%.0f MiB", v)
	}
	// Three digits: the rest is noise.
	if v >= 1000 {
		p := math.Pow(10, math.Floor(math.Log10(v))-2)
		v = math.Round(v/p) * p
	}
	return fmt.Sprintf("%.0f/s", v)
}

// WriteTable writes the rows as a table.
func WriteTable(w io.Writer, rows []Row) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "WHAT\tROUTERD\tREFERENCE\tTIMES AS FAST\tREFERENCE IS")
	for _, r := range rows {
		ratio := "–"
		if x := r.Ratio(); !math.IsNaN(x) && !math.IsInf(x, 0) {
			ratio = fmt.Sprintf("%.2f", x)
		}
		reference, against := r.Unit.format(r.Reference), r.Against
		if against == "" {
			reference, against = "–", "none at hand"
		}
		fmt.Fprintf(tw, "%s\t%s\t%s\t%s\t%s\n", r.What, r.Unit.format(r.Ours), reference, ratio, against)
	}
	return tw.Flush()
}

// Percentile returns the smallest of the durations that is not smaller than p
// percent of them (the nearest-rank method). p is above 0 and at most 100. Of
// no durations it is zero.
func Percentile(ds []time.Duration, p float64) time.Duration {
	if len(ds) == 0 {
		return 0
	}
	s := slices.Sorted(slices.Values(ds))
	rank := int(math.Ceil(p / 100 * float64(len(s))))
	return s[min(max(rank, 1), len(s))-1]
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
