#!/bin/dash
# What the kernel calls for a module. Busybox takes one for loaded that another
# caller is still setting up, and the kernel then says that it lacks what it is
# about to have. A module may itself ask for one while it is set up, so the
# wait has an end.
/bin/busybox modprobe "$@"
status=$?
n=0
while grep -q ' Loading ' /proc/modules && [ "$n" -lt 300 ]; do
	n=$((n + 1))
	usleep 10000
done
exit "$status"
