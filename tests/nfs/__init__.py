"""A true NFSv4.1 mount in a QEMU guest whose power is cut: `make nfs`."""
