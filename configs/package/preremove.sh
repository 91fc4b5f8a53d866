#!/bin/sh
# "remove" is dpkg's word, 0 rpm's. An upgrade leaves the daemon running.
set -e
case "$1" in
remove | 0) ;;
*) exit 0 ;;
esac
[ -d /run/systemd/system ] || exit 0
systemctl disable --now routerd.service
# Routes and rules stay until `routerd cleanup` removes them, which has to run
# before the program is gone; so that is left to the administrator.
