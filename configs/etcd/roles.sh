#!/bin/sh
# Makes roles of etcd for the hosts of a cluster, each with no more than it needs,
# and a user for each host. docs/security.md says what one of them can still do.
#
#   roles.sh NODE...              roles and users; a user's password is read from a line
#                                 of standard input, in the order of the nodes
#   roles.sh --first NODE         lets NODE make what a cluster has once: run it before
#                                 the first host starts
#   roles.sh --first-done NODE    takes that away, when the first host is ready
#   roles.sh --kubernetes NODE... lets these bring what Kubernetes' API says into etcd: all that have
#                                 kubernetes.enabled, for any of them may come to do it
#
# It changes etcd with etcdctl, whose environment says where and as whom
# (ETCDCTL_ENDPOINTS, ETCDCTL_USER, ...), and may be run again. It does not switch
# authentication on: make the user root first (`etcdctl user add root`,
# `etcdctl user grant-role root root`), then `etcdctl auth enable`.
set -eu
export ETCDCTL_API=3
# A store with much to do takes its time for one of so many changes: half of them are no use.
export ETCDCTL_COMMAND_TIMEOUT="${ETCDCTL_COMMAND_TIMEOUT:-1m}"

resources=/calico/resources/v3/projectcalico.org
ipam=/calico/ipam/v2
# What is brought here of Kubernetes' Services: each kind is watched by itself.
services="/routerd/v1/services/ /routerd/v1/endpointslices/ /routerd/v1/servicecidrs/"

# grant ROLE read|readwrite KEY [--prefix]
grant() {
	etcdctl role grant-permission "$@" >/dev/null
}

# role NAME makes a role, if it is not there.
role() {
	etcdctl role get "$1" >/dev/null 2>&1 || etcdctl role add "$1" >/dev/null
}

# Every host reads all that Calico's tools know, and one watch is of all of it.
# It writes addresses of any host, since leaks are freed and empty blocks taken over by whoever
# finds them, and endpoints and their network's profile, whose keys do not begin with a host.
common() {
	role routerd-node
	grant routerd-node read /calico/ --prefix=true
	for prefix in $ipam/assignment/ $ipam/host/ $ipam/handle/ $resources/workloadendpoints/ $resources/profiles/ /routerd/v1/elections/ /routerd/v1/questions/; do
		grant routerd-node readwrite "$prefix" --prefix=true
	done
	for prefix in /routerd/v1/secrets/ /routerd/v1/incarnations/ /routerd/v1/presences/ /routerd/v1/unconfirmed/ $services; do
		grant routerd-node read "$prefix" --prefix=true
	done

	role routerd-first
	for prefix in $resources/clusterinformations/ $resources/bgpconfigurations/ $resources/felixconfigurations/ $resources/tiers/ $resources/ippools/ \
		/routerd/v1/secrets/; do
		grant routerd-first readwrite "$prefix" --prefix=true
	done
}

# kubernetes makes the role of hosts that bring what Kubernetes says into etcd. The keys of policies begin with
# their namespaces, and those of Nodes with nothing that would tell which Kubernetes has.
kubernetes() {
	role routerd-kubernetes
	for prefix in $resources/networkpolicies/ $resources/globalnetworkpolicies/kcnp. $resources/nodes/ $services; do
		grant routerd-kubernetes readwrite "$prefix" --prefix=true
	done
}

# own NODE: what is of this host alone.
own() {
	role "routerd-node-$1"
	for key in "$resources/nodes/$1" "$resources/felixconfigurations/node.$1" "/routerd/v1/presences/$1" "/routerd/v1/incarnations/$1"; do
		grant "routerd-node-$1" readwrite "$key"
	done
	if ! etcdctl user get "$1" >/dev/null 2>&1; then
		IFS= read -r password
		printf '%s\n' "$password" | etcdctl user add "$1" --interactive=false >/dev/null
	fi
	etcdctl user grant-role "$1" routerd-node >/dev/null
	etcdctl user grant-role "$1" "routerd-node-$1" >/dev/null
}

case ${1-} in
'' | -h | --help)
	sed -n '2,/^set/{/^set/!s/^# \{0,1\}//p;}' "$0"
	;;
--first)
	etcdctl user grant-role "$2" routerd-first >/dev/null
	;;
--first-done)
	etcdctl user revoke-role "$2" routerd-first >/dev/null
	;;
--kubernetes)
	kubernetes
	shift
	for node; do
		etcdctl user grant-role "$node" routerd-kubernetes >/dev/null
	done
	;;
*)
	common
	for node; do
		own "$node"
	done
	;;
esac
