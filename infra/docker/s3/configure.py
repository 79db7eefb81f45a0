"""Configures an OpenStack Swift with its S3 interface: one device, one replica, four servers. By Swift's own Python:

    S3_KEY=ACCOUNT:NAME S3_SECRET=... configure.py HOME ADDRESS PORT PORT PORT PORT

The ports are those of proxy, account, container and object server. Settings and rings go into HOME/etc, data into
HOME/srv. The proxy has the S3 interface and listens on ADDRESS, the other three listen on the loopback.
docker-compose.yml runs it, and the tests do.
"""

from __future__ import annotations

import getpass
import os
import sys
from pathlib import Path

from swift.common.ring import RingBuilder  # type: ignore[import-not-found]

KINDS = ("proxy", "account", "container", "object")

SWIFT = """\
[swift-hash]
swift_hash_path_suffix = holdfast
swift_hash_path_prefix = holdfast
[storage-policy:0]
name = default
default = yes
"""

STORAGE = """\
[DEFAULT]
swift_dir = {home}/etc
devices = {home}/srv
mount_check = false
bind_ip = 127.0.0.1
bind_port = {port}
workers = 0
user = {user}
log_level = WARNING
fallocate_reserve = 0
[pipeline:main]
pipeline = {kind}-server
[app:{kind}-server]
use = egg:swift#{kind}
"""

PROXY = """\
[DEFAULT]
swift_dir = {home}/etc
bind_ip = {address}
bind_port = {port}
workers = 0
user = {user}
log_level = WARNING
[pipeline:main]
pipeline = catch_errors gatekeeper listing_formats s3api tempauth copy slo symlink versioned_writes proxy-server
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
[filter:catch_errors]
use = egg:swift#catch_errors
[filter:gatekeeper]
use = egg:swift#gatekeeper
[filter:listing_formats]
use = egg:swift#listing_formats
[filter:s3api]
use = egg:swift#s3api
s3_acl = false
location = us-east-1
allow_multipart_uploads = true
[filter:tempauth]
use = egg:swift#tempauth
user_{account}_{name} = {secret} .admin
[filter:copy]
use = egg:swift#copy
[filter:slo]
use = egg:swift#slo
[filter:versioned_writes]
use = egg:swift#versioned_writes
allow_object_versioning = true
[filter:symlink]
use = egg:swift#symlink
"""


def configure(home: Path, address: str, ports: dict[str, int]) -> None:
    account, _, name = os.environ["S3_KEY"].partition(":")
    secret = os.environ["S3_SECRET"]
    if not (account and name and secret) or "_" in account:
        raise SystemExit(
            "the access key must be ACCOUNT:NAME, without an underscore in ACCOUNT, and a secret be given"
        )
    etc = home / "etc"
    etc.mkdir(parents=True, exist_ok=True)
    (home / "srv" / "d1").mkdir(parents=True, exist_ok=True)
    (etc / "swift.conf").write_text(SWIFT)
    for kind in KINDS:
        text = (PROXY if kind == "proxy" else STORAGE).format(
            home=home,
            kind=kind,
            port=ports[kind],
            address=address,
            user=getpass.getuser(),
            account=account,
            name=name,
            secret=secret,
        )
        (etc / f"{kind}-server.conf").write_text(text)
    for kind in KINDS[1:]:
        place = {"ip": "127.0.0.1", "port": ports[kind]}
        replication = {f"replication_{word}": value for word, value in place.items()}
        device = {"id": 0, "region": 1, "zone": 1, "device": "d1", "weight": 1.0, "meta": ""}
        builder = RingBuilder(4, 1, 0)
        builder.add_dev({**device, **place, **replication})
        builder.rebalance()
        builder.get_ring().save(str(etc / f"{kind}.ring.gz"))


if __name__ == "__main__":
    configure(Path(sys.argv[1]), sys.argv[2], dict(zip(KINDS, map(int, sys.argv[3:]), strict=True)))
