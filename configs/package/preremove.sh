#!/bin/sh
# $1 is "remove", "upgrade" and others of dpkg, 0 (for good) or 1 of rpm. Only a
# removal stops the daemon: an upgrade restarts it when the new one is there.
set -e
case "$1" in
remove | 0) ;;
*) exit 0 ;;
esac
if [ -d /run/systemd/system ]; then
	systemctl disable --now routerd.service ||
		echo "routerd.service was not stopped: systemctl status routerd" >&2
elif command -v systemctl >/dev/null; then
	systemctl disable routerd.service || : # in a tree that is not booted
fi
# `routerd cleanup` has to run before the program is gone, so that is left to the
# administrator.
echo "routerd: routes, devices and rules stay in the kernel until the next boot, and /var/lib/routerd on disk."
