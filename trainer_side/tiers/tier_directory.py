"""The directory of the slot files of one run, their names, and the right to write them.

    <directory>/<run>-<8 hex of its URL>/                        0700, ours
        rank-00003.lock                                          held by the writer of rank 3; its pid, for people
        rank-00003-<8 hex of layout and slots>.slots             a slot file
        rank-00003-<8 hex of layout and slots>-2.slots           the same, beside a damaged one
        rank-00003-….slots.new                                   being made; ignored until renamed
        rank-00003.doubts                                        steps that may be torn, as known to rank 3
        rank-00003-<8 hex of layout and slots>.1.proof           what rank 3 used in the step after that in slot 1

The lock is the kernel's (`flock`): it always ends with its holder, so there is no stale lock.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import time
import weakref
from pathlib import Path
from typing import ClassVar

from holdfast.errors import ConfigError, StoreError
from holdfast.ring.directory import check_private_directory, make_private_directory, open_private_file
from holdfast.ring.doubts import DoubtedSteps, from_bytes, to_bytes
from holdfast.store import normalise_url
from holdfast.store.file_system import IN_MEMORY, file_system_of, mount_of
from holdfast.store.posix_errors import translate_errors
from holdfast.store.posix_io import sync_directory
from trainer_side.state import accelerator

_log = logging.getLogger("holdfast.trainer")

_SLOTS_NAME = re.compile(r"rank-([0-9]{5,10})-([0-9a-f]{8})(?:-([0-9]{1,4}))?\.slots")
_KEY_DIGITS = 8
_NAME_CHARACTERS_MAX = 100
_PID_BYTES_MAX = 32
_DOUBTS_BYTES_MAX = 1 << 20
_LOCK_PAUSE_SECONDS = 0.02
# The kernel's own setting can only forbid huge pages on a tmpfs (`deny`) or force them. Otherwise the mount option
# `huge` decides, by default `never`; a tier requests huge pages for each slot file, so `advise` is enough.
_SHMEM_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_GIVE = frozenset({"always", "within_size", "advise"})


def not_in_memory_reason(name: str, directory: Path) -> str | None:
    """Return the error about a memory tier's directory, with the remedy; None if the directory is in memory."""
    kind = file_system_of(directory)
    if kind in IN_MEMORY:
        return None
    return (
        f"tier {name}: {directory} is on {kind}, which is not in memory; choose a directory on a tmpfs (`memory` alone "
        f"has one), or mount one (mount -t tmpfs -o size=SIZE tmpfs {directory}); for slices on a disk set "
        f"nvme:{directory} or file:{directory}"
    )


def refuse_disk(name: str, directory: Path, *, warn: bool = False) -> None:
    """Refuse (ConfigError) a memory tier on a disk if this rank trains on a device; else log it if `warn`."""
    problem = not_in_memory_reason(name, directory)
    if problem is None:
        return
    # CUDA copies straight into the slots and locks the pages of a tmpfs. CUDA refuses to lock a mapped file on a disk,
    # and copies into unlocked memory are slow and block the CPU.
    if accelerator.kind() is not None:
        raise ConfigError(f"{problem}. A device cannot copy into mapped files on {file_system_of(directory)}")
    if warn:
        _log.warning("%s. Each checkpoint goes through the page cache to the disk", problem)


def small_pages_reason(directory: Path) -> tuple[str, str] | None:
    """Return why slots in this directory get small pages, and the remedy; None: huge pages, or no tmpfs."""
    mount, forced = mount_of(directory), _chosen(_SHMEM_ENABLED)
    if mount.kind != "tmpfs" or forced == "force":
        return None
    if forced == "deny":
        return f"{_SHMEM_ENABLED} is deny", f"echo never > {_SHMEM_ENABLED}"
    option = next((one[5:] for one in mount.options.split(",") if one.startswith("huge=")), "never")
    if option in _GIVE or forced is None:
        return None
    return f"{mount.point} is mounted with huge={option}", f"mount -o remount,huge=within_size {mount.point}"


def _chosen(setting: Path) -> str | None:
    """Return the choice in brackets; None on a kernel without huge pages for shared memory."""
    try:
        found = re.search(r"\[(\w+)\]", setting.read_text())
    except OSError:
        return None
    return found[1] if found else None


