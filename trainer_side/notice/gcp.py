"""Google Cloud: `instance/preempted` of the metadata server, TRUE from the moment of the notice on.

A preempted VM has 30 seconds (best effort) from then on: ACPI G2 first, then the power is cut. The server does not say
when the notice began, so the deadline counts from the first TRUE, and is late by at most one poll.
`GCE_METADATA_HOST` moves the server, as for Google's own libraries.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from holdfast.notices.notice import Notice, NoticeKind
from trainer_side.notice.http import MetadataServer
from trainer_side.notice.watch import SourceError

_HOST = "169.254.169.254"
_HOST_VARIABLE = "GCE_METADATA_HOST"
_PREEMPTED = "/computeMetadata/v1/instance/preempted"
_HEADERS = {"Metadata-Flavor": "Google"}
_PREEMPTION_SECONDS = 30.0


class Gcp:
    """A `NoticeSource`. A request takes at most `seconds_max`."""

    name = "gcp"

    def __init__(
        self, environ: Mapping[str, str], *, seconds_max: float = 2.0, clock: Callable[[], float] = time.time
    ) -> None:
        self._server = MetadataServer(
            f"http://{environ.get(_HOST_VARIABLE) or _HOST}", seconds_max=seconds_max
        )
        self._clock = clock
        self._first_seen_at: float | None = None

    def poll(self) -> list[Notice]:
        answer = self._server.request(_PREEMPTED, headers=_HEADERS)
        body = answer.body.strip()
        if answer.status != 200 or body not in {"TRUE", "FALSE"}:
            raise SourceError(
                f"{self._server.url}{_PREEMPTED}: answered {answer.status} {body!r:.80}, expected TRUE or FALSE"
            )
        if body == "FALSE":
            self._first_seen_at = None
            return []
        self._first_seen_at = self._clock() if self._first_seen_at is None else self._first_seen_at
        deadline_unix = self._first_seen_at + _PREEMPTION_SECONDS
        return [Notice(NoticeKind.TERMINATE, deadline_unix, self.name, "instance/preempted")]

    def is_present(self) -> bool:
        """Whether the server is there and is Google's."""
        try:
            self.poll()
        except SourceError:
            return False
        return True
