"""Rings on this machine with checkpoints and without a flusher, of other shares of the run.

A ring whose share no stager of this job has needs a flusher, or its checkpoints are never whole. The ring of another
stager's share is left to that stager, which finds the ring if it runs on this machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from holdfast.errors import ConfigError, HoldfastError
from holdfast.image.shares import ShareNumber
from holdfast.ring.checkpoint_record import checkpoint_ids
from holdfast.ring.directory import check_private_directory, runtime_directory, share_directories
from holdfast.ring.side_files import read_writers
from holdfast.telemetry.status_socket import request_status, socket_path

_ANSWER_SECONDS_MAX = 2.0


class OrphanedRing(NamedTuple):
    """A ring without a flusher. `share`: to start one with. `has_stager`: this job has a stager with that share, maybe
    on another machine.
    """

    directory: Path
    share: ShareNumber
    has_stager: bool

    def command(self, store: str) -> str:
        """The command line that publishes the ring's checkpoints, for people to type."""
        share = f" --share {self.share}" if self.share.writers > 1 else ""
        return f"holdfast flusher --store {store}{share}"


def orphaned_rings(store: str, runtime_dir: Path | None, own: ShareNumber) -> list[OrphanedRing]:
    """Find the orphaned rings of a run, by share. `own`: the share of the calling stager."""
    lead = runtime_directory(store, runtime_dir)
    places = {0: lead, **share_directories(lead)}
    found = []
    for index, directory in places.items():
        if index == own.index or not _is_orphaned(directory):
            continue
        before = max(read_writers(directory, attempt) for attempt, _ in checkpoint_ids(directory))
        has_stager = index < own.writers
        writers = own.writers if has_stager else max(before, index + 1)
        found.append(OrphanedRing(directory, ShareNumber(index, writers), has_stager))
    return found


def _is_orphaned(directory: Path) -> bool:
    try:
        check_private_directory(directory)
        has_ring = (directory / "journal").exists() and bool(checkpoint_ids(directory))
        return (
            has_ring
            and request_status(socket_path(directory, "flusher"), seconds_max=_ANSWER_SECONDS_MAX) is None
        )
    except (FileNotFoundError, ConfigError):
        return False  # no such directory, or another user's
    except HoldfastError:
        return False  # its flusher lives, and does not answer
