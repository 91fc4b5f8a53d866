// Package hostile attacks hosts as a pod, a peer, another node or a bad record of
// the datastore can, in labs of real daemons, and holds what docs/security.md
// promises: a test an attack. By the numbers of that page's list of attacks:
//
//	 1 a host's BGP session   TestPodsKeptFromHosts, TestKeyOfTheMesh, TestKeyBesideOthers
//	 2 parts of blocks        TestPartsOfBlocks
//	 3 a host's interface     TestRecords/interface
//	 4 a host's 127.0.0.1     TestPodsKeptFromHosts
//	 5 a made-up port         TestRecords/port, TestIPIP/port
//	 6 VTEPs, plain packets   TestRecords/vtep, TestIPIP/address
//	 8 tunnel packets         TestTunnelFromOutside, TestPod/tunnels, TestIPIP/outside, TestIPIP/pod
//	 9 ICMP errors            TestPathMTUFromPod
//	10 made-up neighbours     TestPod/neighbour_table
//	12 smaller ones           TestRecords/interface, TestRecords/text, TestPod/sockets, TestPod/connections
//	16 freed addresses        TestRecords/address
//
// TestPod/spoofed_source is of none of them. 7, 11 and 15 are attacks on one daemon, and
// tested in cmd/routerd and the packages which that page names; 13 and 14 are in
// integration/scenarios.
package hostile
