// Package nft is the only writer of the nftables table "inet routerd": it
// carries out rulesets of dataplane/filter in the kernel.
//
//	raw-in         prerouting -300   workloads send from their own addresses; untracked policies
//	pre-dnat-in    prerouting -150   policies before destination NAT
//	dnat-in/-out   -105              floating addresses
//	input-from     input        -6   what a workload sends; host endpoints
//	input-to       input        -5   workloads to their host
//	forward-from   forward      -6   by the interface a packet comes from
//	forward-to     forward      -5   by the interface that it goes to
//	output-to      output       -5   host endpoints
//	virtual-to     output       -5   what IPVS passes on to workloads
//	snat-out       postrouting  95   what leaves the cluster
//
// Each begins by accepting established flows, then looks the interface up in
// a map, which leads to the chain of the endpoint's path. Endpoints with the
// same policies share that chain, paths share the chains of tiers, tiers those
// of policies. A set per selector and family is shared by all rules. So what a
// packet costs does not depend on the number of endpoints, and an endpoint
// that comes is some elements.
//
// Accept in a base chain ends that chain, not the way of the packet: the
// second chain of a hook, and the tables of others, still judge it. Drop is
// final. A workload's interface that nothing is known of carries nothing.
//
// Names of chains and sets say what they are about; rules carry a hash of
// their content in their user data. So a dump tells what differs, and an
// unchanged world causes no write.
//
// Source of the messages: linux/netfilter/nf_tables.h and nfnetlink.h.
package nft
