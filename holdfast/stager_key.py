"""The key that a stager makes if none is configured; only ranks of the same user on the same machine can read it.

    stager, listening at 127.0.0.1:29411 ─► /dev/shm/holdfast-UID/stager-29411.key, mode 0600 ─► ranks of this user

Any local user can connect to a loopback address. Without a key, such a client could take the job's place and read every
byte of a checkpoint.
"""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.config import default_runtime_dir
from holdfast.errors import ConfigError
from holdfast.net.address import Address
from holdfast.net.key import new_key, read_key
from holdfast.ring.directory import make_private_directory, open_private_file


def stager_key_path(address: Address) -> Path:
    """Return the path of the key file; it does not depend on the setting `runtime_dir`."""
    return default_runtime_dir() / f"stager-{address.port}.key"


class StagerKey:
    """Key file for the ranks of a stager at `address`, until `close`. Raises `ConfigError`: it cannot be created."""

    def __init__(self, address: Address) -> None:
        self._path = stager_key_path(address)
        self.key = new_key().encode()
        try:
            make_private_directory(self._path.parent)
            self._path.unlink(missing_ok=True)  # left by a killed stager: this stager has the port now
            file = open_private_file(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            try:
                os.write(file, self.key)
            finally:
                os.close(file)
        except OSError as error:
            raise ConfigError(
                f"stager setting key: not set, and a key file cannot be created in {self._path.parent} "
                f"({error.strerror or error}); set one for stager and ranks in HOLDFAST_KEY_FILE (`holdfast stager "
                "--new-key`)"
            ) from error

    def close(self) -> None:
        """Remove the key file, unless another stager has replaced it."""
        try:
            if self._path.read_bytes() == self.key:
                self._path.unlink()
        except OSError:
            return


def read_stager_key(address: Address) -> bytes:
    """Read the key of this user's stager, which writes it before it answers. Raises `ConfigError`: not found."""
    path = stager_key_path(address)
    try:
        file = open_private_file(path, os.O_RDONLY)
    except FileNotFoundError:
        raise ConfigError(
            f"the stager at {address} and this rank need the same key, but {path} does not exist: the stager was "
            "given a key, or another user or another machine runs it; give this rank its key in HOLDFAST_KEY or "
            "HOLDFAST_KEY_FILE"
        ) from None
    os.close(file)
    return read_key(None, path)
