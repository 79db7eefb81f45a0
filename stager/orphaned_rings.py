"""Rings on this machine whose flusher is gone, of other shares of the run, with checkpoints in them.

A share that this job does not have is nobody's: its ring needs a flusher, or the checkpoints in it are never whole.
The ring of another stager of this job is left to that stager, which finds it if it runs on this machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from holdfast.errors import ConfigError, HoldfastError
from holdfast.image.shares import ShareNumber
from holdfast.ring.checkpoint_record import checkpoint_names
from holdfast.ring.directory import check_private_directory, runtime_directory, share_directories
from holdfast.ring.side_files import read_writers
from holdfast.telemetry.status_socket import ask, socket_path

_ANSWER_SECONDS_MAX = 2.0


class OrphanedRing(NamedTuple):
    """See the module. `share`: to start its flusher with; `has_stager`: whether this job has a stager for that, on
    whatever machine.
    """

    directory: Path
    share: ShareNumber
    has_stager: bool

    def command(self, store: str) -> str:
        """The line for a person to type, which publishes what is in it."""
        share = f" --share {self.share}" if self.share.writers > 1 else ""
        return f"holdfast flusher --store {store}{share}"


def orphaned_rings(store: str, runtime_dir: Path | None, own: ShareNumber) -> list[OrphanedRing]:
    """The orphaned rings of a run, by share. `own`: the share of the stager that asks."""
    lead = runtime_directory(store, runtime_dir)
    places = {0: lead, **share_directories(lead)}
    found = []
    for index, directory in places.items():
        if index == own.index or not _is_left(directory):
            continue
        before = max(read_writers(directory, attempt) for attempt, _ in checkpoint_names(directory))
        has_stager = index < own.writers
        writers = own.writers if has_stager else max(before, index + 1)
        found.append(OrphanedRing(directory, ShareNumber(index, writers), has_stager))
    return found


def _is_left(directory: Path) -> bool:
    try:
        check_private_directory(directory)
        has_ring = (directory / "journal").exists() and bool(checkpoint_names(directory))
        return has_ring and ask(socket_path(directory, "flusher"), seconds_max=_ANSWER_SECONDS_MAX) is None
    except (FileNotFoundError, ConfigError):
        return False  # none, or another user's
    except HoldfastError:
        return False  # there is one, and it does not answer
