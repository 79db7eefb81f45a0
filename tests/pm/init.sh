#!/bin/busybox sh
# The whole system of the guest: modules, Python's disk, a DAX file system on reserved memory, one program, power off.
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
for module in @MODULES@; do
    insmod "/modules/$module" || echo "GUEST failed: insmod $module"
done
until [ -b /dev/pmem0 ] && [ -b /dev/vda ]; do sleep 0.2; done
mount -t ext4 -o ro /dev/vda /root || echo "GUEST failed: mount /dev/vda"
mount -t proc proc /root/proc
mount -t devtmpfs dev /root/dev
export LD_LIBRARY_PATH=@LIBRARIES@
if [ @ATTEMPT@ = 1 ]; then
    chroot /root /sbin/mkfs.ext4 -q -b 4096 /dev/pmem0 || echo "GUEST failed: mkfs"
fi
mount -t ext4 -o dax=always /dev/pmem0 /root/mnt || echo "GUEST failed: mount /dev/pmem0"
grep ' /root/mnt ' /proc/mounts | sed 's/^/GUEST mounted /'
cd /
PYTHONPATH=/source:/packages PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 \
    chroot /root @PYTHON@ -m tests.pm.guest /mnt/tier @ATTEMPT@ @COUNT@ || echo "GUEST failed: it ended with $?"
umount /root/mnt
poweroff -f
