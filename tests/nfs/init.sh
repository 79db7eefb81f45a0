#!/bin/busybox sh
# The whole system of the guest: modules, network, the folders of the host's Python, the run, one program, power off.
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
for module in @MODULES@; do
    insmod "/modules/$module" || echo "GUEST failed: insmod $module"
done
ifconfig lo 127.0.0.1
ifconfig eth0 10.0.2.15 netmask 255.255.255.0
route add default gw 10.0.2.2
@BEFORE_RUN@

# 10.0.2.2 is QEMU's address for the host's loopback. The options are AWS's recommendation for EFS.
nfs=addr=10.0.2.2,clientaddr=10.0.2.15,vers=4.1,port=@PORT@,hard,noresvport,timeo=600,retrans=2
mkdir -p /root/dev /root/proc /root/tmp /root/run
ln -s usr/lib usr/lib64 usr/bin /root/
number=0
for folder in @FOLDERS@; do
    mkdir -p "/root$folder"
    mount -t nfs4 -o "$nfs,ro,nocto,actimeo=600" "10.0.2.2:/folder$number" "/root$folder" ||
        echo "GUEST failed: mount $folder"
    number=$((number + 1))
done
mount -t nfs4 -o "@RUN_OPTIONS@" @RUN_SOURCE@ /root/run || echo "GUEST failed: mount /run"
mount -t proc proc /root/proc
mount -t devtmpfs dev /root/dev
cat /proc/mounts | grep ' /root/run ' | sed 's/^/GUEST mounted /'
cd /
PYTHONPATH=@SOURCE@ PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 HOME=/tmp \
    chroot /root @PYTHON@ -m tests.nfs.guest @ARGUMENTS@ || echo "GUEST failed: the program ended with $?"
umount /root/run
poweroff -f
