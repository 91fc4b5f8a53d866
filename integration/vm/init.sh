#!/bin/dash
# The first process of the test machine. It sets up what a test expects of a
# Linux host, and runs the command.
export PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TERM=dumb

# The mount namespace of a service takes pivot_root(2), which refuses the root
# that the kernel begins with: systemd gets another mount of the same.
if [ -e /etc/vm/command.service ] && [ "$1" != again ]; then
	mount --bind / /mnt && cd /mnt && mount --move . / && exec chroot . /init again
fi

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

if [ -e /etc/vm/command.service ]; then
	units=/run/systemd/system
	mkdir -p "$units/multi-user.target.wants"
	sed "s,@PORTS@,$out $err $status," /etc/vm/command.service >"$units/vm-command.service"
	ln -s ../vm-command.service "$units/multi-user.target.wants/"
	exec /lib/systemd/systemd
fi
exec /etc/vm/run "$out" "$err" "$status"
