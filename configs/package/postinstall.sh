#!/bin/sh
# An upgrade restarts the daemon, which takes over what the kernel has: packets
# keep flowing. A first installation starts nothing: the administrator says when.
set -e
[ -d /run/systemd/system ] || exit 0
systemctl daemon-reload
systemctl try-restart routerd.service
