"""What claims to be a store, or a tier, passes one suite: every driver, on real servers and disks."""
