#!/bin/dash
# run OUT ERR STATUS: runs the caller's command in the test machine, with its
# output on two of the host's ports, and reports its exit status on a third one,
# which no output of the command can imitate.
export PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TERM=dumb

exec 3>"$3" 4>"$1" 5>"$2"
echo "up $(cat /proc/uptime)" >&3
(
	exec 3>&- </dev/null >&4 2>&5 4>&- 5>&-
	. /etc/vm/command
)
echo "exit $?" >&3
cat /etc/vm/end >&4
cat /etc/vm/end >&5
# The host ends the machine when all of that has arrived; what QEMU has not
# passed on would be lost with it. This is for a host that does not listen.
sleep 600
reboot -f
