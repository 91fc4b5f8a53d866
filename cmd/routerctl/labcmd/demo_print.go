package labcmd

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/integration/lab"
)

// printLab shows a lab and who reaches whom in it.
func printLab(ctx context.Context, out io.Writer, l *lab.Lab, nodes []*apiv1.NodeResponse, m lab.Matrix) error {
	var routes strings.Builder
	for _, h := range l.Hosts() {
		text, err := l.Output(ctx, h, "ip", "-4", "route")
		if err != nil {
			return err
		}
		fmt.Fprintf(&routes, "  %s\n", h)
		for line := range strings.Lines(text) {
			// By its number where ip(8) has no directory for further names.
			if strings.Contains(line, " proto routerd ") || strings.Contains(line, " proto 77 ") {
				fmt.Fprintf(&routes, "    %s\n", strings.TrimSpace(line))
			}
		}
	}
	for _, s := range []struct {
		heading string
		t       *table
	}{
		{"Hosts", hostTable(l, nodes)},
		{"BGP sessions", sessionTable(nodes)},
		{"Blocks", blockTable(nodes)},
	} {
		fmt.Fprintln(out, s.heading)
		if err := s.t.print(out, "  "); err != nil {
			return err
		}
		fmt.Fprintln(out)
	}
	fmt.Fprintf(out, "Routes of each host\n%s\n", routes.String())
	asked, answered := m.Pairs()
	fmt.Fprintf(out, "Who reaches whom, round trip in ms: %d of %d pairs\n", answered, asked)
	if err := matrixTable(m).print(out, "  "); err != nil {
		return err
	}
	for _, f := range m.Failures() {
		fmt.Fprintln(out, "  "+f)
	}
	return nil
}

func hostTable(l *lab.Lab, nodes []*apiv1.NodeResponse) *table {
	t := newTable("HOST", "RACK", "ADDRESS", "TUNNEL", "AS", "WORKLOADS", "POD MTU", "READY")
	for i, n := range l.Topology().Nodes {
		r := nodes[i]
		tunnel := "-"
		for _, a := range []string{r.GetIpipTunnelAddress(), r.GetVxlanTunnelAddress()} {
			if a != "" {
				tunnel = a
			}
		}
		ready := "yes"
		if !r.GetHealth().GetReady().GetOk() {
			ready = "no: " + r.GetHealth().GetReady().GetReason()
		}
		t.add(n.Name, n.Rack, r.GetIpv4Address(), tunnel, fmt.Sprint(r.GetAsNumber()), fmt.Sprint(r.GetWorkloads()), fmt.Sprint(r.GetWorkloadMtu()), ready)
	}
	return t
}

func sessionTable(nodes []*apiv1.NodeResponse) *table {
	t := newTable("HOST", "PEER", "TYPE", "STATE", "INFO", "RECEIVED", "ADVERTISED")
	for _, n := range nodes {
		for _, p := range n.GetPeers() {
			t.add(n.GetName(), p.GetAddress(), p.GetType(), p.GetState(), p.GetInfo(), fmt.Sprint(p.GetReceived()), fmt.Sprint(p.GetAdvertised()))
		}
	}
	return t
}

func blockTable(nodes []*apiv1.NodeResponse) *table {
	t := newTable("BLOCK", "HOST", "POOL", "IN USE")
	for _, n := range nodes {
		for _, b := range n.GetBlocks() {
			t.add(b.GetCidr(), n.GetName(), b.GetPool(), fmt.Sprintf("%d of %d", b.GetInUse(), b.GetSize()))
		}
	}
	return t
}

func matrixTable(m lab.Matrix) *table {
	t := newTable(append([]string{"FROM \\ TO"}, m.Places...)...)
	for i, row := range m.Replies {
		cells := []string{m.Places[i]}
		for j, r := range row {
			switch {
			case i == j:
				cells = append(cells, ".")
			case r.OK:
				cells = append(cells, fmt.Sprintf("%.2f", r.RTT.Seconds()*1e3))
			default:
				cells = append(cells, "NONE")
			}
		}
		t.add(cells...)
	}
	return t
}

func (d *demo) summary(results []modeResult, took time.Duration) error {
	if d.asJSON {
		enc := json.NewEncoder(d.out)
		enc.SetIndent("", "  ")
		return enc.Encode(results)
	}
	if d.inVM {
		// The summary is the business of the demo outside.
		line, err := json.Marshal(results)
		if err != nil {
			return fmt.Errorf("print results: %w", err)
		}
		_, err = fmt.Fprintf(d.out, "%s%s\n", trailerMark, line)
		return err
	}
	fmt.Fprintf(d.out, "\n######  Summary, after %.1f s  ######\n\n", took.Seconds())
	t := newTable("ENCAPSULATION", "WHERE", "RESULT", "PAIRS", "UP AFTER", "IN ALL")
	for _, r := range results {
		result := "ok"
		switch {
		case r.Error != "":
			result = "FAILED"
		case !r.ok():
			result = "INCOMPLETE"
		}
		t.add(string(r.Encapsulation), r.Where, result, fmt.Sprintf("%d of %d", r.Answered, r.Asked), seconds(r.Up), seconds(r.Total))
	}
	if err := t.print(d.out, "  "); err != nil {
		return err
	}
	for _, r := range results {
		if r.Error != "" {
			fmt.Fprintf(d.out, "\n%s: %s\n", r.Encapsulation, r.Error)
		}
	}
	return nil
}

func seconds(s float64) string {
	if s == 0 {
		return "-"
	}
	return fmt.Sprintf("%.1f s", s)
}
