"""One suite for every store, tier and transport driver, on real servers and disks."""
