#!/bin/sh
# The first process of a host: its file systems, its metadata service, its sshd. When it ends, all of the host ends.
#   boot.sh NAME ADDRESS DIRECTORY PYTHON      stdin: what the metadata service is to say
set -eu
name=$1 address=$2 directory=$3 python=$4
hostname "$name"
ip link set lo up
ip addr replace 169.254.169.254/32 dev lo
# Memory and disk of its own, empty whenever it boots.
for place in /dev/shm /run /mnt; do mount -t tmpfs tmpfs "$place"; done
mkdir -p /run/sshd /mnt/tmp /mnt/home
mount --bind "$directory/names" /etc/hosts
exec 3<&0
"$python" -m tests.support.fake_metadata 169.254.169.254 80 <&3 &
/usr/sbin/sshd -D -e -f "$directory/sshd-$name" -o "ListenAddress=$address" 2>>"$directory/sshd-$name.log" &
wait
