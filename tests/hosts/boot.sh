#!/bin/sh
# The first process of a host: sets up file systems, metadata service and sshd. When it ends, the whole host ends.
#   boot.sh NAME ADDRESS DIRECTORY PYTHON      stdin: commands for the metadata service
set -eu
name=$1 address=$2 directory=$3 python=$4
hostname "$name"
ip link set lo up
ip addr replace 169.254.169.254/32 dev lo
# Private memory and disk, empty at each boot.
for place in /dev/shm /run /mnt; do mount -t tmpfs tmpfs "$place"; done
mkdir -p /run/sshd /mnt/tmp /mnt/home
mount --bind "$directory/names" /etc/hosts
exec 3<&0
"$python" -m tests.support.fake_metadata 169.254.169.254 80 <&3 &
/usr/sbin/sshd -D -e -f "$directory/sshd-$name" -o "ListenAddress=$address" 2>>"$directory/sshd-$name.log" &
wait
