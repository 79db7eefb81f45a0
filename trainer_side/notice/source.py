"""The interface of a source of notices, which the watch asks now and then.

    Watch ── look() every few seconds ──► Source ──► Notice | None
                                            └─ SourceError: it could not be asked; said once, asked again

A source returns the same notice at each poll; the watch passes each on once.
"""

from __future__ import annotations

from typing import Protocol

from holdfast.errors import HoldfastError
from holdfast.notices.notice import Notice


class SourceError(HoldfastError):
    """A source could not be asked, or said what cannot be read. Never leaves the watch."""

    code = "watch"


class NoticeSource(Protocol):
    """A source of preemption notices. For the watch's thread alone."""

    name: str

    def look(self) -> list[Notice]:
        """The notices that it shows now; mostly none.

        SourceError: it did not answer in time, refused, or what it said makes no sense.
        """
        ...
