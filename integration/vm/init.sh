#!/bin/dash
# The first process of the test machine. It sets up what a test expects of a
# Linux host, runs the caller's command and reports its exit status on a port
# of its own, which no output of the command can imitate.
export PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TERM=dumb

mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs -o mode=0755 tmpfs /run
mount -t tmpfs -o mode=1777 tmpfs /tmp
mount -t tmpfs -o mode=0755 tmpfs /var
mkdir -p /run/netns /run/lock /var/lib /var/log /var/tmp
ln -sf /run /var/run
ln -sf /proc/self/fd /dev/fd
ln -sf /proc/self/fd/0 /dev/stdin
ln -sf /proc/self/fd/1 /dev/stdout
ln -sf /proc/self/fd/2 /dev/stderr
mount -t debugfs debugfs /sys/kernel/debug 2>/dev/null
mount -t bpf bpf /sys/fs/bpf 2>/dev/null

# The ports first: without them nobody hears of what fails later.
for m in virtio_pci virtio_console; do
	modprobe "$m" || echo "init: modprobe $m: $?"
done
ports() {
	for p in /sys/class/virtio-ports/*; do
		[ -e "$p/name" ] && [ "$(cat "$p/name")" = "$1" ] && echo "/dev/${p##*/}" && return 0
	done
	return 1
}
n=0
until out=$(ports routerd.stdout) && err=$(ports routerd.stderr) && status=$(ports routerd.status); do
	n=$((n + 1))
	if [ "$n" -gt 200 ]; then
		echo "init: the ports of the host did not appear"
		poweroff -f
	fi
	usleep 20000
done
exec 3>"$status"
# Rules ask for these one by one, and each call costs a second here.
modprobe -a nf_conntrack_netlink nfnetlink_log nft_ct nft_log nft_masq nft_nat nft_chain_nat nft_reject_inet >/dev/null 2>&1 &

hostname vm
ip link set lo up
# Forwarding and the like stay as a fresh kernel has them: that routerd sets
# what it needs is one of the things to be tested.
ulimit -n 65536
# The processor is emulated: what it has no time for waits, and is not dropped
# (each network namespace's packets go through this queue at every hop).
echo 20000 >/proc/sys/net/core/netdev_max_backlog

exec 4>"$out" 5>"$err"
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
