package main

import (
	"fmt"
	"io"
	"net"
	"slices"

	"github.com/spf13/cobra"

	apiv1 "github.com/routerd/routerd/control/api/v1"
	"github.com/routerd/routerd/control/trace"
)

func (a *app) traceCommand() *cobra.Command {
	req := &apiv1.TraceRequest{}
	var output string
	c := &cobra.Command{
		Use:   "trace --from A --to B",
		Short: "Trace a packet and its answer across hosts and find the first fault",
		Long: `Trace a packet from A to B, and the answer, step by step on the hosts of both ends:
the workload, the rules for the packet, routerd's route and what the kernel does,
devices, tunnel entries, the next hop on the underlay, and whether packets get through
the tunnel. Each host is asked over the datastore and answers from the state of its
kernel. Nothing is changed and the packet itself is not sent; the hosts send a few
probes, as doctor does.

A and B are workloads anywhere in the cluster (given by NAMESPACE/POD, container,
resource or address), nodes, "host" for this host, or any address. By default the
packet is an echo request, or TCP if there is a port, and as large as the sender's
device allows.

With the Kubernetes datastore, B may also be a Service: NAMESPACE/NAME (prefixed by
service/ if a pod has that name), or its cluster, external or load balancer's address.
The packet is followed to the first endpoint that it may be sent to from A, or with
--each to every one. From outside the cluster it enters by a node that advertises the
address. B may also be NODE:PORT, or a node with --port: if a Service has that node
port (NodePort), the packet is followed to the node, and from there to an endpoint.

With --probe, also send such a packet from A, four times within two seconds. A must be
this host or one of its workloads. The hosts of both ends watch for the packet and its
answer, and show the devices by which they came and left, and where they were last
seen. The packet is a TCP SYN, an empty datagram, an SCTP INIT or an echo request,
with a source port or identifier of its own. To a Service or node port it is sent as a
client would send it, and the hosts of the endpoints watch; a datagram then has four
bytes that identify it. A host watches with a packet socket: no rule is written, and
nothing remains if a daemon or routerctl is killed.

The first line says whether the path is whole, broken or unknown. If it is broken, the
line names the host, the check, the first fault, and the command that fixes it. The
exit code is 0 if the path is whole, and 1 otherwise.`,
		Example: `  routerctl trace --from default/client --to default/web-0 --protocol tcp --port 80
  routerctl trace --from default/client --to 192.168.12.5 --size 1400
  routerctl trace --from default/client --to default/web-0 --port 80 --probe
  routerctl trace --from default/client --to service/default/web --port 80 --each
  routerctl trace --from 198.51.100.7 --to node2:30080
  routerctl trace --from default/client --to node2:30080 --probe
  routerctl trace --from host --to default/web-0 -o json`,
		Args: func(cmd *cobra.Command, args []string) error {
			if err := cobra.NoArgs(cmd, args); err != nil {
				return err
			}
			if req.From == "" || req.To == "" {
				return usagef("trace: --from and --to are required: a workload, a node, host, or an address")
			}
			return nil
		},
	}
	outputFlag(c, &output)
	f := c.Flags()
	f.StringVar(&req.From, "from", "", "source of the packet")
	f.StringVar(&req.To, "to", "", "destination of the packet")
	f.StringVar(&req.Protocol, "protocol", "", "protocol: tcp, udp, icmp, icmpv6, sctp, udplite or a number (default icmp, tcp with --port)")
	f.StringVar(&req.Protocol, "proto", "", "same as --protocol")
	f.Uint32Var(&req.Port, "port", 0, "destination port")
	f.Uint32Var(&req.SourcePort, "source-port", 0, "source port")
	f.BoolVar(&req.Probe, "probe", false, "also send such a packet and show where it is seen")
	f.BoolVar(&req.Each, "each", false, "follow a packet to every endpoint of a Service that may be chosen")
	f.Uint32Var(&req.Size, "size", 0, "size of the packet in bytes, with its IP header")
	c.RunE = func(cmd *cobra.Command, _ []string) error {
		if err := checkOutput(output); err != nil {
			return err
		}
		ctx, cancel := a.withDeadline(cmd)
		defer cancel()
		var r *apiv1.TraceResponse
		err := ask(ctx, a.daemon, apiv1.NewDoctorClient, func(d apiv1.DoctorClient) (err error) {
			r, err = d.Trace(ctx, req)
			return err
		})
		if err != nil {
			return explain(ctx, err)
		}
		if output != "table" {
			err = printProto(a.stdout, r, output)
		} else {
			err = printTrace(a.stdout, r)
		}
		if err == nil && r.GetVerdict() != trace.Whole {
			err = exitCode(1)
		}
		return err
	}
	return c
}

