"""Brings the stager's public SSH key to the trainers: mpirun on the stager starts their ranks by ssh.

    stager: ssh-keygen, once ──► s3://bucket/project/run/cluster/stager.pub ──► trainers: authorized_keys, every minute

Only the stager's role may write there; no private key leaves a machine. A replacement stager publishes a new key, which
the trainers install within a minute. Runs as the user holdfast, by the timer of the same name.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

_KEY_BYTES_MAX = 4096
_KEY = re.compile(rb"ssh-ed25519 [A-Za-z0-9+/=]{68} [\x21-\x7e]*\n")


def main(role: str) -> None:
    """Publish this node's key (`stager`), or install the stager's (`train`)."""
    import boto3

    where = urlsplit(os.environ["HOLDFAST_CLUSTER_URL"])
    bucket, name = where.netloc, f"{where.path.lstrip('/')}/stager.pub"
    folder = Path.home() / ".ssh"
    client = boto3.client("s3")
    if role == "stager":
        client.put_object(Bucket=bucket, Key=name, Body=_own_key(folder))
        return
    from botocore.exceptions import ClientError

    try:
        key = client.get_object(Bucket=bucket, Key=name)["Body"].read(_KEY_BYTES_MAX)
    except ClientError as error:
        if error.response["Error"]["Code"] != "NoSuchKey":
            raise
        return  # the stager is not up yet; the timer will run this again
    if _KEY.fullmatch(key) is None:
        sys.exit(f"s3://{bucket}/{name}: expected one ssh-ed25519 public key; not taken over")
    _replace(folder / "authorized_keys", key)


def _own_key(folder: Path) -> bytes:
    private = folder / "id_ed25519"
    if not private.exists():
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "holdfast-stager", "-f", str(private)]
        subprocess.run(command, check=True)
    return private.with_suffix(".pub").read_bytes()


def _replace(path: Path, content: bytes) -> None:
    if path.exists() and path.read_bytes() == content:
        return
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_bytes(content)
    temporary.chmod(0o600)
    temporary.replace(path)


if __name__ == "__main__":
    main(sys.argv[1])
