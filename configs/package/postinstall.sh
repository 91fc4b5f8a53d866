#!/bin/sh
# An upgrade restarts the daemon, which takes over what the kernel has: packets
# keep flowing. A first installation starts nothing: the administrator says when.
#
# $1 is "configure" or an undoing of dpkg (abort-...), 1 (first) or 2 of rpm.
set -e
[ -d /run/systemd/system ] || exit 0
case "$1" in
configure | 1 | 2) ;;
*) exit 0 ;; # the running daemon is the one that stays
esac
# A unit that is masked, or a daemon that refuses its configuration, is no reason
# to leave the package half installed.
systemctl daemon-reload && systemctl try-restart routerd.service ||
	echo "routerd.service was not restarted: systemctl status routerd" >&2