func printTrace(w io.Writer, r *apiv1.TraceResponse) error {
	first := fmt.Sprintf("%s   %s", r.GetVerdict(), r.GetPacket())
	if f := r.GetFault(); f != nil {
		first = fmt.Sprintf("%s   %s   %s   %s; cure: %s", r.GetVerdict(), dash(f.GetNode()), f.GetCheck(), f.GetWhat(), f.GetCure())
	}
	fmt.Fprintln(w, first)
	printUnknown(w, r)
	ways := r.GetWays()
	if len(ways) == 1 {
		printUnknown(w, ways[0])
	}
	if err := printService(w, r.GetService()); err != nil {
		return err
	}
	for _, way := range ways {
		show := printHops
		if len(ways) > 1 {
			fmt.Fprintln(w)
			show = printTrace
		}
		if err := show(w, way); err != nil {
			return err
		}
	}
	return printHops(w, r)
}

func printUnknown(w io.Writer, r *apiv1.TraceResponse) {
	for _, u := range r.GetUnknown() {
		fmt.Fprintf(w, "not examined: %s\n", u)
	}
}

// printHops prints the steps of a way.
func printHops(w io.Writer, r *apiv1.TraceResponse) error {
	for _, back := range []bool{false, true} {
		title := "there: " + r.GetPacket()
		if back {
			title = "back"
		}
		var rows [][]string
		for _, h := range r.GetHops() {
			if h.GetBack() != back {
				continue
			}
			rows = append(rows, []string{h.GetNode(), h.GetStep().GetName(), h.GetStep().GetWhat()})
			for _, f := range h.GetStep().GetFindings() {
				rows = append(rows, []string{"", "  " + f.GetSeverity(), f.GetCheck() + ": " + f.GetWhat() + "; cure: " + f.GetCure()})
			}
		}
		if rows == nil {
			continue
		}
		fmt.Fprintf(w, "\n%s\n", title)
		if err := printTable(w, []string{"HOST", "STEP", "WHAT"}, rows); err != nil {
			return err
		}
	}
	return printProbe(w, r.GetProbe())
}

// printService prints what a Service does with the packet.
func printService(w io.Writer, s *apiv1.TracedService) error {
	if s == nil {
		return nil
	}
	fmt.Fprintf(w, "\nservice %s: %s\n", s.GetName(), s.GetPolicy())
	if s.GetNodePort() != 0 && s.GetEnters() != "" {
		fmt.Fprintf(w, "port %d of %s: the packet comes in here\n", s.GetNodePort(), s.GetEnters())
	}
	var rows [][]string
	for _, a := range s.GetAnnouncers() {
		how := a.GetPrefix()
		switch {
		case how == "":
			how = "no: " + a.GetReason()
		case a.GetLeaving():
			how += ", its endpoints terminate"
		}
		if a.GetNode() == s.GetEnters() {
			how += ", the packet comes in here"
		}
		rows = append(rows, []string{a.GetNode(), how})
	}
	if rows != nil {
		if err := printTable(w, []string{"HOST", "ANNOUNCES " + s.GetAddress()}, rows); err != nil {
			return err
		}
		fmt.Fprintln(w)
	}
	rows = nil
	for _, e := range s.GetEndpoints() {
		chosen := "may be"
		switch {
		case e.GetNot() != "":
			chosen = "no: " + e.GetNot()
		case e.GetFollowed():
			chosen = "followed"
		}
		rows = append(rows, []string{net.JoinHostPort(e.GetAddress(), fmt.Sprint(e.GetPort())), dash(e.GetPod()), dash(e.GetNode()), chosen})
	}
	if rows == nil {
		return nil
	}
	return printTable(w, []string{"ENDPOINT", "POD", "HOST", "CHOSEN"}, rows)
}

// printProbe prints where a packet that was sent was seen.
func printProbe(w io.Writer, p *apiv1.Probe) error {
	if p == nil {
		return nil
	}
	fmt.Fprintf(w, "\nprobe: %s\n", p.GetResult())
	for _, u := range p.GetUnknown() {
		fmt.Fprintf(w, "not watched: %s\n", u)
	}
	heading := []string{"HOST", "SEEN", "WAY", "DEVICE", "TIMES"}
	translated := slices.ContainsFunc(p.GetSeen(), func(s *apiv1.Sighting) bool { return s.GetSource() != "" })
	if translated {
		heading = append(heading, "FROM", "TO")
	}
	var rows [][]string
	for _, s := range p.GetSeen() {
		way, what := "in", "packet"
		if s.GetOut() {
			way = "out"
		}
		if s.GetBack() {
			what = "answer"
		}
		row := []string{s.GetNode(), what, way, s.GetDevice(), fmt.Sprint(s.GetPackets())}
		if translated {
			row = append(row, s.GetSource(), s.GetDestination())
		}
		rows = append(rows, row)
	}
	if rows == nil {
		return nil
	}
	return printTable(w, heading, rows)
}
