"""The runtime directory: where one run's ring, journal and socket lie on this machine, and who may touch them.

    /dev/shm/holdfast-<uid>/            base: made 0700; an existing one must not let strangers plant names in it
        <run key>/                      one run: 0700, ours; every file in it is opened without following links

The run key comes from the store's URL, so that a stager finds the flusher of its own run without configuration.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from holdfast.errors import ConfigError, StoreError
from holdfast.store import normalise_url

_KEY_DIGITS = 16
_OF_SHARE = re.compile(r"(.+)-([1-9]\d{0,3})", re.ASCII)
_PLANTED = frozenset(
    {errno.ELOOP, errno.EISDIR, errno.ENOTDIR, errno.ENXIO, errno.ENODEV, errno.EACCES, errno.EPERM}
)
"""Errors of `open` for a file of the wrong kind."""
_ADVICE = {
    errno.EMFILE: "this process has too many open files; raise its limit (ulimit -n, LimitNOFILE=)",
    errno.ENFILE: "this machine has too many open files; end what holds them, or raise fs.file-max",
    errno.ENOSPC: "no room or no inodes are left there; make room (df, df -i), or set runtime_dir",
    errno.EDQUOT: "the quota there is used up; make room, or set runtime_dir",
    errno.ENOMEM: "the machine is out of memory; make room",
    errno.EROFS: "it is mounted read-only; mount it for writing, or set runtime_dir",
}


def run_key(store_url: str) -> str:
    """Return the name of a run's directory; equal for two spellings of the same store, `/mnt/run` and
    `file:///mnt/run/`. Raises `ConfigError` if the URL is empty or malformed.
    """
    return hashlib.sha256(normalise_url(store_url).encode()).hexdigest()[:_KEY_DIGITS]


def runtime_directory(store_url: str, override: Path | str | None = None, *, share: int = 0) -> Path:
    """Return where the ring of this run lies, or will lie. `override`: base directory instead of
    `/dev/shm/holdfast-<uid>` (setting `runtime_dir`); it should be in memory. `share`: which of several stagers it
    belongs to, from 0; two of them may be on one machine.
    """
    base = Path(override) if override is not None else Path(f"/dev/shm/holdfast-{os.geteuid()}")  # noqa: S108 (0700, owner checked)
    return base.absolute() / (run_key(store_url) + (f"-{share + 1}" if share else ""))


def share_of(directory: Path) -> int:
    """Return which of several stagers a runtime directory belongs to, from 0."""
    match = _OF_SHARE.fullmatch(directory.name)
    return 0 if match is None else int(match[2]) - 1


def share_directories(directory: Path) -> dict[int, Path]:
    """Return the runtime directories of a run's other stagers on this machine, by share. `directory`: the lead's."""
    found: dict[int, Path] = {}
    with contextlib.suppress(OSError):
        for path in directory.parent.iterdir():
            match = _OF_SHARE.fullmatch(path.name)
            if match is not None and match[1] == directory.name:
                found[share_of(path)] = path
    return dict(sorted(found.items()))


def make_private_directory(
    directory: Path, *, what: str = "runtime directory", advice: str = "set runtime_dir"
) -> None:
    """Make `directory` (and its base) for this user alone, or check that an existing one is. `what`, `advice`: for
    messages. Raises `ConfigError`: it is a link, belongs to somebody else, or others may write into it.
    """
    base = directory.parent
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = base.stat()
    # A shared base such as /dev/shm is fine only when it is sticky: nobody else can then rename our directory away.
    shared = stat.S_IMODE(found.st_mode) & 0o022 and not found.st_mode & stat.S_ISVTX
    if found.st_uid not in {0, os.geteuid()} or shared:
        raise ConfigError(
            f"{what} {base}: owner {found.st_uid}, mode {stat.S_IMODE(found.st_mode):04o}; it must "
            f"belong to uid {os.geteuid()} or root and not be writable by others; remove it or {advice}"
        )
    directory.mkdir(mode=0o700, exist_ok=True)
    check_private_directory(directory, what=what, advice=advice)


def check_private_directory(
    directory: Path, *, what: str = "runtime directory", advice: str = "set runtime_dir"
) -> None:
    """Check that `directory` is a directory (no link) of this user with mode 0700. `what`, `advice`: for messages.
    Raises `ConfigError`: it is not; `FileNotFoundError`.
    """
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"{what} {directory}: expected a directory, it is a link or a file; remove it")
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(
            f"{what} {directory}: owner {found.st_uid}, mode {stat.S_IMODE(found.st_mode):04o}; "
            f"expected owner {os.geteuid()}, mode 0700; remove it or {advice}"
        )


@contextlib.contextmanager
def private_file(path: Path, flags: int) -> Iterator[int]:
    """As `open_private_file`, closed at the end of the block."""
    fd = open_private_file(path, flags)
    try:
        yield fd
    finally:
        os.close(fd)


def machine_error(path: Path, error: OSError) -> StoreError:
    """Return the retriable error to raise when the machine, and not the file at `path`, is the cause."""
    advice = _ADVICE.get(error.errno or 0, "it is retried; see the kernel's log (dmesg) if it persists")
    return StoreError(f"{path}: {error.strerror or error}; {advice}", retriable=True)


def open_private_file(path: Path, flags: int) -> int:
    """Open a file of a private directory, without following a link; new files get mode 0600. Raises `ConfigError`: it
    is a link, not a regular file, or not ours; `StoreError`: the machine lacks something, such as descriptors or room,
    so retry; `FileNotFoundError`, `FileExistsError`: as `os.open`.
    """
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except (FileNotFoundError, FileExistsError):
        raise
    except OSError as error:
        if error.errno not in _PLANTED:
            raise machine_error(path, error) from error
        raise ConfigError(f"{path}: cannot be opened: {error.strerror}; remove it") from error
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        os.close(fd)
        raise ConfigError(
            f"{path}: expected a regular file of uid {os.geteuid()}, found uid {found.st_uid}; remove it"
        )
    return fd
