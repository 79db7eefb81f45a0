"""The interface of a source of notices, which the watch polls.

    Watch ── poll() every few seconds ──► Source ──► notices, mostly none
                                            └─ SourceError: the poll failed; logged once, and retried

A source returns the same notice at each poll; the watch passes each on once.
"""

from __future__ import annotations

from typing import Protocol

from holdfast.errors import HoldfastError
from holdfast.notices.notice import Notice


class SourceError(HoldfastError):
    """A source could not be polled, or gave an unreadable answer. Never leaves the watch."""

    code = "watch"


class NoticeSource(Protocol):
    """A source of preemption notices. For the watch's thread alone."""

    name: str

    def poll(self) -> list[Notice]:
        """Return the notices that the source shows now; mostly none.

        SourceError: it did not answer in time, refused, or gave an unreadable answer.
        """
        ...