class TierDirectory:
    """The directory of one run in a tier's directory. ConfigError: the run's URL is empty or malformed.

    `make` may also make `parents` directories above, for this user alone.
    """

    def __init__(self, directory: Path, run_url: str, *, parents: int = 0) -> None:
        self._parents = parents
        self.base = directory.absolute()
        url = normalise_url(run_url)
        self.run = url.rstrip("/").rpartition("/")[2] or "run"  # for people
        self.run_digest = hashlib.sha256(url.encode()).digest()  # equal for two spellings of one URL
        safe = re.sub(r"[^A-Za-z0-9._-]", "_", self.run)[:_NAME_CHARACTERS_MAX]
        self.directory = self.base / f"{safe}-{self.run_digest.hex()[:_KEY_DIGITS]}"

    def make(self) -> None:
        """Make the directory of the run, durably, or check that an existing one is ours. ConfigError: neither works."""
        if self._parents:
            for directory in reversed([self.base, *self.base.parents][: self._parents + 1]):
                make_private_directory(directory, what="local tier", advice="choose another directory")
        elif not self.base.parent.is_dir():
            raise ConfigError(
                f"local tier: neither {self.base} nor {self.base.parent} exists; mount the device, or make a directory"
            )
        fresh = not self.directory.exists()
        try:
            make_private_directory(self.directory, what="local tier", advice="choose another directory")
        except OSError as error:
            raise ConfigError(
                f"local tier: cannot make {self.directory}: {error.strerror}; give uid {os.geteuid()} write permission "
                f"in {self.base}, or choose another directory"
            ) from error
        if fresh:
            with translate_errors("make", self.directory):
                sync_directory(self.base)
                sync_directory(self.base.parent)

    def check(self) -> bool:
        """Whether the directory of the run exists. ConfigError: it exists, but is not ours alone."""
        try:
            check_private_directory(self.directory, what="local tier", advice="choose another directory")
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise ConfigError(
                f"local tier: cannot look into {self.base}: {error.strerror}; give uid {os.geteuid()} permission, or "
                "choose another directory"
            ) from error
        return True

    def slot_path(self, rank: int, layout_digest: str, slots: int, number: int = 1) -> Path:
        """Return the name of a slot file; `number` is above 1 if an earlier file must stay as it is."""
        key = hashlib.sha256(f"{layout_digest} {slots}".encode()).hexdigest()[:_KEY_DIGITS]
        beside = f"-{number}" if number > 1 else ""
        return self.directory / f"rank-{rank:05}-{key}{beside}.slots"

    def slot_paths(self) -> list[tuple[Path, int]]:
        found = [(path, _SLOTS_NAME.fullmatch(path.name)) for path in sorted(self.directory.iterdir())]
        return [(path, int(match[1])) for path, match in found if match is not None]

    def write_doubt(self, rank: int, steps: DoubtedSteps) -> None:
        """Add to the doubts of this rank, durably. Only for the holder of the rank's lock."""
        path = self.directory / f"rank-{rank:05}.doubts"
        known = _doubts_in(path)
        if steps in known:
            return
        self.replace_file(path, to_bytes([*known, steps]))

    def replace_file(self, path: Path, data: bytes) -> None:
        """Replace a small file of this directory, whole and durably. Only for the holder of the rank's lock."""
        fresh = path.with_name(f"{path.name}.new")
        with translate_errors("write", fresh):
            descriptor = open_private_file(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            with open(descriptor, "wb") as file:  # noqa: PTH123 (a descriptor, opened without following links)
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            fresh.rename(path)
            sync_directory(self.directory)

    def doubts(self) -> list[DoubtedSteps]:
        """Return the doubts known to the ranks of this machine."""
        paths = sorted(self.directory.glob("rank-*.doubts"))
        return list(dict.fromkeys(one for path in paths for one in _doubts_in(path)))

    def remove_unfinished(self, rank: int) -> None:
        """Remove files that an earlier holder of this rank's lock left unfinished."""
        with translate_errors("remove", self.directory):
            for path in self.directory.glob(f"rank-{rank:05}*.slots.new"):
                path.unlink(missing_ok=True)


def _doubts_in(path: Path) -> list[DoubtedSteps]:
    try:
        with open(open_private_file(path, os.O_RDONLY), "rb") as file:  # noqa: PTH123 (as above)
            return from_bytes(file.read(_DOUBTS_BYTES_MAX), source=str(path))
    except FileNotFoundError:
        return []


class RankLock:
    """The right to write the slot files of one rank of a run.

    Waits at most `seconds_max` for the lock: a killed process holds it until its memory is freed, and the next process
    may start before that. ConfigError: a living process holds the lock; the message names its pid.
    """

    _held: ClassVar[weakref.WeakSet[RankLock]] = weakref.WeakSet()

    def __init__(self, place: TierDirectory, rank: int, *, seconds_max: float = 0.0) -> None:
        deadline = time.monotonic() + seconds_max
        path = place.directory / f"rank-{rank:05}.lock"
        with translate_errors("lock", path):
            self._fd = open_private_file(path, os.O_RDWR | os.O_CREAT)
        try:
            while True:
                is_last = time.monotonic() >= deadline
                try:
                    fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if is_last:
                        raise
                time.sleep(_LOCK_PAUSE_SECONDS)
        except BlockingIOError:
            pid = os.pread(self._fd, _PID_BYTES_MAX, 0).decode("ascii", "replace").strip() or "unknown"
            self.release()
            raise ConfigError(
                f"local tier: process {pid} is writing the slices of rank {rank} of run {place.run} in "
                f"{place.directory}; end it, or give this one another directory"
            ) from None
        except OSError as error:
            self.release()
            raise StoreError(
                f"local tier: cannot lock {path}: {error.strerror}; choose a directory whose file system has locks"
            ) from error
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)
        RankLock._held.add(self)

    def release(self) -> None:
        RankLock._held.discard(self)
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    @classmethod
    def _release_in_child(cls) -> None:
        # A child (a data loader's worker) shares its parent's lock, and would hold it after the parent's death.
        for lock in list(cls._held):
            lock.release()


os.register_at_fork(after_in_child=RankLock._release_in_child)
