"""Stores and disks that misbehave: a fault proxy before a real S3 server, failing system calls, full disks."""
