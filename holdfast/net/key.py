"""The key of a run, with which a stager and its training ranks prove to each other that they belong together."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from holdfast.errors import ConfigError

KEY_CHARACTERS_MIN = 32  # the stager's proof allows offline guesses, which would find a short key
_FILE_BYTES_MAX = 4096
_RANDOM_BYTES = 32


def new_key() -> str:
    """Make a key of 256 random bits, as text without spaces."""
    return secrets.token_urlsafe(_RANDOM_BYTES)


def read_key(key: str | None, key_file: Path | None) -> bytes:
    """Read the key from setting or file; empty without either. Raises `ConfigError`: both, too short, not private."""
    if key is not None and key_file is not None:
        raise ConfigError("key and key_file are both set; set one of them")
    if key_file is not None:
        key = _read_key_file(key_file)
    if key is None:
        return b""
    key = key.strip()
    if len(key) < KEY_CHARACTERS_MIN:
        where = f"in {key_file}" if key_file is not None else "in HOLDFAST_KEY"
        raise ConfigError(
            f"the key {where} has {len(key)} characters, expected at least {KEY_CHARACTERS_MIN}; "
            "`holdfast stager --new-key` prints a good one"
        )
    return key.encode()


def _read_key_file(path: Path) -> str:
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(
            f"key_file {path}: {error.strerror}; it must be a file with the key in it"
        ) from None
    # Kubernetes mounts a secret readable for its group (fsGroup), so only world-readable files are refused.
    if stat.S_ISREG(mode) and mode & stat.S_IROTH:
        raise ConfigError(f"key_file {path}: every user of this machine may read it; run `chmod 600 {path}`")
    if len(content) > _FILE_BYTES_MAX:
        raise ConfigError(f"key_file {path}: more than {_FILE_BYTES_MAX} bytes, expected a key alone")
    try:
        return content.decode("ascii")
    except UnicodeDecodeError:
        raise ConfigError(f"key_file {path}: bytes that are not ASCII, expected a key alone") from None
